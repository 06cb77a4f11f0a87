"""Which windows of a log a diagnosis is about: servers, engines, plain decode, thinning, what a load hides."""

import random
import re

import pytest

from labkit.engines.diagnose import diagnose
from labkit.engines.importing import Reader
from labkit.engines.record import Record
from labkit.engines.report import render
from labkit.engines.server import Server
from labkit.engines.windows import unlike_ranks
from tests.engine_logs import ARGS, FLOOR, diagnosed, log


@pytest.mark.parametrize("last", [True, False])
def test_a_restart_is_another_server(last):
    first, second = log(ms_per_1k=1.2 * FLOOR, count=80, backend="fa3"), log(ms_per_1k=20 * FLOOR, count=90)
    found = diagnosed(first + second if last else second + first)
    assert found.slope_over_floor[0] == pytest.approx(20 if last else 1.2, rel=0.1)
    assert found.roles["verify"].backend == ("triton" if last else "fa3")
    places = "1-80" if last else "1-90"
    assert f"the log holds 2 servers; the last one is judged; windows {places} belong to those before" in found.warnings
    only_launched = diagnosed(first + ARGS.format(backend="triton", version="0.5.21"))
    assert only_launched.roles["verify"].backend == "fa3"
    assert sum(band["num_windows"] for band in only_launched.bands) == 80
    back = diagnosed(first + second + first)
    assert sum(band["num_windows"] for band in back.bands) == 160
    assert back.roles["verify"].backend == "fa3"
    again = diagnosed(second + second)
    assert sum(band["num_windows"] for band in again.bands) == 180
    assert not any("servers" in text for text in again.warnings)


def test_the_engine_with_most_windows_is_judged():
    llama = "build: 6700\n" + 9 * (
        "slot print_timing: id  0 | task 1 | prompt eval time = 120.50 ms / 512 tokens\n"
        "slot print_timing: id  0 | task 1 |        eval time = 2000.00 ms / 250 tokens\n"
        "slot print_timing: id  0 | task 1 | draft acceptance rate = 0.75 (  150 accepted /   200 generated)\n"
    )
    for text in (log(ms_per_1k=20 * FLOOR) + llama, llama + log(ms_per_1k=20 * FLOOR)):
        found = diagnosed(text)
        assert (found.engine, found.engine_version) == ("sglang", "0.5.21")
        assert sum(band["num_windows"] for band in found.bands) == 240
        assert any("left out: llamacpp (9 windows)" in text for text in found.warnings)


def test_impossible_figures_give_no_verdict():
    found = diagnosed(log(ms_per_1k=-0.05))
    assert found.cause.startswith("nothing can be told of attention")
    assert found.slope_over_floor is None
    assert "KV read" not in render(found)
    low = diagnosed(log(ms_per_1k=FLOOR, length=lambda context: 0.5))
    assert low.cause.startswith("nothing can be told: the mean length is 0.50")
    assert (low.acceptance, low.slope_ms_per_1k) == ("unknown", None)
    assert not any("pinned" in text for text in low.warnings)


def test_plain_decode_is_a_baseline():
    text = re.sub(r"accept len: [\d.]+, accept rate: [\d.-]+, ", "", log(ms_per_1k=2 * FLOOR, length=lambda c: 1.0))
    text = re.sub(r"speculative_\w+=[^,]+, ", "", text)
    found = diagnosed(text)
    assert found.cause.startswith("plain decode")
    assert found.slope_over_floor[0] == pytest.approx(2, rel=0.4)  # the planted length noise is in the throughput
    assert all(band["step_ms"] and band["low"] is None for band in found.bands)
    assert set(found.roles) == {"decode", "prefill"}
    assert found.unknown == []


def test_a_long_log_is_thinned_at_random(monkeypatch):
    monkeypatch.setattr("labkit.engines.diagnose.MAX_WINDOWS", 500)
    lengths = ([1.5] + [2.8] * 7) * 1000  # a request has eight windows
    records = (Record("sglang", "", "window", "", mean_acceptance_length=length) for length in lengths)
    found = diagnose(records, Server())
    assert found.bands[0]["mean_acceptance_length"] == pytest.approx(sum(lengths) / 8000, abs=0.1)
    assert "7500 of 8000 windows were left out, at random" in found.warnings


def test_long_requests_among_short_ones_are_no_stall():
    line = "[2026-06-03 10:00:00] Decode batch, #running-req: 1, #token: {}, accept len: 2.80, cuda graph: True, "
    line += "gen throughput (token/s): {:.2f}, #queue-req: 0\n"
    contexts = ([1024] * 9 + [65536]) * 6
    step = {context: 12 + 0.9 * context / 1000 for context in contexts}
    for order in (contexts, contexts[::-1]):
        records = list(Reader().read_text("".join(line.format(c, 2800 / step[c]) for c in order), "log"))
        assert [r.step_ms for r in records] == pytest.approx([step[c] for c in order], rel=1e-3)
    stalled = list(Reader().read_text("".join(line.format(1024, rate) for rate in (200, 200, 20, 200)), "log"))
    assert [r.step_ms is None for r in stalled] == [False, False, True, False]


def test_step_times_are_of_one_batch():
    text = log(ms_per_1k=FLOOR)
    found = diagnosed(
        text + re.sub(r"req: 1,.*token: (\d+)", lambda m: f"req: 4, #token: {4 * int(m[1])}", text[:9000])
    )
    assert found.batch_size == 1
    assert all(19 < band["step_ms"] < 31 for band in found.bands)  # a fourth of them would be 80 and more


def test_a_load_that_changes_all_the_time_has_a_slope_by_windows_of_all_batches():
    """Between two windows of one batch other batches ran: only windows whose requests hardly changed count."""
    rng, batch = random.Random(1), 40
    lines = [ARGS.format(backend="triton", version="0.5.21"), "Device: NVIDIA H200\n"]
    for _ in range(150):
        batch = max(40, min(240, batch + rng.randint(-12, 15)))
        tokens, graph = int(batch * rng.uniform(2000, 6000)), batch <= 200
        step = (20 + 8 * FLOOR * tokens / 1024 + 0.1 * batch + (0 if graph else 30)) * (1 + rng.gauss(0, 0.01))
        lines.append(
            f"[2026-06-03 10:00:00] Decode batch, #running-req: {batch}, #token: {tokens}, token usage: 0.02, accept "
            f"len: 2.80, accept rate: 0.60, cuda graph: {graph}, gen throughput (token/s): "
            f"{1000 * batch * 2.8 / step:.2f}, #queue-req: 0\n"
        )
    found = diagnosed("".join(lines))
    assert found.all_batches
    low, high = found.slope_over_floor[1:]
    assert low - 0.3 < 8 < high + 0.3
    assert found.intercept_ms[1] < 20 + 0.1 * found.batch_size < found.intercept_ms[2]
    assert "(by windows of all batches)" in render(found)


def test_vllm_context_comes_from_the_cache_usage():
    lines = [
        "INFO 06-03 10:00:00 Initializing a V1 LLM engine (v0.24.0) with config: model='org/Llama-3.3-70B-x'",
        "INFO 06-03 10:00:00 Using AttentionBackendEnum.TRITON_ATTN backend.",
        "INFO 06-03 10:00:00 Device NVIDIA H200, GPU KV cache size: 1,000,000 tokens",
        "INFO 06-03 10:00:00 Device NVIDIA H200",
    ]
    for usage in range(1, 121, 2):
        step = 20 + 20 * FLOOR * usage * 1000 / 1024
        lines += [
            f"INFO 06-03 10:00:10 Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
            f"{2800 / step:.1f} tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: {usage / 10:.1f}%",
            "INFO 06-03 10:00:10 SpecDecoding metrics: Mean acceptance length: 2.80, Accepted throughput: "
            f"{1800 / step:.2f} tokens/s, Drafted throughput: {3000 / step:.2f} tokens/s, Accepted: 360 tokens, "
            "Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400, Avg Draft acceptance rate: 60.0%",
        ]
    found = diagnosed("\n".join(lines))
    assert found.slope_over_floor[0] == pytest.approx(20, rel=0.05)
    assert found.roles["verify"] == found.roles["decode"]
    assert "TRITON_ATTN verifies without a KV split" in found.cause
    assert found.next_step.startswith("--attention-backend FLASH_ATTN")


def test_warnings_that_differ_in_figures_only_are_one():
    found = diagnosed(log(ms_per_1k=0.08, length=lambda context: 1.02))
    pinned = [text for text in found.warnings if "pinned" in text]
    assert len(pinned) == 1
    assert re.match(r"\d+ x such as: pinned acceptance: length 1\.0\d", pinned[0])


def test_a_log_with_prefill_in_every_window_is_told_so():
    prefill = "[2026-06-03 10:00:00] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.02, "
    lines = log(ms_per_1k=1.0).splitlines()
    text = "\n".join(
        line + (f"\n{prefill}#running-req: 1, #queue-req: 0, " if "accept" in line else "") for line in lines
    )
    found = diagnosed(
        text.replace("Device: NVIDIA H200", f"Device: NVIDIA H200\n{prefill}#running-req: 1, #queue-req: 0, ")
    )
    assert "prefill ran in 240 of 240 windows" in found.cause


def test_ranks_with_other_lengths_are_told():
    def windows(lengths):
        known = [Record("sglang", "decode line", "window", "length", mean_acceptance_length=n) for _, n in lengths]
        for record, (rank, _) in zip(known, lengths, strict=True):
            record.details["rank"] = rank
        return known

    assert unlike_ranks(windows([("DP0", 2.8), ("DP1", 2.0), ("DP1", 2.2)])) == [
        "the ranks' lengths differ (DP0 2.80, DP1 2.10); they are pooled"
    ]
    assert not unlike_ranks(windows([("DP0", 2.1), ("DP1", 2.0)]))
    assert not unlike_ranks(windows([("DP0", 2.1)]))
