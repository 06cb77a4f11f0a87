"""What this device can do right now: read bandwidth, matrix rate, timer. Stored beside each run."""

import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from labkit.provenance import utc_now
from labkit.timing import cache_bytes, sample_rounds

_NUM_READS, _MATRIX_S = 15, 0.3
_GPU_READS = [1 << power for power in range(22, 34)]  # 4 MiB to 8 GiB
_MATRIX_DTYPES = ("float32", "bfloat16", "float16")


def _spread(values: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile and number of the values, six digits each."""
    p20, *_, p80 = statistics.quantiles(values, n=5) if len(values) > 1 else values * 2
    return {"median": _short(statistics.median(values)), "p20": _short(p20), "p80": _short(p80), "num": len(values)}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _reader(device: str, num_bytes: int) -> Callable[[], object]:
    """A call that reads so many bytes; on CUDA by a kernel of ours where Triton is there, else by torch's sum."""
    import torch

    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return buffer.sum
    from labkit.triton_read import BLOCK, read_kernel

    num_programs = buffer.numel() // BLOCK
    sums = torch.empty(num_programs, device=device)
    return lambda: read_kernel[(num_programs,)](buffer, sums, BLOCK=BLOCK)


def read_bandwidth(device: str) -> dict[str, Any]:
    """1e9 B/s of a pure read, cold, of a buffer far larger than the last-level cache; `us` has other sizes too."""
    if device == "cpu":
        sizes = [max(8 * cache_bytes(device), 256 << 20)]
    else:
        import torch

        sizes = [size for size in _GPU_READS if size < torch.cuda.mem_get_info(device)[0] // 2]
    us: dict[str, float] = {}
    for num_bytes in sizes:
        call = {"read": _reader(device, num_bytes)}
        rows = sample_rounds(call, num_rounds=_NUM_READS, device=device, graph=device != "cpu")
        us[str(num_bytes)] = _short(statistics.median(row["ms"] * 1e3 for row in rows))
    rates = [num_bytes / row["ms"] / 1e6 for row in rows]
    return {"num_bytes": num_bytes, "best": _short(max(rates)), "us": us, **_spread(rates)}


def _matrix_rate(device: str, dtype: str) -> dict[str, Any] | None:
    """1e12 FLOP/s of a square matrix product, two per multiply-add; null where there is none.

    The size doubles until a product takes a few ms, since a slow dtype would take minutes at a GPU's size.
    """
    import torch

    size, limit, long_enough_ms = (128, 2048, 10.0) if device == "cpu" else (1024, 8192, 1.0)
    while True:
        try:
            left = torch.ones(size, size, device=device).to(getattr(torch, dtype))
            call = functools.partial(torch.matmul, left, left)
            (first,) = sample_rounds({"product": call}, num_rounds=1, num_warmup=1, device=device, l2="warm")
        except RuntimeError:  # torch has no such product here
            return None
        if first["ms"] >= long_enough_ms or size == limit:
            break
        size *= 2
    num_rounds = max(3, min(20, int(_MATRIX_S * 1e3 / first["ms"])))
    rows = sample_rounds({"product": call}, num_rounds=num_rounds, num_warmup=0, device=device, l2="warm")
    return {"size": size, **_spread([2 * size**3 / row["ms"] / 1e9 for row in rows])}


def _timer(device: str) -> dict[str, float]:
    """Smallest step of the timer, and the 95th percentile of the time of timing nothing; us."""
    rows = sample_rounds({"nothing": lambda: None}, num_rounds=200, device=device, l2="warm")
    empty = sorted(row["ms"] * 1e3 for row in rows)
    if device == "cpu":
        ticks = [time.perf_counter_ns() for _ in range(20_000)]
        steps = [(b - a) / 1e3 for a, b in itertools.pairwise(ticks)]
    else:
        steps = [b - a for a, b in itertools.pairwise(empty)]
    resolution = min((step for step in steps if step > 0), default=0.0)
    return {"timer_resolution_us": _short(resolution), "noise_floor_us": _short(empty[int(0.95 * len(empty))])}


def calibrate(device: str = "cpu") -> dict[str, Any]:
    """Measure the limits that ratios are taken against. Under 10 s on a CPU.

    device : ``cpu``, with as many threads as torch has, or a CUDA device.

    Returns read_gb_per_s: median of repeated reads, 1e9 B/s, and read_spread (best, 20th and 80th percentile, and us:
    time of a read by its bytes); matrix_tflops_per_s: dtype -> median, 1e12 FLOP/s, null where the device has no such
    product, and matrix_spread; timer_resolution_us, noise_floor_us; cache_bytes, num_threads, num_sms (null on a CPU),
    device, time (UTC).
    """
    import torch

    read = read_bandwidth(device)
    matrix = {dtype: _matrix_rate(device, dtype) for dtype in _MATRIX_DTYPES}
    return {
        "device": device,
        "time": utc_now(),
        "num_threads": torch.get_num_threads(),
        "num_sms": None if device == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count,
        "read_gb_per_s": read["median"],
        "read_spread": read,
        "matrix_tflops_per_s": {dtype: rate and rate["median"] for dtype, rate in matrix.items()},
        "matrix_spread": matrix,
        "cache_bytes": cache_bytes(device),
        **_timer(device),
    }


def calibration_samples(device: str) -> list[dict[str, Any]]:
    """`calibrate` in the form of a measuring function, for the worker of a sweep."""
    return [calibrate(device)]
