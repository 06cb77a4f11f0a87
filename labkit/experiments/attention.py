"""Attention over a paged cache: time of each backend over context, query length and batch, checked before timed."""

import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from labkit.cost import kv_bytes_read
from labkit.device_state import monitor
from labkit.errors import InputError, Unsupported
from labkit.experiments import common
from labkit.provenance import utc_now
from labkit.quality import Limits
from labkit.shapes import AttentionShape, dtype_bytes, model_shape

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
        "kv_dtype": ["as q"],
        "mask": ["causal"],
        "window": [0],
        "shared_prefix_len": [0],
        "l2_state": ["cold"],
        "launch_mode": ["eager"],
        "num_rounds": [15],
        **common.REPEATS,
        "seed": [0],
    }
}
PRESETS["gpu"] = PRESETS["cpu"] | {
    "backend": [
        *("triton_split", "triton_nosplit", "triton_segmented_2d", "triton_decode8", "triton_per_token"),
        *("flashinfer_fa2", "flashinfer_auto", "flashinfer_decode", "fa3", "fa3_nosplit"),
    ],
    "model": ["qwen3-32b"],
    "context_len": [131072, 1024, 16384, 4096, 65536],
    "q_len": [8, 1, 4],
    "page_order": ["permuted"],
    "q_dtype": ["bfloat16"],
    "launch_mode": ["graph"],
}
_LIBRARIES = ["triton_split", "flashinfer_fa2", "flashinfer_decode", "fa3"]
_LADDER = ["triton_nosplit", "triton_ladder_split", "triton_ladder_packed", "triton_ladder_staged"]
_ENGINES = ["triton_per_token", "triton_decode8", "triton_segmented_2d", "triton_segmented_3d"]
_CONTEXTS = [131072, 1024, 16384, 262144, 65536, 4096, 32768, 2048, 8192]
# The committed grid of a data centre GPU: ours against the libraries over batches, then every path over the context.
PRESETS["full"] = PRESETS["gpu"] | {
    "num_rounds": [31],
    "backend": _LIBRARIES,
    "model": ["64/8/128", "24/4/256", "32/8/128"],
    "context_len": [131072, 2048, 16384],
    "q_len": [1, 8, 4, 16],
    "batch_size": [1, 4, 16],
}
_ONE_REQUEST: common.Axes = {"batch_size": [1], "q_len": [8, 1]}
_OVER_CONTEXT = _ONE_REQUEST | {"model": ["64/8/128", "24/4/256"], "context_len": _CONTEXTS}
_EVERY_PATH = [*_LIBRARIES, *_LADDER, *_ENGINES, "flashinfer_auto", "fa3_nosplit", "per_token"]
_SDPA = ["triton_split", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"]
_SHORT: common.Axes = {"model": ["32/8/128"], "context_len": [200, 500, 1000, 2000]}
_MORE_GRIDS: dict[str, list[common.Axes]] = {
    "full": [
        _OVER_CONTEXT | {"backend": _EVERY_PATH},
        _OVER_CONTEXT | {"backend": _LIBRARIES, "kv_dtype": ["float8_e4m3fn"]},
        {"backend": _LIBRARIES, "context_len": _CONTEXTS, "q_len": [2, 32, 4, 16], "batch_size": [1]},
        _ONE_REQUEST | _SHORT | {"backend": [*_LIBRARIES, "triton_nosplit", "triton_decode8"]},
        _ONE_REQUEST | {"backend": _LIBRARIES, "page_size": [64, 1], "model": ["64/8/128"]},
        _ONE_REQUEST
        | {"backend": _SDPA, "page_order": ["sequential"], "model": ["64/8/128"], "context_len": [16384, 131072, 1024]},
    ]
}
PRESETS["ci"] = PRESETS["cpu"] | {"context_len": [512, 1024], "q_len": [1, 3], "num_rounds": [3], "max_repeats": [1]}

_ONE_VALUE = ("num_rounds", *common.REPEATS, "seed")
_CELL = (
    *("model", "batch_size", "page_size", "page_order", "q_dtype", "kv_dtype", "mask", "window", "shared_prefix_len"),
    *("l2_state", "launch_mode", "context_len", "q_len"),
)
_SHAPE = ("batch_size", "q_len", "context_len", "page_size", "q_dtype", "mask", "shared_prefix_len")  # of the cell
_NAMES = {
    "l2_state": ("cold", "warm"),
    "launch_mode": ("eager", "graph"),
    "page_order": ("sequential", "permuted"),
    "mask": ("causal", "tree"),
    "q_dtype": ("bfloat16", "float16", "float32"),
    "kv_dtype": ("as q", "bfloat16", "float16", "float32", "float8_e4m3fn"),
}
_WORKSPACE_BYTES = 4 << 30  # scratch of the backends and of the oracle
_TILE_KEYS = 64


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """One point per backend and cell; the backends of a cell share a ``group`` and are interleaved.

    Raises InputError for an unknown preset, axis, backend or model shape, or a context of 0.
    """
    found: list[dict[str, Any]] = []
    for prefix, grid in common.grids(PRESETS, _MORE_GRIDS, preset, axes):
        found += _points_of_grid(grid, prefix)
    return found


def _points_of_grid(grid: common.Axes, prefix: str) -> list[dict[str, Any]]:
    common.check_backends("backend", grid["backend"])
    for axis, known in _NAMES.items():
        common.check_names(axis, grid[axis], known)
    for model in grid["model"]:
        heads_of(model)
    common.check_lengths(grid)
    fixed = {name: common.sole(grid, name) for name in _ONE_VALUE}
    found = []
    for values in product(*(grid[name] for name in _CELL)):
        cell = dict(zip(_CELL, values, strict=True))
        shape_of(cell)
        group = prefix + "/".join(str(value) for value in values)
        found += [fixed | cell | {"group": group, "backend": backend} for backend in grid["backend"]]
    return found


def heads_of(model: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a model shape by name, of a model folder, or of ``24/4/256``."""
    if os.path.isfile(os.path.join(model, "config.json")):  # False for what can be no path, where Path raises
        from labkit.models.weights import read_config

        shape, _ = read_config(Path(model), model)
    elif "/" in model:
        try:
            num_qo_heads, num_kv_heads, head_dim = map(int, model.split("/"))
        except ValueError:
            raise InputError(f"model: wanted a name or heads such as 24/4/256, got {model!r}") from None
        return num_qo_heads, num_kv_heads, head_dim
    else:
        shape = model_shape(model)
    return shape.num_qo_heads, shape.num_kv_heads, shape.head_dim


run = common.runner("attention", points)


def shape_of(point: dict[str, Any]) -> AttentionShape:
    """The attention shape of a point: the model's heads at the point's lengths."""
    num_qo_heads, num_kv_heads, head_dim = heads_of(point["model"])
    return AttentionShape(
        **{name: point[name] for name in _SHAPE},
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=None if point["kv_dtype"] == "as q" else point["kv_dtype"],
        window=point["window"] or None,
    )


def measure(cell: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """Check each backend of a cell against the oracle on these inputs, then time the right ones in turn."""
    import torch

    from labkit.attention.api import AttentionSpec, prepare
    from labkit.attention.inputs import check, expect, make_inputs, random_tree
    from labkit.attention.launched import launched_kernels
    from labkit.timing import sample_rounds

    first, shape, device = cell[0], shape_of(cell[0]), common.device()
    if first["launch_mode"] == "graph" and device == "cpu":
        return [Unsupported(common.NO_GRAPHS) for _ in cell]
    common.load_backends(first)
    _check_memory(shape, device)
    generator = torch.Generator(device).manual_seed(first["seed"])
    q, cache = make_inputs(shape, generator=generator, device=device, page_order=first["page_order"])
    tree = random_tree(shape, generator) if shape.mask == "tree" else None
    spec = AttentionSpec(window=shape.window, tree=tree)
    expected = expect(q, cache, spec)
    results: list[list[dict[str, Any]] | Exception] = [[] for _ in cell]
    calls: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for index, point in enumerate(cell):
        try:
            call = prepare(q, cache, backend=point["backend"], spec=spec)
            error = check(call, cache, spec, expected)
            begin = time.perf_counter()
            call.plan()  # again: the first time may import and compile
            if device != "cpu":
                torch.cuda.synchronize()
            facts[str(index)] = _facts(shape, call, error, (time.perf_counter() - begin) * 1e3)
            calls[str(index)] = call
        except Exception as error:  # handed to the sweep, which stores it as this backend's status
            results[index] = error
    if not calls:
        return results
    if device != "cpu":
        for name, kernels in launched_kernels(calls).items():
            facts[name] |= _launched(facts[name], kernels)
    limits = Limits(first)
    how = {"monitor": monitor(device), "device": device, "seed": first["seed"], "l2": first["l2_state"]}
    samples = sample_rounds(calls, graph=first["launch_mode"] == "graph", **how, **limits.of_rounds)
    for name in calls:
        rows = _rows([sample for sample in samples if sample["name"] == name], shape, facts[name])
        limits.mark(rows, "attention_ms")
        results[int(name)] = rows
    return results


def _check_memory(shape: AttentionShape, device: str) -> None:
    """Raise MemoryError (status oom) for what would not fit: the cache, one request in float32, scratch."""
    if device == "cpu":
        return
    import torch

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    longest, per_token = max(shape.kv_lens), shape.num_kv_heads * shape.head_dim * 2
    stored = shape.batch_size * longest - (shape.batch_size - 1) * shape.shared_prefix_len
    needed = per_token * (stored * dtype_bytes(str(shape.kv_dtype)) + 3 * longest * dtype_bytes("float32"))
    needed += _WORKSPACE_BYTES
    if needed > free:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; computed, not tried")


def _launched(facts: dict[str, Any], kernels: list[Any]) -> dict[str, Any]:
    """What the profiler adds: the kernels' names, and the largest grid where the backend does not know its own."""
    if not kernels:
        return {}
    names = " + ".join(kernel.name for kernel in kernels)
    found = {"resolved_kernel": f"{facts['resolved_kernel']}: {names}"}
    if facts["num_programs"] is None:
        found["num_programs"] = max(kernels, key=lambda kernel: kernel.time_us).num_programs
    return found


def _facts(shape: AttentionShape, call: Any, error: float, plan_ms: float) -> dict[str, Any]:
    """What is the same in every sample of a backend: the shape, what really runs, how exact it was."""
    from labkit.attention.api import backend_digest

    info, known = call.info, ("num_programs", "num_splits", "kv_passes", "workspace_bytes")
    stored = ("context_len_max", "num_qo_heads", "num_kv_heads", "head_dim", "kv_dtype", "window")
    facts = {name: getattr(shape, name) for name in stored} | {name: info.get(name) for name in known}
    return facts | {
        "backend_digest": backend_digest(call.backend),
        "resolved_kernel": info["resolved_kernel"],
        "phase": "decode" if shape.q_len == 1 else "verify",
        "mask": shape.mask if shape.window is None else "window",
        "shared_prefix_len": shape.shared_prefix_len or None,
        "plan_ms": plan_ms,
        "kv_bytes_read": kv_bytes_read(shape),
        "error": error,
        "verified_at": utc_now(),
    }


def _rows(samples: list[dict[str, Any]], shape: AttentionShape, facts: dict[str, Any]) -> list[dict[str, Any]]:
    tiles = -(-max(shape.kv_lens) // _TILE_KEYS) if facts["num_splits"] == 1 else None
    return [
        facts
        | {
            "round": sample["round"],
            "sample": sample["sample"],
            "state": sample["state"],
            "bytes_touched": sample["displaced_bytes"] + facts["kv_bytes_read"],
            "attention_ms": sample["ms"],
            "gb_per_s": facts["kv_bytes_read"] / sample["ms"] / 1e6,
            "tile_us": tiles and sample["ms"] * 1e3 / tiles,
            "sm_clock_mhz": sample["state"].sm_clock_mhz,
            "power_w": sample["state"].power_w,
        }
        for sample in samples
    ]
