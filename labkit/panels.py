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

from labkit.breakeven import Breakeven
from labkit.canvas import add_header, add_legend, freeze_layout, new_figure
from labkit.cost import floor_relative_cost
from labkit.errors import InputError
from labkit.plots import ACCEPTANCE_ORIGINS, plot_breakeven, plot_speedup
from labkit.shapes import model_shape
from labkit.style import INK, TEXT_WIDTH_IN, series_styles, styled

FACETS = ("num_speculative_tokens", "batch_size", "workload")
_MAX_COLUMNS = 4
# One figure holds one value of each: what may differ inside an axes is the backend and the context.
_FIXED = ("gpu", "target", "drafter", "temperature", "weight_dtype", "kv_dtype")


@styled
def figure_breakeven(
    result: Breakeven,
    *,
    panels: Sequence[str] | None = None,
    floor: pd.DataFrame | None = None,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
    title: str = "Where speculative decoding pays",
) -> Figure:
    """Break-even against context: one panel per k, batch size and, where the cost follows the text, workload.

    panels : columns to split by, at most two; by default those of ``FACETS`` that vary (workload only where the cost
        depends on it).
    floor : as in `plot_breakeven`, with the panel columns; by default `breakeven_floor`. An empty frame draws none.
    labels : display names for backends, workloads, models and devices.
    width_in : `TEXT_WIDTH_IN` or `COLUMN_WIDTH_IN`.

    Raises InputError: no cells, more than one GPU, model, drafter, temperature or dtype, or more than two columns to
    split by.
    """
    cells = result.cells
    floor = breakeven_floor(cells) if floor is None else floor

    def draw(ax: Axes, part: pd.DataFrame, here: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
        low = floor
        for name, value in here.items():
            low = low[low[name] == value] if name in low else low
        plot_breakeven(part, ax=ax, crossovers=result.crossovers, floor=low, labels=labels, styles=styles)

    figure = _facets(
        cells, draw, panels=panels, labels=labels, width_in=width_in, title=title, baseline=result.baseline
    )
    _legend(figure, cells)
    freeze_layout(figure)
    return figure


@styled
def figure_speedup(
    result: Breakeven,
    *,
    panels: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
    title: str = "Speed-up over plain decode",
) -> Figure:
    """Speed-up against context, one panel per k, batch size and workload that vary. Raises as `figure_breakeven`."""
    cells = result.cells[result.cells["speedup"].notna()]
    panels = _varying(cells, FACETS) if panels is None else panels

    def draw(ax: Axes, part: pd.DataFrame, here: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
        plot_speedup(part, ax=ax, labels=labels, styles=styles)

    figure = _facets(
        cells, draw, panels=panels, labels=labels, width_in=width_in, title=title, baseline=result.baseline
    )
    limits = np.array([ax.get_ylim() for ax in figure.axes if ax.get_visible()])
    for ax in figure.axes:
        ax.set_ylim(limits[:, 0].min(), limits[:, 1].max())
    freeze_layout(figure)
    return figure


def breakeven_floor(cells: pd.DataFrame) -> pd.DataFrame:
    """Break-even length if verify read weights and KV cache once (modelled), per context, batch size and k.

    Columns context_len, batch_size, num_speculative_tokens, relative_step_cost, origin. Empty where the shape of the
    target or of the drafter is not known; an n-gram drafter costs nothing.
    """
    keys = ["target", "drafter", "context_len", "batch_size", "num_speculative_tokens", "weight_dtype", "kv_dtype"]
    rows = []
    for row in cells[keys].drop_duplicates().to_dict("records"):
        try:
            model = model_shape(row["target"])
            draft_model = None if row["drafter"] == "ngram" else model_shape(row["drafter"])
        except InputError:
            continue
        cost = floor_relative_cost(
            model,
            context_len=int(row["context_len"]),
            batch_size=int(row["batch_size"]),
            weight_dtype=row["weight_dtype"],
            kv_dtype=row["kv_dtype"],
            num_speculative_tokens=int(row["num_speculative_tokens"]),
            draft_model=draft_model,
        )
        rows.append({name: row[name] for name in keys[2:5]} | {"relative_step_cost": cost, "origin": "modelled"})
    return pd.DataFrame(rows, columns=[*keys[2:5], "relative_step_cost", "origin"])


def _varying(cells: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [name for name in names if cells[name].nunique() > 1]


def _panel_columns(cells: pd.DataFrame) -> list[str]:
    keys = [
        name
        for name in cells.columns[: list(cells.columns).index("relative_step_cost")]
        if name not in ("workload", "temperature")
    ]
    cost = cells[cells["mean_acceptance_length"].notna()].groupby(keys, dropna=False)["relative_step_cost"]
    follows_text = ((cost.max() / cost.min()) > 1 + 1e-9).any()
    return [name for name in _varying(cells, FACETS) if name != "workload" or follows_text]


Draw = Callable[[Axes, pd.DataFrame, Mapping[str, Any], Mapping[str, Any]], None]


def _facets(
    cells: pd.DataFrame,
    draw: Draw,
    *,
    panels: Sequence[str] | None,
    labels: Mapping[str, str] | None,
    width_in: float,
    title: str,
    baseline: str,
) -> Figure:  # fmt: skip
    """A grid of panels: the last of ``panels`` goes across, the one before down; a single one wraps."""
    if cells.empty:
        raise InputError("cells: want at least one to draw; got none")
    panels = _panel_columns(cells) if panels is None else list(panels)
    if mixed := [name for name in _FIXED if cells[name].nunique() > 1]:
        values = ", ".join(map(str, cells[mixed[0]].unique()))
        raise InputError(f"cells: one figure holds one {mixed[0]}; got {values}; select one first")
    if len(panels) > 2:
        raise InputError(
            f"panels: want at most two columns to split by; got {', '.join(panels)}; select one value of one of them"
        )
    choices = [sorted(cells[name].dropna().unique()) for name in panels]
    grid = [[{}]] if not panels else _grid(panels, choices, 1 if width_in <= 5 else _MAX_COLUMNS)
    num_rows, num_columns = len(grid), max(map(len, grid))
    several = "workload" not in panels and cells["workload"].nunique() > 1
    figure = new_figure(
        width_in, (0.95 if width_in > 5 else 1.5) + num_rows * (2.6 if several else 1.7 if num_columns > 2 else 2.0)
    )
    styles = series_styles(cells["verify_backend"].drop_duplicates())
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True)
    for row, places in enumerate(grid):
        for column, ax in enumerate(axes[row]):
            if column >= len(places):
                ax.set_visible(False)
                continue
            here = places[column]
            part = cells
            for name, value in here.items():
                part = part[part[name] == value]
            draw(ax, part, here, styles)
            ax.set_title(" · ".join(_panel_title(name, value, labels) for name, value in here.items()))
            last_row = row == num_rows - 1 or column >= len(grid[row + 1])
            if not last_row:
                ax.set_xlabel("")
            if column:
                ax.set_ylabel("")
    for row in axes:
        share_limits([ax for ax in row if ax.get_visible()])
    add_header(figure, title, describe(cells, baseline, labels=labels, without=panels))
    return figure


def share_limits(row: Sequence[Axes]) -> None:
    """One y range for the panels of a row with its numbers at the first, unless their ceilings differ (several k)."""
    if row[0].get_yscale() == "linear" and len({tuple(ax.get_yticks()) for ax in row}) > 1:
        return
    limits = np.array([ax.get_ylim() for ax in row])
    for ax in row:
        ax.set_ylim(limits[:, 0].min(), limits[:, 1].max())
        ax.tick_params(labelleft=ax is row[0])


def _grid(panels: Sequence[str], values: Sequence[Sequence[Any]], most: int) -> list[list[dict[str, Any]]]:
    if len(panels) == 1 or most == 1:
        places = [dict(zip(panels, place, strict=True)) for place in product(*values)]
        columns = min(len(places), most)
        return [places[start : start + columns] for start in range(0, len(places), columns)]
    down, across = (0, 1) if len(values[1]) <= most else (1, 0)
    return [[{panels[down]: a, panels[across]: b} for b in values[across]] for a in values[down]]


def _panel_title(name: str, value: Any, labels: Mapping[str, str] | None) -> str:
    if name == "num_speculative_tokens":
        return f"k = {int(value)}"
    if name == "batch_size":
        return f"batch {int(value)}"
    return (labels or {}).get(str(value), str(value).replace("_", " "))


def describe(
    cells: pd.DataFrame, baseline: str, *, labels: Mapping[str, str] | None = None, without: Sequence[str] = ()
) -> str:
    """Device, model, dtypes, drafter, k, batch and baseline of ``cells`` in one line for a subtitle."""
    shown = {str(key): text for key, text in (labels or {}).items()}

    def values(name: str) -> str:
        found = [shown.get(str(value), str(value)) for value in sorted(cells[name].dropna().unique())]
        return ", ".join(found)

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


def _legend(figure: Figure, cells: pd.DataFrame) -> None:
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
    entries.append((Patch(facecolor="0.55", alpha=0.3, linewidth=0), "undecided (95 %)"))
    add_legend(figure, entries)
