"""Sidecars and planted rows of two runs."""

import copy
from typing import Any

import numpy as np
import pandas as pd

from tests.worlds import TYPICAL_NOISE, CostWorld, Noise, cost_rows

SIDECAR: dict[str, Any] = {
    "schema_version": 1,
    "run_id": "20260101T000000Z-aaaaaa",
    "experiment": "loop",
    "gpu": "nvidia-h200",
    "grid": {
        "target": ["tiny"],
        "context_len": [512, 2048],
        "verify_backend": ["sdpa"],
        "launch_mode": ["eager"],
        "kv_dtype": ["bfloat16"],
        "max_new_tokens": [64],
        "num_warmup": [3],
    },
    "seed": 0,
    "command": "labkit run loop",
    "code_digest": "c0de",
    "provenance": {
        "device": {"name": "NVIDIA H200", "slug": "nvidia-h200", "driver": "580.1", "power_limit_w": 700.0},
        "versions": {"torch": "2.13.0", "triton": "3.6"},
        "commit": "abc",
        "dirty": False,
        "env": {},
        "time": "2026-01-01T00:00:00Z",
    },
    "calibration": {"read_gb_per_s": 4300.0, "timer_resolution_ms": 0.001},
    "digests": {"backend": {"sdpa": "d1"}, "prompts": "p1"},
    "num_rows": 100,
    "started": "2026-01-01T00:00:00Z",
}


def changed(**paths: Any) -> dict[str, Any]:
    """The sidecar of a second run, with fields set by path (``provenance__device__driver``)."""
    other = copy.deepcopy(SIDECAR) | {"run_id": "20260102T000000Z-bbbbbb", "started": "2026-01-02T00:00:00Z"}
    for path, value in paths.items():
        *folders, last = path.split("__")
        place = other
        for folder in folders:
            place = place[folder]
        place[last] = value
    return other


def planted(step_ms: float, run_id: str, noise: Noise = TYPICAL_NOISE, seed: int = 0, **changes: Any) -> pd.DataFrame:
    world = CostWorld(
        lambda _, __: 10.0, lambda _, __, j: step_ms + j, run_id=run_id, noise=noise, num_rounds=16, samples_per_round=3
    )
    return cost_rows(world.with_(**changes), np.random.default_rng(seed))


def kinds(comparison: Any) -> dict[str, str]:
    return {difference.field: difference.kind for difference in comparison.differences}
