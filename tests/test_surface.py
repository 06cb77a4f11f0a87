"""Composed steps, causes, the floor, and the one call that holds the whole verdict, on planted step rows."""

import numpy as np
import pandas as pd
import pytest

from labkit.decide.cause import diagnose_slopes, slope_causes, waterfall
from labkit.decide.composed import composed_costs
from labkit.decide.composed import cost_rows as surface_costs
from labkit.decide.forward_costs import FREE
from labkit.decide.step_costs import step_costs
from labkit.decide.surface import read_rates, verdict_surface
from labkit.decide.verdict import crossing_lines
from labkit.errors import InputError
from tests.worlds import AcceptanceWorld, CostWorld, StepWorld, acceptance_rows, cost_rows, step_rows

WORLD = StepWorld()
# One read of the KV cache of 1K tokens of qwen3-8b in bfloat16 takes `kv_ms_per_1k` at this bandwidth.
READ_GB_PER_S = 147_456 * 1024 / (WORLD.kv_ms_per_1k * 1e6)


def relative_cost(rows: pd.DataFrame, **cell: object) -> float:
    cells = verdict_surface(rows).result.cells
    cell = {"drafter": "eagle3"} | cell
    (found,) = cells[(cells[list(cell)] == pd.Series(cell)).all(axis=1)]["relative_step_cost"]
    return float(found)


def test_a_composed_step_is_its_forwards_over_decode() -> None:
    # 16K tokens: decode 10 + 0.8 + 0.1; k = 7 drafts of 0.4 each, verify like decode.
    wanted = (10.9 + 7 * 0.4) / 10.9
    assert relative_cost(step_rows(WORLD), context_len=16384, num_speculative_tokens=7) == pytest.approx(wanted)


def test_the_first_draft_may_be_an_extend_and_a_block_drafter_drafts_at_once() -> None:
    rows = step_rows(WORLD)
    extend = rows[rows["phase"] == "draft"].assign(phase="draft_extend", q_len=8, forward_ms=2.0)
    wanted = (10.9 + 2.0 + 6 * 0.4) / 10.9
    both = pd.concat([rows, extend])
    assert relative_cost(both, context_len=16384, num_speculative_tokens=7) == pytest.approx(wanted)
    block = rows[rows["phase"] == "draft"].assign(q_len=8, forward_ms=1.5)
    rows = pd.concat([rows[rows["phase"] != "draft"], block])
    assert relative_cost(rows, context_len=16384, num_speculative_tokens=7) == pytest.approx((10.9 + 1.5) / 10.9)


def test_free_drafting_is_a_lower_bound_and_can_be_named() -> None:
    rows = step_rows(WORLD.with_(drafter=None))
    cells = verdict_surface(rows).result.cells
    assert set(cells["drafter"]) == {FREE}
    assert cells["relative_step_cost"].tolist() == pytest.approx([1.0] * len(cells))
    text = acceptance_rows(AcceptanceWorld(target="qwen3-8b", num_speculative_tokens=7))
    named = verdict_surface(rows, text, free_drafter="ngram", resamples=200).result.cells
    assert named["speedup"].notna().all()


def test_half_of_the_forwards_are_no_step() -> None:
    rows = step_rows(WORLD)
    with pytest.raises(InputError, match="must hold the phases decode and verify"):
        composed_costs(rows[rows["phase"] != "decode"])
    with pytest.raises(InputError, match=r"step rows lack the column\(s\) forward_ms"):
        composed_costs(rows.drop(columns="forward_ms"))
    with pytest.raises(InputError, match="want step rows, or loop rows of a cost run"):
        surface_costs(cost_rows(CostWorld(lambda *_: 1.0, lambda *_: 1.0)).assign(origin="measured"))


def test_loop_and_step_rows_of_one_frame_both_count() -> None:
    loop = cost_rows(CostWorld(lambda *_: 10.0, lambda _, __, j: 12.0))
    cells = verdict_surface(pd.concat([loop, step_rows(WORLD)], ignore_index=True)).result.cells
    assert set(cells["drafter"]) == {"ngram", "eagle3", FREE}


def test_a_cell_of_the_loop_is_not_pooled_with_composed_steps() -> None:
    world = CostWorld(lambda *_: 10.0, lambda _, __, j: 20.0, context_lens=(4096,), num_speculative_tokens=7,
                      target="qwen3-8b", gpu="nvidia-h200", verify_backends=("triton_split",),
                      decode_backends=("triton_split",), drafter=FREE)  # fmt: skip
    loop = cost_rows(world).assign(weight_dtype="bfloat16", kv_dtype="bfloat16", draft_backend=None)
    rows = pd.concat([loop.astype({"context_len": float}), step_rows(WORLD)], ignore_index=True)
    cells = verdict_surface(rows, resamples=200).result.cells
    same = cells[(cells["context_len"] == 4096) & (cells["drafter"] == FREE)]
    costs = same.set_index("num_speculative_tokens")["relative_step_cost"]
    assert costs[7] == pytest.approx(2.0)
    assert costs[3] == pytest.approx(1.0)


# ---- cause ----------------------------------------------------------------------------------------------------------


def test_the_waterfall_adds_up_to_the_relative_cost() -> None:
    costs = step_costs(composed_costs(step_rows(WORLD.with_(draft_reads=0.1))))
    table = waterfall(costs)
    table = table[table["drafter"] == "eagle3"]
    for (context, k), cell in table.groupby(["context_len", "num_speculative_tokens"]):
        parts = cell.set_index("part")["tokens"]
        decode = 10.1 + 0.05 * context / 1024
        assert parts.sum() == pytest.approx(cell["relative_step_cost"].iloc[0])
        assert parts["unexplained"] == pytest.approx(0, abs=1e-12)
        assert parts["draft rest"] == pytest.approx(k * 0.4 / decode)
        assert parts["draft attention"] == pytest.approx(k * 0.1 * 0.05 * context / 1024 / decode)
        assert parts["verify attention"] == pytest.approx(0.05 * context / 1024 / decode)
        assert parts["sampling"] == pytest.approx(0.1 / decode)


def test_attention_not_timed_apart_is_one_bar() -> None:
    table = waterfall(step_costs(composed_costs(step_rows(WORLD).assign(attention_ms=np.nan))))
    assert set(table.loc[table["drafter"] == "eagle3", "part"]) == {
        "draft",
        "verify",
        "sampling",
        "communication",
        "gap",
        "unexplained",
    }


CAUSES = [
    (WORLD, "healthy"),
    (WORLD.with_(reads=lambda _, q: 6.0 if q > 1 else 1.0), "verify lacks a KV split"),
    (WORLD.with_(reads=lambda _, q: float(q)), "KV re-read per draft token"),
    (WORLD.with_(reads=lambda _, q: 6.0), "baseline degenerate: decode as well as verify is far above one KV read"),
    (WORLD.with_(draft_reads=0.4), "drafter scans the full context"),
    (WORLD.with_(reads=lambda _, q: float(q), q_lens=(8,)), "KV re-read per draft token (likely)"),
    (WORLD.with_(context_lens=(1024, 4096)), "unknown"),
]


@pytest.mark.parametrize(("world", "cause"), CAUSES, ids=[cause for _, cause in CAUSES])
def test_planted_causes_are_named(world: StepWorld, cause: str) -> None:
    costs = step_costs(composed_costs(step_rows(world.with_(noise=0.01))))
    table = slope_causes(costs, READ_GB_PER_S)
    assert set(table.loc[table["drafter"] == "eagle3", "diagnosis"]) == {cause}
    if cause == "healthy":
        assert table["verify_slope_over_floor"].tolist() == pytest.approx([1.0] * 4, rel=0.1)


def test_without_a_read_bandwidth_the_cause_is_unknown_and_the_ratio_stands() -> None:
    rows = step_rows(WORLD.with_(reads=lambda _, q: float(q)))
    table = slope_causes(step_costs(composed_costs(rows)), None)
    assert set(table["diagnosis"]) == {"unknown"}
    assert table["verify_decode_slope_ratio"].tolist() == pytest.approx([4.0, 8.0] * 2)
    assert diagnose_slopes(1.0, float("nan"), 8)[0] == "unknown"


def test_the_floor_says_how_much_of_the_length_is_inefficiency() -> None:
    lacking = WORLD.with_(reads=lambda _, q: 6.0 if q > 1 else 1.0, drafter=None)
    floors = verdict_surface(step_rows(lacking), read_gb_per_s={"nvidia-h200": READ_GB_PER_S}).floors
    assert (floors["floor"] < 1.01).all()
    longest = floors[floors["context_len"] == 65536].iloc[0]
    assert longest["above_floor"] == pytest.approx(longest["relative_step_cost"] - longest["floor"])
    assert longest["above_floor"] > 1


# ---- the whole verdict ----------------------------------------------------------------------------------------------


def test_read_rates_are_medians_per_gpu() -> None:
    sidecars = {
        name: {"gpu": "a", "calibration": {"read_gb_per_s": rate}} for name, rate in zip("xyz", (1, 2, 9), strict=True)
    }
    assert read_rates(sidecars | {"w": {"gpu": "b", "calibration": None}}) == {"a": 2.0}


def test_acceptance_joins_inside_its_band_for_the_same_pair_only() -> None:
    text = AcceptanceWorld(
        target="qwen3-8b", drafter="eagle3", num_speculative_tokens=7, context_len_low=2048, context_len_high=32768
    )
    surface = verdict_surface(step_rows(WORLD), acceptance_rows(text), resamples=200)
    cells = surface.result.cells[surface.result.cells["drafter"] == "eagle3"]
    inside = cells["context_len"].between(2048, 32767)
    assert cells.loc[inside, "mean_acceptance_length"].notna().all()
    assert cells.loc[~inside, "mean_acceptance_length"].isna().all()
    # k = 3 was not measured: cut from k = 7, and said so.
    assert set(cells.loc[inside & (cells["num_speculative_tokens"] == 3), "origin"]) == {"modelled"}
    assert set(cells.loc[inside & (cells["num_speculative_tokens"] == 7), "origin"]) == {"measured"}
    assert set(surface.best["context_len"]) == {4096, 16384}
    with pytest.raises(InputError, match=r"drafter is eagle3, none .* in the cost rows and mtp in the acceptance rows"):
        verdict_surface(step_rows(WORLD), acceptance_rows(text.with_(drafter="mtp")))


def test_the_turning_point_with_concurrency_is_found() -> None:
    """Decode grows with the batch by its KV reads, verify six times as fast: a cost of 3 is met at a planted batch."""
    world = WORLD.with_(reads=lambda _, q: 6.0 if q > 1 else 1.0, drafter=None, context_lens=(16384,))
    world = world.with_(batch_sizes=(1, 2, 4, 8, 16, 32, 64), q_lens=(8,), sampling_ms=0.0, kv_ms_per_1k=0.025)
    surface = verdict_surface(step_rows(world.with_(noise=0.01)), 3.0, resamples=200)
    (curve,) = surface.result.turning_points
    (turn,) = curve["crossovers"]
    truth = 20 / (3 * 0.4)  # 10 + 6 x = 3 (10 + x) at x = 0.4 ms per request
    assert turn["direction"] == "pays below"
    assert turn["low"] <= truth * 1.05
    assert turn["high"] >= truth * 0.95
    assert turn["batch_size"] == pytest.approx(truth, rel=0.1)
    (line,) = crossing_lines(surface.result)
    assert line.startswith("triton_split, k=7, imposed, context 16,384: pays below 1")
    assert line.endswith("concurrent requests (pays at 16, loses at 32)")
    assert verdict_surface(step_rows(WORLD), 3.0, resamples=200).result.turning_points == []
