"""Published cases of ``data/published/field_reports.jsonl``: their figures, put in an engine's own form, imported.

The inputs are synthetic: the published numbers in lines and objects of the format of the engine or load tool.
"""

import itertools
import json
from typing import Any

import numpy as np
import pandas as pd

from labkit.engines.checks import compare_arms
from labkit.engines.importing import Reader
from labkit.engines.record import Record
from labkit.paths import DATA


def cases() -> dict[int, dict[str, Any]]:
    """Row of the report -> source, engine, concluded, trap, files (arm -> text), wanted figures, pairs of arms."""
    with (DATA / "published" / "field_reports.jsonl").open() as file:
        return {case["row"]: case for case in map(json.loads, file)}


def arms(case: dict[str, Any]) -> dict[str, list[Record]]:
    """The records of every arm of a case."""
    return {arm: list(Reader().read_text(text, arm)) for arm, text in case["files"].items()}


def one_off(records: list[Record]) -> dict[str, float]:
    """Fit duration = one_off_ms + per_step_ms x steps over runs: separates a compilation from the cost of a step."""
    steps = [float(record.steps or np.nan) for record in records]
    slope, intercept = np.polyfit(steps, [1000 * record.details["duration_s"] for record in records], 1)
    return {"one_off_ms": float(intercept), "per_step_ms": float(slope)}


def jumps(records: list[Record], threshold: float = 1.8) -> list[dict[str, Any]]:
    """Neighbouring contexts between which the step time changes by more than its context does: another path."""
    found = []
    for a, b in itertools.pairwise(sorted(records, key=lambda record: record.context_len or 0)):
        ratio = (b.step_ms or np.nan) / (a.step_ms or np.nan)
        if ratio > threshold:
            found.append({"between": [a.context_len, b.context_len], "ratio": ratio})
    return found


def conclusions_table(reports: dict[int, dict[str, Any]]) -> pd.DataFrame:
    """One line per case: source, concluded, numbers (computed by the importer), trap, closes.

    ``closes``: whether the published figures give the acceptance length of every speculative arm without a
    contradiction; "no cost" where lengths are known and no plain decode is.
    """
    return pd.DataFrame([_line(case) for case in reports.values()])


def _line(case: dict[str, Any]) -> dict[str, Any]:
    records = arms(case)
    flat = [record for found in records.values() for record in found]
    numbers = [f"length {r.mean_acceptance_length:.2f}" for r in flat if (r.mean_acceptance_length or 1) > 1][:3]
    unknown, costs = [], 0
    for plain, arm, *_ in case["pairs"]:
        found = compare_arms(records[plain][-1], records[arm][-1])
        text = f"{arm}: {found['speedup']:.2f}x"
        if isinstance(found["relative_step_cost"], float):
            text, costs = f"{text} at a step of {found['relative_step_cost']:.2f} plain ones", costs + 1
        else:
            unknown.append(arm)
        numbers.append(text)
    lengths = [record for record in flat if record.mean_acceptance_length is not None]
    if unknown or not lengths or any("contradiction" in text for record in flat for text in record.warnings):
        closes = "no"
    else:
        closes = "yes" if costs else "no cost"
    return {
        "source": case["source"],
        "concluded": case["concluded"],
        "numbers": "; ".join(numbers) or "no acceptance length",
        "trap": case["trap"],
        "closes": closes,
    }


def conclusions_answer(table: pd.DataFrame) -> str:
    """The answer of the notebook in three sentences, from the table."""
    counts = table["closes"].value_counts()
    closed, partly, not_closed = (int(counts.get(name, 0)) for name in ("yes", "no cost", "no"))
    return (
        f"Of {len(table)} published cases, {closed} give both the acceptance length and the cost of a step in plain\n"
        f"decode steps. {partly} give a length and nothing to tell what a step costs. {not_closed} do not close: a\n"
        "length, its counts or the plain arm is missing. None of the lengths decides by itself: read each with its\n"
        "definition, its scope and the cost of a step."
    )
