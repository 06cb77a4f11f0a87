"""benchmarks/engine_steps.py against a stand-in for vLLM with planted step times and counters."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.check import check_run
from labkit.paths import ROOT
from labkit.results import load_runs

SCRIPT = ROOT / "benchmarks" / "engine_steps.py"

FAKE_VLLM = """
import collections, time, types

__version__ = "0.0-fake"
Metric = collections.namedtuple("Metric", "name value")

class SamplingParams:
    def __init__(self, **given):
        pass

class LLM:
    def __init__(self, *, model, attention_config, speculative_config=None, max_num_seqs, **given):
        if attention_config["backend"] == "FLASHINFER":
            raise RuntimeError("no such backend here")
        self.backend, self.k = attention_config["backend"], (speculative_config or {}).get("num_speculative_tokens", 0)
        cache = types.SimpleNamespace(kv_cache_size_tokens=20000, num_gpu_blocks=0, block_size=16)
        self.vllm_config = types.SimpleNamespace(cache_config=cache)
        self.requests, self.drafts, self.waiting = {}, 0, []
        drafter = types.SimpleNamespace(propose=lambda: time.sleep(0.0002))
        runner = types.SimpleNamespace(drafter=drafter)
        self.drafter = drafter
        self.model_executor = types.SimpleNamespace(
            driver_worker=types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner)))
        self.llm_engine = self

    def apply_model(self, function):
        return [self.backend]

    def get_metrics(self):
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        values = (self.drafts, self.drafts * self.k, self.drafts * self.k)
        return [Metric(f"vllm:spec_decode_{n}", v) for n, v in zip(names, values)] + [Metric("vllm:other", 3)]

    def add_request(self, name, prompt, params):
        self.waiting.append((name, len(prompt["prompt_token_ids"])))

    def step(self):
        if self.waiting:  # prefill of one request
            name, length = self.waiting.pop(0)
            self.requests[name] = length
            return [self._output(name, 1)]
        time.sleep(0.001)
        if self.k:
            self.drafter.propose()
            self.drafts += len(self.requests)
        return [self._output(name, self.k + 1) for name in self.requests]

    def _output(self, name, count):
        return types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[0] * count)])

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self):
        return bool(self.requests)
"""


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("engine_steps", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_union_counts_overlap_once(script):
    assert script.union_us([(0, 4, "a"), (2, 6, "b"), (10, 11, "c"), (3, 5, "d")]) == 7


def test_important_cells_come_first(script):
    cells = script.points(("A", "B"), (0, 3, 7), {1: (2048,), 8: (2048,)}, "llama-3-8b")
    order = [(cell["setting"], cell["num_speculative_tokens"]) for cell in cells if cell["batch_size"] == 1]
    assert order == [("A", 0), ("A", 3), ("B", 0), ("B", 3), ("A", 7), ("B", 7)]
    assert [cell["batch_size"] for cell in cells[:2]] == [1, 8]


def test_the_counting_model_counts(script):
    """Embedding -> norm -> head of a tiny model: token t is followed by t + 1 (mod 64)."""
    torch = pytest.importorskip("torch")
    weight = lambda rows: torch.nn.Parameter(torch.empty(rows, 256).uniform_(-1e-3, 1e-3))  # noqa: E731
    model = torch.nn.Module()
    model.model, model.lm_head, model.attention = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    model.model.embed_tokens, model.model.norm = torch.nn.Module(), torch.nn.Module()
    model.model.embed_tokens.weight, model.lm_head.weight = weight(100), weight(100)
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(256))
    model.attention.attn_backend = type("Backend", (), {"get_name": staticmethod(lambda: "FAKE")})
    assert script.count_upwards(model) == "FAKE"
    hidden = model.model.embed_tokens.weight[:64].detach()
    normed = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt() * model.model.norm.weight
    assert (normed @ model.lm_head.weight.T).argmax(-1).tolist() == [*range(1, 64), 0]


def test_cells_become_rows(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (tmp_path / "vllm" / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    out = tmp_path / "runs"
    options = ["--backends=FLASH_ATTN,FLASHINFER", "--k=0,3", "--cells=1:2048,1:16384,8:2048,8:16384", "--budget=5m"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--out", str(out)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert check_run(out) == []
    rows = load_runs("replay", out)
    ok = rows[rows["status"] == "ok"]
    # 20,000 tokens of cache hold one request of 16K, not eight.
    assert set(zip(ok["endpoint"], ok["batch_size"], ok["context_len"], strict=True)) == {
        ("vllm FLASH_ATTN", 1, 2048), ("vllm FLASH_ATTN", 1, 16384), ("vllm FLASH_ATTN", 8, 2048),
    }  # fmt: skip
    full = rows[rows["status"] == "unsupported"]
    assert len(full) == 2
    assert full["reason"].str.contains("holds 20000 tokens, wanted 8 x 16384").all()
    broken = rows[rows["status"] == "error"]
    assert len(broken) == 8
    assert broken["reason"].str.contains("no such backend here|did not start").all()
    verify = ok[ok["num_speculative_tokens"] == 3]
    assert (verify["num_accepted_tokens"] == 3 * verify["num_drafted_steps"]).all()
    assert (verify["num_drafted_steps"] == verify["num_verify_steps"]).all()
    assert (verify["num_output_tokens"] == 4 * verify["num_verify_steps"]).all()
    assert (verify["verify_backend"] == "FLASH_ATTN").all()
    assert (verify["origin"] == "forced").all()
    plain = ok[ok["num_speculative_tokens"] == 0]
    assert plain["num_verify_steps"].isna().all()
    assert (plain["origin"] == "measured").all()
    assert all(len(times) == 16 for times in ok["step_times_ms"])
    assert min(map(min, ok["step_times_ms"])) >= 1.0
    assert (verify["draft_ms"] >= 0.2).all()
