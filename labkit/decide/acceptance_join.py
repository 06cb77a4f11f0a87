"""Which acceptance belongs to which cost cell. Target, drafter, k and context band must agree; nothing is extended."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import MAX_REPEATED, prompt_histograms
from labkit.decide.step_costs import StepCosts
from labkit.errors import InputError
from labkit.rows import FORCED_ORIGINS, distinct, group_numbers, key_value, ok_rows, single_value

GROUP = [
    *("target", "drafter", "num_speculative_tokens", "context_len_low", "context_len_high"),
    *("workload", "temperature"),
]
FEW_TEXTS = 0.1  # share of texts that may repeat themselves without a word
NEEDED = (*GROUP[:5], "prompt_id", "accepted_by_draft_length")


@dataclass(frozen=True)
class Source:
    """Acceptance of one workload in one context band, or an imposed length (value, low, high)."""

    key: tuple[Any, ...]
    workload: str | None
    temperature: float | None
    origin: str
    histograms: np.ndarray | None = None
    imposed: tuple[float, float, float] | None = None
    notes: tuple[str, ...] = ()
    borrowed_from: str | None = None


@dataclass(frozen=True)
class _Mismatch:
    depth: int
    field: str
    cost: Any
    acceptance: list[Any]

    def __str__(self) -> str:
        return f"no acceptance for {self.field} {self.cost} (measured: {', '.join(map(str, self.acceptance))})"


def imposed_source(acceptance: float | Sequence[float]) -> Source:
    """An imposed acceptance length, alone or with the bounds of its interval.

    Raises InputError: not a number or three of them, or not ``1 <= low <= length <= high``.
    """
    values: list[Any] = list(acceptance) if isinstance(acceptance, Sequence) else [acceptance]
    if len(values) not in (1, 3) or any(isinstance(v, bool) or not isinstance(v, Real) for v in values):
        raise InputError(f"an imposed acceptance length is X or X,low,high, got {acceptance!r}")
    length, low, high = (float(v) for v in (values if len(values) == 3 else values * 3))
    if not 1 <= low <= length <= high < np.inf:
        raise InputError(f"an imposed acceptance length must keep 1 <= low <= X <= high, got {acceptance!r}")
    return Source(("imposed", length, low, high), None, None, "forced", imposed=(length, low, high))


def join(
    costs: list[StepCosts], acceptance: pd.DataFrame, acceptance_from: str | None = None
) -> list[tuple[list[Source], str | None]]:
    """For each cell its acceptance sources, or none and the reason.

    `acceptance_from` borrows the acceptance of another target: origin "transferred". The drafter must then agree only
    if that target was measured with several, or with trees, since costs are of chains.

    Raises InputError: nothing joins at all (the field and both sides' values are named), all acceptance is forced, two
    bands of one workload hold the same context, or rows of one group mix origins or top_p.
    """
    groups = _groups(acceptance)
    if acceptance_from is not None and all(key[0] != acceptance_from for key, _ in groups):
        targets = ", ".join(sorted({key[0] for key, _ in groups}))
        wanted = f"a target of the acceptance rows ({targets})"
        raise InputError(f"acceptance_from must be {wanted}, got {acceptance_from!r}")
    sources: dict[tuple[Any, ...], Source] = {}
    joined: list[tuple[list[Source], str | None]] = []
    mismatches: list[_Mismatch] = []
    for cost in costs:
        matching = _matching(cost, groups, acceptance_from)
        if isinstance(matching, _Mismatch):
            mismatches.append(matching)
            joined.append(([], str(matching)))
            continue
        joined.append(([_source(cost, key, rows, sources) for key, rows in matching], None))
        labels = [(str(source.workload), str(source.temperature)) for source in joined[-1][0]]
        if len(set(labels)) < len(labels):
            raise InputError(f"context_len {cost.key['context_len']} lies in two acceptance bands of one workload")
    if len(mismatches) == len(costs):
        # The cells that came furthest show what is really wrong.
        depth = max(mismatch.depth for mismatch in mismatches)
        furthest = [mismatch for mismatch in mismatches if mismatch.depth == depth]
        cost_side = ", ".join(sorted({str(mismatch.cost) for mismatch in furthest}))
        other_side = ", ".join(sorted({str(value) for mismatch in furthest for value in mismatch.acceptance}))
        raise InputError(
            f"cost and acceptance do not join: {furthest[0].field} is {cost_side} in the cost rows"
            f" and {other_side} in the acceptance rows"
        )
    return joined


def _groups(acceptance: pd.DataFrame) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    rows = ok_rows(acceptance, "acceptance", NEEDED)
    if "origin" in rows:
        rows = rows[~rows["origin"].isin(FORCED_ORIGINS)]
        if rows.empty:
            raise InputError("acceptance rows: all of them are forced; an imposed length is given as a number instead")
    rows = rows.assign(**{name: None for name in GROUP if name not in rows})
    numbers = group_numbers(rows, GROUP)
    groups = [rows[numbers == number] for number in range(numbers.max() + 1)]
    return [(tuple(key_value(group[name].iloc[0]) for name in GROUP), group) for group in groups]


def _matching(
    cost: StepCosts, groups: list[tuple[tuple[Any, ...], pd.DataFrame]], acceptance_from: str | None
) -> list[tuple[tuple[Any, ...], pd.DataFrame]] | _Mismatch:
    target = acceptance_from or cost.key["target"]
    drafter, k = cost.key["drafter"], cost.num_speculative_tokens
    context_len = cost.key["context_len"]
    drafters = {key[1] for key, _ in groups if key[0] == target}
    if target != cost.key["target"] and len(drafters) == 1 and not (only := next(iter(drafters))).endswith("+tree"):
        drafter = only
    for depth, (field, wanted) in enumerate((("target", target), ("drafter", drafter), (GROUP[2], k))):
        kept = [(key, rows) for key, rows in groups if key[depth] == wanted]
        if not kept:
            return _Mismatch(depth, field, wanted, sorted({key[depth] for key, _ in groups}))
        groups = kept
    kept = [(key, rows) for key, rows in groups if key[3] <= context_len < key[4]]
    bands = sorted({(key[3], key[4]) for key, _ in groups})
    return kept or _Mismatch(3, "context_len", context_len, [f"[{low:g}, {high:g})" for low, high in bands])


def _source(
    cost: StepCosts, key: tuple[Any, ...], rows: pd.DataFrame, sources: dict[tuple[Any, ...], Source]
) -> Source:
    known = (key, *(cost.key[name] for name in ("target", "gpu", "weight_dtype", "kv_dtype")))
    if known in sources:
        return sources[known]
    notes = []
    for name, where in (("gpu", "on"), ("weight_dtype", "with weight_dtype"), ("kv_dtype", "with kv_dtype")):
        present = distinct(rows, name)
        if cost.key[name] in present:
            rows = rows[rows[name] == cost.key[name]]
        elif present and cost.key[name] is not None:
            notes.append(f"acceptance measured {where} {', '.join(present)}, cost {cost.key[name]}")
    borrowed = key[0] if key[0] != cost.key["target"] else None
    full_key = (*key, *(tuple(distinct(rows, name)) for name in ("gpu", "weight_dtype", "kv_dtype")), borrowed, *notes)
    where = f"acceptance rows of {key[0]}, {key[1]}, {key[5]}"
    single_value(rows, "top_p", where)
    origin = "transferred" if borrowed else str(single_value(rows, "origin", where) or "measured")
    if borrowed:
        notes.append(f"acceptance borrowed from {borrowed}, drafter {key[1]}")
    repeating = rows.get("repeated_ngram_share", pd.Series(dtype=float)) > MAX_REPEATED
    if repeating.mean() > FEW_TEXTS:
        notes.append("acceptance partly of texts that repeat themselves")
    workload, temperature = key[5], None if key[6] is None else float(key[6])
    measured: dict[str, Any] = {"histograms": prompt_histograms(rows), "notes": tuple(notes), "borrowed_from": borrowed}
    sources[known] = Source(full_key, workload, temperature, origin, **measured)
    return sources[known]
