"""Break-even and speed-up by their artists: what is drawn, where labels land, that nothing leaves the figure."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from labkit.breakeven import breakeven
from labkit.errors import InputError
from labkit.plots import canvas, style
from labkit.plots.breakeven import plot_breakeven, plot_speedup
from labkit.plots.curves import interpolate, undecided_spans
from labkit.plots.panels import breakeven_floor, describe, figure_breakeven, figure_speedup
from tests.drawn import GPU_SMALL, assert_well_placed, curves, end_texts, note_texts, one
from tests.synthetic import CPU, acceptance_rows, loop_rows


@pytest.fixture(scope="module")
def cpu():
    return breakeven(loop_rows(CPU), acceptance_rows(CPU), resamples=300)


@pytest.fixture(scope="module")
def gpu():
    return breakeven(loop_rows(GPU_SMALL), acceptance_rows(GPU_SMALL), resamples=300)


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
    with pytest.raises(InputError, match="per axes; got none"):
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
