"""Sweeps: points, rows, workers that crash or hang, resuming, budgets."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit import sweep
from labkit.check import check_run
from labkit.errors import InputError
from labkit.experiments.launch import _remarks
from labkit.progress import progress
from labkit.results import load_runs, read_sidecar
from labkit.sweep import grid, point_key
from tests import sweep_points
from tests.swept import contexts


def test_grid_order_and_single_values():
    assert grid(a=[1, 2], b="x", c=range(2)) == [
        {"a": 1, "b": "x", "c": 0},
        {"a": 1, "b": "x", "c": 1},
        {"a": 2, "b": "x", "c": 0},
        {"a": 2, "b": "x", "c": 1},
    ]
    with pytest.raises(InputError, match="b: wanted at least one value"):
        grid(a=1, b=[])


def test_point_key_is_stable_and_tells_types_apart():
    assert point_key({"b": 1, "a": "x"}, "f00") == point_key({"a": "x", "b": 1}, "f00") == 'a="x",b=1@f00'
    different = [
        {"a": 1},
        {"a": "1"},
        {"a": 1.0},
        {"a": None},
        {"a": True},
        {"a": '1",b="2'},
        {"a": "1", "b": "2"},
    ]
    assert len({point_key(point) for point in different}) == len(different)


def test_rows_sidecar_and_check(go, provenance):
    result = go(contexts(2, 0, 1, other="not a column"), sweep_points.measure_with_fields, seed=5)
    assert result.complete
    assert (result.counts, result.num_measured, result.num_left) == ({"ok": 3}, 3, 0)
    rows = load_runs("loop", result.path)
    assert rows.context_len.tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1]
    assert rows.step_ms.tolist() == [3, 4, 5, 1, 2, 3, 2, 3, 4]
    assert set(rows.origin) == {"measured"}
    assert set(rows.quality) == {"ok"}
    assert set(rows.group) == {"both"}
    assert rows.drafter.isna().all()
    assert 'other="not a column",seed=5' in rows.point_key[0]
    assert check_run(result.path) == []
    sidecar = read_sidecar(result.path)
    assert sidecar["grid"] == {
        "seed": [5],
        "context_len": [2, 0, 1],
        "batch_size": [1],
        "other": ["not a column"],
    }
    assert sidecar["provenance"] == provenance
    assert sidecar["complete"]
    assert sidecar["counts"] == {"ok": 3}
    assert len(sidecar["sessions"]) == 1
    gpu = provenance["device"]["slug"]
    assert result.path.parts[-3:] == ("loop", gpu, f"{result.run_id}.parquet")
    assert sorted(p.suffix for p in result.path.parent.iterdir()) == [".json", ".jsonl", ".parquet"]


def test_default_group_is_one_per_point(go):
    rows = load_runs("loop", go(contexts(0, 1)).path)
    assert rows.group.nunique() == 2
    assert rows.groupby("group").point_key.nunique().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("unsupported", "unsupported", "head_dim 80 needs padding"),
        ("unavailable", "unsupported", "backend 'flashinfer' is unavailable: no GPU"),
        ("memory", "oom", "MemoryError"),
        ("torch_oom", "oom", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("cpu_oom", "oom", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 1 TB"),
        ("wrong", "wrong", "row 3 differs"),
        ("error", "error", "KeyError: 'no such layer'"),
        ("home", "error", "OSError: cannot read ~/models/x, token=<secret>"),
    ],
)
def test_exceptions_become_rows(go, fault, status, reason):
    points = [*contexts(0, fault="ok"), *contexts(0, fault=fault), *contexts(1, fault="ok")]
    result = go(points, sweep_points.measure_fault)
    rows = load_runs("loop", result.path)
    assert rows.groupby("point_key", sort=False).status.first().tolist() == ["ok", status, "ok"]
    (row,) = rows[rows.status != "ok"].to_dict("records")
    assert row["reason"] == reason
    assert row["context_len"] == 0
    assert check_run(result.path) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "step_ms: is NaN or infinite"),
        ("unknown", "measured step_mss: wanted columns of loop"),
        ("float", "q_len: wanted int64"),
        ("negative", "step_ms: is negative"),
        ("duplicate", "sample: stored twice"),
        ("empty", "no samples"),
        ("reserved", "measured status"),
        ("object", "step_ms: wanted double"),
    ],
)
def test_values_that_break_the_contract_are_no_result(go, fault, reason):
    result = go([*contexts(0, fault="ok"), *contexts(0, fault=fault)], sweep_points.measure_bad_values)
    rows = load_runs("loop", result.path)
    assert result.counts == {"error": 1, "ok": 1}
    assert reason in rows[rows.status == "error"].reason.item()
    assert check_run(result.path) == []


def test_worker_survives_crashes_and_hangs(go):
    faults = ["ok", "segfault", "exit", "device", "ok2", "hang", "ok3", "ok4"]
    points = [{**p, "fault": f.rstrip("234"), "name": f} for f in faults for p in contexts(faults.index(f))]
    begin = time.monotonic()
    result = go(points, sweep_points.measure_fault, executor="local", timeout_s=2.0)
    assert time.monotonic() - begin < 20
    rows = load_runs("loop", result.path).drop_duplicates("point_key")
    assert rows.status.tolist() == ["ok", "crashed", "crashed", "crashed", "ok", "timeout", "ok", "ok"]
    assert rows.reason.tolist()[1] == "worker killed by SIGSEGV"
    assert rows.reason.tolist()[2] == "worker exited with code 7"
    assert "illegal memory access" in rows.reason.tolist()[3]
    assert rows.reason.tolist()[5] == "no result within 2 s"
    pids = rows.prompt_id.tolist()
    assert len({pids[0], pids[4], pids[6]}) == 3  # started anew after each fault
    assert pids[6] == pids[7]  # and kept otherwise
    assert not any(Path(f"/proc/{pid}").exists() for pid in (pids[0], pids[4], pids[6]))
    attempts = [json.loads(line) for line in result.path.with_suffix(".jsonl").read_text().splitlines()]
    assert "Segmentation fault" in next(a["detail"] for a in attempts if a.get("reason", "").endswith("SIGSEGV"))


def test_noise_on_standard_output_does_not_reach_the_pipe(go):
    assert go(contexts(0, 1), sweep_points.measure_with_fields, executor="local").counts == {"ok": 2}


def test_nothing_to_do_is_said(go, capsys):
    first = go(contexts(0, 1))
    again = go(contexts(1, 0))  # the order is no part of the plan
    assert (again.run_id, again.num_measured, again.complete) == (first.run_id, 0, True)
    assert "all 2 points are stored, nothing to measure" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"points": contexts(0, 1, 2)},
        {"seed": 1},
        {"code_digest": "other"},
        {"backend_digest": lambda point: "other"},
        {"resume": False},
        {"measure": sweep_points.measure_with_fields},
    ],
)
def test_another_plan_or_environment_is_another_run(go, change):
    first = go(contexts(0, 1))
    options = {"points": contexts(0, 1), "measure": sweep_points.measure, **change}
    second = go(options.pop("points"), options.pop("measure"), **options)
    assert second.run_id != first.run_id
    assert second.num_measured == sum(second.counts.values())


def test_another_driver_is_another_run(go, provenance):
    first = go(contexts(0))
    changed = {**provenance, "device": {**provenance["device"], "driver": "1.2.3"}}
    assert go(contexts(0), provenance=changed).run_id != first.run_id
    assert go(contexts(0), provenance={**provenance, "time": "later", "commit": "x"}).run_id == first.run_id


def test_failed_points_get_one_more_attempt_and_final_ones_none(go, tmp_path):
    points = [*contexts(0, mark=str(tmp_path / "a")), *contexts(1, mark=str(tmp_path / "b"))]
    first = go(points, sweep_points.measure_once_broken)
    assert first.counts == {"error": 2}
    assert first.complete
    second = go(points, sweep_points.measure_once_broken)
    assert (second.run_id, second.counts, second.num_measured) == (first.run_id, {"ok": 2}, 2)
    rows = load_runs("loop", second.path)
    assert set(rows.status) == {"ok"}
    assert len(rows) == 6
    final = [*contexts(0, fault="wrong"), *contexts(0, fault="unsupported"), *contexts(0, fault="memory")]
    assert go(final, sweep_points.measure_fault).num_measured == 3
    assert go(final, sweep_points.measure_fault).num_measured == 0


def test_budget_leaves_the_rest_to_be_resumed(go, capsys):
    points = contexts(*range(8), sleep_s=0.2)
    first = go(points, budget_s=0.7)
    assert 1 <= first.num_measured <= 3
    assert first.num_left == 8 - first.num_measured
    assert not first.complete
    assert f"budget of 0.7 s, {first.num_left} of 8 points left" in capsys.readouterr().err
    rows = load_runs("loop", first.path)
    assert rows.context_len.unique().tolist() == list(range(first.num_measured))
    assert not read_sidecar(first.path)["complete"]
    assert go(points, budget_s=0).num_measured == 0
    last = go(points)
    assert (last.run_id, last.num_left, last.counts) == (first.run_id, 0, {"ok": 8})
    assert len(read_sidecar(last.path)["sessions"]) == 3


def test_interrupt_leaves_a_whole_run(go, capsys, tmp_path):
    points = contexts(0, 1, 2, 3, mark=str(tmp_path / "mark"))
    with pytest.raises(KeyboardInterrupt):
        go(points, sweep_points.measure_interrupted_once)
    assert "interrupted, 2 of 4 points stored; run again to resume" in capsys.readouterr().err
    (path,) = tmp_path.rglob("*.parquet")
    assert len(load_runs("loop", path)) == 6
    assert check_run(path) == []
    assert go(points, sweep_points.measure_interrupted_once).num_measured == 2


@pytest.mark.parametrize("faults", [("bad_input", "ok"), ("ok", "bad_input")])
def test_a_refused_point_is_a_row_in_any_order(go, faults):
    points = [point for index, fault in enumerate(faults) for point in contexts(index, fault=fault)]
    result = go(points, sweep_points.measure_fault)
    assert result.counts == {"error": 1, "ok": 1}
    assert "model: no such folder" in load_runs("loop", result.path)["reason"].tolist()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"points": []}, "at least one"),
        ({"points": contexts(0) * 2}, "the same point twice"),
        ({"points": [{"status": "ok"}]}, "status cannot be an axis"),
        ({"points": [{"a": float("nan")}]}, "points: wanted"),
        ({"points": [{"a": object()}]}, "points: wanted"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"measure": "no_colon"}, "measure: wanted"),
        ({"measure": "labkit.nowhere:f", "executor": "local"}, "cannot import"),
        ({"measure": lambda point: [], "executor": "local"}, "importable"),
    ],
)
def test_bad_arguments(go, options, problem):
    options = {"points": contexts(0), "measure": sweep_points.measure, **options}
    with pytest.raises(InputError, match=problem):
        go(options.pop("points"), options.pop("measure"), **options)


def test_calibration_is_stored_and_its_noise_floor_reaches_the_measure(go, monkeypatch):
    result = go(contexts(0), sweep_points.measure_noise_floor, calibrate=True)
    assert read_sidecar(result.path)["calibration"] == {"read_gb_per_s": 7.0, "noise_floor_us": 2.0}
    assert set(load_runs("loop", result.path)["quality"]) == {"floor 2.0"}
    assert _remarks(result) == ({}, {"floor 2.0": 1})  # what `labkit run` says at its end
    monkeypatch.setattr(sweep, "CALIBRATE", "tests.sweep_points:no_calibration")
    sidecar = read_sidecar(go(contexts(1), calibrate=True).path)
    assert sidecar["calibration"] is None
    assert sidecar["sessions"][0]["calibration_failed"] == "RuntimeError: no such device"


def test_progress_lines(capsys, monkeypatch):
    now = [0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = progress(10, "loop", initial=4)
    for now[0] in (4, 12, 13):
        bar.update()
    now[0] = 16
    bar.close()
    assert capsys.readouterr().err.splitlines() == ["loop 6/10 00:12 eta 00:24", "loop 7/10 00:16 eta 00:16"]


def test_progress_of_a_sweep_ends_with_all_points(go, capsys):
    go(contexts(0, 1, 2, 3), progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("loop 4/4 ")


def test_sweep_needs_no_torch():
    code = "import labkit.sweep, sys; sys.exit(any(m.split('.')[0] in ('torch', 'triton') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
