"""Drafters side by side, on planted acceptances and costs."""

import dataclasses

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from labkit.acceptance import doubtful_drafters
from labkit.errors import InputError
from labkit.plots.drafters import drafter_label, figure_drafters, figure_pareto, pareto_table
from tests.drawn import end_texts
from tests.synthetic import CPU, acceptance_rows, loop_rows

HEAD = "smollm2-135m-autoregressive@12345678"
WORLDS = [
    dataclasses.replace(CPU, drafter="ngram", draft_ms=0.2, workloads={"prose": 0.3}),
    dataclasses.replace(CPU, drafter=HEAD, draft_ms=2.0, workloads={"prose": 0.6}),
    dataclasses.replace(CPU, drafter="slow", draft_ms=9.0, workloads={"prose": 0.3}),
]


@pytest.fixture(scope="module")
def rows():
    return pd.concat(map(acceptance_rows, WORLDS)), pd.concat(map(loop_rows, WORLDS))


def test_the_front_leaves_out_what_costs_more_and_yields_less(rows):
    table = pareto_table(*rows)
    assert set(table.loc[table["is_best"], "drafter"]) == {"ngram", HEAD}
    assert table.set_index("drafter").loc["slow", "draft_ms"].tolist() == [9.0, 9.0]


def test_figures_name_each_drafter(rows):
    for figure in (figure_drafters(rows[0]), figure_pareto(*rows)):
        figure.canvas.draw()
        texts = {text for ax in figure.axes for text in end_texts(ax)}
        assert {"ngram", "autoregressive", "slow"} <= texts
        plt.close(figure)


def test_what_cannot_stand_in_one_figure(rows):
    with pytest.raises(InputError, match="want one target"):
        figure_drafters(pd.concat([rows[0], rows[0].assign(target="other")]))
    with pytest.raises(InputError, match="want one that all drafters have"):
        figure_drafters(rows[0][rows[0]["drafter"].eq("ngram") == rows[0]["num_speculative_tokens"].eq(4)])
    with pytest.raises(InputError, match="want a drafter and k that both hold"):
        pareto_table(rows[0].assign(drafter="x"), rows[1])


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ngram", "ngram"),
        (HEAD, "autoregressive"),
        ("smollm2-135m-block@12345678+tree", "block, tree"),
        ("my-head@12345678", "my-head"),
    ],
)
def test_labels(name, label):
    assert drafter_label(name) == label


@pytest.mark.parametrize(("kept", "share"), [(0.0, "none"), (1.0, "all"), (0.5, None)])
def test_a_drafter_that_is_always_wrong_or_right_is_doubtful(kept, share):
    rows = acceptance_rows(CPU)
    lines = doubtful_drafters(rows.assign(num_accepted_tokens=(kept * rows["num_drafted_tokens"]).astype(int)))
    assert len(lines) == (share is not None)
    assert all(line.startswith(f"check the drafter: {share} of") for line in lines)
