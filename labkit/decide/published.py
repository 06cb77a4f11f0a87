"""Figures of others in ``data/published/measurements.csv``: loaded like runs, judged by the same rule, and closed.

A publication closes when its own figures agree with one another. Origin is published throughout, and no verdict has an
interval: none was printed.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from labkit.errors import InputError
from labkit.paths import DATA

COLUMNS = (
    *("case", "arm", "baseline", "quantity", "value", "unit", "definition", "kind", "engine", "engine_version", "gpu"),
    *("target", "drafter", "num_speculative_tokens", "context_len", "batch_size", "note", "source"),
)
NUMBERS = ("value", "num_speculative_tokens", "context_len", "batch_size")
KINDS = ("quoted", "computed")
# Figures are printed with two or three digits: ratios that differ by less agree.
TOLERANCE = 0.05


def load_published(*paths: str | Path) -> pd.DataFrame:
    """Long form, one row per printed or computed figure: ``COLUMNS`` plus experiment and origin ("published").

    paths : CSV files of these columns; by default every ``*.csv`` of ``data/published``.

    Raises InputError: no such file, other columns, a value that is no number, a kind other than quoted or computed, or
    a row without a source.
    """
    frames = []
    for path in [Path(path) for path in paths] or sorted((DATA / "published").glob("*.csv")):
        try:
            frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: wanted a CSV file of published figures: {error}") from error
        if missing := [name for name in COLUMNS if name not in frame]:
            raise InputError(f"{path}: column(s) {', '.join(missing)} missing; wanted {', '.join(COLUMNS)}")
        for line, row in enumerate(frame.to_dict("records"), start=2):
            if row["kind"] not in KINDS or not row["source"]:
                raise InputError(
                    f"{path}, line {line}: want a source, and kind {' or '.join(KINDS)}; got {row['kind']!r}"
                )
        for name in NUMBERS:
            numbers = pd.to_numeric(frame[name].replace("", None), errors="coerce")
            if bad := frame.loc[numbers.isna() & (frame[name] != ""), name].tolist():
                raise InputError(f"{path}: {name} must be a number, got {bad[0]!r}")
            frame[name] = numbers.astype(float)
        frames.append(frame.assign(experiment="published", origin="published"))
    return pd.concat(frames, ignore_index=True)


def published_table(df: pd.DataFrame) -> pd.DataFrame:
    """One row per case and arm: what its quoted figures say of length, speed-up and step cost, and whether they close.

    speedup : quoted, else tokens per second over those of the baseline arm.
    mean_acceptance_length : quoted, else from counts (1 + A / (D / k), or output tokens / verify steps).
    relative_step_cost : quoted, else from step times, else length / speed-up.
    implied_acceptance_length : speed-up x step cost, or tokens per second x step time at batch 1.
    verdict : pays or loses as the speed-up is above or below 1; unknown without one.
    closes : False with the reason in ``why`` where figures contradict each other.
    """
    table = []
    for case, rows in df.groupby("case", sort=False):
        arms = {str(arm): _values(own) for arm, own in rows.groupby("arm", sort=False)}
        first: dict[str, float] | None = None
        for arm, own in rows.groupby("arm", sort=False):
            about = own.iloc[0]
            found = _derive(arms[str(arm)], arms.get(str(about["baseline"]), {}), about["num_speculative_tokens"])
            why = _contradictions(found, about["num_speculative_tokens"], first)
            first = first or found
            names = {
                name: about[name] for name in ("engine", "gpu", "target", "drafter", "note", "source", *NUMBERS[1:])
            }
            judged = {"closes": not why, "why": "; ".join(why), "verdict": _verdict(found.get("speedup"))}
            table.append({"case": case, "arm": arm} | found | judged | names)
    return pd.DataFrame(table).assign(origin="published")


def _values(rows: pd.DataFrame) -> dict[str, float]:
    quoted = rows[rows["kind"] == "quoted"]
    return dict(zip(quoted["quantity"], quoted["value"], strict=True))


def _derive(own: dict[str, float], base: dict[str, float], k: float) -> dict[str, float]:
    kept = ("speedup", "relative_step_cost", "mean_acceptance_length", "speedup_by_tpot", "same_length_as_first")
    found: dict[str, float] = {name: own[name] for name in kept if name in own}
    if "output_tokens_per_s" in own and "output_tokens_per_s" in base:
        found.setdefault("speedup", own["output_tokens_per_s"] / base["output_tokens_per_s"])
    if "step_ms" in own and "step_ms" in base:
        found.setdefault("relative_step_cost", own["step_ms"] / base["step_ms"])
    if {"num_accepted_tokens", "num_drafted_tokens"} <= own.keys():
        found.setdefault("mean_acceptance_length", 1 + own["num_accepted_tokens"] / (own["num_drafted_tokens"] / k))
    if {"output_tokens", "num_verify_steps"} <= own.keys():
        found.setdefault("mean_acceptance_length", own["output_tokens"] / own["num_verify_steps"])
    if {"speedup", "relative_step_cost"} <= found.keys():
        found["implied_acceptance_length"] = found["speedup"] * found["relative_step_cost"]
    elif {"output_tokens_per_s", "step_ms"} <= own.keys():
        found["implied_acceptance_length"] = own["output_tokens_per_s"] * own["step_ms"] / 1e3
    if {"speedup", "mean_acceptance_length"} <= found.keys():
        found.setdefault("relative_step_cost", found["mean_acceptance_length"] / found["speedup"])
    return found


def _contradictions(found: dict[str, float], k: float, first: dict[str, float] | None) -> list[str]:
    why = []
    length, implied = found.get("mean_acceptance_length"), found.get("implied_acceptance_length")
    longest = length or implied
    if longest and longest > (k + 1) * (1 + TOLERANCE / 5):  # False where k is unknown
        why.append(f"length {longest:.2f} is above the ceiling k+1 = {k + 1:.0f}")
    if length and implied and abs(length / implied - 1) > TOLERANCE:
        why.append(f"length {length:.2f} is printed, speed and step time give {implied:.2f}")
    if found.get("same_length_as_first") and first and implied:
        other = first["implied_acceptance_length"]
        if abs(implied / other - 1) > TOLERANCE:
            why.append(f"the length is said to be the same, the figures give {other:.2f} and {implied:.2f}")
    by_tpot, speedup = found.get("speedup_by_tpot"), found.get("speedup")
    if by_tpot and speedup and (by_tpot > 1) != (speedup > 1):
        why.append(f"throughput says {speedup:.2f}x, time per token {by_tpot:.2f}x")
    return why


def _verdict(speedup: Any) -> str:
    return "unknown" if speedup is None else "pays" if speedup > 1 else "loses"
