"""Prediction of an engine's relative step cost on planted rows."""

import numpy as np
import pandas as pd
import pytest

from labkit.check import check_run
from labkit.decide.engine_truth import engine_cells, load_truth, paired_backends, reversals, truth_answer, verdicts
from labkit.errors import InputError
from labkit.plots.engine import figure_engine_cost, figure_engine_prediction
from tests.engine_world import (
    CONTEXTS,
    HOST,
    PLAIN_HOST,
    forward_ms,
    write_attention_run,
    write_engine_run,
    write_step_run,
)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_engine_run(folder, ks=(0, 3, 7))
    write_step_run(folder)
    assert check_run(folder) == []
    return load_truth(folder)


def test_measured_cells_are_the_planted_ones(truth):
    cells = truth.cells.set_index(["setting", "num_speculative_tokens", "batch_size", "context_len"])
    assert len(cells) == 3 * 2 * 2 * len(CONTEXTS)
    cell = cells.loc[("TRITON_ATTN", 3, 1, 131072.0)]
    cost = (forward_ms("triton_segmented_2d", 1, 4, 131072) + HOST) / (
        forward_ms("triton_segmented_3d", 1, 1, 131072) + PLAIN_HOST
    )
    assert cell["relative_step_cost"] == pytest.approx(cost, rel=0.02)
    assert cell["relative_step_cost_low"] < cell["relative_step_cost"] < cell["relative_step_cost_high"]
    assert cell["drafts_per_step"] == 3


@pytest.mark.parametrize(("num_windows", "highest"), [(4, 0.99), (6, 0.975), (12, 0.97)])
def test_interval_covers_the_planted_cost_with_few_windows(num_windows, highest):
    """Percentiles of resampled medians cover 92 % with four windows, widened ones 99 % with six."""
    cost, num_cells, rng = 1.6, 800, np.random.default_rng(7)
    place = {"record": "steps", "status": "ok", "run_id": "r", "gpu": "g", "engine": "vllm", "engine_version": "1"}
    place |= {"endpoint": "e", "target": "t", "batch_size": 1, "verify_backend": "A", "decode_backend": "A"}
    counts = {"num_drafted_tokens": 3, "num_verify_steps": 1, "draft_ms": 1.0}
    rows = [
        place | counts | {"context_len": cell, "num_speculative_tokens": k, "step_times_ms": [ms * np.exp(noise)]}
        for cell in range(num_cells)
        for k, ms in ((0, 10.0), (3, 10.0 * cost))
        for noise in 0.01 * rng.standard_normal(num_windows)
    ]
    cells = engine_cells(pd.DataFrame(rows))
    covered = cells["relative_step_cost_low"].le(cost) & cells["relative_step_cost_high"].ge(cost)
    assert 0.93 <= covered.mean() <= highest


def test_two_constants_of_the_shortest_context_foretell_the_rest(truth):
    cells = truth.cells
    assert truth.missing == ""
    assert cells["plain_host_ms"].to_numpy() == pytest.approx(PLAIN_HOST, abs=0.1)
    assert cells["speculation_host_ms"].to_numpy() == pytest.approx(HOST, abs=0.1)
    assert set(cells[cells["fitted"]]["context_len"]) == {2048.0}
    assert cells[~cells["fitted"]]["error"].abs().median() < 0.02


def test_only_the_shortest_context_is_fitted(tmp_path):
    """A cost that the forwards do not have at long contexts shows as an error there, and is not fitted away."""
    folder = tmp_path
    write_step_run(folder)
    from tests import engine_world

    slopes = engine_world.SLOPES | {"fa3": 0.07}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_world, "SLOPES", slopes)
        write_engine_run(folder, noise=0)
    cells = load_truth(folder).cells
    flash = cells[(cells["setting"] == "FLASH_ATTN") & (cells["batch_size"] == 8)].set_index("context_len")["error"]
    assert abs(flash[2048.0]) < 0.05
    triton = cells[cells["setting"] == "TRITON_ATTN"]["error"].abs()
    assert triton.max() < 0.05


def test_drafts_as_counted_not_as_configured(tmp_path):
    write_step_run(tmp_path)
    write_engine_run(tmp_path, noise=0, drafts=2 / 3)
    cells = load_truth(tmp_path).cells
    assert cells["drafts_per_step"].to_numpy() == pytest.approx(2.0, abs=0.06)
    expected = [forward_ms("fa3", 8, 3, 65536)]
    cell = cells[(cells["setting"] == "FLASH_ATTN") & (cells["batch_size"] == 8) & (cells["context_len"] == 65536)]
    assert cell["verify_ms"].to_numpy() == pytest.approx(expected, rel=0.01)


def test_between_measured_batches_a_line_beyond_none(tmp_path, monkeypatch):
    from tests import engine_world

    write_engine_run(tmp_path, noise=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine_world, "BATCHES", (4, 16))
        write_step_run(tmp_path)
    cells = load_truth(tmp_path).cells
    assert cells[cells["batch_size"] == 1]["predicted"].isna().all()
    assert cells[cells["batch_size"] == 8]["error"].abs().max() < 0.01


def test_a_missing_forward_is_composed_of_the_rest_and_the_kernel(tmp_path):
    write_engine_run(tmp_path, noise=0)
    write_step_run(tmp_path, leave_out="triton_segmented_2d")
    write_attention_run(tmp_path, ("triton_segmented_2d",))
    truth = load_truth(tmp_path)
    assert truth.missing == ""
    assert truth.cells.groupby("setting")["composed"].all().to_dict() == {
        "FLASHINFER": False, "FLASH_ATTN": False, "TRITON_ATTN": True,
    }  # fmt: skip
    assert truth.cells["error"].abs().max() < 0.01


def test_the_newest_run_of_a_cell_counts(tmp_path):
    write_step_run(tmp_path)
    write_engine_run(tmp_path, ks=(0, 3))
    write_engine_run(tmp_path, ks=(0, 7, 3), day=2)
    write_engine_run(tmp_path, ks=(0, 7), day=3)
    days = load_truth(tmp_path).cells.groupby("num_speculative_tokens")["run_id"].unique()
    assert {k: [run_id[:8] for run_id in ids] for k, ids in days.items()} == {3: ["20260102"], 7: ["20260103"]}


def test_verdicts_and_the_reversal(truth):
    table = verdicts(truth.cells)
    decided = table[table["decided"]]
    assert decided["right"].all()
    assert len(decided) / len(table) > 0.7
    assert not (table["length"] > table["num_speculative_tokens"] + 1).any()
    found = reversals(truth.cells)
    assert set(found["loses"]) == {"TRITON_ATTN"}
    assert (found["loses_speedup"] < 1).all()
    assert (found["pays_speedup"] > 1).all()
    text = truth_answer(truth)
    assert "TRITON_ATTN loses" in text
    assert "100% of them right" in text


def test_close_to_breakeven_is_undecided():
    cells = pd.DataFrame(
        {"endpoint": ["e"] * 2, "setting": ["s"] * 2, "num_speculative_tokens": [3] * 2, "batch_size": [1] * 2}
        | {"context_len": [1.0, 2.0], "predicted": [2.4, 2.0], "relative_step_cost": [2.6, 2.6], "fitted": [False] * 2}
    )
    table = verdicts(cells, [2.5])
    assert table["decided"].tolist() == [False, True]
    assert table["right"].tolist() == [None, False]


def test_what_is_missing_is_said(tmp_path):
    empty = load_truth(tmp_path)
    assert empty.cells.empty
    assert "no step times from inside an engine" in truth_answer(empty)
    with pytest.raises(InputError, match="no step times"):
        figure_engine_cost(empty)
    write_engine_run(tmp_path)
    alone = load_truth(tmp_path)
    assert "no forwards to predict from" in alone.missing
    assert "not predicted" in truth_answer(alone)
    assert alone.cells["predicted"].isna().all()
    figure_engine_cost(alone)
    with pytest.raises(InputError, match="no forwards"):
        figure_engine_prediction(alone)
    write_step_run(tmp_path, leave_out="triton_segmented_2d")
    partly = load_truth(tmp_path)
    assert partly.cells.groupby("setting")["predicted"].count().to_dict() == {
        "FLASHINFER": 8,
        "FLASH_ATTN": 8,
        "TRITON_ATTN": 0,
    }
    assert "triton_segmented_2d" in partly.missing


def test_pairings_by_version():
    assert paired_backends("vllm", "0.24.0", "TRITON_ATTN") == ("triton_segmented_3d", "triton_segmented_2d")
    assert paired_backends("vllm", "0.33.1", "TRITON_ATTN") == ("triton_segmented_3d", "triton_segmented_3d")
    assert paired_backends("vllm", "0.24.0", "FLASH_ATTN") == ("fa3", "fa3")
    assert paired_backends("vllm", "0.24.0", "FLASHINFER") == ("flashinfer_decode", "flashinfer_auto")
    assert paired_backends("vllm", "0.40.0", "FLASH_ATTN") is None
    assert paired_backends("vllm", "0.24.0", "NOSUCH") is None


def test_figures_show_every_setting(truth):
    figure = figure_engine_cost(truth)
    labels = [{text.get_text() for artist in ax.artists for text in artist.texts} for ax in figure.axes]
    assert labels == [{"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"}] * 2
    assert all(ax.get_xlabel() == "context length (tokens)" for ax in figure.axes)
    (ax,) = figure_engine_prediction(truth).axes
    assert np.allclose(ax.get_xlim(), ax.get_ylim())
