"""Traces: planted phases, kernels and gaps; one recorded from labkit's own loop on the CPU; cut and hostile files."""

import gzip
import json

import pyarrow.parquet as pq
import pytest

from labkit.cli import main
from labkit.engines.trace import is_trace
from labkit.engines.trace import read_steps as steps_of
from labkit.errors import InputError


def read_steps(path):
    rows, notes = steps_of(path)
    return list(rows), notes


def kernel(name, begin, length, grid=(8, 1, 1), kind="kernel"):
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "args": {"grid": list(grid), "stream": 7}}


def span(name, begin, length, kind="gpu_user_annotation"):
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length}


def vllm_step(begin):
    """forward 1000 us of which 400 attention on two streams, sample 100, draft 300, then 200 us of nothing."""
    return [
        span("gpu_model_runner: forward", begin, 1000),
        kernel("gemm", begin, 600),
        kernel("kernel_unified_attention_2d", begin + 600, 400, (24, 4, 1)),
        kernel("copy", begin + 700, 100, kind="gpu_memcpy"),
        span("gpu_model_runner: sample", begin + 1000, 100),
        kernel("rejection_greedy_sample_kernel", begin + 1000, 100),
        span("gpu_model_runner: draft", begin + 1100, 300),
        kernel("gemm", begin + 1100, 200),
        kernel("flash_fwd_splitkv_kernel", begin + 1300, 100),
    ]


def sglang_step(begin):
    return [
        kernel("gemm", begin, 300),
        kernel("build_tree_efficient", begin + 300, 50),
        kernel("_fwd_kernel", begin + 400, 500, (1, 24, 1)),
        kernel("gemm", begin + 900, 200),
        kernel("VerifyTreeGreedy", begin + 1200, 50),
    ]


def write(path, events, pretty=False):
    text = json.dumps(
        {"schemaVersion": 1, "deviceProperties": [{}], "traceEvents": events}, indent=1 if pretty else None
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_phases_from_ranges(tmp_path, name):
    events = [{"ph": "M", "name": "process_name"}, *(e for i in range(4) for e in vllm_step(1600 * i))]
    path = write(tmp_path / name, events[::-1], pretty=name == "t.json")
    assert is_trace(path)
    rows, notes = read_steps(path)
    assert notes == []
    assert [row["phase"] for row in rows] == ["verify", "accept", "draft"] * 3
    verify, accept, draft = rows[:3]
    assert verify["forward_ms"] == pytest.approx(1.0)  # the copy overlaps the attention and counts once
    assert verify["attention_ms"] == pytest.approx(0.4)
    assert draft["forward_ms"] == pytest.approx(0.3)
    assert draft["attention_ms"] == pytest.approx(0.1)
    assert accept["forward_ms"] == pytest.approx(0.1)
    assert verify["gap_ms"] == pytest.approx(0.2)
    assert verify["step_ms"] == pytest.approx(1.6)
    assert {"name": "kernel_unified_attention_2d", "grid": "[24, 4, 1]", "count": 1, "ms": 0.4} in verify["kernels"]
    assert {row["origin"] for row in rows} == {"imported"}


def test_phases_from_marking_kernels(tmp_path):
    path = write(tmp_path / "t.json", [e for i in range(5) for e in sglang_step(1500 * i)])
    rows, notes = read_steps(path)
    assert "draft_extend cannot be told from draft" in notes[0]
    assert [row["step_index"] for row in rows] == [0] * 3 + [1] * 3 + [2] * 3  # of five, the first and last are cut
    assert {round(row["step_ms"], 6) for row in rows} == {1.5}
    step = {row["phase"]: row for row in rows if row["step_index"] == 0}
    assert set(step) == {"draft", "verify", "accept"}
    assert step["verify"]["forward_ms"] == pytest.approx(0.7)
    assert step["verify"]["attention_ms"] == pytest.approx(0.5)
    assert step["draft"]["forward_ms"] == pytest.approx(0.35)
    assert step["verify"]["gap_ms"] == pytest.approx(1.5 - 1.1)


def test_plain_steps_are_decode(tmp_path):
    events = [e for i in range(3) for e in vllm_step(1600 * i) if "draft" not in e["name"]]
    rows, _ = read_steps(write(tmp_path / "t.json", events))
    assert {row["phase"] for row in rows} == {"decode", "accept"}


class Annotated:
    """The loop's clock, putting each part under the range that vLLM uses for it."""

    def __init__(self, record_function):
        self.record_function, self.range = record_function, None

    def start_step(self):
        self.begin("gpu_model_runner: draft")

    def lap(self, part):
        self.range.__exit__(None, None, None)
        following = {"draft": "gpu_model_runner: forward", "verify": "gpu_model_runner: sample"}
        if part in following:
            self.begin(following[part])

    def begin(self, name):
        self.range = self.record_function(name)
        self.range.__enter__()

    def end_step(self):
        return {}


class Marked:
    """The loop's clock, with SGLang's marking kernels at the end of drafting and at acceptance."""

    def __init__(self, record_function):
        self.record_function = record_function

    def start_step(self):
        pass

    def lap(self, part):
        if part in (marks := {"draft": "build_tree_efficient", "verify": "VerifyTreeGreedy"}):
            with self.record_function(marks[part]):
                pass

    def end_step(self):
        return {}


def recorded(path, clock):
    """The steps of the loop on the CPU, with real attention in them, and their trace as the profiler writes it."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    from labkit.speculation import speculate
    from tests.toys import OracleDrafter, ToyTarget

    class Target(ToyTarget):
        def verify(self, requests, draft):
            heads = torch.randn(1, 4, 16, 32)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return super().verify(requests, draft)

    target = Target()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        options = {"num_speculative_tokens": 2, "max_new_tokens": 9, "clock": clock(record_function)}
        (done,) = speculate(target, OracleDrafter(target, (True, False)), [[1, 2]], **options)
    profiler.export_chrome_trace(str(path))
    return len(done.steps)


def test_recorded_from_our_own_loop_under_the_ranges_of_vllm(tmp_path):
    path = tmp_path / "loop.json"
    num_steps = recorded(path, Annotated)
    rows, _ = read_steps(path)
    assert [row["phase"] for row in rows] == ["draft", "verify", "accept"] * (num_steps - 1)
    for row in rows:
        assert 0 < row["forward_ms"] < row["step_ms"]
        assert (row["attention_ms"] > 0) == (row["phase"] == "verify")
        assert row["attention_ms"] <= row["forward_ms"]
    assert all(row["gap_ms"] > 0 for row in rows)


def test_recorded_from_our_own_loop_under_the_kernel_names_of_sglang(tmp_path):
    path = tmp_path / "loop.json"
    num_steps = recorded(path, Marked)
    content = json.loads(path.read_text())
    attention = "aten::scaled_dot_product_attention"
    for event in content["traceEvents"]:  # operators of the CPU as a device would run them
        if event.get("cat") in ("cpu_op", "user_annotation") and not event["name"].startswith("Profiler"):
            event["cat"] = "kernel"
            event["name"] = "_fwd_kernel" if event["name"] == attention else event["name"].replace("aten::", "")
    path.write_text(json.dumps(content, indent=1))
    rows, notes = read_steps(path)
    assert "draft_extend cannot be told from draft" in notes[0]
    assert {row["step_index"] for row in rows} == set(range(num_steps - 2))  # the first and the last are cut
    for row in rows:
        assert (row["attention_ms"] > 0) == (row["phase"] == "verify")
        assert row["step_ms"] > row["gap_ms"] > 0
    assert main(["diagnose", str(path), "--json"]) == 0


def test_cut_trace_gives_the_steps_before(tmp_path):
    path = write(tmp_path / "t.json", [e for i in range(50) for e in vllm_step(1600 * i)])
    path.write_text(path.read_text()[:-2000])
    rows, notes = read_steps(path)
    assert len(rows) > 100
    assert "cut off" in notes[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"traceEvents": []}', "two steps"),
        ('{"traceEvents": {"a": 1}}', "no traceEvents"),
        ('{"traceEvents": [' + '{"a":' * 300_000, "more than 1 MiB"),
        ('{"traceEvents": [{"ph": "X", "name": 3}, 7, null]}', "two steps"),
    ],
)
def test_hostile_traces(tmp_path, text, wanted):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match=wanted):
        read_steps(path)
    assert main(["import", str(path)]) == 2


def test_command_line(tmp_path, capsys):
    path = write(tmp_path / "t.json.gz", [e for i in range(3) for e in vllm_step(1600 * i)])
    assert main(["import", str(path), "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    stored = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert [row | {"kernels": json.loads(row["kernels"])} for row in stored] == rows
    assert len(rows) == 6
    assert main(["import", str(path)]) == 0
    assert "step 0 verify: 1.000 ms, attention 0.400" in capsys.readouterr().out


def test_diagnosis_of_a_trace(tmp_path, capsys):
    path = write(tmp_path / "t.json.gz", [e for i in range(5) for e in sglang_step(1500 * i)])
    options = ["--engine-version", "0.5.21", "--gpu", "h200-sxm", "--model", "llama-3.1-8b"]
    assert main(["diagnose", str(path), *options]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "sglang, 0.5.21",
        "3 steps, medians: step 1.500 ms, gap 0.400 ms",
        "verify: 0.700 ms, attention 71%",
        "0.500 ms  _fwd_kernel  grid [1, 24, 1]",
        "verify: triton, by its kernels",
        "likely cause: verify cost: attention takes 71% of the verify pass; triton verifies without a KV split",
        "next step: --attention-backend flashinfer",
        "x one read of 16-bit weights",
    ):
        assert wanted in text
    path = write(tmp_path / "v.json", [e for i in range(4) for e in vllm_step(2500 * i)])
    assert main(["diagnose", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "vllm"
    assert found["cause"].startswith("launch overhead: no kernel runs in 44%")


def test_a_kernel_that_splits_is_not_told_to(tmp_path, capsys):
    text = json.dumps([e for i in range(5) for e in sglang_step(1500 * i)]).replace("_fwd_kernel", "flash_fwd_splitkv")
    path = write(tmp_path / "t.json", [{**event, "args": {}} for event in json.loads(text)])
    assert main(["diagnose", str(path)]) == 0
    text = capsys.readouterr().out
    assert "likely cause: verify cost" in text
    assert "flash_fwd_splitkv is a kernel with a KV split" in text
    assert "set a verify backend" not in text
    assert "kernel unknown" not in text
    assert "None" not in text
