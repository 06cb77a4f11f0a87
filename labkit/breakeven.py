"""Does speculation pay? Relative step cost against acceptance length, with an interval and a verdict per cell.

The rule is mean_acceptance_length / relative_step_cost > 1. Cost comes from loop or step rows, acceptance from
acceptance rows or an imposed length; they meet only where `labkit.decide.acceptance_join` lets them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.acceptance_join import Source, imposed_source, join
from labkit.decide.crossovers import curve_crossings
from labkit.decide.intervals import CONFIDENCE, RESAMPLES, generator, percentile_interval
from labkit.decide.speedup import Length, imposed_length, measured_length, relative_step_cost, speedup_of
from labkit.decide.step_costs import StepCosts, baseline_ms, paired_ratios, step_costs
from labkit.errors import InputError
from labkit.rows import distinct, plain_record

CELL_COLUMNS = (
    *("gpu", "target", "drafter", "workload", "temperature", "batch_size", "context_len", "num_speculative_tokens"),
    *("verify_backend", "draft_backend", "decode_backend", "weight_dtype", "kv_dtype", "relative_step_cost"),
    *("mean_acceptance_length", "speedup", "speedup_low", "speedup_high", "speedup_same_backend", "verdict"),
    *("origin", "relative_step_cost_low", "relative_step_cost_high", "mean_acceptance_length_low"),
    *("mean_acceptance_length_high", "breakeven_ceiling", "num_rounds", "num_prompts", "reason"),
)
NUMBERS = (
    *("temperature", "batch_size", "context_len", "num_speculative_tokens"),
    *(name for name in CELL_COLUMNS[13:] if name not in ("verdict", "origin", "reason")),
)
AXES = ("context_len", "batch_size")  # along which crossings are looked for
CURVE_COLUMNS = tuple(name for name in (*CELL_COLUMNS[:13], "origin") if name not in ("context_len", "decode_backend"))


@dataclass(frozen=True)
class Breakeven:
    """Verdicts per cell and crossings per curve.

    cells : one row per cost cell and workload, columns ``CELL_COLUMNS``. Unknown numbers are NaN, unknown texts None.
        `breakeven_ceiling` is k+1, the longest acceptance length there can be; `reason` says why a cell is undecided
        and what else to know about it.
    crossovers : one dict per curve: ``CURVE_COLUMNS`` and ``crossovers``, a list of {context_len, low, high,
        direction, decided, pays_at, loses_at} (`labkit.decide.crossovers`).
    turning_points : the same along the batch size: one dict per curve at a context, ``crossovers`` hold batch_size in
        place of context_len. A direction "pays below" means: speculation stops paying above that many requests.
    baseline, resamples : what was asked for.
    """

    cells: pd.DataFrame
    crossovers: list[dict[str, Any]]
    turning_points: list[dict[str, Any]]
    baseline: str
    resamples: int

    def to_dict(self) -> dict[str, Any]:
        """The machine form: baseline, confidence, resamples, cells and curves; None where unknown."""
        return {
            "baseline": self.baseline,
            "confidence": CONFIDENCE,
            "resamples": self.resamples,
            "cells": [plain_record(cell) for cell in self.cells.to_dict("records")],
            "curves": [plain_record(curve) for curve in self.crossovers],
            "turning_points": [plain_record(curve) for curve in self.turning_points],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def breakeven(
    cost_rows: pd.DataFrame | list[StepCosts],
    acceptance: pd.DataFrame | float | Sequence[float] | None,
    *,
    acceptance_from: str | None = None,
    baseline: str = "fastest",
    resamples: int = RESAMPLES,
) -> Breakeven:
    """Join costs and acceptance and judge every cell.

    With draft lengths that vary, relative_step_cost is the sum over j of the share of verify steps with j drafts times
    the cost of a step with j drafts, over plain decode; each j's cost is the median over rounds of its paired ratio.
    With an imposed length every step is taken to draft k tokens. Not counted: prefill and the drafter's prefill.

    Verdicts: ``cannot_pay`` if the lower bound of relative_step_cost exceeds k+1, ``pays`` if speedup_low > 1,
    ``loses`` if speedup_high < 1, else ``undecided``; an acceptance length of 1 never pays. With borrowed acceptance a
    cell that would pay or lose is ``undecided`` and the reason tells which; ``cannot_pay`` rests on cost alone.

    cost_rows : loop rows: plain and speculative arms interleaved, step_ms in ms; or step rows: decode and verify
        forwards interleaved (see `labkit.decide.forward_costs`); or the cells that `step_costs` made of either.
    acceptance : acceptance rows; or an imposed length X, or (X, low, high), in tokens per step, bonus counted; None for
        the cost alone.
    acceptance_from : borrow the acceptance of this target (origin "transferred").
    baseline : "fastest", "same" or a plain-decode backend; speedup_same_backend is given beside it.
    resamples : behind the 95% intervals. Rounds are resampled for cost and prompts for acceptance; see
        `labkit.decide.intervals`.

    Raises InputError: bad rows or options, or cost and acceptance that disagree in target, drafter, k or context band
    everywhere. Where only some cells find acceptance, the others keep their cost and a reason.
    """
    if resamples < 100:
        raise InputError(f"resamples must be at least 100, got {resamples}")
    costs = cost_rows if isinstance(cost_rows, list) else step_costs(cost_rows)
    known = sorted({name for cost in costs for name in cost.decode_ms})
    if baseline not in ("fastest", "same", *known):
        raise InputError(f"baseline must be fastest, same or one of {', '.join(known)}, got {baseline!r}")
    joined = _sources(costs, acceptance, acceptance_from)
    lengths: dict[tuple[Any, ...], Length] = {}
    cells, draws = [], []
    for cost, (sources, why) in zip(costs, joined, strict=True):
        judged: list[Source | None] = [*sources] or [None]
        for source in judged:
            # Contexts of one band share their prompts, so they must share the draws.
            key = (cost.num_speculative_tokens, source.key if source else None)
            if key not in lengths:
                lengths[key] = _length(source, cost.num_speculative_tokens, resamples)
            cell, log_speedup = _judge(cost, source, why, lengths[key], baseline)
            cells.append(cell)
            draws.append(log_speedup)
    # Texts stay objects, so that an unknown one is None whether or not the column holds others.
    table = pd.DataFrame(cells, columns=list(CELL_COLUMNS), dtype=object)
    table = table.astype({name: table[name].infer_objects().dtype for name in NUMBERS})
    over_context, over_batch = (curve_crossings(table, draws, axis, CURVE_COLUMNS) for axis in AXES)
    return Breakeven(table, over_context, over_batch, baseline, resamples)


def _sources(
    costs: list[StepCosts], acceptance: pd.DataFrame | float | Sequence[float] | None, acceptance_from: str | None
) -> list[tuple[list[Source], str | None]]:
    if acceptance is None:
        return [([], None)] * len(costs)
    if isinstance(acceptance, pd.DataFrame):
        return join(costs, acceptance, acceptance_from)
    if acceptance_from is not None:
        raise InputError("acceptance_from needs acceptance rows, not an imposed length")
    source = imposed_source(acceptance)
    length = source.key[1]
    if all(length > cost.num_speculative_tokens + 1 for cost in costs):
        ceiling = max(cost.num_speculative_tokens for cost in costs) + 1
        raise InputError(f"an imposed acceptance length must not exceed k+1 = {ceiling}, got {length:g}")
    return [
        ([source], None)
        if length <= cost.num_speculative_tokens + 1
        else ([], f"imposed length {length:g} exceeds the ceiling {cost.num_speculative_tokens + 1}")
        for cost in costs
    ]


def _length(source: Source | None, k: int, resamples: int) -> Length:
    if source is not None and source.histograms is not None and len(source.histograms):
        return measured_length(source.histograms, resamples)
    bounds = source.imposed if source is not None and source.imposed else (np.nan, np.nan, np.nan)
    return imposed_length(*bounds, k, resamples)


def _judge(
    cost: StepCosts, source: Source | None, why: str | None, length: Length, baseline: str
) -> tuple[dict[str, Any], np.ndarray]:
    """One row of the cell table, and the resampled log speed-ups [resamples] (NaN where there is no interval)."""
    decode_backend, decode_ms = baseline_ms(cost, baseline)
    ratios = paired_ratios(cost, decode_ms, length.shares)
    found = speedup_of(ratios, length, generator(0, "rounds", *cost.key.values()))
    same = paired_ratios(cost, baseline_ms(cost, "same")[1], length.shares)
    ceiling = cost.num_speculative_tokens + 1
    low, high = np.exp(percentile_interval(found.draws))
    cost_low, cost_high = np.exp(percentile_interval(found.cost_draws))
    length_bounds = np.exp(percentile_interval(found.length_draws))
    borrowed = source is not None and bool(source.borrowed_from)
    verdict, remark = _verdict(low, high, cost_low, ceiling, length.length, borrowed=borrowed)
    reasons = [why, *_remarks(cost, source, length, ratios, decode_backend, baseline), remark]
    reasons += [*(source.notes if source else ()), *cost.notes]
    cell = cost.key | {
        "workload": source.workload if source else None,
        "temperature": source.temperature if source and source.temperature is not None else np.nan,
        "decode_backend": decode_backend,
        "relative_step_cost": np.exp(found.log_cost),
        "relative_step_cost_low": cost_low,
        "relative_step_cost_high": cost_high,
        "mean_acceptance_length": length.length,
        "mean_acceptance_length_low": np.clip(length_bounds[0], 1, ceiling),
        "mean_acceptance_length_high": np.clip(length_bounds[1], 1, ceiling),
        "speedup": np.exp(found.log_length - found.log_cost),
        "speedup_low": low,
        "speedup_high": high,
        "speedup_same_backend": length.length / relative_step_cost(same, length.shares),
        "verdict": verdict,
        "origin": source.origin if source is not None and source.origin != "measured" else cost.origin,
        "breakeven_ceiling": ceiling,
        "num_rounds": found.num_rounds,
        "num_prompts": np.nan if length.num_prompts is None else length.num_prompts,
        "reason": "; ".join(reason for reason in reasons if reason) or None,
    }
    return cell, found.draws


def _remarks(
    cost: StepCosts,
    source: Source | None,
    length: Length,
    ratios: np.ndarray,
    decode_backend: str | None,
    baseline: str,
) -> list[str]:
    """Why there is no estimate or no interval, and what else the numbers rest on."""
    remarks = []
    if source is None:
        remarks.append("relative_step_cost taken with k drafts in every step")
    elif source.histograms is not None and not len(source.histograms):
        remarks.append("no prompt has a complete verify step")
    if not len(ratios):
        remarks.append(_no_ratio(cost, decode_backend, length.shares, baseline))
    elif len(ratios) < 2:
        remarks.append("one round, so no interval")
    elif (ratios == ratios[0]).all():
        remarks.append("no spread between rounds; is the timer fine enough?")
    if length.num_prompts == 1:
        remarks.append("one prompt, so no interval")
    return remarks


def _verdict(
    low: float, high: float, cost_low: float, ceiling: int, length: float, *, borrowed: bool
) -> tuple[str, str | None]:
    """The verdict, and what must be said with it."""
    if cost_low > ceiling:
        return "cannot_pay", None
    if low > 1 and length <= 1:
        return "undecided", "no draft is kept, yet a step is cheaper than plain decode: the baseline is not the fastest"
    verdict = "pays" if low > 1 else "loses" if high < 1 else "undecided"
    if borrowed and verdict != "undecided":
        return "undecided", f"would be {verdict!r}"
    return verdict, "the interval includes 1" if verdict == "undecided" and np.isfinite(low) else None


def _no_ratio(cost: StepCosts, decode_backend: str | None, shares: np.ndarray, baseline: str) -> str:
    if decode_backend is None:
        return f"no plain decode of baseline {baseline!r} was measured here"
    missing = [j for j in np.flatnonzero(shares > 0) if not np.isfinite(cost.step_ms[:, j]).any()]
    if missing:
        used = ", ".join(f"{j} ({shares[j]:.1%} of steps)" for j in missing)
        return f"no cost was measured for steps with this many drafts: {used}"
    return "no round holds the baseline and every draft length"


def verdict_table(cells: pd.DataFrame) -> pd.DataFrame:
    """A short form of `Breakeven.cells` to print: what varies, break-even and measured length, speed-up, verdict.

    Columns that hold one value throughout are left out, but for context, k, verify backend and a known workload.
    """
    always = ["context_len", "num_speculative_tokens", "verify_backend"]
    always += ["workload"] if distinct(cells, "workload") else []
    names = [name for name in (*CELL_COLUMNS[:13], "origin") if name in always or len(distinct(cells, name)) > 1]
    short = cells[[name for name in names if name != "origin"]].copy()
    for title, name in (
        ("break-even length", "relative_step_cost"),
        ("acceptance length", "mean_acceptance_length"),
        ("speed-up", "speedup"),
    ):
        columns = (name, f"{name}_low", f"{name}_high")
        short[title] = [_with_interval(*values) for values in cells[list(columns)].itertuples(index=False)]
    short["verdict"] = cells["verdict"]
    if "origin" in names:
        short["origin"] = cells["origin"]
    short["reason"] = cells["reason"].fillna("")
    return short.rename(columns={"num_speculative_tokens": "k", "context_len": "context", "batch_size": "batch"})


def _with_interval(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return "unknown"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if low < high else f"{value:.2f}"  # nothing known, or nothing varies
