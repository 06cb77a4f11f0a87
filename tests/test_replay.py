"""Replay against servers with planted answers, times, counts and faults."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from labkit import cli
from labkit.check import check_run
from labkit.replay import report
from labkit.replay.run import Options, replay
from labkit.replay.scenes import Maker, scene
from labkit.results import load_runs, load_sidecars
from tests.fault_server import FaultServer

FAST = Options(repeats=2, timeout_s=60, sleep=lambda seconds: None)


def small(name: str, **changes):
    """A scene of the table with short prompts and answers."""
    sizes = {"max_tokens": 8, "num_prompts": 2}
    return replace(scene(name), **{**sizes, **changes})


def run(servers, scenes, tmp_path, options=FAST):
    path = replay([server.url for server in servers], scenes, out_dir=tmp_path, options=options)
    assert check_run(path) == []
    return load_runs("replay", path), load_sidecars("replay", path), path


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["record"] == "request") & (rows["stage"] != "warm_up")]


def test_endpoints_get_the_same_bytes_in_turn(tmp_path):
    with FaultServer() as a, FaultServer() as b:
        rows, _, path = run([a, b], [small("content", workloads=("prose", "chat"))], tmp_path)
    assert sorted(a.bodies) == sorted(b.bodies)
    sent = measured(rows)
    assert len(sent) == 2 * 2 * 2 * 2
    by_request = sent.groupby(["prompt_id", "round"])["request_digest"]
    assert (by_request.nunique() == 1).all()
    assert (by_request.size() == 2).all()
    # Neighbours are the two arms of one request, and each arm goes first in half of the turns.
    order = sent["endpoint"].tolist()
    assert [set(order[i : i + 2]) for i in range(0, 16, 2)] == [{"a", "b"}] * 8
    assert order[::2].count("a") == 4
    stored = pq.read_table(path.with_suffix(".requests.parquet")).to_pydict()
    assert set(stored["request_digest"]) == set(sent["request_digest"])
    assert set(stored["body"]) <= set(a.bodies)


def test_warm_up_and_first_requests_are_apart(tmp_path):
    with FaultServer() as server:
        rows, _, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
    stages = rows[rows["record"] == "request"]["stage"].value_counts().to_dict()
    assert stages == {"measured": 3, "warm_up": 1, "first": 1}
    assert report.request_table(rows)["stage"].eq("measured").all()


@pytest.mark.parametrize(
    ("behaviour", "fault", "status"),
    [
        ("hang", "timeout", "timeout"),
        ("trickle", "timeout", "timeout"),
        ("cut", "cut_stream", "error"),
        ("malformed", "malformed_event", "error"),
        ("error_event", "error_event", "error"),
        ("wrong_usage", "wrong_usage", "wrong"),
        ("duplicate", "duplicate_event", "wrong"),
        ("short", "wrong_length", "wrong"),
    ],
)
def test_a_fault_is_a_row_and_the_replay_goes_on(tmp_path, behaviour, fault, status):
    with FaultServer() as server:
        server.plan = ["ok", behaviour, "ok", "ok"]
        options = replace(FAST, timeout_s=1.5) if status == "timeout" else FAST
        rows, _, _ = run([server], [small("depth", depths=(0,), prompt_tokens=(64,))], tmp_path, options)
    sent = measured(rows)
    assert sent["fault"].isin([fault]).tolist() == [False, True, False, False]
    assert sent["status"].tolist() == ["ok", status, "ok", "ok"]
    assert sent["reason"].iloc[1].startswith(fault)
    assert len(report.request_table(rows)) == 2


@pytest.mark.parametrize(("behaviour", "fault"), [("http_429", "http_429"), ("http_500", "http_5xx")])
def test_refusals_are_retried_and_every_attempt_is_a_row(tmp_path, behaviour, fault):
    with FaultServer() as server:
        server.plan = ["ok", behaviour, behaviour, "ok"]
        rows, _, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
        sent = measured(rows)
        assert sent["num_attempts"].tolist() == [1, 1, 2, 3, 1, 1]
        assert sent["fault"].isin([fault]).tolist() == [False, True, True, False, False, False]
        server.default = behaviour
        rows, _, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
    assert (measured(rows)["fault"] == fault).all()
    assert len(measured(rows)) == 4 * 3


def test_a_connection_that_drops_is_tried_again(tmp_path):
    with FaultServer() as server:
        server.plan = ["drop", "ok"]
        rows, _, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
    assert measured(rows)["fault"].isin(["connection"]).tolist() == [True, False, False, False, False]


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


def test_acceptance_comes_from_the_difference_of_counters(tmp_path):
    with FaultServer(k=3, accepted=1, cached=5) as server:
        server.counts.update(num_drafts=1000, num_draft_tokens=3000, num_accepted_tokens=2900)
        rows, _, _ = run([server], [small("content", workloads=("prose",), max_tokens=9)], tmp_path)
    (arm,) = report.summary(rows).to_dict("records")
    assert arm["mean_acceptance_length"] == pytest.approx(2.0)
    assert arm["draft_acceptance_rate"] == pytest.approx(1 / 3)
    assert 0 < arm["cached_share"] < 1
    assert rows["launch"].nunique() == 1


def test_without_pages_the_figures_are_unknown(tmp_path):
    with FaultServer(metrics=False, default="no_usage") as server:
        rows, sidecars, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
    assert measured(rows)["num_output_tokens"].isna().all()
    (arm,) = report.summary(rows).to_dict("records")
    assert np.isnan(arm["mean_acceptance_length"])
    assert np.isnan(arm["decode_tokens_per_s"])
    assert np.isfinite(arm["ttft_ms"])
    assert report.render(rows, sidecars)


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
        found = report.ratio(*arms(planted(truth, 0.02, seed)), "decode_tokens_per_s", seed=seed)
        hits += found["low"] <= 1 <= found["high"]
    assert hits >= 88


def test_closed_loop_keeps_so_many_in_flight(tmp_path):
    with FaultServer(gap_s=0.002) as server:
        scenes = [small("concurrency", concurrency=(1, 4), num_requests=3, prompt_tokens=(64,), num_prompts=1)]
        rows, _, _ = run([server], scenes, tmp_path, replace(FAST, repeats=1))
    sent = measured(rows)
    assert sent["concurrency"].value_counts().to_dict() == {4: 12, 1: 3}
    assert server.most_in_flight == 4
    assert sent["request_digest"].nunique() == 15  # no load finds another's prompts in the cache
    table = report.summary(rows).set_index("concurrency")
    assert (table["output_tokens_per_s"] > 0).all()
    assert table["num_requests"].to_dict() == {1: 3, 4: 12}


def test_conversation_grows_on_its_own_prefix(tmp_path):
    maker = Maker("tiny")
    turns = maker.requests(scene("agent"), 0)
    sizes = [len(turn.body) / 4 for turn in turns]
    assert len(turns) == 16
    assert 250 < sizes[0] < 500
    assert 110_000 < sizes[-1] < 140_000
    messages = [json.loads(turn.body)["messages"] for turn in turns]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(messages))
    again = maker.requests(scene("agent"), 1)
    assert json.loads(again[0].body)["messages"][0]["content"][:8] != messages[0][0]["content"][:8]
    with FaultServer() as server:
        rows, sidecars, _ = run([server], [small("agent", turns=3, prompt_tokens=(40, 400), num_prompts=1)], tmp_path)
    (arm,) = report.summary(rows).to_dict("records")
    assert arm["turns_worst"] <= arm["turns_median"] <= 2 * arm["turns_mean"]
    assert "turns_worst" in report.render(rows, sidecars)


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


def test_depths_beyond_the_servers_context_are_left_out():
    maker = Maker("tiny", max_context=10_000)
    names = [request.prompt_id for request in maker.requests(scene("depth"), 0)]
    assert [name.partition("@")[2] for name in names] == ["2048", "6144"]


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


def test_endpoints_with_other_models_are_refused(tmp_path, capsys):
    with FaultServer() as a, FaultServer(model="big") as b:
        arguments = ["replay", "--base-url", a.url, b.url, "--scene", "content", "--out", str(tmp_path)]
        assert cli.main(arguments) == 2
    assert "wanted one model name at all endpoints (a: tiny; b: big)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scene", "depth"], "--base-url"),
        (["--base-url", "http://127.0.0.1:9", "--scene", "nosuch"], "wanted one of depth, agent"),
        (["--base-url", "http://127.0.0.1:9", "--scene", "depth"], "no server at http://127.0.0.1:9"),
        (["--base-url", "http://127.0.0.1:9", "--scene", "depth", "--extra", "[1]"], "extra: wanted a JSON object"),
        (["--base-url", "http://127.0.0.1:9", "--scene", "depth", "--timeout", "soon"], "--timeout"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, said):
    assert cli.main(["replay", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    from labkit.replay import run as module

    real, sent = module.send, []

    def interrupted(*given, **options):
        sent.append(given)
        if len(sent) == 4:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(module, "send", interrupted)
    with FaultServer() as server, pytest.raises(KeyboardInterrupt):
        replay([server.url], [small("content", workloads=("prose",))], out_dir=tmp_path, options=FAST)
    rows, (sidecar,) = load_runs("replay", tmp_path), load_sidecars("replay", tmp_path).values()
    assert (rows["record"] == "request").sum() == 3
    assert not sidecar["complete"]
    assert check_run(tmp_path) == []


def test_no_host_is_stored(tmp_path, monkeypatch):
    with FaultServer() as server:
        monkeypatch.setattr("sys.argv", ["labkit", "replay", "--base-url", "http://gpu-host-7:8000/v1"])
        launch = "vllm serve /data/models/m --host gpu-host-7 --kv-cache-dtype fp8"
        options = replace(FAST, launches=(launch,), repeats=1)
        _, _, path = run([server], [small("content", workloads=("prose",))], tmp_path, options)
    text = path.with_suffix(".json").read_text() + path.with_suffix(".jsonl").read_text()
    assert "gpu-host-7" not in text
    assert "/data/models" not in text
    stored = json.loads(path.with_suffix(".json").read_text())
    assert stored["endpoints"]["a"]["launch"] == "vllm serve m --host <host> --kv-cache-dtype fp8"
    assert stored["complete"]


def test_dry_run_sends_nothing(capsys):
    arguments = ["replay", "--base-url", "http://127.0.0.1:9", "--scene", "depth", "concurrency", "--dry-run"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "depth: 35 requests, prompts to about 13" in out  # 7 depths, 5 repeats, up to 131072 + 2048 tokens
    assert "concurrency: 630 requests" in out  # 2 x (1 + 2 + 4 + 8 + 16 + 32), 5 repeats


def test_command_line_with_a_file_of_prompts(tmp_path, capsys):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "Say one."}\n{"prompt": "Say two."}\n')
    with FaultServer() as server:
        out = str(tmp_path / "runs")
        assert (
            cli.main(["replay", "--base-url", server.url, "--scene", str(prompts), "--repeats", "2", "--out", out]) == 0
        )
        assert "mine" in capsys.readouterr().out
        assert cli.main(["replay", "--rows", out, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["summary"][0]["num_requests"] == 3
        server.default = "cut"
        assert (
            cli.main(["replay", "--base-url", server.url, "--scene", str(prompts), "--repeats", "1", "--out", out]) == 1
        )


def test_rows_of_engine_steps_are_shown(capsys):
    from labkit import cli, paths

    assert cli.main(["replay", "--rows", str(paths.RUNS / "replay")]) == 0
    text = capsys.readouterr().out
    assert "steps timed inside an engine" in text
    assert "no requests are among these rows" in text
    assert "FLASH_ATTN" in text
    assert "relative step cost" in text
    assert cli.main(["replay", "--rows", str(paths.RUNS / "replay"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine_steps"]


def test_a_bad_out_is_refused_before_any_request(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with FaultServer() as server:
        arguments = ["replay", "--base-url", server.url, "--scene", "content", "--out", str(tmp_path / "file" / "runs")]
        assert cli.main(arguments) == 2
        assert not server.bodies
    assert "wanted a folder to write to" in capsys.readouterr().err
