"""Texts that find their own place at draw time: labels at line ends, and notes that keep off the curves.

Both are artists, so that positions follow every later change of size, renderer or data limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox, IdentityTransform

from labkit.style import NOTE_SIZE


def spread(
    targets: Sequence[float], sizes: Sequence[float], *, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """Centres nearest to ``targets`` (least squares) of intervals of the given ``sizes`` that keep their order and never overlap.

    Pool-adjacent-violators on the targets shifted by the room that the intervals before them need; the result is clipped to
    ``[low, high]`` where it fits. Any unit; float64 ``[num_labels]`` in the order given.

    Raises
    ------
    ValueError
        If ``targets`` and ``sizes`` differ in length.
    """
    if len(targets) != len(sizes):
        raise ValueError(f"sizes: want one per target ({len(targets)}); got {len(sizes)}")
    order = np.argsort(np.asarray(targets, dtype=float), kind="stable")
    size = np.asarray(sizes, dtype=float)[order]
    before = np.concatenate([[0.0], np.cumsum((size[:-1] + size[1:]) / 2)]) if len(size) else size
    blocks: list[list[float]] = []  # [mean, count] of pooled labels
    for value in np.asarray(targets, dtype=float)[order] - before:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            blocks[-1] = [
                (blocks[-1][0] * blocks[-1][1] + mean * count) / (blocks[-1][1] + count),
                blocks[-1][1] + count,
            ]
    shifted = np.array([mean for mean, count in blocks for _ in range(int(count))])
    if len(shifted):
        # Clipping the shifted values keeps them in order, so nothing can overlap afterwards.
        ceiling = high - size[-1] / 2 - before[-1]
        shifted = np.clip(shifted, low + size[0] / 2, max(ceiling, low + size[0] / 2))
    centres = np.empty(len(size))
    centres[order] = shifted + before
    return centres


class EndLabels(Artist):
    """Labels right of an axes at the heights of its line ends, spread so that they never overlap.

    A thin leader joins a label to its line where the label had to move or the line ends early.
    """

    def __init__(self, ax: Axes, *, gap_points: float = 4.0):
        super().__init__()
        self.set_figure(ax.figure)
        self.host = ax
        self.gap_points = gap_points
        self.ends: list[tuple[float, float]] = []
        self.texts: list[Text] = []
        self.leaders: list[Line2D] = []
        self.set_zorder(5)
        self.set_clip_on(False)
        ax.add_artist(self)
        self.set_clip_path(None)

    def add(self, x: float, y: float, text: str, *, color: str, size: float = 7.0) -> Text:
        """Label the end (x, y), in data coordinates."""
        label = Text(
            0, 0, text, color=color, size=size, ha="left", va="center", transform=IdentityTransform()
        )
        leader = Line2D([], [], color=color, linewidth=0.5, alpha=0.7, transform=IdentityTransform())
        for artist in (label, leader):
            artist.set_figure(self.host.figure)
        self.ends.append((x, y))
        self.texts.append(label)
        self.leaders.append(leader)
        return label

    def place(self, renderer: RendererBase) -> None:
        """Put every label where this renderer's text sizes want it, in display coordinates."""
        if not self.texts:
            return
        box, pixel = self.host.bbox, renderer.points_to_pixels(1.0)
        ends = self.host.transData.transform(np.array(self.ends, dtype=float))
        heights = [text.get_window_extent(renderer).height + 1.0 * pixel for text in self.texts]
        targets = np.clip(ends[:, 1], box.y0, box.y1)
        centres = spread(list(targets), heights, low=box.y0 - 4 * pixel, high=box.y1 + 4 * pixel)
        left = box.x1 + self.gap_points * pixel
        for text, leader, (x_end, _), target, centre in zip(
            self.texts, self.leaders, ends, targets, centres, strict=True
        ):
            text.set_position((left, centre))
            start = min(x_end + 3 * pixel, box.x1)
            moved = abs(centre - target) > 2 * pixel or box.x1 - x_end > 14 * pixel
            leader.set_data(([start, box.x1, left - pixel], [target, target, centre]) if moved else ([], []))

    def draw(self, renderer: RendererBase) -> None:
        """Place, then draw."""
        if self.get_visible():
            self.place(renderer)
            for artist in (*self.leaders, *self.texts):
                artist.draw(renderer)

    def get_window_extent(self, renderer: RendererBase | None = None) -> Bbox:
        """Box around the labels, in display coordinates."""
        renderer = renderer or self.host.figure._get_renderer()  # type: ignore[union-attr]
        self.place(renderer)
        return (
            Bbox.union([text.get_window_extent(renderer) for text in self.texts])
            if self.texts
            else Bbox.null()
        )

    def get_tightbbox(self, renderer: RendererBase | None = None) -> Bbox | None:
        """As `get_window_extent`; None when there are no labels, so that a layout ignores it."""
        return self.get_window_extent(renderer) if self.texts else None


@dataclass(frozen=True)
class _Note:
    """One note and where it may go: anchor in data coordinates, text, and how far it may climb from the anchor."""

    x: float
    y: float
    text: Text
    sides: tuple[str, ...]


class Notes(Artist):
    """Notes inside an axes. Each takes, of the places beside its anchor, the one that covers the fewest curves and other notes."""

    _LEVELS = 16

    def __init__(self, ax: Axes):
        super().__init__()
        self.set_figure(ax.figure)
        self.host = ax
        self.notes: list[_Note] = []
        self.set_zorder(6)
        ax.add_artist(self)
        self.set_clip_path(None)
        self.set_in_layout(False)

    @property
    def texts(self) -> list[Text]:
        """The notes' texts, in the order they were added."""
        return [note.text for note in self.notes]

    def add(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str,
        sides: Sequence[str] = ("right", "left"),
        size: float = NOTE_SIZE,
    ) -> Text:
        """Put ``text`` near (x, y) in data coordinates, on one of ``sides`` ('right', 'left', 'centre'), above the anchor or at it."""
        label = Text(
            0, 0, text, color=color, size=size, ha="left", va="bottom", transform=IdentityTransform()
        )
        label.set_figure(self.host.figure)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6})
        self.notes.append(_Note(x, y, label, tuple(sides)))
        return label

    def place(self, renderer: RendererBase) -> None:
        """Choose a place for every note in turn."""
        pixel = renderer.points_to_pixels(1.0)
        obstacles = _obstacle_points(self.host, pixel)
        placed: list[Bbox] = []
        for note in self.notes:
            size = note.text.get_window_extent(renderer)
            boxes = self._candidates(note, size.width, size.height, pixel)
            costs = [self._cost(box, level, obstacles, placed, pixel) for level, box in boxes]
            best = boxes[int(np.argmin(costs))][1]
            note.text.set_position((best.x0, best.y0))
            placed.append(best)

    def _candidates(self, note: _Note, width: float, height: float, pixel: float) -> list[tuple[float, Bbox]]:
        x, y = self.host.transData.transform((note.x, note.y))
        gap = 3.0 * pixel
        left = {"right": x + gap, "left": x - gap - width, "centre": x - width / 2}
        frame = self.host.bbox
        boxes = []
        for level in range(self._LEVELS):
            for preference, side in enumerate(note.sides):
                x0 = left[side]
                if side == "centre":
                    x0 = min(max(x0, frame.x0 + gap), frame.x1 - width)
                y0 = y + gap * 0.7 + level * height * 0.5
                boxes.append((level + 0.6 * preference, Bbox.from_bounds(x0, y0, width, height)))
        return boxes

    def _cost(
        self, box: Bbox, level: float, obstacles: np.ndarray, placed: Sequence[Bbox], pixel: float
    ) -> float:
        frame, margin = self.host.bbox, 1.2 * pixel
        outside = max(frame.x0 - box.x0, 0) + max(box.x1 - frame.x1, 0) + max(box.y1 - frame.y1, 0)
        hit = (
            (obstacles[:, 0] > box.x0 - margin) & (obstacles[:, 0] < box.x1 + margin)
            & (obstacles[:, 1] > box.y0 - margin) & (obstacles[:, 1] < box.y1 + margin)
        ).sum()  # fmt: skip
        clash = sum(box.padded(margin).overlaps(other) for other in placed)
        return level + 4.0 * hit + 1000.0 * clash + 50.0 * outside / pixel

    def draw(self, renderer: RendererBase) -> None:
        """Place, then draw."""
        if self.get_visible():
            self.place(renderer)
            for note in self.notes:
                note.text.draw(renderer)


def _obstacle_points(ax: Axes, pixel: float) -> np.ndarray:
    """Points every few pixels along the visible curves and error bars of ``ax``, in display coordinates ``[num_points, 2]``.

    Lines whose gid is ``"guide"`` (drop lines, ceilings) may be written over and do not count.
    """
    paths = [
        line.get_transform().transform(line.get_xydata())
        for line in ax.get_lines()
        if line.get_visible() and line.get_gid() != "guide" and len(line.get_xydata())
    ]
    for collection in ax.collections:
        if isinstance(collection, LineCollection):
            paths += [ax.transData.transform(segment) for segment in collection.get_segments()]
    points = [np.empty((0, 2))]
    for path in paths:
        path = path[np.isfinite(path).all(axis=1)]
        points.append(path)
        for start, end in zip(path[:-1], path[1:], strict=True):
            steps = int(np.hypot(*(end - start)) / (1.5 * pixel))
            points.append(start + (end - start) * np.linspace(0, 1, steps + 2)[1:-1, None])
    return np.concatenate(points)
