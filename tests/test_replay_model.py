"""Replay against a real engine on the CPU: llama.cpp's server with SmolLM2, in processes of their own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from labkit.check import check_run
from labkit.paths import ROOT
from labkit.replay import report
from labkit.replay.run import Options, replay
from labkit.replay.scenes import scene
from labkit.results import load_runs

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.model

RATES = [0.8, 0.5, 0.3]


@contextlib.contextmanager
def engine(**settings) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.llama_server", json.dumps({"context": 1024, **settings})]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def rows_of(urls: list[str], tmp_path, max_tokens: int):
    prompts = tmp_path / "repeat.jsonl"
    prompts.write_text(json.dumps({"prompt": "Write this line again and again: one two three four five"}))
    short = replace(scene(str(prompts)), max_tokens=max_tokens, exact=True)
    path = replay(urls, [short], out_dir=tmp_path, options=Options(repeats=2, timeout_s=120))
    assert check_run(path) == []
    rows = load_runs("replay", path)
    sent = rows[(rows["record"] == "request") & (rows["stage"] != "warm_up")]
    assert sent["fault"].isna().all(), sent[["fault", "reason"]].to_string()
    assert (sent["num_output_tokens"] == max_tokens).all()
    return rows, sent


def test_plain_and_ngram_side_by_side(tmp_path):
    with engine() as plain, engine(mode="ngram", k=4) as ngram:
        rows, sent = rows_of([plain, ngram], tmp_path, max_tokens=24)
    assert (sent["engine"] == "llamacpp").all()
    assert sent.groupby("endpoint")["arm"].first().to_dict() == {"a": "plain", "b": "speculative"}
    plain_rows, drafted = sent[sent["endpoint"] == "a"], sent[sent["endpoint"] == "b"]
    assert plain_rows["num_drafted_tokens"].isna().all()
    assert (sent["num_cached_tokens"] < sent["num_prompt_tokens"]).all()
    assert (sent["engine_decode_ms"] > 0).all()
    assert (sent["ttft_ms"] < sent["duration_ms"]).all()
    # Where a draft was made, steps + accepted + the prefill's token are the answer.
    counted = drafted.dropna(subset=["num_verify_steps"])
    assert (counted["num_verify_steps"] + counted["num_accepted_tokens"] + 1 == counted["num_output_tokens"]).all()
    assert set(report.summary(rows)["endpoint"]) == {"a", "b"}
    assert report.comparisons(rows)[0]["decode_tokens_per_s"]["num_launches"] == 1


def test_imposed_acceptance_comes_back_as_measured(tmp_path):
    with engine(mode="draft", k=3, rates=RATES) as url:
        rows, _ = rows_of([url], tmp_path, max_tokens=96)
    counted = rows[(rows["record"] == "counters") & rows["num_drafted_steps"].notna()]
    steps = counted["num_drafted_steps"].sum()
    kept = (
        np.sum([np.pad(list(values), (0, 3 - len(values))) for values in counted["accepted_per_pos"]], axis=0) / steps
    )
    assert steps >= 50
    # Positions are draws of one step: four standard errors of each rate, and of their sum (variance by the distribution
    # of the number kept: P(1) = 0.3, P(2) = 0.2, P(3) = 0.3).
    error = 4 * np.sqrt(np.array(RATES) * (1 - np.array(RATES)) / steps)
    assert (np.abs(kept - RATES) < error).all(), (kept, steps)
    variance = 0.3 * 1 + 0.2 * 4 + 0.3 * 9 - sum(RATES) ** 2
    length = 1 + counted["num_accepted_tokens"].sum() / steps
    assert abs(length - (1 + sum(RATES))) < 4 * np.sqrt(variance / steps)
    # The requests' own figures agree with the page's difference.
    told = rows[(rows["record"] == "request") & (rows["stage"] != "warm_up")]
    assert told["num_accepted_tokens"].sum() == counted["num_accepted_tokens"].sum()


def test_draft_model_is_counted(tmp_path):
    with engine(mode="draft", k=2) as url:
        rows, _ = rows_of([url], tmp_path, max_tokens=16)
    counted = rows[(rows["record"] == "counters") & rows["num_drafted_steps"].notna()]
    assert (counted["num_drafted_tokens"] <= 2 * counted["num_drafted_steps"]).all()
    assert counted["num_accepted_tokens"].sum() > 0.8 * counted["num_drafted_tokens"].sum()  # the same model drafts
