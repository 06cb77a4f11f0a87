"""Where a speed-up curve crosses 1 along the context, and how well the measured cells pin that down."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import CONFIDENCE
from labkit.rows import group_numbers, plain_record


def _crossings(position: np.ndarray, log_speedup: np.ndarray, falling: bool) -> np.ndarray:
    """Crossing between neighbours, [..., num_contexts - 1], NaN where there is none in this direction."""
    left, right = log_speedup[..., :-1], log_speedup[..., 1:]
    pays_left, pays_right = left > 0, right > 0
    crosses = pays_left & ~pays_right if falling else ~pays_left & pays_right
    crosses &= np.isfinite(left) & np.isfinite(right)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = left / (left - right)
    return np.where(crosses, position[:-1] + share * np.diff(position), np.nan)


def crossovers(
    context_lens: np.ndarray, log_speedup: np.ndarray, draws: np.ndarray, decided: np.ndarray | None = None
) -> list[dict[str, float | str | bool | None]]:
    """Crossings of one curve, left to right; none, one or several.

    The speed-up is interpolated as its log in log2(context_len), between measured neighbours only: a NaN breaks the
    curve. Each crossing of the estimate takes from every draw the nearest crossing of the same direction. A draw that
    has none lies beyond the measured contexts, on the side that its sign tells.

    context_lens, log_speedup : float64 [num_contexts], contexts ascending.
    draws : resampled log speed-ups [resamples, num_contexts].
    decided : whether the verdict of each cell is decided [num_contexts]; None: all are.

    Returns a list of dict: context_len, low, high (tokens; None = not bounded within the measured contexts, or no
    interval for a neighbour), direction, "pays below" or "pays above", pays_at and loses_at: the nearest decided cells
    on the two sides, with no gap and no other crossing between (None: there is none), and decided: whether both are
    there. Only then is the direction a claim.
    """
    position = np.log2(np.maximum(context_lens, 1))
    resampled = np.isfinite(draws).any(axis=0)
    draws = draws[np.isfinite(draws[:, resampled]).all(axis=1)]
    decided = np.isfinite(log_speedup) if decided is None else decided
    found: list[tuple[float, dict[str, float | str | bool | None]]] = []
    for falling in (True, False):
        estimates = _crossings(position, log_speedup, falling)
        in_draws = _crossings(position, draws, falling)
        for index in np.flatnonzero(np.isfinite(estimates)):
            distance = np.where(np.isfinite(in_draws), np.abs(in_draws - estimates[index]), np.inf)
            nearest = in_draws[np.arange(len(draws)), distance.argmin(axis=1)]
            pays_after = draws[:, index + 1] > 0
            beyond = np.where(pays_after == falling, np.inf, -np.inf)
            nearest = np.where(np.isnan(nearest), beyond, nearest)
            if not resampled[index : index + 2].all():
                nearest = np.array([])
            left = _first_decided(log_speedup, decided, range(index, -1, -1))
            right = _first_decided(log_speedup, decided, range(index + 1, len(decided)))
            pays, loses = (left, right) if falling else (right, left)
            crossing: dict[str, float | str | bool | None] = {
                "context_len": float(2 ** estimates[index]),
                "low": _bound(nearest, (1 - CONFIDENCE) / 2, "lower"),
                "high": _bound(nearest, (1 + CONFIDENCE) / 2, "higher"),
                "direction": "pays below" if falling else "pays above",
                "decided": pays is not None and loses is not None,
                "pays_at": None if pays is None else float(context_lens[pays]),
                "loses_at": None if loses is None else float(context_lens[loses]),
            }
            found.append((estimates[index], crossing))
    return [crossing for _, crossing in sorted(found, key=lambda item: item[0])]


def _first_decided(log_speedup: np.ndarray, decided: np.ndarray, places: range) -> int | None:
    """The first decided cell of these; None where the curve ends, breaks or crosses back before one."""
    for place in places:
        if not np.isfinite(log_speedup[place]) or (log_speedup[place] > 0) != (log_speedup[places[0]] > 0):
            return None
        if decided[place]:
            return place
    return None


def _bound(positions: np.ndarray, share: float, method: str) -> float | None:
    if not len(positions):
        return None
    value = np.quantile(positions, share, method=method)  # type: ignore[call-overload]
    return float(2**value) if np.isfinite(value) else None


def curve_crossings(
    cells: pd.DataFrame, draws: list[np.ndarray], axis: str, curve_columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Crossings of each curve along one axis, context_len or batch_size; none for a curve of a single batch size.

    cells, draws : verdicts, and the resampled log speed-ups [resamples] of each. curve_columns : what one curve shares.
    """
    names = [name for name in (*curve_columns, "context_len") if name != axis]
    of_text = ["workload", "temperature", "origin"]
    if axis == "batch_size" and cells[axis].nunique() < 2:
        return []
    same_cost = group_numbers(cells, [name for name in names if name not in of_text])
    same_text = group_numbers(cells, of_text)
    position, decided = cells[axis].to_numpy(float), (cells["verdict"] != "undecided").to_numpy()
    lengths, logs = cells["mean_acceptance_length"].to_numpy(float), np.log(cells["speedup"].to_numpy(float))
    # With one token per step nothing is gained: a speed-up above 1 tells of the baseline.
    logs = np.where(lengths > 1, logs, np.minimum(logs, 0))
    curves = []
    # Rows by number: a table for each curve would take half the time of a verdict.
    for cost in range(same_cost.max(initial=-1) + 1):
        places = np.unique(position[same_cost == cost])
        known = np.flatnonzero((same_cost == cost) & ~np.isnan(lengths))
        if axis == "batch_size" and len(places) < 2:
            continue
        for text in np.unique(same_text[known]):
            own = known[same_text[known] == text]
            # A place without this text's acceptance is a gap: nothing is interpolated across it.
            columns = np.searchsorted(places, position[own])
            log_speedup, log_draws = np.full(len(places), np.nan), np.full((len(draws[0]), len(places)), np.nan)
            log_speedup[columns], log_draws[:, columns] = logs[own], np.stack([draws[row] for row in own], axis=1)
            found = crossovers(places, log_speedup, log_draws, np.isin(places, position[own[decided[own]]]))
            along = [{axis: item.pop("context_len")} | item for item in found]
            curves.append(plain_record(cells.iloc[own[0]][names].to_dict()) | {"crossovers": along})
    return curves
