"""Planted step times of an engine and the forwards that labkit would have measured of its kernels."""

from pathlib import Path

import numpy as np

from labkit.results import build_table, write_run

CONTEXTS, BATCHES = (2048, 16384, 65536, 131072), (1, 8)
SETTINGS = {
    "FLASH_ATTN": ("fa3", "fa3"),
    "TRITON_ATTN": ("triton_segmented_3d", "triton_segmented_2d"),
    "FLASHINFER": ("flashinfer_decode", "flashinfer_auto"),
}
# ms per 1,000 tokens of one request and forward; the unsplit verify kernel walks its keys alone, whatever the batch.
SLOPES = {"fa3": 0.035, "triton_segmented_3d": 0.045, "triton_segmented_2d": 0.6, "flashinfer_decode": 0.04}
SLOPES["flashinfer_auto"] = 0.05
PLAIN_HOST, HOST = 0.9, 2.4


def forward_ms(backend: str, batch: int, q_len: int, context: int) -> float:
    alone = backend.endswith("_2d")
    return 4.6 + 0.02 * q_len * batch + SLOPES[backend] * context / 1000 * (1 if alone else batch)


def write_engine_run(
    folder: Path, *, noise: float = 0.02, ks=(0, 3), drafts: float = 1.0, seed: int = 0, day: int = 1
) -> Path:
    """A run of engine steps; ``drafts``: share of the k drafts that were made."""
    rng, run_id, gpu = np.random.default_rng(seed), f"2026010{day}T000000Z-eeeeee", "nvidia-h200"
    rows = []
    for setting, (decode, verify) in SETTINGS.items():
        for k in ks:
            for batch in BATCHES:
                for context in CONTEXTS:
                    backend, host = (verify, HOST) if k else (decode, PLAIN_HOST)
                    for window in range(6):
                        step = forward_ms(backend, batch, 1 + k, context) + host
                        times = step * np.exp(rng.normal(0, noise, 16))
                        counts = {"num_verify_steps": 19 * batch, "num_drafted_steps": 19 * batch}
                        counts |= {"num_drafted_tokens": round(19 * batch * k * drafts)}
                        counts |= {"num_accepted_tokens": round(19 * batch * k * drafts)}
                        counts |= {"draft_ms": 0.2}
                        rows.append(
                            {"run_id": run_id, "experiment": "replay", "status": "ok", "gpu": gpu, "round": window}
                            | {"origin": "forced" if k else "measured", "sample": 0, "engine": "vllm"}
                            | {
                                "point_key": f"{setting}{k}{batch}{context}{window}",
                                "group": f"{setting}{k}{batch}{context}",
                            }
                            | {"record": "steps", "engine_version": "0.24.0", "endpoint": f"vllm {setting}"}
                            | {"launch": f"{setting}{k}", "scene": "engine_steps", "stage": "measured"}
                            | {"concurrency": batch, "batch_size": batch, "target": "llama-3-8b"}
                            | {"num_speculative_tokens": k, "arm": "speculative" if k else "plain"}
                            | {"verify_backend": setting if k else None, "decode_backend": None if k else setting}
                            | {"context_len": float(context), "num_steps": 16, "step_times_ms": times.tolist()}
                            | (counts if k else dict.fromkeys(counts))
                        )
    return _write(folder, "replay", gpu, run_id, rows)


def write_step_run(folder: Path, *, leave_out: str = "") -> Path:
    """Forwards of the paired backends at the same cells."""
    run_id, gpu = "20260101T000000Z-ffffff", "nvidia-h200"
    rows = [
        {"run_id": run_id, "experiment": "step", "status": "ok", "gpu": gpu, "origin": "measured", "sample": 0}
        | {"point_key": f"{backend}{q_len}{batch}{context}", "group": f"{batch}{context}", "round": 0}
        | {"target": "random:llama-3-8b", "backend": backend, "phase": "decode" if q_len == 1 else "verify"}
        | {"batch_size": batch, "q_len": q_len, "context_len": float(context), "weight_dtype": "bfloat16"}
        | {"kv_dtype": "bfloat16", "launch_mode": "graph", "forward_ms": forward_ms(backend, batch, q_len, context)}
        | {"attention_ms": forward_ms(backend, batch, q_len, context) - forward_ms(backend, batch, q_len, 0)}
        for backend in SLOPES
        if backend != leave_out
        for q_len in (1, 4, 8)
        for batch in BATCHES
        for context in CONTEXTS
    ]
    return _write(folder, "step", gpu, run_id, rows)


def write_attention_run(folder: Path, backends: tuple[str, ...]) -> Path:
    """One layer's attention of a model of 32 layers with 32 query and 8 KV heads."""
    run_id, gpu = "20260101T000000Z-dddddd", "nvidia-h200"
    rows = [
        {"run_id": run_id, "experiment": "attention", "status": "ok", "gpu": gpu, "origin": "measured", "sample": 0}
        | {"point_key": f"{backend}{q_len}{batch}{context}", "group": f"{batch}{context}", "round": 0}
        | {"backend": backend, "phase": "decode" if q_len == 1 else "verify", "batch_size": batch, "q_len": q_len}
        | {"context_len": float(context), "context_len_max": context, "num_qo_heads": 32, "num_kv_heads": 8}
        | {"head_dim": 128, "page_size": 16, "page_order": "permuted", "q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
        | {"mask": "causal", "launch_mode": "graph", "l2_state": "cold"}
        | {"attention_ms": (forward_ms(backend, batch, q_len, context) - forward_ms(backend, batch, q_len, 0)) / 32}
        for backend in backends
        for q_len in (1, 4, 8)
        for batch in BATCHES
        for context in CONTEXTS
    ]
    return _write(folder, "attention", gpu, run_id, rows)


def _write(folder: Path, experiment: str, gpu: str, run_id: str, rows: list[dict]) -> Path:
    path = folder / experiment / gpu / f"{run_id}.parquet"
    values = {name: [row[name] for row in rows] for name in rows[0]}
    return write_run(path, [build_table(experiment, values)], {"run_id": run_id, "experiment": experiment, "gpu": gpu})
