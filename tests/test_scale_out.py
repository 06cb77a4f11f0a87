"""Many workers: every point once, no device shared, lost workers replaced, the same rows as one worker gives."""

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from labkit.check import check_run
from labkit.errors import InputError
from labkit.executor_dask import local_cluster, visible_devices
from labkit.provenance import collect
from labkit.results import load_runs
from labkit.sweep import grid, point_key, run_sweep
from tests import sweep_points


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_cluster([{}, {}]) as cluster, Client(cluster) as connected:
        connected.wait_for_workers(2, timeout=60)
        yield connected


@pytest.fixture(scope="module")
def provenance() -> dict:
    return collect("cpu")


def contexts(num: int, **more) -> list[dict]:
    return grid(context_len=list(range(num)), batch_size=1, **more)


def go(folder: Path, points: list[dict], measure, provenance: dict, **options):
    given = {"progress": False, "provenance": provenance, **options}
    return run_sweep(points, measure, experiment="loop", out_dir=folder, **given)


def records(path: Path) -> list[dict]:
    lines = map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "point"]


def test_two_workers_store_the_rows_of_one(tmp_path, client, provenance):
    points = contexts(12)
    many = go(tmp_path / "many", points, sweep_points.measure, provenance, executor=client)
    one = go(tmp_path / "one", points, sweep_points.measure, provenance, executor="in-process")
    columns = ["point_key", "round", "sample", "status", "step_ms", "group"]
    frames = [load_runs("loop", run.path)[columns].sort_values(columns[:3], ignore_index=True) for run in (many, one)]
    assert frames[0].equals(frames[1])
    assert check_run(many.path) == []
    assert {record["worker"] for record in records(many.path)} == {"device-0", "device-1"}
    assert go(tmp_path / "many", points, sweep_points.measure, provenance, executor=client).num_measured == 0


def test_a_device_is_never_shared_and_both_are_used(tmp_path, client, provenance):
    log = tmp_path / "log"
    options = {"executor": client, "local": {"log": str(log)}}
    go(tmp_path, contexts(10, sleep_s=0.05), sweep_points.measure_and_log, provenance, **options)
    spans: dict[str, list[tuple[float, float]]] = {}
    for line in log.read_text().splitlines():
        _, worker, begin, end = line.split()
        spans.setdefault(worker, []).append((float(begin), float(end)))
    assert len(spans) == 2
    for own in spans.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(own)))


def test_a_worker_killed_mid_grid_is_replaced_and_its_point_measured_once(tmp_path, provenance):
    points, log = contexts(30, sleep_s=0.1), tmp_path / "log"
    with local_cluster([{}, {}]) as cluster, Client(cluster) as own:
        own.wait_for_workers(2, timeout=60)
        victim = next(iter(own.run(os.getpid).values()))

        def kill() -> None:
            while not log.exists() or log.read_text().count("\n") < 5:
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        options = {"executor": own, "local": {"log": str(log)}}
        result = go(tmp_path, points, sweep_points.measure_and_log, provenance, **options)
        killer.join()
        assert victim not in own.run(os.getpid).values()
    assert result.counts == {"ok": 30}
    stored = Counter(record["point_key"] for record in records(result.path))
    assert stored == Counter({point_key({"seed": 0, **point}): 1 for point in points})
    assert check_run(result.path) == []


def test_a_point_that_crashes_or_hangs_costs_itself_only(tmp_path, client, provenance):
    points = [{"context_len": i, "batch_size": 1, "fault": f} for i, f in enumerate(["ok", "segfault", "hang", "ok"])]
    result = go(tmp_path, points, sweep_points.measure_fault, provenance, executor=client, timeout_s=1.0)
    rows = load_runs("loop", result.path).drop_duplicates("point_key")
    assert sorted(zip(rows["context_len"], rows["status"], strict=True)) == [
        (0, "ok"), (1, "crashed"), (2, "timeout"), (3, "ok"),
    ]  # fmt: skip
    assert any("SIGSEGV" in str(reason) for reason in rows["reason"])


def test_a_worker_in_another_environment_measures_nothing(tmp_path, client, provenance):
    other = {**provenance, "versions": {**provenance["versions"], "numpy": "1.0"}}
    result = go(tmp_path, contexts(1), sweep_points.measure, other, executor=client)
    assert result.counts == {"error": 1}
    assert "another environment: versions.numpy is" in load_runs("loop", result.path)["reason"].iloc[0]


def test_the_budget_is_kept(tmp_path, client, provenance):
    options = {"executor": client, "budget_s": 5.0}
    result = go(tmp_path, contexts(60, sleep_s=0.4), sweep_points.measure, provenance, **options)
    assert 0 < result.num_measured < 60
    assert result.num_left == 60 - result.num_measured


def test_calibration_of_a_worker_is_stored(tmp_path, client, provenance, monkeypatch):
    monkeypatch.setattr("labkit.sweep.CALIBRATE", "tests.sweep_points:fake_calibration")
    result = go(tmp_path, contexts(1), sweep_points.measure, provenance, executor=client, calibrate=True)
    assert json.loads(result.path.with_suffix(".json").read_text())["calibration"]["noise_floor_us"] == 2.0


def test_a_worker_that_could_share_its_device_is_refused(tmp_path, provenance):
    from distributed import LocalCluster

    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster) as own,
        pytest.raises(InputError, match="wanted --nthreads 1 --resources device=1"),
    ):
        go(tmp_path, contexts(1), sweep_points.measure, provenance, executor=own)


def test_devices_are_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-1a")
    assert visible_devices("cuda") == ["2", "GPU-1a"]
    assert visible_devices("cpu") == [""]
    with pytest.raises(InputError, match="wanted cuda, got cuda:1"):
        visible_devices("cuda:1")


def test_an_executor_must_be_known(tmp_path, provenance):
    with pytest.raises(InputError, match="executor: wanted one of local, dask"):
        go(tmp_path, contexts(1), sweep_points.measure, provenance, executor="ray")
