"""How many tokens to draft, 0 included: per context and batch, as one value for all, and as an engine's flags."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.acceptance import row_counts
from labkit.decide.acceptance_join import join
from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_weights, student_spread
from labkit.decide.step_costs import StepCosts, baseline_ms, finite_median
from labkit.errors import InputError
from labkit.rows import ok_rows

# One deployment: what a single setting of k serves.
SETTING = [
    *("gpu", "target", "drafter", "workload", "temperature", "verify_backend", "draft_backend"),
    *("weight_dtype", "kv_dtype"),
]
CELL = [*SETTING, "context_len", "batch_size"]
_KEY = ["target", "drafter", "workload", "temperature", "prompt_id", "context_len_low", "context_len_high"]


def cut_acceptance(acceptance: pd.DataFrame, ks: Sequence[int]) -> pd.DataFrame:
    """``acceptance`` with modelled rows for each k of ``ks`` that was not measured but lies below one that was.

    A step that drafted j and kept a would, cut at k, have drafted min(j, k) and kept min(a, k). Exact for a chain whose
    drafts do not depend on k and whose steps start anywhere alike; a lookup that starts its next search elsewhere
    differs (`cut_bias` measures by how much). The smallest measured k above is cut. Origin "modelled".
    """
    rows = ok_rows(acceptance, "acceptance", ["num_speculative_tokens", "accepted_by_draft_length"])
    measured = sorted(rows["num_speculative_tokens"].unique())
    added = []
    for k in sorted(set(ks) - set(measured)):
        if above := [known for known in measured if known > k >= 1]:
            added.append(_cut(rows[rows["num_speculative_tokens"] == above[0]], int(k)))
    return pd.concat([acceptance, *added], ignore_index=True) if added else acceptance


def _cut(rows: pd.DataFrame, k: int) -> pd.DataFrame:
    records = []
    for row in rows.to_dict("records"):
        counts = row_counts(row)
        cut = np.zeros((k + 1, k + 1), dtype=int)
        for (drafted, kept), number in np.ndenumerate(counts.histogram):
            cut[min(drafted, k), min(kept, k)] += number
        new = {"num_speculative_tokens": k, "accepted_by_draft_length": cut.tolist(), "origin": "modelled"}
        counted = row_counts(row | new).columns()
        records.append(row | new | {name: counted[name] for name in counted if name in row})
    return pd.DataFrame(records)


def cut_bias(acceptance: pd.DataFrame) -> pd.DataFrame:
    """What `cut_acceptance` gets wrong: its length over the measured one, at every k measured beside a larger one.

    The same prompts stand on both sides and are resampled together. Returns target, drafter, workload, context_len_low,
    num_speculative_tokens, cut_from, measured, modelled, ratio, ratio_low, ratio_high, num_prompts; empty with one k.
    """
    rows = ok_rows(acceptance, "acceptance", [*_KEY, "num_speculative_tokens", "accepted_by_draft_length"])
    names = ["target", "drafter", "workload", "context_len_low"]
    records = []
    for key, group in rows.groupby(names, dropna=False, sort=True):
        drafted = group["num_speculative_tokens"].astype(int)
        kept = {k: _steps_by_kept(group[drafted == k]) for k in sorted(drafted.unique().tolist())}
        for k, above in [(k, above) for k in kept for above in kept if above > k]:
            own, other = _tokens_and_steps(kept[k], k), _tokens_and_steps(kept[above], k)
            both = own.join(other.add_suffix("_cut"), how="inner").to_numpy(float)
            if not len(both):
                continue
            rng = generator(0, "cut", *key, k, above)
            weights = resampled_weights(len(both), RESAMPLES, rng)
            tokens, steps, cut_tokens, cut_steps = both.sum(axis=0)
            log = np.log((cut_tokens / cut_steps) / (tokens / steps))
            draws = np.log(
                (weights @ both[:, 2]) / (weights @ both[:, 3]) / ((weights @ both[:, 0]) / (weights @ both[:, 1]))
            )
            spread = student_spread(len(both), RESAMPLES, rng)
            low, high = np.exp(log + np.array(percentile_interval(spread * (draws - log))))
            records.append(
                dict(zip(names, key, strict=True))
                | {"num_speculative_tokens": k, "cut_from": above, "measured": tokens / steps}
                | {"modelled": cut_tokens / cut_steps, "ratio": np.exp(log), "ratio_low": low, "ratio_high": high}
                | {"num_prompts": len(both)}
            )
    return pd.DataFrame(records)


def _steps_by_kept(rows: pd.DataFrame) -> pd.DataFrame:
    """Verify steps that kept 0, 1, .. k drafts, one row per prompt."""
    kept = [row_counts(row).histogram.sum(axis=0) for row in rows.to_dict("records")]
    table = pd.concat([rows[_KEY].reset_index(drop=True), pd.DataFrame(kept)], axis=1)
    return table.groupby(_KEY, dropna=False).sum()


def _tokens_and_steps(kept: pd.DataFrame, k: int) -> pd.DataFrame:
    """Tokens and steps of each prompt if no step had kept more than k drafts."""
    tokens = kept.to_numpy() @ (np.minimum(np.arange(kept.shape[1]), k) + 1)
    return pd.DataFrame({"tokens": tokens, "steps": kept.sum(axis=1).to_numpy()}, index=kept.index)


def best_k(cells: pd.DataFrame) -> pd.DataFrame:
    """The k with the largest speed-up per context and batch, 0 (no speculation, speed-up 1) included.

    cells : `labkit.breakeven.Breakeven.cells` of several k. Those without a speed-up cannot be chosen (`not_judged`).

    Returns ``CELL``, best_k, speedup, speedup_low, speedup_high, decided (the interval of the best k lies above 1; for
    0: that of every k below), origin, verdict (of the best k's cell; for 0: cannot_pay if no k can, else loses or
    undecided), reason (what else the best k's cell rests on). The largest of several estimates is a little too large.
    """
    known = cells[cells["speedup"].notna()]
    if known.empty:
        why = f" ({cells['reason'].iloc[0]})" if len(cells) else ""
        raise InputError(f"best k: want cells with a speed-up; none has both a cost and an acceptance length{why}")
    records = []
    for key, rows in known.groupby(CELL, dropna=False, sort=True):
        best = rows.iloc[int(rows["speedup"].to_numpy(float).argmax())]
        place = dict(zip(CELL, key, strict=True)) | {"reason": best["reason"]}
        if best["speedup"] > 1:
            values = {name: best[name] for name in ("speedup", "speedup_low", "speedup_high", "origin", "verdict")}
            place |= {"best_k": int(best["num_speculative_tokens"]), **values, "decided": best["speedup_low"] > 1}
        else:
            place |= {"best_k": 0, "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0, "origin": best["origin"]}
            place["decided"] = bool((rows["speedup_high"] < 1).all())
            never = (rows["verdict"] == "cannot_pay").all()
            place["verdict"] = "cannot_pay" if never else "loses" if place["decided"] else "undecided"
        records.append(place)
    return pd.DataFrame(records)


def not_judged(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that `best_k` cannot choose, for want of a speed-up.

    Returns ``CELL``, num_speculative_tokens, verdict (``cannot_pay`` where the cost alone exceeds k+1), reason (an
    imposed length above k+1, no acceptance for this context, ...).
    """
    columns = [*CELL, "num_speculative_tokens", "verdict", "reason"]
    judged = cells.loc[cells["speedup"].notna(), columns]
    place = [name for name in columns[:-2] if name not in ("workload", "temperature")]
    texts = judged[SETTING].drop_duplicates()
    # A text that was not measured where others were has no cell at all.
    every = texts.merge(judged[place].drop_duplicates(), on=[name for name in place if name in SETTING])
    both = every.merge(judged[columns[:-2]], how="left", indicator=True)
    gaps = both[both["_merge"] == "left_only"].assign(verdict="undecided")
    gaps["reason"] = [
        f"no acceptance of {w} at context_len {c:g}" for w, c in gaps[["workload", "context_len"]].to_numpy()
    ]
    return pd.concat([cells.loc[cells["speedup"].isna(), columns], gaps[columns]], ignore_index=True)


def regret(cells: pd.DataFrame) -> pd.DataFrame:
    """What one k everywhere costs, against the best k of each context and batch (all weighing the same).

    Returns ``SETTING``, num_speculative_tokens (0 = never speculate), mean_regret, worst_regret (shares of the best
    speed-up lost, 0..1), worst_context_len, worst_batch_size, num_cells. A k that was not measured in every cell is
    left out: its cells would be others.
    """
    known = cells[cells["speedup"].notna()]
    records = []
    for key, rows in known.groupby(SETTING, dropna=False, sort=True):
        table = rows.pivot_table(
            index=["context_len", "batch_size"], columns="num_speculative_tokens", values="speedup"
        )
        speedups = {0: np.ones(len(table))} | {int(str(k)): column.to_numpy(float) for k, column in table.items()}
        speedups = {k: values for k, values in speedups.items() if np.isfinite(values).all()}
        best = np.max(list(speedups.values()), axis=0)
        for k, values in speedups.items():
            lost = 1 - values / best
            place = table.index[int(lost.argmax())]
            numbers = {"mean_regret": lost.mean(), "worst_regret": lost.max(), "num_cells": len(lost)}
            where = {"worst_context_len": place[0], "worst_batch_size": place[1]}
            records.append(dict(zip(SETTING, key, strict=True)) | {"num_speculative_tokens": k} | numbers | where)
    return pd.DataFrame(records)


def scheduled_verify(costs: Sequence[StepCosts], acceptance: pd.DataFrame) -> pd.DataFrame:
    """Static verify of all k drafts against the most that a confidence schedule could gain.

    The schedule at its best verifies exactly the drafts that will be kept: all k are still drafted, verify then costs
    what it costs at q_len = kept + 1. Any real schedule lies between (origin modelled). Where the rows cannot tell
    drafting from verify the draft counts as free and the bound is looser.

    Returns context_len, batch_size, verify_backend, num_speculative_tokens, workload, static_speedup,
    scheduled_speedup, gain (their ratio); one row per cost cell and workload that joins.
    """
    records = []
    for cost, (sources, _) in zip(costs, join(list(costs), acceptance), strict=True):
        decode_ms = baseline_ms(cost, "fastest")[1]
        ratios = np.array([finite_median(column) for column in (cost.step_ms / decode_ms[:, None]).T])
        draft = finite_median(cost.parts_ms.get("draft_ms", np.zeros(len(decode_ms))) / decode_ms)
        for source in sources:
            if source.histograms is None or not len(source.histograms):
                continue
            histogram = source.histograms.sum(axis=0)
            steps, kept = histogram.sum(), histogram.sum(axis=0)
            length = 1 + kept @ np.arange(len(kept)) / steps
            # Without an own time for j drafts, drafting is taken to grow evenly with j.
            share = np.arange(len(kept)) / cost.num_speculative_tokens
            verify = ratios - draft * share
            static = (histogram.sum(axis=1) @ ratios) / steps
            drafted = (histogram.sum(axis=1) @ (draft * share)) / steps
            # A longer verify that was measured to be cheaper could be padded to.
            cheapest = np.fmin.accumulate(verify[::-1])[::-1]
            scheduled = (kept @ cheapest) / steps + drafted
            names = ("context_len", "batch_size", "verify_backend", "num_speculative_tokens")
            found = {"workload": source.workload, "static_speedup": length / static}
            found |= {"scheduled_speedup": length / scheduled, "gain": static / scheduled}
            records.append({name: cost.key[name] for name in names} | found)
    return pd.DataFrame(records)
