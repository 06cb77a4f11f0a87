"""The ten checks of any imported figure, each planted: what is wrong is said in plain words, what is right is not."""

import json

import pytest

from labkit.engines.importing import Reader, import_files
from tests.engine_forms import BENCH, COMPANION, CONSOLE, DECODE, FORMS, HISTOGRAM, LATER, SERVE, V1, records_of

META = {"spec_verify_ct": 200, "spec_num_correct_drafts": 360, "spec_num_proposed_drafts": 600}
PREFILL = "[2026-06-03 10:00:01] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: {}, token usage: 0.02, "
PREFILL += "#running-req: {}, #queue-req: 0,"
LINE = "[2026-06-03 10:{:02d}:00] Decode batch, #running-req: {}, #token: 5120, accept len: {}, {}cuda graph: {}, gen "
LINE += "throughput (token/s): {}, #queue-req: {}"


def line(minute=0, batch=4, length="2.80", rate="accept rate: 0.60, ", graph=True, tokens_per_s="410.20", queue=0):
    return LINE.format(minute, batch, length, rate, graph, tokens_per_s, queue)


def serve(**changes):
    return json.dumps(SERVE | changes)


# check -> (text, the words of the warning on the last record)
PLANTED = {
    "1 positions against length": (
        serve(spec_decode_per_position_acceptance_rates=[0.9, 0.8, 0.7]),
        "contradiction: 1 + ",
    ),
    "1 rising positions": (
        serve(spec_decode_per_position_acceptance_rates=[0.4, 0.6, 0.8]),
        "above that of the position",
    ),
    "1 bonus not counted": (FORMS["vllm 0.8"][0], "bonus not counted in the printed length"),
    "1 accepted above drafted": (json.dumps(HISTOGRAM | {"num_draft_tokens": 300}), "360 accepted of 300 drafted"),
    "2 at one": ("\n".join([line(length="1.00", rate="")] * 3), "broken draft path"),
    "2 at the ceiling": ("\n".join([line(length="4.00", rate="accept rate: 1.00, ")] * 3 + [line()]), ""),
    "2 above the ceiling": (serve(spec_decode_accepted_tokens=700), "above k + 1 = 4"),
    "2 below one": ("\n".join([line(length="0.80", rate="")] * 3), "a length of 0.80 is below 1"),
    "3 neither form": (line(rate="accept rate: 0.95, "), "fits neither form"),
    "3 both forms": (line(length="2.00", rate="accept rate: 0.50, "), "fits both forms"),
    "3 old form": (line(rate="accept rate: 0.70, "), "length / draft tokens (bonus in it)"),
    "4 another scope": (json.dumps(META | {"completion_tokens": 800}), "240 tokens more than steps + accepted"),
    "4 overshoot": (json.dumps(META | {"completion_tokens": 555}), "exceed the output by 5 tokens"),
    "4 requests not counted": (
        "total_num_output_tokens: 8192\nnum_drafts: 3200\nnum_draft_tokens: 9600\nnum_accepted_tokens: 4800\n"
        "mean acceptance length: 2.50",
        "prefill gives one a request and steps without a draft the others; requests are not counted",
    ),
    "5 peak below mean": (serve(max_output_tokens_per_s=30.0), "chunk-counted client: a peak of 30"),
    "5 ITL above TPOT": (
        serve(mean_itl_ms=50.0, mean_tpot_ms=17.9),
        "chunk-counted client: ITL 50 ms is 2.8 times TPOT",
    ),
    "5 ITL above one stream": (json.dumps(BENCH | {"median_itl_ms": 50.0}), "chunk-counted client: ITL 50 ms, but one"),
    "5 tokens per chunk": (
        serve(itls=[[0.05] * 199], output_lens=[560]),
        "chunk-counted client: 2.80 tokens per chunk",
    ),
    "5 one chunk": (serve(output_throughput=8e8), "the whole answer came in one chunk"),
    "7 prefill in the window": ("\n".join([line(), line(), PREFILL.format(0, 4), line()]), "prefill-mixed window"),
    "7 prefill, vLLM": (
        COMPANION.replace("prompt throughput: 0.0", "prompt throughput: 900.0") + f"SpecDecoding metrics: {LATER}{V1}",
        "prefill-mixed window",
    ),
    "7 after idle": (
        "\n".join([line(), line(), PREFILL.format(0, 0), line(tokens_per_s="0.59")]),
        "first line after idle",
    ),
    "7 starved": ("\n".join([line(0), line(0), PREFILL.format(0, 4), line(5)]), "no decode line for 300 s"),
    "7 first request": (serve(ttfts=[1.537] + [0.058] * 9), "first request apart: TTFT 1537 ms"),
    "8 eager and graph": ("\n".join([line(), line(), line(graph=False)]), "eager and graph mixed"),
    "8 cached tokens": (
        "\n".join([line(), line(), PREFILL.format(448, 4), line()]),
        "448 prompt tokens came from the prefix",
    ),
    "8 queue": ("\n".join([line(), line(queue=3)]), "3 requests were waiting"),
    "8 running requests": ("\n".join([line(), line(), line(batch=5)]), "running requests changed inside this window"),
    "8 running requests, vLLM": (
        COMPANION + f"SpecDecoding metrics: {LATER}{V1}\n" + COMPANION.replace("Running: 1", "Running: 2")
        + f"SpecDecoding metrics: {LATER}{V1}",
        "running requests changed inside this window",
    ),
    "9 scope of a load test": (json.dumps(BENCH), "the server's value since its start (rank 0), not this run's"),
    "9 degenerate text": (json.dumps(BENCH | {"total_output_tokens_retokenized": 250}), "degenerate text: 560 tokens"),
    "9 degenerate text, console": (
        "============ Serving Benchmark Result ============\nBackend: sglang\nTotal generated tokens: 512000\n"
        "Total generated tokens (retokenized): 231736\nAccept length: 2.80\n=====\n",
        "degenerate text: 512000 tokens generated, 231736 when tokenised again",
    ),
    "10 imposed, vLLM": (
        "non-default args: {'speculative_config': {'rejection_sample_method': 'synthetic'}}\n" + FORMS["vllm 0.9"][0],
        "acceptance was imposed by a server switch",
    ),
    "10 imposed, SGLang": (
        '{"version": "0.5.23", "attention_backend": "fa3", "env_vars": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, '
        '"internal_states": [{"avg_spec_accept_length": 2.5}]}\n' + DECODE,
        "acceptance was imposed by a server switch",
    ),
}  # fmt: skip
HARMLESS = (
    "sglang strict rate",
    "vllm 0.9",
    "vllm later, with its throughput line",
    "vllm request",
    "vllm bench serve",
)


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name):
    text, words = PLANTED[name]
    record = list(Reader().read_text(text, "x"))[-1]
    if name == "2 at the ceiling":
        record = next(iter(Reader().read_text(text, "x")))
        words = "every draft is kept (length 4.00 = k + 1)"
    assert any(words in warning for warning in record.warnings), record.warnings


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_right_has_no_warning(tmp_path, name):
    (record,) = records_of(tmp_path, FORMS[name][0])
    assert record.warnings == []


def test_6_speedup_above_the_length(tmp_path):
    plain = {name: value for name, value in SERVE.items() if not name.startswith("spec")} | {"output_throughput": 10.0}
    for name, content in (("a", plain), ("b", SERVE)):
        (tmp_path / name).write_text(json.dumps(content))
    records = list(import_files([tmp_path / "a", tmp_path / "b"]))
    assert any("speed-up 5.60 above the acceptance length 2.80: the baseline is slow" in x for x in records[1].warnings)


def test_9_every_figure_has_its_scope(tmp_path):
    scopes = {name: records_of(tmp_path, text)[-1].scope for name, (text, _) in FORMS.items()}
    assert set(scopes.values()) == {"window", "request", "run", "since_start"}
    assert (scopes["sglang server_info"], scopes["vllm 0.9"]) == ("since_start", "window")
    assert (scopes["llama.cpp timings"], scopes["vllm bench serve"]) == ("request", "run")


def test_10_what_is_missing_is_null():
    (plain,) = Reader().read_text(CONSOLE.replace("Acceptance length:", "Other:").replace("Drafts:", "Other2:"), "x")
    assert plain.num_drafted_steps is None
    (run,) = Reader().read_text(json.dumps(BENCH | {"accept_length": None}), "x")
    assert (run.mean_acceptance_length, run.num_accepted_tokens, run.draft_acceptance_rate) == (None, None, None)
    (response,) = Reader().read_text('{"timings": {"predicted_n": 200, "predicted_ms": 9950.0}}', "x")
    assert (response.num_drafted_tokens, response.num_accepted_tokens) == (None, None)
