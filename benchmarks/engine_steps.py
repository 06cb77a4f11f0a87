"""Step times inside vLLM: plain decode and n-gram verify, by attention backend, k, context and batch.

    PYTHONPATH=<vllm tree>:<this repository> python benchmarks/engine_steps.py --budget 20m --out data/runs

An offline host with one GPU is enough: the weights are random (``load_format="dummy"``), the prompts are token ids.
After loading, the embedding, the last norm and the output head are set so that token t is followed by t + 1 (mod 64).
The prompt counts in the same way, so the model goes on as the prompt did, the n-gram drafter is right every time, and
every verify step has k drafts at any context length. Requests of a batch start at different tokens: no block of the
cache is shared. The other weights are as vLLM made them, so a step does the work of the shape.

One worker process per (backend, k) holds the engine; one run holds all cells, important ones first. Stored per window:
the wall time of its timed engine steps, tokens and drafts of all its steps by the engine's own counters, the drafter's
host time; and per cell the device-busy time per step of a short profiled window. Rows are those of ``labkit replay``
(record "steps").
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from labkit.axes import parse_size
from labkit.device_state import monitor
from labkit.errors import InputError, Unsupported
from labkit.executor import WorkerProcess
from labkit.experiments.launch import parse_duration
from labkit.paths import RUNS
from labkit.progress import say
from labkit.results import file_digest
from labkit.shapes import ModelShape, model_shape
from labkit.sweep import Point, run_sweep

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
CELLS: Mapping[int, Sequence[int]] = dict.fromkeys((1, 8), (2048, 16384, 65536, 131072))  # contexts by batch size
CYCLE = 64  # tokens that the model counts through
NUM_WINDOWS, NUM_TIMED, NUM_SETTLE, NUM_PROFILED = 6, 16, 3, 6
MAX_CONTEXT = 131072 + 2048
START_S = 600.0  # first start of a backend on a bare host: compiling
ATTENTION_KERNEL = re.compile(r"flash|attention|attn|fmha|reduce_segments|mha_|batch(prefill|decode)|merge", re.I)
NOT_ATTENTION = re.compile(r"reshape_and_cache|rotary|prepare_varlen", re.I)
# What all rows have in common, and all engines.
ROW = {"engine": "vllm", "scene": "engine_steps", "stage": "measured", "record": "steps"}
ROW |= {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
ENGINE = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": MAX_CONTEXT}
ENGINE |= {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.94, "enable_prefix_caching": True}
ENGINE |= {"disable_log_stats": False}
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16"}
MODEL |= {"max_position_embeddings": 2 * MAX_CONTEXT, "tie_word_embeddings": False, "attention_bias": False}
MODEL |= {"bos_token_id": 0, "eos_token_id": 1}


def points(
    backends: Sequence[str], ks: Sequence[int], contexts: Mapping[int, Sequence[int]], model: str
) -> list[Point]:
    """Cells in order of importance: small k of each backend first. contexts : tokens, per batch size."""
    pairs = [(backend, k) for backend in backends for k in ks]
    cells = []
    for backend, k in sorted(pairs, key=lambda pair: pair[1] > 3):
        arm = {"arm": "speculative", "drafter": "ngram"} if k else {"arm": "plain", "drafter": None}
        own = {"endpoint": f"vllm {backend}", "setting": backend, "target": model, "num_speculative_tokens": k}
        for batch, context in ((batch, context) for batch, lens in contexts.items() for context in lens):
            sizes = {"concurrency": batch, "batch_size": batch, "context_len": float(context)}
            cells.append({**ROW, **own, **arm, **sizes})
    return cells


def write_config(folder: Path, shape: ModelShape) -> None:
    """A folder with config.json only: what vLLM needs for random weights."""
    alike = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")
    config = MODEL | {name: getattr(shape, name) for name in alike}
    config |= {"num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_qo_heads}
    config |= {"num_key_value_heads": shape.num_kv_heads}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


class Engine:
    """vLLM in this process, with the counting model in it."""

    def __init__(self, backend: str, k: int, shape: ModelShape, max_batch: int):
        from vllm import LLM, __version__

        self.key, self.k, self.version = (backend, k), k, __version__
        folder = Path(tempfile.gettempdir()) / f"labkit-{shape.name}"
        write_config(folder, shape)
        settings: dict[str, Any] = {"max_num_seqs": max_batch, "attention_config": {"backend": backend}}
        sizes = sorted({1, 2, 4, 8, 16, k + 1, max_batch * (k + 1)})
        settings |= {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        if k:
            drafting = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
            settings |= {"speculative_config": drafting}
        self.llm = LLM(model=str(folder), **ENGINE, **settings)
        self.core = self.llm.llm_engine
        self.attention = self.llm.apply_model(count_upwards)[0]
        self.draft_s: list[float] = []
        if k:
            self._time_drafter()
        self.num_requests = 0

    def _time_drafter(self) -> None:
        """Keep the host time of every proposal of the n-gram drafter."""
        drafter = self.core.model_executor.driver_worker.worker.model_runner.drafter
        propose = drafter.propose

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            drafts = propose(*args, **kwargs)
            self.draft_s.append(time.perf_counter() - begin)
            return drafts

        drafter.propose = timed

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        cache = self.core.vllm_config.cache_config
        return cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size

    def counters(self) -> dict[str, int]:
        """Speculative counters since the start, in labkit's words."""
        own = {"num_drafts": "num_drafted_steps", "num_draft_tokens": "num_drafted_tokens"}
        own |= {"num_accepted_tokens": "num_accepted_tokens"}
        counters = (metric for metric in self.llm.get_metrics() if hasattr(metric, "value"))  # others hold a vector
        found = {metric.name.removeprefix("vllm:spec_decode_"): metric.value for metric in counters}
        return {name: found.get(theirs, 0) for theirs, name in own.items()}

    def start(self, batch_size: int, prompt_len: int) -> list[str]:
        """Add the requests of a batch, each counting from another token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4096, "ignore_eos": True, "detokenize": False}
        names = [f"cell-{self.num_requests + 1 + index}" for index in range(batch_size)]
        self.num_requests += batch_size
        for index, name in enumerate(names):
            tokens = [(index * CYCLE // 8 + offset) % CYCLE for offset in range(prompt_len)]
            params = SamplingParams(**asked, output_kind=RequestOutputKind.DELTA)
            self.core.add_request(name, {"prompt_token_ids": tokens}, params)
        return names

    def steps(self) -> Iterator[tuple[float, dict[str, list[int]]]]:
        """Engine steps one after the other: wall time since the one before, s, and the new tokens of each request."""
        before = time.perf_counter()
        while True:
            outputs = self.core.step()
            if outputs:  # an asynchronous engine's first call only fills its queue
                now = time.perf_counter()
                yield now - before, {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
                before = time.perf_counter()

    def stop(self, names: list[str]) -> None:
        """End the requests; their blocks stay in the prefix cache."""
        self.core.abort_request(names)
        while self.core.has_unfinished_requests():
            self.core.step()


def count_upwards(model: Any) -> str:
    """Make token t be followed by t + 1 (mod `CYCLE`) in place; the name of the attention backend in use."""
    import torch

    embedding, head, norm = model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight
    codes = torch.randint(0, 2, (CYCLE, embedding.shape[1]), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    codes = codes.to(embedding)
    with torch.inference_mode():  # also writes to weights that were made in it
        embedding[:CYCLE] = codes
        head[:CYCLE] = codes.roll(1, dims=0)
        norm.fill_(1.0)
    return next(m.attn_backend.get_name() for m in model.modules() if hasattr(m, "attn_backend"))


def measure(point: Point) -> dict[str, Any]:
    """One cell, in the worker process; the engine stays for the next cell of the same backend and k."""
    shape, batch_size, context_len = model_shape(point["target"]), point["batch_size"], int(point["context_len"])
    engine = _engine(point["setting"], point["num_speculative_tokens"], shape, point["max_batch"])
    num_tokens = (NUM_WINDOWS * (NUM_TIMED + NUM_SETTLE) + 4) * (engine.k + 1)
    prompt_len = context_len - num_tokens // 2  # half of the steps lie before context_len, half after
    if batch_size * (prompt_len + num_tokens) > engine.kv_tokens:
        raise Unsupported(f"the KV cache holds {engine.kv_tokens} tokens, wanted {batch_size} x {context_len}")
    names = engine.start(batch_size, prompt_len)
    try:
        steps = engine.steps()
        waiting = set(names)
        while waiting:  # prefill, in chunks, request after request
            waiting -= set(next(steps)[1])
        for _ in range(4):
            next(steps)
        samples = [_window(engine, steps, batch_size, index) for index in range(NUM_WINDOWS)]
        busy = _profiled(steps)
    finally:
        engine.stop(names)
    fields = {"engine_version": engine.version, "launch": f"pid {os.getpid()}", **busy}
    fields |= {"origin": "forced" if engine.k else "measured"}
    roles = (None, engine.attention) if engine.k else (engine.attention, None)
    return {"samples": samples, **fields, **dict(zip(("decode_backend", "verify_backend"), roles, strict=True))}


_ENGINES: list[Engine] = []


def _engine(backend: str, k: int, shape: ModelShape, max_batch: int) -> Engine:
    if not _ENGINES:
        _ENGINES.append(Engine(backend, k, shape, max_batch))
    if _ENGINES[0].key != (backend, k):
        raise RuntimeError(f"this process holds the engine of {_ENGINES[0].key}, asked for {(backend, k)}")
    return _ENGINES[0]


def _window(engine: Engine, steps: Iterator[tuple[float, Any]], batch_size: int, index: int) -> dict[str, Any]:
    """Steps between two reads of the counters; the first few, which the reading disturbs, are counted but not timed."""
    state, before = monitor("cuda")(), engine.counters()
    engine.draft_s.clear()
    done = [next(steps) for _ in range(NUM_SETTLE + NUM_TIMED)]
    counts = {name: value - before[name] for name, value in engine.counters().items()} if engine.k else {}
    if engine.k:
        counts["num_verify_steps"] = batch_size * len(done)
    times_ms = [1e3 * seconds for seconds, _ in done[NUM_SETTLE:]]
    times = {"num_steps": NUM_TIMED, "step_times_ms": times_ms, "duration_ms": sum(times_ms)}
    times |= {"draft_ms": 1e3 * fmean(engine.draft_s) if engine.draft_s else None}
    num_tokens = sum(len(tokens) for _, new in done for tokens in new.values())
    device = {"sm_clock_mhz": state.sm_clock_mhz, "power_w": state.power_w, "quality": state.throttled or "ok"}
    return {"round": index, **times, "num_output_tokens": num_tokens, **counts, **device}


def _profiled(steps: Iterator[tuple[float, Any]]) -> dict[str, Any]:
    """Device-busy time per step: the union of the kernels' intervals, and attention's part, by kernel names."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_PROFILED):
            next(steps)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in kinds]
    if not kernels:
        return {}
    attention = [k for k in kernels if ATTENTION_KERNEL.search(k[2]) and not NOT_ATTENTION.search(k[2])]
    names = sorted({re.split(r"[<(]", name.removeprefix("void "))[0][-60:] for _, _, name in attention})
    busy_ms, attention_ms = (union_us(part) / 1e3 / NUM_PROFILED for part in (kernels, attention))
    resolved = "; ".join(names) or None
    return {"device_busy_ms": busy_ms, "attention_busy_ms": attention_ms, "resolved_kernel": resolved}


def union_us(intervals: list[tuple[float, float, str]]) -> float:
    """Length of the union of intervals; kernels that overlap count once."""
    total, end = 0.0, float("-inf")
    for start, stop, _ in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


class Workers:
    """One worker process at a time, of the (backend, k) asked for last: GPU memory is free again when it ends."""

    def __init__(self, max_batch: int):
        self.key: tuple[str, int] | None = None
        self.max_batch = max_batch
        self.process = WorkerProcess("engine_steps:measure")
        self.failed: set[tuple[str, int]] = set()

    def measure(self, point: Point) -> dict[str, Any]:
        """One cell; raises what the worker reports. An engine that did not start is not started again."""
        key = (point["setting"], point["num_speculative_tokens"])
        if key in self.failed:
            raise RuntimeError(f"the engine of {key} did not start")
        started = key == self.key
        if not started:
            self.process.close()
            if self.key is not None:
                time.sleep(3)  # until the driver has taken the memory back
            self.key = key
            say(f"engine_steps: starting vLLM with {key[0]}, k = {key[1]}")
        self.process.prepare()
        asked = {**point, "max_batch": self.max_batch}
        outcome = self.process.call("engine_steps:measure", asked, 300.0 if started else 300.0 + START_S)
        if outcome["status"] == "ok":
            return {"samples": outcome["samples"], **outcome["fields"]}
        say(f"engine_steps: {outcome['status']}: {outcome['reason']}\n{outcome.get('detail', '')[-1500:]}")
        if not started and outcome["status"] not in ("unsupported", "oom"):
            self.failed.add(key)
        errors = {"unsupported": Unsupported, "oom": MemoryError}
        raise errors.get(outcome["status"], RuntimeError)(f"{outcome['status']}: {outcome['reason']}")


def cells_of(text: str) -> dict[int, list[int]]:
    """Contexts by batch size, from ``batch:context,...``. Raises InputError."""
    found: dict[int, list[int]] = {}
    for part in text.split(","):
        sizes = [parse_size(size) for size in part.split(":")]
        if len(sizes) != 2 or 0 in sizes:
            raise InputError(f"--cells: wanted BATCH:CONTEXT,..., got {part!r}")
        found.setdefault(sizes[0], []).append(sizes[1])
    return found


def main() -> None:
    """Measure the cells that fit into the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="a shape of data/reference/model_shapes.csv")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--k", default="0,3,7")
    parser.add_argument("--cells", metavar="B:C,...", help="batch:context (default: 1 and 8, each at 2048 to 131072)")
    parser.add_argument("--budget", default="20m")
    parser.add_argument("--out", type=Path, default=RUNS)
    parser.add_argument("--dry-run", action="store_true", help="print the cells")
    given = parser.parse_args()
    by_batch = cells_of(given.cells) if given.cells else CELLS
    ks = [parse_size(k) for k in given.k.split(",")]
    cells = points(given.backends.split(","), ks, by_batch, model_shape(given.model).name)
    if given.dry_run:
        for cell in cells:
            print(cell["setting"], f"k={cell['num_speculative_tokens']}", cell["batch_size"], int(cell["context_len"]))
        print(f"{len(cells)} cells, {len({(c['setting'], c['num_speculative_tokens']) for c in cells})} engine starts")
        return
    for name, value in (("ENABLE_V1_MULTIPROCESSING", "0"), ("NO_USAGE_STATS", "1"), ("LOGGING_LEVEL", "INFO")):
        os.environ.setdefault(f"VLLM_{name}", value)
    workers = Workers(max(by_batch))
    options: dict[str, Any] = {"experiment": "replay", "out_dir": given.out, "device": "cuda"}
    options |= {"executor": "in-process", "budget_s": parse_duration(given.budget, "--budget")}
    try:
        result = run_sweep(cells, workers.measure, backend_digest=file_digest(Path(__file__))[:12], **options)
    finally:
        workers.process.close()
    print(result.path, result.counts, f"{result.num_left} cells left")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"engine_steps: {error}")
