"""Planted worlds of the verdict: speed-ups that fall along the context."""

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts
from tests.worlds import (
    CostWorld,
    rows_of_counts,
)

CONTEXTS = (1024, 4096, 16384, 65536)


def falling(cost_at_1k: float, per_octave: float) -> CostWorld:
    """Relative cost of a full draft that grows by a fixed factor per octave of context, so crossings are exact."""
    return CostWorld(
        decode_ms=lambda _, __: 10.0,
        step_ms=lambda _, context, j: 10.0 * (cost_at_1k * 2 ** (per_octave * np.log2(context / 1024)) if j else 1.2),
        context_lens=CONTEXTS,
    )


def alike(num_prompts: int = 8, k: int = 4) -> pd.DataFrame:
    """Prompts that all accept the same: 10 steps of k drafts, 2 kept on average, no spread between prompts."""
    counts = AcceptanceCounts.from_steps([(k, kept) for kept in (0, 1, 2, 3, 4)] * 2, k)
    return rows_of_counts([counts] * num_prompts)
