"""Replay against a local server: same bytes in turn, faults as rows, what is stored, the command line."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from labkit import cli
from labkit.check import check_run
from labkit.replay import report
from labkit.replay.run import replay
from labkit.replay.scenes import Maker, scene
from labkit.results import load_runs, load_sidecars
from tests.fault_server import FaultServer
from tests.replayed import FAST, measured, run, small


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


@pytest.mark.parametrize("behaviour", ["wrong_usage", "duplicate", "cut"])
def test_a_pass_with_a_fault_has_no_rate(tmp_path, behaviour):
    with FaultServer(default=behaviour) as server:
        rows, _, _ = run([server], [small("content", workloads=("prose",))], tmp_path)
    (arm,) = report.summary(rows).to_dict("records")
    assert arm["num_failed"] > 0
    assert np.isnan(arm["output_tokens_per_s"])


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


def test_depths_beyond_the_servers_context_are_left_out():
    maker = Maker("tiny", max_context=10_000)
    names = [request.prompt_id for request in maker.requests(scene("depth"), 0)]
    assert [name.partition("@")[2] for name in names] == ["2048", "6144"]


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


def test_a_bad_out_is_refused_before_any_request(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with FaultServer() as server:
        arguments = ["replay", "--base-url", server.url, "--scene", "content", "--out", str(tmp_path / "file" / "runs")]
        assert cli.main(arguments) == 2
        assert not server.bodies
    assert "wanted a folder to write to" in capsys.readouterr().err
