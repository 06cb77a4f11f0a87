"""The importer: one run in the form of every engine and tool, and what its figures are taken to mean."""

import json

import pytest

from labkit.cli import main
from labkit.engines.importing import Reader, import_files
from labkit.engines.tables import formats, pairs
from tests.engine_forms import (
    BENCH,
    CONSOLE,
    DECODE,
    DRAFTED,
    FORMS,
    GRAPH,
    HISTOGRAM,
    SERVE,
    SG,
    TAIL,
    V1,
    check,
    records_of,
)


@pytest.mark.parametrize("name", FORMS)
def test_form(tmp_path, name):
    text, wanted = FORMS[name]
    record = records_of(tmp_path, text + "\n")[-1]
    check(record, wanted)
    assert record.definition
    assert record.scope in ("window", "request", "run", "since_start")
    assert not any("contradiction" in warning for warning in record.warnings)


READ = formats("json", "labels", "regex")


def test_every_format_of_the_table_is_reachable():
    assert all((item.definition and item.scope) or item.read == "server" for item in READ)
    engines = {item.engine for item in formats("json", "labels", "regex", "block", "metrics")}
    assert engines >= {"sglang", "vllm", "llamacpp", "trtllm", "aiperf", "guidellm", "llamabenchy"}


def test_ambiguous_rate_is_null_until_another_line_decides(tmp_path):
    line = DECODE.replace("accept len: 2.80, accept rate: 0.60", "accept len: {}, accept rate: {}")
    (alone,) = records_of(tmp_path, line.format("2.00", "0.50") + "\n")
    assert alone.draft_acceptance_rate is None
    assert any("both forms" in text for text in alone.warnings)
    first, second = records_of(tmp_path, f"{line.format('2.00', '0.50')}\n{line.format('2.80', '0.70')}\n")
    assert (first.num_speculative_tokens, second.num_speculative_tokens) == (3, 3)
    assert first.draft_acceptance_rate == pytest.approx(1 / 3)
    (none,) = records_of(tmp_path, line.format("2.80", "0.95") + "\n")
    assert none.draft_acceptance_rate is None
    assert any("neither form" in text for text in none.warnings)


def test_undecidable_bonus_is_null(tmp_path):
    text = "INFO 04-10 10:00:00 SpecDecoding metrics: Mean acceptance length: 9.99, Accepted: 360 tokens, "
    text += "Drafted: 600 tokens"
    (record,) = records_of(tmp_path, text + "\n")
    assert record.mean_acceptance_length is None
    assert record.draft_acceptance_rate == pytest.approx(0.6)
    assert any("bonus" in text for text in record.warnings)


def test_prefill_and_queue_and_cache_are_told(tmp_path):
    prefill = (
        "[2026-06-03 10:00:01] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 448, token usage: 0.02, "
    )
    prefill += "#running-req: 4, #queue-req: 3,\n"
    text = f"{DECODE}\n{DECODE}\n{prefill}{DECODE.replace('#queue-req: 0', '#queue-req: 3')}\n{DECODE}\n"
    warned = records_of(tmp_path, text)[2]
    assert warned.prefill_mixed is True
    assert warned.step_ms is None
    for word in ("prefill-mixed", "waiting", "prefix cache"):
        assert any(word in text for text in warned.warnings)


def test_two_scrapes_are_a_run(tmp_path):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

    def page(*counts):
        lines = [
            f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {count}'
            for name, count in zip(names, counts, strict=True)
            for engine in (0, 1)
        ]
        return "\n".join(lines) + "\n"

    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(page(10, 30, 30))
    after.write_text(page(110, 330, 210) + 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n')
    run = list(import_files([before, after]))[-1]
    check(run, DRAFTED | {"scope": "run"})


def engine_page(*counts_of_engines):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return "".join(
        f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {count}\n'
        for engine, counts in enumerate(counts_of_engines)
        for name, count in zip(names, counts, strict=True)
    )


def test_pages_in_reverse_order_are_told(tmp_path):
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(engine_page((10, 30, 15)))
    after.write_text(engine_page((210, 630, 375)))
    turned = list(import_files([after, before]))
    assert [record.scope for record in turned] == ["since_start", "since_start"]
    assert any("reverse order" in text for text in turned[1].warnings)
    same = list(import_files([after, after]))
    assert any("nothing ran" in text for text in same[1].warnings)
    run = list(import_files([before, after]))[-1]
    check(run, DRAFTED | {"scope": "run", "warnings": []})


def test_engines_of_one_page_are_told_apart(tmp_path):
    (record,) = records_of(tmp_path, engine_page((100, 300, 220), (100, 300, 140)))
    check(record, DRAFTED)
    assert [engine["mean_acceptance_length"] for engine in record.details["engines"].values()] == [3.2, 2.4]
    assert any("2 engines lie between 2.40 and 3.20" in text for text in record.warnings)
    (alike,) = records_of(tmp_path, engine_page((100, 300, 182), (100, 300, 178)))
    assert alike.warnings == []
    page = engine_page((100, 300, 220), (100, 300, 140)) + engine_page((200, 600, 400), (200, 600, 320))
    run = records_of(tmp_path, page)[-1]
    assert [engine["mean_acceptance_length"] for engine in run.details["engines"].values()] == [2.8, 2.8]


def test_two_drafters_have_a_line_each(tmp_path):
    line = FORMS["llama.cpp statistics"][0]
    records = records_of(tmp_path, f"{line}\n{line.replace('draft-mtp', 'ngram-mod').replace('= 360', '= 180')}\n")
    lengths = {record.details["drafter"]: record.mean_acceptance_length for record in records}
    assert lengths == {"draft-mtp": pytest.approx(2.8), "ngram-mod": pytest.approx(1.9)}


def test_an_early_prefill_line_marks_the_window(tmp_path):
    early = (
        "[2025-02-03 10:00:01 TP0] Prefill batch. #new-seq: 1, #new-token: 2048, #cached-token: 0, token usage: 0.02, "
    )
    early += "#running-req: 4, #queue-req: 0,\n"
    line = FORMS["sglang early 2025"][0] + "\n"
    records = records_of(tmp_path, line + early + line)
    assert [record.prefill_mixed for record in records] == [False, True]


def test_a_value_may_be_a_list_and_a_line_may_be_cut():
    found = pairs(", #running-req: 4, note, accept len: 2.80, rates: 0.8, 0.6, dur(b,g,a) = 1, 2 ms, x y: nan,")
    values = {"#running-req": "4, note", "accept len": "2.80", "rates": "0.8, 0.6", "dur(b,g,a)": "1, 2 ms"}
    assert found == values | {"x y": "nan"}
    assert pairs(". #running-req: 4, accept len:") == {"#running-req": "4, accept len:"}


def test_sglang_counters_leave_the_prefill_tokens_out(tmp_path):
    page = "sglang:spec_verify_calls_total {}\nsglang:generation_tokens_total {}\nsglang:num_requests_total {}\n"
    path = tmp_path / "m.txt"
    path.write_text(page.format(100, 1000, 10) + page.format(300, 1561, 11))
    assert list(import_files([path]))[-1].mean_acceptance_length == pytest.approx(2.8)


def test_ranks_of_a_gauge_are_not_averaged(tmp_path):
    text = 'sglang:spec_accept_length{dp_rank="0"} 2.0\nsglang:spec_accept_length{dp_rank="1"} 3.0\n'
    text += 'sglang:gen_throughput{dp_rank="0"} 10\n'
    (record,) = records_of(tmp_path, text)
    assert record.mean_acceptance_length is None
    assert record.details["mean_acceptance_length_of_ranks"] == [2.0, 3.0]


def test_imposed_acceptance_is_forced(tmp_path):
    line = "non-default args: {'speculative_config': {'rejection_sample_method': 'synthetic'}}\n"
    (record,) = records_of(tmp_path, line + FORMS["vllm 0.9"][0] + "\n")
    assert record.origin == "forced"


def test_backend_that_is_not_told_is_null(tmp_path):
    lines = "Initializing a V1 LLM engine (v0.{}.0) with config: model='m'\n"
    lines += "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    for version in (15, 33):
        (record,) = records_of(tmp_path, lines.format(version) + FORMS["vllm 0.9"][0] + "\n")
        assert (record.backend["verify"], record.backend["decode"]) == ("FLASH_ATTN", "FLASH_ATTN")
        # Inherited; picked again, and another one than the target's would have a line of its own.
        assert record.backend["draft"] == "FLASH_ATTN"
    given = lines.format(33).replace(
        "FLASH_ATTN attention backend out of", "AttentionBackendEnum.FLASH_ATTN backend, not"
    )
    (record,) = records_of(tmp_path, given + FORMS["vllm 0.9"][0] + "\n")
    assert (record.backend["verify"], record.backend["draft"]) == ("FLASH_ATTN", None)


def test_llamacpp_rates_are_over_the_steps_with_a_draft(tmp_path):
    text, _ = FORMS["llama.cpp slot, new"]
    eval_time = "slot print_timing: id  0 | task 7 |        eval time =   10020.00 ms /   {} tokens\n"
    (longer,) = records_of(tmp_path, eval_time.format(661) + text + "\n")  # 100 steps without a draft
    assert longer.mean_acceptance_length == pytest.approx(1 + 360 / 300)
    assert longer.warnings == []
    (wrong,) = records_of(tmp_path, eval_time.format(501) + text + "\n")
    assert any("contradiction" in warning for warning in wrong.warnings)
    (wrong,) = records_of(tmp_path, eval_time.format(661) + text.replace("0.800", "0.900") + "\n")
    assert any("sum of rates" in warning for warning in wrong.warnings)


def test_negative_figures_are_null(tmp_path):
    for old, new, field in (("#token: 5120", "#token: -5", "context_len"), ("len: 2.80", "len: -2.85", "step_ms")):
        records = records_of(tmp_path, f"{DECODE}\n{DECODE.replace(old, new)}\n{DECODE}\n")
        assert getattr(records[1], field) is None
        assert any("below 0: not used" in text for text in records[1].warnings)
    assert records[1].mean_acceptance_length is None


def test_degenerate_text(tmp_path):
    (record,) = records_of(tmp_path, json.dumps(BENCH | {"total_output_tokens_retokenized": 250}))
    assert any("degenerate text" in text for text in record.warnings)


def test_contradictions_are_named(tmp_path):
    bad = HISTOGRAM | {"num_draft_tokens": 300, "acceptance_histogram": None}
    (record,) = records_of(tmp_path, json.dumps(bad))
    assert any("360 accepted of 300" in text for text in record.warnings)


def test_speedup_above_the_length_is_told(tmp_path):
    plain = {name: value for name, value in SERVE.items() if not name.startswith("spec")} | {"output_throughput": 10.0}
    paths = [tmp_path / "plain.json", tmp_path / "spec.json"]
    for path, content in zip(paths, (plain, SERVE), strict=True):
        path.write_text(json.dumps(content))
    first, second = import_files(paths)
    assert first.warnings == []
    assert any("speed-up 5.60 above the acceptance length 2.80" in text for text in second.warnings)


def test_a_length_that_the_counts_deny_is_a_contradiction():
    for changed in ({"spec_decode_acceptance_length": 3.5}, {"spec_decode_acceptance_rate": 80.0}):
        (record,) = Reader().read_text(json.dumps(SERVE | changed), "x")
        assert any("contradiction: the printed" in text for text in record.warnings)
    start = "INFO 05-08 10:00:00 Speculative metrics: Draft acceptance rate: "
    tail = "Number of speculative tokens: 3, Number of accepted tokens: 360, Number of draft tokens: 600, "
    for rate, efficiency, wrong in ((0.6, 0.7, 0), (0.9, 0.7, 1), (0.6, 0.2, 1)):
        line = f"{start}{rate:.3f}, System efficiency: {efficiency:.3f}, {tail}Number of emitted tokens: 560."
        (record,) = Reader().read_text(line, "x")
        assert sum("contradiction" in text for text in record.warnings) == wrong
    line = "INFO SpecDecoding metrics: Mean acceptance length: {}, " + V1 + ", Avg Draft acceptance rate: {}%"
    for length, rate, wrong in ((2.8, 60.0, 0), (3.5, 60.0, 1), (2.8, 90.0, 1)):
        (record,) = Reader().read_text(line.format(length, rate), "x")
        assert sum("contradiction" in text for text in record.warnings) == wrong


def test_the_step_of_bench_serve_is_tpot_times_length():
    content = SERVE | {"max_concurrency": 1, "output_throughput": 5.0}
    (record,) = Reader().read_text(json.dumps(content | {"mean_tpot_ms": 7.0}), "x")
    assert record.step_ms == pytest.approx(7.0 * 2.8)
    assert record.details["step_ms_from"] == "TPOT x length"
    (record,) = Reader().read_text(json.dumps(content), "x")
    assert record.step_ms is None
    assert any("no TPOT" in text for text in record.warnings)


def test_no_figure_is_no_record(tmp_path, capsys):
    (tmp_path / "s.log").write_text("some statistics of the year\n")
    for name in ("s.log", "nope.log"):
        assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "o2")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "o2").exists()


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_an_accept_len_that_is_no_number_is_told(text):
    line = f"[2026-05-08 10:00:00] Decode batch. #running-req: 1, {SG.replace('2.80', text)}, {GRAPH}{TAIL}"
    (record,) = Reader().read_text(line, "x")
    assert any("is no number" in warning for warning in record.warnings)


def test_a_console_of_one_stream_gives_its_step():
    lines = "Maximum request concurrency:             1\nMean TPOT (ms):                          7.17\n"
    (record,) = Reader().read_text(CONSOLE.replace("Output token", f"{lines}Output token"), "x")
    assert (record.batch_size, record.step_ms) == (1, pytest.approx(2.8 * 7.17))
    ranks = {
        "attention_backend": "fa3",
        "internal_states": [{}, {"avg_spec_accept_length": 2.9}, {"avg_spec_accept_length": 4}],
    }
    (record,) = Reader().read_text(json.dumps(ranks), "x")
    assert record.mean_acceptance_length is None
    assert any("2 of 3 ranks have a length, 2.90 to 4.00" in text for text in record.warnings)
