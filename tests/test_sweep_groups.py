"""Arms of a group are measured in one call, booked one by one, and never compared across calls."""

import json

import pytest

from labkit.results import load_runs
from labkit.sweep import run_sweep

MEASURE = "tests.group_points:interleaved"


def points(*names, group="g"):
    return [{"group": group, "name": name} for name in names]


def run(out_dir, given, measure=MEASURE, **options):
    options = {"executor": "local", "timeout_s": 60.0, "progress": False} | options
    return run_sweep(given, measure, experiment="loop", out_dir=out_dir, **options)


def test_a_group_is_measured_in_one_call_and_one_arm_may_fail_alone(tmp_path):
    result = run(tmp_path, [*points("a", "unsupported", "b"), *points("c", group="h")])
    rows = load_runs("loop", tmp_path)
    assert result.counts == {"ok": 3, "unsupported": 1}
    assert rows[rows.group == "g"].step_ms.dropna().tolist() == [3.0] * 4
    assert rows[rows.group == "h"].step_ms.tolist() == [1.0, 1.0]
    assert rows[rows.status == "unsupported"].reason.tolist() == ["not this shape"]


def test_an_arm_that_kills_the_worker_is_found_and_the_others_are_measured_together(tmp_path):
    result = run(tmp_path, points("a", "killer", "b"))
    rows = load_runs("loop", tmp_path)
    assert result.counts == {"ok": 2, "crashed": 1}
    assert "SIGSEGV" in rows[rows.status == "crashed"].reason.item()
    assert rows[rows.status == "ok"].step_ms.tolist() == [2.0] * 4


def test_a_group_that_was_cut_is_measured_again_as_a_whole(tmp_path):
    result = run(tmp_path, points("a", "unsupported", "b"))
    journal = result.path.with_suffix(".jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    last_arm = [line for line in lines if json.loads(line).get("point", {}).get("name") == "b"]
    journal.write_text("".join(line for line in lines if line not in last_arm))
    again = run(tmp_path, points("a", "unsupported", "b"))
    rows = load_runs("loop", tmp_path)
    assert again.run_id == result.run_id
    assert again.counts == {"ok": 2, "unsupported": 1}
    # Two arms were left to measure: the one that cannot run was not tried again.
    assert rows[rows.status == "ok"].step_ms.tolist() == [2.0] * 4


def test_a_function_that_returns_too_few_results_is_an_error_of_every_arm(tmp_path):
    result = run(tmp_path, points("a", "b"), measure="tests.group_points:short")
    assert result.counts == {"error": 2}
    assert "1 results for a group of 2" in load_runs("loop", tmp_path).reason.iloc[0]


@pytest.mark.parametrize("executor", ["local", "in-process"])
def test_in_process_and_worker_store_the_same_rows(tmp_path, executor):
    measure = MEASURE
    if executor == "in-process":
        from tests.group_points import interleaved as measure
    run(tmp_path, points("a", "b"), measure=measure, executor=executor)
    assert load_runs("loop", tmp_path).step_ms.tolist() == [2.0] * 4
