"""What a diagnosis of planted logs concludes: acceptance or verify cost, its size, its flag."""

import re

import pytest

from labkit.engines.diagnose import diagnose
from labkit.engines.record import Record
from labkit.engines.report import render
from labkit.engines.server import Server
from labkit.errors import InputError
from tests.engine_logs import FLOOR, diagnosed, log


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


def test_iterations_without_a_request_give_no_step_time():
    """TensorRT-LLM prints its statistics of idle iterations too."""
    records = [
        Record("trtllm", "iteration statistics", "window", "", mean_acceptance_length=2.5, step_ms=ms, batch_size=batch)
        for ms, batch in [(0.1, 0.0)] * 20 + [(25.0, 4.0)] * 20
    ]
    found = diagnose(iter(records), Server(engine="trtllm"))
    assert (found.batch_size, [band["step_ms"] for band in found.bands]) == (None, [None])
    assert "at batch" not in render(found)
    for record in records:
        record.context_len = 4096.0
    found = diagnose(iter(records), Server(engine="trtllm"))
    assert (found.batch_size, [band["step_ms"] for band in found.bands]) == (4.0, [25.0])


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


def test_a_log_without_contexts_is_told_what_it_lacks():
    counts = "Accepted: 360 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400"
    line = f"INFO 05-08 10:00:00 SpecDecoding metrics: Mean acceptance length: 2.80, {counts}\n"
    assert "GPU KV cache size" in diagnosed(9 * line).next_step
    iteration = '{"iterLatencyMS": 20.0, "specDecodingStats": {"numDraftTokens": 3, "acceptanceLength": 2.5}}\n'
    assert diagnosed(9 * iteration).next_step.startswith("labkit replay at several contexts")


def test_tensor_parallel_servers_read_their_share():
    text = log(ms_per_1k=20 * FLOOR).replace("version=", "tp_size=4, version=")
    assert diagnosed(text).slope_over_floor[0] == pytest.approx(80, rel=0.05)


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
