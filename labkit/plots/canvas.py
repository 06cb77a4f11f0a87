"""The figure that plots are drawn on: how it shows itself, its header and legend, and a layout that stays put."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from labkit.plots.style import COLUMN_WIDTH_IN, MUTED, NOTE_SIZE, SeriesStyle, context

# Width on screen of an inch on paper: letters of 7 points should read well beside a notebook's text.
SCREEN_DPI = 130


class StyledFigure(Figure):
    """A figure that shows itself in a notebook as it will be saved: inside the rc context and uncropped."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        with context():
            self.savefig(buffer, format="png", dpi=2 * SCREEN_DPI)
        return buffer.getvalue(), {"width": round(self.get_size_inches()[0] * SCREEN_DPI)}


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty constrained-layout figure outside pyplot, so that nothing stays open in a batch."""
    figure = StyledFigure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.04)
    return figure


def axes_or_new(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure of column width (from pyplot: a bare call in a notebook shows it)."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(COLUMN_WIDTH_IN, 2.6), layout="constrained")
    return figure.add_subplot()


def bars(middle: Any, low: Any, high: Any) -> np.ndarray:
    """Lengths of the error bars from ``middle`` down and up, [2, num_points]; 0 where a bound is unknown."""
    return np.nan_to_num(np.array([middle - low, high - middle], float)).clip(0)


def marks(
    ax: Axes, x: Any, y: Any, style: SeriesStyle, *, hollow: bool = False, size: float = 3.6, **errors: Any
) -> None:
    """Markers, white inside when ``hollow``; ``xerr`` or ``yerr`` of `bars` adds bars."""
    face = "white" if hollow else style.color
    look: dict[str, Any] = {"fmt": style.marker, "color": style.color, "markersize": size, "markerfacecolor": face}
    look |= {"markeredgewidth": 0.9, "elinewidth": 0.9, "capsize": 1.8, "capthick": 0.9, "clip_on": False, "zorder": 3}
    ax.errorbar(x, y, **look, **errors)


def empty(ax: Axes) -> None:
    """Take everything drawn off ``ax`` but keep its ticks and labels: a tenth of the time of ``ax.clear()``."""
    for artist in (*ax.lines, *ax.collections, *ax.patches, *ax.texts, *ax.artists):
        artist.remove()
    ax.containers.clear()
    ax.relim()


def add_header(figure: Figure, title: str, subtitle: str = "") -> None:
    """Write a bold title and a wrapped subtitle above the panels, flush left, and keep the layout clear of them."""
    width_in, height_in = figure.get_size_inches()
    margin_in = 0.06
    y_in = height_in - margin_in
    for text, size, color, weight in ((title, 9.0, "0.0", "bold"), (subtitle, 7.0, MUTED, "normal")):
        for line in _wrap(figure, text, size, weight, width_in - 2 * margin_in):
            x, y = margin_in / width_in, y_in / height_in
            figure.text(x, y, line, size=size, color=color, weight=weight, ha="left", va="top", in_layout=False)
            y_in -= 1.32 * size / 72
        y_in -= 0.02
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0.0, 0.0, 1.0, (y_in - 0.06) / height_in))


def freeze_layout(figure: Figure) -> None:
    """Lay out once and keep it: repeated layouts differ in the last digits, and so would saved files.

    ``figure.set_layout_engine("constrained")`` makes a frozen figure flow again.
    """
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def finished(figure: Figure, title: str, subtitle: str = "", entries: Sequence[tuple[Artist, str]] = ()) -> Figure:
    """The figure with its header and, of ``entries``, a legend; laid out once and for all."""
    add_header(figure, title, subtitle)
    if entries:
        add_legend(figure, entries)
    freeze_layout(figure)
    return figure


def add_legend(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> None:
    """A legend under the panels, in as few rows as the width allows."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    look = {"frameon": False, "fontsize": NOTE_SIZE, "handlelength": 1.8, "columnspacing": 1.6, "handletextpad": 0.6}
    look |= {"labelspacing": 0.3, "borderaxespad": 0.2, "borderpad": 0.3}
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(*zip(*entries, strict=True), loc="outside lower left", ncols=columns, **look)
        if columns == 1 or legend.get_window_extent(renderer).width < 0.97 * figure.bbox.width:
            break
        legend.remove()


def _wrap(figure: Figure, text: str, size: float, weight: str, width_in: float) -> list[str]:
    """Break ``text`` at ' · ', and what is still too long at blanks, into lines whose real width fits ``width_in``."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    probe = figure.text(0, 0, "", size=size, weight=weight)

    def fits(line: str) -> bool:
        probe.set_text(line)
        return bool(probe.get_window_extent(renderer).width <= 0.98 * width_in * figure.dpi)

    lines: list[str] = []
    for part in text.split(" · ") if text else []:
        if lines and fits(f"{lines[-1]} · {part}"):
            lines[-1] = f"{lines[-1]} · {part}"
            continue
        lines.append("")
        for word in part.split(" "):
            candidate = f"{lines[-1]} {word}".strip()
            lines[-1:] = [candidate] if fits(candidate) or not lines[-1] else [lines[-1], word]
    probe.remove()
    return lines
