"""The speed-up of a request: prefill, the drafter's prefill, output length, and where it turns positive."""

import numpy as np
import pandas as pd
import pytest

from labkit.decide.composed import cost_rows
from labkit.decide.request import request_speedup, request_table, turning_length
from labkit.decide.step_costs import step_costs
from labkit.decide.surface import verdict_surface
from labkit.errors import InputError
from tests.worlds import CostWorld, StepWorld, step_rows
from tests.worlds import cost_rows as loop_rows

TIMES = {"decode_ms": 10.0, "prefill_ms": 200.0, "draft_prefill_ms": 100.0}


def test_prefill_dilutes_the_speedup_and_long_outputs_reach_it() -> None:
    """101 tokens: 200 + 1000 ms plain; 200 + 100 + 500 ms with steps that are twice as fast."""
    assert request_speedup(2.0, 101, **TIMES) == pytest.approx(1200 / 800)
    assert request_speedup(2.0, 1, **TIMES) == pytest.approx(200 / 300)
    assert request_speedup(2.0, 10**7, **TIMES) == pytest.approx(2.0, rel=1e-3)
    several = request_speedup(2.0, np.array([1, 101]), **TIMES)
    assert several.tolist() == pytest.approx([200 / 300, 1.5])


def test_the_turning_length_is_where_the_request_breaks_even() -> None:
    turn = turning_length(2.0, decode_ms=10.0, draft_prefill_ms=100.0)
    assert turn == pytest.approx(21.0)
    assert request_speedup(2.0, turn, **TIMES) == pytest.approx(1.0)
    assert turning_length(1.0, decode_ms=10.0, draft_prefill_ms=100.0) == float("inf")
    assert turning_length(1.5, decode_ms=10.0, draft_prefill_ms=0.0) == 1.0


@pytest.mark.parametrize("change", [{"output_tokens": 0}, {"decode_ms": 0.0}, {"speedup": 0.0}, {"prefill_ms": -1.0}])
def test_values_out_of_range_are_refused(change: dict) -> None:
    values = {"speedup": 2.0, "output_tokens": 10, **TIMES} | change
    with pytest.raises(InputError, match="request: want 1 token or more"):
        request_speedup(values.pop("speedup"), values.pop("output_tokens"), **values)


def test_step_rows_with_prefills_give_the_whole_table() -> None:
    rows = step_rows(StepWorld(context_lens=(4096, 16384), q_lens=(4,)))
    prefill = rows[rows["phase"] == "decode"].assign(phase="prefill", q_len=rows["context_len"], context_len=0.0)
    target = prefill.assign(forward_ms=prefill["q_len"] * 0.1)
    drafter = prefill.assign(forward_ms=prefill["q_len"] * 0.01, drafter="eagle3")
    rows = pd.concat([rows, target, drafter], ignore_index=True)
    surface = verdict_surface(rows, 2.0, resamples=200)
    table = request_table(step_costs(cost_rows(rows)), surface.result.cells, rows)
    table = table[table["drafter"] == "eagle3"].set_index("context_len")
    row = table.loc[4096]
    assert row["prefill_ms"] == pytest.approx(409.6)
    assert row["draft_prefill_ms"] == pytest.approx(40.96)
    cells = surface.result.cells
    speedup = cells[cells["drafter"] == "eagle3"].set_index("context_len").loc[4096, "speedup"]
    assert row["at_256"] == pytest.approx(request_speedup(
        speedup, 256, decode_ms=row["decode_ms"], prefill_ms=409.6, draft_prefill_ms=40.96))  # fmt: skip
    assert row["turning_length_low"] <= row["turning_length"] <= row["turning_length_high"]
    slow = target.assign(backend="slow", forward_ms=target["forward_ms"] * 3)
    free = request_table(step_costs(cost_rows(rows)), surface.result.cells, pd.concat([rows, slow]))
    assert set(free.loc[free["context_len"] == 4096, "prefill_ms"].round(1)) == {409.6}, "of the fastest backend"


def test_loop_rows_know_the_drafters_prefill_and_not_the_targets() -> None:
    rows = loop_rows(CostWorld(lambda *_: 10.0, lambda *_: 15.0)).assign(draft_prefill_ms=50.0)
    table = request_table(step_costs(rows), verdict_surface(rows, 3.0, resamples=200).result.cells, rows)
    assert table["turning_length"].tolist() == pytest.approx([1 + 50 / (10 * (1 - 1 / 2))])
    assert table[["prefill_ms", "at_256"]].isna().all(axis=None)
