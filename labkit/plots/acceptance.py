"""How many drafts are kept: by position, by workload and by context, with the definition of each number on its axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from labkit.acceptance import acceptance_table
from labkit.decide.acceptance_positions import position_table
from labkit.errors import InputError
from labkit.plots.canvas import axes_or_new, bars, finished, marks, new_figure
from labkit.plots.curves import by_name, interpolate, one_k
from labkit.plots.labels import EndLabels
from labkit.plots.style import (
    INK,
    TEXT_WIDTH_IN,
    SeriesStyle,
    context_axis,
    display_name,
    origin_style,
    series_styles,
    styled,
)
from labkit.rows import distinct, listed, ok_rows

Names = Mapping[str, str]
Looks = Mapping[str, SeriesStyle]
Texts = Names | None
Styles = Looks | None


@dataclass(frozen=True)
class Definition:
    """One way to state acceptance: column of `acceptance_table`, what is subtracted from it, and the axis label."""

    column: str
    offset: int
    label: str

    def limits(self, k: int) -> tuple[int, int]:
        """Least and largest value there can be."""
        return (0, 1) if self.column == "draft_acceptance_rate" else (1 - self.offset, k + 1 - self.offset)

    def of(self, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray | None]:
        """Values [num_rows], and the lengths of their bars [2, num_rows] where the definition has an interval."""
        values = table[self.column].to_numpy(float)
        bounds = [f"{self.column}_low", f"{self.column}_high"]
        errors = bars(values, *table[bounds].to_numpy(float).T) if bounds[0] in table else None
        return values - self.offset, errors


DEFINITIONS: Mapping[str, Definition] = {
    "pooled": Definition("mean_acceptance_length", 0, "tokens per verify step\n(pooled, bonus counted)"),
    "without_bonus": Definition("mean_acceptance_length", 1, "accepted drafts per verify step\n(pooled, no bonus)"),
    "mean_of_prompts": Definition(
        "mean_acceptance_length_of_prompts", 0, "tokens per verify step\n(mean of prompts, bonus counted)"
    ),
    "rate": Definition("draft_acceptance_rate", 0, "accepted / drafted tokens\n(pooled)"),
}
_POSITION_LABELS = {
    "unconditional": "share of all verify steps\nthat kept it",
    "conditional": "share kept, given that\nthe one before was",
}
MEAN_OF_PROMPTS: dict[str, Any] = {
    **{"color": INK, "linestyle": "none", "marker": "o", "zorder": 3},
    **{"markersize": 2.6, "markerfacecolor": "white", "markeredgewidth": 0.7},
}


def other_definition() -> tuple[Artist, str]:
    """Legend entry of the marks of `MEAN_OF_PROMPTS`."""
    return Line2D([], [], **MEAN_OF_PROMPTS), "mean of per-prompt lengths (another definition)"


@styled
def plot_acceptance(
    df: pd.DataFrame,
    along: str,
    *,
    ax: Axes | None = None,
    hue: str = "workload",
    definition: str | None = None,
    labels: Texts = None,
    styles: Styles = None,
) -> Axes:
    """Acceptance of one k with 95 % intervals from resampled prompts, a colour per value of ``hue``.

    along : "position": rate per draft position, pooled over contexts. "workload": per value of ``hue``, pooled over
        contexts, highest on top. "context": a mark at the mean context of each band's verify steps, joined only between
        neighbouring measured bands; nothing is drawn beyond the measured contexts.
    df : acceptance rows of one k.
    definition : the axis says which. By position "unconditional" (default; the rates add up to the acceptance length
        minus 1) or "conditional", see `position_table`; else a key of ``DEFINITIONS``, "pooled" by default. With that a
        small hollow mark per workload shows the mean of per-prompt lengths, which some tools print instead.

    Raises InputError: more than one k, an unknown ``along`` or definition, or no ok rows.
    """
    if along not in _ALONG:
        raise InputError(f"along: want one of {', '.join(_ALONG)}; got {along!r}")
    draw, known = _ALONG[along]
    definition = definition or next(iter(known))
    if definition not in known:
        raise InputError(f"definition: want one of {', '.join(known)}; got {definition!r}")
    ax, k = axes_or_new(ax), one_k(df, "acceptance rows")
    names = {str(name): display_name(name, labels) for name in distinct(df, hue)}
    draw(ax, df, k, hue, definition, names, styles or series_styles(names))
    return ax


def _by_position(ax: Axes, df: pd.DataFrame, k: int, hue: str, definition: str, names: Names, styles: Looks) -> None:
    table, ends = position_table(df, (hue,), definition=definition), EndLabels(ax)
    for name, rows in by_name(table, hue):
        style, rows = styles[name], rows[rows["rate"].notna()]
        x, y, low, high = rows[["position", "rate", "rate_low", "rate_high"]].to_numpy(float).T
        ax.fill_between(x, low, high, color=style.color, alpha=0.16, linewidth=0)
        ax.plot(x, y, color=style.color, marker=style.marker, clip_on=False)
        if len(rows):
            ends.add(x[-1], y[-1], names[name], color=style.color)
    ax.set_xlim(1 - 0.06 * k, k + 0.06 * k)
    ax.set_xticks(range(1, k + 1, 1 if k <= 8 else 2))
    ax.set_ylim(0, 1)
    ax.set_xlabel("draft position")
    ax.set_ylabel(_POSITION_LABELS[definition])


def _by_workload(ax: Axes, df: pd.DataFrame, k: int, hue: str, definition: str, names: Names, styles: Looks) -> None:
    table, how = acceptance_table(df, by=[hue, "origin"]), DEFINITIONS[definition]
    table = table[table[how.column].notna()].sort_values(how.column, kind="stable").reset_index(drop=True)
    values, errors = how.of(table)
    for y, (name, origin) in enumerate(zip(table[hue], table["origin"], strict=True)):
        bar = None if errors is None else errors[:, [y]]
        marks(ax, values[[y]], [y], styles[name], hollow=not origin_style(origin).filled, size=3.8, xerr=bar)
    if definition == "pooled":
        ax.plot(table["mean_acceptance_length_of_prompts"], np.arange(len(table)) - 0.22, **MEAN_OF_PROMPTS)
    ax.set_yticks(range(len(table)), [names[name] for name in table[hue]])
    ax.set_ylim(-0.6, len(table) - 0.4)
    low, high = how.limits(k)
    ax.set_xlim(low, high)
    if high > 1:
        ax.set_xticks(range(low, high + 1, 1 if k < 5 else 2))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(how.label)


def _by_context(ax: Axes, df: pd.DataFrame, k: int, hue: str, definition: str, names: Names, styles: Looks) -> None:
    how, by = DEFINITIONS[definition], [hue, "origin", "context_len_low", "context_len_high"]
    rows = ok_rows(df, "acceptance", ["context_len", "context_len_low", "context_len_high"])
    table = acceptance_table(rows, by=by).merge(rows.groupby(by, as_index=False)["context_len"].mean(), on=by)
    table = table[table[how.column].notna()]
    context_axis(ax, table["context_len"].min(), table["context_len"].max())
    ends = EndLabels(ax)
    for name, curve in by_name(table, hue):
        curve, style = curve.sort_values("context_len"), styles[name]
        x, (y, errors) = curve["context_len"].to_numpy(float), how.of(curve)
        fine, (middle,) = interpolate(x, curve, [how.column])
        ax.plot(fine, middle - how.offset, color=style.color, linewidth=1.0)
        marks(ax, x, y, style, hollow=not origin_style(curve["origin"].iloc[0]).filled, size=4.2, yerr=errors)
        ends.add(x[-1], y[-1], names[name], color=style.color)
    ax.set_ylim(*how.limits(k))
    ax.set_ylabel(how.label)


# What draws, and the definitions that it knows, its own first.
_ALONG: Mapping[str, tuple[Callable[..., None], Mapping[str, Any]]] = {
    "position": (_by_position, _POSITION_LABELS),
    "workload": (_by_workload, DEFINITIONS),
    "context": (_by_context, DEFINITIONS),
}


@styled
def figure_acceptance(
    df: pd.DataFrame,
    *,
    num_speculative_tokens: int | None = None,
    definition: str = "pooled",
    per_position: str = "unconditional",
    labels: Texts = None,
    width_in: float = TEXT_WIDTH_IN,
    note: str = "",
) -> Figure:
    """Acceptance by position, workload and context side by side (stacked at column width), for one k.

    num_speculative_tokens : k to show; the largest measured when None.
    definition, per_position : definition of the lengths (a key of ``DEFINITIONS``) and of the rates per position.
    note : what the subtitle adds.

    Raises InputError: that k was not measured, an unknown definition, or rows of several targets, drafters or
    temperatures.
    """
    ks = distinct(df, "num_speculative_tokens")
    if not ks or num_speculative_tokens not in (None, *ks):
        wanted = ", ".join(f"{value:g}" for value in ks) or "rows that have one"
        raise InputError(f"num_speculative_tokens: want one of {wanted}; got {num_speculative_tokens}")
    k = int(ks[-1] if num_speculative_tokens is None else num_speculative_tokens)
    rows = df[df["num_speculative_tokens"] == k]
    for name in ("target", "drafter", "temperature"):
        if len(distinct(rows, name)) > 1:
            raise InputError(f"acceptance rows: want one {name}; got {listed(rows, name)}; select one first")
    styles = series_styles(distinct(rows, "workload"))
    stacked = width_in <= 5
    figure = new_figure(width_in, 6.2 if stacked else 2.9)
    axes = figure.subplots(*((3, 1) if stacked else (1, 3)), squeeze=False).ravel()
    for ax, along, how in zip(axes, _ALONG, (per_position, definition, definition), strict=True):
        plot_acceptance(rows, along, ax=ax, definition=how, labels=labels, styles=styles)
        ax.set_title(f"by {along.replace('position', 'draft position')}")
    entries = [other_definition()] if definition == "pooled" else []
    return finished(figure, "How many drafts are kept", _describe(rows, k, labels) + note, entries)


def _describe(rows: pd.DataFrame, k: int, labels: Texts) -> str:
    temperature = ", ".join(f"{value:g}" for value in distinct(rows, "temperature"))
    parts = [listed(rows, "target", labels), listed(rows, "weight_dtype")]
    parts += [f"{listed(rows, 'drafter', labels)} drafter", f"k = {k}", f"temperature {temperature}"]
    counted = (
        f"{rows.groupby(['workload', 'prompt_id']).ngroups} prompts, {rows['num_verify_steps'].sum():,} verify steps"
    )
    return " · ".join([*filter(None, parts), counted, "95 % intervals over prompts"])
