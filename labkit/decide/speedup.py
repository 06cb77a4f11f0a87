"""One cell in numbers: relative step cost, acceptance length and speed-up, each with resampled draws of its log.

Rounds are resampled for cost and prompts for acceptance, independently; `labkit.decide.intervals` says how small
samples are widened. Everything is kept as logs, where the two sources add.
"""

from dataclasses import dataclass

import numpy as np

from labkit.acceptance import length_draws
from labkit.decide.intervals import CONFIDENCE, generator, resampled_medians, student_spread


@dataclass(frozen=True)
class Length:
    """Acceptance behind a cell.

    length : mean acceptance length, tokens per step; NaN where unknown.
    shares : share of the verify steps with j drafts, float64 [k+1].
    log_draws, share_draws : resampled log length [resamples] and shares [resamples, k+1], before the spread of small
        samples.
    spread : factors [resamples] for the deviations of both, NaN for a single prompt.
    num_prompts : None where no prompts stand behind it (imposed, unknown).
    """

    length: float
    shares: np.ndarray
    log_draws: np.ndarray
    share_draws: np.ndarray
    spread: np.ndarray
    num_prompts: int | None


def measured_length(histograms: np.ndarray, resamples: int) -> Length:
    """From per-prompt histograms int64 [num_prompts, k+1, k+1], each with at least one step."""
    total = histograms.sum(axis=0)
    accepted, _, steps, spread = length_draws(histograms, resamples)
    num_steps = steps.sum(axis=1)
    length = 1 + float(total.sum(axis=0) @ np.arange(len(total)) / total.sum())
    shares, share_draws = total.sum(axis=1) / total.sum(), steps / num_steps[:, None]
    return Length(length, shares, np.log(1 + accepted / num_steps), share_draws, spread, len(histograms))


def imposed_length(length: float, low: float, high: float, k: int, resamples: int) -> Length:
    """From a given length and its bounds; every step drafts k tokens. NaN three times stands for an unknown length."""
    shares = np.eye(k + 1)[k]
    normal = generator(0, "imposed").standard_normal(resamples)
    # A split normal in the log, scaled so that the bounds are its quantiles at the confidence of all intervals.
    edge = np.quantile(np.abs(normal), CONFIDENCE)
    side = np.where(normal < 0, np.log(length / low), np.log(high / length))
    log_draws = np.log(length) + normal / edge * side
    return Length(length, shares, log_draws, np.tile(shares, (resamples, 1)), np.ones(resamples), None)


@dataclass(frozen=True)
class Speedup:
    """Logs of cost and length (their difference is the speed-up's), and resampled ones [resamples], NaN if unknown."""

    log_cost: float
    log_length: float
    cost_draws: np.ndarray
    length_draws: np.ndarray
    draws: np.ndarray
    num_rounds: int


def relative_step_cost(ratios: np.ndarray, shares: np.ndarray) -> float:
    """Sum over j of the share of steps with j drafts times the median over rounds of their cost over plain decode.

    `ratios` is float64 [num_rounds, k+1]; NaN without a round. The median is taken per j, so that a spike in one arm of
    a round does not spoil the others.
    """
    return float(np.median(ratios, axis=0) @ shares) if len(ratios) else float("nan")


def speedup_of(ratios: np.ndarray, length: Length, rng: np.random.Generator) -> Speedup:
    """Combine paired cost ratios [num_rounds, k+1] with an acceptance length.

    Draft-length shares and acceptance come from the same draw of prompts: texts that give long drafts are those that
    keep them, and the two partly cancel in the speed-up.
    """
    resamples = len(length.log_draws)
    log_length = float(np.log(length.length))
    length_draws = log_length + length.spread * (length.log_draws - log_length)
    log_cost = float(np.log(relative_step_cost(ratios, length.shares)))
    if len(ratios) < 2:
        unknown = np.full(resamples, np.nan)
        return Speedup(log_cost, log_length, unknown, length_draws, unknown, len(ratios))
    used = length.shares > 0
    resampled = resampled_medians(ratios[:, used], resamples, rng)
    spread = student_spread(len(ratios), resamples, rng, of_medians=True)
    rounds = spread * (np.log(resampled @ length.shares[used]) - log_cost)
    by_shares = np.log(length.share_draws @ np.median(ratios, axis=0)) - log_cost
    prompts = length.spread * (length.log_draws - log_length - by_shares)
    # One prompt says nothing about the spread of draft lengths, unless every step drafts alike.
    of_shares = np.zeros(resamples) if (length.shares == 1).any() else length.spread * by_shares
    cost_draws, draws = log_cost + rounds + of_shares, log_length - log_cost + prompts - rounds
    return Speedup(log_cost, log_length, cost_draws, length_draws, draws, len(ratios))
