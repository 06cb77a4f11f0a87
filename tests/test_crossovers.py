"""Where a speed-up crosses 1 along the context, with which bounds, and what is claimed of it."""

import numpy as np
import pandas as pd
import pytest

from labkit.breakeven import breakeven
from labkit.decide.crossovers import crossovers
from labkit.decide.verdict import crossing_lines
from labkit.plots.curves import crossing_text
from tests.breakeven_worlds import CONTEXTS, alike, falling
from tests.worlds import (
    TYPICAL_NOISE,
    Noise,
    cost_rows,
)


def test_the_planted_crossing_is_found_with_its_interval() -> None:
    # Relative cost 2 at 1K, a factor 2 ** 0.25 per octave: it meets length 3 at 1024 * 2 ** (log2(1.5) / 0.25).
    truth = 1024 * 2 ** (np.log2(1.5) / 0.25)
    result = breakeven(cost_rows(falling(2.0, 0.25)), alike())
    (curve,) = result.crossovers
    (crossing,) = curve["crossovers"]
    assert curve["workload"] == "prose"
    assert crossing["context_len"] == pytest.approx(truth)
    assert crossing["direction"] == "pays below"
    noisy = breakeven(cost_rows(falling(2.0, 0.25).with_(noise=TYPICAL_NOISE, num_rounds=16)), alike())
    (crossing,) = noisy.crossovers[0]["crossovers"]
    assert crossing["low"] < truth < crossing["high"]
    assert crossing["low"] > 1024
    assert crossing["high"] < 65536


def test_a_rising_speedup_pays_above() -> None:
    result = breakeven(cost_rows(falling(4.5, -0.25)), alike())
    (crossing,) = result.crossovers[0]["crossovers"]
    assert crossing["direction"] == "pays above"
    assert crossing["context_len"] == pytest.approx(1024 * 2 ** (np.log2(1.5) / 0.25))


def test_curves_may_cross_never_or_several_times() -> None:
    assert breakeven(cost_rows(falling(2.0, 0.0)), alike()).crossovers[0]["crossovers"] == []
    values = np.log([1.2, 0.8, 1.2, 0.8])
    draws = values + np.random.default_rng(0).normal(0, 0.01, (500, 1))
    found = crossovers(np.array(CONTEXTS, float), values, draws)
    assert [crossing["direction"] for crossing in found] == ["pays below", "pays above", "pays below"]
    assert all(crossing["low"] < crossing["context_len"] < crossing["high"] for crossing in found)


def test_a_gap_in_the_acceptance_breaks_the_curve() -> None:
    low = alike().assign(context_len_high=2048)
    high = alike().assign(context_len_low=16384)
    result = breakeven(cost_rows(falling(2.0, 0.25)), pd.concat([low, high]))
    assert result.cells.set_index("context_len")["speedup"].notna().tolist() == [True, False, True, True]
    assert result.crossovers[0]["crossovers"] == []


def test_a_gap_of_one_workload_is_not_bridged_by_another() -> None:
    code = alike().assign(workload="code_editing")
    prose = pd.concat([alike().assign(context_len_high=2048), alike().assign(context_len_low=16384)])
    curves = breakeven(cost_rows(falling(2.0, 0.25)), pd.concat([code, prose])).crossovers
    assert {curve["workload"]: len(curve["crossovers"]) for curve in curves} == {"code_editing": 1, "prose": 0}


@pytest.mark.parametrize(("noise", "claim"), [(0.01, "pays below"), (3.0, "undecided around")])
def test_a_crossing_between_undecided_cells_claims_nothing(noise: float, claim: str) -> None:
    result = breakeven(cost_rows(falling(2.0, 0.25).with_(noise=Noise(sample=noise))), 2.5)
    undecided = (result.cells["verdict"] == "undecided").all()
    lines = crossing_lines(result)
    assert undecided == (claim == "undecided around")
    assert lines
    assert all(claim in line and "[" in line for line in lines)
    crossing = result.crossovers[0]["crossovers"][0]
    assert crossing_text(crossing, (1024, 65536)).startswith("undecided around" if undecided else "pays up to")


def test_a_crossing_is_claimed_between_decided_cells_only() -> None:
    contexts, values = np.array([1024.0, 4096.0, 16384.0, 65536.0]), np.log([1.3, 1.05, 0.95, 0.7])
    draws = values + np.random.default_rng(0).normal(0, 0.01, (500, 1))

    def sides(*decided: bool, logs: np.ndarray = values) -> tuple[object, ...]:
        found = crossovers(contexts, logs, draws, np.array(decided))[0]
        return found["pays_at"], found["loses_at"], found["decided"]

    assert sides(True, True, True, True) == (4096, 16384, True)
    assert sides(True, False, False, True) == (1024, 65536, True)
    assert sides(True, True, False, False) == (4096, None, False)
    assert sides(False, False, True, True) == (None, 16384, False)
    gap = np.log([1.3, 1.05, 0.95, np.nan])
    assert sides(True, True, False, False, logs=gap) == (4096, None, False)
    back = np.log([1.3, 0.99, 1.01, 0.7])  # crosses three times between two decided cells
    crossings = crossovers(contexts, back, draws, np.array([True, False, False, True]))
    assert [item["decided"] for item in crossings] == [False, False, False]


def test_an_undecided_crossing_says_what_bounds_it() -> None:
    result = breakeven(cost_rows(falling(2.0, 0.25).with_(noise=Noise(sample=3.0))), 2.5)
    text = "\n".join(crossing_lines(result))
    assert "undecided around" in text
    assert "no decided cell beside it pays" in text or "no decided cell beside it loses" in text


def test_a_length_of_one_never_pays() -> None:
    # Verify through this backend is cheaper than the plain decode it is compared with: a poor baseline, no gain.
    rows = cost_rows(falling(0.8, 0.1).with_(noise=Noise(sample=0.001)))
    result = breakeven(rows, 1.0)
    assert (result.cells["speedup_low"] > 1).any()
    assert not (result.cells["verdict"] == "pays").any()
    assert result.cells["reason"].str.contains("the baseline is not the fastest").any()
    assert all(not curve["crossovers"] for curve in result.crossovers)
    assert (breakeven(rows, 1.5).cells["verdict"] == "pays").any()


def test_a_crossing_that_may_lie_outside_the_measured_contexts_is_open() -> None:
    values = np.log([1.3, 1.1, 0.99])
    draws = values + np.random.default_rng(0).normal(0, 0.05, (2000, 1))
    (crossing,) = crossovers(np.array([1024.0, 4096.0, 16384.0]), values, draws)
    assert crossing["high"] is None
    assert crossing["low"] < crossing["context_len"]


def test_a_neighbour_without_an_interval_leaves_the_crossing_without_bounds() -> None:
    values = np.log([1.2, 0.8, 1.2])
    draws = values + np.random.default_rng(0).normal(0, 0.01, (500, 1))
    draws[:, 2] = np.nan
    first, second = crossovers(np.array([1024.0, 4096.0, 16384.0]), values, draws)
    assert first["low"] < first["context_len"] < first["high"]
    assert (second["low"], second["high"]) == (None, None)
