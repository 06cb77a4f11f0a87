import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.acceptance import (
    AcceptanceCounts,
    acceptance_table,
    counts_from_frame,
    prompt_histograms,
    row_counts,
)
from labkit.decide.engine_figures import engine_figures
from labkit.errors import InputError
from tests.worlds import AcceptanceWorld, acceptance_rows, rows_of_counts


def fixed_k(histogram: list[int]) -> AcceptanceCounts:
    """Counts of steps that all draft k tokens; index = accepted."""
    k = len(histogram) - 1
    return AcceptanceCounts(((0,) * (k + 1),) * k + (tuple(histogram),))


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    k = draw(st.integers(1, 8))
    step = st.integers(0, k).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
    return k, draw(st.lists(step, max_size=40))


STORY = fixed_k([40, 40, 40, 80])
# Ten steps of k = 2: three without a draft, two with one draft (one kept), five with two drafts (0, 1, 2, 2, 2 kept).
VARIABLE = AcceptanceCounts.from_steps([(0, 0)] * 3 + [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 2), (2, 2)], 2)


@given(steps())
def test_identities_hold_for_any_steps(case: tuple[int, list[tuple[int, int]]]) -> None:
    k, pairs = case
    counts = AcceptanceCounts.from_steps(pairs, k)
    assert row_counts(counts.columns()) == counts
    assert counts.num_verify_steps == len(pairs)
    assert counts.num_drafted_steps == sum(drafted > 0 for drafted, _ in pairs)
    assert counts.num_drafted_tokens == sum(drafted for drafted, _ in pairs)
    assert counts.num_accepted_tokens == sum(accepted for _, accepted in pairs)
    if pairs:
        assert 1 <= counts.mean_acceptance_length <= k + 1
        assert counts.acceptance_rate_per_pos.sum() == pytest.approx(counts.mean_acceptance_length - 1)


@given(steps(), st.integers(0, 40))
def test_pooling_equals_counting_together(case: tuple[int, list[tuple[int, int]]], cut: int) -> None:
    k, pairs = case
    parts = [AcceptanceCounts.from_steps(part, k, 1) for part in (pairs[:cut], pairs[cut:])]
    assert parts[0] + parts[1] == AcceptanceCounts.from_steps(pairs, k, 2)


def test_variable_draft_lengths_have_stated_denominators() -> None:
    assert VARIABLE.mean_acceptance_length == pytest.approx(1 + 8 / 10)
    assert VARIABLE.draft_acceptance_rate == pytest.approx(8 / 12)
    np.testing.assert_allclose(VARIABLE.acceptance_rate_per_pos, [5 / 10, 3 / 10])
    # Position 1 was proposed in 7 steps; position 2 after a kept position 1 in 4.
    np.testing.assert_allclose(VARIABLE.conditional_acceptance_rate_per_pos, [5 / 7, 3 / 4])


def test_without_steps_everything_is_undefined_not_zero() -> None:
    empty = AcceptanceCounts.from_steps([], 3)
    assert np.isnan(empty.mean_acceptance_length)
    assert np.isnan(empty.draft_acceptance_rate)
    for values in (empty.acceptance_rate_per_pos, empty.conditional_acceptance_rate_per_pos):
        assert np.isnan(values).all()
    undrafted = AcceptanceCounts.from_steps([(0, 0)] * 5, 3)
    assert undrafted.mean_acceptance_length == 1
    assert np.isnan(undrafted.draft_acceptance_rate)
    assert np.isnan(undrafted.conditional_acceptance_rate_per_pos).all()


@pytest.mark.parametrize(
    ("histogram", "length", "rate"),
    [
        # vLLM documentation of per-request metrics: 43 steps, 10 of 129 drafts accepted.
        ([39, 1, 0, 3], 1.2326, 0.0775),
        # ik_llama.cpp#2156, code: 220 rounds, 538/660, positions 90.5/80.5/73.6%, a.len 3.45.
        ([21, 22, 15, 162], 3.45, 0.8152),
    ],
)
def test_published_figures_come_out(histogram: list[int], length: float, rate: float) -> None:
    counts = fixed_k(histogram)
    assert counts.mean_acceptance_length == pytest.approx(length, abs=0.005)
    assert counts.draft_acceptance_rate == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(
    ("histogram", "message"),
    [
        ([[1, 0], [0, 1], [0, 0]], r"must be \[k\+1\]\[k\+1\]"),
        ([[1]], r"must be \[k\+1\]\[k\+1\]"),
        ([[1, 2], [0, 1]], r"\[0\]\[1\] must be 0"),
        ([[1, 0], [-1, 1]], r"\[1\]\[0\] must be a count"),
        ([[1, 0], [0.5, 1]], r"\[1\]\[0\] must be a count"),
    ],
)
def test_bad_histograms_name_the_cell(histogram: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceCounts(histogram)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [(3, 0), (1, 2), (1, -1)])
def test_bad_steps_name_the_step(step: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"steps\[1\]"):
        AcceptanceCounts.from_steps([(1, 1), step], 2)


def test_only_equal_k_can_be_pooled() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        STORY + VARIABLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted_by_draft_length": None}, "is missing"),
        ({"accepted_by_draft_length": [[0, 1], [0, 0]]}, "must have k"),
        ({"num_speculative_tokens": None, "accepted_by_draft_length": [[0, 1], [0, 0]]}, "must be 0"),
    ],
)
def test_stored_rows_without_valid_counts_are_refused(change: dict, message: str) -> None:
    row = rows_of_counts([VARIABLE]).iloc[0].to_dict()
    assert row_counts(row) == VARIABLE
    with pytest.raises(ValueError, match=message):
        row_counts(row | change)


def test_one_set_of_counts_as_six_engines_print_it() -> None:
    table = engine_figures([STORY]).set_index(["engine", "figure"])["value"]
    assert table["vLLM 0.9 on", "Mean acceptance length"] == pytest.approx(2.8)
    assert table["vLLM 0.8", "Mean acceptance length"] == pytest.approx(1.8)
    assert table["SGLang", "accept len"] == pytest.approx(2.8)
    assert table["SGLang before Apr 2026", "accept rate"] == pytest.approx(0.7)
    assert table["SGLang from Apr 2026", "accept rate"] == pytest.approx(0.6)
    assert table["SGLang response", "spec_accept_length"] == pytest.approx(561 / 200)
    assert table["llama.cpp", "draft acceptance"] == pytest.approx(0.6)
    assert table["TensorRT-LLM bench", "acceptance_length"] == pytest.approx(561 / 201)
    assert table["EAGLE code, gpt-fast", "accept_length / mean accepted"] == pytest.approx(1.8)
    assert table["SpecForge", "average_acceptance_length"] == pytest.approx(561 / 200)


def test_engines_that_skip_steps_without_a_draft_print_a_longer_length() -> None:
    table = engine_figures([VARIABLE]).set_index(["engine", "figure"])["value"]
    assert table["labkit", "mean_acceptance_length"] == pytest.approx(1.8)
    assert table["llama.cpp", "mean len"] == pytest.approx(1 + 8 / 7)


def test_mean_over_requests_is_not_the_pooled_length() -> None:
    slow, fast = fixed_k([90, 0, 0]), fixed_k([0, 0, 10])
    table = engine_figures([slow, fast]).set_index(["engine", "figure"])["value"]
    assert table["labkit", "mean_acceptance_length"] == pytest.approx(1.2)
    assert table["labkit", "mean over requests"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least one"):
        engine_figures([])


def test_frames_pool_per_prompt_and_survive_parquet(tmp_path) -> None:
    frame = rows_of_counts([VARIABLE, VARIABLE, AcceptanceCounts.from_steps([], 2)])
    frame.loc[1, "prompt_id"] = frame.loc[0, "prompt_id"]
    frame.to_parquet(tmp_path / "rows.parquet")
    stored = pd.read_parquet(tmp_path / "rows.parquet")
    assert counts_from_frame(stored) == VARIABLE + VARIABLE
    np.testing.assert_array_equal(prompt_histograms(stored), [2 * VARIABLE.histogram])


def test_frame_errors_name_the_prompt_or_the_k() -> None:
    frame = rows_of_counts([VARIABLE, STORY])
    with pytest.raises(InputError, match="got 2 and 3"):
        counts_from_frame(frame)
    with pytest.raises(InputError, match="no rows"):
        counts_from_frame(frame.head(0))
    frame = frame.head(1).assign(accepted_by_draft_length=[[[0, 1, 0], [0, 0, 0], [0, 0, 0]]])
    with pytest.raises(InputError, match=r"prose-0.*\[0\]\[1\]"):
        counts_from_frame(frame)


def test_table_gives_each_group_an_interval_that_ignores_other_groups() -> None:
    prose, code = (
        acceptance_rows(AcceptanceWorld(workload=name, keep=keep))
        for name, keep in (("prose", 0.4), ("code_editing", 0.8))
    )
    both = acceptance_table(pd.concat([prose, code])).set_index("workload")
    for row in both.itertuples():
        assert 1 < row.mean_acceptance_length_low < row.mean_acceptance_length < row.mean_acceptance_length_high < 5
        assert 0 < row.draft_acceptance_rate_low < row.draft_acceptance_rate < row.draft_acceptance_rate_high < 1
        assert row.num_prompts == 16
    alone = acceptance_table(prose).set_index("workload")
    assert alone.loc["prose"].equals(both.loc["prose"])
    whole = acceptance_table(pd.concat([prose, code]), by=[])
    assert whole["num_prompts"].tolist() == [32]


def test_a_single_prompt_has_no_interval() -> None:
    row = acceptance_table(rows_of_counts([VARIABLE])).iloc[0]
    assert row["mean_acceptance_length"] == pytest.approx(1.8)
    assert np.isnan(row["mean_acceptance_length_low"])
    assert np.isnan(row["draft_acceptance_rate_high"])


def test_table_refuses_mixed_origins_failed_rows_and_unknown_columns() -> None:
    frame = rows_of_counts([VARIABLE, VARIABLE])
    frame["origin"] = ["measured", "published"]
    assert len(acceptance_table(frame)) == 2
    with pytest.raises(InputError, match="mix origin measured, published"):
        acceptance_table(frame, by=["workload"])
    with pytest.raises(InputError, match="nothing_like_it"):
        acceptance_table(frame, by=["nothing_like_it"])
    with pytest.raises(InputError, match=r"none has status ok \(2 oom\)"):
        acceptance_table(frame.assign(status="oom"))
