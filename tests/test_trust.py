"""Whether a measurement can be trusted: doubtful samples are marked, wide cells measured again, 3 % is seen, 0 % not.

The planted clock moves only when a planted call runs, so every time is known; nothing here waits.
"""

import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from labkit import timing
from labkit.decide.ratios import ratio_table
from labkit.device_state import DeviceState, monitor
from labkit.experiments import attention, loop
from labkit.quality import Limits, judge, kinds, relative_width
from labkit.timing import sample_rounds

PRESET = {name: values[0] for name, values in attention.PRESETS["cpu"].items()}
COOL, HOT = DeviceState(1980.0, 500.0, "", 0.0), DeviceState(1980.0, 700.0, "thermal", 0.0)


# ---- what is doubtful


@pytest.mark.parametrize(
    ("samples", "floor", "wanted"),
    [
        ([1.0] * 10, None, "ok"),
        ([1.0], 1.0, "ok"),
        ([1.0] * 9 + [1.6], None, "ok"),  # 10 % is the limit
        ([1.0] * 8 + [1.6] * 2, None, "unstable"),
        ([1.0] * 8 + [1.5] * 2, None, "ok"),  # 1.5 times the median is not above it
        ([0.009] * 5, 1.0, "below noise floor"),
        ([0.010] * 5, 1.0, "ok"),
        ([0.001] * 8 + [1.0] * 2, 1.0, "below noise floor; unstable"),
    ],
)
def test_samples_alone(samples, floor, wanted):
    assert judge(samples, noise_floor_us=floor) == wanted


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ([COOL] * 5, "ok"),
        ([DeviceState(None, None, "")] * 5, "ok"),  # cannot be told
        ([COOL] * 4 + [HOT], "throttled (thermal)"),
        ([COOL, COOL._replace(sm_clock_mhz=1410.0)], "clock changed (1980 to 1410 MHz)"),
        ([COOL._replace(sm_clock_mhz=345.0), COOL], "clock changed (345 to 1980 MHz)"),
        ([COOL, COOL._replace(sm_clock_mhz=1950.0)], "ok"),
        ([COOL, COOL._replace(others_share=0.5)], "device shared (other processes had 25% of it)"),
        ([COOL._replace(others_share=0.1)], "ok"),
        ([HOT._replace(others_share=0.9)], "throttled (thermal); device shared (other processes had 90% of it)"),
    ],
)
def test_the_device_beside_the_samples(states, wanted):
    quality = judge([1.0] * 5, states=states)
    assert quality == wanted
    assert all(kind in ("ok", "throttled", "clock changed", "device shared") for kind in kinds(quality))


def test_drift_is_told_from_noise_and_from_steps_too_small_to_matter():
    noise = np.random.default_rng(0)
    assert judge([1 + 0.01 * index for index in range(15)]) == "drifting (+10% from first to last rounds)"
    assert judge([1 - 0.01 * index for index in range(15)]).startswith("drifting (-")
    assert judge([1 + 0.002 * index for index in range(15)]) == "ok"
    flat = [judge(noise.normal(1, 0.1, 15).tolist()) for _ in range(1000)]
    assert sum("drifting" in quality for quality in flat) <= 5
    assert judge([1.0] * 5) == "ok"  # too few rounds to tell


def test_a_wide_interval_is_called_so_with_its_width():
    samples = np.random.default_rng(0).normal(1, 0.05, 15).tolist()
    assert judge(samples, widest=0.02).startswith("wide interval (")
    assert judge(samples, widest=0.2) == "ok"
    assert judge([1.0], widest=0.2) == "wide interval (one round)"


def test_the_width_is_that_of_the_95_percent_interval_of_the_median():
    draw = np.random.default_rng(1).normal(1, 0.05, (4000, 31))
    wanted = 2 * 1.96 * np.median(draw, axis=1).std()
    assert np.mean([relative_width(row) for row in draw]) == pytest.approx(wanted, rel=0.1)


def test_nothing_to_judge():
    with pytest.raises(ValueError, match="samples: wanted at least one"):
        judge([])


def test_this_machine_can_be_read_and_another_process_is_seen(monkeypatch, tmp_path):
    seconds = iter([(0.0, 0.0, 0.0), (1.0, 0.9, 0.8), (2.0, 2.7, 1.6)])
    monkeypatch.setattr("labkit.device_state._Cpu._read", staticmethod(lambda: next(seconds)))
    monkeypatch.setattr("labkit.device_state.os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    read = monitor("cpu")
    assert read().others_share == pytest.approx(0.05)
    assert read().others_share == pytest.approx(0.5)
    monkeypatch.undo()
    assert monitor("cpu")() == DeviceState(None, None, "", monitor("cpu")().others_share)


class FakeNvml:
    """NVML that hides the power, and reports a second process on the device."""

    NVML_CLOCK_SM = 1
    NVMLError = type("NVMLError", (Exception,), {})
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 1, 2
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 4
    pids = (11, 22)

    def nvmlDeviceGetClockInfo(self, handle, which):
        return 1755

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 2

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        uses = zip(self.pids, (60, 30), strict=False)
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=since + 1) for pid, share in uses]


def test_a_gpu_that_hides_some_of_its_state_tells_the_rest(monkeypatch):
    from labkit.device_state import _Gpu

    read = _Gpu(FakeNvml(), None)
    assert read() == DeviceState(1755.0, None, "thermal", 0.3)  # pids of a container: the busiest is this process
    monkeypatch.setattr("labkit.device_state.os.getpid", lambda: 22)
    assert read().others_share == 0.6
    monkeypatch.setattr(FakeNvml, "pids", ())
    assert read().others_share is None


@pytest.mark.parametrize(("share", "wanted"), [(None, "cannot be seen here"), (0.25, "had 25% of the device")])
def test_doctor_says_whether_other_users_are_seen(monkeypatch, share, wanted):
    from labkit import doctor

    monkeypatch.setattr(doctor, "_WATCH_S", 0.0)
    monkeypatch.setattr(doctor, "monitor", lambda device: lambda: DeviceState(None, None, "", share))
    assert f"other_users: {wanted}" in doctor.render(doctor.report())


# ---- measuring again


class PlantedClock:
    """A clock that a planted call moves: its time, the machine's drift, noise, and now and then an outlier."""

    def __init__(self, seed: int, *, noise: float = 0.0, drift: float = 0.0, outliers: float = 0.0):
        self.now_ns, self._random = 0, random.Random(seed)
        self._noise, self._drift, self._outliers, self._speed = noise, drift, outliers, 0.0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def call(self, ms: float):
        def run() -> None:
            self._speed += self._random.gauss(0, self._drift)
            factor = np.exp(self._random.gauss(0, self._noise) + self._speed)
            if self._random.random() < self._outliers:
                factor *= self._random.uniform(1.5, 4)
            self.now_ns += int(1e6 * ms * factor)

        return run


def measure(monkeypatch, clock: PlantedClock, times_ms: dict[str, float], **options) -> list[dict]:
    monkeypatch.setattr(timing, "time", clock)
    limits = Limits(PRESET)
    given = {"num_rounds": limits.num_rounds, "max_rounds": limits.max_rounds, "widest": limits.widest, **options}
    return sample_rounds({name: clock.call(ms) for name, ms in times_ms.items()}, l2="warm", **given)


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 15), (0.02, 30), (0.2, 60)])
def test_a_cell_whose_interval_stays_wide_is_measured_again_up_to_the_cap(monkeypatch, noise, rounds):
    rows = measure(monkeypatch, PlantedClock(3, noise=noise), {"a": 1.0, "b": 2.0})
    assert [row["round"] for row in rows] == [index for index in range(rounds) for _ in range(2)]
    assert len(measure(monkeypatch, PlantedClock(3, noise=noise), {"a": 1.0}, max_rounds=0)) == 15
    limits, own = Limits(PRESET), [row | {"attention_ms": row["ms"]} for row in rows if row["name"] == "a"]
    limits.mark(own, "attention_ms")
    assert ("wide interval" in own[0]["quality"]) == (noise > 0.1)
    assert "state" not in own[0]


def test_the_knobs_are_axes_of_both_experiments():
    for module, name in ((attention, "context_len"), (loop, "context_len")):
        (point, *_) = module.points("cpu", **{name: [512], "max_repeats": [7], "max_interval_percent": [0.5]})
        limits = Limits(point)
        assert (limits.max_rounds, limits.widest) == (7 * limits.num_rounds, 0.005)


# ---- A/A control, and a difference of 3 %

NUM_TRIALS = 200
NOISE = {"noise": 0.02, "drift": 0.005, "outliers": 0.03}


def verdict(rows: list[dict]) -> str:
    """Faster, slower or undecided: what the paired interval of B over A says."""
    frame = pd.DataFrame(rows).assign(run_id="r", group="g", status="ok", phase="decode")
    frame = frame.rename(columns={"ms": "attention_ms", "name": "backend"})
    a, b = (frame[frame["backend"] == name] for name in "ab")
    row = ratio_table(a, b, ignoring=["backend"]).iloc[0]
    return "slower" if row["ratio_low"] > 1 else "faster" if row["ratio_high"] < 1 else "undecided"


def test_a_backend_against_itself_is_undecided(monkeypatch):
    verdicts = [
        verdict(measure(monkeypatch, PlantedClock(s, **NOISE), {"a": 1, "b": 1}, seed=s)) for s in range(NUM_TRIALS)
    ]
    assert 184 <= verdicts.count("undecided") <= 200


def test_three_percent_are_decided_at_the_default_sample_count(monkeypatch):
    trials = range(NUM_TRIALS)
    verdicts = [verdict(measure(monkeypatch, PlantedClock(s, **NOISE), {"a": 1, "b": 1.03}, seed=s)) for s in trials]
    assert verdicts.count("slower") >= 0.9 * NUM_TRIALS


# ---- the same on a GPU, with real kernels; `pytest -m gpu tests/test_trust.py -s` prints the counts


def gpu_verdicts(num_bytes: dict[str, int]) -> list[str]:
    """Pure reads of these sizes against one another, as captured graphs, at the default sample count."""
    import torch

    from labkit.calibrate import _reader

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    limits = Limits({name: values[0] for name, values in attention.PRESETS["gpu"].items()})
    verdicts = []
    for trial in range(NUM_TRIALS):
        calls = {name: _reader("cuda", size) for name, size in num_bytes.items()}  # other addresses in each trial
        rounds = {"num_rounds": limits.num_rounds, "max_rounds": limits.max_rounds, "widest": limits.widest}
        rows = sample_rounds(calls, device="cuda", graph=True, seed=trial, monitor=monitor("cuda"), **rounds)
        verdicts.append(verdict(rows))
    print({name: verdicts.count(name) for name in ("faster", "slower", "undecided")})
    return verdicts


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_against_itself_is_undecided():
    assert 184 <= gpu_verdicts({"a": 1 << 28, "b": 1 << 28}).count("undecided") <= 200


@pytest.mark.gpu
def test_on_a_gpu_three_percent_are_decided():
    assert gpu_verdicts({"a": 1 << 30, "b": int(1.03 * (1 << 30)) // 65536 * 65536}).count("slower") >= 180


@pytest.mark.gpu
def test_on_a_gpu_another_process_is_seen():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spin = (
        "import torch; x = torch.ones(4096, 4096, device='cuda'); print('on', flush=True)\nwhile True: (x @ x).tanh()"
    )
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "on\n"
        x = torch.randn(4096, 4096, device="cuda")
        rows = sample_rounds({"a": lambda: x @ x}, num_rounds=400, device="cuda", l2="warm", monitor=monitor("cuda"))
        quality = judge([row["ms"] for row in rows], states=[row["state"] for row in rows])
    finally:
        other.kill()
        other.wait()
    if all(row["state"].others_share is None for row in rows):
        pytest.skip("NVML tells nothing of processes on this host")
    assert "device shared" in kinds(quality), quality
