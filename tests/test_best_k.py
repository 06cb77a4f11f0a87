"""Best k, regret, acceptance at a smaller k, scheduled verify, and the command that prints them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import AcceptanceCounts, counts_from_frame
from labkit.breakeven import breakeven
from labkit.cli import main
from labkit.decide.best_k import best_k, cut_acceptance, cut_bias, regret, scheduled_verify
from labkit.decide.capacity import capacity, render
from labkit.decide.recommend import engine_flags, recommend
from labkit.decide.step_costs import step_costs
from labkit.errors import InputError
from labkit.shapes import model_shape
from tests.synthetic import CPU, loop_rows, write_run_of, write_runs
from tests.synthetic import acceptance_rows as synthetic_acceptance
from tests.worlds import AcceptanceWorld, CostWorld, acceptance_rows, cost_rows, rows_of_counts


def costs_at(ks: tuple[int, ...], per_draft: float, contexts: tuple[int, ...] = (1024,)) -> pd.DataFrame:
    """Loop rows without noise: a step with j drafts costs 1 + per_draft * j plain steps at 1K, twice that at 2K, ..."""
    worlds = [
        CostWorld(
            lambda _, __: 10.0,
            lambda _, context, j: 10.0 * (1 + per_draft * context / 1024 * j),
            context_lens=contexts,
            num_speculative_tokens=k,
            run_id=f"run-{k}",
        )
        for k in ks
    ]
    return pd.concat([cost_rows(world) for world in worlds], ignore_index=True)


def geometric(k: int, keep: float, num_prompts: int = 4) -> pd.DataFrame:
    """Prompts that keep each further draft with one chance, in exact proportions of 10,000 steps."""
    kept = 10_000 * keep ** np.arange(k + 1) * np.append(np.full(k, 1 - keep), 1.0)
    histogram = np.zeros((k + 1, k + 1), dtype=int)
    histogram[k] = np.round(kept)
    return rows_of_counts([AcceptanceCounts(tuple(map(tuple, histogram.tolist())))] * num_prompts)


def test_the_planted_best_k_is_found_and_zero_is_a_choice() -> None:
    """length(k) = 1 + .6 + .36 + ...: at 0.2 per draft k = 3 is best, at 1.6 (8K) nothing pays."""
    rows = costs_at((1, 2, 3, 4), 0.2, (1024, 8192))
    cells = breakeven(rows, pd.concat([geometric(k, 0.6) for k in (1, 2, 3, 4)]), resamples=200).cells
    speedups = {k: sum(0.6**i for i in range(k + 1)) / (1 + 0.2 * k) for k in (1, 2, 3, 4)}
    found = best_k(cells).set_index("context_len")
    assert found.loc[1024, "best_k"] == max(speedups, key=lambda k: speedups[k])
    assert found.loc[1024, "speedup"] == pytest.approx(max(speedups.values()), rel=1e-3)
    assert (found.loc[8192, "best_k"], found.loc[8192, "speedup"]) == (0, 1.0)
    table = regret(cells).set_index("num_speculative_tokens")
    assert table.loc[0, "mean_regret"] == pytest.approx((1 - 1 / max(speedups.values())) / 2, rel=1e-3)
    # k = 4 at 8K costs 1 + 1.6 * 4 plain steps for 2.3056 tokens.
    assert table.loc[4, "worst_regret"] == pytest.approx(1 - sum(0.6**i for i in range(5)) / 7.4, rel=1e-3)
    assert table.loc[4, "worst_context_len"] == 8192


def test_acceptance_is_cut_from_the_next_larger_k_and_is_modelled() -> None:
    measured = geometric(4, 0.6)
    both = cut_acceptance(measured, [2, 4, 7])
    assert sorted(both["num_speculative_tokens"].unique()) == [2, 4]
    cut = both[both["num_speculative_tokens"] == 2]
    assert set(cut["origin"]) == {"modelled"}
    assert counts_from_frame(cut).mean_acceptance_length == pytest.approx(1 + 0.6 + 0.36, rel=1e-3)
    assert cut_acceptance(measured, [4]) is measured


def test_the_bias_of_cutting_is_none_for_a_chain_and_seen_for_another_drafter() -> None:
    none = cut_bias(pd.concat([geometric(4, 0.6), geometric(2, 0.6)])).iloc[0]
    assert none["ratio"] == pytest.approx(1, abs=1e-3)
    other = cut_bias(pd.concat([geometric(4, 0.5), geometric(2, 0.6)])).iloc[0]
    assert other["ratio"] == pytest.approx(1.75 / 1.96, rel=1e-3)
    assert (other["num_speculative_tokens"], other["cut_from"], other["num_prompts"]) == (2, 4, 4)


def test_scheduled_verify_is_bounded_by_the_drafts_that_are_kept() -> None:
    costs = step_costs(costs_at((4,), 0.2))
    (row,) = scheduled_verify(costs, geometric(4, 0.6)).to_dict("records")
    kept = 0.6 ** np.arange(5) * np.append(np.full(4, 0.4), 1.0)
    length = sum(0.6**i for i in range(5))
    assert row["static_speedup"] == pytest.approx(length / 1.8, rel=1e-3)
    assert row["scheduled_speedup"] == pytest.approx(length / (kept @ (1 + 0.2 * np.arange(5))), rel=1e-3)
    # With free verify and dear drafting there is nothing to schedule.
    rows = costs_at((4,), 0.2)
    rows["draft_ms"] = rows["step_ms"] - 10.0
    (row,) = scheduled_verify(step_costs(rows), geometric(4, 0.6)).to_dict("records")
    assert row["gain"] == pytest.approx(1)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder, CPU, ("loop", "acceptance"))
    large = (
        loop_rows(CPU)
        .query("verify_backend == 'sdpa'")
        .iloc[:1]
        .assign(status="oom", reason="no memory", context_len=65536.0, run_id="20260201T000000Z-dddddd")
    )
    write_run_of(large.assign(step_ms=None, point_key="large"), folder, CPU, "loop")
    return folder


def test_best_k_prints_a_table_with_what_does_not_fit(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best-k", str(stored)]) == 0
    text = capsys.readouterr().out
    assert "verify on sdpa, code_editing" in text
    assert all("does not fit" in part for part in text.split("\n\n") if "verify on sdpa" in part)
    assert not any("does not fit" in part for part in text.split("\n\n") if "verify on per_token" in part)
    assert "off" in text
    assert "everywhere loses" in text
    assert main(["best-k", str(stored), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["does_not_fit"] == [
        {"gpu": CPU.gpu, "target": CPU.target, "drafter": "ngram", "verify_backend": "sdpa"}
        | {"context_len": 65536.0, "batch_size": 1}
    ]
    assert {row["best_k"] for row in found["best_k"]} <= {0, 2, 4}


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("sglang", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5"),
        ("vllm", """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""),
        ("trtllm", "speculative_config:\n  decoding_type: NGram\n  max_draft_len: 4"),
    ],
)
def test_emit_prints_flags(stored: Path, capsys: pytest.CaptureFixture[str], engine: str, flags: str) -> None:
    where = ["--where", "workload=code_editing", "verify_backend=sdpa"]
    assert main(["best-k", str(stored), "--emit", engine, *where]) == 0
    comment, printed = capsys.readouterr().out.strip().split("\n", 1)
    assert printed == flags
    assert comment.startswith("# k = 4 loses least over")
    assert "undecided" in comment


def test_flags_count_the_root_where_the_engine_does() -> None:
    chain = engine_flags("sglang", "eagle3@1a2b3c4d", 3)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in chain
    assert '"method": "draft_model", "num_speculative_tokens": 3' in engine_flags("vllm", "qwen3-0.6b", 3)
    assert engine_flags("vllm", "ngram", 0).startswith("# vllm: no speculative flags")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emit", "nosuch", "--where", "workload=prose", "verify_backend=sdpa"], "want one of sglang, vllm, trtllm"),
        (["--emit", "sglang"], "want runs of one workload"),
        (["--where", "nosuch=1"], "no such column"),
        (["--where", "workload=poetry"], "no cell is left"),
        (["--acceptance-length", "soon"], "wanted X or X,low,high"),
    ],
)
def test_bad_requests_are_one_line(
    stored: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["best-k", str(stored), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_side_is_named(tmp_path: Path) -> None:
    (path,) = write_runs(tmp_path, CPU, ("acceptance",))
    with pytest.raises(InputError, match="want loop or step runs for the cost; found acceptance"):
        recommend([path])
    (path,) = write_runs(tmp_path / "other", CPU, ("loop",))
    with pytest.raises(InputError, match="want acceptance runs, or --acceptance-length"):
        recommend([path])
    assert not recommend([path], acceptance_length="2").best.empty


# ---- capacity -------------------------------------------------------------------------------------------------------


def test_capacity_is_the_arithmetic_of_the_shapes() -> None:
    """llama-3-8b: 16,060,522,496 bytes of weights, 131,072 bytes of KV per token in bfloat16 (published counts)."""
    (plan,) = capacity("llama-3-8b", "h200-sxm", assignments=["context_len=8000", "batch_size=1,64,1k"])["plans"]
    assert plan["weights_gb"] == pytest.approx(16.060522496)
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["free_gb"] == pytest.approx(141 * 0.9 - 16.060522496)
    assert plan["num_tokens"] == int((141 * 0.9 - 16.060522496) * 1e9 // 131_072)
    fits = {cell["batch_size"]: cell for cell in plan["cells"]}
    assert fits[64]["fits"]
    assert fits[1024]["reason"].startswith(
        "needs 1074.4 GB of KV cache and states, 110.8 GB free beside 16.1 GB of weights"
    )


def test_capacity_counts_the_states_of_a_hybrid_once_per_request() -> None:
    """hybrid-27b: 65,536 bytes of KV per token and 150,994,944 bytes of float32 states per request."""
    options = ["context_len=1k,128k", "batch_size=8", "k=3"]
    (plan,) = capacity("hybrid-27b", "h200", assignments=options)["plans"]
    assert plan["kv_bytes_per_token"] == 65_536
    short, long = plan["cells"]
    assert short["needed_gb"] == pytest.approx(8 * (1028 * 65_536 + 150_994_944) / 1e9)
    assert long["needed_gb"] - short["needed_gb"] == pytest.approx(8 * 127 * 1024 * 65_536 / 1e9)


def test_capacity_halves_the_cache_with_its_dtype_and_charges_the_drafter() -> None:
    options = ["context_len=4k", "kv_dtype=bfloat16,float8_e4m3fn", "k=3"]
    plans = capacity("llama-3.3-70b", "h200", draft_model="llama-3-8b", assignments=[*options, "num_gpus=2"])["plans"]
    assert plans[0]["kv_bytes_per_token"] == 2 * plans[1]["kv_bytes_per_token"] == (327_680 + 131_072) / 2
    cell = plans[0]["cells"][0]
    assert cell["batch_slots"] < cell["batch_slots_without_drafter"]
    assert cell["batch_slots"] == plans[0]["num_tokens"] // (4096 + 4)


def test_capacity_knows_the_models_length_and_quantised_weights() -> None:
    options = ["context_len=40k,64k", "batch_size=1", "weight_gb=6.4"]
    (plan,) = capacity("qwen3-8b", "rtx-4090", assignments=options)["plans"]
    assert plan["weights_gb"] == 6.4
    assert [cell["reason"] for cell in plan["cells"]][1] == "65,541 tokens with the drafts, qwen3-8b holds 40,960"
    assert "0 of 2 planned cells fit" in render(capacity("qwen3-8b", "rtx-4090", assignments=options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nosuch", "--gpu", "h200"], "model must be one of"),
        (["--model", "qwen3-8b", "--gpu", "nosuch"], "no such row in gpu_peaks.csv"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "memory_share=1.5"], "above 0 up to 1"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "batch_size=0"], "values above 0"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "kv_dtype=int3"], "dtype must be one of"),
    ],
)
def test_capacity_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_acceptance_joined_at_a_cut_k_is_modelled_in_the_table(stored: Path) -> None:
    rows = costs_at((2, 4), 0.1)
    cells = breakeven(rows, cut_acceptance(acceptance_rows(AcceptanceWorld()), [2, 4]), resamples=200).cells
    assert dict(zip(cells["num_speculative_tokens"], cells["origin"], strict=True)) == {2: "modelled", 4: "measured"}


def test_acceptance_of_another_device_and_dtype_is_said(tmp_path, capsys) -> None:
    write_runs(tmp_path, CPU, ("loop",))
    other = replace(CPU, gpu="other")
    write_run_of(synthetic_acceptance(other).assign(weight_dtype="float64"), tmp_path, other, "acceptance")
    assert main(["best-k", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "acceptance measured on other, cost" in text
    assert "acceptance measured with weight_dtype float64, cost" in text
    assert "another dtype may choose other tokens" in text


def test_the_largest_context_agrees_with_the_cells():
    for k in (0, 4):
        found = capacity("llama-3-8b", "h200-sxm", assignments=[f"k={k}"])["plans"][0]
        longest = found["largest_context_len"]
        assert longest == model_shape("llama-3-8b").max_context_len - k - 1
        for context, fits in ((longest, True), (longest + 1, False)):
            sets = [f"k={k}", f"context_len={context}", "batch_size=1"]
            assert capacity("llama-3-8b", "h200-sxm", assignments=sets)["plans"][0]["cells"][0]["fits"] is fits


def test_flags_and_json_contradict(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best-k", str(stored), "--emit", "vllm", "--json"]) == 2
    assert "--emit prints flags, --json the table" in capsys.readouterr().err
