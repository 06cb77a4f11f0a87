"""Texts that find their own place at draw time: labels at line ends, and notes that keep off the curves.

Both are artists, so that positions follow every later change of size, renderer or data limits.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox, IdentityTransform

from labkit.plots.style import NOTE_SIZE, text_color


def spread(
    targets: Sequence[float], sizes: Sequence[float], *, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """Centres nearest to ``targets`` (least squares) of intervals of ``sizes`` that keep their order without overlap.

    Pool-adjacent-violators on the targets shifted by the room that the intervals before them need; the result is
    clipped to ``[low, high]`` where it fits. Any unit; float64 ``[num_labels]`` in the order given.
    """
    if len(targets) != len(sizes):
        raise ValueError(f"sizes: want one per target ({len(targets)}); got {len(sizes)}")
    if not len(targets):
        return np.empty(0)
    order = np.argsort(np.asarray(targets, dtype=float), kind="stable")
    size = np.asarray(sizes, dtype=float)[order]
    before = np.concatenate([[0.0], np.cumsum((size[:-1] + size[1:]) / 2)])
    blocks: list[list[float]] = []  # shifted targets of labels that are pooled at their mean
    for value in np.asarray(targets, dtype=float)[order] - before:
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    shifted = np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
    # Clipping the shifted values keeps them in order, so nothing can overlap afterwards.
    lowest = low + size[0] / 2
    centres = np.empty(len(size))
    centres[order] = np.clip(shifted, lowest, max(high - size[-1] / 2 - before[-1], lowest)) + before
    return centres


class _Placed(Artist, ABC):
    """Texts of an axes, and lines to them, that `place` puts where a renderer's text sizes want them."""

    def __init__(self, ax: Axes, zorder: float):
        super().__init__()
        self.set_figure(ax.figure)
        self.host = ax
        self.texts: list[Text] = []
        self.leaders: list[Line2D] = []
        self.set_zorder(zorder)
        self.set_clip_on(False)
        ax.add_artist(self)
        self.set_clip_path(None)

    def _new_text(self, text: str, color: str, size: float, va: str) -> Text:
        look: dict[str, Any] = {"color": text_color(color), "size": size, "ha": "left", "va": va}
        self.texts.append(Text(0, 0, text, transform=IdentityTransform(), **look))
        self.texts[-1].set_figure(self.host.figure)
        return self.texts[-1]

    @abstractmethod
    def place(self, renderer: RendererBase) -> None:
        """Set the positions, in display coordinates."""

    def draw(self, renderer: RendererBase) -> None:
        """Place, then draw."""
        if self.get_visible():
            self.place(renderer)
            for artist in (*self.leaders, *self.texts):
                artist.draw(renderer)


class EndLabels(_Placed):
    """Labels right of an axes at the heights of its line ends, spread so that they never overlap.

    A thin leader joins a label to its line where the label had to move or the line ends early.
    """

    def __init__(self, ax: Axes):
        super().__init__(ax, zorder=5)
        self.ends: list[tuple[float, float]] = []

    def add(self, x: float, y: float, text: str, *, color: str, size: float = 7.0) -> None:
        """Label the end (x, y), in data coordinates."""
        self.ends.append((x, y))
        self._new_text(text, color, size, "center")
        self.leaders.append(Line2D([], [], color=color, linewidth=0.5, alpha=0.7, transform=IdentityTransform()))
        self.leaders[-1].set_figure(self.host.figure)

    def place(self, renderer: RendererBase) -> None:
        """Put every label beside the axes, in display coordinates."""
        if not self.texts:
            return
        box, pixel = self.host.bbox, _pixel(renderer)
        ends = self.host.transData.transform(np.array(self.ends, dtype=float))
        heights = [text.get_window_extent(renderer).height + pixel for text in self.texts]
        targets = np.clip(ends[:, 1], box.y0, box.y1)
        centres = spread(list(targets), heights, low=box.y0 - 4 * pixel, high=box.y1 + 4 * pixel)
        left = box.x1 + 4 * pixel
        for index, (x_end, target, centre) in enumerate(zip(ends[:, 0], targets, centres, strict=True)):
            self.texts[index].set_position((left, centre))
            start = min(x_end + 3 * pixel, box.x1)
            moved = abs(centre - target) > 2 * pixel or box.x1 - x_end > 14 * pixel
            line = ([start, box.x1, left - pixel], [target, target, centre]) if moved else ([], [])
            self.leaders[index].set_data(line)

    def get_window_extent(self, renderer: RendererBase | None = None) -> Bbox:
        """Box around the labels, in display coordinates."""
        renderer = renderer or self.host.figure._get_renderer()  # type: ignore[union-attr]
        self.place(renderer)
        return Bbox.union([text.get_window_extent(renderer) for text in self.texts]) if self.texts else Bbox.null()

    def get_tightbbox(self, renderer: RendererBase | None = None) -> Bbox | None:
        """As `get_window_extent`; None when there are no labels, so that a layout ignores it."""
        return self.get_window_extent(renderer) if self.texts else None


@dataclass(frozen=True)
class _Note:
    """Lines of text that stay together, and the vertical stretch (x, low, high; data) that they belong to."""

    texts: tuple[Text, ...]
    stretch: tuple[float, float, float] | None
    leader: Line2D | None = None


class Notes(_Placed):
    """Notes inside an axes. Each takes the place near its anchor that covers the fewest curves and other notes."""

    _STEPS = 28

    def __init__(self, ax: Axes):
        super().__init__(ax, zorder=6)
        self.notes: list[_Note] = []
        self.set_in_layout(False)

    def add(
        self,
        lines: Sequence[tuple[str, str]],
        *,
        stretch: tuple[float, float, float] | None = None,
        size: float = NOTE_SIZE,
        leader: bool = False,
    ) -> None:
        """Add a note of (text, colour) lines near the vertical ``stretch`` (x, low, high; data), or anywhere.

        ``leader`` joins the note to the middle of its stretch by a thin line.
        """
        texts = [self._new_text(line, color, size, "bottom") for line, color in lines]
        for text in texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5})
        line = Line2D([], [], color=lines[0][1], linewidth=0.5, alpha=0.8, transform=IdentityTransform())
        line.set_figure(self.host.figure)
        self.leaders += [line] if leader else []
        self.notes.append(_Note(tuple(texts), stretch, line if leader else None))

    def place(self, renderer: RendererBase) -> None:
        """Choose a place for every note in turn, in display coordinates."""
        pixel = _pixel(renderer)
        placed = np.empty((0, 2, 2))
        for note in self.notes:
            obstacles = _obstacle_points(self.host, renderer, guides=note.stretch is None)
            first, wide = note.texts[0], self.host.bbox.width - 4 * pixel
            if len(note.texts) == 1 and first.get_window_extent(renderer).width > wide:
                first.set_text(first.get_text().replace(" [", "\n["))
            sizes = [text.get_window_extent(renderer) for text in note.texts]
            line = max(size.height for size in sizes)
            width, height = max(size.width for size in sizes), line * len(sizes)
            lefts, bottoms = self._candidates(note, width, height, pixel)
            costs = self._costs(lefts, bottoms, note, obstacles, placed, (width, height, line, pixel))
            row, column = np.unravel_index(costs.argmin(), costs.shape)
            best = np.array([[lefts[column], bottoms[row]], [lefts[column] + width, bottoms[row] + height]])
            for index, text in enumerate(note.texts):
                text.set_position((best[0, 0], best[1, 1] - (index + 1) * line))
            placed = np.append(placed, best[None], axis=0)
            if note.leader is not None and note.stretch is not None:
                x, low, high = note.stretch
                at, end = self.host.transData.transform([(x, low), (x, high)])
                middle = (at + end) / 2
                edge = np.clip(middle, *best)
                note.leader.set_data([edge[0], middle[0]], [edge[1], middle[1]])

    def _candidates(self, note: _Note, width: float, height: float, pixel: float) -> tuple[np.ndarray, np.ndarray]:
        """Left edges and bottoms of the places to try, each left with each bottom."""
        frame, gap = self.host.bbox, 3.0 * pixel
        bottoms = np.linspace(frame.y0 + gap / 2, frame.y1 - height - gap / 2, self._STEPS)
        if note.stretch is None:
            return np.linspace(frame.x0 + gap, frame.x1 - width - gap, self._STEPS), bottoms
        x = self.host.transData.transform((note.stretch[0], note.stretch[1]))[0]
        lefts = np.array([x + gap, x - gap - width, x - width / 2])
        return np.clip(lefts, frame.x0 + gap / 2, max(frame.x1 - width, frame.x0 + gap / 2)), bottoms

    def _costs(
        self,
        lefts: np.ndarray,
        bottoms: np.ndarray,
        note: _Note,
        obstacles: np.ndarray,
        placed: np.ndarray,
        sizes: tuple[float, float, float, float],
    ) -> np.ndarray:
        """Cost of each place, float64 [num_bottoms, num_lefts]; ``placed``: corners of the notes before."""
        width, height, line, pixel = sizes
        frame, margin = self.host.bbox, 1.5 * pixel
        x0, y0 = lefts, bottoms[:, None]
        x1, y1 = x0 + width, y0 + height
        # What lies inside in x and in y is counted by a product: a mask per place would take most of a drawing.
        points, corners = obstacles.T[..., None], placed.transpose(1, 2, 0)[..., None]
        in_x, in_y = (
            (points[0] > x0 - margin) & (points[0] < x1 + margin),
            (points[1] > y0.T - margin) & (points[1] < y1.T + margin),
        )
        on_x = (corners[0, 0] <= x1 + margin) & (corners[1, 0] >= x0 - margin)
        on_y = (corners[0, 1] <= y1.T + margin) & (corners[1, 1] >= y0.T - margin)
        hits, clashes = in_y.T.astype(float) @ in_x, on_y.T.astype(float) @ on_x
        outside = np.maximum(frame.x0 - x0, 0) + np.maximum(x1 - frame.x1, 0)
        if note.stretch is None:
            away = 0.01 * (x0 - frame.x0 + frame.y1 - y1) / pixel
        else:
            at, *ends = note.stretch
            (anchor, low), (_, high) = self.host.transData.transform([(at, end) for end in ends])
            away = np.maximum(np.maximum(low - y0, y0 - high), 0) / line + 0.05 * abs((x0 + x1) / 2 - anchor) / line
            # Over the stretch the text hides a part of the line; beside it is better.
            away += 1.5 * ((x0 < anchor) & (anchor < x1) & (y0 < high))
        return away + 4.0 * hits + 1000.0 * clashes + 50.0 * outside / pixel


def _pixel(renderer: RendererBase) -> float:
    """One point in display units."""
    return float(np.asarray(renderer.points_to_pixels(1.0)))


def _obstacle_points(ax: Axes, renderer: RendererBase, *, guides: bool) -> np.ndarray:
    """Points along the curves, error bars and texts of ``ax`` in display coordinates, float64 [num_points, 2].

    Lines whose gid is ``"guide"`` (drop lines, the ceiling) may be written over and count only with ``guides``.
    """
    pixel = _pixel(renderer)
    lines = [line for line in ax.get_lines() if line.get_visible() and (guides or line.get_gid() != "guide")]
    paths = [line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float)) for line in lines]
    for collection in ax.collections:
        if isinstance(collection, LineCollection):
            paths += [ax.transData.transform(segment) for segment in collection.get_segments()]
    for text in ax.texts:
        box = text.get_window_extent(renderer)
        paths.append(np.array([[box.x0, (box.y0 + box.y1) / 2], [box.x1, (box.y0 + box.y1) / 2]]))
    points = [np.empty((0, 2))]
    for path in paths:
        path = path[np.isfinite(path).all(axis=1)]
        between = np.diff(path, axis=0)
        steps = (np.hypot(*between.T) / (1.5 * pixel)).astype(int)
        segment = np.repeat(np.arange(len(steps)), steps)
        share = (1 + np.arange(len(segment)) - (steps.cumsum() - steps)[segment]) / (steps[segment] + 1)
        points += [path, path[segment] + between[segment] * share[:, None]]
    return np.concatenate(points)
