"""Predictions and the ladder on planted rows: confirmed, refuted, not measured, never across runs."""

import pandas as pd
import pytest

from labkit.decide.answers import attention_answer
from labkit.decide.predictions import PREDICTIONS, predictions, published_growth
from labkit.errors import InputError
from labkit.plots.floor import LADDER, figure_ladder, figure_over_floor, ladder_table
from tests.drawn import SIDECARS as WORLD_SIDECARS
from tests.drawn import all_texts, assert_well_placed
from tests.synthetic import CPU, GPU, attention_rows
from tests.test_diagnosis import RUN, SIDECARS, kernel, per_token, rows_of, split, unsplit

OTHER = RUN.replace("aaaaaa", "bbbbbb")
STATE = {"page_order": "permuted", "launch_mode": "graph", "l2_state": "cold"}
FACTORS = dict(zip(LADDER, (1.0, 0.08, 0.09, 0.05, 0.04), strict=True))


def backends(**makes):
    frames = [rows_of(make, q_lens=(1, 8), noise=0.01).assign(backend=name) for name, make in makes.items()]
    return pd.concat(frames, ignore_index=True).assign(**STATE)


def scaled(factor):
    def make(q_len, context_len, batch):
        cell = unsplit(q_len, context_len, batch)
        return cell | {"attention_us": cell["attention_us"] * factor}

    return make


def slow_at_short(q_len, context_len, batch):
    """A split that costs 80 us of merging."""
    cell = split(q_len, context_len, batch)
    return cell | {"attention_us": cell["attention_us"] + 80.0}


def ladder(run_id=RUN):
    return backends(**{name: scaled(factor) for name, factor in FACTORS.items()}).assign(run_id=run_id)


def test_each_prediction_can_be_confirmed():
    rows = backends(
        triton_nosplit=unsplit, triton_ladder_split=split, triton_segmented_2d=unsplit,
        triton_ladder_packed=scaled(0.1), triton_ladder_staged=scaled(0.07), triton_per_token=per_token,
        triton_split=slow_at_short, flashinfer_auto=unsplit, flashinfer_fa2=split,
    )  # fmt: skip
    table = predictions(rows, SIDECARS)
    assert len(table) == len(PREDICTIONS) == 7
    assert set(table["verdict"]) == {"confirmed"}, table[["verdict", "numbers"]].to_string()
    assert set(table["shape"]) == {"64/8/128"}
    assert "3.0 us per 64 keys, q_len 1 to 8" in table.loc[1, "numbers"]


def test_each_prediction_can_be_refuted():
    def fast(q_len, context_len, batch):
        return kernel(q_len, context_len, batch, splits=9, packed=False) | {"num_splits": 9}

    rows = backends(
        triton_nosplit=scaled(0.4), triton_ladder_split=scaled(0.3), triton_segmented_2d=scaled(0.1),
        triton_ladder_packed=scaled(0.5), triton_ladder_staged=scaled(0.1), triton_per_token=scaled(0.9),
        triton_split=scaled(0.1), flashinfer_auto=split, flashinfer_fa2=split,
    )  # fmt: skip
    rows.loc[rows["backend"] == "triton_ladder_split", "num_splits"] = 8
    table = predictions(rows, SIDECARS)
    assert set(table["verdict"]) == {"refuted"}, table[["verdict", "numbers"]].to_string()


def test_what_is_missing_or_in_another_run_is_not_measured():
    apart = pd.concat([backends(triton_nosplit=unsplit), backends(triton_per_token=per_token).assign(run_id=OTHER)])
    table = predictions(apart, SIDECARS)
    assert table["verdict"].tolist() == ["confirmed", *["not measured"] * 6]
    assert "needs triton_nosplit and triton_per_token in one run" in table.loc[6, "numbers"]


def test_the_shape_of_the_predictions_goes_first():
    wide = backends(triton_nosplit=unsplit)
    ref = backends(triton_nosplit=scaled(2.5)).assign(num_qo_heads=24, num_kv_heads=4, head_dim=256)
    table = predictions(pd.concat([wide, wide.assign(batch_size=4), ref]), SIDECARS)
    assert set(table["shape"]) == {"24/4/256"}
    assert table.loc[1, "verdict"] == "refuted"


def test_published_growth_beside_the_measured_one():
    contexts = (256, 2048)
    rows = pd.concat([
        rows_of(make, q_lens=(1,), contexts=contexts, noise=0.0).assign(backend=name, num_qo_heads=32)
        for name, make in (("triton_nosplit", unsplit), ("triton_split", split))
    ]).assign(**STATE)  # fmt: skip
    table = published_growth(rows).set_index("backend")
    assert table.loc["triton", "added_ms"] == pytest.approx(1e3 / 126.41 - 1e3 / 147.64)
    assert table.loc["triton_nosplit", "added_us"] == pytest.approx(28 * 3.0)  # 28 tiles more
    assert table.loc["triton_nosplit", "added_ms"] == pytest.approx(28 * 3.0 * 32 / 1e3)
    assert table.loc["triton_split", "added_us"] < 5
    with pytest.raises(InputError, match="num_qo_heads: want one of 64; got 32"):
        published_growth(rows.assign(num_qo_heads=64))
    with pytest.raises(InputError, match="no run has contexts near both"):
        published_growth(rows[rows["context_len"] == 256])


def test_ladder_is_of_one_run_and_one_cell():
    older = ladder(OTHER.replace("0101", "0100"))
    partly = ladder(OTHER)[lambda rows: rows["backend"] != "triton_split"]
    table = ladder_table(pd.concat([older, ladder(), partly]))
    assert table["backend"].tolist() == list(LADDER)
    assert set(table["run_id"]) == {RUN}
    assert (table["context_len"].iloc[0], table["q_len"].iloc[0]) == (131072, 8)
    expected = [FACTORS[a] / FACTORS[b] for a, b in zip(LADDER, list(LADDER)[1:], strict=False)]
    assert table["gain"].iloc[1:].tolist() == pytest.approx(expected, rel=0.05)
    at = ladder_table(ladder(), q_len=1, context_len=4096)
    assert (set(at["context_len"]), set(at["q_len"])) == ({4096}, {1})
    with pytest.raises(InputError, match="ladder: want two of"):
        ladder_table(backends(triton_split=split))
    with pytest.raises(InputError, match="ladder: want two of"):
        ladder_table(backends(sdpa=split))


def test_ladder_figure_names_what_is_missing():
    figure = figure_ladder(ladder()[lambda rows: rows["backend"] != "triton_ladder_packed"], sidecars=SIDECARS)
    assert_well_placed(figure)
    text = " ".join(text.get_text() for text in all_texts(figure))
    assert "not measured there: triton_ladder_packed" in text
    assert "keys split over programs" in text
    assert "context 128K" in text


@pytest.mark.parametrize("world", [CPU, GPU], ids=["cpu", "gpu"])
def test_over_floor_figure(world):
    rows = attention_rows(world)
    gap = rows[~((rows["backend"] == "per_token") & (rows["context_len"] == world.contexts[0]))]
    figure = figure_over_floor(gap, sidecars=WORLD_SIDECARS)
    assert_well_placed(figure)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert len(shown) == len(world.backends) * len(world.contexts)
    assert shown.count("–") == 1
    best = figure.axes[0].get_yticklabels()[0].get_text()
    assert best == ("triton_split" if world is GPU else "sdpa")
    with pytest.raises(InputError, match="want the read bandwidth"):
        figure_over_floor(rows, sidecars={})


def test_the_answer_tells_the_cause():
    rows = backends(triton_split=split, triton_nosplit=unsplit)
    text = attention_answer(rows, SIDECARS)
    assert "triton_split: 1.0 times as long" in text
    assert text.splitlines()[1].endswith("reading keys and values once: healthy.")
    assert text.splitlines()[2].endswith("reading keys and values once: no KV split.")
