"""The device's clock, power, throttling and other users at the moment of reading.

A GPU is asked by NVML where it is installed, a Linux CPU by /proc/stat. What cannot be told is None, never 0.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_MIN_INTERVAL_S = 0.2  # /proc/stat counts in steps of 10 ms


class DeviceState(NamedTuple):
    """`sm_clock_mhz`, `power_w`; `throttled`: "" or why the device is slow; `others_share`: 0..1 of it."""

    sm_clock_mhz: float | None
    power_w: float | None
    throttled: str
    others_share: float | None = None


UNKNOWN = DeviceState(None, None, "")


def monitor(device: str) -> Callable[[], DeviceState]:
    """A function that reads the state of ``device`` now; each reading covers the time since the one before."""
    return _Cpu() if device == "cpu" else _gpu(device)


def _gpu(device: str) -> Callable[[], DeviceState]:
    try:
        import pynvml
    except ImportError:  # package nvidia-ml-py
        return lambda: UNKNOWN
    try:
        return _Gpu(pynvml, _handle(device))
    except pynvml.NVMLError:  # hidden from this virtual machine
        return lambda: UNKNOWN


def energy_j(device: str | None = None) -> float | None:
    """Joules that a device, or all of this machine, used since the driver was loaded; None where NVML does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        every = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        handles = [_handle(device)] if device else every
        return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3 or None
    except pynvml.NVMLError:
        return None


def _handle(device: str) -> Any:
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


class _Gpu:
    """NVML's view of one GPU. A virtual machine may hide some of it: each question is asked alone."""

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self._slow = {
            "thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
            "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        self._since_us = int(time.time() * 1e6)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def __call__(self) -> DeviceState:
        nvml = self._nvml
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        throttled = ", ".join(name for name, bits in self._slow.items() if reasons & bits)
        share = self._others_share()
        return DeviceState(
            None if clock is None else float(clock), None if power is None else power / 1e3, throttled, share
        )

    def _others_share(self) -> float | None:
        """Busy share of processes other than this one since the last reading; None where processes are hidden.

        A container numbers processes in its own way: then the busiest is taken for this one.
        """
        samples = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, self._since_us)
        if not samples:
            return None
        self._since_us = max(sample.timeStamp for sample in samples)
        busy: dict[int, list[float]] = {}
        for sample in samples:
            busy.setdefault(sample.pid, []).append(sample.smUtil / 100)
        shares = {pid: sum(values) / len(values) for pid, values in busy.items()}
        shares.pop(os.getpid() if os.getpid() in shares else max(shares, key=lambda pid: shares[pid]))
        return min(sum(shares.values()), 1.0)


class _Cpu:
    """Share of this process's cores that others used, from /proc/stat; None where there is none."""

    def __init__(self) -> None:
        self._before = self._read()
        self._state = UNKNOWN

    def __call__(self) -> DeviceState:
        if self._before is None or (now := self._read()) is None:
            return UNKNOWN
        wall, busy, own = (b - a for a, b in zip(self._before, now, strict=True))
        if wall >= _MIN_INTERVAL_S:
            cores = len(os.sched_getaffinity(0))
            share = min(max((busy - own) / (wall * cores), 0.0), 1.0)
            self._before, self._state = now, UNKNOWN._replace(others_share=share)
        return self._state

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Wall time, busy time of the cores this process may use (stolen time included), time of this process; s."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        except (OSError, AttributeError):
            return None
        # user nice system idle iowait irq softirq steal; guest time is in user time already
        counts = [[int(word) for word in line.split()[1:9]] for line in lines if line.split()[0] in names]
        busy = sum(sum(count) - count[3] - count[4] for count in counts) / os.sysconf("SC_CLK_TCK")
        spent = os.times()
        return time.monotonic(), busy, spent.user + spent.system + spent.children_user + spent.children_system
