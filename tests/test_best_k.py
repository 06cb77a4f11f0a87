"""The best number of drafts, 0 included: planted costs, cut acceptance, `labkit best-k` and its flags."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.acceptance import counts_from_frame
from labkit.breakeven import breakeven
from labkit.cli import main
from labkit.decide.best_k import best_k, cut_acceptance, cut_bias, regret, scheduled_verify
from labkit.decide.capacity import capacity, render
from labkit.decide.recommend import engine_flags, recommend
from labkit.decide.step_costs import step_costs
from labkit.errors import InputError
from labkit.paths import RUNS
from labkit.provenance import redact
from tests.best_k_worlds import geometric
from tests.synthetic import CPU, loop_rows, write_run_of, write_runs
from tests.synthetic import acceptance_rows as synthetic_acceptance
from tests.worlds import AcceptanceWorld, CostWorld, acceptance_rows, cost_rows


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
    (large,) = found["does_not_fit"]
    assert (large["verify_backend"], large["context_len"], large["batch_size"]) == ("sdpa", 65536.0, 1)
    assert (large["reason"], large["origin"], large["needed_gb"]) == ("no memory", "measured", None)
    assert {row["best_k"] for row in found["best_k"]} <= {0, 2, 4}


def test_lengths_that_no_k_reaches_stay_in_the_table_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """k = 2 at 512 only, k = 4 at 2,048 only: a length of 4 is beyond the first."""
    rows = loop_rows(CPU).query("(num_speculative_tokens == 2) == (context_len == 512) and context_len < 6000")
    path = write_run_of(rows, tmp_path, CPU, "loop")
    assert main(["best-k", str(path), "--acceptance-length", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["context_len"], row["num_speculative_tokens"]) for row in found["not_judged"]} == {(512, 2)}
    assert "imposed length 4 exceeds the ceiling 3" in found["not_judged"][0]["reason"]
    assert main(["best-k", str(path), "--acceptance-length", "4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^512 +no k up to 2 reaches it$", text, re.MULTILINE)
    assert "k = 2 not judged in 1 of its cells: imposed length 4 exceeds the ceiling 3" in text


def test_what_cannot_pay_is_said_with_and_without_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 6,144 a step costs 10 plain ones: above k+1 = 3 whatever is accepted. No acceptance was measured there."""
    dear = loop_rows(CPU).query("num_speculative_tokens == 2 and verify_backend != 'per_token'")
    late = (dear["context_len"] == 6144) & (dear["arm"] == "speculative")
    dear.loc[late, "step_ms"] *= 10
    path = write_run_of(dear, tmp_path, CPU, "loop")
    known = write_run_of(synthetic_acceptance(CPU).query("context_len_low < 6000"), tmp_path, CPU, "acceptance")
    assert main(["best-k", str(path), "--acceptance-length", "2"]) == 0
    assert re.search(r"^6144 +off, cannot pay$", capsys.readouterr().out, re.MULTILINE)
    assert main(["best-k", str(path), str(known), "--where", "workload=prose", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["not_judged"]
    assert (row["context_len"], row["verdict"]) == (6144, "cannot_pay")
    assert main(["best-k", str(path), str(known), "--where", "workload=prose"]) == 0
    assert re.search(r"^6144 +off, cannot pay$", capsys.readouterr().out, re.MULTILINE)


def test_a_text_that_was_not_measured_at_a_context_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run_of(loop_rows(CPU), tmp_path, CPU, "loop")
    texts = synthetic_acceptance(CPU).query("workload == 'prose' or context_len_low > 600")
    known = write_run_of(texts, tmp_path, CPU, "acceptance")
    where = ["--where", "workload=code_editing", "verify_backend=sdpa"]
    assert main(["best-k", str(path), str(known), *where]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^512 +no acceptance$", text, re.MULTILINE)
    assert "k = 2 not judged in 1 of its cells: no acceptance of code_editing at context_len 512" in text
    assert main(["best-k", str(path), str(known), "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)["not_judged"]
    assert {(row["workload"], row["context_len"], row["num_speculative_tokens"]) for row in found} == {
        ("code_editing", 512, 2), ("code_editing", 512, 4)}  # fmt: skip


def test_one_best_k_is_of_one_dtype() -> None:
    rows = [
        cost_rows(CostWorld(lambda *_: 10.0, lambda _, __, j, c=cost: 10.0 + c * j, run_id=dtype)).assign(
            kv_dtype=dtype
        )
        for dtype, cost in (("bfloat16", 1.0), ("float8_e4m3fn", 4.0))
    ]
    found = best_k(breakeven(pd.concat(rows), 2.0, resamples=200).cells).set_index("kv_dtype")
    assert found["best_k"].to_dict() == {"bfloat16": 4, "float8_e4m3fn": 0}


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
    comment, about, runs, note, printed = capsys.readouterr().out.strip().split("\n", 4)
    setting = "smollm2-135m, ngram drafter, float32 weights, float32 KV, verify on sdpa, code_editing"
    assert about == f"# measured on {CPU.gpu}, {setting}"
    used = sorted(file.stem for file in stored.rglob("*.parquet") if not file.stem.endswith("dddddd"))  # ran out
    assert runs == f"# runs: {', '.join(used)}"
    assert printed == flags
    assert comment.startswith("# k = 4 loses least over")
    assert note == "# acceptance partly of texts that repeat themselves"
    assert "undecided" in comment


def test_flags_count_the_root_where_the_engine_does() -> None:
    chain = engine_flags("sglang", "eagle3@1a2b3c4d", 3)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in chain
    assert '"method": "draft_model", "num_speculative_tokens": 3' in engine_flags("vllm", "qwen3-0.6b", 3)
    assert engine_flags("vllm", "ngram", 0).startswith("# vllm: no speculative flags")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emit", "nosuch"], "want one of sglang, vllm, trtllm"),
        (["--emit", "sglang"], "select with --where workload=VALUE verify_backend=VALUE"),
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
    with pytest.raises(InputError, match="want acceptance runs too, or --acceptance-length"):
        recommend([path])
    assert not recommend([path], acceptance_length="2").best.empty


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


def test_flags_and_json_contradict(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best-k", str(stored), "--emit", "vllm", "--json"]) == 2
    assert "--emit prints flags, --json the table" in capsys.readouterr().err


def test_flags_from_an_imposed_length_say_what_it_favours(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--where", "verify_backend=sdpa"]
    assert main(["best-k", str(stored / "loop"), "--acceptance-length", "2", "--emit", "vllm", *where]) == 0
    assert "# an imposed length is the same at every k, which favours the smallest" in capsys.readouterr().out


def test_step_runs_alone_give_a_table_and_no_flags_for_a_cost_without_a_drafter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--where", "target=random:hybrid-27b", "drafter=one layer", "verify_backend=fa3"]
    command = ["best-k", str(RUNS / "step"), "--acceptance-length", "2.5", *where]
    assert main(command) == 0
    assert "verify on fa3" in capsys.readouterr().out
    assert main([*command, "--emit", "sglang"]) == 2
    assert "'one layer' is a cost without a drafter" in capsys.readouterr().err


def test_text_about_tokens_is_not_taken_for_a_secret() -> None:
    """What is printed in a notebook is redacted; "token = 1" would be."""
    text = render(capacity("llama-3-8b", "h200-sxm"))
    assert redact(text) == text
