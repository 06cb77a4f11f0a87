"""A forward taken apart: which part each kernel belongs to, and how long each part really ran."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from labkit.attention.launched import launched_kernels

_ATTENTION = re.compile(
    r"flash|fmha|attn|attention|batchprefill|batchdecode|mergestates|split_kernel|merge_kernel", re.I
)
_LINEAR = re.compile(r"few_rows|gemm|gemv|nvjet|cublas|splitKreduce", re.I)
_SAMPLING = re.compile(r"reduce_kernel|argmax", re.I)


def part_of(kernel_name: str) -> str:
    """Which part of a forward a kernel belongs to: attention, linear, sampling or other."""
    for part, pattern in (("linear", _LINEAR), ("attention", _ATTENTION), ("sampling", _SAMPLING)):
        if pattern.search(kernel_name):
            return part
    return "other"


def split_time(kernels: Sequence[Any]) -> dict[str, float]:
    """Milliseconds per part of one forward, from kernels in order of launch; they add up to its span.

    A kernel that is launched early only waits while its predecessor runs: it is charged from where that one ends. What
    no kernel covers is the gap.
    """
    parts = dict.fromkeys(("attention", "linear", "other", "sampling", "gap"), 0.0)
    end = kernels[0].begin_us
    for kernel in kernels:
        begin, after = kernel.begin_us, kernel.begin_us + kernel.time_us
        parts["gap"] += max(0.0, begin - end)
        parts[part_of(kernel.name)] += max(0.0, after - max(begin, end))
        end = max(end, after)
    return {f"{part}_ms": us / 1e3 for part, us in parts.items()}


def anatomy(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
    """Parts of each call, profiled once; calls without a kernel are left out. CUDA only."""
    return {name: split_time(kernels) for name, kernels in launched_kernels(calls).items() if kernels}
