"""Many workers: every point once, no device shared, lost workers replaced, the same rows as one worker gives."""

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from benchmarks import scale_out
from labkit.check import check_run
from labkit.errors import InputError
from labkit.executor_dask import local_cluster, visible_devices
from labkit.provenance import collect
from labkit.results import load_runs
from labkit.sweep import grid, point_key, run_sweep
from tests import group_points, sweep_points


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
    options = {"executor": client, "budget_s": 2.0}
    result = go(tmp_path, contexts(60, sleep_s=0.4), sweep_points.measure, provenance, **options)
    assert 0 < result.num_measured < 60
    assert result.num_left == 60 - result.num_measured


def test_calibration_of_a_worker_is_stored(tmp_path, client, provenance):
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


def planted(*workers: list[float], cold: float) -> dict[str, scale_out.Span]:
    """Groups by number, dealt to the workers in turn: the first of each takes ``cold`` s more."""
    free, spans = [0.0] * len(workers), {}
    for number in range(sum(map(len, workers))):
        worker = number % len(workers)
        seconds = workers[worker][number // len(workers)] + (cold if number < len(workers) else 0.0)
        spans[str(number)] = scale_out.Span(f"device-{worker}", free[worker], free[worker] + seconds)
        free[worker] += seconds
    return spans


def test_throughput_is_that_of_warm_workers():
    one = planted([0.5] * 40, cold=4.0)
    two = planted([0.5] * 20, [0.5] * 20, cold=7.0)
    assert one["39"].end / two["39"].end < 1.5, "the spans themselves are mostly the start"
    found = scale_out.compared(one, two, num_warm_up=1)
    assert found == {"warm_seconds_one": 19.5, "warm_seconds_all": 9.5, "throughput_ratio": 2.0}


def test_throughput_counts_work_and_not_points():
    lengths = [1.0, 3.0] * 10
    one = planted(lengths, cold=0.0)
    two = planted(lengths[::2], lengths[1::2], cold=0.0)  # all the short ones on one of them, which then idles
    assert scale_out.compared(one, two, num_warm_up=1)["throughput_ratio"] == pytest.approx(34 / 27, abs=1e-3)
    shared = {group: replace(span, end=span.end * 2, begin=span.begin * 2) for group, span in two.items()}
    half = scale_out.compared(one, shared, num_warm_up=1)["throughput_ratio"]
    assert half == pytest.approx(17 / 27, abs=1e-3), "twice as slow together is no gain"


def test_a_grid_that_ends_before_the_workers_are_warm_is_refused():
    with pytest.raises(ValueError, match="wanted more than 6 groups on each worker, got 2"):
        scale_out.compared(planted([1.0] * 8, cold=0.0), planted([1.0] * 2, [1.0] * 2, cold=0.0))


def test_two_workers_do_the_work_of_two(tmp_path, client, provenance):
    """Waiting takes no core, so two workers of a small machine can do it at once."""
    points = [{"group": str(group), "name": name} for group in range(14) for name in ("a", "b")]
    with local_cluster([{}]) as cluster, Client(cluster) as single:
        single.wait_for_workers(1, timeout=60)
        one = go(tmp_path / "one", points, group_points.slow_start, provenance, executor=single)
    two = go(tmp_path / "two", points, group_points.slow_start, provenance, executor=client)
    spans = [scale_out.spans_of(run.path) for run in (one, two)]
    assert [len({span.worker for span in own.values()}) for own in spans] == [1, 2]
    assert scale_out.compared(*spans, num_warm_up=1)["throughput_ratio"] > 1.5


def test_a_point_of_two_modes_is_not_off_and_a_slower_one_is():
    rng = np.random.default_rng(0)
    slow, fast = rng.normal(4.41, 0.01, 15), rng.normal(4.10, 0.01, 15)
    mostly_slow, mostly_fast = (np.append(slow[:8], fast[:7]), np.append(slow[:7], fast[:8]))
    assert np.median(mostly_slow) / np.median(mostly_fast) > 1.07
    assert not scale_out.is_off(mostly_slow, mostly_fast, "point")
    assert scale_out.is_off(fast, slow, "point")
    assert not scale_out.is_off(fast, 1.02 * fast, "point"), "two devices differ by so much"
