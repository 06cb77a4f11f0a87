"""Intervals by resampling: what is resampled, how far small samples are widened, how an interval is read off the draws.

A plain percentile bootstrap is too narrow for the 8 to 24 prompts and 8 to 20 rounds of one cell. Each set of draws is
therefore spread as Student's t with n-1 degrees of freedom: the deviation of draw b from the estimate is multiplied by
the square root of (n-1) / chi-square(n-1). Two independent sources add their spread deviations, and the quantiles of
the sum are those of a sum of two t variables, so the worse known side dominates as it should.
"""

import zlib

import numpy as np

CONFIDENCE, RESAMPLES = 0.95, 2000
_FEW_UNITS = 256


def generator(seed: int, *key: object) -> np.random.Generator:
    """A generator set by `seed` and `key` alone, so that a cell has the same interval whatever else is in the table."""
    return np.random.default_rng([seed, zlib.crc32("|".join(map(str, key)).encode())])


def resampled_weights(num_units: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """How often each unit is drawn, float64 [resamples, num_units]; every row sums to `num_units`."""
    if num_units <= _FEW_UNITS:
        return rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=resamples).astype(float)
    # The same distribution. A multinomial of thousands of categories draws a binomial for each, 30 times as slow.
    drawn = (rng.integers(0, num_units, num_units, dtype=np.int32) for _ in range(resamples))
    return np.stack([np.bincount(draw, minlength=num_units) for draw in drawn]).astype(float)


def resampled_medians(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Column medians of resampled rows, [num_units, num_columns] -> [resamples, num_columns]; columns stay paired."""
    rows = rng.integers(0, len(values), size=(resamples, len(values)))
    return np.median(values[rows], axis=1)


def student_spread(num_units: int, resamples: int, rng: np.random.Generator, *, of_medians: bool = False) -> np.ndarray:
    """Factors [resamples] for the deviations of resampled estimates, NaN for fewer than two units.

    For means and ratios of sums the factor also undoes the (n-1)/n by which a bootstrap variance falls short. Medians
    need no such correction: at these n the bootstrap already overstates the variance of a median.
    """
    if num_units < 2:
        return np.full(resamples, np.nan)
    scale = num_units - 1 if of_medians else num_units
    return np.sqrt(scale / rng.chisquare(num_units - 1, size=resamples))


def percentile_interval(draws: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The central `confidence` part of the finite draws, (NaN, NaN) when none is finite."""
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return np.nan, np.nan
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
