"""Is imposed acceptance a fair instrument? Times of steps that keep drafts against times of steps that reject them."""

from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval
from labkit.decide.ratios import median_and_deviations
from labkit.decide.step_costs import PAIR, baseline_ms, step_costs
from labkit.errors import InputError
from labkit.rows import fixed_context, ok_rows

NEEDED = (
    *(*PAIR, "target", "arm", "verify_backend", "drafter", "num_drafted_tokens", "num_accepted_tokens"),
    *("step_ms", "imposed_acceptance"),
)
PARTS = ("draft_ms", "verify_ms")
# Two times that differ by less are the same for a verdict: its intervals are wider.
NEUTRAL = 0.02
# An interval whose ends are further apart says nothing about a change of a few per cent.
RESOLVED = 1.1


def forcing_check(loop_rows: pd.DataFrame) -> pd.DataFrame:
    """Draft and verify time of steps that kept all their drafts over steps that kept none, at equal draft lengths.

    If acceptance does not change the device time of a step, it may be imposed. One ratio of medians per round of a
    forced run (``labkit run loop --set acceptance=forced``), whose arms are interleaved; of real generations, where
    rounds repeat a prompt, per group. These units are resampled. Context differs a little inside a unit, which is part
    of the spread.

    Returns target, verify_backend, drafter, num_drafted_tokens, part, ratio with _low and _high, rejected_ms (of steps
    that keep none), num_units, neutral (the interval lies within 1 +- `NEUTRAL`, or holds 1) and resolved (it is
    narrower than +- 5%, so that neutral means something). Raises InputError: no unit has both kinds of step.
    """
    rows = ok_rows(loop_rows, "loop", NEEDED)
    rows = rows[(rows["arm"] == "speculative") & (rows["num_drafted_tokens"] > 0)]
    unit = PAIR if rows["imposed_acceptance"].notna().any() else PAIR[:2]
    rejected = rows["num_accepted_tokens"] == 0
    kept = rows["num_accepted_tokens"] == rows["num_drafted_tokens"]
    records = []
    names = ["target", "verify_backend", "drafter", "num_drafted_tokens"]
    for key, own in rows.groupby(names):
        place = dict(zip(names, key, strict=True))
        for part in PARTS:
            none, every = (own[side[own.index]].groupby(unit)[part].median() for side in (rejected, kept))
            if not len(logs := np.log((every / none).dropna().to_numpy())):
                continue
            found = _interval("ratio", logs, generator(0, "forcing", part, *key))
            low, high = found["ratio_low"], found["ratio_high"]
            neutral = low <= 1 <= high or (low > 1 - NEUTRAL and high < 1 + NEUTRAL)
            told = {"rejected_ms": float(none.median()), "num_units": len(logs)}
            told |= {"neutral": neutral, "resolved": high / low < RESOLVED}
            records.append(place | {"part": part} | found | told)
    if not records:
        raise InputError("forcing: want steps that keep all drafts and steps that keep none in one group; found none")
    return pd.DataFrame(records)


def all_reject_ratio(loop_rows: pd.DataFrame) -> pd.DataFrame:
    """The all-reject measurement (generations at imposed rate 0 over plain decode) beside R of the cost rows.

    loop_rows : of forced runs (``labkit run loop --set acceptance=forced``): cost rows, plain decode and generations at
        rate 0 share their rounds.

    Returns target, verify_backend, drafter, context_len, batch_size, num_speculative_tokens, all_reject, num_rounds,
    relative_step_cost and all_reject_over_it (paired by round) with _low and _high, inside (the latter's interval holds
    1) and resolved (it is narrower than +- 5%, so that inside means something). Raises InputError: no such generations.
    """
    rows = ok_rows(loop_rows, "loop", NEEDED)
    rows = rows[rows["run_id"].isin(rows.loc[rows["imposed_acceptance"] == 0, "run_id"])]
    if rows.empty:
        raise InputError(
            "forcing: want generations at imposed rate 0; `labkit run loop --set acceptance=forced` makes them"
        )
    again = rows[(rows["arm"] == "plain") | (rows["imposed_acceptance"] == 0)].assign(imposed_acceptance=None)
    costs, forced = step_costs(fixed_context(rows)), step_costs(again)
    records = []
    for cost, rejected in zip(costs, forced, strict=True):
        k, (_, decode_ms) = cost.num_speculative_tokens, baseline_ms(cost, "fastest")
        ratio, all_reject = (np.log(side.step_ms[:, k] / decode_ms) for side in (cost, rejected))
        known = np.isfinite(ratio) & np.isfinite(all_reject)
        rng = generator(0, "all-reject", *cost.key.values())
        names = ("target", "verify_backend", "drafter", "context_len", "batch_size", "num_speculative_tokens")
        found: dict[str, Any] = {name: cost.key[name] for name in names}
        found |= {"all_reject": float(np.exp(np.median(all_reject[known]))), "num_rounds": int(known.sum())}
        found |= _interval("relative_step_cost", ratio[known], rng)
        found |= _interval("all_reject_over_it", (all_reject - ratio)[known], rng)
        low, high = found["all_reject_over_it_low"], found["all_reject_over_it_high"]
        records.append(found | {"inside": low <= 1 <= high, "resolved": high / low < RESOLVED})
    return pd.DataFrame(records)


def _interval(name: str, logs: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """The median of the logs as a ratio, with _low and _high."""
    log, deviations = median_and_deviations(logs, rng)
    low, high = np.exp(log + np.array(percentile_interval(deviations)))
    return {name: float(np.exp(log)), f"{name}_low": float(low), f"{name}_high": float(high)}
