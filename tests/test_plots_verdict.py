"""Figures of the verdict: what is drawn is what was computed, and what cannot be drawn is said."""

import numpy as np
import pandas as pd
import pytest

from labkit.decide.answers_verdict import best_table, concurrency_answer, draft_length_answer
from labkit.decide.composed import cost_rows
from labkit.decide.formulas import formula_table
from labkit.decide.step_costs import step_costs
from labkit.decide.surface import Surface, select, verdict_surface
from labkit.errors import InputError
from labkit.plots.breakeven import plot_breakeven
from labkit.plots.contours import figure_contours
from labkit.plots.verdict import COLORS, figure_cause, figure_concurrency, figure_draft_length
from tests.worlds import AcceptanceWorld, StepWorld, acceptance_rows, step_rows

WORLD = StepWorld(
    backends=("triton_split", "triton_nosplit"),
    reads=lambda name, q: 6.0 if name == "triton_nosplit" and q > 1 else 1.0,
    context_lens=(1024, 16384, 65536),
    batch_sizes=(1, 8, 64),
    noise=0.02,
    kv_ms_per_1k=0.02,
)
TEXT = AcceptanceWorld(target="qwen3-8b", drafter="eagle3", num_speculative_tokens=7, keep=0.75, spread=0.05)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return step_rows(WORLD)


@pytest.fixture(scope="module")
def surface(rows: pd.DataFrame) -> Surface:
    return select(verdict_surface(rows, acceptance_rows(TEXT), resamples=200), drafter="eagle3")


@pytest.fixture(scope="module")
def cost_alone(rows: pd.DataFrame) -> Surface:
    return verdict_surface(rows, None, resamples=200)


def texts(figure) -> str:
    return " ".join(text.get_text() for ax in figure.axes for text in ax.texts) + " ".join(
        text.get_text() for text in figure.texts
    )


def test_contours_show_the_needed_length_over_context_and_batch(surface: Surface) -> None:
    figure = figure_contours(surface.result)
    nosplit = figure.axes[0]
    assert nosplit.get_title(loc="left") == "triton_nosplit"
    levels = [float(text.get_text()) for text in nosplit.texts]
    cells = surface.result.cells[surface.result.cells["verify_backend"] == "triton_nosplit"]
    assert cells["relative_step_cost"].min() <= min(levels) <= max(levels) <= cells["relative_step_cost"].max()
    assert "k = 7" in texts(figure)
    one = select(verdict_surface(step_rows(WORLD.with_(batch_sizes=(1,))), 3.0, resamples=200), drafter="eagle3")
    with pytest.raises(InputError, match=r"got 3 context\(s\) and 1 batch size\(s\)"):
        figure_contours(one.result)
    with pytest.raises(InputError, match="want two batch sizes"):
        figure_concurrency(one.result)


def test_bars_of_the_cause_add_up_to_the_printed_length(surface: Surface) -> None:
    figure = figure_cause(surface.waterfall, surface.result)
    ax = figure.axes[0]
    assert len(ax.get_yticklabels()) == 6
    by_row: dict[float, float] = {}
    for bar in ax.patches:
        by_row[bar.get_y()] = by_row.get(bar.get_y(), 0.0) + bar.get_width()
    printed = [float(text.get_text()) for text in ax.texts]
    assert list(by_row.values()) == pytest.approx(printed, abs=0.03)
    assert set(surface.waterfall["part"]) <= set(COLORS)


def test_the_speedup_over_k_starts_at_one_and_carries_the_formulas(
    rows: pd.DataFrame, surface: Surface, cost_alone: Surface
) -> None:
    table = formula_table(step_costs(cost_rows(rows)), surface.result.cells)
    figure = figure_draft_length(surface.result, table)
    ax = figure.axes[0]
    curves = [line for line in ax.get_lines() if len(line.get_xdata()) == 3]
    assert all((line.get_xdata()[0], line.get_ydata()[0]) == (0, 1) for line in curves)
    assert len(curves) == 2 + 3
    with pytest.raises(InputError, match="want cells with a speed-up"):
        figure_draft_length(cost_alone.result)


def test_the_turning_point_is_marked_where_it_was_computed(surface: Surface) -> None:
    figure = figure_concurrency(surface.result)
    marked = [line.get_xdata()[0] for ax in figure.axes for line in ax.get_lines() if line.get_gid() == "guide"]
    at = [c["batch_size"] for curve in surface.result.turning_points if curve["num_speculative_tokens"] == 7
          for c in curve["crossovers"]]  # fmt: skip
    assert at
    assert set(np.round(at, 6)) <= set(np.round(np.array(marked, float), 6))


def test_imposed_lengths_are_labelled_lines(surface: Surface) -> None:
    cells = verdict_surface(step_rows(WORLD.with_(batch_sizes=(1,), q_lens=(8,))), None, resamples=200).result.cells
    ax = plot_breakeven(cells[cells["drafter"] == "eagle3"], lengths={"imposed": 3.25})
    assert 3.25 in [line.get_ydata()[0] for line in ax.get_lines()]
    ends = [artist for artist in ax.get_children() if hasattr(artist, "ends")]
    assert "imposed 3.25" in [text.get_text() for artist in ends for text in artist.texts]


def test_answers_name_the_best_k_and_the_turning_point(surface: Surface, cost_alone: Surface) -> None:
    text = draft_length_answer(surface)
    assert "verify on triton_split, prose: k = 7 everywhere loses at most" in text
    assert "off at" in text
    assert "triton_nosplit, context 16K, k = 7: pays up to" in concurrency_answer(surface)
    table = best_table(surface)
    assert table.loc[("prose", "triton_nosplit", 65536)].str.startswith("off").any()
    alone = select(cost_alone)
    assert "only the break-even length is known" in draft_length_answer(alone)
    assert best_table(alone).empty


def test_the_answer_on_concurrency_claims_no_more_than_the_verdicts() -> None:
    """A curve without a turning point says its verdicts, up to its own largest batch, and that a length was imposed."""
    rows = step_rows(WORLD.with_(batch_sizes=(1, 4, 16), q_lens=(8,), noise=0.3))
    long = rows["context_len"] == rows["context_len"].max()
    imposed = select(verdict_surface(rows[~long | (rows["batch_size"] < 16)], 1.2, resamples=200))
    text = concurrency_answer(imposed)
    assert "imposed acceptance length 1.2" in text
    cells = imposed.result.cells
    for line in (line for line in text.splitlines() if "at every batch up to" in line):
        backend, rest = line.removeprefix("- verify on ").split(": ")
        states, most = rest.split(" at every batch up to ")
        own = cells[(cells["verify_backend"] == backend) & (cells["batch_size"] <= int(most.split(",")[0]))]
        assert set(states.split(" or ")) <= set(own["verdict"].replace("cannot_pay", "loses"))
    assert "at every batch up to 4, contexts 64K" in text


def test_a_setting_is_selected_or_the_known_ones_are_named(cost_alone: Surface) -> None:
    with pytest.raises(InputError, match="drafter: want one of eagle3, none"):
        select(cost_alone, drafter="mtp")
    with pytest.raises(InputError, match="want one of gpu, target"):
        select(cost_alone, nosuch=1)
