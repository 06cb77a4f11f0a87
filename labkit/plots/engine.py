"""A real engine's relative step cost: against context by backend, and predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from labkit.errors import InputError
from labkit.plots.canvas import bars, finished, marks, new_figure
from labkit.plots.labels import EndLabels
from labkit.plots.style import MUTED, NOTE_SIZE, TEXT_WIDTH_IN, context_axis, series_styles, styled
from labkit.rows import listed

if TYPE_CHECKING:
    from labkit.decide.engine_truth import EngineTruth


@styled
def figure_engine_cost(truth: EngineTruth) -> Figure:
    """Relative step cost (break-even acceptance length, tokens per step) over context, a panel per batch size.

    Lines and points with bars: measured inside the engine; large open points: predicted; dotted: imposed acceptance
    lengths, below which a backend's cost must lie to pay. Of the smallest k.

    Raises InputError: no measured cell.
    """
    cells = truth.cells
    if cells.empty:
        raise InputError(truth.missing)
    k = int(cells["num_speculative_tokens"].min())
    cells = cells[cells["num_speculative_tokens"] == k]
    batches, styles = sorted(cells["batch_size"].unique()), series_styles(sorted(cells["setting"].unique()))
    figure = new_figure(TEXT_WIDTH_IN, 3.1)
    axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for ax, batch in zip(axes, batches, strict=True):
        ends = EndLabels(ax)
        for setting, rows in cells[cells["batch_size"] == batch].groupby("setting"):
            rows, style = rows.sort_values("context_len"), styles[str(setting)]
            cost, low, high = (rows[f"relative_step_cost{end}"].to_numpy() for end in ("", "_low", "_high"))
            contexts = rows["context_len"].to_numpy(float)
            ax.plot(contexts, cost, color=style.color, linewidth=0.9)
            marks(ax, contexts, rows["predicted"], style, hollow=True, size=7.0)
            marks(ax, contexts, cost, style, yerr=bars(cost, low, high))
            ends.add(contexts[-1], cost[-1], str(setting), color=style.color)
        for length in (length for length in truth.lengths if length <= k + 1):
            ax.axhline(length, color=MUTED, linewidth=0.8, linestyle=":", zorder=0)
            where = {"xy": (0, length), "xycoords": ("axes fraction", "data"), "xytext": (2, 1.5)}
            ax.annotate(f"{length:g} per step", **where, textcoords="offset points", fontsize=NOTE_SIZE, color=MUTED)
        context_axis(ax, cells["context_len"].min() / 4, cells["context_len"].max() * 1.15)
        ax.set(xlabel="context length (tokens)", title=f"batch {batch:g}", yscale="log")
        ticks = [1, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 24]
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.set_ylim(0.9, max(cells["relative_step_cost"].max(), truth.lengths[-1]) * 1.25)
    axes[0].set_ylabel("break-even acceptance length\n(tokens per step)")
    about = [listed(cells, name) for name in ("engine", "engine_version", "gpu", "target")]
    about += [f"k = {k}", "filled: measured, large open: predicted"]
    return finished(figure, "What a speculative step costs inside an engine", " · ".join(about))


@styled
def figure_engine_prediction(truth: EngineTruth) -> Figure:
    """Predicted against measured relative step cost, log axes; the band is the tolerance, hollow cells were fitted.

    Raises InputError: no cell with a prediction.
    """
    cells = truth.cells
    cells = cells[cells["predicted"].notna()] if len(cells) else cells
    if cells.empty:
        raise InputError(truth.missing)
    styles = series_styles(sorted(cells["setting"].unique()))
    figure = new_figure(TEXT_WIDTH_IN * 0.62, 3.6)
    ax = figure.subplots()
    both = cells[["relative_step_cost", "predicted"]]
    ends = np.array([both.min().min() / 1.15, both.max().max() * 1.15])
    ax.fill_between(ends, ends / (1 + truth.tolerance), ends * (1 + truth.tolerance), color="0.9", linewidth=0)
    ax.plot(ends, ends, color=MUTED, linewidth=0.8)
    for setting, rows in cells.groupby("setting"):
        style = styles[str(setting)]
        for fitted, part in rows.groupby("fitted"):
            face, label = ("white", None) if fitted else (style.color, str(setting))
            points = part["relative_step_cost"], part["predicted"]
            ax.plot(*points, style.marker, color=style.color, markerfacecolor=face, label=label)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured relative step cost")
    ax.set_ylabel("predicted relative step cost")
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if ends[0] <= tick <= ends[1]]
    if len(ticks) < 3:
        ticks = [tick / 10 for tick in range(1, 250) if ends[0] <= tick / 10 <= ends[1]]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_aspect("equal")
    ax.legend(loc="upper left", frameon=False, fontsize=NOTE_SIZE)
    about = [listed(cells, name) for name in ("engine", "gpu", "target")]
    about += [f"band {100 * truth.tolerance:.0f} %; hollow: fitted at the shortest context"]
    return finished(figure, "Foretold from kernels and forwards", " · ".join(about))
