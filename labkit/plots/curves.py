"""What is computed between measured cells before it is drawn: interpolation, undecided ranges, crossings as text."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import InputError
from labkit.plots.style import format_tokens_range
from labkit.rows import distinct, key_value


def by_name(frame: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Groups of a text column in order of appearance; a missing value is a group named ``None``."""
    for name, rows in frame.groupby(column, dropna=False, sort=False):
        yield "None" if pd.isna(name) else str(name), rows


def one_k(rows: pd.DataFrame, what: str) -> int:
    """The k of rows that share an axes. Raises InputError: no rows, or several k."""
    ks = distinct(rows, "num_speculative_tokens")
    if len(ks) != 1:
        raise InputError(f"{what}: want one num_speculative_tokens per axes; got {', '.join(map(str, ks)) or 'none'}")
    return int(ks[0])


def interpolate(
    x: np.ndarray, frame: pd.DataFrame, columns: Sequence[str], per_segment: int = 16
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Columns between measured contexts, linear in log2(x) and log(y): x and one y per column, each [num_points]."""
    if len(x) == 1:
        return x, [frame[name].to_numpy(float) for name in columns]
    position = np.log2(x)
    fine = np.concatenate([np.linspace(a, b, per_segment, endpoint=False) for a, b in pairwise(position)])
    fine = np.append(fine, position[-1])
    return 2**fine, [np.exp(np.interp(fine, position, np.log(frame[name].to_numpy(float)))) for name in columns]


def value_at(x: np.ndarray, frame: pd.DataFrame, column: str) -> np.ndarray:
    """One column at contexts ``x`` [num_points], interpolated as in `interpolate`; ``frame`` ascends in context_len."""
    position = np.log2(frame["context_len"].to_numpy(float))
    return np.exp(np.interp(np.log2(x), position, np.log(frame[column].to_numpy(float))))


def undecided_spans(contexts: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[tuple[float, float]]:
    """Ranges of context in which an interval [low, high] of the speed-up holds 1, interpolated as the curves are.

    NaN bounds count as undecided at their own context only. Contexts ascending; tokens.
    """
    position = np.log2(contexts)
    known = np.isfinite(low) & np.isfinite(high)
    fine = np.unique(np.concatenate([np.linspace(position[0], position[-1], 256), position]))
    inside = np.zeros(len(fine), bool)
    if known.any():
        lower = np.interp(fine, position[known], np.log(low[known]))
        upper = np.interp(fine, position[known], np.log(high[known]))
        inside = (lower <= 0) & (upper >= 0) & (fine >= position[known][0]) & (fine <= position[known][-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], inside.astype(int), [0]])))
    return [(float(2 ** fine[a]), float(2 ** fine[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def matching_curves(
    crossovers: Sequence[Mapping[str, Any]], cells: pd.DataFrame
) -> list[tuple[Mapping[str, Any], pd.DataFrame]]:
    """Curves of `Breakeven.crossovers` that have cells here, each with its cells in order of context."""
    found, names = [], [name for name in (crossovers[0] if crossovers else ()) if name in cells]
    keys = [tuple(map(key_value, key)) for key in cells[names].itertuples(index=False, name=None)]
    for curve in crossovers:
        wanted = tuple(curve[name] for name in names)
        own = [key == wanted for key in keys]
        if any(own):
            found.append((curve, cells[own].sort_values("context_len")))
    return found


def crossing_text(crossing: Mapping[str, Any], limits: tuple[float, float]) -> str:
    """``pays up to 23K [21, 26]``, ``pays from ...`` or, where a side has no decided cell, ``undecided around ...``.

    A bound outside the measured contexts prints as ``>128``.
    """
    claim = "pays up to" if crossing["direction"] == "pays below" else "pays from"
    place = format_tokens_range(crossing["context_len"], crossing["low"], crossing["high"], limits)
    return f"{claim if crossing['decided'] else 'undecided around'} {place}"


def turning_text(crossing: Mapping[str, Any]) -> str:
    """As `crossing_text` along the batch size: ``pays up to 15 requests [12, 18]``; "open": beyond the measured."""
    low, high = ("open" if crossing[side] is None else f"{crossing[side]:.0f}" for side in ("low", "high"))
    claim = "pays up to" if crossing["direction"] == "pays below" else "pays from"
    claim = claim if crossing["decided"] else "undecided around"
    return f"{claim} {crossing['batch_size']:.0f} requests [{low}, {high}]"
