"""A plane through step time over cached tokens, and over running requests where no batch has windows enough."""

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval, resampled_weights, student_spread

MIN_WINDOWS, MIN_SPAN, RESAMPLES = 6, 1.5, 1000
Interval = tuple[float, float, float]


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
    return [(float(found[0, i]), *percentile_interval(draws[:, i], 0.95)) for i in range(columns.shape[1])]
