"""Step rows as costs, their parts and closure, pairings, figures and answers, on planted forwards."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from labkit.breakeven import breakeven
from labkit.cli import main
from labkit.decide.forward_costs import FREE, draft_forwards, loop_rows
from labkit.decide.pairings import Pairing, engine_pairings, measured_pairings, pairing_cells, pairing_table
from labkit.decide.step_costs import step_costs
from labkit.errors import InputError
from labkit.plots.pairings import figure_pairings, figure_step_ladder, ladder_table
from labkit.plots.panels import breakeven_floor
from labkit.plots.step import RESIDUAL, figure_step_parts, step_parts
from labkit.steps.answers import PUBLISHED_LENGTHS, one_target, step_answer, story_table
from labkit.steps.table import closure_table, forward_table, throughput_table
from tests.drawn import all_texts, assert_well_placed
from tests.step_worlds import Physics, StepWorld, step_rows
from tests.synthetic import GPU, write_run_of

EXACT = StepWorld(backends=("triton_split", "triton_nosplit"), num_rounds=4)
ENGINES = StepWorld(
    backends=("triton_decode8", "triton_nosplit", "flashinfer_decode", "flashinfer_fa2", "triton_split"),
    contexts=(1024, 4096, 16384, 65536, 131072, 262144),
    q_lens=(1, 4, 8),
    noise=0.01,
    kv_dtypes=("bfloat16", "float8_e4m3fn"),
    draft_ms=0.3,
)
SIDECARS = {
    EXACT.run_id: {"calibration": {"read_gb_per_s": 4000.0, "matrix_tflops_per_s": {"bfloat16": 700.0}, "num_sms": 132}}
}


@pytest.fixture(scope="module")
def engines():
    return step_rows(ENGINES)


def true_ms(backend: str, context: int, q_len: int) -> float:
    return sum(Physics().parts(backend, 1, context, q_len, 1.0, 1.0).values())


def cost(costs, **wanted):
    return next(c for c in costs if all(c.key[name] == value for name, value in wanted.items()))


def test_a_speculative_step_is_a_verify_forward():
    costs = step_costs(step_rows(EXACT))
    assert {c.num_speculative_tokens for c in costs} == {1, 3, 7}
    cell = cost(costs, context_len=65536, verify_backend="triton_nosplit", num_speculative_tokens=7)
    assert cell.key["drafter"] == FREE
    assert cell.step_ms.shape == (4, 8)
    for j in (0, 1, 3, 7):
        assert cell.step_ms[:, j] == pytest.approx(true_ms("triton_nosplit", 65536, j + 1))
    assert np.isnan(cell.step_ms[:, [2, 4, 5, 6]]).all()
    assert cell.decode_ms["triton_split"] == pytest.approx(true_ms("triton_split", 65536, 1))


@pytest.mark.parametrize(("extend_ms", "drafting"), [(None, 7 * 0.3), (0.5, 0.5 + 6 * 0.3)])
def test_a_drafters_forwards_are_added(extend_ms, drafting):
    costs = step_costs(step_rows(EXACT.with_(draft_ms=0.3, extend_ms=extend_ms)))
    wanted = {"verify_backend": "triton_split", "draft_backend": "triton_split", "drafter": "head"}
    cell = cost(costs, context_len=4096, num_speculative_tokens=7, **wanted)
    assert cell.step_ms[:, 7] == pytest.approx(true_ms("triton_split", 4096, 8) + drafting)
    assert cell.step_ms[:, 0] == pytest.approx(true_ms("triton_split", 4096, 1))
    assert all(c.key["draft_backend"] in (None, c.key["verify_backend"]) for c in costs)


def test_which_forwards_draft():
    one, block, extend = ("draft", 1), ("draft", 8), ("draft_extend", 8)
    assert draft_forwards([one], 0) == []
    assert draft_forwards([one], 3) == [(one, 3)]
    assert draft_forwards([one, extend], 7) == [(extend, 1), (one, 6)]
    assert draft_forwards([one, extend, ("draft_extend", 4)], 5) is None
    assert draft_forwards([extend], 1) == [(extend, 1)]
    assert draft_forwards([block], 7) == [(block, 1)]
    assert draft_forwards([block], 3) is None


def test_ratios_are_paired_in_rounds_that_drift():
    drifting = step_rows(EXACT.with_(drift=0.3, num_rounds=8, contexts=(65536,)))
    cells = breakeven(drifting, 3.0, resamples=200).cells
    cell = cells[(cells["verify_backend"] == "triton_nosplit") & (cells["num_speculative_tokens"] == 7)].iloc[0]
    ratio = true_ms("triton_nosplit", 65536, 8) / true_ms("triton_split", 65536, 1)
    assert cell["relative_step_cost"] == pytest.approx(ratio, rel=1e-9)
    assert cell["verdict"] == "cannot_pay"


def test_doubtful_samples_and_shared_prefixes():
    rows = step_rows(EXACT.with_(contexts=(4096,)))
    rows.loc[rows["round"] == 2, "quality"] = "clock changed"
    assert any("clock changed" in note for note in step_costs(rows)[0].notes)
    shared = rows.assign(shared_prefix_len=2048, group="shared", context_len=4096.0, forward_ms=1.0)
    both = step_costs(step_rows(EXACT.with_(contexts=(4096,))))
    mixed = [rows.assign(shared_prefix_len=None), shared]
    assert step_costs(pd.concat(mixed))[0].step_ms == pytest.approx(both[0].step_ms, nan_ok=True)


def test_bad_rows_are_named():
    rows = step_rows(EXACT)
    with pytest.raises(InputError, match="phases decode and verify as costs, got decode"):
        step_costs(rows[rows["phase"] == "decode"])
    with pytest.raises(InputError, match="need run_id, group and round"):
        step_costs(rows.assign(round=None))
    drafted = step_rows(EXACT.with_(draft_ms=0.3)).assign(drafter=None)
    with pytest.raises(InputError, match="drafter must be given"):
        step_costs(drafted)


def test_the_command_takes_step_runs(tmp_path, capsys):
    path = write_run_of(step_rows(EXACT), tmp_path, dataclasses.replace(GPU, target=EXACT.target), "step")
    assert main(["breakeven", "--cost", str(path.parent.parent), "--acceptance-length", "3"]) == 0
    out = capsys.readouterr().out
    assert "none (drafting free) drafter" in out
    assert "triton_nosplit, k=7, imposed: pays below" in out
    assert main(["breakeven", "--cost", str(path), "--acceptance-length", "3"]) == 0
    assert main(["breakeven", "--cost", str(tmp_path / "nothing"), "--acceptance-length", "3"]) == 2
    path.write_bytes(b"broken")
    assert main(["breakeven", "--cost", str(tmp_path), "--acceptance-length", "3"]) == 2
    assert "sha256" in capsys.readouterr().err


def test_the_floor_of_a_random_target_is_known():
    cells = breakeven(step_rows(EXACT), 3.0, resamples=100).cells
    floor = breakeven_floor(cells)
    assert floor["relative_step_cost"].between(1.0, 1.05).all()
    assert len(floor) == len(EXACT.contexts) * 3


def test_parts_floors_and_residual():
    rows = step_rows(EXACT)
    rows["gap_ms"] -= 0.2
    table = forward_table(rows, SIDECARS)
    row = table[(table["phase"] == "verify") & (table["q_len"] == 8) & (table["context_len"] == 65536)].iloc[-1]
    assert row["residual_ms"] == pytest.approx(0.2)
    assert row["attention_floor_ms"] == pytest.approx(131072 * 65544 / 4000 / 1e6)
    assert row["linear_floor_ms"] == pytest.approx(15e9 / 4000 / 1e6)
    assert row["over_floor"] == pytest.approx(row["forward_ms"] / (row["attention_floor_ms"] + row["linear_floor_ms"]))
    wide = rows.assign(batch_size=64)  # 512 tokens: two FLOPs per weight and token outlast the reading
    floor = forward_table(wide, SIDECARS)
    assert floor.loc[floor["q_len"] == 8, "linear_floor_ms"].iloc[0] == pytest.approx(2 * 7.5e9 * 512 / 700e12 * 1e3)
    assert np.isnan(forward_table(rows)["floor_ms"]).all()


def test_throughput_of_a_shared_prefix():
    rows = step_rows(EXACT.with_(batches=(8,), contexts=(4096,)))
    table = throughput_table(rows.assign(shared_prefix_len=2048)).set_index("backend")
    step_ms = sum(Physics().parts("triton_split", 8, 4096, 4, 1.0, 1.0).values())
    assert table.loc["triton_split", "tokens_per_s"] == pytest.approx(8 * 3.25 / step_ms * 1e3)
    plain_ms = sum(Physics().parts("triton_split", 8, 4096, 1, 1.0, 1.0).values())
    assert table.loc["triton_split", "plain_tokens_per_s"] == pytest.approx(8 / plain_ms * 1e3)
    with pytest.raises(InputError, match="shared prefix: want verify forwards of 4 tokens"):
        throughput_table(rows)


def test_closure_of_parts_and_of_the_loop():
    rows = step_rows(EXACT)
    rows["gap_ms"] -= 0.02 * rows["forward_ms"]
    (parts,) = closure_table(rows).to_dict("records")
    assert parts["median_residual"] == pytest.approx(0.02)
    assert parts["closes"]
    loop = loop_like(rows, 1.08)
    both = closure_table(rows, loop).set_index("check")
    assert both.loc["forwards of a step", "median_residual"] == pytest.approx(1 - 1 / 1.08)
    assert not both.loc["forwards of a step", "closes"]
    accepted = loop.assign(accept_ms=0.05 * loop["step_ms"])  # what the loop timed as accepting is explained
    both = closure_table(rows, accepted).set_index("check")
    assert both.loc["forwards of a step", "median_residual"] == pytest.approx(1 - 1 / 1.08 - 0.05)
    unprofiled = rows.assign(attention_ms=None)
    with pytest.raises(InputError, match="want forwards with profiled parts"):
        closure_table(unprofiled.astype({"attention_ms": float}), loop.assign(origin="measured"))


def loop_like(rows, slower):
    """Loop rows whose wall time is the isolated forwards times `slower`, drafted by n-grams."""
    loop = loop_rows(rows).assign(origin="forced", experiment="loop", status="ok")
    loop["drafter"] = loop["drafter"].where(loop["drafter"].isna(), "ngram")
    return loop.assign(step_ms=loop["step_ms"] * slower, draft_ms=0.0, accept_ms=0.0)


def test_engine_settings_are_resolved_to_backends(engines):
    assert Pairing("sglang triton", "triton_decode8", "triton_nosplit") in engine_pairings()
    table = pairing_table(engines).set_index("label")
    assert table.loc["sglang triton", "measured"] == "yes"
    assert table.loc["sglang fa3, vllm FLASH_ATTN", "measured"] == "no decode on fa3, no verify on fa3"
    found = measured_pairings(engines)
    assert [pairing.verify_backend for pairing in found[:2]] == ["triton_nosplit", "flashinfer_fa2"]
    assert Pairing("triton_split, both roles", "triton_split", "triton_split") in found


def test_own_baseline_flatters_a_slow_decode():
    rows, slow = step_rows(EXACT), Pairing("slow", "triton_nosplit", "triton_nosplit")
    options = {"num_speculative_tokens": 7, "acceptance_length": 3.0}
    own = pairing_cells(rows, slow, baseline="own", **options)[0].set_index("context_len")
    fastest, curves = pairing_cells(rows, slow, **options)
    assert own.loc[131072, "verdict"] == "pays"
    assert fastest.set_index("context_len").loc[131072, "verdict"] == "cannot_pay"
    assert own.loc[131072, "step_ms"] == pytest.approx(true_ms("triton_nosplit", 131072, 8))
    assert [c["direction"] for c in curves[0]["crossovers"]] == ["pays below"]
    with pytest.raises(InputError, match="slow was not measured at k = 5"):
        pairing_cells(rows, slow, num_speculative_tokens=5, acceptance_length=3.0)


def test_a_pairing_drafts_on_its_own_backends():
    rows = step_rows(EXACT.with_(draft_ms=0.3, extend_ms=0.5))
    on_slow = rows["phase"].eq("draft_extend") & rows["backend"].eq("triton_nosplit")
    rows.loc[on_slow, "forward_ms"] = 2.0
    pair, options = Pairing("x", "triton_split", "triton_nosplit"), {"num_speculative_tokens": 7}
    cells = pairing_cells(rows, pair, acceptance_length=3.0, drafter="head", **options)[0]
    assert cells["context_len"].is_unique
    assert set(cells["draft_backend"]) == {"triton_split + triton_nosplit"}
    step = cells.set_index("context_len").loc[4096, "step_ms"]
    assert step == pytest.approx(true_ms("triton_nosplit", 4096, 8) + 2.0 + 6 * 0.3)
    with pytest.raises(InputError, match="head: draft_extend not measured on the backends of x"):
        pairing_cells(rows[~on_slow], pair, acceptance_length=3.0, drafter="head", **options)
    with pytest.raises(InputError, match="none of the step rows is of 'other'"):
        pairing_cells(rows, pair, acceptance_length=3.0, drafter="other", **options)


def test_parts_of_a_step_sum_to_its_time():
    rows = step_rows(EXACT.with_(draft_ms=0.3, extend_ms=0.5))
    pair = Pairing("x", "triton_split", "triton_nosplit")
    options = {"context_len": 4096, "num_speculative_tokens": 7, "drafter": "head"}
    parts = step_parts(forward_table(rows), pair, **options)
    for own in parts.values():
        assert sum(value for name, value in own.items() if name != "total") == pytest.approx(own["total"])
    assert parts["speculative"]["draft attention"] == pytest.approx((0.5 + 6 * 0.3) / 4)
    assert parts["plain"][RESIDUAL] == pytest.approx(0.0, abs=1e-12)


def test_story(engines):
    bfloat16 = engines[engines["kv_dtype"] == "bfloat16"]
    table = story_table(bfloat16).set_index("context_len")
    slow, fast = true_ms("triton_nosplit", 131072, 8), true_ms("flashinfer_fa2", 131072, 8)
    assert table.loc[131072, "step_ratio"] == pytest.approx(slow / fast, rel=0.03)
    attention = [Physics().parts(b, 1, 131072, 8, 1, 1)["attention_ms"] for b in ("triton_nosplit", "flashinfer_fa2")]
    assert table.loc[131072, "attention_ratio"] == pytest.approx(attention[0] / attention[1], rel=1e-6)
    assert table.loc[131072, "rest_share"] == pytest.approx(1 - attention[1] / fast, rel=0.03)
    text = step_answer(bfloat16, sidecars=SIDECARS)
    assert "- bfloat16 KV at 256K: the fastest plain decode (" in text
    assert "sglang triton, against its own plain decode: with 2.49 tokens per step it pays up to" in text
    assert "193 and 28 ms, 6.9 times; more here." in text
    assert "sglang flashinfer, against the fastest plain decode: with 2.49 tokens per step it pays" in text
    assert pytest.approx((2.49, 3.27), abs=0.005) == PUBLISHED_LENGTHS
    partly = engines[(engines["kv_dtype"] == "bfloat16") | (engines["backend"] != "triton_nosplit")]
    partly = partly[partly["context_len"] > 60_000]
    assert "- float8_e4m3fn KV, sglang triton: not measured at k = 7." in step_answer(partly, acceptance_lengths=(3.0,))
    alone = step_answer(bfloat16[bfloat16["backend"] == "triton_split"])
    assert "The published comparison is not in these rows: pairings: want two" in alone


def test_one_target_prefers_the_hybrid(engines):
    both = pd.concat([engines, engines.head(50).assign(target="random:hybrid-27b")])
    assert set(one_target(both)["target"]) == {"random:hybrid-27b"}
    assert set(one_target(both, "random:llama-3-8b")["target"]) == {"random:llama-3-8b"}
    with pytest.raises(InputError, match="none of x at batch 1; targets"):
        one_target(both, "x")


def test_ladder_shows_where_the_bottleneck_moves(engines):
    table = ladder_table(engines[engines["kv_dtype"] == "bfloat16"], context_len=65536)
    assert table["backend"].iloc[0] == "triton_nosplit"
    assert table["bottleneck"].iloc[0] == "attention"
    assert table["bottleneck"].iloc[-1] == "linear"
    assert table["attention_gain"].iloc[1] > 2 * table["step_gain"].iloc[1] > 2
    with pytest.raises(InputError, match="want two backends"):
        ladder_table(engines, context_len=100)


@pytest.mark.parametrize("width_in", [7.0, 3.4])
def test_step_parts_figure(engines, width_in):
    figure = figure_step_parts(engines, acceptance_length=3.27, drafter="head", sidecars=SIDECARS, width_in=width_in)
    assert_well_placed(figure)
    texts = [text.get_text() for text in all_texts(figure)]
    assert "context 256K" in texts
    assert any(text.startswith("pays\n+") for text in texts)
    assert any(text.startswith("loses\n−") for text in texts)
    assert any("draft attention" in text for text in texts)
    for ax in figure.axes:
        assert ax.get_ylim()[0] == 0


def test_residual_is_hatched(engines):
    rows = engines.assign(gap_ms=engines["gap_ms"] - 0.3)
    figure = figure_step_parts(rows, acceptance_length=3.27)
    assert any(patch.get_hatch() for ax in figure.axes for patch in ax.patches)
    assert any("residual" in text.get_text() for text in all_texts(figure))


@pytest.mark.parametrize("dtypes", [1, 2])
def test_pairings_figure(engines, dtypes):
    rows = engines if dtypes == 2 else engines[engines["kv_dtype"] == "bfloat16"]
    figure = figure_pairings(rows, acceptance_length=3.27)
    assert len(figure.axes) == 2 * dtypes
    assert_well_placed(figure)
    partly = rows[(rows["kv_dtype"] == "bfloat16") | (rows["backend"] != "triton_nosplit")]
    titles = [ax.get_title(loc="left") for ax in figure_pairings(partly, acceptance_length=3.27).axes]
    assert ("float8_e4m3fn KV (not measured: sglang triton)" in titles) == (dtypes == 2)
    mixed = rows.assign(target=np.where(rows["round"] == 0, "a", "b"))
    with pytest.raises(InputError, match="one figure holds one target"):
        figure_pairings(mixed, acceptance_length=3.27)


def test_ladder_figure(engines):
    figure = figure_step_ladder(engines, sidecars=SIDECARS, context_len=65536)
    assert_well_placed(figure)
    assert any("attention" in text.get_text() and "step" in text.get_text() for text in figure.axes[0].texts)


def test_a_prefill_has_the_floor_of_its_flops_and_is_no_cost():
    rows = step_rows(EXACT.with_(contexts=(4096,)))
    prefill = rows[rows["phase"] == "decode"].assign(phase="prefill", q_len=4096, context_len=0.0, group="prompt")
    both = pd.concat([rows, prefill])
    table = forward_table(both, SIDECARS).set_index("phase").loc["prefill"]
    # 32 layers of 218 M weights, all tokens; the head of 4096 x 128,256, one; 4 FLOPs per pair, head and dimension.
    flops = 2 * 32 * 218_103_808 * 4096 + 2 * 4096 * 128_256 + 4 * 32 * 32 * 128 * 4096 * 4097 // 2
    assert table["floor_ms"].to_numpy() == pytest.approx(flops / 700e12 * 1e3)
    assert table["attention_floor_ms"].isna().all()
    assert forward_table(prefill)["floor_ms"].isna().all(), "no matrix rate, no floor"
    assert len(step_costs(both)) == len(step_costs(rows))


def test_a_step_of_two_devices_is_that_of_another_machine():
    rows = step_rows(EXACT.with_(contexts=(4096,)))
    two = rows.assign(num_gpus=2, group="two", forward_ms=rows["forward_ms"] / 2 + 0.3, communication_ms=0.3)
    costs = step_costs(pd.concat([rows, two]))
    assert {c.key["gpu"] for c in costs} == {EXACT.gpu, f"{EXACT.gpu} x2"}
    cell = cost(costs, gpu=f"{EXACT.gpu} x2", context_len=4096, verify_backend="triton_split", num_speculative_tokens=7)
    assert cell.step_ms[:, 7] == pytest.approx(true_ms("triton_split", 4096, 8) / 2 + 0.3)
    assert set(forward_table(pd.concat([rows, two]))["num_gpus"]) == {1, 2}
