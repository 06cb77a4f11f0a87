"""Verdicts on planted costs: ratios, baselines, imposed lengths, what leaves a cell undecided."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import AcceptanceCounts
from labkit.breakeven import breakeven
from labkit.decide.step_costs import baseline_ms, step_costs
from labkit.errors import InputError
from tests.breakeven_worlds import alike, falling
from tests.worlds import (
    TYPICAL_NOISE,
    CostWorld,
    Noise,
    cost_rows,
    rows_of_counts,
)

EXACT = Noise()


@pytest.mark.parametrize(
    ("cost", "verdict", "speedup"), [(2.0, "pays", 1.5), (4.0, "loses", 0.75), (6.0, "cannot_pay", 0.5)]
)
def test_planted_costs_give_the_planted_verdict(cost: float, verdict: str, speedup: float) -> None:
    world = falling(cost, 0.0).with_(context_lens=(1024,), noise=Noise(sample=0.01))
    cell = breakeven(cost_rows(world), alike()).cells.iloc[0]
    assert cell["verdict"] == verdict
    assert cell["relative_step_cost"] == pytest.approx(cost, rel=0.02)
    assert cell["mean_acceptance_length"] == pytest.approx(3.0)
    assert cell["speedup"] == pytest.approx(speedup, rel=0.02)
    assert cell["breakeven_ceiling"] == 5
    assert (cell["num_rounds"], cell["num_prompts"]) == (8, 8)
    assert cell["origin"] == "measured"


def test_a_speedup_near_one_is_undecided_and_says_why() -> None:
    world = falling(2.97, 0.0).with_(context_lens=(1024,), noise=TYPICAL_NOISE)
    cell = breakeven(cost_rows(world), alike()).cells.iloc[0]
    assert cell["speedup_low"] < 1 < cell["speedup_high"]
    assert (cell["verdict"], cell["reason"]) == ("undecided", "the interval includes 1")


def test_exact_costs_are_recovered_exactly_with_variable_draft_lengths() -> None:
    steps = [(0, 0)] * 5 + [(1, 1)] * 2 + [(4, 2)] * 3
    world = CostWorld(lambda _, __: 10.0, lambda _, __, j: 11.0 + 2.0 * j, num_rounds=4)
    acceptance = rows_of_counts([AcceptanceCounts.from_steps(steps, 4)] * 3)
    cell = breakeven(cost_rows(world), acceptance).cells.iloc[0]
    assert cell["relative_step_cost"] == pytest.approx(0.5 * 1.1 + 0.2 * 1.3 + 0.3 * 1.9)
    assert cell["mean_acceptance_length"] == pytest.approx(1.8)
    assert "no spread between rounds" in cell["reason"]


def test_shared_drift_of_the_clock_cancels() -> None:
    world = falling(2.0, 0.0).with_(context_lens=(1024,), noise=Noise(drift=0.3))
    cell = breakeven(cost_rows(world), 2.5).cells.iloc[0]
    assert cell["relative_step_cost"] == pytest.approx(2.0)


def test_of_several_runs_of_a_cell_the_newest_counts() -> None:
    # The second run's machine is ten times slower; a ratio over both runs would be that of neither.
    slow = CostWorld(lambda _, __: 100.0, lambda _, __, j: 300.0, run_id="run-2")
    rows = pd.concat([cost_rows(slow), cost_rows(falling(2.5, 0.0).with_(context_lens=(1024, 4096)))])
    cells = breakeven(rows, 3.5).cells.set_index("context_len")
    assert cells["relative_step_cost"].to_dict() == pytest.approx({1024: 3.0, 4096: 2.5})
    assert cells["num_rounds"].tolist() == [8, 8]


@pytest.mark.parametrize(("rounds", "prompts", "reason"), [(1, 8, "one round"), (8, 1, "one prompt")])
def test_a_single_round_or_prompt_is_undecided_without_bounds(rounds: int, prompts: int, reason: str) -> None:
    world = falling(1.5, 0.0).with_(context_lens=(1024,), num_rounds=rounds, noise=Noise(sample=0.01))
    cell = breakeven(cost_rows(world), alike(prompts)).cells.iloc[0]
    assert cell["speedup"] == pytest.approx(2.0, rel=0.05)
    assert np.isnan(cell["speedup_low"])
    assert np.isnan(cell["speedup_high"])
    assert cell["verdict"] == "undecided"
    assert f"{reason}, so no interval" in cell["reason"]


def test_two_rounds_give_a_wide_interval_not_a_narrow_one() -> None:
    world = falling(2.0, 0.0).with_(context_lens=(1024,), noise=Noise(sample=0.05), num_rounds=2)
    few = breakeven(cost_rows(world), 3.0).cells.iloc[0]
    many = breakeven(cost_rows(world.with_(num_rounds=20)), 3.0).cells.iloc[0]
    widths = [np.log(cell["relative_step_cost_high"] / cell["relative_step_cost_low"]) for cell in (few, many)]
    assert widths[0] > 3 * widths[1]


def test_rows_that_are_not_ok_are_not_used() -> None:
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    bad = rows.assign(status="timeout", step_ms=np.nan)
    assert breakeven(pd.concat([rows, bad]), 3.0).cells["relative_step_cost"].tolist() == pytest.approx([2.0])
    with pytest.raises(InputError, match="none has status ok"):
        breakeven(bad, 3.0)


def test_a_draft_length_without_a_cost_is_named() -> None:
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    rows = rows[(rows["arm"] == "plain") | (rows["num_drafted_tokens"] == 4)]
    acceptance = rows_of_counts([AcceptanceCounts.from_steps([(0, 0), (4, 2), (4, 3), (4, 1)], 4)] * 3)
    cell = breakeven(rows, acceptance).cells.iloc[0]
    assert np.isnan(cell["speedup"])
    assert cell["verdict"] == "undecided"
    assert "0 (25.0% of steps)" in cell["reason"]


def test_doubtful_samples_and_different_launches_are_said() -> None:
    rows = cost_rows(falling(2.0, 0.0).with_(context_lens=(1024,)))
    rows.loc[rows.index[:3], "quality"] = "throttled"
    rows.loc[rows["arm"] == "plain", "launch_mode"] = "graph"
    reason = breakeven(rows, 3.0).cells["reason"].iloc[0]
    assert f"3 of {len(rows)} samples with quality 'throttled'" in reason
    assert "launch_mode: speculative eager, plain graph" in reason
    reason = breakeven(cost_rows(falling(2.0, 0.0)).assign(quality="unstable"), 3.0).cells["reason"].iloc[0]
    assert "samples with quality 'unstable'" in reason


def two_decoders(slow: float, noise: Noise = EXACT) -> CostWorld:
    times = {"sdpa": 10.0, "per_token": slow}
    return CostWorld(
        lambda backend, _: times[backend],
        lambda _, __, ___: 20.0,
        decode_backends=("sdpa", "per_token"),
        verify_backends=("per_token",),
        noise=noise,
        num_rounds=16,
    )


def test_the_fastest_decode_is_the_baseline_and_the_same_backend_stands_beside() -> None:
    cell = breakeven(cost_rows(two_decoders(16.0)), 3.0).cells.iloc[0]
    assert cell["decode_backend"] == "sdpa"
    assert cell["speedup"] == pytest.approx(1.5)
    assert cell["speedup_same_backend"] == pytest.approx(3 / (20 / 16))
    for baseline, name in (("same", "per_token"), ("per_token", "per_token"), ("sdpa", "sdpa")):
        chosen = breakeven(cost_rows(two_decoders(16.0)), 3.0, baseline=baseline).cells.iloc[0]
        assert chosen["decode_backend"] == name
    with pytest.raises(InputError, match=r"baseline must be fastest, same or one of per_token, sdpa, got 'fa3'"):
        breakeven(cost_rows(two_decoders(16.0)), 3.0, baseline="fa3")


def test_choosing_the_fastest_does_not_flatter_it() -> None:
    # Two equal backends: the smaller of two medians is below 10 ms on average, the cross-chosen one is not.
    world = two_decoders(10.0, Noise(sample=0.1)).with_(samples_per_round=1, context_lens=tuple(range(200)))
    cells = step_costs(cost_rows(world))
    chosen = [np.log(np.median(baseline_ms(costs, "fastest")[1]) / 10) for costs in cells]
    smallest = [np.log(min(np.median(times) for times in costs.decode_ms.values()) / 10) for costs in cells]
    assert abs(np.mean(chosen)) < 0.006
    assert np.mean(smallest) < -0.012


def test_a_tie_names_both_backends() -> None:
    rows = cost_rows(two_decoders(10.0))
    even = rows["round"] % 2 == 0
    rows.loc[even & (rows["decode_backend"] == "sdpa"), "step_ms"] *= 1.001
    rows.loc[~even & (rows["decode_backend"] == "per_token"), "step_ms"] *= 1.001
    assert breakeven(rows, 3.0).cells["decode_backend"].tolist() == ["per_token|sdpa"]


def test_an_imposed_length_drafts_k_in_every_step_and_is_forced() -> None:
    result = breakeven(cost_rows(falling(2.0, 0.0).with_(noise=Noise(sample=0.01))), 3.0)
    assert set(result.cells["origin"]) == {"forced"}
    assert result.cells["workload"].isna().all()
    assert result.cells["num_prompts"].isna().all()
    assert result.cells["relative_step_cost"].to_numpy() == pytest.approx(2.0, rel=0.03)
    assert set(result.cells["verdict"]) == {"pays"}


def test_bounds_of_an_imposed_length_reach_the_speedup() -> None:
    cell = breakeven(cost_rows(falling(2.0, 0.0).with_(noise=Noise(sample=1e-4))), (3.0, 2.0, 3.6)).cells.iloc[0]
    assert cell["speedup_low"] == pytest.approx(1.0, rel=0.05)
    assert cell["speedup_high"] == pytest.approx(1.8, rel=0.05)


@pytest.mark.parametrize(
    "length", [0.5, (3.0, 3.5, 4.0), (3.0, 2.0), 5.5, True, float("nan"), (2.0, 1.5, float("inf"))]
)
def test_impossible_lengths_are_refused(length: object) -> None:
    with pytest.raises(InputError, match="imposed acceptance length"):
        breakeven(cost_rows(falling(2.0, 0.0)), length)  # type: ignore[arg-type]


def test_a_length_above_the_ceiling_of_one_k_only_leaves_that_cell_open() -> None:
    world = falling(2.0, 0.0).with_(context_lens=(1024,))
    rows = pd.concat([cost_rows(world), cost_rows(world.with_(num_speculative_tokens=2))])
    cells = breakeven(rows, 4.0).cells.set_index("num_speculative_tokens")
    assert cells.loc[4, "verdict"] == "pays"
    assert cells.loc[2, "verdict"] == "undecided"
    assert "imposed length 4 exceeds the ceiling 3" in cells.loc[2, "reason"]


@pytest.mark.parametrize("option", [{"baseline": "other"}, {"resamples": 10}])
def test_bad_options_are_refused(option: dict) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        breakeven(cost_rows(falling(2.0, 0.0)), 3.0, **option)


def test_import_is_light() -> None:
    code = (
        "import sys, time; begin = time.perf_counter();"
        "import labkit.breakeven, labkit.decide.compare, labkit.decide.engine_figures;"
        "print(time.perf_counter() - begin); print(*sorted({'torch', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    seconds, *heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert heavy == []
    # The goal is one second on a quiet machine; the room is for a busy one.
    assert float(seconds) < 5
