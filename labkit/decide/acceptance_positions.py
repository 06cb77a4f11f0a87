"""Acceptance rate by draft position with intervals: the rates of `labkit.acceptance`, prompts resampled."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.acceptance import counts_from_frame, prompt_histograms
from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_weights, student_spread
from labkit.errors import InputError
from labkit.rows import ok_rows

DEFINITIONS = ("unconditional", "conditional")


def position_table(
    df: pd.DataFrame,
    by: Sequence[str] = ("workload", "num_speculative_tokens"),
    *,
    definition: str = "unconditional",
) -> pd.DataFrame:
    """One row per group and draft position: ``by``, position (1..k), rate, rate_low, rate_high, num_prompts.

    df : acceptance rows, one per prompt, k and context band.
    definition : "unconditional": share of all verify steps that kept the draft at this position. "conditional": share
        of the steps that kept the position before and proposed this one. See `labkit.acceptance.AcceptanceCounts`.

    Raises InputError: unknown definition, no ok rows, or rows of several k in one group.
    """
    if definition not in DEFINITIONS:
        raise InputError(f"definition: want one of {', '.join(DEFINITIONS)}; got {definition!r}")
    rows = ok_rows(df, "acceptance", [*by, "prompt_id", "accepted_by_draft_length"])
    records = []
    for key, group in rows.groupby(list(by), dropna=False, sort=True):
        counts, histograms = counts_from_frame(group), prompt_histograms(group)
        conditional = definition == "conditional"
        rates = counts.conditional_acceptance_rate_per_pos if conditional else counts.acceptance_rate_per_pos
        rng = generator(0, "positions", *key)
        weights = resampled_weights(len(histograms), RESAMPLES, rng)
        spread = student_spread(len(histograms), RESAMPLES, rng)
        for position, rate in enumerate(rates, start=1):
            # Per prompt: steps that kept this draft, and the steps that count for it.
            kept = histograms[:, position:, position:].sum(axis=(1, 2))
            counted = histograms[:, position:, position - 1 :] if conditional else histograms
            possible = counted.sum(axis=(1, 2))
            with np.errstate(invalid="ignore", divide="ignore"):
                draws = spread * ((weights @ kept) / (weights @ possible) - rate)
            low, high = np.clip(rate + np.array(percentile_interval(draws)), 0, 1)
            values = {"position": position, "rate": rate, "rate_low": low, "rate_high": high}
            values["num_prompts"] = len(histograms)
            records.append(dict(zip(by, key, strict=True)) | values)
    return pd.DataFrame(records)
