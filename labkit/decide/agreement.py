"""What greedy texts with a draft behind every token tell: how often draft and target agree, and where in an answer."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import MAX_REPEATED, acceptance_table, counts_from_frame, row_counts
from labkit.errors import InputError
from labkit.rows import ok_rows

BANDS = (0, 32, 64, 128, 256, 512)  # of output tokens


def matched_rows(df: pd.DataFrame) -> pd.DataFrame:
    """Rows whose ``match_lengths`` hold, for every output token but the last, how many drafts behind it were right.

    Raises InputError: there are none; they are counted at temperature 0, for each drafter's largest k.
    """
    rows = ok_rows(df, "acceptance", ["drafter", "workload", "prompt_id", "match_lengths"])
    rows = rows[rows["match_lengths"].map(lambda lengths: lengths is not None and np.size(lengths) > 0)]
    if rows.empty:
        raise InputError("acceptance rows: want match_lengths (temperature 0, largest k); none has them")
    return rows


def text_table(df: pd.DataFrame) -> pd.DataFrame:
    """`matched_rows`, one text each, with its top1_agreement and its acceptance length ``measured``."""
    rows = matched_rows(df).reset_index(drop=True)
    return rows.assign(
        top1_agreement=[float((np.asarray(lengths) > 0).mean()) for lengths in rows["match_lengths"]],
        measured=[row_counts(row).mean_acceptance_length for row in rows.to_dict("records")],
    )


def agreement_table(df: pd.DataFrame) -> pd.DataFrame:
    """How well the share of agreeing tokens foretells the acceptance length, one row per drafter and workload.

    top1_agreement : share of output positions at which the first draft is the target's token.
    foretold : length that follows if every draft were kept with that probability p: 1 + p + ... + p^k.
    measured : mean_acceptance_length, pooled over steps.
    error : foretold / measured - 1; prompt_error : median of its size over texts; rank_correlation : over texts.
    """
    texts = text_table(df)
    texts["foretold"] = _length(texts["top1_agreement"], texts["num_speculative_tokens"])
    found: list[dict[str, Any]] = []
    by = ["drafter", "workload", "num_speculative_tokens"]
    for key, group in texts.groupby(by):
        share = np.average(group["top1_agreement"], weights=group["match_lengths"].map(np.size))
        foretold = float(_length(share, group["num_speculative_tokens"].iloc[0]))
        measured = counts_from_frame(group).mean_acceptance_length
        row = dict(zip(by, key, strict=True)) | {"num_texts": len(group), "top1_agreement": share}
        row |= {"foretold": foretold, "measured": measured, "error": foretold / measured - 1}
        row["prompt_error"] = (group["foretold"] / group["measured"] - 1).abs().median()
        row["rank_correlation"] = group["foretold"].rank().corr(group["measured"].rank())
        found.append(row)
    return pd.DataFrame(found)


def drift_table(df: pd.DataFrame) -> pd.DataFrame:
    """Drafts that are right plus one, mean over all places of a band of the answer: one row per drafter.

    Places count alike, whether a step begins there or not, so this is no acceptance length; its change is the drift.
    """
    rows = matched_rows(df).reset_index(drop=True)
    places = rows[["drafter", "match_lengths"]].explode("match_lengths")
    place = places.groupby(level=0).cumcount()
    names = [f"{low} to {high}" for low, high in itertools.pairwise(BANDS)]
    places = places.assign(
        kept=places["match_lengths"].astype(float) + 1, band=pd.cut(place, BANDS, right=False, labels=names)
    )
    table = places.pivot_table("kept", "drafter", "band", observed=True)
    return table.rename_axis(columns="output tokens")


def repetition_table(df: pd.DataFrame) -> pd.DataFrame:
    """Acceptance lengths of the largest k where the text repeats over 20% of its 4-grams, and where not."""
    rows = ok_rows(df, "acceptance", ["drafter", "workload", "repeated_ngram_share", "num_speculative_tokens"])
    rows = rows[rows["num_speculative_tokens"] == rows["num_speculative_tokens"].max()]
    repeats = rows["repeated_ngram_share"].fillna(0.0) > MAX_REPEATED
    table = acceptance_table(
        rows.assign(text=np.where(repeats, "repeating", "varied")), by=["drafter", "workload", "text"]
    )
    names = ["mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high", "num_prompts"]
    return table.set_index(["drafter", "workload", "text"])[names]


def temperature_table(df: pd.DataFrame) -> pd.DataFrame:
    """Acceptance length by temperature, of the prompts, contexts and k that were sampled, and of the same ones greedy.

    repeating : share of texts that repeat over 20% of their 4-grams, which please every drafter.

    Raises InputError: nothing was sampled.
    """
    keys = ["drafter", "workload", "num_speculative_tokens"]
    rows = ok_rows(df, "acceptance", [*keys, "temperature", "prompt_id", "context_len_low", "repeated_ngram_share"])
    same = [*keys, "context_len_low", "prompt_id"]
    sampled = rows.loc[rows["temperature"] > 0, same].drop_duplicates()
    if sampled.empty:
        raise InputError("acceptance rows: want some at a temperature above 0; there are none")
    rows = rows.merge(sampled, on=same)
    table = acceptance_table(rows, by=[*keys, "temperature"]).set_index([*keys, "temperature"])
    groups = rows.groupby([*keys, "temperature"])
    table["num_texts"] = groups.size()
    table["repeating"] = groups["repeated_ngram_share"].agg(
        lambda share: float((share.fillna(0.0) > MAX_REPEATED).mean())
    )
    names = ["mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high"]
    return table[[*names, "num_prompts", "num_texts", "repeating"]]


def _length(share: pd.Series | float, k: pd.Series | int) -> np.ndarray:
    """1 + p + ... + p^k."""
    p, depth = np.broadcast_arrays(np.asarray(share, float), np.asarray(k, int))
    steps = np.arange(int(depth.max()) + 1)
    return np.where(steps <= depth[..., None], p[..., None] ** steps, 0.0).sum(axis=-1)
