"""Break-even length over context and batch size: contours, or the length at each cell where batches are few."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.tri import Triangulation

from labkit.breakeven import Breakeven
from labkit.errors import InputError
from labkit.plots.canvas import finished, marks, new_figure
from labkit.plots.panels import describe
from labkit.plots.style import INK, NOTE_SIZE, TEXT_WIDTH_IN, SeriesStyle, context_axis, styled, ticks_at
from labkit.plots.verdict import fullest_k, imposed_note

_FEWEST_BATCHES = 4


@styled
def figure_contours(result: Breakeven) -> Figure:
    """Break-even length over context x batch, one panel per verify backend: lines of equal needed length.

    With fewer than four batch sizes the length is printed at each cell instead.

    Dots are the measured cells; filled where speculation pays, hollow where it loses or cannot pay, crosses where it is
    undecided or no acceptance is known. Nothing is drawn outside the measured cells.

    Of the k that was measured at most contexts and batch sizes, of equals the largest.

    Raises InputError: fewer than two contexts or two batch sizes, at which no contour can be drawn.
    """
    cells = result.cells[result.cells["relative_step_cost"].notna()]
    k = fullest_k(cells)
    cells = cells[cells["num_speculative_tokens"] == k]
    spans = cells.groupby("verify_backend", sort=False)[["context_len", "batch_size"]].nunique()
    backends = list(spans.index[(spans > 1).all(axis=1)])[:4]
    if not backends:
        found = f"{cells['context_len'].nunique()} context(s) and {cells['batch_size'].nunique()} batch size(s)"
        raise InputError(f"contours: want two contexts and two batch sizes of a backend at k = {k}; got {found}")
    figure = new_figure(TEXT_WIDTH_IN, 3.1)
    axes = figure.subplots(1, len(backends), squeeze=False, sharey=True)[0]
    for ax, backend in zip(axes, backends, strict=True):
        _contour(ax, cells[cells["verify_backend"] == backend])
        ax.set_title(backend)
    axes[0].set_ylabel("batch size (requests)")
    about = describe(cells, result.baseline) + imposed_note(cells)
    shapes = [("o", INK, "pays"), ("o", "white", "loses or cannot pay"), ("x", INK, "undecided or unknown")]
    entries: list[Any] = [
        (Line2D([], [], linestyle="", marker=marker, color=INK, markerfacecolor=face, markersize=4), text)
        for marker, face, text in shapes
    ]
    return finished(figure, f"Acceptance length that a step must yield, k = {k}", about, entries)


def _contour(ax: Axes, cells: pd.DataFrame) -> None:
    cells = cells.sort_values(["batch_size", "context_len"])
    places = cells.drop_duplicates(["batch_size", "context_len"])
    x, y, cost = (places[name].to_numpy(float) for name in ("context_len", "batch_size", "relative_step_cost"))
    if len(set(y)) >= _FEWEST_BATCHES:
        context_axis(ax, x.min(), x.max())
        _contour_lines(ax, x, y, cost)
    else:  # lines between so few rows would show the triangles, not the cost
        context_axis(ax, x.min() / 1.3, x.max() * 1.3)
        for place in zip(x, y, cost, strict=True):
            text = f"{place[2]:.2f}" if place[2] < 9.995 else f"{place[2]:.1f}"
            ax.annotate(text, place[:2], (0, 4), textcoords="offset points", ha="center", size=5.5)
    for kind, rows in cells.groupby("verdict"):
        known = rows["mean_acceptance_length"].notna() | (rows["verdict"] == "cannot_pay")
        for part, marker in ((rows[known], "x" if kind == "undecided" else "o"), (rows[~known], "x")):
            if len(part):  # an empty series has no extent, which upsets the layout
                look = SeriesStyle("#0072B2", marker)
                hollow = kind in ("loses", "cannot_pay")
                marks(ax, part["context_len"], part["batch_size"], look, hollow=hollow, size=3.4)
    ax.set_yscale("log", base=2)
    ax.set_ylim(y.min() / 1.25, y.max() * 1.45)
    ticks_at(ax.yaxis, y)


def _contour_lines(ax: Axes, x: np.ndarray, y: np.ndarray, cost: np.ndarray) -> None:
    low, high = cost.min(), cost.max()
    step = next(size for size in (0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if (high - low) / size <= 5 or size == 5.0)
    levels = np.arange(np.floor(low / step) * step, high + step, step)
    # Between neighbouring measured cells only; neighbours are told on the log axes that are drawn.
    mesh = Triangulation(x, y, Triangulation(np.log2(x), np.log2(y)).triangles)
    lines = ax.tricontour(mesh, cost, levels=levels, colors=INK, linewidths=0.9)
    lines.set_in_layout(False)
    for text in ax.clabel(lines, fmt=lambda value: f"{value:.3g}", fontsize=NOTE_SIZE):
        text.set_in_layout(False)
