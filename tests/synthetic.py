"""Rows of the data contract with planted costs and acceptances, shaped like real runs, for plots and notebooks."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts
from labkit.results import build_table, write_run
from labkit.schema import columns

RUN_ID = "20260131T120000Z-{}"


@dataclass(frozen=True)
class World:
    """A machine, a model, texts. ``base_ms`` is a step without attention, ``kv_us`` one KV read of 1K tokens."""

    gpu: str
    target: str
    drafter: str
    contexts: tuple[int, ...]
    ks: tuple[int, ...]
    backends: tuple[str, ...]
    workloads: dict[str, float]  # probability that a draft token is kept
    batch_sizes: tuple[int, ...] = (1,)
    base_ms: float = 20.0
    kv_us: float = 900.0
    draft_ms: float = 0.3
    drafted_share: float = 1.0
    dtype: str = "float32"
    decay: float = 0.0  # loss of acceptance per octave of context
    noise: float = 0.02
    num_rounds: int = 8
    num_prompts: int = 10
    # KV reads of a verify call per query token beyond the first; decode reads once.
    rereads: tuple[tuple[str, float], ...] = (
        ("sdpa", 0.05),
        ("per_token", 1.0),
        ("triton_split", 0.03),
        ("triton_nosplit", 2.2),
    )


CPU = World(
    gpu="cpu-amd-epyc",
    target="smollm2-135m",
    drafter="ngram",
    contexts=(512, 2048, 6144),
    ks=(2, 4),
    backends=("sdpa", "per_token"),
    workloads={"code_editing": 0.78, "prose": 0.30},
    drafted_share=0.75,
    base_ms=24.0,
    kv_us=2600.0,
    decay=0.03,
)
GPU = World(
    gpu="nvidia-h200",
    target="qwen3-32b",
    drafter="eagle3",
    contexts=(1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    ks=(7,),
    backends=("triton_split", "per_token", "triton_nosplit"),
    workloads={"code_editing": 0.84, "chat": 0.66, "prose": 0.52},
    batch_sizes=(1, 8),
    base_ms=19.0,
    kv_us=90.0,
    draft_ms=4.5,
    dtype="bfloat16",
    decay=0.012,
    noise=0.03,
    num_rounds=12,
    num_prompts=24,
)


def loop_rows(world: World, seed: int = 0) -> pd.DataFrame:
    """Cost rows: plain decode on every backend and the speculative arm at every draft length, per round."""
    rng = np.random.default_rng(seed)
    rereads, rows = dict(world.rereads), []
    for batch_size in world.batch_sizes:
        for context_len in world.contexts:
            for k in world.ks:
                for backend in world.backends:
                    group = f"{context_len}/{batch_size}/{world.drafter}/{k}/{backend}"
                    for round_ in range(world.num_rounds):
                        drift = np.exp(rng.normal(0, world.noise))
                        attention = world.kv_us * context_len * batch_size**0.9 / 1024 / 1e3
                        plain = dict.fromkeys(("verify_backend", "drafter", "draft_backend"))
                        for decode in world.backends:
                            slow = 1.15 if decode == "triton_nosplit" else 1.0
                            time = (world.base_ms + attention * slow) * drift * np.exp(rng.normal(0, world.noise))
                            rows.append(
                                {
                                    **plain,
                                    "arm": "plain",
                                    "decode_backend": decode,
                                    "num_drafted_tokens": 0,
                                    "q_len": 1,
                                    "group": group,
                                    "round": round_,
                                    "batch_size": batch_size,
                                    "context_len": context_len,
                                    "num_speculative_tokens": k,
                                    "step_ms": time,
                                }
                            )
                        for j in range(k + 1):
                            reads = 1 + rereads[backend] * j
                            time = world.base_ms * (1 + 0.02 * j) + attention * reads + world.draft_ms
                            time *= drift * np.exp(rng.normal(0, world.noise))
                            rows.append(
                                {
                                    "arm": "speculative",
                                    "verify_backend": backend,
                                    "decode_backend": None,
                                    "drafter": world.drafter,
                                    "draft_backend": None,
                                    "num_drafted_tokens": j,
                                    "q_len": j + 1,
                                    "group": group,
                                    "round": round_,
                                    "batch_size": batch_size,
                                    "context_len": context_len,
                                    "num_speculative_tokens": k,
                                    "draft_ms": world.draft_ms,
                                    "step_ms": time,
                                }
                            )
    frame = pd.DataFrame(rows)
    frame["sample"] = np.arange(len(frame))
    common = {
        "origin": "forced",
        "linear_backend": "torch",
        "weight_dtype": world.dtype,
        "kv_dtype": world.dtype,
        "launch_mode": "eager",
    }
    return _finished(frame.assign(**common), world, "loop")


def acceptance_rows(world: World, seed: int = 0) -> pd.DataFrame:
    """One row per workload, prompt, k and context band; a step drafts k tokens or, with n-grams, sometimes none."""
    rng = np.random.default_rng(seed + 1)
    edges = [*world.contexts, 2 * world.contexts[-1]]
    rows = []
    for workload, keep in world.workloads.items():
        for k in world.ks:
            for index, low in enumerate(world.contexts):
                for prompt in range(world.num_prompts):
                    chance = np.clip(
                        keep - world.decay * np.log2(low / world.contexts[0]) + rng.normal(0, 0.06), 0.02, 0.98
                    )
                    drafted = np.where(rng.random(60) < world.drafted_share, k, 0)
                    kept = np.minimum(rng.geometric(1 - chance, size=60) - 1, drafted)
                    counts = AcceptanceCounts.from_steps(zip(drafted.tolist(), kept.tolist(), strict=True), k)
                    rows.append(
                        {
                            **counts.columns(),
                            "workload": workload,
                            "prompt_id": f"{workload}-{prompt}",
                            "temperature": 0.0,
                            "seed": 0,
                            "context_len_low": low,
                            "context_len_high": edges[index + 1],
                            "num_output_tokens": 61 + counts.num_accepted_tokens,
                            "num_prompt_tokens": low,
                            "context_len": low + 40.0,
                            "prompt_digest": f"{workload}{prompt}{low}",
                            "repeated_ngram_share": keep / 2,
                        }
                    )
    frame = pd.DataFrame(rows).assign(
        target=world.target,
        drafter=world.drafter,
        weight_dtype=world.dtype,
        kv_dtype=world.dtype,
        verify_backend=world.backends[0],
        origin="measured",
        group="all",
        round=0,
    )
    frame["sample"] = 0
    return _finished(frame, world, "acceptance")


def attention_rows(
    world: World, q_lens: tuple[int, ...] = (1, 8), seed: int = 0, read_gb_per_s: float = 4000.0
) -> pd.DataFrame:
    """One row per sample; `triton_nosplit` walks the keys serially, `triton_split` changes kernel above 8K keys."""
    rng = np.random.default_rng(seed + 2)
    num_kv_heads, head_dim, num_qo_heads = 8, 128, 64
    item = 4 if world.dtype == "float32" else 2
    rows = []
    for context_len in world.contexts:
        for q_len in q_lens:
            kv_bytes = 2 * num_kv_heads * head_dim * item * (context_len + q_len)
            unique = kv_bytes + 2 * q_len * num_qo_heads * head_dim * item
            for backend in world.backends:
                reads = {"per_token": q_len, "triton_nosplit": 1.0}.get(backend, 1.0 + 0.02 * q_len)
                ideal_us = kv_bytes / read_gb_per_s / 1e3
                overhead_us = {"sdpa": 14.0, "per_token": 8.0 * q_len, "triton_split": 11.0}.get(backend, 7.0)
                serial_us = context_len / 64 * 3.1 if backend == "triton_nosplit" else 0.0
                kernel = backend
                if backend == "triton_split":
                    kernel = "split" if context_len > 8192 else "one_pass"
                    overhead_us += 6.0 if context_len > 8192 else context_len / 8192 * 30
                for round_ in range(9):
                    time_us = (overhead_us + max(serial_us, 1.18 * reads * ideal_us)) * np.exp(rng.normal(0, 0.02))
                    rows.append(
                        {
                            "backend": backend,
                            "variant": None,
                            "resolved_kernel": kernel,
                            "phase": "decode" if q_len == 1 else "verify",
                            "batch_size": 1,
                            "q_len": q_len,
                            "context_len": float(context_len),
                            "context_len_max": context_len,
                            "round": round_,
                            "sample": 0,
                            "group": f"{context_len}/{q_len}",
                            "attention_ms": time_us / 1e3,
                            "kv_bytes_read": kv_bytes,
                            "gb_per_s": unique / time_us / 1e3,
                            "error": 1e-6,
                        }
                    )
    frame = pd.DataFrame(rows).assign(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=16,
        page_order="permuted",
        q_dtype=world.dtype,
        kv_dtype=world.dtype,
        mask="causal",
        launch_mode="eager",
        l2_state="cold",
        origin="measured",
    )
    return _finished(frame, world, "attention")


def _finished(frame: pd.DataFrame, world: World, experiment: str) -> pd.DataFrame:
    digits = {"loop": "aaaaaa", "acceptance": "bbbbbb", "attention": "cccccc"}[experiment]
    frame = frame.assign(
        run_id=RUN_ID.format(digits), experiment=experiment, status="ok", reason=None, quality="ok", gpu=world.gpu
    )
    if "target" not in frame and experiment == "loop":
        frame["target"] = world.target
    frame["point_key"] = [f"{experiment}-{number}" for number in range(len(frame))]
    return frame


def write_runs(
    folder: Path, world: World, experiments: tuple[str, ...] = ("loop", "acceptance", "attention")
) -> list[Path]:
    """Stored runs of a world, as a sweep leaves them; returns their Parquet files."""
    make = {
        "loop": loop_rows,
        "acceptance": acceptance_rows,
        "attention": partial(attention_rows, read_gb_per_s=read_bandwidth(world)),
    }
    return [write_run_of(make[experiment](world), folder, world, experiment) for experiment in experiments]


def read_bandwidth(world: World) -> float:
    """Read bandwidth of the world's device in 1e9 bytes per second."""
    return 20.0 if world.gpu.startswith("cpu") else 4000.0


def write_run_of(
    frame: pd.DataFrame, folder: Path, world: World, experiment: str, grid: dict[str, list] | None = None
) -> Path:
    """One stored run of the given rows; ``grid``: what was planned."""
    names = [column.name for column in columns(experiment) if column.name in frame]
    values = frame[names].astype(object).where(frame[names].notna(), None)
    sidecar = {
        "experiment": experiment,
        "run_id": frame["run_id"].iloc[0],
        "gpu": world.gpu,
        "grid": grid or {},
        "calibration": {"read_gb_per_s": read_bandwidth(world), "cache_bytes": 32 << 20},
        "provenance": {
            "device": {"name": "Synthetic device", "slug": world.gpu, "driver": None},
            "versions": {"numpy": np.__version__, "torch": None},
            "commit": "0" * 40,
            "dirty": False,
        },
    }
    path = folder / experiment / world.gpu / f"{sidecar['run_id']}.parquet"
    return write_run(path, [build_table(experiment, {name: values[name].tolist() for name in names})], sidecar)
