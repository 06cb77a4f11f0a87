"""Timing: interleaving, cold and warm, clocks, quality, calibration. No speeds are compared on a CPU."""

import importlib
import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import sweep, timing
from labkit.errors import InputError
from labkit.timing import HostClock, NullClock, sample_rounds

pytestmark = pytest.mark.own_speed


def run_log(**options) -> tuple[list[str], list[dict]]:
    log: list[str] = []
    calls = {name: (lambda name=name: log.append(name)) for name in "abc"}
    return log, sample_rounds(calls, l2="warm", **options)


# ---- sample_rounds


def test_every_round_holds_every_call_and_every_sample_is_kept():
    log, rows = run_log(num_rounds=6, num_warmup=2, seed=1)
    assert log[:6] == list("aabbcc")
    assert [row["name"] for row in rows] == log[6:]
    assert Counter((row["name"], row["round"]) for row in rows) == Counter(itertools.product("abc", range(6)))
    assert all(row["ms"] >= 0 and row["displaced_bytes"] == 0 for row in rows)


def test_order_is_shuffled_per_round_and_seeded():
    def orders(seed: int) -> list[str]:
        log, _ = run_log(num_rounds=20, num_warmup=0, seed=seed)
        return ["".join(log[index : index + 3]) for index in range(0, 60, 3)]

    assert len(set(orders(0))) >= 4
    assert orders(0) == orders(0)
    assert orders(0) != orders(1)


def test_the_time_is_that_of_the_call():
    rows = sample_rounds(
        {"short": lambda: None, "long": lambda: time.sleep(0.01)}, num_rounds=3, num_warmup=0, l2="warm"
    )
    assert all(row["ms"] >= 10 for row in rows if row["name"] == "long")
    assert min(row["ms"] for row in rows if row["name"] == "short") < 1


def test_cold_reads_past_the_cache_before_each_sample_and_outside_its_time(monkeypatch):
    pytest.importorskip("torch")
    log: list[str] = []
    real, num_bytes = timing._displacer("cpu")
    assert num_bytes >= 2 * timing.cache_bytes("cpu")
    real()
    slow = lambda: (time.sleep(0.02), log.append("displace"))  # noqa: E731
    monkeypatch.setattr(timing, "_displacer", lambda device: (slow, 123))
    rows = sample_rounds({"a": lambda: log.append("call")}, num_rounds=4, num_warmup=0)
    assert log == ["displace", "call"] * 4
    assert {row["displaced_bytes"] for row in rows} == {123}
    assert min(row["ms"] for row in rows) < 10


def test_a_failing_call_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        sample_rounds({"a": lambda: 1 / 0}, num_rounds=1, l2="warm")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"calls": {}}, "at least one call"),
        ({"num_rounds": 0}, "at least one call and round"),
        ({"l2": "hot"}, "l2: wanted cold or warm"),
        ({"graph": True}, "graph: wanted False on the cpu"),
    ],
)
def test_bad_arguments(options, problem):
    arguments = {"calls": {"a": lambda: None}, "num_rounds": 1, **options}
    with pytest.raises(InputError, match=problem):
        sample_rounds(arguments.pop("calls"), **arguments)


# ---- clocks


def parts(times: dict) -> list:
    return [times[name] for name in ("draft_ms", "verify_ms", "accept_ms", "gap_ms", "step_ms")]


def test_null_clock_tells_nothing():
    clock = NullClock()
    clock.start_step()
    clock.lap("draft")
    assert parts(clock.end_step()) == [None] * 5


def test_host_clock_parts_add_up_to_the_step(monkeypatch):
    ticks = iter([0, 2_000_000, 7_000_000, 8_000_000, 8_500_000])
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(ticks))
    clock = HostClock()
    clock.start_step()
    for part in ("draft", "verify", "accept"):
        clock.lap(part)
    assert parts(clock.end_step()) == [2.0, 5.0, 1.0, 0.5, 8.5]


def test_host_clock_adds_repeated_parts_and_leaves_untimed_ones_null(monkeypatch):
    ticks = iter([0, 1_000_000, 2_000_000, 5_000_000, 5_000_000, 0, 3_000_000, 3_000_000])
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(ticks))
    clock = HostClock()
    clock.start_step()
    for part in ("draft", "verify", "draft"):
        clock.lap(part)
    assert parts(clock.end_step()) == [4.0, 1.0, None, 0.0, 5.0]
    clock.start_step()
    clock.lap("verify")
    assert parts(clock.end_step()) == [None, 3.0, None, 0.0, 3.0]


def test_real_host_clock_never_has_a_negative_gap():
    clock = HostClock()
    for _ in range(2000):
        clock.start_step()
        clock.lap("draft")
        clock.lap("verify")
        clock.lap("accept")
        times = clock.end_step()
        assert times["gap_ms"] >= 0
        assert sum(parts(times)[:4]) == pytest.approx(times["step_ms"], abs=1e-9)


def test_a_negative_gap_beyond_the_timer_raises_and_within_it_is_zero():
    assert timing._step_times([("verify", 1.001)], 1.0, 0.002)["gap_ms"] == 0.0
    with pytest.raises(RuntimeError, match="parts of a step exceed its wall time"):
        timing._step_times([("verify", 1.003)], 1.0, 0.002)


class FakeEvent:
    """A CUDA event on a device that is 1 ms further each time one is recorded."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


def test_event_clock_waits_only_at_the_ends_of_a_step(monkeypatch):
    waits: list[str] = []
    cuda = SimpleNamespace(Event=FakeEvent, synchronize=waits.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    ticks = iter([0, 4_500_000, 0, 2_000_000])
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(ticks))
    clock = timing.EventClock()
    clock.start_step()
    for part in ("draft", "draft", "verify", "accept"):
        clock.lap(part)
    assert waits == ["cuda"]
    assert parts(clock.end_step()) == [2.0, 1.0, 1.0, 0.5, 4.5]
    assert waits == ["cuda"] * 2
    clock.start_step()
    for part in ("draft", "verify", "accept"):
        clock.lap(part)
    with pytest.raises(RuntimeError, match=r"exceed its wall time of 2\.0+ ms by 1\.0+ ms"):
        clock.end_step()


def test_import_needs_no_torch():
    code = "import labkit.timing, labkit.calibrate, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


# ---- calibration


def test_calibration_on_the_cpu_is_quick_and_plausible():
    pytest.importorskip("torch")
    module, name = sweep.CALIBRATE.split(":")  # what the worker of a sweep runs

    begin = time.monotonic()
    (found,) = getattr(importlib.import_module(module), name)("cpu")
    assert time.monotonic() - begin < 30  # 10 s on an idle machine
    assert 0.5 < found["read_gb_per_s"] < 2000
    assert found["read_spread"]["p20"] <= found["read_gb_per_s"] <= found["read_spread"]["best"]
    assert found["read_spread"]["num_bytes"] >= 8 * found["cache_bytes"]
    assert found["matrix_tflops_per_s"]["float32"] > 0
    assert set(found["matrix_tflops_per_s"]) == {"float32", "bfloat16", "float16"}
    assert 0 < found["timer_resolution_us"] < 100
    assert 0 < found["noise_floor_us"] < 1000


# ---- on a GPU


@pytest.fixture
def torch_cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch


@pytest.mark.gpu
def test_cold_is_slower_than_warm_where_the_data_fit_in_the_cache(torch_cuda):
    data = torch_cuda.ones(timing.cache_bytes("cuda") // 16, device="cuda")
    medians = {}
    for l2 in ("cold", "warm"):
        rows = sample_rounds({"sum": data.sum}, num_rounds=50, device="cuda", l2=l2, graph=True)
        medians[l2] = sorted(row["ms"] for row in rows)[25]
    assert medians["cold"] > 1.1 * medians["warm"]


@pytest.mark.gpu
def test_a_graph_is_not_slower_than_eager_launches(torch_cuda):
    data = torch_cuda.ones(1024, device="cuda")

    def many() -> None:
        for _ in range(50):
            data.add_(1)

    medians = {}
    for graph in (False, True):
        rows = sample_rounds({"many": many}, num_rounds=20, device="cuda", graph=graph)
        medians[graph] = sorted(row["ms"] for row in rows)[10]
    assert medians[True] < medians[False] * 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_the_host_s_launch_is_no_part_of_a_sample(torch_cuda, l2):
    data = torch_cuda.ones(1024, device="cuda")

    def late() -> None:
        time.sleep(50e-6)
        data.add_(1)

    rows = sample_rounds({"late": late}, num_rounds=50, device="cuda", l2=l2)
    assert sorted(row["ms"] for row in rows)[40] < 0.03


@pytest.mark.gpu
def test_event_clock_parts_fit_into_the_step(torch_cuda):
    left = torch_cuda.randn(2048, 2048, device="cuda")
    clock = timing.EventClock()
    for _ in range(20):
        clock.start_step()
        for part in ("draft", "verify", "accept"):
            left @ left
            clock.lap(part)
        times = clock.end_step()
        assert min(parts(times)) >= 0
        assert sum(parts(times)[:4]) == pytest.approx(times["step_ms"], rel=0.01, abs=0.01)


@pytest.mark.gpu
def test_calibration_on_the_gpu(torch_cuda):
    from labkit.calibrate import calibrate

    found = calibrate("cuda")
    assert found["read_gb_per_s"] > 100
    assert found["matrix_tflops_per_s"]["bfloat16"] > 1
