"""Whole figures: panels, header, legend. The axes-level functions do the drawing."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.breakeven import CURVE_COLUMNS, Breakeven
from labkit.decide.cause import breakeven_floor
from labkit.errors import InputError
from labkit.plots.breakeven import ACCEPTANCE_ORIGINS, plot_breakeven, plot_speedup
from labkit.plots.canvas import finished, new_figure
from labkit.plots.style import INK, TEXT_WIDTH_IN, display_name, series_styles, styled
from labkit.rows import listed, matching

FACETS = ("num_speculative_tokens", "batch_size", "workload")
_MAX_COLUMNS = 4
_MAX_TEXTS = 3  # workloads beside another facet: more would be a page of panels
# One figure holds one value of each: what may differ inside an axes is the backend and the context.
FIXED = ("gpu", "target", "drafter", "temperature", "weight_dtype", "kv_dtype")


@styled
def figure_breakeven(
    result: Breakeven,
    *,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
    lengths: Mapping[str, float] | None = None,
    note: str = "",
) -> Figure:
    """Break-even against context: one panel per k, batch size and, where the cost follows the text, workload.

    More than 4 workloads beside another facet: the 3 with most prompts; the subtitle says so.

    labels : display names for backends, workloads, models and devices.
    width_in : `TEXT_WIDTH_IN` or `COLUMN_WIDTH_IN`.
    lengths : imposed or cited acceptance lengths to draw as labelled lines, by name.
    note : what the subtitle adds.

    Raises InputError: no cells; more than one GPU, model, drafter, temperature or dtype; or k, batch size and workload
    all need panels.
    """
    cells, floor = result.cells, breakeven_floor(result.cells)

    def draw(ax: Axes, here: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
        curves: dict[str, Any] = {"crossovers": result.crossovers, "floor": matching(floor, here), "lengths": lengths}
        plot_breakeven(matching(cells, here), ax=ax, labels=labels, styles=styles, **curves)

    panels = breakeven_panels(cells)
    cells, left_out = fullest_texts(cells, panels)
    figure = _facets(cells, panels, draw, labels, width_in)
    about = describe(cells, result.baseline, labels=labels, without=panels) + left_out + note
    return finished(figure, "Where speculative decoding pays", about, _legend(cells))


@styled
def figure_speedup(
    result: Breakeven, *, labels: Mapping[str, str] | None = None, width_in: float = TEXT_WIDTH_IN, note: str = ""
) -> Figure:
    """Speed-up against context, one panel per k, batch size and workload that vary. Raises as `figure_breakeven`."""
    cells = result.cells[result.cells["speedup"].notna()]

    def draw(ax: Axes, here: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
        plot_speedup(matching(cells, here), ax=ax, labels=labels, styles=styles)

    panels = speedup_panels(cells)
    cells, left_out = fullest_texts(cells, panels)
    figure = _facets(cells, panels, draw, labels, width_in)
    _share_limits([ax for ax in figure.axes if ax.get_visible()])
    about = describe(cells, result.baseline, labels=labels, without=panels) + left_out + note
    return finished(figure, "Speed-up over plain decode", about)


def _varying(cells: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [name for name in names if cells[name].nunique() > 1]


def speedup_panels(cells: pd.DataFrame) -> list[str]:
    """What needs panels in `figure_speedup`."""
    return _varying(cells, FACETS)


def breakeven_panels(cells: pd.DataFrame) -> list[str]:
    """What needs panels in `figure_breakeven`: the text only where the cost follows it."""
    keys = [name for name in CURVE_COLUMNS if name not in ("workload", "temperature", "origin")] + ["context_len"]
    cost = cells[cells["mean_acceptance_length"].notna()].groupby(keys, dropna=False)["relative_step_cost"]
    follows_text = ((cost.max() / cost.min()) > 1 + 1e-9).any()
    return [name for name in _varying(cells, FACETS) if name != "workload" or follows_text]


def fullest_texts(cells: pd.DataFrame, panels: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """Cells of the workloads with most prompts, where more than `_MAX_COLUMNS` would need panels beside another facet.

    Returns also what a subtitle adds.
    """
    prompts = cells.groupby("workload")["num_prompts"].max().sort_values(ascending=False, kind="stable")
    if "workload" not in panels or len(panels) == 1 or len(prompts) <= _MAX_COLUMNS:
        return cells, ""
    kept = cells[cells["workload"].isin(prompts.index[:_MAX_TEXTS])]
    left_out = ", ".join(sorted(display_name(name, None) for name in prompts.index[_MAX_TEXTS:]))
    return kept, f" · not drawn: {left_out}"


Draw = Callable[[Axes, Mapping[str, Any], Mapping[str, Any]], None]


def _facets(
    cells: pd.DataFrame, panels: Sequence[str], draw: Draw, labels: Mapping[str, str] | None, width_in: float
) -> Figure:
    """A grid of panels: the last of ``panels`` goes across, the one before down; a single one wraps."""
    if cells.empty:
        raise InputError("cells: want at least one to draw; got none")
    if mixed := _varying(cells, FIXED):
        values = ", ".join(map(str, cells[mixed[0]].unique()))
        raise InputError(f"cells: one figure holds one {mixed[0]}; got {values}; select with --where {mixed[0]}=NAME")
    if len(panels) > 2:
        raise InputError(f"cells: want at most two of {', '.join(panels)} to vary; select one value of one of them")
    grid = [[{}]] if not panels else _grid(panels, cells, 1 if width_in <= 5 else _MAX_COLUMNS)
    num_rows, num_columns = len(grid), max(map(len, grid))
    several = "workload" not in panels and cells["workload"].nunique() > 1
    row_in = 2.6 if several else 1.7 if num_columns > 2 else 2.0
    figure = new_figure(width_in, (0.95 if width_in > 5 else 1.5) + num_rows * row_in)
    styles = series_styles(cells["verify_backend"].drop_duplicates())
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True)
    for row, column in product(range(num_rows), range(num_columns)):
        ax = axes[row][column]
        if column >= len(grid[row]):
            ax.set_visible(False)
            continue
        draw(ax, grid[row][column], styles)
        ax.set_title(" · ".join(_panel_title(name, value, labels) for name, value in grid[row][column].items()))
        if row < num_rows - 1 and column < len(grid[row + 1]):
            ax.set_xlabel("")
        if column:
            ax.set_ylabel("")
    for line in axes:
        shown = [ax for ax in line if ax.get_visible()]
        # Linear axes whose ticks differ have ceilings of their own (several k).
        if shown[0].get_yscale() != "linear" or len({tuple(ax.get_yticks()) for ax in shown}) == 1:
            _share_limits(shown)
            for ax in shown[1:]:
                ax.tick_params(labelleft=False)
    return figure


def _share_limits(axes: Sequence[Axes]) -> None:
    limits = np.array([ax.get_ylim() for ax in axes])
    for ax in axes:
        ax.set_ylim(limits[:, 0].min(), limits[:, 1].max())


def _grid(panels: Sequence[str], cells: pd.DataFrame, most: int) -> list[list[dict[str, Any]]]:
    """What each panel shows; in lines of up to ``most`` where one facet varies or not every pair was measured."""
    values = [sorted(cells[name].dropna().unique()) for name in panels]
    places = [dict(zip(panels, place, strict=True)) for place in product(*values)]
    there = [place for place in places if not matching(cells, place).empty]
    if len(panels) == 1 or most == 1 or len(there) < len(places):
        places = there
        columns = -(-len(places) // -(-len(places) // most))  # lines of like length
        return [places[start : start + columns] for start in range(0, len(places), columns)]
    down, across = (0, 1) if len(values[1]) <= most else (1, 0)
    return [[{panels[down]: a, panels[across]: b} for b in values[across]] for a in values[down]]


def _panel_title(name: str, value: Any, labels: Mapping[str, str] | None) -> str:
    if name == "num_speculative_tokens":
        return f"k = {int(value)}"
    if name == "batch_size":
        return f"batch {int(value)}"
    return display_name(value, labels)


def describe(
    cells: pd.DataFrame, baseline: str, *, labels: Mapping[str, str] | None = None, without: Sequence[str] = ()
) -> str:
    """Device, model, dtypes, drafter, k, batch and baseline of ``cells`` in one line for a subtitle."""

    def values(name: str) -> str:
        return listed(cells, name, labels)

    weights, cache = values("weight_dtype"), values("kv_dtype")
    dtypes = weights if weights == cache else f"{weights} weights, {cache} KV"
    parts = [values("gpu"), values("target"), dtypes, f"{values('drafter')} drafter"]
    parts += [] if "num_speculative_tokens" in without else [f"k = {values('num_speculative_tokens')}"]
    parts += [] if "batch_size" in without else [f"batch {values('batch_size')}"]
    if "workload" not in without and cells["workload"].nunique() == 1:
        parts.append(values("workload").replace("_", " "))
    decode = ", ".join(sorted({name for value in cells["decode_backend"].dropna() for name in value.split("|")}))
    names = {"fastest": f"fastest plain decode of {decode}", "same": "plain decode on the same backend"}
    return " · ".join([*parts, f"baseline: {names.get(baseline, f'plain decode, {decode}')}"])


def _legend(cells: pd.DataFrame) -> list[tuple[Artist, str]]:
    """What curves, markers and shading mean, in one row under the panels."""
    drawn = set(cells.loc[cells["mean_acceptance_length"].notna(), "origin"])
    acceptance: dict[str, Any] = {"color": INK, "linewidth": 0.7, "marker": "D", "markersize": 4.0}
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=INK, linewidth=1.4), "break-even length: step cost in plain decode steps")
    ]
    if drawn - set(ACCEPTANCE_ORIGINS):
        entries.append((Line2D([], [], **acceptance), "measured acceptance length, pays above the curve"))
    if "transferred" in drawn:
        entries.append((Line2D([], [], **acceptance, markerfacecolor="white"), "borrowed acceptance length"))
    if (cells["origin"] == "modelled").any():
        entries.append((Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (4.0, 1.8))), "modelled"))
    entries.append((Patch(facecolor="none", edgecolor="0.45", hatch="/////", linewidth=0), "undecided (95 %)"))
    return entries
