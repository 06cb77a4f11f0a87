"""Planted costs and acceptance over k."""

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts
from tests.worlds import rows_of_counts


def geometric(k: int, keep: float, num_prompts: int = 4) -> pd.DataFrame:
    """Prompts that keep each further draft with one chance, in exact proportions of 10,000 steps."""
    kept = 10_000 * keep ** np.arange(k + 1) * np.append(np.full(k, 1 - keep), 1.0)
    histogram = np.zeros((k + 1, k + 1), dtype=int)
    histogram[k] = np.round(kept)
    return rows_of_counts([AcceptanceCounts(tuple(map(tuple, histogram.tolist())))] * num_prompts)
