"""Acceptance figures: positions, definitions, bad options."""

import pandas as pd
import pytest

from labkit.decide.acceptance_positions import position_table
from labkit.errors import InputError
from labkit.plots import canvas, style
from labkit.plots.acceptance import (
    DEFINITIONS,
    figure_acceptance,
    plot_acceptance,
)
from tests.drawn import GPU_SMALL, assert_well_placed, end_texts, one
from tests.synthetic import CPU, acceptance_rows


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
