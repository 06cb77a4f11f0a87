"""Plots by their artists: what is drawn, where labels land, that nothing overlaps or leaves the figure."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from labkit.breakeven import breakeven
from labkit.decide.acceptance_positions import position_table
from labkit.errors import InputError
from labkit.plots import canvas, style
from labkit.plots.acceptance import (
    DEFINITIONS,
    figure_acceptance,
    plot_acceptance,
)
from labkit.plots.attention import figure_attention, plot_attention_time, plot_bandwidth_share
from labkit.plots.attention_table import attention_table, fitting_context, kernel_segments, one_setting, slope_us_per_1k
from labkit.plots.breakeven import plot_breakeven, plot_speedup
from labkit.plots.curves import interpolate, undecided_spans
from labkit.plots.labels import EndLabels, Notes, spread
from labkit.plots.panels import breakeven_floor, describe, figure_breakeven, figure_speedup
from tests.synthetic import CPU, GPU, acceptance_rows, attention_rows, loop_rows

GPU_SMALL = dataclasses.replace(GPU, contexts=(1024, 8192, 32768, 131072), num_rounds=6, num_prompts=6)
SIDECARS = {"20260131T120000Z-cccccc": {"calibration": {"read_gb_per_s": 4000.0, "cache_bytes": 50 << 20}}}


@pytest.fixture(scope="module")
def cpu():
    return breakeven(loop_rows(CPU), acceptance_rows(CPU), resamples=300)


@pytest.fixture(scope="module")
def gpu():
    return breakeven(loop_rows(GPU_SMALL), acceptance_rows(GPU_SMALL), resamples=300)


@pytest.fixture
def ax() -> Axes:
    with style.context():
        return canvas.new_figure(3.4, 2.6).add_subplot()


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


# --- placing
# ---------------------------------------------------------------------------------------------------------


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


# --- style
# -----------------------------------------------------------------------------------------------------------


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


# --- break-even
# ------------------------------------------------------------------------------------------------------


def one(cells: pd.DataFrame, **values: object) -> pd.DataFrame:
    for name, value in values.items():
        cells = cells[cells[name] == value]
    return cells


def test_breakeven_axes(cpu, ax):
    cells = one(cpu.cells, num_speculative_tokens=4, workload="prose")
    returned = plot_breakeven(cells, ax=ax, crossovers=cpu.crossovers, floor=breakeven_floor(cells))
    assert returned is ax
    assert ax.get_ylabel() == "tokens per verify step"
    assert ax.get_yticks().tolist() == [1, 2, 3, 4, 5]
    assert ax.get_ylim()[0] < 1
    assert ax.get_ylim()[1] > 5
    assert end_texts(ax) == ["k+1 = 5", "one KV read", "per_token", "sdpa", "accepted"]
    (note,) = note_texts(ax)
    assert note.startswith("pays up to ")
    # Measured costs are solid, the modelled floor is dotted.
    assert [line.get_linestyle() for line in curves(ax)] == ["-", "-"]
    costs = one(cells, verify_backend="per_token").sort_values("context_len")["relative_step_cost"].to_numpy()
    assert any(np.allclose(line.get_ydata(), costs) for line in ax.get_lines() if len(line.get_ydata()) == len(costs))


def test_crossing_lies_on_both_curves(cpu, ax):
    cells = one(cpu.cells, num_speculative_tokens=2, workload="prose")
    plot_breakeven(cells, ax=ax, crossovers=cpu.crossovers)
    (curve,) = [
        c for c in cpu.crossovers if c["crossovers"] and c["workload"] == "prose" and c["num_speculative_tokens"] == 2
    ]
    x = curve["crossovers"][0]["context_len"]
    rings = [line for line in ax.get_lines() if line.get_marker() == "o" and line.get_markerfacecolor() == "none"]
    assert [line.get_xdata()[0] for line in rings] == [x]
    for line in ax.get_lines():
        points = line.get_xdata()
        # The two long lines that rise through it: per_token's cost and the acceptance.
        if len(points) > 20 and (
            line.get_color() in (style.INK, style.series_styles(["per_token"])["per_token"].color)
        ):
            assert np.interp(np.log2(x), np.log2(points), line.get_ydata()) == pytest.approx(
                rings[0].get_ydata()[0], rel=2e-3
            )


def test_cannot_pay_gets_an_arrow_and_nothing_is_drawn_above_the_ceiling(gpu, ax):
    cells = one(gpu.cells, batch_size=8)
    plot_breakeven(cells, ax=ax, crossovers=gpu.crossovers)
    needs = one(cells, verify_backend="triton_nosplit", context_len=131072)["relative_step_cost"].iloc[0]
    texts = [text.get_text() for text in ax.texts]
    assert f"needs {needs:.1f}, cannot pay" in texts
    assert any(getattr(text, "arrow_patch", None) for text in ax.texts)
    assert max(line.get_ydata().max() for line in curves(ax)) > 8
    for line in curves(ax):  # cut at the ceiling
        assert line.get_clip_box().y1 == pytest.approx(ax.transData.transform((1024, 8))[1])


def test_many_crossings_become_one_list(gpu, ax):
    plot_breakeven(one(gpu.cells, batch_size=8), ax=ax, crossovers=gpu.crossovers)
    lines = note_texts(ax)
    crossings = [c for c in gpu.crossovers if c["batch_size"] == 8 and c["crossovers"]]
    backends = {c["verify_backend"] for c in crossings}
    # A heading per backend, so that the list reads without colour.
    assert {line for line in lines if not line.startswith(" ")} == {f"{name} pays up to" for name in backends}
    assert len(lines) == len(backends) + sum(len(c["crossovers"]) for c in crossings)
    assert any(line.startswith("  code editing ") for line in lines)


def test_undecided_zone_is_shaded_where_the_interval_holds_one():
    contexts = np.array([1024.0, 4096.0, 16384.0])
    (span,) = undecided_spans(contexts, np.array([1.5, 0.9, 0.5]), np.array([2.0, 1.1, 0.8]))
    assert 1024 < span[0] < 4096 < span[1] < 16384
    assert undecided_spans(contexts, np.array([1.5, 1.4, 1.3]), np.array([2.0, 1.9, 1.8])) == []
    assert undecided_spans(contexts, np.full(3, np.nan), np.full(3, np.nan)) == []


def test_borrowed_acceptance_is_hollow(cpu, ax):
    cells = one(cpu.cells, num_speculative_tokens=4, workload="prose").assign(origin="transferred")
    plot_breakeven(cells, ax=ax)
    diamonds = [line for line in ax.get_lines() if line.get_marker() == "D"]
    assert [line.get_markerfacecolor() for line in diamonds] == ["white"]
    assert "accepted (borrowed)" in end_texts(ax)


def test_modelled_costs_are_dashed_and_imposed_lengths_are_labelled_lines(ax):
    result = breakeven(loop_rows(CPU), 2.5, resamples=200)
    cells = one(result.cells, num_speculative_tokens=4)
    plot_breakeven(cells, ax=ax)
    assert "imposed 2.5" in end_texts(ax)
    other = canvas.new_figure(3.4, 2.6).add_subplot()
    plot_breakeven(cells.assign(origin="modelled"), ax=other)
    assert {line.get_linestyle() for line in curves(other)} == {"--"}


def test_acceptance_is_joined_only_where_measured(cpu, ax):
    cells = one(cpu.cells, num_speculative_tokens=4, workload="prose").copy()
    names = [
        "mean_acceptance_length",
        "mean_acceptance_length_low",
        "mean_acceptance_length_high",
        "speedup",
        "speedup_low",
        "speedup_high",
    ]
    cells.loc[cells["context_len"] == 6144, [*names]] = np.nan
    plot_breakeven(cells, ax=ax)
    dark = [line for line in ax.get_lines() if line.get_color() == style.INK and len(line.get_xdata()) > 1]
    assert max(line.get_xdata().max() for line in dark) == 2048


def test_costs_that_follow_the_text_need_one_workload_per_axes(cpu, ax):
    with pytest.raises(InputError, match="relative_step_cost differs by workload"):
        plot_breakeven(one(cpu.cells, num_speculative_tokens=4), ax=ax)
    with pytest.raises(InputError, match="want one num_speculative_tokens per axes; got 2, 4"):
        plot_breakeven(cpu.cells, ax=ax)
    with pytest.raises(InputError, match="want at least one"):
        plot_breakeven(cpu.cells[:0], ax=ax)


def test_one_context_shows_its_intervals_as_bars(cpu):
    cells = one(cpu.cells, num_speculative_tokens=4, workload="prose", context_len=2048)
    for draw in (plot_breakeven, plot_speedup):
        ax = draw(cells, ax=canvas.new_figure(3.4, 2.6).add_subplot())
        bars = [line for group in ax.collections if isinstance(group, LineCollection) for line in group.get_segments()]
        assert len(bars) == (3 if draw is plot_breakeven else 2)
        assert_well_placed(ax.figure)


def test_speedup_axes(cpu, ax):
    plot_speedup(one(cpu.cells, num_speculative_tokens=4, workload="prose"), ax=ax, labels={"sdpa": "SDPA"})
    assert "SDPA" in end_texts(ax)
    assert "plain decode" in end_texts(ax)
    baseline = [line for line in ax.get_lines() if np.allclose(line.get_ydata(), 1.0)]
    assert to_hex(baseline[0].get_color()) == "#000000"
    with pytest.raises(InputError, match="one per context and verify_backend"):
        plot_speedup(one(cpu.cells, num_speculative_tokens=4), ax=ax)


def test_ax_none_makes_a_figure(cpu):
    from matplotlib import pyplot

    ax = plot_speedup(one(cpu.cells, num_speculative_tokens=4, workload="prose"))
    assert ax.figure.get_size_inches()[0] == pytest.approx(style.COLUMN_WIDTH_IN)
    pyplot.close(ax.figure)


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
@pytest.mark.parametrize("draw", [figure_breakeven, figure_speedup])
def test_breakeven_figures_are_well_placed(cpu, gpu, draw, width_in):
    cases = [(cpu, 4)] if width_in < 5 else [(cpu, 4), (gpu, 2 if draw is figure_breakeven else 6)]
    for result, panels in cases:
        figure = draw(result, width_in=width_in)
        assert sum(ax.get_visible() for ax in figure.axes) == panels
        assert figure.get_size_inches()[0] == width_in
        assert_well_placed(figure)


def test_panels_by_batch_share_y(gpu):
    figure = figure_breakeven(gpu)
    assert [ax.get_title("left") for ax in figure.axes] == ["batch 1", "batch 8"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_header_says_what_was_measured(cpu, gpu):
    text = describe(gpu.cells, "fastest", without=["batch_size"], labels={"nvidia-h200": "H200"})
    for part in ("H200", "qwen3-32b", "bfloat16", "eagle3 drafter", "k = 7", "baseline: fastest plain decode of"):
        assert part in text
    assert "batch" not in text
    shown = " ".join(text.get_text() for text in figure_breakeven(cpu).texts)
    assert "smollm2-135m" in shown
    assert "ngram drafter" in shown


def test_one_figure_holds_one_model(cpu):
    mixed = dataclasses.replace(cpu, cells=pd.concat([cpu.cells, cpu.cells.assign(target="other")]))
    with pytest.raises(InputError, match="one figure holds one target; got smollm2-135m, other"):
        figure_breakeven(mixed)
    several = pd.concat([cpu.cells, cpu.cells.assign(batch_size=8)])
    with pytest.raises(InputError, match="at most two of num_speculative_tokens, batch_size, workload"):
        figure_breakeven(dataclasses.replace(cpu, cells=several))


def test_floor_of_an_unknown_model_is_empty(cpu):
    assert breakeven_floor(cpu.cells.assign(target="nobody-7b")).empty
    assert (breakeven_floor(cpu.cells)["relative_step_cost"] < 1.1).all()


def test_lines_are_straight_in_log_log():
    x = np.array([1024.0, 4096.0])
    fine, (y,) = interpolate(x, pd.DataFrame({"c": [1.0, 4.0]}), ["c"])
    assert np.interp(2048, fine, y) == pytest.approx(2.0)


# --- attention
# -------------------------------------------------------------------------------------------------------


def test_attention_table_and_slopes():
    rows = attention_rows(GPU)
    table = attention_table(rows, 4000.0)
    assert len(table) == 3 * 2 * len(GPU.contexts)
    cell = table[(table["backend"] == "per_token") & (table["q_len"] == 1)].iloc[-1]
    assert cell["floor_us"] == pytest.approx(2 * 8 * 128 * 2 * (131072 + 1) / 4000 / 1e3)
    assert 0.5 < cell["share"] < 1
    assert cell["attention_us_low"] < cell["attention_us"] < cell["attention_us_high"]
    assert attention_table(rows)["share"].isna().all()  # unknown bandwidth, unknown share
    assert slope_us_per_1k(np.array([1024.0, 2048.0]), np.array([3.0, 5.0])) == pytest.approx(2.0)
    assert np.isnan(slope_us_per_1k(np.array([1024.0]), np.array([3.0])))
    split = table[(table["backend"] == "triton_split") & (table["q_len"] == 8)]
    assert [len(part) for part in kernel_segments(split)] == [4, 4]
    assert fitting_context(table, 2 * 8 * 128 * 2 * 1000) == pytest.approx(1000, rel=1e-3)


def test_attention_table_refuses_mixtures():
    rows = attention_rows(GPU)
    with pytest.raises(InputError, match="want one page_size; got 16, 64"):
        attention_table(pd.concat([rows, rows.assign(page_size=64)]))
    with pytest.raises(InputError, match="none has status ok"):
        attention_table(rows.assign(status="error"))


LATER = "20260201T000000Z-dddddd"


def test_a_cell_of_several_runs_comes_from_the_latest_with_its_own_floor():
    rows = attention_rows(GPU).assign(backend_digest="a")
    again = rows[rows["context_len"] == 1024].assign(run_id=LATER, attention_ms=9.0)
    table = attention_table(pd.concat([again, rows]), {rows["run_id"].iloc[0]: 4000.0, LATER: 2000.0})
    assert table["newest"].all()
    assert len(table) == len(attention_table(rows))
    new = table["run_id"] == LATER
    assert set(table.loc[new, "context_len"]) == {1024}
    assert set(table.loc[new, "attention_us"]) == {9000.0}
    floor_us = table["kv_bytes"] / np.where(new, 2000.0, 4000.0) / 1e3
    assert table["floor_us"].to_numpy() == pytest.approx(floor_us.to_numpy())


def test_older_versions_of_a_backend_are_faint_lines_behind(ax):
    rows = attention_rows(GPU).assign(backend_digest="a")
    edited = rows[rows["backend"] == "per_token"]
    edited = edited.assign(run_id=LATER, backend_digest="b", attention_ms=edited["attention_ms"] / 2)
    both = pd.concat([rows, edited])
    table = attention_table(both)
    assert table.groupby(["backend", "backend_digest"])["newest"].first().to_dict() == {
        ("per_token", "a"): False,
        ("per_token", "b"): True,
        ("triton_nosplit", "a"): True,
        ("triton_split", "a"): True,
    }
    plot_attention_time(both, ax=ax, read_gb_per_s=4000.0)
    (faint,) = curves(ax, 0.6)
    assert faint.get_alpha() < 0.5
    newest = next(line for line in curves(ax) if line.get_color() == faint.get_color())
    assert faint.get_ydata()[-1] == pytest.approx(2 * newest.get_ydata()[-1])
    assert faint.get_zorder() < newest.get_zorder()
    assert sum(text.startswith("per_token") for text in end_texts(ax)) == 1
    legend = [text.get_text() for text in figure_attention(both, sidecars=SIDECARS).legends[0].get_texts()]
    assert "older version of the backend" in legend


def test_one_setting_is_the_fullest_with_its_failed_points():
    rows = attention_rows(GPU).assign(status="ok")
    failed = rows[rows["context_len"] == 131072].assign(status="oom", attention_ms=np.nan, l2_state=None)
    small = rows[rows["context_len"] < 4096].assign(batch_size=4)
    mixed = pd.concat([small, rows[rows["context_len"] < 131072], failed])
    chosen = one_setting(mixed)
    assert set(chosen["batch_size"]) == {1}
    assert set(chosen["status"]) == {"ok", "oom"}
    assert set(one_setting(mixed, batch_size=4)["batch_size"]) == {4}
    with pytest.raises(InputError, match="batch_size: want one of 1, 4; got 2"):
        one_setting(mixed, batch_size=2)


def ten_backends() -> pd.DataFrame:
    rows = attention_rows(GPU)
    names = ["flashinfer_fa2", "flashinfer_fa3", "fa3", "sdpa", "flex", "triton_per_token", "triton_segmented_2d"]
    names += ["triton_ladder_split", "triton_ladder_packed"]
    source = rows[rows["backend"] == "triton_split"]
    more = [
        source.assign(backend=name, attention_ms=source["attention_ms"] * (1 + 0.01 * index), resolved_kernel=name)
        for index, name in enumerate(names)
    ]
    return pd.concat([rows, *more], ignore_index=True)


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
def test_ten_backends_do_not_overlap_and_the_rest_is_counted(width_in):
    figure = figure_attention(ten_backends(), sidecars=SIDECARS, width_in=width_in)
    assert_well_placed(figure)
    texts = " ".join(text.get_text() for text in figure.texts)
    assert "10 of 12 backends" in texts
    assert "pages of 16" in texts
    assert "plan not included" in texts
    assert not any(text.startswith("triton_ladder") for text in end_texts(figure.axes[0]))
    few = figure_attention(ten_backends(), sidecars=SIDECARS, backends=["fa3", "triton_ladder_split"])
    assert {text.split("\n")[0] for text in end_texts(few.axes[0])} == {"fa3", "triton_ladder_split", "floor"}
    with pytest.raises(InputError, match=r"backends: want some of .*; got 'fa9'"):
        figure_attention(ten_backends(), backends=["fa9"])


def test_attention_time_axes(ax):
    plot_attention_time(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0, cache_bytes=50 << 20)
    assert ax.get_yscale() == "log"
    labels = end_texts(ax)
    assert any(text.startswith("triton_nosplit\n+4") and text.endswith("us per 1K") for text in labels)
    assert labels[-1].startswith("floor\n+1.0")
    assert note_texts(ax) == ["keys split"]
    solid, dashed = curves(ax), curves(ax, 0.8)
    assert len(solid) == len(dashed) == 4  # three backends, one of them in two pieces: the gap at the kernel change
    assert {line.get_color() for line in solid} == {line.get_color() for line in dashed}
    zone = ax.patches[0]
    assert zone.get_x() + zone.get_width() == pytest.approx((50 << 20) / (2 * 8 * 128 * 2), rel=1e-3)


def test_bandwidth_share_axes(ax):
    plot_bandwidth_share(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0)
    assert ax.get_ylim() == (0.0, 1.08)
    assert "read bandwidth" in end_texts(ax)
    with pytest.raises(InputError, match="read_gb_per_s: want the read bandwidth"):
        plot_bandwidth_share(attention_rows(GPU), ax=ax)
    with pytest.raises(InputError, match="q_len: want one of 1, 8; got 4"):
        plot_bandwidth_share(attention_rows(GPU), ax=ax, read_gb_per_s=4000.0, q_len=4)


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
def test_attention_figures_are_well_placed(width_in):
    for world in (CPU, GPU):
        figure = figure_attention(attention_rows(world), sidecars=SIDECARS, width_in=width_in)
        assert len(figure.axes) == 2
        assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
        assert_well_placed(figure)
    assert len(figure_attention(attention_rows(CPU), width_in=width_in).axes) == 1  # no bandwidth: no share


# --- acceptance
# ------------------------------------------------------------------------------------------------------


def test_positions_match_the_counts():
    rows = acceptance_rows(CPU)
    table = position_table(rows)
    part = table[(table["workload"] == "prose") & (table["num_speculative_tokens"] == 4)]
    assert part["position"].tolist() == [1, 2, 3, 4]
    assert (part["rate"].diff().dropna() <= 0).all()
    assert ((part["rate_low"] <= part["rate"]) & (part["rate"] <= part["rate_high"])).all()
    kept = rows[(rows["workload"] == "prose") & (rows["num_speculative_tokens"] == 4)]
    assert part["rate"].sum() == pytest.approx(kept["num_accepted_tokens"].sum() / kept["num_verify_steps"].sum())
    conditional = position_table(rows, definition="conditional")
    assert (conditional["rate"].dropna() >= table["rate"][conditional["rate"].notna()] - 1e-12).all()
    with pytest.raises(InputError, match="definition: want one of unconditional, conditional"):
        position_table(rows, definition="marginal")


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_definition_is_on_the_axis(definition):
    rows = one(acceptance_rows(CPU), num_speculative_tokens=4)
    first, second = canvas.new_figure(7, 3).subplots(1, 2)
    plot_acceptance(rows, "workload", ax=first, definition=definition)
    plot_acceptance(rows, "context", ax=second, definition=definition)
    assert first.get_xlabel() == second.get_ylabel() == DEFINITIONS[definition].label
    limits = {"without_bonus": (0, 4), "rate": (0, 1)}.get(definition, (1, 5))
    assert first.get_xlim() == second.get_ylim() == limits


def test_acceptance_by_position_axes(ax):
    rows = one(acceptance_rows(CPU), num_speculative_tokens=4)
    plot_acceptance(rows, "position", ax=ax, definition="conditional", labels={"prose": "Prose"})
    assert ax.get_xticks().tolist() == [1, 2, 3, 4]
    assert end_texts(ax) == ["code editing", "Prose"]
    assert "given that" in ax.get_ylabel()
    with pytest.raises(InputError, match="want one num_speculative_tokens per axes; got 2, 4"):
        plot_acceptance(acceptance_rows(CPU), "position", ax=ax)


def test_acceptance_bad_options(ax):
    rows = one(acceptance_rows(CPU), num_speculative_tokens=4)
    with pytest.raises(InputError, match="definition: want one of pooled"):
        plot_acceptance(rows, "workload", ax=ax, definition="tau")
    with pytest.raises(InputError, match="along: want one of position, workload, context; got 'time'"):
        plot_acceptance(rows, "time", ax=ax)
    with pytest.raises(InputError, match="num_speculative_tokens: want one of 2, 4; got 3"):
        figure_acceptance(acceptance_rows(CPU), num_speculative_tokens=3)
    with pytest.raises(InputError, match="want one target"):
        figure_acceptance(pd.concat([rows, rows.assign(target="other")]))


@pytest.mark.parametrize("width_in", [style.TEXT_WIDTH_IN, style.COLUMN_WIDTH_IN])
def test_acceptance_figures_are_well_placed(width_in):
    for world in (CPU, GPU_SMALL):
        assert_well_placed(figure_acceptance(acceptance_rows(world), width_in=width_in))
