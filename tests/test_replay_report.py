"""What a replay reports: planted ratios and intervals, tokens per event, outputs, retention, answers, the guard."""

import json

import numpy as np
import pandas as pd
import pytest

from labkit import cli
from labkit.replay import report
from tests.fault_server import FaultServer
from tests.replayed import measured, run, small


def test_tokens_per_event_and_times_are_apart(tmp_path):
    with FaultServer(gap_s=0.004, tokens_per_event=4, first_s=0.03) as server:
        scenes = [small("content", workloads=("prose",), max_tokens=21)]
        rows, _, _ = run([server], scenes, tmp_path)
    table = report.request_table(rows)
    assert (table["num_chunks"] == 6).all()
    assert (table["num_output_tokens"] == 21).all()
    np.testing.assert_allclose(table["tokens_per_chunk"], 3.5)
    np.testing.assert_allclose(table["itl_ms"], 4 * table["tpot_ms"])  # 5 gaps, 20 tokens after the first
    assert (table["ttft_ms"] >= 30).all()
    # The first token's time is not in the rate.
    spans = [times[-1] - times[0] for times in table["chunk_ms"]]
    np.testing.assert_allclose(table["decode_tokens_per_s"], 20 / np.array(spans) * 1e3)


def test_equal_and_differing_outputs(tmp_path):
    with FaultServer() as a, FaultServer() as b, FaultServer(word="other") as c:
        rows, _, _ = run([a, b, c], [small("content", workloads=("prose",))], tmp_path)
    found = {item["b"]: item for item in report.comparisons(rows)}
    assert found["b"]["identical_output_share"] == 1
    assert found["c"]["identical_output_share"] == 0
    assert set(found["c"]["first_differing_token"].values()) == {0}


def test_first_difference_in_whole_events():
    def row(*chunks):
        return pd.Series({"output_text": "".join(chunks), "chunk_sizes": [float(len(chunk)) for chunk in chunks]})

    assert report.first_difference(row("a", "bc", "d"), row("a", "bc", "e")) == 2
    assert report.first_difference(row("a", "bc"), row("a", "bx")) == 1
    assert report.first_difference(row("a", "bc", "d"), row("a", "bc")) == 2


UNKNOWN = ("num_verify_steps", "engine_decode_ms", "engine_prefill_ms", "num_prompt_tokens", "num_cached_tokens")


def planted(ratios: np.ndarray, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Rows of two arms; ratios of decode rate B over A by [launch, prompt], five repeats."""
    rng, rows = np.random.default_rng(seed), []
    for launch, row in enumerate(ratios):
        for prompt, value in enumerate(row):
            for repeat in range(5):
                for endpoint, rate in (("a", 100.0), ("b", 100.0 * value)):
                    gap = 1e3 / rate * np.exp(rng.normal(0, noise))
                    times = [10.0 + gap * i for i in range(11)]
                    rows.append(
                        {"run_id": f"r{launch}", "scene": "s", "prompt_id": f"p{prompt}", "concurrency": 1}
                        | {"round": repeat, "endpoint": endpoint, "launch": f"{endpoint}{launch}", "record": "request"}
                        | {"stage": "measured", "status": "ok", "chunk_ms": times, "num_chunks": 11}
                        | {"num_output_tokens": 11, "ttft_ms": 10.0, **dict.fromkeys(UNKNOWN, np.nan)}
                    )
    return pd.DataFrame(rows)


def arms(rows):
    table = report.request_table(rows)
    return table[table["endpoint"] == "a"], table[table["endpoint"] == "b"]


def test_ratio_is_the_planted_one():
    found = report.ratio(*arms(planted(np.full((2, 3), 1.5))), "decode_tokens_per_s")
    assert found["value"] == pytest.approx(1.5)
    assert found["low"] == pytest.approx(1.5)
    assert (found["num_prompts"], found["num_launches"], found["num_pairs"]) == (3, 2, 30)


def test_interval_holds_the_launches():
    """Two launches that differ by 20% are no evidence for 5%; prompts that differ are another source."""
    between_starts = report.ratio(*arms(planted(np.array([[0.95] * 8, [1.15] * 8]))), "decode_tokens_per_s")
    assert between_starts["low"] < 0.9
    assert between_starts["high"] > 1.2
    one = report.ratio(*arms(planted(np.array([[1.04, 1.05, 1.06, 1.05]]))), "decode_tokens_per_s")
    assert 1.0 < one["low"] < 1.05 < one["high"] < 1.1
    alone = report.ratio(*arms(planted(np.array([[1.05]]))), "decode_tokens_per_s")
    assert np.isnan(alone["low"])


def test_interval_covers_the_truth():
    rng, hits = np.random.default_rng(1), 0
    for seed in range(100):
        truth = np.exp(rng.normal(0, 0.05, (3, 1)) + rng.normal(0, 0.05, (3, 6)))
        found = report.ratio(*arms(planted(truth, 0.02, seed)), "decode_tokens_per_s")
        hits += found["low"] <= 1 <= found["high"]
    assert hits >= 88


def test_depths_and_retention(tmp_path):
    with FaultServer(gap_s=0.001) as server:
        scenes = [small("depth", depths=(0, 512), prompt_tokens=(64,), num_prompts=1)]
        rows, sidecars, _ = run([server], scenes, tmp_path)
    table = report.retention(rows)
    assert table["retention"].iloc[0] == 1
    assert table["context_len"].is_monotonic_increasing
    # The server counts four characters a token, template included; the probe learns it.
    assert table["context_len"].tolist() == pytest.approx([64, 576], rel=0.5)
    assert "retention" in report.render(rows, sidecars)


def test_answers_are_checked(tmp_path):
    from labkit.replay.client import _checked_answer

    assert _checked_answer("12 x 18 = 216\nAnswer: 41", "41") == "right"
    assert _checked_answer("Answer: 1,041.0", "1041") == "right"
    assert _checked_answer("Answer: 42", "41") == "wrong"
    assert _checked_answer("no figure", "41") == "none"
    assert _checked_answer("anything", None) is None
    with FaultServer(word="") as server:
        rows, _, _ = run([server], [small("reasoning")], tmp_path)
    assert measured(rows)["answer"].isin(["right", "wrong", "none"]).all()
    assert report.summary(rows)["answers_right"].iloc[0].endswith("/3")


def test_the_guard_names_what_differs_between_the_servers(tmp_path):
    plain = {"attention_config": {"backend": "TRITON_ATTN"}, "kv_cache_dtype": "auto"}
    with FaultServer(args=plain) as a, FaultServer(args={**plain, "kv_cache_dtype": "fp8"}) as b:
        rows, sidecars, _ = run([a, b], [small("content", workloads=("prose",))], tmp_path)
    text = report.render(rows, sidecars)
    assert "kv_cache_dtype: auto -> fp8" in text
    assert "not comparable" in text
    text = report.render(rows, sidecars, varying="kv_cache_dtype")
    assert "asked for" in text
    assert "not comparable" not in text


def test_rows_of_engine_steps_are_shown(capsys):
    from labkit import paths

    assert cli.main(["replay", "--rows", str(paths.RUNS / "replay")]) == 0
    text = capsys.readouterr().out
    assert "steps timed inside an engine" in text
    assert "no requests are among these rows" in text
    assert "FLASH_ATTN" in text
    assert "relative step cost" in text
    assert cli.main(["replay", "--rows", str(paths.RUNS / "replay"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine_steps"]
