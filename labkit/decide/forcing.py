"""Is imposed acceptance a fair instrument? Times of steps that keep drafts against times of steps that reject them."""

from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval, resampled_medians, student_spread
from labkit.decide.ratios import median_and_deviations
from labkit.decide.step_costs import StepCosts, baseline_ms
from labkit.errors import InputError
from labkit.rows import ok_rows

NEEDED = ("arm", "run_id", "group", "num_drafted_tokens", "num_accepted_tokens", "context_len", "step_ms")
PARTS = ("draft_ms", "verify_ms")
# Two times that differ by less are the same for a verdict: its intervals are wider.
NEUTRAL = 0.02


def forcing_check(
    loop_rows: pd.DataFrame, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Draft and verify time of steps that kept all their drafts over steps that kept none, at equal draft lengths.

    If acceptance does not change the device time of a step, it may be imposed. Groups (a prompt, or a cost cell) are
    the unit: each gives one ratio of medians, groups are resampled. Context differs a little inside a group of real
    generations, which is part of the spread.

    loop_rows : speculative rows, of real generations or with several imposed acceptances.

    Returns part, num_drafted_tokens, ratio, low, high, num_groups, neutral (the interval lies within 1 +- `NEUTRAL`, or
    holds 1) and resolved (it is narrower than +- 5%, so that neutral means something). Raises InputError: no group has
    both kinds of step.
    """
    rows = ok_rows(loop_rows, "loop", NEEDED)
    rows = rows[(rows["arm"] == "speculative") & (rows["num_drafted_tokens"] > 0)]
    none, every = rows["num_accepted_tokens"] == 0, rows["num_accepted_tokens"] == rows["num_drafted_tokens"]
    records = []
    for j in sorted(rows["num_drafted_tokens"].unique()):
        for part in PARTS:
            same = rows["num_drafted_tokens"] == j
            rejected, kept = (
                rows.loc[same & side].groupby(["run_id", "group"])[part].median() for side in (none, every)
            )
            ratios = np.log((kept / rejected).dropna().to_numpy())
            if not len(ratios):
                continue
            rng = generator(seed, "forcing", part, j)
            log, draws = median_and_deviations(ratios, resamples, rng)
            low, high = np.exp(log + np.array(percentile_interval(draws, confidence)))
            neutral = bool(low <= 1 <= high or (low > 1 - NEUTRAL and high < 1 + NEUTRAL))
            found = {"ratio": np.exp(log), "low": low, "high": high, "num_groups": len(ratios), "neutral": neutral}
            records.append({"part": part, "num_drafted_tokens": int(j)} | found | {"resolved": bool(high / low < 1.1)})
    if not records:
        raise InputError("forcing: want steps that keep all drafts and steps that keep none in one group; found none")
    return pd.DataFrame(records)


def all_reject_ratio(
    loop_rows: pd.DataFrame,
    costs: list[StepCosts],
    *,
    baseline: str = "fastest",
    confidence: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """A step whose drafts were all rejected over plain decode, beside the cost cell's ratio with its interval.

    loop_rows : real generations, both arms, or forced ones; ratios of medians inside a (run_id, group), then the median
        over groups. costs : cells of cost runs; each is compared at the nearest measured context of the same backend,
        draft length, target and dtypes.

    Returns verify_backend, k, context_len (of the generations, median), cost_context_len, all_reject,
    relative_step_cost with _low and _high, inside. Empty where nothing matches.
    """
    rows = ok_rows(loop_rows, "loop", NEEDED)
    plain = rows[rows["arm"] == "plain"].groupby(["run_id", "group"])["step_ms"].median()
    steps = rows[(rows["arm"] == "speculative") & (rows["num_accepted_tokens"] == 0) & (rows["num_drafted_tokens"] > 0)]
    names = ["target", "verify_backend", "weight_dtype", "kv_dtype", "num_drafted_tokens"]
    records = []
    for key, own in steps.groupby(names, dropna=False, sort=True):
        wanted: dict[str, Any] = dict(zip(names, key, strict=True))
        k, at = int(wanted.pop("num_drafted_tokens")), float(own["context_len"].median())
        cells = [c for c in costs if c.num_speculative_tokens == k and all(c.key[n] == v for n, v in wanted.items())]
        ratio = (own.groupby(["run_id", "group"])["step_ms"].median() / plain).dropna()
        if not cells or ratio.empty:
            continue
        cost = min(cells, key=lambda cell: abs(np.log(cell.key["context_len"] / at)))
        ratios = (cost.step_ms[:, k] / baseline_ms(cost, baseline)[1])[:, None]
        ratios = ratios[np.isfinite(ratios[:, 0])]
        rng, log = generator(seed, "all-reject", *key), float(np.log(np.median(ratios)))
        spread = student_spread(len(ratios), 2000, rng, of_medians=True)
        draws = spread * (np.log(resampled_medians(ratios, 2000, rng)[:, 0]) - log)
        low, high = np.exp(log + np.array(percentile_interval(draws, confidence)))
        found = {"all_reject": float(ratio.median()), "relative_step_cost": float(np.exp(log))}
        bounds = {"relative_step_cost_low": low, "relative_step_cost_high": high}
        place = {"verify_backend": wanted["verify_backend"], "k": k, "context_len": at, "num_groups": len(ratio)}
        inside = bool(low <= found["all_reject"] <= high)
        records.append(place | {"cost_context_len": cost.key["context_len"]} | found | bounds | {"inside": inside})
    return pd.DataFrame(records)
