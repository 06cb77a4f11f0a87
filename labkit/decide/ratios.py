"""Time of one set of rows over another's, cell by cell, with an interval; paired where the rounds were shared."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_medians, student_spread
from labkit.errors import InputError
from labkit.rows import distinct, is_missing, ok_rows

UNIT = ["run_id", "group", "round"]
TIME_COLUMNS = ("step_ms", "forward_ms", "attention_ms")
# Rows are matched by these, so two runs may cover different values of them; only common cells are compared.
MATCHED = (
    *("arm", "phase", "target", "drafter", "backend", "verify_backend", "decode_backend", "draft_backend"),
    *("workload", "batch_size", "q_len", "context_len", "num_speculative_tokens", "num_drafted_tokens"),
    "imposed_acceptance",
)


ONE_LAUNCH, LAUNCHES = "within one launch", "across launches"


def time_column(rows_a: pd.DataFrame, rows_b: pd.DataFrame) -> str | None:
    """The time that both frames hold, None if there is none."""
    return next((name for name in TIME_COLUMNS if name in rows_a and name in rows_b), None)


def ratio_table(rows_a: pd.DataFrame, rows_b: pd.DataFrame, *, ignoring: Iterable[str] = ()) -> pd.DataFrame:
    """Median time of B over that of A for every cell that both have.

    A unit is a (run_id, group, round), its time the median of its samples. Units present on both sides are paired: the
    ratio is the median of theirs. Rows of two runs have none, so their medians are divided and either side is resampled
    alone. The interval then holds neither what differs between two launches as such nor a clock that drifts during one:
    with 16 rounds and a random walk of 2% per round it covered the truth in 38% of planted cells, not in 95%. So a
    single launch per side (column ``launch``, else run_id) never decides between launches; where both sides have two or
    more, launches are what is resampled.

    ignoring : columns of ``MATCHED`` that are meant to differ and so do not make a cell.

    Rows of generations, whose context grows from step to step, are matched without it: a prompt is measured as a whole.

    Returns the matched columns, `column` (which time), a_ms, b_ms, ratio, ratio_low, ratio_high, paired, num_rounds_a,
    num_rounds_b, num_launches_a, num_launches_b, claim ("within one launch" or "across launches") and verdict (faster,
    slower, undecided: of B, for that claim; of unpaired single launches undecided). Bounds are NaN for fewer than two
    units.

    Raises InputError: no time column in common, no common cell, or an ignored column with several values inside one
    cell.
    """
    column = time_column(rows_a, rows_b)
    if column is None:
        raise InputError(f"rows to compare must both have one of {', '.join(TIME_COLUMNS)}")
    a, b = (ok_rows(rows, "compared", [*UNIT, column]) for rows in (rows_a, rows_b))
    keys = [name for name in MATCHED if name in a and name in b and name not in ignoring]
    keys = [name for name in keys if a[name].notna().any() or b[name].notna().any()]
    if any(_grows(rows) for rows in (a, b)):
        keys.remove("context_len")
    cells_a, cells_b = _cells(a, keys, column, ignoring), _cells(b, keys, column, ignoring)
    records = []
    for key in [key for key in cells_a if key in cells_b]:
        ratio = _ratio(cells_a[key], cells_b[key], generator(0, "ratio", *key))
        records.append(dict(zip(keys, key, strict=True)) | {"column": column} | ratio)
    if not records:
        raise InputError("the compared rows have no cell in common")
    return pd.DataFrame(records)


def _grows(rows: pd.DataFrame) -> bool:
    """Whether the context changes inside a unit of loop rows."""
    contexts = rows.groupby(UNIT)["context_len"].nunique() if {"step_index", "context_len"} <= set(rows) else None
    return contexts is not None and bool((contexts > 1).any())


def _cells(
    rows: pd.DataFrame, keys: list[str], column: str, ignoring: Iterable[str]
) -> dict[tuple[Any, ...], pd.Series]:
    """Cell -> median time per unit."""
    cells = {}
    for key, group in rows.groupby(keys, dropna=False, sort=True) if keys else [((), rows)]:
        for name in ignoring:
            if len(values := distinct(group, name)) > 1:
                raise InputError(f"{name} must have one value on each side, got {', '.join(map(str, values))}")
        # NaN differs from itself, and the other side's key has to be found.
        known = tuple(None if is_missing(value) else value for value in key)
        cells[known] = group.groupby([*UNIT, *(["launch"] if "launch" in group else [])])[column].median()
    return cells


def _ratio(a: pd.Series, b: pd.Series, rng: np.random.Generator) -> dict[str, float | int | bool | str]:
    shared = a.index.intersection(b.index)
    paired = len(shared) > 0
    rounds = (len(shared), len(shared)) if paired else (len(a), len(b))
    launch = "launch" if "launch" in a.index.names else "run_id"
    launches = [side.groupby(level=launch).median() for side in (a, b)]
    several = not paired and min(map(len, launches)) > 1
    if paired:
        log_ratio, deviations = median_and_deviations(np.log((b[shared] / a[shared]).to_numpy()), rng)
    else:
        units = launches if several else (a, b)
        log_a, deviations_a = median_and_deviations(np.log(units[0].to_numpy()), rng)
        log_b, deviations_b = median_and_deviations(np.log(units[1].to_numpy()), rng)
        log_ratio, deviations = log_b - log_a, deviations_b - deviations_a
    low, high = np.exp(percentile_interval(log_ratio + deviations))
    found = {"a_ms": float(a.median()), "b_ms": float(b.median()), "ratio": float(np.exp(log_ratio))}
    bounds = {"ratio_low": float(low), "ratio_high": float(high)}
    numbers = {"num_rounds_a": rounds[0], "num_rounds_b": rounds[1]}
    numbers |= {"num_launches_a": len(launches[0]), "num_launches_b": len(launches[1])}
    decided = paired or several
    verdict = "faster" if decided and high < 1 else "slower" if decided and low > 1 else "undecided"
    claim = LAUNCHES if several else ONE_LAUNCH
    return {**found, **bounds, "paired": paired, **numbers, "claim": claim, "verdict": verdict}


def median_and_deviations(logs: np.ndarray, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Median of logs [num_units] and the spread deviations of resampled ones [resamples], NaN for a single unit."""
    median = float(np.median(logs))
    if len(logs) < 2:
        return median, np.full(RESAMPLES, np.nan)
    spread = student_spread(len(logs), RESAMPLES, rng, of_medians=True)
    return median, spread * (resampled_medians(logs[:, None], RESAMPLES, rng)[:, 0] - median)
