"""The field's speed-up formulas over the measured curve, with their error. Assumptions: speedup_formulas.csv."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.decide.step_costs import StepCosts, baseline_ms
from labkit.engines.tables import read_table


def formulas() -> pd.DataFrame:
    """Name, formula, assumptions, what it leaves out, whether it is drawn, source."""
    return pd.DataFrame(read_table("speedup_formulas.csv"))


def geometric_length(keep: float, k: int) -> float:
    """1 + a + ... + a^k: acceptance length when each further draft is kept with one chance a."""
    return float(sum(keep**i for i in range(k + 1)))


def fitted_chance(length: float, k: int) -> float:
    """The chance a with `geometric_length` equal to a measured length, 0..1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if geometric_length(middle, k) < length else (low, middle)
    return (low + high) / 2


def leviathan(keep: float, k: int, draft_cost: float) -> float:
    """Speed-up by Theorem 3.8; ``draft_cost`` = one draft step over one decode step."""
    return geometric_length(keep, k) / (k * draft_cost + 1)


def magicdec(keep: float, k: int, draft_cost: float, verify_cost: float) -> float:
    """Speed-up with the measured cost of verify over decode."""
    return geometric_length(keep, k) / (k * draft_cost + verify_cost)


def formula_table(costs: Sequence[StepCosts], cells: pd.DataFrame) -> pd.DataFrame:
    """Each drawn formula beside the measured speed-up of every judged cell: formula, k, speedup, predicted, error.

    One chance a per curve and context, fitted to the measured length at the largest k: that is what the formulas take.
    Costs are the medians of the same cells; forced rejection takes the measured length and a step in which all k drafts
    are verified. ``error`` = predicted / measured - 1. Without draft_ms apart (composed steps have it, as have loop
    rows) the draft counts as free.
    """
    by_key = {tuple(cost.key.values()): cost for cost in costs}
    names = list(costs[0].key) if costs else []
    of_curve = [name for name in (*names, "workload", "temperature") if name != "num_speculative_tokens"]
    records = []
    known = cells[cells["speedup"].notna()]
    for _, curve in known.groupby(of_curve, dropna=False, sort=True):
        longest = curve.iloc[int(curve["num_speculative_tokens"].to_numpy(int).argmax())]
        keep = fitted_chance(float(longest["mean_acceptance_length"]), int(longest["num_speculative_tokens"]))
        for cell in curve.to_dict("records"):
            cost = by_key[tuple(None if pd.isna(cell[name]) else cell[name] for name in names)]
            decode_ms, k = baseline_ms(cost, "fastest")[1], cost.num_speculative_tokens
            step = float(np.nanmedian(cost.step_ms[:, k] / decode_ms))
            draft = float(np.nanmedian(cost.parts_ms["draft_ms"] / decode_ms)) if "draft_ms" in cost.parts_ms else 0.0
            values = {
                "Leviathan et al.": leviathan(keep, k, draft / k),
                "MagicDec": magicdec(keep, k, draft / k, step - draft),
                "Forced rejection": cell["mean_acceptance_length"] / step,
            }
            place = {name: cell[name] for name in ("context_len", "batch_size", "verify_backend", "workload")}
            for name, predicted in values.items():
                row = place | {"formula": name, "k": k, "keep": keep, "speedup": cell["speedup"]}
                records.append(row | {"predicted": predicted, "error": predicted / cell["speedup"] - 1})
    return pd.DataFrame(records)


def formula_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Per formula and verify backend: median and worst absolute error, and the cell of the worst."""
    rows = []
    for key, own in table.groupby(["formula", "verify_backend"], sort=False):
        worst = own.iloc[int(own["error"].abs().to_numpy().argmax())]
        numbers = {"median_error": own["error"].abs().median(), "worst_error": worst["error"], "num_cells": len(own)}
        where = {"worst_context_len": worst["context_len"], "worst_k": worst["k"]}
        rows.append(dict(zip(("formula", "verify_backend"), key, strict=True)) | numbers | where)
    return pd.DataFrame(rows)
