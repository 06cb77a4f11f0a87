"""One model forward: decode, verify and a drafter's, at production shapes with random weights, taken apart.

The cache is filled directly, so any context costs nothing to reach. All backends and query lengths of a cell are
interleaved; on a GPU each forward is one CUDA graph, sampling included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from labkit.cost import attention_shape, kv_bytes_read
from labkit.device_state import monitor
from labkit.errors import InputError, Unsupported, WrongResult
from labkit.experiments import common
from labkit.quality import Limits
from labkit.shapes import MAX_Q_LEN, AttentionShape, ModelShape

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.decoder import Decoder

PRESETS: dict[str, common.Axes] = {
    "cpu": {
        "target": ["smollm2-135m"],
        "drafter": ["none"],
        "backend": ["sdpa", "per_token"],
        "context_len": [512, 2048, 6144],
        "batch_size": [1],
        "q_len": [1, 3, 5],
        "weight_dtype": ["float32"],
        "kv_dtype": ["as activations"],
        "shared_prefix_len": [0],
        "launch_mode": ["eager"],
        "num_rounds": [10],
        **common.REPEATS,
        "energy_s": [0],
        "seed": [0],
    }
}
_PAIRINGS = ["triton_split", "fa3", "flashinfer_fa2", "triton_decode8", "triton_nosplit"]
PRESETS["gpu"] = PRESETS["cpu"] | {
    "target": ["random:llama-3-8b"],
    "backend": _PAIRINGS,
    "context_len": [131072, 2048, 16384, 65536],
    "q_len": [1, 4, 8],
    "weight_dtype": ["bfloat16"],
    "launch_mode": ["graph"],
}
_CONTEXTS = [131072, 2048, 32768, 8192, 262144, 1024, 65536, 16384, 4096]
# Important cells first, so that a run that is cut is still of use.
PRESETS["full"] = PRESETS["gpu"] | {
    "target": ["random:hybrid-27b"],
    "drafter": ["none", "one layer"],
    "context_len": _CONTEXTS,
}
_THREE = ["triton_split", "fa3", "triton_nosplit"]
_LLAMA: common.Axes = {"target": ["random:llama-3-8b"], "drafter": ["none"]}
_MORE_GRIDS: dict[str, list[common.Axes]] = {
    "full": [
        _LLAMA | {"context_len": _CONTEXTS[:3], "q_len": [1, 2, 4, 6, 8, 12, 16]},
        _LLAMA | {"context_len": [65536, 16384, 1024, 8192, 4096], "q_len": [1, 4, 8, 16]},
        {"kv_dtype": ["float8_e4m3fn"], "backend": ["triton_split", "flashinfer_fa2"], "drafter": ["none"]},
        _LLAMA | {"context_len": [16384, 2048, 65536], "batch_size": [4, 16], "backend": _THREE},
        _LLAMA | {"target": ["random:qwen3-32b"], "context_len": [131072, 2048, 16384], "backend": _THREE},
        _LLAMA | {"backend": ["triton_split"], "context_len": [2048, 131072], "q_len": [1, 8], "energy_s": [2]},
        _LLAMA
        | {
            "weight_dtype": ["float8_e4m3fn"],
            "context_len": [2048, 131072],
            "backend": ["triton_split", "triton_nosplit"],
        },
    ]
}
# C1: one long prefix shared by all requests, 3 drafts.
PRESETS["shared-prefix"] = PRESETS["gpu"] | {
    "backend": ["flashinfer_cascade", "flashinfer_fa2", "triton_split", "fa3"],
    "context_len": [126_976 + 1024],
    "shared_prefix_len": [126_976],
    "batch_size": [1, 4, 8],
    "q_len": [1, 4],
}
PRESETS["ci"] = PRESETS["cpu"] | {
    "target": ["random:tiny"],
    "context_len": [64, 128],
    "q_len": [1, 3],
    "num_rounds": [3],
    "max_repeats": [1],
}

_FIXED = ("num_rounds", *common.REPEATS, "seed", "energy_s")
_CELL = ("target", "weight_dtype", "kv_dtype", "batch_size", "context_len", "shared_prefix_len", "launch_mode")
_DRAFTERS = ("none", "one layer")
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_KV_DTYPES = ("as activations", "float8_e4m3fn")
_MAX_ERROR = 0.1  # of the logits between attention backends, after tens of layers in 16 bits
_PAGE_SIZE = 16
_WORKSPACE_BYTES = 6 << 30  # scratch of the backends, of the oracle and of drawing the weights


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """One point per forward; those of a cell share a ``group`` and are interleaved.

    Raises InputError for an unknown preset, axis, backend, target, drafter or dtype, or a context of 0.
    """
    found: list[dict[str, Any]] = []
    for prefix, grid in common.grids(PRESETS, _MORE_GRIDS, preset, axes):
        found += _points_of_grid(grid, prefix)
    return found


def _points_of_grid(grid: common.Axes, prefix: str) -> list[dict[str, Any]]:
    common.check_backends("backend", grid["backend"])
    known = {"drafter": _DRAFTERS, "weight_dtype": _WEIGHT_DTYPES, "kv_dtype": _KV_DTYPES}
    for axis, names in (known | {"launch_mode": ("graph", "eager")}).items():
        common.check_names(axis, grid[axis], names)
    common.check_lengths(grid)
    for target in grid["target"]:
        shape = common.target_shape(target)
        longest = max(grid["context_len"]) + max(grid["q_len"])
        if longest > shape.max_context_len:
            raise InputError(f"axis context_len: {target} holds {shape.max_context_len} tokens, got {longest}")
    fixed = {name: common.sole(grid, name) for name in _FIXED}
    found = []
    for values in product(*(grid[name] for name in _CELL)):
        cell = fixed | dict(zip(_CELL, values, strict=True))
        cell["group"] = prefix + "/".join(str(value) for value in values)
        for drafter, backend, q_len in product(grid["drafter"], grid["backend"], grid["q_len"]):
            phase = "decode" if q_len == 1 else "verify"
            if drafter != "none":
                phase = "draft" if q_len == 1 else "draft_extend"
            found.append(cell | {"drafter": drafter, "backend": backend, "q_len": q_len, "phase": phase})
    return found


run = common.runner("step", points)


def shape_of(point: dict[str, Any]) -> ModelShape:
    """The model of a forward: the target, or a drafter of one full-attention layer with the target's output head."""
    shape = common.target_shape(point["target"])
    if point["drafter"] != "none":
        shape = replace(shape, name=f"{shape.name}, one layer", num_layers=1, full_attention_interval=1)
    return shape


def memory_bytes(point: dict[str, Any]) -> float:
    """Weights, cache, states and logits of a forward of this point; what a backend needs for itself is not counted."""
    shape, kv_dtype = shape_of(point), _kv_dtype(point)
    own = point["context_len"] - point["shared_prefix_len"]
    tokens = point["shared_prefix_len"] + point["batch_size"] * (own + MAX_Q_LEN)
    cache = tokens * shape.kv_bytes_per_token(kv_dtype)
    states = point["batch_size"] * point["q_len"] * shape.delta_state_bytes
    rows = point["batch_size"] * point["q_len"]
    return shape.weight_bytes(point["weight_dtype"]) + cache + states + 8 * rows * shape.vocab_size


def _activation_dtype(point: dict[str, Any]) -> str:
    return "bfloat16" if point["weight_dtype"] == "float8_e4m3fn" else point["weight_dtype"]


def _kv_dtype(point: dict[str, Any]) -> str:
    return _activation_dtype(point) if point["kv_dtype"] == "as activations" else point["kv_dtype"]


def measure(cell: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """All forwards of one cell: checked against one another, taken apart once, then timed in turn."""
    from labkit.models.anatomy import anatomy
    from labkit.timing import sample_rounds

    common.load_backends(cell[0])
    device, first = common.device(), cell[0]
    results: list[list[dict[str, Any]] | Exception] = [[] for _ in cell]
    if first["launch_mode"] == "graph" and device == "cpu":
        return [Unsupported("launch_mode graph needs a CUDA device") for _ in cell]
    calls: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for drafter in dict.fromkeys(point["drafter"] for point in cell):
        members = [index for index, point in enumerate(cell) if point["drafter"] == drafter]
        try:
            _check_memory([cell[index] for index in members], device)
            maker = _Forwards([cell[index] for index in members], device)
        except Exception as error:  # handed to the sweep, which stores it as the status of these points
            for index in members:
                results[index] = error
            continue
        for index in members:
            try:
                calls[str(index)] = maker.make(cell[index])
                facts[str(index)] = _facts(cell[index], maker.decoder)
            except Exception as error:  # likewise, for this point
                results[index] = error
    if not calls:
        return results
    if first["launch_mode"] == "graph":
        for name, parts in anatomy(calls).items():
            facts[name] |= parts
    limits = Limits(first)
    how = {"monitor": monitor(device), "device": device, "seed": first["seed"]}
    timed = sample_rounds(calls, l2="warm", **how, **limits.of_rounds)
    for name, call in calls.items():
        fact = facts[name] | _energy(call, first["energy_s"], device)
        own = [sample for sample in timed if sample["name"] == name]
        rows = [
            fact | {n: sample[n] for n in ("round", "sample", "state")} | {"forward_ms": sample["ms"]} for sample in own
        ]
        limits.mark(rows, "forward_ms")
        results[int(name)] = rows
    return results


def _check_memory(points: list[dict[str, Any]], device: str) -> None:
    """Raise MemoryError (status oom) where the largest of these forwards cannot fit: computed, not tried."""
    if device == "cpu":
        return
    import gc

    import torch

    _models(*_model_key(points[0]))  # drops the models of another target
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    needed = max(memory_bytes(point) for point in points) + _WORKSPACE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    if needed > total:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB, the device has {total / 1e9:.1f} GB; computed, not tried")


def _model_key(point: dict[str, Any]) -> tuple[str, str]:
    return common.model_source(point), point["weight_dtype"]


@lru_cache(maxsize=1)
def _models(source: str, weight_dtype: str) -> dict[str, Decoder]:
    """Decoders of the present target by drafter, filled by `_decoder`; the worker keeps them from cell to cell."""
    return {}


def _decoder(point: dict[str, Any], device: str) -> Decoder:
    held = _models(*_model_key(point))
    if point["drafter"] not in held:
        from labkit.models.weights import load_model

        source: Any = shape_of(point) if common.is_random(point["target"]) else common.model_source(point)
        options = {"linear_backend": "torch.linear"} if point["launch_mode"] == "graph" else {}
        held[point["drafter"]] = load_model(
            source, dtype=_activation_dtype(point), device=device, seed=point["seed"],
            float8=point["weight_dtype"] == "float8_e4m3fn", **options,
        )  # fmt: skip
    return held[point["drafter"]]


class _Forwards:
    """The forwards of one model over one filled cache, each compared with the first before it may be timed."""

    def __init__(self, points: list[dict[str, Any]], device: str):
        import torch

        from labkit.models.gated_delta import DeltaState

        first, self._device = points[0], device
        self.decoder = _decoder(first, device)
        generator = torch.Generator(device).manual_seed(first["seed"])
        longest = max(point["q_len"] for point in points)
        self._cache: PagedKVCache = self.decoder.new_cache(
            first["batch_size"], first["context_len"] + longest, kv_dtype=_kv_dtype(first), page_size=_PAGE_SIZE,
            page_order="permuted" if device != "cpu" else "sequential", generator=generator,
        )  # fmt: skip
        if first["shared_prefix_len"]:
            self._cache.share_prefix(first["shared_prefix_len"])
        self._cache.fill_random(first["context_len"], generator)
        self._tokens = torch.randint(
            self.decoder.shape.vocab_size, (first["batch_size"], longest), generator=generator, device=device
        )
        shape = self.decoder.shape
        self._states = None
        if shape.num_delta_layers:
            self._states = DeltaState(shape, first["batch_size"], longest, self.decoder.activation_dtype, device)
        self._first_logits: Any = None

    def make(self, point: dict[str, Any]) -> Callable[[], object]:
        """A call that runs the forward; the cache's lengths stay as they are."""
        _check_attention(point, self.decoder.shape, self._device)
        return self._eager(point) if point["launch_mode"] == "eager" else self._captured(point)

    def _eager(self, point: dict[str, Any]) -> Callable[[], object]:
        tokens, context_len = self._tokens[:, : point["q_len"]], point["context_len"]

        def call() -> Any:
            logits = self.decoder.forward(tokens, self._cache, backend=point["backend"])
            self._cache.truncate(context_len)
            return logits.argmax(-1), logits

        self._compare(point, call()[1])
        return call

    def _captured(self, point: dict[str, Any]) -> Callable[[], object]:
        import torch

        from labkit.models.static_forward import StaticForward

        forward = StaticForward(
            self.decoder, self._cache, q_len=point["q_len"], backend=point["backend"], delta_state=self._states,
            pdl=torch.cuda.get_device_capability() >= (9, 0),
        )  # fmt: skip
        forward.token_ids.copy_(self._tokens[:, : point["q_len"]])
        forward.run()
        self._compare(point, forward.logits)
        forward.capture()
        return forward.replay

    def _compare(self, point: dict[str, Any], logits: Any) -> None:
        """The first token's logits depend neither on what follows nor on the backend; but a hybrid's states move on."""
        root = logits[:, 0]
        error = 0.0 if root.isfinite().all() else math.inf
        if self._first_logits is None:
            self._first_logits = root.clone()
        elif self._states is None:
            error = max(error, float((root - self._first_logits).abs().max() / self._first_logits.abs().max()))
        if error > _MAX_ERROR:
            what = "are not finite" if math.isinf(error) else f"differ from the first forward's by {error:.2g}"
            raise WrongResult(f"backend {point['backend']!r}: logits of the first token {what}")


def _check_attention(point: dict[str, Any], shape: ModelShape, device: str) -> None:
    """The backend against the oracle at the shape about to be timed, one request; raises what is wrong."""
    _check_once(point["backend"], _call_shape(point, shape, batch_size=1), device)


def _call_shape(point: dict[str, Any], model: ModelShape, batch_size: int) -> AttentionShape:
    lengths = {"q_len": point["q_len"], "context_len": point["context_len"]}
    dtypes = {"weight_dtype": point["weight_dtype"], "kv_dtype": _kv_dtype(point)}
    return attention_shape(model, batch_size=batch_size, **lengths, **dtypes)


@cache
def _check_once(backend: str, shape: AttentionShape, device: str) -> None:
    import torch

    from labkit.attention.inputs import verify_backend

    order = "permuted" if device != "cpu" else "sequential"
    verify_backend(backend, shape, generator=torch.Generator(device).manual_seed(0), device=device, page_order=order)


def _facts(point: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """What is the same in every sample of a forward."""
    import torch

    shape, on_gpu = decoder.shape, decoder.device.type == "cuda"
    call = replace(_call_shape(point, shape, point["batch_size"]), shared_prefix_len=point["shared_prefix_len"])
    return {
        "origin": "measured",
        "drafter": None if point["drafter"] == "none" else point["drafter"],
        "linear_backend": "few_rows" if point["launch_mode"] == "graph" else decoder.linear_backend,
        "kv_dtype": _kv_dtype(point),
        "num_gpus": 1 if on_gpu else None,
        "gap_ms": None,
        "weight_bytes_read": shape.weight_bytes_read(point["weight_dtype"]),
        "kv_bytes_read": shape.num_attention_layers * kv_bytes_read(call),
        "state_bytes": point["batch_size"] * (1 + point["q_len"]) * shape.delta_state_bytes,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _energy(call: Callable[[], object], seconds: float, device: str) -> dict[str, Any]:
    """Energy of repeated forwards over at least `seconds`; empty where not asked for or not readable."""
    if not seconds or device == "cpu":
        return {}
    import time

    import torch

    from labkit.device_state import energy_j

    begin_j = energy_j(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(16):
            call()
        torch.cuda.synchronize()
        count += 16
    end_j = energy_j(device)
    return {} if begin_j is None or end_j is None else {"energy_j": end_j - begin_j, "num_steps": count}
