"""Which acceptance joins which cost: target, drafter, k, context band, dtype; borrowed acceptance."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import AcceptanceCounts
from labkit.breakeven import breakeven
from labkit.errors import InputError
from tests.breakeven_worlds import alike, falling
from tests.worlds import (
    TYPICAL_NOISE,
    AcceptanceWorld,
    Noise,
    acceptance_rows,
    cost_rows,
    rows_of_counts,
)


def test_borrowed_acceptance_never_gives_a_plain_verdict() -> None:
    rows = cost_rows(falling(2.0, 0.0).with_(target="large", drafter="eagle3", noise=Noise(sample=0.01)))
    with pytest.raises(InputError, match="target is large in the cost rows and tiny in the acceptance rows"):
        breakeven(rows, alike())
    cells = breakeven(rows, alike(), acceptance_from="tiny").cells
    assert set(cells["origin"]) == {"transferred"}
    assert set(cells["verdict"]) == {"undecided"}
    assert cells["reason"].str.contains("would be 'pays'; acceptance borrowed from tiny, drafter ngram").all()
    with pytest.raises(InputError, match=r"must be a target of the acceptance rows \(tiny\), got 'huge'"):
        breakeven(rows, alike(), acceptance_from="huge")
    with pytest.raises(InputError, match="needs acceptance rows"):
        breakeven(rows, 2.0, acceptance_from="tiny")
    with pytest.raises(InputError, match=r"drafter is eagle3 in the cost rows and mine\+tree in the acceptance rows"):
        breakeven(rows, alike().assign(drafter="mine+tree"), acceptance_from="tiny")


def test_what_cannot_pay_cannot_pay_with_borrowed_acceptance_either() -> None:
    rows = cost_rows(falling(6.0, 0.0).with_(target="large", noise=Noise(sample=0.01)))
    assert set(breakeven(rows, alike(), acceptance_from="tiny").cells["verdict"]) == {"cannot_pay"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "other"}, "target is tiny in the cost rows and other in the acceptance rows"),
        ({"drafter": "eagle3"}, "drafter is ngram in the cost rows and eagle3 in the acceptance rows"),
        (
            {"context_len_low": 64, "context_len_high": 1024},
            r"context_len is 1024, 16384, 4096, 65536 in the cost rows and \[64, 1024\) in the acceptance rows",
        ),
    ],
)
def test_sides_that_disagree_are_refused_with_both_values(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        breakeven(cost_rows(falling(2.0, 0.0)), alike().assign(**change))


def test_another_k_is_refused() -> None:
    message = "num_speculative_tokens is 4 in the cost rows and 5 in the acceptance rows"
    with pytest.raises(InputError, match=message):
        breakeven(cost_rows(falling(2.0, 0.0)), alike(k=5))


def test_acceptance_is_not_extended_past_its_band() -> None:
    acceptance = alike().assign(context_len_low=1024, context_len_high=16384)
    result = breakeven(cost_rows(falling(2.0, 0.1)), acceptance)
    cells = result.cells.set_index("context_len")
    assert cells["mean_acceptance_length"].notna().tolist() == [True, True, False, False]
    outside = cells.loc[16384]
    assert outside["relative_step_cost"] == pytest.approx(2.0 * 2**0.4)
    assert np.isnan(outside["speedup"])
    assert outside["verdict"] == "undecided"
    assert "no acceptance for context_len 16384 (measured: [1024, 16384))" in outside["reason"]


def test_cells_beyond_the_band_can_still_be_beyond_the_ceiling() -> None:
    acceptance = alike().assign(context_len_low=1024, context_len_high=1025)
    world = falling(3.0, 0.5).with_(noise=Noise(sample=0.01))
    cells = breakeven(cost_rows(world), acceptance).cells.set_index("context_len")
    assert cells.loc[65536, "verdict"] == "cannot_pay"


def test_bands_that_overlap_are_refused() -> None:
    acceptance = pd.concat([alike().assign(context_len_high=8192), alike().assign(context_len_low=512)])
    with pytest.raises(InputError, match="context_len 1024 lies in two acceptance bands"):
        breakeven(cost_rows(falling(2.0, 0.0)), acceptance)


def test_each_workload_is_judged_apart_and_forced_acceptance_is_not_used() -> None:
    prose, code = alike(), alike().assign(workload="code_editing")
    forced = rows_of_counts([AcceptanceCounts.from_steps([(4, 4)] * 5, 4)]).assign(origin="forced")
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    cells = breakeven(rows, pd.concat([prose, code, forced])).cells
    assert cells["workload"].tolist() == ["code_editing", "prose"]
    assert cells["mean_acceptance_length"].tolist() == pytest.approx([3.0, 3.0])
    with pytest.raises(InputError, match="all of them are forced"):
        breakeven(rows, forced)


def test_acceptance_of_the_cells_dtype_is_preferred_and_another_is_said() -> None:
    other = rows_of_counts([AcceptanceCounts.from_steps([(4, 0)] * 5, 4)] * 4).assign(weight_dtype="bfloat16")
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    cell = breakeven(rows, pd.concat([alike(), other])).cells.iloc[0]
    assert cell["mean_acceptance_length"] == pytest.approx(3.0)
    cell = breakeven(rows, other).cells.iloc[0]
    assert cell["mean_acceptance_length"] == pytest.approx(1.0)
    assert "acceptance measured with weight_dtype bfloat16" in cell["reason"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": "plain"}, "must hold the arms plain and speculative, got plain"),
        ({"group": None}, "need run_id, group and round"),
        ({"step_ms": 0.0}, "step_ms must be above 0"),
        ({"num_drafted_tokens": 5}, "must not exceed num_speculative_tokens"),
        ({"verify_backend": None}, "verify_backend must be given"),
    ],
)
def test_bad_cost_rows_are_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        breakeven(cost_rows(falling(2.0, 0.0)).assign(**change), 3.0)


@pytest.mark.parametrize(
    ("column", "value"), [("context_len", 2048), ("kv_dtype", "float8_e4m3fn"), ("linear_backend", "marlin")]
)
def test_a_group_that_mixes_conditions_is_refused(column: str, value: object) -> None:
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    rows.loc[rows["arm"] == "plain", column] = value
    with pytest.raises(InputError, match=f"group 1024/sdpa/4, mix {column}"):
        breakeven(rows, 3.0)


def test_missing_columns_are_named() -> None:
    with pytest.raises(InputError, match=r"cost rows lack the column\(s\) step_ms"):
        breakeven(cost_rows(falling(2.0, 0.0)).drop(columns="step_ms"), 3.0)
    with pytest.raises(InputError, match=r"acceptance rows lack the column\(s\) prompt_id"):
        breakeven(cost_rows(falling(2.0, 0.0)), alike().drop(columns="prompt_id"))


def test_same_input_gives_the_same_numbers_in_any_company_and_order() -> None:
    world = falling(2.0, 0.25).with_(noise=TYPICAL_NOISE)
    rows, acceptance = cost_rows(world), acceptance_rows(AcceptanceWorld())
    whole = breakeven(rows, acceptance).cells
    pd.testing.assert_frame_equal(whole, breakeven(rows.sample(frac=1, random_state=1), acceptance).cells)
    alone = breakeven(rows[rows["context_len"] == 4096], acceptance).cells
    pd.testing.assert_frame_equal(alone, whole[whole["context_len"] == 4096].reset_index(drop=True))


def test_rows_from_a_file_give_the_same_numbers(tmp_path: Path) -> None:
    # Stored contexts are floats, counts with nulls too, and several k share the plain arm of one group.
    world = falling(2.0, 0.25).with_(noise=TYPICAL_NOISE)
    rows = pd.concat([cost_rows(world.with_(num_speculative_tokens=k)) for k in (2, 4)], ignore_index=True)
    rows["group"] = rows["context_len"].astype(str)
    rows = rows[(rows["arm"] == "speculative") | (rows.index < len(rows) // 2)].astype({"context_len": float})
    acceptance = pd.concat([acceptance_rows(AcceptanceWorld(num_speculative_tokens=k)) for k in (2, 4)])
    stored = []
    for name, frame in (("loop", rows), ("acceptance", acceptance)):
        frame.to_parquet(tmp_path / name)
        stored.append(pd.read_parquet(tmp_path / name))
    cells = breakeven(*stored).cells
    pd.testing.assert_frame_equal(cells, breakeven(rows, acceptance).cells)
    assert cells["num_speculative_tokens"].tolist() == [2, 4] * 4
    assert cells["verdict"].notna().all()
    assert cells["speedup"].notna().all()
