"""The device's clock, power and throttling at the moment of reading, by NVML where it is installed."""

from typing import Any, NamedTuple


class DeviceState(NamedTuple):
    """`sm_clock_mhz`, `power_w`, and `throttled`: "" or why the device runs slower than it could."""

    sm_clock_mhz: float | None
    power_w: float | None
    throttled: str


UNKNOWN = DeviceState(None, None, "")


def device_state(device: str) -> DeviceState:
    """Read now; all unknown on a CPU and without NVML (package nvidia-ml-py)."""
    if device == "cpu":
        return UNKNOWN
    try:
        import pynvml
    except ImportError:
        return UNKNOWN
    try:
        handle = _handle(device)
        clock = float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:  # a virtual machine may hide some of it
        return UNKNOWN
    slow = {
        "thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return DeviceState(clock, power, ", ".join(name for name, bits in slow.items() if reasons & bits))


def energy_j(device: str) -> float | None:
    """Joules that the device has used since its driver was loaded; None where NVML does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(_handle(device))) / 1e3
    except pynvml.NVMLError:
        return None


def _handle(device: str) -> Any:
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
