"""Does speculation pay? Relative step cost against acceptance length, with an interval and a verdict per cell.

The rule is mean_acceptance_length / relative_step_cost > 1. Cost comes from loop rows, acceptance from acceptance rows
or an imposed length; they meet only where `labkit.acceptance_join` lets them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import length_draws
from labkit.acceptance_join import Source, imposed_source, join
from labkit.crossovers import crossovers
from labkit.errors import InputError
from labkit.intervals import generator, percentile_interval, resampled_medians, student_spread
from labkit.rows import distinct, is_missing
from labkit.step_costs import StepCosts, baseline_ms, paired_ratios, step_costs

CELL_COLUMNS = (
    "gpu",
    "target",
    "drafter",
    "workload",
    "temperature",
    "batch_size",
    "context_len",
    "num_speculative_tokens",
    "verify_backend",
    "draft_backend",
    "decode_backend",
    "weight_dtype",
    "kv_dtype",
    "relative_step_cost",
    "mean_acceptance_length",
    "speedup",
    "speedup_low",
    "speedup_high",
    "speedup_same_backend",
    "verdict",
    "origin",
    "relative_step_cost_low",
    "relative_step_cost_high",
    "mean_acceptance_length_low",
    "mean_acceptance_length_high",
    "breakeven_ceiling",
    "num_rounds",
    "num_prompts",
    "reason",
)
CURVE_COLUMNS = tuple(name for name in (*CELL_COLUMNS[:13], "origin") if name not in ("context_len", "decode_backend"))


@dataclass(frozen=True)
class Breakeven:
    """Verdicts per cell and crossings per curve.

    Attributes
    ----------
    cells
        One row per cost cell and workload, columns ``CELL_COLUMNS``. Unknown numbers are NaN, unknown texts None.
        `breakeven_ceiling` is k+1, the longest acceptance length there can be; `reason` says why a cell is undecided
        and what else to know about it.
    crossovers
        One dict per curve: ``CURVE_COLUMNS`` and ``crossovers``, a list of {context_len, low, high, direction}.
    baseline, confidence, resamples, seed
        What was asked for.
    """

    cells: pd.DataFrame
    crossovers: list[dict[str, Any]]
    baseline: str
    confidence: float
    resamples: int
    seed: int

    def to_json(self) -> str:
        """The machine form: baseline, confidence, resamples, seed, cells and curves; null where unknown."""
        record = {
            "baseline": self.baseline,
            "confidence": self.confidence,
            "resamples": self.resamples,
            "seed": self.seed,
            "cells": [_plain(cell) for cell in self.cells.to_dict("records")],
            "curves": [_plain(curve) for curve in self.crossovers],
        }
        return json.dumps(record, indent=1, allow_nan=False)


@dataclass(frozen=True)
class _Settings:
    baseline: str
    confidence: float
    resamples: int
    seed: int


@dataclass(frozen=True)
class _Length:
    """Acceptance of one source: estimates, and resampled deviations before the spread of small samples."""

    length: float
    shares: np.ndarray  # [k+1] share of steps by draft length
    log_draws: np.ndarray  # [resamples] log acceptance length
    share_draws: np.ndarray  # [resamples, k+1]
    spread: np.ndarray  # [resamples], NaN for a single prompt
    num_prompts: int | None


def breakeven(
    cost_rows: pd.DataFrame,
    acceptance: pd.DataFrame | float | Sequence[float],
    *,
    acceptance_from: str | None = None,
    baseline: str = "fastest",
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Breakeven:
    """Join costs and acceptance and judge every cell.

    With draft lengths that vary, relative_step_cost is the sum over j of the share of verify steps with j drafts times
    the cost of a step with j drafts, over plain decode; each j's cost is the median over rounds of its paired ratio.
    With an imposed length every step is taken to draft k tokens. Not counted: prefill and the drafter's prefill.

    Verdicts: ``cannot_pay`` if the lower bound of relative_step_cost exceeds k+1, ``pays`` if speedup_low > 1,
    ``loses`` if speedup_high < 1, else ``undecided``. With borrowed acceptance a cell that would pay or lose is
    ``undecided`` and the reason tells which; ``cannot_pay`` stands, as it rests on cost alone.

    Parameters
    ----------
    cost_rows
        Loop rows: plain and speculative arms interleaved, step_ms in ms.
    acceptance
        Acceptance rows; or an imposed length X, or (X, low, high), in tokens per step, bonus counted.
    acceptance_from
        Borrow the acceptance of this target (origin "transferred").
    baseline
        "fastest", "same" or a plain-decode backend; speedup_same_backend is given beside it.
    confidence, resamples, seed
        Of the intervals. Rounds are resampled for cost and prompts for acceptance; see `labkit.intervals`.

    Raises
    ------
    InputError
        Bad rows or options, or cost and acceptance that disagree in target, drafter, k or context band everywhere.
        Where only some cells find acceptance, the others keep their cost and a reason.
    """
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1, got {confidence}")
    if resamples < 100:
        raise InputError(f"resamples must be at least 100, got {resamples}")
    settings = _Settings(baseline, confidence, resamples, seed)
    costs = step_costs(cost_rows)
    known = sorted({name for cost in costs for name in cost.decode_ms})
    if baseline not in ("fastest", "same", *known):
        raise InputError(f"baseline must be fastest, same or one of {', '.join(known)}, got {baseline!r}")
    joined = _sources(costs, acceptance, acceptance_from)
    lengths: dict[tuple[Any, ...], _Length] = {}
    cells, draws = [], []
    for cost, (sources, why) in zip(costs, joined, strict=True):
        for source in sources or [None]:
            length = _cached_length(source, cost.num_speculative_tokens, settings, lengths)
            cell, log_speedup = _judge(cost, source, why, length, settings)
            cells.append(cell)
            draws.append(log_speedup)
    table = pd.DataFrame(cells, columns=list(CELL_COLUMNS))
    return Breakeven(table, _curves(table, draws, confidence), baseline, confidence, resamples, seed)


def _sources(
    costs: list[StepCosts], acceptance: pd.DataFrame | float | Sequence[float], acceptance_from: str | None
) -> list[tuple[list[Source], str | None]]:
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


def _cached_length(
    source: Source | None, k: int, settings: _Settings, lengths: dict[tuple[Any, ...], _Length]
) -> _Length:
    # Contexts of one band share their prompts and so must share their draws.
    key = (k, source.key if source else None)
    if key not in lengths:
        lengths[key] = _length(source, k, settings)
    return lengths[key]


def _length(source: Source | None, k: int, settings: _Settings) -> _Length:
    resamples = settings.resamples
    if source is not None and source.histograms is not None:
        rng = generator(settings.seed, "prompts", *source.key)
        num_prompts = len(source.histograms)
        total = source.histograms.sum(axis=0)
        if num_prompts:
            accepted, _, steps = length_draws(source.histograms, resamples, rng)
            num_steps = steps.sum(axis=1)
            return _Length(
                length=1 + float(total.sum(axis=0) @ np.arange(k + 1) / total.sum()),
                shares=total.sum(axis=1) / total.sum(),
                log_draws=np.log(1 + accepted / num_steps),
                share_draws=steps / num_steps[:, None],
                spread=student_spread(num_prompts, resamples, rng),
                num_prompts=num_prompts,
            )
    full = np.eye(k + 1)[k]
    length, low, high = source.imposed if source and source.imposed else (np.nan,) * 3
    normal = generator(settings.seed, "imposed").standard_normal(resamples)
    # A split normal in the log, so that the given bounds are its quantiles at the asked confidence.
    edge = np.quantile(np.abs(normal), settings.confidence)
    side = np.where(normal < 0, np.log(length / low), np.log(high / length))
    log_draws = np.log(length) + normal / edge * side
    return _Length(length, full, log_draws, np.tile(full, (resamples, 1)), np.ones(resamples), None)


def _judge(
    cost: StepCosts, source: Source | None, why: str | None, length: _Length, settings: _Settings
) -> tuple[dict[str, Any], np.ndarray]:
    """One row of the cell table, and the resampled log speed-ups [resamples] (NaN where there is no interval)."""
    decode_backend, decode_ms = baseline_ms(cost, settings.baseline)
    ratios = paired_ratios(cost, decode_ms, length.shares)
    ceiling = cost.num_speculative_tokens + 1
    reasons = [why] if why else []
    if source is None:
        reasons.append("relative_step_cost taken with k drafts in every step")
    cell: dict[str, Any] = dict.fromkeys(CELL_COLUMNS[13:], np.nan) | cost.key
    draws = np.full(settings.resamples, np.nan)
    log_cost = np.log(float(np.median(ratios, axis=0) @ length.shares)) if len(ratios) else np.nan
    log_length = np.log(length.length)
    cost_draws, rounds_part, prompts_part = _deviations(cost, ratios, length, log_cost, settings)
    if not len(ratios):
        reasons.append(_no_ratio(cost, decode_backend, length.shares, settings.baseline))
    elif len(ratios) < 2:
        reasons.append("one round, so no interval")
    elif (ratios == ratios[0]).all():
        reasons.append("no spread between rounds; is the timer fine enough?")
    if length.num_prompts is not None and length.num_prompts < 2:
        reasons.append(f"{length.num_prompts} prompt(s), so no interval")
    length_draws_ = log_length + length.spread * (length.log_draws - log_length)
    draws = log_length - log_cost + prompts_part - rounds_part
    low, high = np.exp(percentile_interval(draws, settings.confidence))
    cost_low, cost_high = np.exp(percentile_interval(log_cost + cost_draws, settings.confidence))
    length_low, length_high = np.exp(percentile_interval(length_draws_, settings.confidence))
    verdict = _verdict(low, high, cost_low, ceiling)
    if source is not None and source.borrowed_from and verdict in ("pays", "loses"):
        reasons.append(f"would be {verdict!r}")
        verdict = "undecided"
    elif verdict == "undecided" and np.isfinite(low):
        reasons.append("the interval includes 1")
    cell |= {
        "workload": source.workload if source else None,
        "temperature": source.temperature if source and source.temperature is not None else np.nan,
        "decode_backend": decode_backend,
        "relative_step_cost": float(np.exp(log_cost)),
        "relative_step_cost_low": cost_low,
        "relative_step_cost_high": cost_high,
        "mean_acceptance_length": length.length,
        "mean_acceptance_length_low": np.clip(length_low, 1, ceiling),
        "mean_acceptance_length_high": np.clip(length_high, 1, ceiling),
        "speedup": float(np.exp(log_length - log_cost)),
        "speedup_low": low,
        "speedup_high": high,
        "speedup_same_backend": _same_backend(cost, length),
        "verdict": verdict,
        "origin": _joint_origin(cost, source),
        "breakeven_ceiling": ceiling,
        "num_rounds": len(ratios),
        "num_prompts": np.nan if length.num_prompts is None else length.num_prompts,
        "reason": "; ".join([*reasons, *(source.notes if source else ()), *cost.notes]) or None,
    }
    return cell, draws


def _deviations(
    cost: StepCosts, ratios: np.ndarray, length: _Length, log_cost: float, settings: _Settings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spread log deviations [resamples] of relative_step_cost, and the rounds' and prompts' parts of the speed-up's.

    Draft-length shares and acceptance come from the same draw of prompts: texts with long drafts are also those that
    keep them, and the two partly cancel in the speed-up.
    """
    if len(ratios) < 2:
        return (np.full(settings.resamples, np.nan),) * 3
    rng = generator(settings.seed, "rounds", *cost.key.values())
    medians = np.median(ratios, axis=0)
    resampled = resampled_medians(ratios, settings.resamples, rng)
    spread = student_spread(len(ratios), settings.resamples, rng, of_medians=True)
    rounds = spread * (np.log(resampled @ length.shares) - log_cost)
    by_shares = np.log(length.share_draws @ medians) - log_cost
    prompts = length.spread * (length.log_draws - np.log(length.length) - by_shares)
    # One prompt says nothing about the spread of draft lengths, unless every step drafts alike.
    shares_part = np.zeros(len(spread)) if (length.shares == 1).any() else length.spread * by_shares
    return rounds + shares_part, rounds, prompts


def _verdict(low: float, high: float, cost_low: float, ceiling: int) -> str:
    if cost_low > ceiling:
        return "cannot_pay"
    if low > 1:
        return "pays"
    return "loses" if high < 1 else "undecided"


def _same_backend(cost: StepCosts, length: _Length) -> float:
    _, decode_ms = baseline_ms(cost, "same")
    ratios = paired_ratios(cost, decode_ms, length.shares)
    return float(length.length / (np.median(ratios, axis=0) @ length.shares)) if len(ratios) else np.nan


def _no_ratio(cost: StepCosts, decode_backend: str | None, shares: np.ndarray, baseline: str) -> str:
    if decode_backend is None:
        return f"no plain decode of baseline {baseline!r} was measured here"
    missing = [j for j in np.flatnonzero(shares > 0) if not np.isfinite(cost.step_ms[:, j]).any()]
    if missing:
        used = ", ".join(f"{j} ({shares[j]:.1%} of steps)" for j in missing)
        return f"no cost was measured for steps with this many drafts: {used}"
    return "no round holds the baseline and every draft length"


def _joint_origin(cost: StepCosts, source: Source | None) -> str:
    return source.origin if source is not None and source.origin != "measured" else cost.origin


def _curves(cells: pd.DataFrame, draws: list[np.ndarray], confidence: float) -> list[dict[str, Any]]:
    curves = []
    # Cells without acceptance have no workload; they break the curves of the workloads that were joined elsewhere.
    costs_only = cells[cells["mean_acceptance_length"].isna()]
    joined = cells[cells["mean_acceptance_length"].notna()]
    for key, curve in joined.groupby(list(CURVE_COLUMNS), dropna=False, sort=True):
        names = dict(zip(CURVE_COLUMNS, key, strict=True))
        shared = [name for name in CURVE_COLUMNS if name not in ("workload", "temperature", "origin")]
        same = (costs_only[shared].astype(object).fillna("") == curve[shared].iloc[0].astype(object).fillna("")).all(
            axis=1
        )
        rows = pd.concat([curve, costs_only[same]]).sort_values("context_len")
        found = crossovers(
            rows["context_len"].to_numpy(float),
            np.log(rows["speedup"].to_numpy(float)),
            np.stack([draws[index] for index in rows.index], axis=1),
            confidence,
        )
        curves.append(
            {name: None if is_missing(value) else value for name, value in names.items()} | {"crossovers": found}
        )
    return curves


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Numpy scalars to Python's, NaN and infinities to None."""
    plain = {}
    for name, value in record.items():
        value = value.item() if isinstance(value, np.generic) else value
        plain[str(name)] = None if isinstance(value, float) and not np.isfinite(value) else value
    return plain


def verdict_table(cells: pd.DataFrame) -> pd.DataFrame:
    """A short form of `Breakeven.cells` to print: what varies, break-even and measured length, speed-up, verdict.

    Columns that hold one value throughout are left out, but for context, k, verify backend and workload.
    """
    always = ("workload", "context_len", "num_speculative_tokens", "verify_backend")
    names = [
        name
        for name in (*CELL_COLUMNS[:13], "origin")
        if name in always or len(distinct(cells, name)) + cells[name].isna().any() > 1
    ]
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
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if np.isfinite(low) else f"{value:.2f}"
