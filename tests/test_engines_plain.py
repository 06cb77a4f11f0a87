"""Windows of plain decode: a vLLM server without drafts, and plain windows as the baseline of speculative ones."""

import json
import random
import re

import pytest

from labkit.cli import main
from labkit.engines.importing import Reader
from labkit.engines.report import render
from tests.engine_logs import diagnosed, log

DRAFTS = ", 'speculative_config': {'method': 'eagle3', 'model': 'org/eagle', 'num_speculative_tokens': 3}"
CACHE_TOKENS, K, LENGTH = 400_000, 3, 2.5


def head(drafts):
    return (
        f"INFO 06-03 09:59:00 [utils.py:233] non-default args: {{'model': 'org/M'{drafts}}}\n"
        "INFO 06-03 09:59:10 [core.py:58] Initializing a V1 LLM engine (v0.24.0) with config: model='org/M'\n"
        "INFO 06-03 09:59:20 [cuda.py:1] Using AttentionBackendEnum.TRITON_ATTN backend.\n"
        f"INFO 06-03 09:59:30 [kv_cache_utils.py:1] GPU KV cache size: {CACHE_TOKENS:,} tokens\n"
    )


def throughput(rate, running, prompt=0.0, context=4000, name="Engine 000: "):
    usage = 100 * running * context / CACHE_TOKENS
    return (
        f"(APIServer pid=1) INFO 06-03 10:00:00 [loggers.py:257] {name}Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {rate:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, "
        f"GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: 0.0%\n"
    )


def speculative(steps, length=LENGTH):
    accepted = round(steps * (length - 1))
    rates = ", ".join(f"{share * accepted / steps:.3f}" for share in (0.45, 0.33, 0.22))
    return (
        f"(APIServer pid=1) INFO 06-03 10:00:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: "
        f"{1 + accepted / steps:.2f}, Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput: "
        f"{K * steps / 10:.2f} tokens/s, Accepted: {accepted} tokens, Drafted: {K * steps} tokens, "
        f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * accepted / K / steps:.1f}%\n"
    )


def windows(kinds, *, verify_ms, plain_ms=lambda context: 8 + 0.03 * context / 1000, seed=1):
    """Windows of 10 s at seven contexts, each context with ``kinds`` (s, p) of known step times."""
    rng, lines = random.Random(seed), [throughput(0, 0)]
    for context in (2000, 4000, 8000, 16000, 32000, 64000, 100_000):
        for kind in kinds:
            step = (verify_ms if kind == "s" else plain_ms)(context) * (1 + rng.gauss(0, 0.01))
            lines.append(throughput(1000 * (LENGTH if kind == "s" else 1) / step, 1, context=context))
            lines += [speculative(round(10_000 / step))] if kind == "s" else []
    return "".join(lines)


def records_of(text):
    return list(Reader().read_text(text, "x"))


def test_a_plain_server_gives_windows():
    text = head("") + throughput(0, 0) + throughput(90, 1, prompt=400) + 3 * throughput(250, 2) + throughput(3, 0)
    first, changed, steady, again, last = records_of(text)
    for record in (first, changed, steady, again):
        assert (record.kind, record.scope) == ("throughput line", "window")
        assert record.mean_acceptance_length == 1
        assert record.definition.startswith("plain decode")
        assert record.context_len == pytest.approx(4000)
        assert record.details["kv_usage"] == pytest.approx(record.batch_size * 0.01)
    assert (steady.batch_size, steady.output_tokens_per_s, steady.time) == (2, 250, "06-03 10:00:00")
    assert (steady.step_ms, steady.step_ms_source) == (pytest.approx(8.0), "derived")
    assert again.step_ms == pytest.approx(8.0)
    assert [first.step_ms, changed.step_ms, last.step_ms] == [None] * 3
    assert any("prefill-mixed" in text for text in first.warnings)
    assert any("changed inside this window: no step time" in text for text in changed.warnings)
    assert last.batch_size is None


def test_the_first_line_of_a_log_and_engines_of_their_own():
    first, second = records_of(2 * throughput(125, 1))
    assert first.step_ms is None
    assert any("nothing before this line" in text for text in first.warnings)
    assert second.step_ms == pytest.approx(8.0)
    engines = [throughput(rate, 1, name=f"Engine 00{i}: ") for rate in (100, 125) for i in (0, 1)]
    assert [record.output_tokens_per_s for record in records_of("".join(engines))] == [100, 100, 125, 125]
    stalled = records_of(throughput(100, 4) + throughput(0, 4, prompt=9000))[-1]
    assert (stalled.mean_acceptance_length, stalled.output_tokens_per_s) == (None, None)
    assert any("no token in this window while 4 requests ran" in text for text in stalled.warnings)


V0 = (
    "Speculative metrics: Draft acceptance rate: 0.700, System efficiency: 0.700, Number of speculative tokens: 3, "
    "Number of accepted tokens: 420, Number of draft tokens: 600, Number of emitted tokens: 560.\n"
)


@pytest.mark.parametrize(
    "text",
    [
        head(DRAFTS) + 3 * throughput(250, 2),  # nobody has seen a speculative line of this server
        throughput(250, 2) + V0 + 3 * throughput(250, 2),
    ],
)
def test_a_speculative_line_that_may_be_missing_is_no_plain_decode(text):
    records = [record for record in records_of(text) if record.kind == "throughput line"]
    assert len(records) == 3
    for record in records:
        assert (record.mean_acceptance_length, record.step_ms, record.output_tokens_per_s) == (None, None, 250)
        assert any("left out of the log, or none ran" in text for text in record.warnings)


def test_a_file_that_ends_before_the_speculative_line():
    text = head(DRAFTS) + 2 * (throughput(250, 1) + speculative(1000)) + throughput(250, 1)
    assert [record.mean_acceptance_length for record in records_of(text)] == [2.5, 2.5, None]


def test_a_plain_server_is_diagnosed():
    found = diagnosed(head("").replace("org/M", "org/Llama-3.1-8B") + windows("pppp", verify_ms=None), gpu="h200-sxm")
    assert found.cause.startswith("plain decode")
    assert "no word of CUDA graphs" in found.cause
    assert found.slope_ms_per_1k[0] == pytest.approx(0.03 * 1.024, rel=0.1)
    assert found.intercept_ms[0] == pytest.approx(8, rel=0.02)
    assert found.slope_over_floor[1] < 1.2


def steep(context):
    return 12 + 0.3 * context / 1000


ONE = head(DRAFTS) + windows("sssspppp", verify_ms=steep)
TWO = [head("") + windows("pppp", verify_ms=steep), head(DRAFTS) + windows("ssss", verify_ms=steep)]


@pytest.mark.parametrize("text", [ONE, "".join(TWO), "".join(TWO[::-1])])
def test_plain_windows_are_the_baseline_of_speculative_ones(text):
    found = diagnosed(text, gpu="h200-sxm")
    assert [cell["context_len"] for cell in found.baseline] == [2000, 4000, 8000, 16000, 32000, 64000, 100_000]
    for cell in found.baseline:
        cost = steep(cell["context_len"]) / (8 + 0.03 * cell["context_len"] / 1000)
        assert cell["relative_step_cost"] == pytest.approx(cost, rel=0.03)
        value, low, high = cell["speedup"]
        assert low - 0.02 < LENGTH / cost < high + 0.02
        assert value == pytest.approx(cell["mean_acceptance_length"] / cell["relative_step_cost"])
        assert min(cell["num_windows"], cell["num_plain_windows"]) >= 3
    assert [found.baseline[i]["verdict"] for i in (0, -1)] == ["pays", "loses"]
    assert re.match(r"verify cost: a step costs 1.6 to 3.[789] plain ones", found.cause)  # without the model's shape
    assert found.next_step.startswith("--attention-backend FLASH_ATTN")
    assert not any("plain step" in text for text in found.unknown)
    assert "against plain windows of the same batch" in render(found)


def test_other_servers_and_other_contexts_are_no_baseline():
    fa = TWO[0].replace("TRITON_ATTN", "FLASH_ATTN")
    other = diagnosed(fa + TWO[1])
    assert other.baseline == []
    assert any("windows 1-28 belong to those before" in text for text in other.warnings)
    shifted = diagnosed(TWO[0].replace(f"{CACHE_TOKENS:,}", f"{CACHE_TOKENS * 5 // 4:,}") + TWO[1])
    assert {cell["verdict"] for cell in shifted.baseline} == {"undecided"}  # contexts a quarter apart
    elsewhere = TWO[0].replace("Running: 1", "Running: 2")
    found = diagnosed(elsewhere + TWO[1])
    assert found.baseline == []
    assert any("28 plain windows, none has 3 steady ones" in text for text in found.unknown)


def test_plain_windows_of_sglang_are_a_baseline_too():
    """The same server launched without speculation, in the same log; its decode lines have no accept len."""
    plain = re.sub(r"accept len: [\d.-]+, accept rate: [\d.-]+, ", "", log(ms_per_1k=0.1, intercept=10.0, length=one))
    plain = re.sub(r"speculative_\w+=[^,]+, ", "", plain)
    found = diagnosed(plain + log(ms_per_1k=0.2, intercept=20.0))
    assert len(found.baseline) == 8
    for cell in found.baseline:
        assert cell["relative_step_cost"] == pytest.approx(2.0, rel=0.06)
        assert cell["speedup"][0] == pytest.approx(1.4, rel=0.06)


def one(context):
    return 1.0


@pytest.mark.parametrize("prefix", ["vllm-{}-1  | ", "[pod/vllm-{}/server] ", "Jun 03 10:00:00 host-{} docker[7]: "])
def test_servers_whose_lines_alternate_are_not_mixed(tmp_path, capsys, prefix):
    both = []
    for pair in zip(*(windows("s", verify_ms=steep, seed=seed).splitlines() for seed in (1, 2)), strict=True):
        both += [prefix.format(name) + line for name, line in zip("ab", pair, strict=True)]
    (tmp_path / "both.log").write_text("\n".join(both))
    assert main(["diagnose", str(tmp_path / "both.log")]) == 2
    assert re.fullmatch(
        r"labkit diagnose: \S+both.log: lines of 2 servers alternate \(.+\); .+\n", capsys.readouterr().err
    )
    assert main(["import", str(tmp_path / "both.log"), "--json"]) == 0
    output = capsys.readouterr()
    assert "lines of 2 servers alternate" in output.err
    records = [record for record in json.loads(output.out) if record["output_tokens_per_s"]]
    assert [bool(record["num_drafted_steps"]) for record in records] == 14 * [True]
    one_after_the_other = sorted(both, key=lambda line: prefix.format("b") in line)
    (tmp_path / "both.log").write_text("\n".join(one_after_the_other))
    assert main(["diagnose", str(tmp_path / "both.log")]) == 0


def requests(context, length=None, steps=200, step_ms=20.0):
    """One request of llama-server; ``length``: with the line of its drafts."""
    accepted = round(steps * (length - 1)) if length else 0
    output = steps + accepted + 1
    draft = f"draft acceptance rate = 0.5 ({accepted} accepted / {3 * steps} generated)"
    return (
        f"slot print_timing: id  0 | task 7 |\nprompt eval time = 400.00 ms / {context - output // 2} tokens\n"
        f"       eval time = {steps * step_ms:.2f} ms / {output} tokens\n      total time = 9 ms / 9 tokens\n"
        + (f"slot print_timing: id  0 | task 7 | {draft}\n" if length else "")
    )


def test_plain_requests_of_llamacpp_are_a_baseline():
    contexts = (2000, 2010, 2020, 8000, 8010, 8020)
    start = "build: 9100 (abc) with gcc\n"
    plain = start + "".join(requests(context, step_ms=10 + context / 8000) for context in contexts)
    drafts = start + "".join(requests(context, LENGTH, step_ms=20 + context / 4000) for context in contexts)
    records = records_of(plain)
    assert [(r.mean_acceptance_length, round(r.context_len), r.plain) for r in records[::3]] == [
        (1, 2000, True),
        (1, 8000, True),
    ]
    assert records[3].step_ms == pytest.approx(11)
    for text in (plain + drafts, drafts + plain):
        found = diagnosed(text)
        assert [cell["relative_step_cost"] for cell in found.baseline] == [pytest.approx(2, rel=0.02)] * 2
    # A request without a draft line where drafts are on, or whose lines were cut, is not called plain.
    assert [r.plain for r in records_of(requests(2000, LENGTH) + requests(2000))] == [False]
    assert not records_of("adding speculative implementation 'draft-mtp'\n" + requests(2000))
