"""Step times of windows: how they grow with the context, and what a step costs against plain ones.

Growth is a plane through step time over cached tokens, and over running requests where no batch has windows enough.
Plain windows are those of the same server, batch and octave of context.
"""

from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval, resampled_weights, student_spread
from labkit.decide.ratios import median_and_deviations

MIN_WINDOWS, MIN_SPAN, MIN_PLAIN, CLOSE, RESAMPLES = 6, 1.5, 3, 0.1, 1000
Interval = tuple[float, float, float]


def steady(windows: pd.DataFrame) -> pd.DataFrame:
    """Windows whose step time, context and running requests are known; an idle engine's iteration is no step."""
    known = windows.dropna(subset=["step_ms", "context_len", "batch_size"])
    return known[known["batch_size"].astype(float) > 0]


def step_plane(timed: pd.DataFrame, batch: float) -> tuple[list[Interval], bool]:
    """ms per 1,024 cached tokens of all requests together, and the intercept at ``batch`` in ms, with 95% intervals.

    Windows of ``batch`` alone, else of all batches with a term for each request (the second value tells). Eager windows
    are left out where others ran with a CUDA graph. No intervals where there are too few windows or too little context.
    """
    if timed["cuda_graph"].eq(True).any():
        timed = timed[timed["cuda_graph"].ne(False)]
    rows = timed[["context_len", "batch_size", "step_ms"]].astype(float)
    for several, kept in enumerate((rows[rows["batch_size"] == batch], rows)):
        cached = (kept["context_len"] * kept["batch_size"]).to_numpy() / 1024
        if len(kept) >= MIN_WINDOWS and cached.max() >= MIN_SPAN * cached.min():
            requests = [kept["batch_size"].to_numpy() - batch] * several
            columns = np.stack([cached, np.ones(len(kept)), *requests], axis=1)
            return _fit(columns, kept["step_ms"].to_numpy())[:2], bool(several)
    return [], False


def _fit(columns: np.ndarray, values: np.ndarray) -> list[Interval]:
    """Coefficients of the least-squares plane, columns [num_windows, n], with intervals by resampled windows."""
    rng, count = generator(0, "step time"), len(values)
    weights = np.concatenate([np.ones((1, count)), resampled_weights(count, RESAMPLES, rng)])
    squares = np.einsum("rw,wi,wj->rij", weights, columns, columns, optimize=True)
    products = weights @ (columns * values[:, None])
    found = np.einsum("rij,rj->ri", np.linalg.pinv(squares, hermitian=True), products)
    draws = found[0] + student_spread(count, RESAMPLES, rng)[:, None] * (found[1:] - found[0])
    return [(float(found[0, i]), *percentile_interval(draws[:, i])) for i in range(columns.shape[1])]


def against_plain(windows: pd.DataFrame, plain: pd.DataFrame) -> list[dict[str, Any]]:
    """Cells of equal batch and octave of context that hold `MIN_PLAIN` steady windows of either kind, by context.

    speedup: median tokens per second over the plain one's, (value, low, high) by resampled windows.
    relative_step_cost: mean acceptance length / speedup. The median contexts of either kind stand beside each other:
    inside an octave they may differ, and there is no verdict where they differ by more than 10%.
    """
    sides = [_cells(frame) for frame in (windows, plain)]
    found = []
    for key in sorted(sides[0].keys() & sides[1].keys()):
        rng, (own, base) = generator(0, "plain", *key), (side[key] for side in sides)
        if min(len(own), len(base)) < MIN_PLAIN:
            continue
        rates = [np.log(rows["output_tokens_per_s"].to_numpy(float)) for rows in (own, base)]
        (fast, off_fast), (slow, off_slow) = (median_and_deviations(rate, rng) for rate in rates)
        low, high = percentile_interval(fast - slow + off_fast - off_slow)  # of the logarithm
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
    kept = steady(windows).dropna(subset=["output_tokens_per_s"])
    kept = kept[kept["context_len"].astype(float) > 0]
    octave = np.log2(kept["context_len"].astype(float).clip(lower=1)).round().astype(int)
    return {(int(str(k[0])), float(str(k[1]))): rows for k, rows in kept.groupby([octave, kept["batch_size"]])}
