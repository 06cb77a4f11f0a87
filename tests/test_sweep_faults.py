"""Every fault of a long sweep: finished points stay as they are, the failed one is a row with a reason, one can resume.

Kills of the whole process are in test_sweep_kill.py, a lost Dask worker in test_scale_out.py.
"""

import json
import os
import time
from pathlib import Path

import pytest

from labkit import executor, journal, results
from labkit.check import check_run
from labkit.errors import InputError
from labkit.provenance import collect
from labkit.results import load_runs
from labkit.sweep import run_sweep
from tests import sweep_points

# What happens in the point -> status, words of the reason, whether a second run tries again.
FAULTS = {
    "torch_oom": ("oom", "CUDA out of memory", False),
    "compile": ("error", "CompilationError: at 3:11: incompatible types", True),
    "device": ("crashed", "CUDA error: an illegal memory access", True),
    "segfault": ("crashed", "worker killed by SIGSEGV", True),
    "killed": ("crashed", "worker killed by SIGKILL (the kernel does so when memory runs out)", True),
    "hang": ("timeout", "no result within 1 s", True),
    "wrong": ("wrong", "row 3 differs", False),
    "timer": ("error", "step_ms: is negative", True),
}


@pytest.fixture(scope="module")
def provenance() -> dict:
    return collect("cpu")


@pytest.fixture
def go(tmp_path, provenance):
    def run(points, measure=sweep_points.measure, **options):
        chosen = {"executor": "in-process", "progress": False, "provenance": provenance, **options}
        return run_sweep(points, measure, experiment="loop", out_dir=tmp_path, **chosen)

    return run


def points(*faults: str) -> list[dict]:
    return [{"context_len": index, "batch_size": 1, "fault": fault} for index, fault in enumerate(faults)]


def contexts(num: int) -> list[dict]:
    return [{"context_len": index, "batch_size": 1} for index in range(num)]


def finished(path: Path) -> dict[str, str]:
    """The journal's lines of the points that are ok."""
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    found = {json.loads(line).get("point_key"): line for line in lines}
    return {key: line for key, line in found.items() if key and json.loads(line)["status"] == "ok"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_point(go, fault):
    status, reason, again = FAULTS[fault]
    given = points("ok", fault, "ok")
    first = go(given, sweep_points.measure_fault, executor="local", timeout_s=1.0)
    rows = load_runs("loop", first.path)
    assert first.counts == {"ok": 2, status: 1}
    assert rows[rows.status == "ok"].groupby("context_len").size().to_dict() == {0: 3, 2: 3}
    assert reason in rows[rows.status == status].reason.iloc[0]
    assert check_run(first.path) == []
    before = finished(first.path)
    second = go(given, sweep_points.measure_fault, executor="local", timeout_s=1.0)
    assert (second.run_id, second.num_measured) == (first.run_id, int(again))
    assert finished(first.path) == before


def test_a_broken_device_gets_a_new_worker(go):
    result = go(points("ok", "ok", "device", "ok"), sweep_points.measure_fault, executor="local")
    rows = load_runs("loop", result.path)
    workers = rows[rows.status == "ok"].groupby("context_len").prompt_id.first()
    assert workers[0] == workers[1] != workers[3]


def disk_full(*arguments):
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_at_compaction_loses_nothing(go, monkeypatch, tmp_path):
    monkeypatch.setattr(results.os, "replace", disk_full)
    with pytest.raises(InputError, match="No space left on device"):
        go(contexts(3))
    monkeypatch.undo()
    (path,) = tmp_path.rglob("*.jsonl")
    before = finished(path)
    assert len(before) == 3
    result = go(contexts(3))
    assert (result.num_measured, result.counts) == (0, {"ok": 3})
    assert finished(path) == before
    assert check_run(result.path) == []


def test_a_disk_that_is_full_while_measuring_loses_only_the_point_at_hand(go, monkeypatch, tmp_path):
    append = journal.Journal.append

    def until_full(self, record):
        if record.get("point", {}).get("context_len") == 2:
            monkeypatch.setattr(journal.os, "write", disk_full)
        append(self, record)

    monkeypatch.setattr(journal.Journal, "append", until_full)
    with pytest.raises(InputError, match=r"the 2 stored points are kept, make room and run again to resume"):
        go(contexts(4))
    monkeypatch.undo()
    (path,) = tmp_path.rglob("*.jsonl")
    before = finished(path)
    assert len(before) == 2
    assert go(contexts(4)).num_measured == 2
    assert before.items() <= finished(path).items()


def test_a_folder_that_becomes_read_only_is_named_and_the_run_goes_on_when_it_can_be_written(go, monkeypatch):
    first = go(contexts(3), budget_s=0)
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *mode)

    monkeypatch.setattr(journal.os, "open", read_only)
    with pytest.raises(InputError, match=f"cannot write .*{first.run_id}.jsonl: Read-only file system"):
        go(contexts(3))
    monkeypatch.undo()
    assert go(contexts(3)).run_id == first.run_id


def test_a_folder_that_cannot_be_made_is_named(provenance):
    with pytest.raises(InputError, match="cannot write /proc/labkit"):
        run_sweep(contexts(1), sweep_points.measure, experiment="loop", out_dir="/proc/labkit", provenance=provenance)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_is_marked_and_changes_no_sample(go, monkeypatch, jump_s):
    class Clock:
        """The system's, set by an hour while the second point runs."""

        monotonic = staticmethod(time.monotonic)
        calls = 0

        @classmethod
        def time(cls) -> float:
            cls.calls += 1
            return time.time() + (jump_s if cls.calls >= 4 else 0)

    monkeypatch.setattr(executor, "time", Clock)
    result = go(contexts(3), sweep_points.measure_with_fields)
    rows = load_runs("loop", result.path)
    assert rows.step_ms.tolist() == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert rows.groupby("context_len").quality.first().tolist() == ["ok", f"clock jumped ({jump_s:+.0f} s)", "ok"]
    assert result.counts == {"ok": 3}
    assert go(contexts(3), sweep_points.measure_with_fields).num_measured == 0


def test_a_run_that_was_begun_in_the_future_is_still_resumed(go, monkeypatch):
    monkeypatch.setattr("labkit.plan.new_run_id", lambda: "29991231T235959Z-abcdef")
    go(contexts(2), budget_s=0)
    monkeypatch.undo()
    assert go(contexts(2)).run_id == "29991231T235959Z-abcdef"
