"""Ticks, numbers and styles; labels and notes that keep off each other."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from labkit.plots import style
from labkit.plots.labels import Notes, spread


def test_spread_keeps_what_fits_and_separates_the_rest():
    assert spread([1.0, 5.0], [1, 1]).tolist() == [1.0, 5.0]
    assert spread([3.0, 3.0], [1, 1]).tolist() == [2.5, 3.5]
    assert spread([], []).size == 0


@pytest.mark.parametrize("seed", range(20))
def test_spread_never_overlaps_and_keeps_order(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 12))
    targets, sizes = rng.normal(0, 3, count), rng.uniform(0.5, 2, count)
    centres = spread(list(targets), list(sizes), low=-20, high=20)
    order = np.argsort(targets, kind="stable")
    gaps = np.diff(centres[order]) - (sizes[order][:-1] + sizes[order][1:]) / 2
    assert (gaps > -1e-9).all()
    assert centres.min() >= -20
    assert centres.max() <= 20
    fixed = spread(list(targets * 100), list(sizes))
    assert np.abs(fixed - targets * 100).max() < 6  # far apart: nearly nothing moves


def test_spread_wants_one_size_per_target():
    with pytest.raises(ValueError, match=r"sizes: want one per target \(2\); got 1"):
        spread([1, 2], [1])


def test_a_note_keeps_off_the_curve(ax):
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.plot([0, 1], [0.05, 0.05])
    notes = Notes(ax)
    notes.add([("pays up to 23K [21, 26]", "k")], stretch=(0.5, 0.0, 0.3))
    with style.context():
        ax.figure.draw_without_rendering()
        box = notes.texts[0].get_window_extent()
    assert box.y0 > ax.transData.transform((0, 0.05))[1]
    assert ax.bbox.x0 <= box.x0
    assert box.x1 <= ax.bbox.x1


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (512, "512"),
        (1024, "1K"),
        (1536, "1.5K"),
        (6144, "6K"),
        (23456, "23K"),
        (131072, "128K"),
        (2**20, "1M"),
        (725, "725"),
        (724.5, "720"),
    ],
)
def test_format_tokens(tokens, text):
    assert style.format_tokens(tokens) == text


def test_format_tokens_range():
    assert style.format_tokens_range(23 * 1024, 21 * 1024, 26 * 1024, (512, 131072)) == "23K [21, 26]"
    assert style.format_tokens_range(7.6 * 1024, 6.3 * 1024, 9 * 1024, (512, 131072)) == "7.6K [6.3, 9.0]"
    assert style.format_tokens_range(115 * 1024, 102 * 1024, None, (512, 131072)) == "115K [102, >128]"
    assert style.format_tokens_range(724, None, 890, (512, 6144)) == "720 [<510, 890]"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (512, 8192, [512, 1024, 2048, 4096, 8192]),
        (1024, 262144, [1024, 4096, 16384, 65536, 262144]),
        (512, 131072, [1024, 4096, 16384, 65536]),
        (3000, 3500, []),
    ],
)
def test_context_ticks(low, high, ticks):
    assert style.context_ticks(low, high) == ticks


def test_context_axis_is_log2_with_short_labels(ax):
    with style.context():
        style.context_axis(ax, 1024, 262144)
        ax.figure.draw_without_rendering()
        assert [label.get_text() for label in ax.get_xticklabels()] == ["1K", "4K", "16K", "64K", "256K"]
    assert ax.get_xscale() == "log"
    assert ax.xaxis.get_transform().base == 2


def test_series_styles_are_distinct_and_stable():
    styles = style.series_styles(["mine", "per_token", "sdpa", "other"])
    assert styles["sdpa"] == style.series_styles(["sdpa"])["sdpa"]
    assert len({entry.marker for entry in styles.values()}) == 4
    assert len({entry.color for entry in styles.values()}) == 4
    assert "#000000" not in {to_hex(entry.color) for entry in styles.values()}  # black is for baselines


def test_origins_are_drawn_apart():
    assert style.origin_style("measured").linestyle == "-"
    looks = {
        (str(look.linestyle), look.filled)
        for look in map(style.origin_style, ("measured", "modelled", "cited", "transferred"))
    }
    assert len(looks) == 4
    with pytest.raises(ValueError, match="origin: want one of measured"):
        style.origin_style("guessed")
