"""Published cases of ``data/published/field_reports.jsonl``: their figures, put in an engine's own form, imported.

The inputs are synthetic: the published numbers in lines and objects of the format of the engine or load tool, other
fields of the format filled in. What holds a text of ``filler`` was filled in, and is not shown.
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
    """Neighbouring contexts between which the step time jumps: another path, not growth with the cache."""
    rows = [(record.context_len or 0, record.step_ms or np.nan) for record in records]
    pairs = [(a[0], b[0], b[1] / a[1]) for a, b in itertools.pairwise(sorted(rows))]
    return [{"between": [low, high], "ratio": ratio} for low, high, ratio in pairs if ratio > threshold]


def conclusions_table(reports: dict[int, dict[str, Any]]) -> pd.DataFrame:
    """One line per case: source, concluded, numbers (computed by the importer; else what it says), trap, closes.

    closes: "yes" where the figures give length and step cost without a contradiction, "no cost" where a plain decode is
    missing, else "no".
    """
    return pd.DataFrame([_line(case) for case in reports.values()])


def _line(case: dict[str, Any]) -> dict[str, Any]:
    records = arms(case)
    flat = list(itertools.chain.from_iterable(records.values()))
    printed = [r.mean_acceptance_length for r in flat if r.mean_acceptance_length is not None]
    filler = case.get("filler", [])
    lengths = [] if "length" in filler else printed
    numbers = [f"length {length:.2f}" for length in dict.fromkeys(lengths) if length > 1][:3]
    costs = []
    for plain, arm, *_ in case["pairs"]:
        ratio = compare_arms(records[plain][-1], records[arm][-1])
        costs.append(ratio["relative_step_cost"])
        cost = f" at a step of {costs[-1]:.2f} plain ones" if costs[-1] else ""
        numbers.append(f"{arm}: {ratio['speedup']:.2f}x{cost}")
    wrong = any("contradiction" in text for record in flat for text in record.warnings)
    closes = "no" if None in costs or not lengths or wrong else "yes" if costs else "no cost"
    line = {"source": case["source"], "concluded": case["concluded"], "trap": case["trap"], "closes": closes}
    said = list(dict.fromkeys(text for record in flat for text in record.warnings))[:2]
    wanted = [(arm, records[arm][i], name) for arm, i, name, _ in case["wanted"] if "warning" not in name]
    figures = [f"{arm}: {name.replace('_', ' ')} {_figure(record, name)}" for arm, record, name in wanted]
    shown = [text for text in numbers or said or figures[:4] if not any(word in text for word in filler)]
    return line | {"numbers": "; ".join(shown or figures[:1])}


def _figure(record: Record, name: str) -> str:
    value = getattr(record, name) if hasattr(record, name) else record.details[name]
    return f"{value:.4g}" if isinstance(value, int | float) else "unknown" if value is None else str(value)


def conclusions_answer(table: pd.DataFrame) -> str:
    """The answer of the notebook, from the table."""
    closed, partly, not_closed = (int((table["closes"] == name).sum()) for name in ("yes", "no cost", "no"))
    return (
        f"Of {len(table)} published cases, {closed} give both the acceptance length and the cost of a step in plain\n"
        f"decode steps. {partly} give a length and nothing to tell what a step costs. {not_closed} do not close: a\n"
        "length, its counts or the plain arm is missing. None of the lengths decides by itself: read each with its\n"
        "definition, its scope and the cost of a step."
    )
