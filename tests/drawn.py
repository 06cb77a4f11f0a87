"""What a figure shows, read off its artists."""

import dataclasses
import itertools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.plots import style
from labkit.plots.labels import EndLabels, Notes
from tests.synthetic import GPU

GPU_SMALL = dataclasses.replace(GPU, contexts=(1024, 8192, 32768, 131072), num_rounds=6, num_prompts=6)
SIDECARS = {"20260131T120000Z-cccccc": {"calibration": {"read_gb_per_s": 4000.0, "cache_bytes": 50 << 20}}}


def artists(ax: Axes, kind: type) -> list:
    return [artist for artist in ax.get_children() if isinstance(artist, kind)]


def end_texts(ax: Axes) -> list[str]:
    return [text.get_text() for labels in artists(ax, EndLabels) for text in labels.texts]


def note_texts(ax: Axes) -> list[str]:
    return [text.get_text() for notes in artists(ax, Notes) for text in notes.texts]


def ticks(ax: Axes, name: str) -> list:
    """Tick labels that are drawn: a locator may place ticks outside the limits."""
    axis = ax.xaxis if name == "x" else ax.yaxis
    low, high = sorted(axis.get_view_interval())
    shown = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for label in shown if label.get_visible() and label.get_text()]


def curves(ax: Axes, width: float = 1.4) -> list:
    return [line for line in ax.get_lines() if line.get_linewidth() == width and line.get_linestyle() != "None"]


def all_texts(figure: Figure) -> list:
    """Every visible text of a figure, those of placed labels included."""
    texts = [*figure.texts]
    for ax in figure.axes:
        if ax.get_visible():
            texts += [ax.xaxis.label, ax.yaxis.label, ax._left_title, *ax.texts]
            texts += ticks(ax, "x") + ticks(ax, "y")
            texts += [text for group in (*artists(ax, EndLabels), *artists(ax, Notes)) for text in group.texts]
    for legend in figure.legends:
        texts += legend.get_texts()
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def assert_well_placed(figure: Figure) -> None:
    """No text is clipped by the figure, and no two end labels or tick labels of one axes overlap."""
    with style.context():
        figure.draw_without_rendering()
        for text in all_texts(figure):
            box = text.get_window_extent()
            inside = (
                box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= figure.bbox.x1 + 0.5 and box.y1 <= figure.bbox.y1 + 0.5
            )
            assert inside, f"{text.get_text()!r} leaves the figure: {box} in {figure.bbox}"
        for ax in figure.axes:
            groups = [[text for labels in artists(ax, EndLabels) for text in labels.texts]]
            groups += [ticks(ax, "x"), ticks(ax, "y"), list(figure.texts)]
            for group in groups:
                for one, other in itertools.combinations(group, 2):
                    a, b = one.get_window_extent().padded(-0.6), other.get_window_extent().padded(-0.6)
                    assert not a.overlaps(b), f"{one.get_text()!r} overlaps {other.get_text()!r}"


def one(cells: pd.DataFrame, **values: object) -> pd.DataFrame:
    for name, value in values.items():
        cells = cells[cells[name] == value]
    return cells
