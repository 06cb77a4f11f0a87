"""Diagnosis of planted logs, roles of servers, launch lines, recipes, and a served info page."""

import csv
import json
import random
import re
import shlex
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from labkit.cli import main
from labkit.engines.diagnose import diagnose
from labkit.engines.importing import Reader
from labkit.engines.recipes import plain, recipe
from labkit.engines.record import Record
from labkit.engines.report import render
from labkit.engines.roles import (
    gpu_row,
    kernel,
    known_flags,
    launch_findings,
    launch_notes,
    resolve_roles,
    rows_of,
    version_key,
)
from labkit.engines.server import Server, parse_launch
from labkit.engines.tables import read_table
from labkit.engines.windows import unlike_ranks
from labkit.errors import InputError
from labkit.paths import REFERENCE, RUNS
from labkit.provenance import redact
from labkit.shapes import model_shape

ARGS = "server_args=ServerArgs(model_path='org/Llama-3.3-70B-x', attention_backend={backend!r}, "
ARGS += "speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1, "
ARGS += "speculative_num_draft_tokens=4, version={version!r})\n"


def log(
    *, ms_per_1k, intercept=20.0, length=lambda context: 2.8, backend="triton", version="0.5.21", graph=True, count=240
):
    """Decode lines over 1K to 128K, batch 1, with a known step time and length."""
    rng, now = random.Random(7), datetime(2026, 6, 3, 10)
    lines = [ARGS.format(backend=backend, version=version), "Device: NVIDIA H200\n"]
    for i in range(count):
        context = int(1024 * 2 ** (7 * i / (count - 1)))
        tokens = length(context) + rng.gauss(0, 0.05)
        step = (intercept + ms_per_1k * context / 1024) * (1 + rng.gauss(0, 0.01))
        now += timedelta(seconds=2)
        lines.append(
            f"[{now:%Y-%m-%d %H:%M:%S}] Decode batch, #running-req: 1, #token: {context}, token usage: 0.02, "
            f"accept len: {tokens:.2f}, accept rate: {(tokens - 1) / 3:.2f}, cuda graph: {graph}, "
            f"gen throughput (token/s): {1000 * tokens / step:.2f}, #queue-req: 0\n"
        )
    return "".join(lines)


def diagnosed(text, **options):
    reader = Reader()
    records = reader.read_text(text, "log", reader.server)
    return diagnose(records, reader.server, **options)


SHAPE = model_shape("llama-3.3-70b")
FLOOR = SHAPE.kv_bytes_per_token("bfloat16") * 1024 / 4800 / 1e6


def test_verify_cost_is_found_with_its_size_and_flag():
    found = diagnosed(log(ms_per_1k=20 * FLOOR))
    value, low, high = found.slope_over_floor
    assert low < 20 < high
    assert value == pytest.approx(20, rel=0.05)
    assert found.intercept_ms[0] == pytest.approx(20, rel=0.05)
    assert found.acceptance == "flat over context"
    assert len(found.bands) == 8
    assert "verify cost" in found.cause
    assert "without a KV split" in found.cause
    assert found.next_step.startswith("--attention-backend flashinfer")
    assert found.roles["verify"].how == "inherited from prefill, given by --attention-backend"
    text = render(found)
    assert "x one KV read" in text
    assert "unknown: cost of a plain step" in text


def test_a_backend_that_splits_the_cache_is_not_replaced_blindly():
    found = diagnosed(log(ms_per_1k=1.0, backend="fa3"))
    assert found.cause.startswith("verify cost")
    assert "--recipe backend-ab" in found.next_step
    assert "fa3 verifies with a KV split" in found.next_step


def test_falling_acceptance_is_not_called_verify_cost():
    falling = log(ms_per_1k=1.1 * FLOOR, length=lambda context: 3.4 - 0.25 * (context.bit_length() - 10))
    found = diagnosed(falling)
    assert found.acceptance == "falling with context"
    assert found.cause.startswith("acceptance: it falls")


def test_healthy_broken_and_eager():
    assert diagnosed(log(ms_per_1k=1.2 * FLOOR, backend="flashinfer")).cause.startswith("neither")
    broken = diagnosed(log(ms_per_1k=20 * FLOOR, length=lambda context: 1.02))
    assert "broken rather than slow" in broken.cause
    eager = diagnosed(log(ms_per_1k=1.2 * FLOOR, graph=False))
    assert eager.cause.startswith("launch overhead")
    assert eager.next_step.startswith("look for --disable-cuda-graph")
    text = log(ms_per_1k=1.2 * FLOOR, graph=False).replace("graph: False", "graph: True", 100)
    some = diagnosed(text)
    assert some.cause.endswith("though batches as large ran with one")
    assert "--cuda-graph-max-bs" not in some.next_step
    larger = [re.sub("req: 1,", "req: 2,", line) if "False" in line else line for line in text.splitlines()]
    assert diagnosed("\n".join(larger)).next_step.startswith("raise --cuda-graph-max-bs")


@pytest.mark.parametrize(("length", "wanted"), [(4.0, "acceptance is pinned"), (5.2, "none can be told")])
@pytest.mark.parametrize("tree", [False, True])
def test_pinned_and_contradictory_logs_are_not_healthy(length, wanted, tree):
    text = re.sub(r"accept len: [\d.]+, accept rate: [\d.]+", f"accept len: {length:.2f}", log(ms_per_1k=20 * FLOOR))
    if tree:
        text = text.replace("topk=1", "topk=8").replace("draft_tokens=4", "draft_tokens=64")
    found = diagnosed(text)
    assert wanted in found.cause
    assert any("pinned" in text for text in found.warnings) == (length == 4)
    assert any("contradiction" in text for text in found.warnings) == (length > 4)


def falling(context):
    return 3.0 - 0.25 * (context.bit_length() - 11)


def test_bands_of_few_windows_are_not_compared():
    lines = log(ms_per_1k=1.1 * FLOOR, length=falling).splitlines(keepends=True)
    for kept in (lines[:3] + lines[40:], lines[:-18] + lines[-1:]):  # one window alone at one end
        found = diagnosed("".join(kept))
        assert found.acceptance == "falling with context"
        assert all((band["low"] is None) == (band["num_windows"] < 3) for band in found.bands)
        assert any("not compared" in text for text in found.warnings)


def test_unknown_acceptance_does_not_hold():
    text = log(ms_per_1k=0, count=40)
    rows = iter(range(40))
    text = re.sub(r"#token: \d+", lambda m: f"#token: {6000 + 120 * next(rows)}", text)  # one octave
    text = re.sub(r"throughput \(token/s\): [\d.]+", "throughput (token/s): {}", text)
    steps = [20 + 1.2 * FLOOR * (6000 + 120 * i) / 1024 for i in range(40)]
    lengths = [float(x) for x in re.findall(r"accept len: ([\d.]+)", text)]
    text = text.format(*(round(1000 * a / b, 2) for a, b in zip(lengths, steps, strict=True)))
    found = diagnosed(text)
    assert found.acceptance == "unknown"
    assert any("at least 3 windows: 1, to compare are 2" in text for text in found.unknown)
    assert "holds" not in found.cause.replace("whether acceptance holds over context is unknown", "")


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


def test_intervals_are_of_possible_lengths():
    lengths, place = [1.02, 1.3, 1.01, 2.9, 1.4, 3.99, 4.0, 3.2, 4.0, 4.0], [2048.0] * 5 + [65536.0] * 5
    for few in (1, 0):
        records = [
            Record("sglang", "", "window", "", mean_acceptance_length=a, context_len=c, num_speculative_tokens=3)
            for a, c in list(zip(lengths, place, strict=True))[: 2 if few else None]
        ]
        for band in diagnose(records, Server()).bands:
            assert band["low"] is None if few else 1 <= band["low"] < band["high"] <= 4


def test_what_is_missing_is_named():
    short = diagnosed("\n".join(log(ms_per_1k=FLOOR).splitlines()[:6]))
    assert short.cause == "undecided: the slope of the step time is missing"
    assert any("4 steady windows, at least 6 are needed" in text for text in short.unknown)
    other = diagnosed(log(ms_per_1k=FLOOR).replace("Llama-3.3-70B-x", "secret-model"))
    assert "has no floor" in other.cause
    for found in (short, other):
        assert "unknown ms" not in render(found)


def test_a_long_log_is_thinned_at_random(monkeypatch):
    monkeypatch.setattr("labkit.engines.diagnose.MAX_WINDOWS", 500)
    lengths = ([1.5] + [2.8] * 7) * 1000  # a request has eight windows
    records = (Record("sglang", "", "window", "", mean_acceptance_length=length) for length in lengths)
    found = diagnose(records, Server())
    assert found.bands[0]["mean_acceptance_length"] == pytest.approx(sum(lengths) / 8000, abs=0.1)
    assert "7500 of 8000 windows were left out, at random" in found.warnings


def test_what_is_unknown_is_said():
    short = diagnosed(log(ms_per_1k=FLOOR, count=240).replace("Llama-3.3-70B-x", "secret-model"))
    assert short.slope_over_floor is None
    assert any("--model" in text for text in short.unknown)
    one_context = diagnosed("\n".join(log(ms_per_1k=FLOOR).splitlines()[:12]))
    assert one_context.slope_ms_per_1k is None
    assert any("over too little context" in text for text in one_context.unknown)
    other_version = diagnosed(log(ms_per_1k=20 * FLOOR, version="0.9.9"))
    assert "unknown for this version" in other_version.next_step
    assert {role.backend for role in other_version.roles.values()} <= {"unknown"}


def test_given_names_win():
    text = log(ms_per_1k=20 * FLOOR).replace("NVIDIA H200", "x")
    assert diagnosed(text).slope_over_floor is None
    fp8 = diagnosed(text, gpu="h200-sxm", model="llama-3.3-70b", kv_dtype="fp8_e4m3")
    assert fp8.slope_over_floor[0] == pytest.approx(40, rel=0.05)
    same = diagnosed(text.replace("Llama-3.3-70B-x", "Llama-3.1-8B-Instruct"), gpu="h200-sxm")
    assert same.model == "org/Llama-3.1-8B-Instruct (shape llama-3-8b)"
    with pytest.raises(InputError, match="model must be one of"):
        diagnosed(text, model="nosuch")


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


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("attention_backend='triton'", "--attention-backend flashinfer (moves all roles without"),
        ("prefill_attention_backend='triton'", "--prefill-attention-backend flashinfer (moves prefill and verify"),
        (
            "decode_attention_backend='triton', prefill_attention_backend='fa3', speculative_attention_mode='decode'",
            "--decode-attention-backend flashinfer (moves decode and verify",
        ),
    ],
)
def test_the_flag_that_moved_the_verify_role_moves_it_again(flags, wanted):
    found = diagnosed(log(ms_per_1k=20 * FLOOR).replace("attention_backend='triton'", flags))
    assert found.roles["verify"].backend == "triton"
    assert found.next_step.startswith(wanted)


def test_a_step_faster_than_the_peak_has_no_floor():
    found = diagnosed(log(ms_per_1k=0.6 * FLOOR))
    assert found.slope_over_floor is None
    assert any("reads of the KV cache are below one" in text for text in found.unknown)
    assert "KV read" not in render(found)


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


def test_a_log_without_contexts_is_told_what_it_lacks():
    counts = "Accepted: 360 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400"
    line = f"INFO 05-08 10:00:00 SpecDecoding metrics: Mean acceptance length: 2.80, {counts}\n"
    assert "GPU KV cache size" in diagnosed(9 * line).next_step
    iteration = '{"iterLatencyMS": 20.0, "specDecodingStats": {"numDraftTokens": 3, "acceptanceLength": 2.5}}\n'
    assert diagnosed(9 * iteration).next_step.startswith("labkit replay at several contexts")


def test_tensor_parallel_servers_read_their_share():
    text = log(ms_per_1k=20 * FLOOR).replace("version=", "tp_size=4, version=")
    assert diagnosed(text).slope_over_floor[0] == pytest.approx(80, rel=0.05)


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


def server(engine="sglang", version="0.5.21", gpu=None, named=None, **args):
    made = Server(engine=engine, version=version, gpu=gpu, named=dict(named or {}))
    made.take_args(args)
    return made


@pytest.mark.parametrize(
    ("made", "role", "backend", "how"),
    [
        (server(attention_backend="triton"), "verify", "triton", "inherited from prefill"),
        (
            server(prefill_attention_backend="flashinfer", decode_attention_backend="fa3"),
            "verify",
            "flashinfer",
            "prefill",
        ),
        (
            server(prefill_attention_backend="a", decode_attention_backend="b", speculative_attention_mode="decode"),
            "verify",
            "b",
            "inherited from decode",
        ),
        (server(attention_backend="triton", speculative_draft_attention_backend="fa3"), "draft", "fa3", "given"),
        (server(prefill_attention_backend="a", decode_attention_backend="b"), "draft", "b", "inherited from decode"),
        (
            server(prefill_attention_backend="a", decode_attention_backend="b", speculative_algorithm="DFLASH"),
            "draft",
            "a",
            "inherited from prefill",
        ),
        (server(gpu="NVIDIA H200"), "decode", "fa3", "default of the table for NVIDIA H200"),
        (server(gpu="h200-sxm", speculative_eagle_topk=8), "verify", "flashinfer", "topk above 1"),
        (server(gpu="b200-hgx", speculative_eagle_topk=1), "verify", "trtllm_mha", "default of the table"),
        # On SM100 an unset topk of a drafter is "not stated", which is no chain.
        (server(gpu="b200-hgx", speculative_algorithm="EAGLE3"), "verify", "flashinfer", "default of the table"),
        (server(gpu="b200-hgx"), "verify", "trtllm_mha", "default of the table"),
        (server(gpu="NVIDIA H200", version="0.5.6"), "decode", "unknown", "unknown for this version and GPU"),
        (server(named={"default": "fa3"}), "verify", "fa3", "named by the log"),
        (server(named={"decode": "fa3", "prefill": "flashinfer"}), "verify", "flashinfer", "named by the log"),
        (server("vllm", "0.33.0", attention_backend="TRITON_ATTN"), "verify", "TRITON_ATTN", "given"),
        (server("vllm", "0.33.0", attention_backend="TRITON_ATTN"), "draft", "unknown", "picked automatically"),
        (server("vllm", "0.33.0", speculative_config={"attention_backend": "X"}), "draft", "X", "given"),
        (server("vllm", "0.33.0", gpu="NVIDIA B200"), "verify", "FLASHINFER", "default of the table"),
        (server("vllm", "0.15.1", named={"default": "FLASH_ATTN"}), "verify", "FLASH_ATTN", "named by the log"),
        (server("llamacpp", None), "verify", "unknown", "picked automatically"),
        (server("trtllm", "1.2"), "verify", "TRTLLM", "default"),
        (server("trtllm", "1.2"), "draft", "unknown", "unknown for this version"),
    ],
)
def test_roles(made, role, backend, how):
    found = resolve_roles(made)[role]
    assert found.backend == backend
    assert how in found.how


def test_drafts_without_a_model_have_no_draft_role():
    for made in (server(speculative_algorithm="NGRAM"), server("vllm", "0.33.0", method="ngram")):
        assert not [role for role in resolve_roles(made) if role.startswith("draft")]
    assert "draft_extend" not in resolve_roles(server(speculative_algorithm="DFLASH"))


@pytest.mark.parametrize(
    ("engine", "version", "gpu", "backend"),
    [
        ("sglang", "0.5.21", "NVIDIA H200", "fa3"),
        ("sglang", "0.5.21", "NVIDIA A100-SXM4-80GB", "triton"),
        ("sglang", "0.5.21", "NVIDIA B200", "unknown"),  # by model class
        ("vllm", "0.33.0", "NVIDIA H100 PCIe", "FLASH_ATTN_MLA"),
        ("vllm", "0.33.0", "NVIDIA B200", "FLASHINFER_MLA"),
    ],
)
def test_models_with_latent_attention_have_other_defaults(engine, version, gpu, backend):
    made = server(engine, version, gpu)
    made.model = "deepseek-ai/DeepSeek-V3"
    assert resolve_roles(made)["verify"].backend == backend
    made.model = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert resolve_roles(made)["verify"].backend in ("fa3", "flashinfer", "trtllm_mha", "FLASH_ATTN", "FLASHINFER")


def test_how_of_a_role_is_readable():
    roles = resolve_roles(server("vllm", None, attention_backend="X")) | resolve_roles(server(version=None))
    for role in roles.values():
        assert "(" not in role.how
        assert role.how.count("version unknown") == 1


def test_log_lines_name_backends():
    reader = Reader()
    text = (
        "INFO Attention backend not specified. Use fa3 backend by default.\n"
        "WARN Using hybrid attention backend for decode and prefill: decode_backend=fa3, prefill_backend=flashinfer.\n"
        "INFO Overriding draft attention backend to triton.\n"
    )
    list(reader.read_text(text, "log"))
    assert reader.server.named == {"default": "fa3", "decode": "fa3", "prefill": "flashinfer", "draft": "triton"}
    text = (
        "Initializing a V1 LLM engine (v0.33.0) with config: model='m', speculative_config="
        "SpeculativeConfig(method='mtp')\n"
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    )
    list(reader.read_text(text, "log"))
    assert (reader.server.version, reader.server.model) == ("0.33.0", "m")
    assert resolve_roles(reader.server)["verify"].backend == "FLASH_ATTN"


SPECULATIVE = "{'method': 'eagle3', 'model': 'yuhuili/EAGLE3-LLaMA3.1-Instruct-8B', 'num_speculative_tokens': 3}"
NON_DEFAULT = "non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'hosts': [], 'speculative_config': "
NON_DEFAULT += SPECULATIVE + "}\n"
CONFIG = (
    "Initializing a V1 LLM engine (v0.33.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', speculative_config="
    "SpeculativeConfig(method='eagle3', model='yuhuili/EAGLE3-LLaMA3.1-Instruct-8B', num_spec_tokens=3), "
    "dtype=torch.bfloat16, enforce_eager=False\n"
)


@pytest.mark.parametrize("text", [NON_DEFAULT, CONFIG])
def test_the_drafter_is_not_the_target(text):
    reader = Reader()
    list(reader.read_text(text, "log"))
    assert reader.server.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert reader.server.args["method"] == "eagle3"


LAUNCH = (
    "sglang serve --model-path m --speculative-algorithm EAGLE3 --speculative-num-steps {} --speculative-eagle-topk {} "
)
LAUNCH += "--speculative-num-draft-tokens {}"


@pytest.mark.parametrize(
    ("line", "version", "wanted"),
    [
        (LAUNCH.format(4, 1, 24), "0.5.21", ["hold 5 rows"]),
        (LAUNCH.format(3, 1, 4), "0.5.21", []),
        (LAUNCH.format(2, 2, 8), "0.5.21", ["hold 7 rows"]),
        (LAUNCH.format(3, 2, 8), "0.5.21", []),
        (LAUNCH.format(5, 8, 64), "0.5.21", []),
        (LAUNCH.format(5, 8, 500), "0.5.21", ["hold 265 rows"]),
        (
            LAUNCH.format(3, 1, 4) + " --speculative-draft-attention-backend fa3",
            "0.5.6",
            ["not a flag of sglang 0.5.6"],
        ),
        (LAUNCH.format(3, 1, 4) + " --speculative-draft-attention-backend fa3", "0.5.21", []),
        (LAUNCH.format(3, 1, 4) + " --max-running-requests 64 --cuda-graph-max-bs 16", "0.5.21", ["below 64 running"]),
        (
            "vllm serve m --speculative-config '{\"num_speculative_tokens\": 7}' --max-num-seqs 64 "
            "--max-cudagraph-capture-size 256",
            "0.33.0",
            ["below batch x q_len = 64 x 8"],
        ),
        ("llama-server -m m.gguf --draft-max 4", "6123", []),
        (LAUNCH.format("x", -1, 4), "0.5.21", ["eagle_topk: wanted a whole", "num_steps: wanted a whole"]),
        (
            'vllm serve m --speculative-config \'{"num_speculative_tokens": "abc"}\'',
            "0.33.0",
            ["wanted a whole number"],
        ),
        (
            "vllm serve m --compilation-config '{\"cudagraph_capture_sizes\":[1,2,4,8]}' --max-num-seqs 64",
            "0.33.0",
            ["largest CUDA graph 8: below batch x q_len = 64 x 1"],
        ),
        ("vllm serve m --mm-attention-backend TORCH", "0.33.0", []),
        ("sglang serve --model-path m --disable-cuda-graph", "0.5.21", ["without a CUDA graph"]),
        ("sglang serve --model-path m --attention-backend fa9", "0.5.21", ["fa9: no backend"]),
        ("llama-server -m m.gguf --spec-draft-n-max 4", "9030", []),
        (LAUNCH.format(3, 1, 4) + " --cuda-graph-max-bs 4", "0.5.21", ["below 48 running"]),
        (LAUNCH.format(3, 1, 4).replace("EAGLE", "EAGEL"), "0.5.21", ["EAGEL"]),
        ("sglang serve --model-path m --speculative-algorithm DSPARK", "0.5.15", ["DSPARK: not in sglang 0.5.15"]),
        ("vllm serve m --speculative-config.method medusa", "0.33.0", ["medusa: not in vllm 0.33.0; known for 0.9.2"]),
        (
            'vllm serve m --speculative_config \'{"method": "deepseek_mtp", "num_speculative_token": 3}\'',
            "0.33.0",
            ["did you mean num_speculative_tokens?"],
        ),
        (
            "vllm serve m --speculative-config.num_speculative_tokens 3 --max-num-seqs 64 "
            "-O '{\"cudagraph_capture_sizes\":[1,2,4,8]}'",
            "0.33.0",
            ["below batch x q_len = 64 x 4"],
        ),
        ("vllm serve m --cudagraph-capture-sizes 1 2 4 128 --max-num-seqs 64", "0.33.0", []),
        ("vllm serve m --cudagraph-capture-sizes 1 2 4 8 --max-num-seqs 64", "0.33.0", ["CUDA graph 8: below batch"]),
        (
            "llama-server -m m.gguf --spec-type draft-mpt,ngram-mod",
            "9030",
            ["draft-mpt: unknown for this version; did"],
        ),
        (
            'vllm serve m --speculative-config \'{"num_speculative_tokens": 3, "draft_sample_method": "greedy"}\'',
            "0.20.0",
            ["draft_sample_method: not a flag of vllm 0.20.0; known for 0.24 to 0.33.0"],
        ),
        ("vllm serve m --speculative-config.rejection_sample_method strict", "0.33.0", ["strict: not in vllm 0.33.0"]),
        (
            "sglang serve --model-path m --attention-backend nsa",
            "0.5.23",
            ["nsa: not in sglang 0.5.23; known for 0.5.6"],
        ),
        ("sglang serve --model-path m --attention-backend nsa", "0.5.6", []),
        (
            LAUNCH.format(3, 1, 4) + " --cuda-graph-bs 1 2 4 8 --max-running-requests 64",
            "0.5.21",
            ["8: below 64 running"],
        ),
        (LAUNCH.format(3, 2, 8) + " --attention-backend trtllm_mha", "0.5.21", ["trtllm_mha verifies chains only"]),
        (
            "sglang serve --model-path m --speculative-algorithm DFLASH --speculative-dflash-block-size 8 "
            "--speculative-num-draft-tokens 16",
            "0.5.23",
            ["--speculative-dflash-block-size 8: num-draft-tokens must be 8, not 16"],
        ),
        (
            "sglang serve --model-path m --speculative-algorithm DSPARK --speculative-dspark-block-size 7 "
            "--speculative-num-draft-tokens 7",
            "0.5.23",
            ["--speculative-dspark-block-size 7: num-draft-tokens must be 8, not 7"],
        ),
        (
            "vllm serve m --attention-backend FLASH_ATTN --attention-config.backend TRITON_ATTN",
            "0.33.0",
            ["--attention-backend and --attention-config.backend: both are set"],
        ),
        (
            "vllm serve m --spec-method eagle3 --spec-model x --spec-tokens 3 --max-num-seqs 256 "
            "--max-cudagraph-capture-size 512",
            "0.33.0",
            ["largest CUDA graph 512: below batch x q_len = 256 x 4"],
        ),
    ],
)
def test_launch_lines(line, version, wanted):
    made, flags = parse_launch(line, version)
    found = list(launch_findings(made, flags))
    assert len(found) == len(wanted)
    assert all(text in problem for text, problem in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("settings", "ceiling"), [((3, 1, 4), 4), ((5, 8, 64), 6), ((5, 8, 4), 4), ((3, 1, 16), 4), ((5, 8, 500), 6)]
)
def test_launch_notes_tell_the_ceiling(settings, ceiling):
    made, _ = parse_launch(LAUNCH.format(*settings), "0.5.21")
    notes = " ".join(launch_notes(made, []))
    assert f"at most {ceiling}:" in notes
    assert "48" in notes
    block = parse_launch("sglang serve --speculative-algorithm DSPARK --speculative-dspark-block-size 7", "0.5.23")
    assert any("at most 8: 7 drafts" in text for text in launch_notes(*block))  # the root is not in it
    unset, flags = parse_launch("sglang serve --model-path m --speculative-algorithm NGRAM", "0.5.23")
    assert any("so the ceiling is unknown" in text for text in launch_notes(unset, flags))


@pytest.mark.parametrize(
    "line",
    [
        f"docker run -e SGLANG_SIMULATE_ACC_LEN=3 lmsysorg/sglang {LAUNCH.format(3, 1, 4)}",
        "llama-server -m m.gguf --spec-type draft-mtp --spec-synth-len 2.5",
        'vllm serve m --speculative-config \'{"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}\'',
    ],
)
def test_a_launch_line_that_imposes_acceptance_is_told(line):
    assert any("acceptance is imposed" in text for text in launch_notes(*parse_launch(line, None)))


def test_spec_tokens_of_vllm_are_the_ceiling():
    made = parse_launch("vllm serve m --spec-method eagle3 --spec-model x --spec-tokens 3", "0.33.0")
    assert any("at most 4: 3 drafts" in text for text in launch_notes(*made))


@pytest.mark.parametrize(
    ("line", "version", "flag"),
    [
        ("sglang serve --model-path m --specultive-foo 3", "0.5.21", "--specultive-foo"),
        ("vllm serve m --foo", "0.33.0", "--foo"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --max-num-seq 3", "0.33.0", "--max-num-seq"),
        ("sglang serve --model-path m --speculative-draft-attention-backend fa3", "0.5.10", "--speculative-draft-att"),
        ("llama-server -m m.gguf --draft-max 4", "6123", "--draft-max"),
        ("llama-server -m m.gguf --draft-max 4", None, "--draft-max"),
        ("llama-server -m m.gguf --metrics", "6123", "--metrics"),
        ("llama-server -m m.gguf --spec-type nosuch", None, "spec_type nosuch"),
    ],
)
def test_flags_that_are_not_known_are_said_to_be(line, version, flag):
    made, flags = parse_launch(line, version)
    assert [text.startswith(flag) and "unknown for this version" in text for text in launch_notes(made, flags)] == [
        True
    ]


def test_flags_of_other_programs_and_underscores_are_no_notes():
    line = "docker run --gpus all lmsysorg/sglang:v0.5.21 python3 -m sglang.launch_server --model-path m"
    made, flags = parse_launch(line, "0.5.21")
    assert flags == ["--model-path"]
    made, flags = parse_launch("vllm serve m --speculative_config '{\"num_speculative_tokens\": 3}'", "0.33.0")
    assert (made.model, flags[0]) == ("m", "--speculative-config")
    assert [text for text in launch_notes(made, flags) if "unknown" in text] == []


@pytest.mark.parametrize("option", [("--engine-version", "banana"), ("--gpu", "H300"), ("--kv-dtype", "foo")])
def test_options_that_mean_nothing(capsys, option):
    assert main(["diagnose", "--launch", "vllm serve m", *option]) == 2
    error = capsys.readouterr().err
    assert option[0].strip("-") in error
    assert "h200-sxm" in error or option[0] != "--gpu"


@pytest.mark.parametrize(
    "line",
    [
        *("", "python train.py", "sglang serve 'open", "vllm serve m --speculative-config '{bad'"),
        *("vllm serve m --speculative-config '[1]'", "vllm serve m --speculative-config"),
    ],
)
def test_bad_launch_lines(line):
    with pytest.raises(InputError, match="launch: "):
        parse_launch(line, None)


@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_recipes_are_printed_with_the_bench_tool(name, engine):
    made = server(engine, {"sglang": "0.5.21", "vllm": "0.33.0"}[engine], attention_backend="fa3")
    made.take_args(
        {"speculative_algorithm": "EAGLE3"} if engine == "sglang" else {"speculative_config": {"method": "ngram"}}
    )
    lines = recipe(name, made, None)
    *commands, replay = [line for line in lines if not line.startswith("#")]
    assert replay.startswith("labkit replay --base-url http://127.0.0.1:")
    assert commands[1::2] == [commands[1]] * (len(commands) // 2)
    assert commands[1].startswith({"sglang": "python -m sglang.bench_serving", "vllm": "vllm bench serve"}[engine])
    assert not any(word.startswith("--") and line.split().count(word) > 1 for line in commands for word in line.split())
    assert {"all-reject": "1", "k-sweep": "8", "backend-ab": "flashinfer"}[name] in " ".join(commands).lower()


@pytest.mark.parametrize("text", [NON_DEFAULT, CONFIG, None])
@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
def test_recipes_of_vllm_are_valid_launch_lines(text, name):
    launch = None
    if text:
        reader = Reader()
        list(reader.read_text(text, "log"))
        made = reader.server
    else:
        settings = '{"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3}'
        launch = f"vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config '{settings}'"
        made, _ = parse_launch(launch, "0.33.0")
    lines = [shlex.split(line) for line in recipe(name, made, launch) if line.startswith("vllm serve")]
    for words in lines:
        assert words[2] == "meta-llama/Llama-3.1-8B-Instruct"
        assert {word for word in words if word.startswith("-")} <= known_flags("vllm")
        assert not {"torch.bfloat16", "SpeculativeConfig"} & set(words)
    found = [json.loads(words[words.index("--speculative-config") + 1]) for words in lines if "method" in str(words)]
    assert len(found) < len(lines)  # the baseline is plain
    for settings in found:
        assert settings["method"] == "eagle3"
        assert settings["model"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
        assert settings["num_speculative_tokens"] in ((1, 2, 4, 8) if name == "k-sweep" else (3,))


def test_recipe_from_a_launch_line():
    line = LAUNCH.format(3, 1, 4) + " --attention-backend fa3"
    made, _ = parse_launch(line, "0.5.21")
    lines = recipe("all-reject", made, line)
    assert lines[2] == f"SGLANG_SIMULATE_ACC_LEN=1.0 {line}"
    assert "sglang serve --model-path m --attention-backend fa3" in lines
    assert plain("llama-server -m a -md b --spec-draft-n-max 3 -c 1") == "llama-server -m a -c 1"
    assert plain("X=1 vllm serve m --speculative-config '{}' --port 1") == "X=1 vllm serve m --port 1"
    with pytest.raises(InputError, match="recipe: wanted"):
        recipe("nosuch", made, line)
    with pytest.raises(InputError, match="recipe: both servers would be the same"):
        recipe("backend-ab", server("llamacpp", None), None)


def test_recipes_take_port_and_model_of_the_launch_line():
    line = "vllm serve org/m --port 9123 --speculative-config.method ngram"
    made, _ = parse_launch(line, "0.33.0")
    text = "\n".join(recipe("all-reject", made, line))
    assert "--base-url http://127.0.0.1:9123 --model org/m" in text
    assert "http://127.0.0.1:9123 http://127.0.0.1:9124" in text
    assert ":8000" not in text


@pytest.mark.parametrize(
    ("line", "version", "wanted"),
    [
        ("vllm serve m", "0.33.0", "both servers would be the same"),
        ("sglang serve --model-path m", "0.5.21", "both servers would be the same"),
        ("trtllm-serve m --port 1", "1.2", "the YAML file"),
        ("vllm serve m --speculative-config.method ngram", "0.9.2", "unknown for this version"),
        ("sglang serve --model-path m --speculative-algorithm EAGLE", "0.5.1", "unknown for this version"),
    ],
)
def test_recipes_that_cannot_be_are_refused(line, version, wanted):
    made, _ = parse_launch(line, version)
    with pytest.raises(InputError, match=wanted):
        recipe("all-reject", made, line)


def test_recipes_of_trtllm_name_a_yaml_file_for_each_server():
    line = "trtllm-serve m --extra_llm_api_options spec.yaml"
    made, _ = parse_launch(line, "1.2")
    lines = recipe("k-sweep", made, line)
    for name in ("k1.yaml", "k8.yaml", "plain.yaml"):
        assert f"trtllm-serve m --extra_llm_api_options {name}" in lines
    assert any("k8.yaml is spec.yaml with speculative_config.max_draft_len = 8" in text for text in lines)
    assert any("spec.yaml without speculative_config is plain.yaml" in text for text in lines)


@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
def test_recipes_of_llamacpp_name_the_drafter_and_what_is_unknown_of_this_build(tmp_path, capsys, name):
    path = tmp_path / "l.log"
    line = "slot print_timing: id  0 | task 1 | draft acceptance = 0.75000 (  150 accepted /   200 generated), "
    line += "mean acceptance length =  2.50, acceptance rate per position = (0.800, 0.700)\n"
    path.write_text("build: 6700 (abc) with cc\nadding speculative implementation 'draft-mtp'\n" + line)
    assert main(["diagnose", str(path), "--recipe", name]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("# --spec-type, --spec-draft-n-max")
    assert "unknown for this version; read without a version range (ggml-org/llama.cpp server manual" in first
    assert any("--spec-type draft-mtp --spec-draft-n-max" in text for text in rest)
    own = {"all-reject": "--spec-synth-len 1", "k-sweep": "--spec-draft-n-max 8", "backend-ab": "--flash-attn off"}
    assert any(text.endswith(own[name]) for text in rest)


def test_imposed_acceptance_is_on_above_0_only():
    """SGLang and TensorRT-LLM switch it off at 0, so TensorRT-LLM cannot be told to keep no draft."""
    for value, on in (("0", False), ("0.0", False), ("-1", False), ("1", True), ("0.5", True)):
        for name, line in (
            ("SGLANG_SIMULATE_ACC_LEN", "sglang serve"),
            ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "trtllm-serve m"),
        ):
            assert parse_launch(f"{name}={value} {line}", None)[0].imposed == on
    line = "trtllm-serve m --config s.yaml"
    lines = recipe("all-reject", parse_launch(line, "1.2")[0], line)
    assert f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1 {line}" in lines
    assert any("one draft kept in every step" in text and "2 x its time" in text for text in lines)


def test_recipes_of_trtllm_compare_backends_by_their_files():
    line = "trtllm-serve m --extra_llm_api_options spec.yaml"
    lines = recipe("backend-ab", parse_launch(line, "1.2")[0], line)
    for name in ("trtllm", "flashinfer", "plain-trtllm", "plain-flashinfer"):
        assert f"trtllm-serve m --extra_llm_api_options {name}.yaml" in lines
    assert any("spec.yaml with attn_backend = FLASHINFER and no speculative_config" in text for text in lines)


def test_a_recipe_says_that_the_version_is_unknown():
    line = "sglang serve --model-path m --speculative-algorithm EAGLE"
    first = recipe("all-reject", parse_launch(line, None)[0], line)[0]
    assert first.startswith("# SGLANG_SIMULATE_ACC_LEN: the server's version is unknown (--engine-version); known for")


def test_drafts_of_the_windows_are_in_the_recipe(tmp_path, capsys):
    path = tmp_path / "v.log"
    counts = "Accepted: 360 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400"
    path.write_text(f"INFO 05-08 10:00:00 SpecDecoding metrics: Mean acceptance length: 2.80, {counts}\n")
    assert main(["diagnose", str(path), "--recipe", "all-reject", "--engine-version", "0.33.0"]) == 0
    assert '"num_speculative_tokens": 3' in capsys.readouterr().out


def test_table_of_flags_is_sound():
    with (REFERENCE / "engine_flags.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] for row in rows)
    assert {row["kind"] for row in rows} == {"role", "default", "kernel", "setting"}
    assert {row["kv_split"] for row in rows if row["kind"] == "kernel"} <= {"yes", "no", "partly"}
    for engine in ("sglang", "vllm", "llamacpp", "trtllm"):
        assert rows_of(engine, "setting", None, role="imposed_acceptance")
    assert version_key("0.5.15.post1") == (0, 5, 15)
    assert version_key(None) == ()
    assert gpu_row("NVIDIA A100-SXM4-80GB")["gpu"] == "a100-80gb-sxm"
    assert gpu_row("NVIDIA GeForce RTX 5090")["gpu"] == "rtx-5090"
    assert gpu_row("unheard of") is None
    for board in ("NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):  # other memories
        assert gpu_row(board) is None
    texts = [
        text
        for name in ("engine_flags.csv", "diagnosis_rules.csv")
        for row in read_table(name)
        for text in row.values()
    ]
    assert all(redact(text) == text for text in texts)


class Where:
    engine, engine_version, gpu, model = "vllm", "0.24.0", "NVIDIA H200", None


def test_kernels_by_version():
    assert kernel(Where, "TRITON_ATTN")["kv_split"] == "no"
    newer = type("Newer", (Where,), {"engine_version": "0.33.0"})
    assert kernel(newer, "TRITON_ATTN")["kv_split"] == "partly"
    assert kernel(Where, "NOSUCH") is None


def test_command_line(tmp_path, capsys):
    path = tmp_path / "s.log"
    path.write_text(log(ms_per_1k=20 * FLOOR))
    assert main(["diagnose", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slope_over_floor"][0] == pytest.approx(20, rel=0.05)
    assert main(["diagnose", str(path), "--recipe", "k-sweep"]) == 0
    assert "--speculative-num-draft-tokens 9" in capsys.readouterr().out
    assert main(["diagnose", "--launch", LAUNCH.format(4, 1, 24), "--engine-version", "0.5.21"]) == 1
    assert "hold 5 rows" in capsys.readouterr().out
    for arguments in (["diagnose"], ["diagnose", "no/such"], ["diagnose", "--base-url", "ftp://x"]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        info = {"version": "0.5.21", "attention_backend": "triton", "model_path": "org/Llama-3.3-70B-x"}
        info |= {"speculative_num_draft_tokens": 4, "internal_states": [{"avg_spec_accept_length": 2.8}]}
        page = json.dumps(info).encode()
        if self.path == "/metrics" and not self.server.gauge:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"sglang:spec_accept_length 2.8\n" if self.path == "/metrics" else page)

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("gauge", [True, False])
def test_a_running_server_is_asked(capsys, gauge):
    httpd = HTTPServer(("127.0.0.1", 0), Pages)
    httpd.gauge = gauge
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    assert main(["diagnose", "--base-url", f"http://127.0.0.1:{httpd.server_port}", "--json"]) == 0
    httpd.shutdown()
    found = json.loads(capsys.readouterr().out)
    assert found["engine_version"] == "0.5.21"
    assert found["roles"]["verify"]["backend"] == "triton"
    assert found["bands"][0]["mean_acceptance_length"] == pytest.approx(2.8)
    assert found["bands"][0]["num_windows"] == 1
    assert any("since the start" in text for text in found["unknown"]) == (not gauge)


def test_recipe_from_the_info_of_a_running_server(capsys):
    httpd = HTTPServer(("127.0.0.1", 0), Pages)
    httpd.gauge = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{httpd.server_port}"
    assert main(["diagnose", "--base-url", url, "--recipe", "all-reject"]) == 0
    httpd.shutdown()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "SGLANG_SIMULATE_ACC_LEN=1.0 sglang serve --model-path org/Llama-3.3-70B-x --attention-backend triton "
        "--speculative-num-draft-tokens 4"
    )
    assert "sglang serve --model-path org/Llama-3.3-70B-x --attention-backend triton" in lines
    assert lines[-1].startswith("labkit replay --base-url")


def test_stored_attention_runs_are_diagnosed(capsys):
    assert main(["diagnose", str(RUNS / "attention"), "--json"]) == 1  # unsplit kernels are in it
    found = json.loads(capsys.readouterr().out)
    assert {row["backend"]: row["diagnosis"] for row in found}["triton_nosplit"] == "no KV split"
    assert main(["diagnose", str(RUNS / "attention")]) == 1
    assert "triton_nosplit: no KV split (measured): slope" in capsys.readouterr().out
    assert main(["diagnose", str(RUNS / "loop")]) == 2


def test_tensor_parallelism_that_is_not_told_is_not_taken_for_1():
    cheap = log(ms_per_1k=0.08).partition("\n")[2]  # 1.2 reads of one GPU, 4.7 of four
    found = diagnosed(cheap, model="llama-3.3-70b")
    assert found.slope_over_floor is None
    assert "undecided" in found.cause
    assert any("of n GPUs it is n times as many" in text for text in found.unknown)
    steep = diagnosed(log(ms_per_1k=1.0).partition("\n")[2], model="llama-3.3-70b")
    assert steep.cause.startswith("verify cost")
    assert any("tensor parallelism" in text for text in steep.unknown)
    assert not any("tensor parallelism" in text for text in diagnosed(log(ms_per_1k=1.0)).unknown)


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


def test_recipes_say_that_random_tokens_tell_no_lengths():
    made, _ = parse_launch(LAUNCH.format(3, 1, 4), "0.5.21")
    assert "# random tokens" in recipe("k-sweep", made, None)[1]
    assert not [text for text in recipe("all-reject", made, None) if "# random tokens" in text]


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
