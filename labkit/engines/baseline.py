"""Speculative windows against plain ones of the same server, batch and octave of context: what a step costs."""

from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval
from labkit.decide.ratios import median_and_deviations

MIN_WINDOWS, CLOSE, RESAMPLES = 3, 0.1, 1000


def against_plain(windows: pd.DataFrame, plain: pd.DataFrame) -> list[dict[str, Any]]:
    """Cells of equal batch and octave of context that hold `MIN_WINDOWS` steady windows of either kind, by context.

    speedup: median tokens per second over the plain one's, (value, low, high) by resampled windows.
    relative_step_cost: mean acceptance length / speedup. The median contexts of either kind stand beside each other:
    inside an octave they may differ, and there is no verdict where they differ by more than 10%.
    """
    sides = [_cells(frame) for frame in (windows, plain)]
    found = []
    for key in sorted(sides[0].keys() & sides[1].keys()):
        rng, (own, base) = generator(0, "plain", *key), (side[key] for side in sides)
        if min(len(own), len(base)) < MIN_WINDOWS:
            continue
        rates = [np.log(rows["output_tokens_per_s"].to_numpy(float)) for rows in (own, base)]
        (fast, off_fast), (slow, off_slow) = (median_and_deviations(rate, RESAMPLES, rng) for rate in rates)
        low, high = percentile_interval(fast - slow + off_fast - off_slow, 0.95)  # of the logarithm
        length = float(np.average(own["mean_acceptance_length"], weights=own["weight"]))
        speedup = tuple(float(np.exp(value)) for value in (fast - slow, low, high))
        entry: dict[str, Any] = {"batch_size": key[1], "num_windows": len(own), "num_plain_windows": len(base)}
        entry |= {"context_len": own["context_len"].median(), "plain_context_len": base["context_len"].median()}
        entry |= {"step_ms": own["step_ms"].median(), "decode_ms": base["step_ms"].median()}
        entry |= {"mean_acceptance_length": length, "relative_step_cost": length / speedup[0], "speedup": speedup}
        close = abs(entry["context_len"] / entry["plain_context_len"] - 1) <= CLOSE
        entry["verdict"] = "undecided" if not close else "pays" if low > 0 else "loses" if high < 0 else "undecided"
        found.append(entry)
    return found


def _cells(windows: pd.DataFrame) -> dict[tuple[int, float], pd.DataFrame]:
    """Steady windows by octave of context and batch."""
    steady = windows.dropna(subset=["step_ms", "context_len", "batch_size", "output_tokens_per_s"])
    steady = steady[steady["context_len"].astype(float) > 0]
    octave = np.log2(steady["context_len"].astype(float).clip(lower=1)).round().astype(int)
    return {(int(str(k[0])), float(str(k[1]))): rows for k, rows in steady.groupby([octave, steady["batch_size"]])}
