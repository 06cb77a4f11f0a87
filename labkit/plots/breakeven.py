"""Axes-level plots of break-even cells: needed against measured acceptance length, and speed-up, over context.

Each takes the long-form frame `labkit.breakeven.Breakeven.cells` (one k, one batch size and so on per axes; only what
is named as an option may vary) and draws on ``ax``. Nothing is fitted or extended here: lines join neighbouring
measured cells, linear in log2(context) and log(y), which is how crossings are computed, so that drawn and printed
crossings agree.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from labkit.errors import InputError
from labkit.plots.canvas import axes_or_new, bars, marks
from labkit.plots.curves import by_name, crossing_text, interpolate, matching_curves, one_k, undecided_spans, value_at
from labkit.plots.labels import EndLabels, Notes
from labkit.plots.style import (
    INK,
    MUTED,
    SeriesStyle,
    context_axis,
    display_name,
    origin_style,
    series_styles,
    styled,
    text_color,
)

# Origins that describe the acceptance length of a cell and not its cost.
ACCEPTANCE_ORIGINS = ("transferred", "forced", "published", "cited")
_MOST_NOTES = 3
_ACCEPTANCE_MARKERS = ("D", "^", "v", "P", "X", "<", ">", "h")
_GUIDE: dict[str, Any] = {"gid": "guide", "zorder": 1.5}
_DOTTED = (0, (1.0, 1.4))
# A crossing that is drawn: its backend, workload, colour, the crossing, and (x, low, high) of its drop line.
_Drawn = tuple[str, str, str, Mapping[str, Any], tuple[float, float, float]]


@styled
def plot_breakeven(
    cells: pd.DataFrame,
    *,
    ax: Axes | None = None,
    crossovers: Sequence[Mapping[str, Any]] = (),
    floor: pd.DataFrame | None = None,
    hue: str = "verify_backend",
    labels: Mapping[str, str] | None = None,
    styles: Mapping[str, SeriesStyle] | None = None,
    lengths: Mapping[str, float] | None = None,
) -> Axes:
    """Break-even acceptance length per backend and measured acceptance length per workload, against context.

    Curves with bands are what a step costs in plain decode steps (`relative_step_cost`, 95 % interval); markers with
    bars are what it yields (`mean_acceptance_length`). Speculation pays where the marker is above the curve. Drop
    lines carry the crossings, the zone that the measurement leaves undecided is shaded, and a curve above k+1 gets an
    arrow: no acceptance could pay for it.

    cells : rows of one k; context_len in tokens, lengths in tokens per verify step.
    crossovers : `Breakeven.crossovers`; curves that are not in ``cells`` are left out.
    floor : context_len, relative_step_cost of a step that reads the weights and the KV cache once (modelled), see
        `breakeven_floor`.
    hue : column that tells curves apart.
    labels : display names for backends and workloads.
    styles : style per value of ``hue`` (`series_styles`), to keep several axes alike.
    lengths : imposed or cited acceptance lengths by what to call them, drawn as labelled lines: they were not measured
        here and join nothing.

    Raises InputError: no cells, more than one k, or a relative step cost that differs by workload at one context
    (draft lengths follow the text then, so each workload needs axes of its own).
    """
    ax, k = axes_or_new(ax), one_k(cells, "cells")
    curves = {name: _cost_curve(rows) for name, rows in by_name(cells, hue)}
    styles, ceiling = styles or series_styles(curves), float(k + 1)
    off_scale = [name for name, curve in curves.items() if (curve["relative_step_cost"] > ceiling).any()]
    lowest = min(1.0, np.nanmin(cells[["relative_step_cost", "mean_acceptance_length"]].to_numpy(float)))
    bottom, top = lowest - 0.05 * k, ceiling + k * (0.035 + 0.085 * len(off_scale))
    context_axis(ax, cells["context_len"].min(), cells["context_len"].max())
    ax.set_ylim(bottom, top)
    ax.set_yticks(range(1, k + 2) if k < 10 else range(1, k + 2, 2))
    ax.set_ylabel("tokens per verify step")
    ends = EndLabels(ax)
    ax.axhline(ceiling, color=MUTED, linewidth=0.7, **_GUIDE)
    ends.add(ax.get_xlim()[1], ceiling, f"k+1 = {k + 1}", color=MUTED)
    if floor is not None and len(floor):
        _draw_floor(ax, floor, ends)
    for name, length in (lengths or {}).items():
        ax.axhline(length, color=INK, linewidth=0.9, linestyle=origin_style("cited").linestyle, **_GUIDE)
        ends.add(ax.get_xlim()[1], length, f"{name} {length:.3g}", color=INK, size=6.5)
    for name, curve in curves.items():
        _draw_cost(ax, curve, styles[name], ceiling)
        x, y = curve.iloc[-1][["context_len", "relative_step_cost"]]
        ends.add(x, min(y, ceiling), (labels or {}).get(name, name), color=styles[name].color)
    found: list[_Drawn] = []
    for name, curve in curves.items():
        part = cells[cells[hue] == name]
        _shade_undecided(ax, part, curve, styles[name].color)
        drawn = _draw_crossings(ax, matching_curves(crossovers, part), styles[name].color)
        found += [((labels or {}).get(name, name), *crossing) for crossing in drawn]
    _note_crossings(ax, found, cells, labels)
    _draw_acceptance(ax, cells, labels, ends)
    for level, name in enumerate(off_scale):
        _mark_off_scale(ax, curves[name], styles[name], ceiling, (top - ceiling) * (level + 0.5) / len(off_scale))
    return ax


@styled
def plot_speedup(
    cells: pd.DataFrame,
    *,
    ax: Axes | None = None,
    labels: Mapping[str, str] | None = None,
    styles: Mapping[str, SeriesStyle] | None = None,
) -> Axes:
    """Speed-up over the baseline against context, with its interval, per backend; dotted black line at 1.

    Decode only: `speedup` leaves prefill out. The axis is a log2 one, so that twice and half are equally far from 1.
    Hollow markers are borrowed acceptance, dashes a modelled cost.

    Raises InputError: no cells, more than one k, or two cells of one backend at one context (several workloads or
    batches on one axes).
    """
    ax = axes_or_new(ax)
    one_k(cells, "cells")
    styles = styles or series_styles(cells["verify_backend"])
    context_axis(ax, cells["context_len"].min(), cells["context_len"].max())
    ends = EndLabels(ax)
    ax.axhline(1.0, color="0.0", linewidth=0.9, linestyle=_DOTTED, **_GUIDE)
    ends.add(ax.get_xlim()[1], 1.0, "plain decode", color="0.0")
    for name, curve in by_name(cells[cells["speedup"].notna()], "verify_backend"):
        curve = curve.sort_values("context_len")
        if curve["context_len"].duplicated().any():
            raise InputError(f"cells: want one per context and verify_backend on one axes; {name} has several")
        style, x = styles[name], curve["context_len"].to_numpy(float)
        fine, (middle, low, high) = interpolate(x, curve, ["speedup", "speedup_low", "speedup_high"])
        _band(ax, fine, low, high, style.color)
        ax.plot(fine, middle, color=style.color, linestyle=origin_style(_origin(curve, acceptance=False)).linestyle)
        marks(ax, x, curve["speedup"], style, hollow=not origin_style(_origin(curve, acceptance=True)).filled)
        ends.add(x[-1], curve["speedup"].iloc[-1], (labels or {}).get(name, name), color=style.color)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    bottom, top = ax.get_ylim()
    ax.set_ylim(min(0.47, bottom), max(2.13, top))
    ax.set_ylabel("speed-up over plain decode")
    return ax


def _cost_curve(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per context of one curve. Costs may not depend on the workload here."""
    curve = cells.sort_values("context_len").drop_duplicates("context_len")
    of_context = np.searchsorted(curve["context_len"], cells["context_len"])
    cost, first = cells["relative_step_cost"].to_numpy(float), curve["relative_step_cost"].to_numpy(float)[of_context]
    if (abs(cost - first) > 1e-9 * first).any():
        raise InputError("cells: relative_step_cost differs by workload at one context; want one workload per axes")
    return curve


def _origin(cells: pd.DataFrame, *, acceptance: bool) -> str:
    """Origin of the acceptance, or of the cost, of cells that hold one joint origin."""
    origins = [origin for origin in cells["origin"].unique() if (origin in ACCEPTANCE_ORIGINS) == acceptance]
    return str(origins[0]) if origins else "measured"


def _band(ax: Axes, x: np.ndarray, low: np.ndarray, high: np.ndarray, color: str) -> Artist:
    """An interval as a band, or as a bar where a single context leaves no width."""
    if len(x) > 1:
        return ax.fill_between(x, low, high, color=color, alpha=0.17, linewidth=0)
    return ax.vlines(x, low, high, color=color, linewidth=0.9)


def _draw_cost(ax: Axes, curve: pd.DataFrame, style: SeriesStyle, ceiling: float) -> None:
    """Curve, band and measured points of one backend; nothing is drawn above the ceiling."""
    origin, bottom = origin_style(_origin(curve, acceptance=False)), ax.get_ylim()[0]
    below = Rectangle((0, bottom), 1, ceiling - bottom, transform=ax.get_yaxis_transform())
    # Without acceptance the cost assumes k drafts in every step: another quantity, so the curve breaks there.
    for _, part in curve.groupby(curve["mean_acceptance_length"].isna()):
        x = part["context_len"].to_numpy(float)
        names = ["relative_step_cost", "relative_step_cost_low", "relative_step_cost_high"]
        fine, (middle, low, high) = interpolate(x, part, names)
        (line,) = ax.plot(fine, middle, color=style.color, linestyle=origin.linestyle)
        for artist in (_band(ax, fine, low, high, style.color), line):
            artist.set_clip_path(below)
    inside = curve[curve["relative_step_cost"] <= ceiling]
    marks(ax, inside["context_len"], inside["relative_step_cost"], style, hollow=not origin.filled, size=3.2)


def _draw_floor(ax: Axes, floor: pd.DataFrame, ends: EndLabels) -> None:
    floor = floor.sort_values("context_len")
    fine, (cost,) = interpolate(floor["context_len"].to_numpy(float), floor, ["relative_step_cost"])
    ax.plot(fine, cost, color="0.55", linewidth=1.1, linestyle=_DOTTED, zorder=1.8, gid="guide")
    ends.add(fine[-1], cost[-1], "one KV read", color="0.45", size=6.5)


def _draw_acceptance(ax: Axes, cells: pd.DataFrame, labels: Mapping[str, str] | None, ends: EndLabels) -> None:
    """Measured lengths as markers with bars, joined by a thin line; imposed or cited ones as a labelled line."""
    column = "mean_acceptance_length"
    known = cells[cells[column].notna()]
    several = known["workload"].nunique(dropna=False) > 1
    for (name, rows), marker in zip(by_name(known, "workload"), itertools.cycle(_ACCEPTANCE_MARKERS)):
        rows = rows.sort_values("context_len").drop_duplicates("context_len")
        origin = origin_style(_origin(rows, acceptance=True))
        x, y = rows["context_len"].to_numpy(float), rows[column].to_numpy(float)
        fine, (middle,) = interpolate(x, rows, [column])
        if origin.note in ("imposed", "published", "cited"):
            ax.plot(fine, middle, color=INK, linewidth=1.0, linestyle=origin.linestyle)
            for end in ("low", "high"):
                if (rows[f"{column}_{end}"] != rows[column]).any():
                    bound = interpolate(x, rows, [f"{column}_{end}"])[1][0]
                    ax.plot(fine, bound, color=INK, linewidth=0.5, linestyle=_DOTTED, **_GUIDE)
            ends.add(x[-1], y[-1], f"{origin.note} {y[-1]:.3g}", color=INK)
            continue
        ax.plot(fine, middle, color=INK, linewidth=0.7, zorder=2.2)
        errors = bars(y, *rows[[f"{column}_low", f"{column}_high"]].to_numpy(float).T)
        marks(ax, x, y, SeriesStyle(INK, marker), hollow=not origin.filled, size=4.6, yerr=errors)
        text = display_name(name, labels) if several else "accepted"
        ends.add(x[-1], y[-1], f"{text} ({origin.note})" if origin.note else text, color=INK)


def _shade_undecided(ax: Axes, cells: pd.DataFrame, curve: pd.DataFrame, color: str) -> None:
    """Strips under the curve of one backend where the interval of the speed-up holds 1."""
    ceiling = float(curve["num_speculative_tokens"].iloc[0] + 1)
    for _, rows in cells[cells["speedup_low"].notna()].groupby("workload", dropna=False):
        columns = rows.sort_values("context_len")[["context_len", "speedup_low", "speedup_high"]].to_numpy(float).T
        for low, high in undecided_spans(*columns):
            x = np.geomspace(low / 1.01, high * 1.01, 32)
            top = np.minimum(value_at(x, curve, "relative_step_cost"), ceiling)
            # Hatched, so that it differs from the bands without colour too.
            look: dict[str, Any] = {"facecolor": "none", "edgecolor": color, "hatch": "/////", "linewidth": 0}
            ax.fill_between(x, ax.get_ylim()[0], top, alpha=0.45, zorder=0.8, **look)


def _draw_crossings(
    ax: Axes, curves: Sequence[tuple[Mapping[str, Any], pd.DataFrame]], color: str
) -> list[tuple[str, str, Mapping[str, Any], tuple[float, float, float]]]:
    """Drop lines of one backend."""
    found = []
    for curve, rows in curves:
        for crossing in curve["crossovers"]:
            x, bottom = crossing["context_len"], ax.get_ylim()[0]
            y = float(value_at(np.array([x]), rows, "relative_step_cost")[0])
            ax.plot([x, x], [bottom, y], color=color, linewidth=0.7, **_GUIDE)
            ax.plot([x], [y], "o", color=color, markersize=4.4, markerfacecolor="none", markeredgewidth=0.9, zorder=4)
            found.append((str(curve.get("workload") or ""), color, crossing, (x, bottom, y)))
    return found


def _note_crossings(ax: Axes, found: Sequence[_Drawn], cells: pd.DataFrame, labels: Mapping[str, str] | None) -> None:
    """A note at each drop line; one list for all where there are too many for that."""
    limits = (cells["context_len"].min(), cells["context_len"].max())
    notes = Notes(ax)
    if len(found) <= _MOST_NOTES:
        for _, _, color, crossing, stretch in found:
            notes.add([(crossing_text(crossing, limits), color)], stretch=stretch)
        return
    lines: list[tuple[str, str]] = []
    for backend, group in itertools.groupby(found, key=lambda drawn: drawn[0]):
        drawn = [(name, color, crossing_text(at, limits)) for _, name, color, at, _ in group]
        starts = [start for start in ("pays up to ", "pays from ") if all(text.startswith(start) for *_, text in drawn)]
        start = starts[0] if starts else ""
        lines.append((f"{backend} {start}".strip(), drawn[0][1]))
        lines += [(f"  {display_name(name, labels)} {text.removeprefix(start)}", color) for name, color, text in drawn]
    notes.add(lines, size=6.0)


def _mark_off_scale(ax: Axes, curve: pd.DataFrame, style: SeriesStyle, ceiling: float, offset: float) -> None:
    """Small triangles on the ceiling for cells above it, an arrow at the last one and what it needs."""
    above = curve[curve["relative_step_cost"] > ceiling]
    marks(ax, above["context_len"], np.full(len(above), ceiling), SeriesStyle(style.color, "^"), hollow=True, size=3.2)
    hopeless = above[above["verdict"] == "cannot_pay"]
    last = (above if hopeless.empty else hopeless).iloc[-1]
    x, top = last["context_len"], ax.get_ylim()[1]
    arrow = {"arrowstyle": "-|>", "color": style.color, "linewidth": 1.0, "mutation_scale": 7}
    arrow |= {"shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (x, top), (x, ceiling), arrowprops=arrow, annotation_clip=False)
    text = f"needs {last['relative_step_cost']:.1f}{'' if hopeless.empty else ', cannot pay'}"
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center", "annotation_clip": False}
    ax.annotate(text, (x, ceiling + offset), (-5, 0), size=6.5, color=text_color(style.color), **place)
