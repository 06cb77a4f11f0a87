"""One model forward: decode, verify and a drafter's, at production shapes with random weights, taken apart.

The cache is filled directly, so any context costs nothing to reach. All backends and query lengths of a cell are
interleaved; on a GPU each forward is one CUDA graph, sampling included. A prefill starts from an empty cache and is
launched eagerly. With several devices the forward of one device's share is measured, and the all-reduces apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from labkit.cost import kv_bytes_read
from labkit.device_state import monitor
from labkit.errors import InputError, Unsupported
from labkit.experiments import common, step_communication
from labkit.experiments.step_forwards import PREFILL_CHUNK, Forwards, call_shape, check_memory, kv_dtype_of
from labkit.quality import Limits

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder

_FORWARDS = ("decode", "verify", "draft", "draft_extend")  # one token, or several, of the target or a drafter
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
        "phase": [*_FORWARDS],
        "num_gpus": [1],
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
_PREFILL = _LLAMA | {"phase": ["prefill"], "context_len": [2048, 16384, 131072]}
# Seconds a forward: few rounds, and never again.
_PREFILL |= {"backend": ["flashinfer_fa2", "fa3", "sdpa_flash"], "num_rounds": [3], "max_repeats": [1]}
_MORE_GRIDS: dict[str, list[common.Axes]] = {
    "full": [
        _LLAMA | {"context_len": _CONTEXTS[:3], "q_len": [1, 2, 4, 6, 8, 12, 16]},
        _LLAMA | {"context_len": [65536, 16384, 1024, 8192, 4096], "q_len": [1, 4, 8, 16]},
        {
            "kv_dtype": ["float8_e4m3fn"],
            "backend": ["triton_split", "flashinfer_fa2", "triton_decode8", "triton_nosplit"],
            "drafter": ["none"],
        },
        _LLAMA | {"context_len": [16384, 2048, 65536], "batch_size": [4, 16], "backend": _THREE},
        _LLAMA | {"target": ["random:qwen3-32b"], "context_len": [131072, 2048, 16384], "backend": _THREE},
        _LLAMA | {"backend": ["triton_split"], "context_len": [2048, 131072], "q_len": [1, 8], "energy_s": [2]},
        _LLAMA
        | {
            "weight_dtype": ["float8_e4m3fn"],
            "context_len": [2048, 131072],
            "backend": ["triton_split", "triton_nosplit"],
        },
        _PREFILL | {"context_len": [2048, 16384]},
    ]
}
PRESETS["prefill"] = PRESETS["gpu"] | _PREFILL
PRESETS["tensor-parallel"] = PRESETS["gpu"] | {
    "target": ["random:llama-3-8b", "random:qwen3-32b"],
    "num_gpus": [2, 1, 4, 8],
    "backend": ["triton_split"],
    "context_len": [131072, 2048, 16384],
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

_WARM = ("shared_prefix_len", "launch_mode")  # of forwards over a filled cache
_FIXED = ("num_rounds", *common.REPEATS, "seed", "energy_s")
_CELL = ("target", "num_gpus", "weight_dtype", "kv_dtype", "batch_size", "context_len", *_WARM)
_DRAFTERS = ("none", "one layer")
_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_KV_DTYPES = ("as activations", "float8_e4m3fn")


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """One point per forward; those of a cell share a ``group`` and are interleaved.

    A ``prefill`` runs a whole prompt of the axis's `context_len`: its q_len is that, its own context_len 0.

    Raises InputError for an unknown preset, axis, backend, target, drafter, dtype or phase, a context of 0, a number of
    devices that the heads do not divide by, or a grid without a forward of the phases.
    """
    found: list[dict[str, Any]] = []
    for prefix, grid in common.grids(PRESETS, _MORE_GRIDS, preset, axes):
        found += _points_of_grid(grid, prefix)
    if not found:
        raise InputError(f"axis phase: no forward of this grid (its drafters and q_len) is one of {axes['phase']}")
    return found


def _points_of_grid(grid: common.Axes, prefix: str) -> list[dict[str, Any]]:
    common.check_backends("backend", grid["backend"])
    known = {"drafter": _DRAFTERS, "weight_dtype": _WEIGHT_DTYPES, "kv_dtype": _KV_DTYPES}
    known |= {"phase": (*_FORWARDS, "prefill")}
    for axis, names in (known | {"launch_mode": ("graph", "eager")}).items():
        common.check_names(axis, grid[axis], names)
    common.check_lengths(grid)
    if (shared := max(grid["shared_prefix_len"])) > (shortest := min(grid["context_len"])):
        raise InputError(f"axis shared_prefix_len: wanted at most the shortest context of {shortest}, got {shared}")
    for target in grid["target"]:
        shape = common.target_shape(target)
        longest = max(grid["context_len"]) + max(grid["q_len"])
        if longest > shape.max_context_len:
            raise InputError(f"axis context_len: {target} holds {shape.max_context_len} tokens, got {longest}")
        for num_gpus in grid["num_gpus"]:
            shape.share_of(num_gpus)
            if num_gpus > 1 and not common.is_random(target):
                raise InputError(f"num_gpus: wanted 1 for stored weights, or a random: target; got {num_gpus}")
    fixed = {name: common.sole(grid, name) for name in _FIXED}
    found = []
    for values in product(*(grid[name] for name in _CELL)):
        cell = fixed | dict(zip(_CELL, values, strict=True))
        cell["group"] = prefix + "/".join(str(value) for value in values)
        for drafter, backend, q_len in product(grid["drafter"], grid["backend"], grid["q_len"]):
            phase = "decode" if q_len == 1 else "verify"
            if drafter != "none":
                phase = "draft" if q_len == 1 else "draft_extend"
            if phase in grid["phase"]:
                found.append(cell | {"drafter": drafter, "backend": backend, "q_len": q_len, "phase": phase})
    return found + (_prefills(grid, prefix, fixed) if "prefill" in grid["phase"] else [])


def _prefills(grid: common.Axes, prefix: str, fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """The prefills of a grid: no prefix is shared, and kernels are launched one by one, whatever the grid says."""
    found, axes = list[dict[str, Any]](), _CELL[: -len(_WARM)]
    fixed = fixed | {"phase": "prefill", "shared_prefix_len": 0, "launch_mode": "eager"}
    for values in product(*(grid[name] for name in axes)):
        cell = fixed | dict(zip(axes, values, strict=True)) | {"group": f"{prefix}prefill/{'/'.join(map(str, values))}"}
        cell |= {"q_len": cell["context_len"], "context_len": 0}
        found += [cell | {"drafter": d, "backend": b} for d, b in product(grid["drafter"], grid["backend"])]
    return found


run = common.runner("step", points)


def measure(cell: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """All forwards of one cell: checked against one another, taken apart once, then timed in turn."""
    from labkit.models.anatomy import anatomy
    from labkit.timing import sample_rounds

    common.load_backends(cell[0])
    device, first = common.device(), cell[0]
    results: list[list[dict[str, Any]] | Exception] = [[] for _ in cell]
    if first["launch_mode"] == "graph" and device == "cpu":
        return [Unsupported(common.NO_GRAPHS) for _ in cell]
    calls: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for drafter in dict.fromkeys(point["drafter"] for point in cell):
        members = [index for index, point in enumerate(cell) if point["drafter"] == drafter]
        try:
            check_memory([cell[index] for index in members], device)
            maker = Forwards([cell[index] for index in members], device)
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
    is_prefill = first["phase"] == "prefill"
    if first["launch_mode"] == "graph" or (is_prefill and device != "cpu"):
        for name, parts in anatomy(calls).items():
            facts[name] |= parts
    limits = Limits(first)
    how = {"monitor": monitor(device), "device": device, "seed": first["seed"]}
    # A prefill ran when it was checked, and takes seconds.
    timed = sample_rounds(calls, l2="warm", num_warmup=0 if is_prefill else 2, **how, **limits.of_rounds)
    communication = step_communication.of_cell(cell, device)
    for name, call in calls.items():
        fact = facts[name] | _energy(call, first["energy_s"], device)
        own = [sample for sample in timed if sample["name"] == name]
        rows = [
            fact | {n: sample[n] for n in ("round", "sample", "state")} | {"forward_ms": sample["ms"]} for sample in own
        ]
        limits.mark(rows, "forward_ms")
        step_communication.add_to(rows, *communication[int(name)])
        results[int(name)] = rows
    return results


def _facts(point: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """What is the same in every sample of a forward."""
    import torch

    shape, on_gpu = decoder.shape, decoder.device.type == "cuda"
    call = call_shape(point, shape, point["batch_size"])
    return {
        "origin": "measured",
        "drafter": None if point["drafter"] == "none" else point["drafter"],
        "linear_backend": "few_rows" if point["launch_mode"] == "graph" else decoder.linear_backend,
        "kv_dtype": kv_dtype_of(point),
        "num_gpus": point["num_gpus"] if on_gpu or point["num_gpus"] > 1 else None,
        "gap_ms": None,
        "weight_bytes_read": shape.weight_bytes_read(point["weight_dtype"]),
        "kv_bytes_read": shape.num_attention_layers * kv_bytes_read(call),
        **_delta_facts(point, decoder),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _delta_facts(point: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Of gated-delta layers: what runs them, and their states' bytes, kept per token or per pass of a prefill."""
    from labkit.models.gated_delta_prompt import prompt_rule

    shape, name, moves = decoder.shape, "recurrence_kernel", 1 + point["q_len"]
    if point["phase"] == "prefill":
        name, _ = prompt_rule(decoder.activation_dtype, decoder.device)
        moves = 2 * -(-point["q_len"] // PREFILL_CHUNK)
    state_bytes = point["batch_size"] * moves * shape.delta_state_bytes
    return {"delta_backend": name if shape.num_delta_layers else None, "state_bytes": state_bytes}


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
