"""Measuring functions for groups, as a worker process imports them."""

import os
import signal
import time

from labkit.errors import Unsupported


def sample(point, round_index, value):
    return {
        "arm": "plain", "target": "toy", "batch_size": 1, "context_len": 8, "q_len": 1, "step_ms": value,
        "round": round_index, "sample": 0, "weight_dtype": "float32", "kv_dtype": "float32",
        "num_drafted_tokens": 0, "launch_mode": "eager",
        "decode_backend": point["name"],
    }  # fmt: skip


def interleaved(points):
    """Both rounds of every arm; the step time tells how many arms were measured together."""
    names = [point["name"] for point in points]
    if "killer" in names:
        os.kill(os.getpid(), signal.SIGSEGV)
    results = []
    for point in points:
        if point["name"] == "unsupported":
            results.append(Unsupported("not this shape"))
        else:
            results.append([sample(point, index, float(len(names))) for index in range(2)])
    return results


def short(points):
    """One result too few."""
    return interleaved(points)[1:]


_COLD = [True]


def slow_start(points):
    """0.3 s for a group, and 2 s more for the first one of the process, as where kernels are compiled and loaded."""
    time.sleep(2.3 if _COLD.pop() else 0.3)
    _COLD.append(False)
    return interleaved(points)
