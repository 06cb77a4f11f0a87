"""Attention over a paged cache: time of each backend over context, query length and batch, checked before timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from labkit.cost import kv_bytes_read
from labkit.errors import InputError
from labkit.experiments import common
from labkit.provenance import utc_now
from labkit.shapes import AttentionShape, model_shape
from labkit.sweep import RunResult
from labkit.timing import quality_of

PRESETS: dict[str, common.Axes] = {
    "cpu": {
        "backend": ["sdpa", "per_token"],
        "model": ["smollm2-135m"],
        "context_len": [512, 1024, 2048, 4096, 8192],
        "q_len": [1, 3, 5, 8],
        "batch_size": [1],
        "page_size": [16],
        "page_order": ["sequential"],
        "q_dtype": ["float32"],
        "l2_state": ["cold"],
        "launch_mode": ["eager"],
        "num_rounds": [15],
        "seed": [0],
    }
}
PRESETS["gpu"] = PRESETS["cpu"] | {
    "backend": ["triton_split", "triton_nosplit", "per_token", "sdpa"],
    "model": ["qwen3-32b"],
    "context_len": [1024, 4096, 16384, 65536, 131072],
    "q_len": [1, 8],
    "page_order": ["permuted"],
    "q_dtype": ["bfloat16"],
}
PRESETS["ci"] = PRESETS["cpu"] | {"context_len": [512, 1024], "q_len": [1, 3], "num_rounds": [3]}

_ONE_VALUE = ("num_rounds", "seed")
_CELL = (
    "model",
    "batch_size",
    "page_size",
    "page_order",
    "q_dtype",
    "l2_state",
    "launch_mode",
    "context_len",
    "q_len",
)


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """One point per backend and cell; the backends of a cell share a ``group`` and are interleaved.

    Raises InputError for an unknown preset, axis, backend or model shape, or a context of 0.
    """
    grid = common.axes_of(PRESETS, preset, axes)
    common.check_backends("backend", grid["backend"])
    common.check_names("l2_state", grid["l2_state"], ("cold", "warm"))
    common.check_names("launch_mode", grid["launch_mode"], ("eager", "graph"))
    common.check_names("page_order", grid["page_order"], ("sequential", "permuted"))
    for model in grid["model"]:
        model_shape(model)
    if 0 in grid["context_len"]:
        raise InputError("context_len: wanted 1 or more, got 0")
    fixed = {name: common.sole(grid, name) for name in _ONE_VALUE}
    found = []
    for values in product(*(grid[name] for name in _CELL)):
        cell = dict(zip(_CELL, values, strict=True))
        group = "/".join(str(value) for value in values)
        found += [fixed | cell | {"group": group, "backend": backend} for backend in grid["backend"]]
    return found


def run(
    preset: str = "cpu",
    *,
    out_dir: Path | None = None,
    options: dict[str, Any] | None = None,
    **axes: Sequence[Any],
) -> RunResult:
    """Measure a preset with some axes replaced. ``options`` go to `labkit.sweep.run_sweep` (resume, budget, ...)."""
    return common.sweep("attention", points(preset, **axes), out_dir=out_dir, **(options or {}))


def shape_of(point: dict[str, Any]) -> AttentionShape:
    """The attention shape of a point: the model's heads at the point's lengths."""
    model = model_shape(point["model"])
    return AttentionShape(
        batch_size=point["batch_size"],
        q_len=point["q_len"],
        context_len=point["context_len"],
        num_qo_heads=model.num_qo_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=point["page_size"],
        q_dtype=point["q_dtype"],
    )


def measure(cell: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """Check each backend of a cell against the oracle on these inputs, then time the right ones in turn."""
    import torch

    from labkit.attention.api import AttentionSpec, prepare
    from labkit.attention.inputs import check, make_inputs
    from labkit.timing import sample_rounds

    first, shape, device, spec = cell[0], shape_of(cell[0]), common.device(), AttentionSpec()
    common.load_backends(first)
    generator = torch.Generator().manual_seed(first["seed"])
    q, cache = make_inputs(shape, generator=generator, device=device, page_order=first["page_order"])
    results: list[list[dict[str, Any]] | Exception] = [[] for _ in cell]
    calls: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for index, point in enumerate(cell):
        try:
            begin = time.perf_counter()
            call = prepare(q, cache, backend=point["backend"], spec=spec)
            plan_ms = (time.perf_counter() - begin) * 1e3
            facts[str(index)] = _facts(shape, call, check(call, cache, spec), plan_ms)
            calls[str(index)] = call
        except Exception as error:  # handed to the sweep, which stores it as this backend's status
            results[index] = error
    if not calls:
        return results
    samples = sample_rounds(
        calls, num_rounds=first["num_rounds"], device=device, l2=first["l2_state"],
        graph=first["launch_mode"] == "graph", seed=first["seed"],
    )  # fmt: skip
    for name in calls:
        results[int(name)] = _rows([sample for sample in samples if sample["name"] == name], facts[name])
    return results


def _facts(shape: AttentionShape, call: Any, error: float, plan_ms: float) -> dict[str, Any]:
    """What is the same in every sample of a backend: the shape, what really runs, how exact it was."""
    from labkit.attention.api import backend_digest

    info = call.info
    return {
        "backend_digest": backend_digest(call.backend),
        "resolved_kernel": info["resolved_kernel"],
        "phase": "decode" if shape.q_len == 1 else "verify",
        "context_len_max": shape.context_len_max,
        "num_qo_heads": shape.num_qo_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "kv_dtype": shape.kv_dtype,
        "mask": "causal",
        "plan_ms": plan_ms,
        "kv_bytes_read": kv_bytes_read(shape),
        "num_programs": info.get("num_programs"),
        "num_splits": info.get("num_splits"),
        "kv_passes": info.get("kv_passes"),
        "workspace_bytes": info.get("workspace_bytes"),
        "error": error,
        "verified_at": utc_now(),
    }


def _rows(samples: list[dict[str, Any]], facts: dict[str, Any]) -> list[dict[str, Any]]:
    quality = quality_of([sample["ms"] for sample in samples])
    return [
        facts
        | {
            "round": sample["round"],
            "sample": sample["sample"],
            "quality": quality,
            "bytes_touched": sample["displaced_bytes"] + facts["kv_bytes_read"],
            "attention_ms": sample["ms"],
            "gb_per_s": facts["kv_bytes_read"] / sample["ms"] / 1e6,
        }
        for sample in samples
    ]
