"""Answers in words and short tables, computed from the data: what the notebooks end with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance import acceptance_table, counts_from_frame
from labkit.breakeven import Breakeven
from labkit.decide.diagnosis import diagnose
from labkit.decide.engine_figures import engine_figures
from labkit.plots.attention_table import attention_table, read_bandwidths, slope_text, slope_us_per_1k, verify_q_len
from labkit.plots.curves import crossing_text
from labkit.plots.style import attention_order, format_tokens
from labkit.rows import listed, ok_rows


def breakeven_answer(result: Breakeven) -> str:
    """How often each backend pays, what it costs at the longest context, and where it stops or starts to pay."""
    cells = result.cells
    gpu, target, drafter = (listed(cells, name) for name in ("gpu", "target", "drafter"))
    lines = [f"Does speculation pay on {gpu} for {target}, {drafter} drafter?"]
    longest = cells["context_len"].max()
    for backend, rows in cells.groupby("verify_backend", sort=False):
        verdicts = rows["verdict"].value_counts()
        others = [name for name in ("undecided", "loses", "cannot_pay") if name in verdicts]
        counts = [f"pays in {verdicts.get('pays', 0)} of {len(rows)} cells"]
        counts += [f"{verdicts[name]} {name.replace('_', ' ')}" for name in others]
        cost = rows.loc[rows["context_len"] == longest, "relative_step_cost"]
        needs = f"{cost.min():.2f}" if cost.max() - cost.min() < 0.005 else f"{cost.min():.2f} to {cost.max():.2f}"
        lines.append(
            f"- verify on {backend}: {', '.join(counts)}; "
            f"at {format_tokens(longest)} tokens of context a step must yield {needs} tokens."
        )
    limits = (cells["context_len"].min(), longest)
    for curve in result.crossovers:
        for crossing in curve["crossovers"]:
            text = (curve["workload"] or "imposed length").replace("_", " ")
            where = f"k = {curve['num_speculative_tokens']}, batch {curve['batch_size']}"
            lines.append(f"- {curve['verify_backend']}, {text}, {where}: {crossing_text(crossing, limits)}.")
    return "\n".join(lines)


def attention_answer(df: pd.DataFrame, sidecars: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Per backend of one setting: verify against decode at the longest context, growth per 1K, and the diagnosis."""
    table = attention_table(df, read_bandwidths(sidecars or {}))
    table = table[table["newest"]]
    q_len = verify_q_len(table, None)
    found = diagnose(df[df["q_len"].isin([1, q_len])], sidecars).sort_values("run_id").set_index("backend")
    lines = [f"What does verifying {q_len} tokens cost at the longest context, against decoding one?"]
    one_sided: list[str] = []
    for backend in attention_order(table["backend"].unique()):
        cells = table[table["backend"] == backend].pivot_table("attention_us", ["context_len", "run_id"], "q_len")
        both = cells.dropna(subset=[q_len, 1]) if {q_len, 1} <= set(cells) else cells[:0]
        if both.empty:
            one_sided.append(backend)
            continue
        (longest, _), at = both.index[-1], both.iloc[-1]
        curve = table[(table["backend"] == backend) & (table["q_len"] == q_len)]
        slope = slope_us_per_1k(curve["context_len"].to_numpy(float), curve["attention_us"].to_numpy(float))
        text = f"- {backend}: {at[q_len] / at[1]:.1f} times as long at {format_tokens(longest)} tokens, "
        text += f"{slope_text(slope)} tokens of context"
        cause = found.loc[[backend]].iloc[-1]
        if np.isfinite(cause["verify_slope_over_floor"]):
            text += f", {cause['verify_slope_over_floor']:.1f} times the floor of reading keys and values once"
            text += f": {'likely ' if cause['sure'] == 'likely' else ''}{cause['diagnosis']}"
        lines.append(text + ".")
    if one_sided:
        lines.append(f"- not measured at both in one run: {', '.join(one_sided)}.")
    return "\n".join(lines)


def acceptance_answer(df: pd.DataFrame) -> str:
    """Acceptance length per drafter and workload at the largest k, and its change from the shortest to the longest
    context.
    """
    k = int(df["num_speculative_tokens"].max())
    rows = df[df["num_speculative_tokens"] == k]
    lines = [f"How many tokens does a verify step yield on real text, with k = {k}?"]
    one = rows["drafter"].nunique() == 1
    bands = acceptance_table(rows, by=["drafter", "workload", "context_len_low"]).set_index(["drafter", "workload"])
    for row in acceptance_table(rows, by=["drafter", "workload"]).to_dict("records"):
        low, high = row["mean_acceptance_length_low"], row["mean_acceptance_length_high"]
        name = "" if one else f"{str(row['drafter']).split('@')[0]}, "
        text = f"- {name}{row['workload'].replace('_', ' ')}: {row['mean_acceptance_length']:.2f}"
        text += f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) else " (one prompt, no interval)"
        curve = bands.loc[[(row["drafter"], row["workload"])]].sort_values("context_len_low")
        if len(curve) > 1:
            first, last = curve.iloc[0], curve.iloc[-1]
            text += f"; {first['mean_acceptance_length']:.2f} from {format_tokens(first['context_len_low'])} tokens on,"
            text += f" {last['mean_acceptance_length']:.2f} from {format_tokens(last['context_len_low'])} on"
        lines.append(text + ".")
    return "\n".join(lines)


def crossings_table(result: Breakeven) -> pd.DataFrame:
    """One row per crossing: curve, direction ("undecided" where decided cells do not bound it), context_len, its bounds
    in tokens (NaN: outside what was measured), and the decided cells beside it.
    """
    names = ["workload", "num_speculative_tokens", "batch_size", "verify_backend"]
    rows = [
        {name: curve[name] for name in names} | crossing | ({} if crossing["decided"] else {"direction": "undecided"})
        for curve in result.crossovers
        for crossing in curve["crossovers"]
    ]
    numbers = ["context_len", "low", "high", "pays_at", "loses_at"]
    return pd.DataFrame(rows, columns=[*names, "direction", *numbers]).astype(dict.fromkeys(numbers, float)).round(0)


def engine_table(df: pd.DataFrame) -> pd.DataFrame:
    """Counts of the largest k, all prompts, as each engine or paper prints them (`labkit.decide.engine_figures`)."""
    rows = ok_rows(df, "acceptance", ["num_speculative_tokens"])
    rows = rows[rows["num_speculative_tokens"] == rows["num_speculative_tokens"].max()]
    return engine_figures([counts_from_frame(rows.iloc[[index]]) for index in range(len(rows))])
