"""What fits on a device before anything runs: weights, drafter and KV cache against its memory."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.axes import parse_axes
from labkit.engines.roles import gpu_row
from labkit.engines.tables import read_table
from labkit.errors import InputError
from labkit.shapes import ModelShape, model_shape

GB = 1e9
AXES: Mapping[str, list[Any]] = {
    "context_len": [4096, 32768, 131072],
    "batch_size": [1, 4, 16, 64],
    "weight_dtype": ["bfloat16"],
    "kv_dtype": ["bfloat16"],
    "draft_dtype": ["bfloat16"],
    "num_speculative_tokens": [4],
    "num_gpus": [1],
    "memory_share": [0.9],
    "weight_gb": [0.0],
}


@dataclass(frozen=True)
class Capacity:
    """Room for KV cache on each of `num_gpus` devices that split weights and KV heads evenly.

    memory_gb : of one device, 1e9 bytes. memory_share : part of it that weights and cache may fill; the rest is for
    activations, graphs and the driver, which are not counted.
    """

    model: ModelShape
    draft_model: ModelShape | None
    memory_gb: float
    memory_share: float
    weight_dtype: str
    kv_dtype: str
    draft_dtype: str
    num_gpus: int
    weight_gb: float

    @property
    def weights_gb(self) -> float:
        """Target weights per device; ``weight_gb`` (of a quantised checkpoint) wins over the shape's."""
        return (self.weight_gb or self.model.weight_bytes(self.weight_dtype) / GB) / self.num_gpus

    @property
    def draft_gb(self) -> float:
        """Drafter weights per device, split as the target's are."""
        return self.draft_model.weight_bytes(self.draft_dtype) / GB / self.num_gpus if self.draft_model else 0.0

    def _shapes(self, drafter: bool) -> list[ModelShape]:
        return [self.model, *([self.draft_model] if self.draft_model and drafter else [])]

    def kv_bytes(self, *, drafter: bool = True) -> float:
        """KV bytes per token and device, those of the drafter included; fewer heads than devices are repeated."""
        shares = (
            (shape, -(-shape.num_kv_heads // self.num_gpus) / shape.num_kv_heads) for shape in self._shapes(drafter)
        )
        return sum(shape.kv_bytes_per_token(self.kv_dtype) * share for shape, share in shares)

    def request_bytes(self, num_tokens: int, *, drafter: bool = True) -> float:
        """Bytes of one request per device: KV of its tokens, and the states of gated-delta layers.

        Not counted: what an engine keeps to roll such a state back after a rejection (up to k+1 states).
        """
        states = sum(shape.delta_state_bytes for shape in self._shapes(drafter)) / self.num_gpus
        return num_tokens * self.kv_bytes(drafter=drafter) + states

    def free_gb(self, *, drafter: bool = True) -> float:
        """Memory left for KV per device; below 0 when the weights alone do not fit."""
        return self.memory_gb * self.memory_share - self.weights_gb - (self.draft_gb if drafter else 0.0)

    def num_tokens(self) -> int:
        """Tokens of a single request that fit."""
        return max(0, int((self.free_gb() * GB - self.request_bytes(0)) // self.kv_bytes()))

    def largest_context_len(self, k: int) -> int:
        """The longest context of one request that leaves room for a step of k drafts: k+1 tokens more."""
        return max(0, min(self.num_tokens(), self.model.max_context_len) - k - 1)

    def cell(self, context_len: int, batch_size: int, k: int) -> dict[str, Any]:
        """Whether a cell of a grid fits, in needed and free GB of KV cache; ``reason`` in words when it does not.

        batch_slots and batch_slots_without_drafter are the most requests of this context.
        """
        per_request = context_len + k + 1
        needed, free = batch_size * self.request_bytes(per_request) / GB, self.free_gb()
        reason, longest = None, self.model.max_context_len
        if per_request > longest:
            reason = f"{per_request:,} tokens with the drafts, {self.model.name} holds {longest:,}"
        elif needed > free:
            reason = f"needs {needed:.1f} GB of KV cache and states, {max(free, 0):.1f} GB free beside {self._beside()}"
        slots = {"batch_slots": int(max(free, 0) * GB // self.request_bytes(per_request))}
        alone = max(self.free_gb(drafter=False), 0) * GB // self.request_bytes(context_len + 1, drafter=False)
        slots["batch_slots_without_drafter"] = int(alone)
        if per_request > longest:
            slots = dict.fromkeys(slots, 0)
        cell = {"context_len": context_len, "batch_size": batch_size, "num_speculative_tokens": k}
        return cell | {"needed_gb": needed, "free_gb": free, "fits": reason is None, "reason": reason} | slots

    def _beside(self) -> str:
        parts = [f"{self.weights_gb:.1f} GB of weights"] + [f"{self.draft_gb:.1f} GB of drafter"] * bool(self.draft_gb)
        return " and ".join(parts)


def memory_gb(gpu: str) -> float:
    """Memory of a GPU of ``gpu_peaks.csv`` in units of 1e9 bytes. Raises InputError: no such row; the known are listed.

    Sheets do not say whether a GB is 1e9 or 2**30 bytes; the smaller reading is taken.
    """
    row = gpu_row(gpu)
    if row is None:
        known = ", ".join(item["gpu"] for item in read_table("gpu_peaks.csv"))
        raise InputError(f"--gpu {gpu!r}: no such row in gpu_peaks.csv; known: {known}")
    return float(row["memory_gb"])


def shape_of(model: str) -> ModelShape:
    """A shape by name, or of a model folder (read with the models package). Raises InputError: neither."""
    if Path(model).is_dir():
        from labkit.models.weights import check_model

        return check_model(model)
    return model_shape(model)


def _check_split(shape: ModelShape, num_gpus: int) -> None:
    """Raise InputError where engines cannot split the heads: queries divide, KV heads divide or are repeated evenly."""

    def fits(n: int) -> bool:
        odd = any(heads % n for heads in (shape.num_qo_heads, shape.num_delta_key_heads, shape.num_delta_value_heads))
        return not odd and 0 in (shape.num_kv_heads % n, n % shape.num_kv_heads)

    if not fits(num_gpus):
        heads = f"{shape.num_qo_heads} query and {shape.num_kv_heads} KV heads of {shape.name}"
        wanted = ", ".join(str(n) for n in range(1, shape.num_qo_heads + 1) if fits(n))
        raise InputError(f"--set num_gpus={num_gpus}: the {heads} do not divide; wanted one of {wanted}")


def capacity(
    model: str, gpu: str, *, draft_model: str | None = None, assignments: Sequence[str] = ()
) -> dict[str, Any]:
    """What fits: one entry per combination of dtypes, devices and memory share, each with its planned cells.

    assignments : ``axis=v,...`` of ``AXES``; every cell of context_len x batch_size x k is judged.

    Returns {model, draft_model, gpu, plans: [{...dtypes, weights_gb, draft_gb, free_gb, kv_bytes_per_token, num_tokens,
    largest_context_len (of one request, at the largest k: most_drafts), most_drafts, kv_head_copies, cells}]}. Raises
    InputError for unknown names, axes or values, or heads that the devices do not divide.
    """
    axes = dict(AXES) | parse_axes(assignments, AXES)
    for name in ("context_len", "batch_size", "num_gpus", "memory_share"):
        if min(axes[name]) <= 0 or (name == "memory_share" and max(axes[name]) > 1):
            raise InputError(f"--set {name}: wanted values above 0{' up to 1' if name == 'memory_share' else ''}")
    if min(axes["weight_gb"]) < 0:
        raise InputError("--set weight_gb: wanted 0 (the shape's own) or more")
    target, drafter, size = shape_of(model), shape_of(draft_model) if draft_model else None, memory_gb(gpu)
    for num_gpus, shape in product(axes["num_gpus"], filter(None, (target, drafter))):
        _check_split(shape, num_gpus)
    plans = []
    fixed = ("weight_dtype", "kv_dtype", "draft_dtype", "num_gpus", "memory_share", "weight_gb")
    for values in pd.MultiIndex.from_product([axes[name] for name in fixed]):
        chosen: dict[str, Any] = dict(zip(fixed, values, strict=True))
        room = Capacity(target, drafter, size, **chosen)
        cells = [
            room.cell(context, batch, k)
            for context in sorted(axes["context_len"])
            for batch in sorted(axes["batch_size"])
            for k in axes["num_speculative_tokens"]
        ]
        found = {"weights_gb": room.weights_gb, "draft_gb": room.draft_gb, "free_gb": room.free_gb()}
        found |= {"kv_bytes_per_token": room.kv_bytes(), "num_tokens": room.num_tokens()}
        most_drafts = max(axes["num_speculative_tokens"])
        found |= {"largest_context_len": room.largest_context_len(most_drafts), "most_drafts": most_drafts}
        found |= {"kv_head_copies": max(1, room.num_gpus // target.num_kv_heads)}
        plans.append(chosen | found | {"cells": cells})
    names = {"model": target.name, "draft_model": drafter.name if drafter else None, "gpu": gpu, "memory_gb": size}
    return names | {"plans": plans}


def render(found: Mapping[str, Any]) -> str:
    """`capacity` as text: per plan the room, then batch slots by context, then the cells that do not fit and why."""
    drafter = f" with drafter {found['draft_model']}" if found["draft_model"] else ""
    lines = [f"{found['model']}{drafter} on {found['gpu']} ({found['memory_gb']:g} GB, 1 GB = 1e9 bytes)"]
    for plan in found["plans"]:
        lines += ["", f"{plan['weight_dtype']} weights, {plan['kv_dtype']} KV, {plan['num_gpus']} GPU(s), "
                  f"{plan['memory_share']:.0%} of the memory: {plan['weights_gb']:.1f} GB weights, "
                  f"{plan['draft_gb']:.1f} GB drafter, {plan['free_gb']:.1f} GB for KV: {plan['num_tokens']:,} tokens "
                  f"of {plan['kv_bytes_per_token']:,.0f} bytes each"]  # fmt: skip
        if plan["free_gb"] <= 0:
            short = -plan["free_gb"] * plan["num_gpus"]
            lines.append(f"no cell fits: the weights are {short:.1f} GB too large (num_gpus, weight_dtype, weight_gb)")
            continue
        lines.append(
            f"largest context of one request at k = {plan['most_drafts']}: {plan['largest_context_len']:,} tokens"
        )
        if plan["kv_head_copies"] > 1:
            lines.append(f"each KV head of {found['model']} is held by {plan['kv_head_copies']} GPUs")
        cells = pd.DataFrame(plan["cells"])
        slots = cells.drop_duplicates("context_len")[["context_len", "batch_slots", "batch_slots_without_drafter"]]
        slots = slots if found["draft_model"] else slots.drop(columns="batch_slots_without_drafter")
        lines.append(slots.to_string(index=False))
        bad = cells[~cells["fits"]]
        lines.append(f"{len(cells) - len(bad)} of {len(cells)} planned cells fit")
        lines += [f"  context {c.context_len:,} x batch {c.batch_size}: {c.reason}" for c in bad.itertuples()]
    return "\n".join(lines)


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """`labkit capacity`."""
    options = {"draft_model": arguments.draft_model, "assignments": arguments.assignments}
    found = capacity(arguments.model, arguments.gpu, **options)
    return found, render(found), 0
