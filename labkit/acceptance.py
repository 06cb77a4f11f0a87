"""Counts of speculative steps, and every length and rate that follows from them.

Nothing else in the package divides accepted by drafted. What is stored is the joint histogram of draft length and
accepted tokens; a quantity without a single step behind it is NaN, never 0.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_weights, student_spread
from labkit.errors import InputError
from labkit.rows import group_numbers, is_missing, ok_rows, single_value

# Share of repeated 4-grams above which a text repeats itself (`labkit.workloads.repeated_ngram_share`).
MAX_REPEATED = 0.2
DEFAULT_BY = (
    *("target", "drafter", "num_speculative_tokens", "workload", "temperature"),
    *("context_len_low", "context_len_high", "origin"),
)
_PER_POSITION = ("acceptance_rate_per_pos", "conditional_acceptance_rate_per_pos")
_TOTALS = ("num_drafted_tokens", "num_accepted_tokens")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


@dataclass(frozen=True)
class AcceptanceCounts:
    """Verify steps of one or many requests, by draft length and accepted drafts.

    accepted_by_draft_length : counts [k+1][k+1]: row = drafts proposed in the step (0..k), column = drafts kept before
        the first rejection, bonus not counted. It sums to `num_verify_steps`, steps without a draft included.
    num_truncated_steps : steps cut by a stop token, or with room for fewer than k drafts; in no histogram and no ratio.

    Raises ValueError, naming the cell: not square, k below 1, a negative or fractional count, or a step that keeps more
    than it drafted.
    """

    accepted_by_draft_length: tuple[tuple[int, ...], ...]
    num_truncated_steps: int = 0

    def __post_init__(self) -> None:
        rows = [list(row) for row in self.accepted_by_draft_length]
        size = len(rows)
        if size < 2 or any(len(row) != size for row in rows):
            got = f"{size} rows of {sorted({len(row) for row in rows})} columns"
            raise ValueError(f"accepted_by_draft_length must be [k+1][k+1] with k of at least 1, got {got}")
        for drafted, row in enumerate(rows):
            for accepted, count in enumerate(row):
                cell = f"accepted_by_draft_length[{drafted}][{accepted}]"
                if count < 0 or count != int(count):
                    raise ValueError(f"{cell} must be a count of at least 0, got {count}")
                if accepted > drafted and count:
                    raise ValueError(f"{cell} must be 0, a step cannot keep more than it drafted, got {count}")
        if self.num_truncated_steps < 0:
            raise ValueError(f"num_truncated_steps must be at least 0, got {self.num_truncated_steps}")
        frozen = tuple(tuple(int(count) for count in row) for row in rows)
        object.__setattr__(self, "accepted_by_draft_length", frozen)

    @classmethod
    def from_steps(
        cls, steps: Iterable[tuple[int, int]], num_speculative_tokens: int, num_truncated_steps: int = 0
    ) -> "AcceptanceCounts":
        """Count (drafted, accepted) pairs of complete steps.

        Raises ValueError: a pair outside ``0 <= accepted <= drafted <= num_speculative_tokens``; the message names the
        step.
        """
        size = num_speculative_tokens + 1
        histogram = np.zeros((size, size), dtype=np.int64)
        for index, (drafted, accepted) in enumerate(steps):
            if not 0 <= accepted <= drafted < size:
                wanted = f"0 <= accepted <= drafted <= {num_speculative_tokens}"
                raise ValueError(f"steps[{index}] must keep {wanted}, got drafted={drafted}, accepted={accepted}")
            histogram[drafted, accepted] += 1
        return cls(tuple(map(tuple, histogram.tolist())), num_truncated_steps)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """Pool two sets of counts. Raises ValueError when their num_speculative_tokens differ."""
        if self.num_speculative_tokens != other.num_speculative_tokens:
            ks = f"{self.num_speculative_tokens} and {other.num_speculative_tokens}"
            raise ValueError(f"only counts of the same num_speculative_tokens can be pooled, got {ks}")
        total = self.histogram + other.histogram
        truncated = self.num_truncated_steps + other.num_truncated_steps
        return AcceptanceCounts(tuple(map(tuple, total.tolist())), truncated)

    @property
    def histogram(self) -> np.ndarray:
        """The joint histogram as int64 [k+1, k+1]."""
        return np.array(self.accepted_by_draft_length, dtype=np.int64)

    @property
    def num_speculative_tokens(self) -> int:
        """k: the longest draft the histogram can hold."""
        return len(self.accepted_by_draft_length) - 1

    @property
    def num_verify_steps(self) -> int:
        """Complete target passes, those without a draft included; truncated ones are not."""
        return int(self.histogram.sum())

    @property
    def num_drafted_steps(self) -> int:
        """Complete target passes with at least one draft."""
        return int(self.histogram[1:].sum())

    @property
    def num_drafted_tokens(self) -> int:
        """D: drafts proposed."""
        return int(np.arange(self.num_speculative_tokens + 1) @ self.histogram.sum(axis=1))

    @property
    def num_accepted_tokens(self) -> int:
        """A: drafts kept before the first rejection, bonus tokens not counted."""
        return int(np.arange(self.num_speculative_tokens + 1) @ self.histogram.sum(axis=0))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verify step, 1 + A / num_verify_steps: pooled, bonus counted."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_verify_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """A / D, pooled. Not comparable between drafters that choose their own draft length."""
        return _ratio(self.num_accepted_tokens, self.num_drafted_tokens)

    @property
    def acceptance_rate_per_pos(self) -> np.ndarray:
        """Share of *all* verify steps that kept draft i, float64 [k], i = 1..k.

        The denominator is `num_verify_steps` at every position, steps whose draft was shorter (or absent) included, so
        the rates add up to mean_acceptance_length - 1 for fixed and for variable draft lengths alike.
        """
        kept = self.histogram.sum(axis=0)[::-1].cumsum()[::-1][1:].astype(float)
        return kept / (self.num_verify_steps or np.nan)

    @property
    def conditional_acceptance_rate_per_pos(self) -> np.ndarray:
        """Share of the steps that kept draft i-1 and proposed draft i in which draft i was kept, float64 [k].

        A step whose draft ended before position i says nothing about position i and is in no denominator. Only where
        every step drafts k tokens is this the ratio of neighbouring `acceptance_rate_per_pos`. NaN without such a step.
        """
        size = self.num_speculative_tokens + 1
        proposed_and_before_kept = [self.histogram[i:, i - 1 :].sum() for i in range(1, size)]
        kept = [self.histogram[i:, i:].sum() for i in range(1, size)]
        return np.array([_ratio(k, n) for k, n in zip(kept, proposed_and_before_kept, strict=True)])

    def columns(self) -> dict[str, Any]:
        """The count columns of an acceptance row."""
        names = ("num_speculative_tokens", "num_verify_steps", "num_truncated_steps", "num_drafted_steps", *_TOTALS)
        histogram = [list(row) for row in self.accepted_by_draft_length]
        return {name: getattr(self, name) for name in names} | {"accepted_by_draft_length": histogram}


def row_counts(row: Mapping[Hashable, Any]) -> AcceptanceCounts:
    """The counts of a stored row. Raises ValueError: its histogram is missing, not valid or not of the row's k."""
    names = ("accepted_by_draft_length", "num_speculative_tokens", "num_truncated_steps")
    values: list[Any] = [row.get(name) for name in names]
    histogram, k, truncated = values
    if is_missing(histogram):
        raise ValueError("accepted_by_draft_length is missing")
    if not is_missing(k) and int(k) + 1 != len(histogram):
        raise ValueError(f"accepted_by_draft_length must have k+1 = {int(k) + 1} rows, got {len(histogram)}")
    return AcceptanceCounts(histogram, 0 if is_missing(truncated) else int(truncated))


def _all_counts(df: pd.DataFrame) -> list[AcceptanceCounts]:
    """The counts of every row; InputError names the prompt of a bad one, or the different k."""
    names = ("prompt_id", "num_speculative_tokens", "num_truncated_steps", "accepted_by_draft_length")
    found = []
    for row in df[[name for name in names if name in df]].to_dict("records"):
        try:
            found.append(row_counts(row))
        except ValueError as error:
            raise InputError(f"acceptance row of prompt {row.get('prompt_id')!r}: {error}") from error
    ks = sorted({counts.num_speculative_tokens for counts in found})
    if len(ks) != 1:
        got = " and ".join(map(str, ks)) or "no rows"
        raise InputError(f"acceptance rows: wanted one num_speculative_tokens to pool, got {got}")
    return found


def counts_from_frame(df: pd.DataFrame) -> AcceptanceCounts:
    """Pool all acceptance rows of `df`.

    Raises InputError: no rows, a bad histogram (its prompt is named), or rows of different num_speculative_tokens.
    """
    found = _all_counts(df)
    return sum(found[1:], start=found[0])


def prompt_histograms(df: pd.DataFrame) -> np.ndarray:
    """Histograms pooled per prompt, int64 [num_prompts, k+1, k+1]; prompts without a complete step are left out.

    A prompt is the unit of resampling: its seeds and repetitions are not independent of one another. Raises InputError
    as `counts_from_frame` does.
    """
    histograms = np.stack([counts.histogram for counts in _all_counts(df)])
    prompts = group_numbers(df, [name for name in ("workload", "prompt_id") if name in df])
    pooled = np.zeros((prompts.max() + 1, *histograms.shape[1:]), dtype=np.int64)
    np.add.at(pooled, prompts, histograms)
    return pooled[pooled.sum(axis=(1, 2)) > 0]


def doubtful_drafters(df: pd.DataFrame) -> list[str]:
    """A line per drafter that had nothing or everything accepted over all its rows: more likely a fault than a fact.

    df : acceptance rows. Drafters that proposed fewer than 100 tokens are not judged.
    """
    lines = []
    for name, rows in ok_rows(df, "acceptance", ["drafter"]).groupby("drafter"):
        drafted, accepted = (int(rows[column].sum()) for column in _TOTALS)
        if drafted >= 100 and accepted in (0, drafted):
            share = "none" if accepted == 0 else "all"
            lines.append(f"check the drafter: {share} of {drafted:,} tokens that {name} proposed were accepted")
    return lines


def acceptance_table(df: pd.DataFrame, by: Sequence[str] | None = None) -> pd.DataFrame:
    """Lengths and rates per group of acceptance rows, with intervals from resampled prompts.

    Counts are pooled, and the prompts resampled as whole clusters (a ratio estimator). The mean of per-prompt lengths,
    which some tools report, is a different number and stands beside it.

    by : grouping columns; default: those of ``DEFAULT_BY`` that `df` has.

    Returns `by`, num_prompts, num_verify_steps, num_drafted_tokens, num_accepted_tokens, mean_acceptance_length and
    draft_acceptance_rate with ``_low`` and ``_high``, mean_acceptance_length_of_prompts, acceptance_rate_per_pos,
    conditional_acceptance_rate_per_pos. Bounds are NaN for fewer than two prompts.

    Raises InputError: no rows with status ok, an unknown column, or measured and other origins in one group.
    """
    names = [name for name in DEFAULT_BY if name in df] if by is None else list(by)
    rows = ok_rows(df, "acceptance", [*names, "prompt_id", "accepted_by_draft_length"])
    records = []
    for key, group in rows.groupby(names, dropna=False, sort=True) if names else [((), rows)]:
        single_value(group, "origin", f"acceptance rows of {key}")
        records.append(dict(zip(names, key, strict=True)) | _summary(group))
    return pd.DataFrame(records)


def length_draws(
    histograms: np.ndarray, resamples: int = RESAMPLES
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Resample prompts: accepted, drafted [resamples], steps by draft length [resamples, k+1], spread [resamples].

    The counts alone set the draws: whoever asks about the same prompts gets the same interval.
    """
    rng = generator(0, "prompts", histograms.tolist())
    weights = resampled_weights(len(histograms), resamples, rng)
    lengths = np.arange(histograms.shape[1])
    by_draft_length = histograms.sum(axis=2)
    accepted = weights @ (histograms.sum(axis=1) @ lengths)
    spread = student_spread(len(histograms), resamples, rng)
    return accepted, weights @ (by_draft_length @ lengths), weights @ by_draft_length, spread


def _summary(group: pd.DataFrame) -> dict[str, Any]:
    counts = counts_from_frame(group)
    histograms = prompt_histograms(group)
    k, num_prompts = counts.num_speculative_tokens, len(histograms)
    low = high = rate_low = rate_high = of_prompts = float("nan")
    if num_prompts:
        accepted, drafted, steps, spread = length_draws(histograms)
        length, rate = counts.mean_acceptance_length, counts.draft_acceptance_rate
        log_ratio = np.log((1 + accepted / steps.sum(axis=1)) / length)
        low, high = np.clip(length * np.exp(percentile_interval(spread * log_ratio)), 1, k + 1)
        with np.errstate(invalid="ignore"):
            deviation = spread * (accepted / drafted - rate)
        rate_low, rate_high = np.clip(rate + np.array(percentile_interval(deviation)), 0, 1)
        per_prompt = histograms.sum(axis=1) @ np.arange(k + 1) / histograms.sum(axis=(1, 2))
        of_prompts = 1 + per_prompt.mean()
    return {
        "num_prompts": num_prompts,
        **{name: getattr(counts, name) for name in ("num_verify_steps", *_TOTALS, "mean_acceptance_length")},
        "mean_acceptance_length_low": float(low),
        "mean_acceptance_length_high": float(high),
        "mean_acceptance_length_of_prompts": float(of_prompts),
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "draft_acceptance_rate_low": float(rate_low),
        "draft_acceptance_rate_high": float(rate_high),
        **{name: tuple(getattr(counts, name)) for name in _PER_POSITION},
    }
