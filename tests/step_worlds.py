"""Step rows with planted physics: every millisecond of a forward follows from constants that a test knows."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

NUM_LAYERS, NUM_QO_HEADS, NUM_SMS, GB = 32, 32, 132, 1e9


@dataclass(frozen=True)
class Physics:
    """A device and an 8B model. Bandwidths in 1e9 B/s, times in ms; `tile_us` per 64 keys, layer and wave."""

    fixed_ms: float = 0.8
    weight_bytes: float = 15.0e9
    weight_gb_per_s: float = 3900.0
    kv_bytes_per_token: float = 131072.0
    kv_gb_per_s: float = 4000.0
    token_us: float = 6.0
    tile_us: float = 3.0
    sampling_ms: float = 0.1
    kink_at: float = 1e12
    kink: float = 1.0

    def parts(self, backend: str, batch: int, context: int, q_len: int, weights: float, kv: float) -> dict[str, float]:
        """Milliseconds of the parts of one forward; `weights` and `kv` scale the bytes (fp8: 0.5)."""
        kv_len = context + q_len
        kv_ms = self.kv_bytes_per_token * kv * kv_len * batch / self.kv_gb_per_s / 1e6
        if backend == "per_token":
            kv_ms *= q_len
        if backend == "triton_nosplit":
            kv_ms = -(-kv_len // 64) * -(-batch * NUM_QO_HEADS // NUM_SMS) * NUM_LAYERS * self.tile_us / 1e3
        if context > self.kink_at:
            kv_ms *= self.kink
        return {
            "attention_ms": kv_ms,
            "linear_ms": self.weight_bytes * weights / self.weight_gb_per_s / 1e6,
            "other_ms": self.token_us * batch * q_len / 1e3,
            "sampling_ms": self.sampling_ms,
            "communication_ms": 0.0,
            "gap_ms": self.fixed_ms - self.sampling_ms,
        }


@dataclass(frozen=True)
class StepWorld:
    """A grid of forwards on `physics`; `noise` is the sd of the log of a sample, `drift` of what a round shares."""

    physics: Physics = Physics()
    backends: tuple[str, ...] = ("triton_split",)
    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536, 131072, 262144)
    q_lens: tuple[int, ...] = (1, 2, 4, 8)
    batches: tuple[int, ...] = (1,)
    weight_dtypes: tuple[str, ...] = ("bfloat16",)
    kv_dtypes: tuple[str, ...] = ("bfloat16",)
    noise: float = 0.0
    drift: float = 0.0
    num_rounds: int = 8
    gpu: str = "nvidia-h200"
    target: str = "random:llama-3-8b"
    run_id: str = "20260131T120000Z-dddddd"
    draft_ms: float | None = None  # a drafter "head" of one-token forwards
    extend_ms: float | None = None

    def with_(self, **changes: Any) -> "StepWorld":
        """A copy with some fields changed."""
        return replace(self, **changes)


CPU_STEPS = StepWorld(
    backends=("sdpa", "per_token"),
    contexts=(512, 2048, 6144, 16384, 32768),
    weight_dtypes=("float32",),
    kv_dtypes=("float32",),
    noise=0.01,
    gpu="cpu-amd-epyc",
)


def step_rows(world: StepWorld, seed: int = 0) -> pd.DataFrame:
    """One row per cell and round, groups and columns as the experiment stores them."""
    rng, rows = np.random.default_rng(seed), []
    for weights in world.weight_dtypes:
        for kv in world.kv_dtypes:
            for batch in world.batches:
                for context in world.contexts:
                    rows += _group(world, batch, context, weights, kv, rng)
    frame = pd.DataFrame(rows).assign(
        run_id=world.run_id, experiment="step", origin="measured", status="ok", reason=None, quality="ok",
        gpu=world.gpu, target=world.target, linear_backend="torch", num_gpus=1, launch_mode="graph",
        peak_memory_bytes=20_000_000_000, sample=0,
    )  # fmt: skip
    frame["point_key"] = [f"step-{number}" for number in range(len(frame))]
    return frame


def _group(
    world: StepWorld, batch: int, context: int, weights: str, kv: str, rng: np.random.Generator
) -> list[dict[str, Any]]:
    scale = {"bfloat16": 1.0, "float8_e4m3fn": 0.5, "float32": 2.0}
    drift = np.exp(rng.normal(0, world.drift, world.num_rounds))
    cell = {
        "batch_size": batch, "context_len": float(context), "weight_dtype": weights, "kv_dtype": kv,
        "group": f"{world.target}/{batch}/{context}/{weights}/{kv}",
    }  # fmt: skip
    rows = []

    def add(true_ms: float, **fields: Any) -> None:
        samples = true_ms * drift * np.exp(rng.normal(0, world.noise, world.num_rounds))
        rows.extend(cell | fields | {"round": index, "forward_ms": ms} for index, ms in enumerate(samples))

    for backend in world.backends:
        for q_len in world.q_lens:
            parts = world.physics.parts(backend, batch, context, q_len, scale[weights], scale[kv])
            bytes_read = {
                "weight_bytes_read": int(world.physics.weight_bytes * scale[weights]),
                "kv_bytes_read": int(world.physics.kv_bytes_per_token * scale[kv] * batch * (context + q_len)),
            }
            phase = "decode" if q_len == 1 else "verify"
            add(sum(parts.values()), phase=phase, drafter=None, backend=backend, q_len=q_len, **parts, **bytes_read)
    drafts = {"draft": (world.draft_ms, 1), "draft_extend": (world.extend_ms, 4)}
    for phase, (ms, q_len) in drafts.items():
        for backend in world.backends if ms is not None else ():
            halves = {"attention_ms": ms / 4, "linear_ms": 3 * ms / 4}
            add(ms, phase=phase, drafter="head", backend=backend, q_len=q_len, **halves)
    return rows
