"""What two public write-ups of 2026 say of acceptance, held against measured texts. Both printed no intervals.

Overlap, of an upgrade to SGLang 0.5.6 with EAGLE: above 65% between the best tokens of draft and target the speed-up is
stable at 2.5 to 3.0, below 50% it is not; how many tokens was not said. Content, of SGLang 0.5.21 with a block drafter:
short code above 200 tokens/s, long code about 160, prose 60 to 80.
"""

from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import acceptance_table
from labkit.decide.agreement import text_table
from labkit.errors import InputError
from labkit.rows import ok_rows

ABOVE, BELOW, SPEEDUP = 0.65, 0.5, 2.5
# Short code, long code and prose as the workloads that come closest.
ORDER = (("code_writing", "code_editing"), ("code_writing", "prose"), ("code_editing", "prose"))
_LENGTHS = [f"mean_acceptance_length{end}" for end in ("", "_low", "_high")]


def compatibility_table(df: pd.DataFrame) -> pd.DataFrame:
    """How well each measure of compatibility foretells the acceptance length, a row per drafter and measure.

    A prompt counts once, as the mean over its texts (contexts). rank_correlation : over prompts, with 95% bounds.
    fit_error, error_of_mean : root mean square (tokens) of what a line, or the mean, through all others foretells.

    Raises InputError: no row has top_k_overlap.
    """
    found, names = [], ["top1_agreement", "top_k_overlap", "top_k_hit"]
    for drafter, texts in _overlapping(df).groupby("drafter"):
        prompts = texts.groupby(["workload", "prompt_id"])[[*names, "measured"]].mean()
        count, length = len(prompts), prompts["measured"].to_numpy() - prompts["measured"].mean()
        for name in names:
            measure = prompts[name].to_numpy() - prompts[name].mean()
            spread = measure @ measure if count > 2 and prompts[name].nunique() > 1 else np.nan
            rank = prompts[name].rank().corr(prompts["measured"].rank())
            with np.errstate(divide="ignore", invalid="ignore"):  # too few prompts
                half = 1.96 * np.sqrt((1 + rank**2 / 2) / np.float64(max(count - 3, 0)))  # Bonett and Wright 2000
                low, high = np.tanh(np.arctanh(rank) - half), np.tanh(np.arctanh(rank) + half)
                # Residuals over 1 - leverage are those of a fit through all other prompts.
                by_line = (length - measure * (measure @ length) / spread) / (1 - 1 / count - measure**2 / spread)
                by_mean = length / (1 - 1 / count)
            row = {"drafter": drafter, "measure": name, "num_prompts": count, "mean": prompts[name].mean()}
            row |= {"rank_correlation": rank, "rank_low": low, "rank_high": high}
            found.append(
                row | {"fit_error": np.sqrt(np.mean(by_line**2)), "error_of_mean": np.sqrt(np.mean(by_mean**2))}
            )
    return pd.DataFrame(found)


def threshold_table(df: pd.DataFrame) -> pd.DataFrame:
    """The overlap rule and the texts above and below its limits: a row per drafter and limit.

    A speed-up is at most the acceptance length, as a verify step costs a plain one or more. So a length surely under
    2.5 is `not` consistent above and is consistent below, one surely over is consistent above; else, or without texts,
    `undecidable here`. p10, p90 : of the lengths of texts. Raises InputError: as `compatibility_table`.
    """
    texts, limits = _overlapping(df), [f"above {ABOVE:.0%}", f"below {BELOW:.0%}"]
    overlap = texts["top_k_overlap"]
    texts["overlap"] = np.select([overlap > ABOVE, overlap < BELOW], limits, "between")
    by = ["drafter", "overlap"]
    table = acceptance_table(texts, by=by).set_index(by)[["num_prompts", *_LENGTHS]]
    spread = texts.groupby(by)["measured"].quantile(np.array([0.1, 0.9])).unstack().set_axis(["p10", "p90"], axis=1)
    table = table.join(spread).reindex(pd.MultiIndex.from_product([texts["drafter"].unique(), limits], names=by))
    under, over = table[_LENGTHS[2]] < SPEEDUP, table[_LENGTHS[1]] >= SPEEDUP
    above = table.index.get_level_values("overlap") == limits[0]
    return table.assign(rule=_said(np.where(above, over, under), above & under))


def content_table(df: pd.DataFrame, loop: pd.DataFrame) -> pd.DataFrame:
    """Tokens per step of each content over prose's, and of short over long code's: greedy, largest k, per drafter.

    At one context and k a step costs the same whatever it says, so that is the ratio of tokens per second (a lookup
    drafts less on some texts and gains a little besides). Pooled over the contexts that all contents hold.

    ratio_low, ratio_high : 95%, from the bounds of both lengths (Zou and Donner 2008). published_order : is the first
    content ahead, as was printed? real_speedup : of its generations in the newest loop run that has any, of any k.

    Raises InputError: no prose at the contexts of the others.
    """
    rows = ok_rows(df, "acceptance", ["drafter", "workload", "context_len_low", "num_speculative_tokens"])
    rows = rows[rows["num_speculative_tokens"] == rows["num_speculative_tokens"].max()]
    shared = set.intersection(*(set(own) for _, own in rows.groupby(["drafter", "workload"])["context_len_low"]))
    rows = rows[rows["context_len_low"].isin(shared)]
    if "prose" not in set(rows["workload"]):
        raise InputError("acceptance rows: want prose at the contexts of the other workloads; none there")
    lengths = acceptance_table(rows, by=["drafter", "workload"])
    pairs = lengths.merge(lengths, on="drafter", suffixes=("", "_of")).rename(columns={"workload_of": "against"})
    named = pd.Series(zip(pairs["workload"], pairs["against"], strict=True)).isin(ORDER)
    pairs = pairs[named | (pairs["against"] == "prose") & (pairs["workload"] != "prose")]
    one, low, high = np.log(pairs[_LENGTHS].to_numpy(float)).T
    other, other_low, other_high = np.log(pairs[[f"{name}_of" for name in _LENGTHS]].to_numpy(float)).T
    under, over = np.hypot(one - low, other_high - other), np.hypot(high - one, other - other_low)
    bounds = dict(zip(("ratio", "ratio_low", "ratio_high"), np.exp(one - other + [0 * one, -under, over]), strict=True))
    table = pairs[["drafter", "workload", "against", _LENGTHS[0]]].assign(**bounds)
    said = _said(table["ratio_low"] > 1, table["ratio_high"] < 1)
    table["published_order"] = np.where(named[table.index], said, "")
    return table.join(_real_speedups(loop), on=["drafter", "workload"]).reset_index(drop=True)


def _overlapping(df: pd.DataFrame) -> pd.DataFrame:
    texts = text_table(df)
    if "top_k_overlap" not in texts or texts["top_k_overlap"].isna().all():
        raise InputError("acceptance rows: want top_k_overlap; these runs are older, or hold only drafters without one")
    return texts.dropna(subset=["top_k_overlap", "measured"]).astype({"top_k_overlap": float, "top_k_hit": float})


def _real_speedups(loop: pd.DataFrame) -> pd.Series:
    """Tokens per second over plain decode of the same run, by drafter and workload."""
    steps = loop[(loop["status"] == "ok") & (loop["origin"] == "measured")]
    steps = steps.assign(tokens=steps["num_accepted_tokens"].fillna(0) + 1)
    sums = steps.groupby(["run_id", "workload", "arm", steps["drafter"].fillna("")])[["tokens", "step_ms"]].sum()
    rates = sums["tokens"] / sums["step_ms"]
    plain, drafted = (rates[rates.index.get_level_values("arm") == arm] for arm in ("plain", "speculative"))
    found = drafted.droplevel("arm") / plain.droplevel(["arm", "drafter"])
    return found.dropna().groupby(["drafter", "workload"]).last().rename("real_speedup")


def _said(holds: Any, fails: Any) -> np.ndarray:
    return np.select([holds, fails], ["consistent", "not"], "undecidable here")
