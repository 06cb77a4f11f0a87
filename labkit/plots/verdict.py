"""Figures of the verdict beyond the break-even curve: causes, draft length, concurrency."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.breakeven import Breakeven
from labkit.errors import InputError
from labkit.plots.canvas import bars, finished, marks, new_figure
from labkit.plots.curves import matching_curves, turning_text
from labkit.plots.labels import EndLabels, Notes
from labkit.plots.panels import describe, fullest_texts
from labkit.plots.style import (
    MUTED,
    NOTE_SIZE,
    TEXT_WIDTH_IN,
    SeriesStyle,
    display_name,
    format_tokens,
    origin_style,
    series_styles,
    styled,
    ticks_at,
)
from labkit.rows import matching

# Of the step: what drafting costs, what verify costs, what is around them. Light to dark inside a kind.
COLORS: Mapping[str, str] = {
    "draft": "#A6D8F5", "draft attention": "#0072B2", "draft rest": "#A6D8F5", "verify": "#E69F00",
    "verify attention": "#D55E00", "verify rest": "#E69F00", "sampling": "#009E73", "communication": "#CC79A7",
    "gap": "0.55", "unexplained": "0.85",
}  # fmt: skip
FORMULA_STYLES: Mapping[str, tuple[str, Any]] = {
    "Leviathan et al.": (MUTED, (0, (1.0, 1.4))),
    "MagicDec": (MUTED, (0, (4.0, 1.8))),
    "Forced rejection": (MUTED, (0, (5.0, 1.5, 1.0, 1.5))),
}
_GUIDE: dict[str, Any] = {"gid": "guide", "zorder": 1.5}


def imposed_note(cells: pd.DataFrame) -> str:
    """What a subtitle must say of acceptance that was not measured."""
    lengths = sorted(cells.loc[cells["origin"] == "forced", "mean_acceptance_length"].dropna().unique())
    return f" · imposed acceptance length {', '.join(f'{value:g}' for value in lengths)}" if lengths else ""


def fullest_k(cells: pd.DataFrame) -> int:
    """The k with most pairs of context and batch size, the largest of equals."""
    places = cells.drop_duplicates(["num_speculative_tokens", "context_len", "batch_size"])
    counts = places.groupby("num_speculative_tokens").agg(
        batches=("batch_size", "nunique"), places=("batch_size", "size")
    )
    return int(str(counts.reset_index().sort_values(["batches", "places", "num_speculative_tokens"]).iloc[-1, 0]))


@styled
def figure_cause(waterfall: pd.DataFrame, result: Breakeven) -> Figure:
    """Where the needed length goes: parts of a step in units of acceptance length, stacked, per backend and context.

    A bar ends at the break-even length. The dotted line is a plain decode step (1), ticks are acceptance lengths
    measured at that cell: **a tick right of its bar's end pays**.

    waterfall : `labkit.decide.cause.waterfall`; the largest k of the smallest batch size is drawn.
    """
    batch = waterfall["batch_size"].min()
    rows = waterfall[waterfall["batch_size"] == batch]
    k = int(rows["num_speculative_tokens"].max())
    rows = rows[rows["num_speculative_tokens"] == k]
    places = rows[["verify_backend", "context_len"]].drop_duplicates().sort_values(["verify_backend", "context_len"])
    figure = new_figure(TEXT_WIDTH_IN, 1.2 + 0.24 * len(places))
    ax = figure.subplots()
    for index, (backend, context) in enumerate(places.itertuples(index=False)):
        here = rows[(rows["verify_backend"] == backend) & (rows["context_len"] == context)]
        left = 0.0
        for part, tokens in zip(here["part"], here["tokens"], strict=True):
            if tokens > 0:
                ax.barh(index, tokens, left=left, height=0.66, color=COLORS[part], linewidth=0)
                left += tokens
        ax.text(left + 0.02 * (k + 1), index, f"{here['relative_step_cost'].iloc[0]:.2f}", va="center", size=NOTE_SIZE)
        cell = {"verify_backend": backend, "context_len": context, "num_speculative_tokens": k, "batch_size": batch}
        lengths = matching(result.cells, cell)["mean_acceptance_length"].dropna()
        ax.plot(lengths, np.full(len(lengths), index), "|", color="0.0", markersize=9, markeredgewidth=1.4)
    ax.axvline(1.0, color="0.0", linewidth=0.9, linestyle=(0, (1.0, 1.4)), **_GUIDE)
    ax.set_yticks(range(len(places)), [f"{row[0]}, {format_tokens(row[1])}" for row in places.itertuples(index=False)])
    longest = max(rows["relative_step_cost"].max(), result.cells["mean_acceptance_length"].max(skipna=True) or 1)
    ax.set(
        ylim=(len(places) - 0.4, -0.6),
        xlim=(0, 1.08 * longest),
        xlabel="plain decode steps: the length needed with k drafts in every step",
    )
    ax.grid(visible=False, axis="y")
    shown = result.cells[result.cells["num_speculative_tokens"] == k]
    used = [part for part in COLORS if (rows.loc[rows["part"] == part, "tokens"] > 0.005).any()]
    entries: list[Any] = [(Patch(facecolor=COLORS[part], linewidth=0), part) for part in used]
    tick: dict[str, Any] = {"linestyle": "", "marker": "|", "color": "0.0", "markersize": 8, "markeredgewidth": 1.4}
    entries.append(
        (Line2D([], [], **tick), "acceptance length at that cell, by workload (steps with fewer drafts cost less)")
    )
    return finished(figure, "What a step with all k drafts costs", describe(shown, result.baseline), entries)


@styled
def figure_draft_length(result: Breakeven, formulas: pd.DataFrame | None = None) -> Figure:
    """Speed-up against k, 0 included, per verify backend; rows are workloads, columns contexts; formulas in grey.

    formulas : `labkit.decide.formulas.formula_table`; those of the backend with the largest speed-ups are drawn.

    Raises InputError: no cell has a speed-up.
    """
    cells = result.cells[result.cells["speedup"].notna()]
    if cells.empty:
        raise InputError("draft length: want cells with a speed-up; there are none")
    cells = cells[cells["batch_size"] == cells["batch_size"].min()]
    cells, left_out = fullest_texts(cells, ["context_len", "workload"])
    texts, contexts = list(dict.fromkeys(cells["workload"])), sorted(cells["context_len"].unique())[:4]
    styles = series_styles(cells["verify_backend"])
    fastest = str(cells.groupby("verify_backend")["speedup"].median().idxmax())
    figure = new_figure(TEXT_WIDTH_IN, 1.1 + 1.65 * len(texts))
    axes = figure.subplots(len(texts), len(contexts), squeeze=False, sharex=True, sharey=True)
    for (row, column), ax in np.ndenumerate(axes):
        text = texts[row]
        here = matching(cells, {"context_len": contexts[column], "workload": text})
        ends = EndLabels(ax)
        for backend, curve in here.groupby("verify_backend", sort=False):
            # Bars at one k stand beside each other.
            aside = 0.015 * cells["num_speculative_tokens"].max() * (list(styles).index(str(backend)) - len(styles) / 2)
            curve, style = curve.sort_values("num_speculative_tokens"), styles[str(backend)]
            _draft_curve(ax, curve, style, aside)
            if column == len(contexts) - 1:
                x, y = curve[["num_speculative_tokens", "speedup"]].iloc[-1]
                ends.add(x, y, str(backend), color=style.color)
        if formulas is not None and len(here):
            _formula_lines(ax, formulas[formulas["verify_backend"] == fastest], here, text)
        ax.axhline(1.0, color="0.0", linewidth=0.9, linestyle=(0, (1.0, 1.4)), **_GUIDE)
        name = "imposed" if pd.isna(text) else display_name(text, None)
        ax.set_title(f"{name}, {format_tokens(contexts[column])}")
    for ax in axes[-1]:
        ax.set_xlabel("k, drafts per step")
        ax.set_xticks([0, *sorted(cells["num_speculative_tokens"].unique())])
    figure.supylabel("speed-up over plain decode", size=8)
    about = describe(cells, result.baseline, without=["num_speculative_tokens"]) + left_out
    looks = FORMULA_STYLES.items() if formulas is not None else ()
    entries = [(Line2D([], [], color=color, linestyle=line), f"{name} ({fastest})") for name, (color, line) in looks]
    return finished(figure, "How many tokens to draft", about, entries)


def _draft_curve(ax: Axes, curve: pd.DataFrame, style: SeriesStyle, aside: float) -> None:
    x = np.append(0.0, curve["num_speculative_tokens"].to_numpy(float))
    y, low, high = (np.append(1.0, curve[name].to_numpy(float)) for name in ("speedup", "speedup_low", "speedup_high"))
    ax.plot(x, y, color=style.color, linewidth=1.1)
    marks(ax, x[1:] + aside, y[1:], style, yerr=bars(y, low, high)[:, 1:])


def _formula_lines(ax: Axes, formulas: pd.DataFrame, here: pd.DataFrame, text: Any) -> None:
    place = here[["context_len", "batch_size"]].iloc[0].to_dict()
    own = matching(formulas, place | {"workload": text})
    for name, (color, line) in FORMULA_STYLES.items():
        curve = own[own["formula"] == name].sort_values("k")
        x, y = np.append(0.0, curve["k"]), np.append(1.0, curve["predicted"])
        ax.plot(x, y, color=color, linestyle=line, linewidth=1.0, zorder=1.6)


@styled
def figure_concurrency(result: Breakeven) -> Figure:
    """Speed-up against batch size per verify backend, one panel per context (at most four), at the k with most cells.

    Crossings of 1 carry the batch from which speculation no longer pays, with its interval.

    Raises InputError: fewer than two batch sizes with a speed-up.
    """
    cells = result.cells[result.cells["speedup"].notna()]
    if cells["batch_size"].nunique() < 2:
        raise InputError(f"concurrency: want two batch sizes with a speed-up; got {cells['batch_size'].nunique()}")
    cells = cells[cells["num_speculative_tokens"] == fullest_k(cells)]
    several = cells.groupby("context_len")["batch_size"].nunique()
    contexts = sorted(several.index[several > 1])[:4]
    styles = series_styles(cells["verify_backend"])
    figure = new_figure(TEXT_WIDTH_IN, 2.6)
    axes = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for ax, context in zip(axes, contexts, strict=True):
        ends = EndLabels(ax)
        for (backend, _), curve in cells[cells["context_len"] == context].groupby(
            ["verify_backend", "workload"], dropna=False
        ):
            curve, style = curve.sort_values("batch_size"), styles[str(backend)]
            x, y = curve["batch_size"].to_numpy(float), curve["speedup"].to_numpy(float)
            ax.fill_between(x, curve["speedup_low"], curve["speedup_high"], color=style.color, alpha=0.17, linewidth=0)
            ax.plot(x, y, color=style.color)
            marks(ax, x, y, style, hollow=not origin_style(str(curve["origin"].iloc[0])).filled)
            ends.add(x[-1], y[-1], str(backend), color=style.color)
        notes = Notes(ax)
        for turning, _ in matching_curves(result.turning_points, cells[cells["context_len"] == context]):
            for crossing in turning["crossovers"]:
                at, color = crossing["batch_size"], styles[turning["verify_backend"]].color
                ax.axvline(at, color=color, linewidth=0.7, **_GUIDE)
                text = turning_text(crossing).replace(" requests", "")
                notes.add([(text, color)], stretch=(at, *sorted((1.0, cells["speedup"].min()))))
        ax.axhline(1.0, color="0.0", linewidth=0.9, linestyle=(0, (1.0, 1.4)), **_GUIDE)
        ax.set_xscale("log", base=2)
        ticks_at(ax.xaxis, cells["batch_size"])
        ax.set_xlabel("batch size (requests)")
        ax.set_title(f"context {format_tokens(context)}")
    axes[0].set_ylabel("speed-up over plain decode")
    about = describe(cells, result.baseline, without=["batch_size"]) + imposed_note(cells)
    return finished(figure, "Speed-up under concurrency", about)
