"""How long and how large a plan is, from the bytes it moves. An estimate for `--dry-run`; nothing is measured by it."""

from functools import lru_cache
from typing import Any

from labkit.cost import forward_flops, kv_bytes_read
from labkit.experiments import attention, common, step_forwards
from labkit.shapes import ModelShape

# What one forward of a small model reaches end to end; a calibrated device does better, a busy one worse.
_BYTES_PER_S = 8e9
_FLOP_PER_S = 8e10
_GPU_BYTES_PER_S, _GPU_FLOP_PER_S = 1e12, 4e14


def seconds(experiment: str, point: dict[str, Any]) -> float:
    """Expected time of one point in s, models loaded."""
    return {"attention": _attention_s, "acceptance": _acceptance_s, "loop": _loop_s, "step": _step_s}[experiment](point)


def memory_bytes(experiment: str, point: dict[str, Any]) -> float:
    """Expected peak of one point in bytes: weights, cache and working copies."""
    if experiment == "attention":
        return 3.0 * kv_bytes_read(attention.shape_of(point))
    if experiment == "step":
        return step_forwards.memory_bytes(point)
    shape, dtype = _shape(point), point["weight_dtype"]
    cache = shape.kv_bytes_per_token(dtype) * (point["context_len"] + point.get("max_new_tokens", 64) + 512)
    return 1.5 * shape.weight_bytes(dtype) + cache * point.get("batch_size", 1)


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


def _acceptance_s(point: dict[str, Any]) -> float:
    # The largest k of a group generates; half of its drafts kept is a middle case.
    steps = point["max_new_tokens"] / (1 + point["num_speculative_tokens"] / 2)
    question = 2 * _shape(point).num_linear_parameters * 400 / _FLOP_PER_S
    return question + steps * _forward_s(point, point["context_len"], point["num_speculative_tokens"] + 1)


def _loop_s(point: dict[str, Any]) -> float:
    steps = (point["num_rounds"] + 1) * (point["steps_per_round"] + 1)
    if point["arm"] == "plain":
        return steps * _forward_s(point, point["context_len"], 1)
    per_token = point["verify_backend"] == "per_token"
    lengths = range(point["num_speculative_tokens"] + 1)
    return steps * sum(_forward_s(point, point["context_len"], j + 1, j + 1 if per_token else 1) for j in lengths)


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
