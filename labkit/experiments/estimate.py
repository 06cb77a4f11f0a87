"""How long and how large a plan is, from the bytes it moves. An estimate for `--dry-run`; nothing is measured by it."""

from functools import lru_cache
from itertools import groupby
from typing import Any

from labkit.cost import forward_flops, kv_bytes_read
from labkit.drafting.named import num_nodes
from labkit.experiments import attention, common, step_forwards
from labkit.shapes import ModelShape

# What one forward of a small model reaches end to end; a calibrated device does better, a busy one worse.
_BYTES_PER_S = 8e9
_FLOP_PER_S = 8e10
_GPU_BYTES_PER_S, _GPU_FLOP_PER_S = 1e12, 4e14
_EAGER_LAYER_S = 5e-4  # of the host, which launches each operation


def minutes(experiment: str, points: list[dict[str, Any]]) -> float:
    """Expected time of a plan, models loaded."""
    if experiment == "acceptance":
        return sum(map(_acceptance_s, _batches(points))) / 60
    return sum(map({"attention": _attention_s, "loop": _loop_s, "step": _step_s}[experiment], points)) / 60


def memory_bytes(experiment: str, points: list[dict[str, Any]]) -> float:
    """Expected peak in bytes: weights, cache and working copies."""
    if experiment == "acceptance":
        points = [batch[0] | {"batch_size": _num_requests(batch)} for batch in _batches(points)]
    return max(_memory_bytes(experiment, point) for point in points)


def _batches(points: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(batch) for _, batch in groupby(points, key=lambda point: point["group"])]


def _num_requests(batch: list[dict[str, Any]]) -> int:
    return len({(point["prompt_id"], point["seed"]) for point in batch})


def _memory_bytes(experiment: str, point: dict[str, Any]) -> float:
    if experiment == "attention":
        return 3.0 * kv_bytes_read(attention.shape_of(point))
    if experiment == "step":
        return step_forwards.memory_bytes(point)
    shape, dtype = _shape(point), point["weight_dtype"]
    cache = shape.kv_bytes_per_token(dtype) * (point["context_len"] + point.get("max_new_tokens", 64) + 512)
    logits = 2 * 4 * shape.vocab_size * _q_len(point)  # as they are made, and as a rule reads them
    return 1.5 * shape.weight_bytes(dtype) + (cache + logits) * point.get("batch_size", 1)


def _q_len(point: dict[str, Any]) -> int:
    """Of the widest pass of a loop's or acceptance's point; a tree's is its nodes and the last token."""
    return num_nodes(point["drafter"], point["num_speculative_tokens"]) + 1 if point.get("drafter") else 1


def _shape(point: dict[str, Any]) -> ModelShape:
    return _shape_of(point["target"])


_shape_of = lru_cache(maxsize=1)(common.target_shape)


def _forward_s(point: dict[str, Any], context_len: float, q_len: int, passes_over_cache: int = 1) -> float:
    shape, dtype = _shape(point), point["weight_dtype"]
    cache = shape.kv_bytes_per_token(dtype) * context_len * passes_over_cache * point.get("batch_size", 1)
    compute = 2 * shape.num_linear_parameters * q_len * point.get("batch_size", 1) / _FLOP_PER_S
    return (shape.weight_bytes(dtype) + cache) / _BYTES_PER_S + compute


def _attention_s(point: dict[str, Any]) -> float:
    layer = kv_bytes_read(attention.shape_of(point))
    passes = point["q_len"] if point["backend"] == "per_token" else 1
    if point["launch_mode"] == "graph":  # on a GPU: mostly inputs, check and profile
        return 0.15 + 15 * layer / _GPU_BYTES_PER_S + point["num_rounds"] * (passes * layer / _GPU_BYTES_PER_S + 2e-4)
    return 0.3 + (point["num_rounds"] + 3) * (passes * layer / _BYTES_PER_S + 0.01)


def _acceptance_s(batch: list[dict[str, Any]]) -> float:
    # Greedy text is generated once, with the largest k; sampled text by each drafter and k, all requests together.
    point, shape = batch[0] | {"batch_size": _num_requests(batch)}, _shape(batch[0])
    ks = [k for _, k in {(arm["drafter"], arm["num_speculative_tokens"]) for arm in batch}]
    ks = ks if point["temperature"] > 0 else [max(ks)]
    num_prompts = len({arm["prompt_id"] for arm in batch})
    steps = {k: point["max_new_tokens"] / (1 + k / 2) for k in ks}  # half of the drafts kept is a middle case
    if point["weight_dtype"] != "float32":  # a GPU: the host, which launches eager passes, is the limit
        return (num_prompts + sum(steps[k] for k in ks)) * shape.num_layers * _EAGER_LAYER_S
    question = 2 * shape.num_linear_parameters * 400 / _FLOP_PER_S
    return num_prompts * question + sum(steps[k] * _forward_s(point, point["context_len"], k + 1) for k in ks)


def _loop_s(point: dict[str, Any]) -> float:
    rounds, k = point["num_rounds"] + 1, point.get("num_speculative_tokens", 0)
    per_token = point.get("verify_backend") == "per_token"
    if point["acceptance"] == "real":  # half of the drafts kept is a middle case
        q_len, steps = _q_len(point), rounds * point["max_new_tokens"] / (1 + k / 2)
        return steps * _forward_s(point, point["context_len"], q_len, q_len if per_token else 1)
    steps = rounds * (point["steps_per_round"] + 1)
    return steps * sum(_forward_s(point, point["context_len"], j + 1, j + 1 if per_token else 1) for j in range(k + 1))


def _step_s(point: dict[str, Any]) -> float:
    shape = step_forwards.shape_of(point)
    if point["phase"] == "prefill":  # weights of 16 bits: a GPU
        flops = forward_flops(shape, batch_size=point["batch_size"], q_len=point["q_len"], context_len=0, num_logits=1)
        rate = _FLOP_PER_S if point["weight_dtype"] == "float32" else _GPU_FLOP_PER_S
        return 1 + (point["num_rounds"] + 2) * flops / rate
    kv_bytes = point["batch_size"] * point["context_len"] * shape.kv_bytes_per_token("bfloat16")
    moved = shape.weight_bytes_read(point["weight_dtype"]) + kv_bytes
    rate = 2 * _GPU_BYTES_PER_S if point["launch_mode"] == "graph" else _BYTES_PER_S
    return 0.5 + point["energy_s"] + (point["num_rounds"] + 4) * moved / rate
