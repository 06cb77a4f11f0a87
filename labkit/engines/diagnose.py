"""Is it acceptance or verify cost, and which flag to change: from one log, without GPU, restart or metrics.

Decode windows are grouped by context. Length by band tells acceptance; a line through step time over cached tokens
tells cost: its slope against one read of the KV cache at the GPU's peak. Intervals resample windows.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import generator, percentile_interval, resampled_weights, student_spread
from labkit.engines.recipes import backend_flag
from labkit.engines.record import Record, counted
from labkit.engines.roles import ROLES, Role, gpu_row, kernel, resolve_roles, rows_of, speculative_tokens
from labkit.engines.server import Server
from labkit.engines.step_times import MIN_WINDOWS, Interval, against_plain, steady, step_plane
from labkit.engines.tables import read_table
from labkit.engines.trace import summarise
from labkit.engines.windows import grouped, judged
from labkit.errors import InputError
from labkit.shapes import ModelShape, model_shape, model_shapes

MAX_WINDOWS, MIN_BAND, RESAMPLES = 5000, 3, 1000
STEEP, NEAR_FLOOR, BROKEN, FALLING, GROWS, FASTEST, SLACK, IDLE = 3.0, 2.0, 1.1, 0.05, 1.25, 0.95, 0.011, 0.3


@dataclass
class Diagnosis:
    """What `diagnose` found; lengths in tokens per step, intervals as (value, low, high), unknown is None.

    batch_size: the most frequent one, which step times, slope and intercept are of (all_batches: with a term for each
    other request).
    bands: context_len_low, context_len_high, num_windows, mean_acceptance_length, low, high, step_ms.
    slope_ms_per_1k: growth of the step with 1,024 cached tokens of all requests together; slope_over_floor: that over
    one read of their keys and values, all layers, at the peak bandwidth of the GPUs. trace: medians over its steps,
    baseline: cells of `against_plain`, where the log has plain windows too.
    other_over_weights: the verify pass without attention over one read of 16-bit weights on one GPU.
    """

    engine: str = ""
    engine_version: str | None = None
    model: str | None = None
    gpu: str | None = None
    bands: list[dict[str, Any]] = field(default_factory=list)
    acceptance: str = "unknown"
    batch_size: float | None = None
    slope_ms_per_1k: Interval | None = None
    intercept_ms: Interval | None = None
    all_batches: bool = False
    slope_over_floor: Interval | None = None
    baseline: list[dict[str, Any]] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    cause: str = ""
    next_step: str = ""
    unknown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    trace: dict[str, Any] | None = None


def diagnose(
    records: Iterable[Record],
    server: Server,
    *,
    gpu: str | None = None,
    model: str | None = None,
    kv_dtype: str | None = None,
) -> Diagnosis:
    """Diagnose the decode windows of one server. gpu, model, kv_dtype: where the log does not tell them.

    Raises InputError: a model that is not in ``model_shapes.csv``.
    """
    about = judged(grouped(records, server, MAX_WINDOWS), server)
    group, is_plain, kept, count = about.group, about.is_plain, about.group.kept, about.group.count
    found = Diagnosis(server.engine, server.version, model or server.model, gpu or server.gpu)
    used = ("decode", "prefill") if is_plain else ROLES
    found.roles = {name: role for name, role in resolve_roles(server, found.gpu).items() if name in used}
    found.warnings = about.notes + counted(group.warnings, 10)
    if group.total and not kept:
        kept, count = group.total, 1
        found.unknown.append("windows: there is one value only, since the start of the server")
    if count > len(kept):
        found.warnings.append(f"{count - len(kept)} of {count} windows were left out, at random")
    windows, plain = _frame(kept), _frame(about.plain)
    sizes = Counter(record.num_speculative_tokens for record in kept if record.num_speculative_tokens)
    k = speculative_tokens(server) or (sizes.most_common(1)[0][0] if sizes else None)
    shape = _shape(found, given=bool(model))
    if not windows.empty:
        timed = steady(windows)
        found.batch_size = None if timed.empty else float(timed["batch_size"].mode()[0])
        _acceptance(found, windows, None if is_plain else k or math.inf)
        num_gpus = server.number("tp_size", "tensor_parallel_size", "tp")
        num_gpus = num_gpus or (1 if server.changes or server.engine == "llamacpp" else None)
        _cost(found, timed, shape, kv_dtype or server.args.get("kv_cache_dtype", ""), num_gpus)
        found.baseline = against_plain(windows, plain)
    if len(plain) and not found.baseline:
        text = f"none has {MIN_BAND} steady ones of a batch and octave of context that drafted windows have too"
        found.unknown.append(f"what a step costs in plain ones: {len(plain)} plain windows, {text}")
    _judge(found, windows, k, is_plain)
    return found


def _frame(records: list[Record]) -> pd.DataFrame:
    names = ["mean_acceptance_length", "context_len", "batch_size", "step_ms", "output_tokens_per_s"]
    names += ["cuda_graph", "prefill_mixed"]
    windows = pd.DataFrame([[getattr(r, name) for name in names] for r in records], columns=names)
    # Windows of SGLang hold equal numbers of steps, so a request weighs as much as another.
    return windows.assign(weight=[float(record.steps or record.batch_size or 1) for record in records])


def diagnose_trace(
    rows: list[dict[str, Any]], *, gpu: str | None = None, model: str | None = None, version: str | None = None
) -> Diagnosis:
    """Diagnose the steps that `read_steps` found in a trace.

    Raises InputError: a model that is not in ``model_shapes.csv``.
    """
    seen = summarise(rows)
    if not seen["step_ms"] > 0:
        raise InputError(f"trace: wanted steps that take time, got a median of {seen['step_ms']:g} ms")
    found, phases = Diagnosis(seen["engine"], version, model, gpu, trace=seen), seen["phases"]
    shape, peak = _shape(found, given=bool(model)), gpu_row(gpu)
    for phase, entry in phases.items():
        name = entry["backend"] and (entry["backend"].upper() if found.engine == "vllm" else entry["backend"])
        if entry["attention_ms"]:
            how = "by its kernels" if name else "its kernels do not tell one backend"
            found.roles[phase] = Role(name or "unknown", how)
    verify = phases.get("verify", {"forward_ms": 0.0, "attention_ms": 0.0})
    draft = sum(entry["forward_ms"] for phase, entry in phases.items() if phase.startswith("draft"))
    attention = verify["attention_ms"] / verify["forward_ms"] if verify["forward_ms"] else 0.0
    gap = seen["gap_ms"] / seen["step_ms"]
    holds = {"no_speculation": "verify" not in phases, "trace_gap": gap > IDLE, "trace_attention": attention > 0.5}
    holds |= {"trace_draft": draft > verify["forward_ms"], "trace_other": True}
    _conclude(found, holds, {"gap": gap, "attention": attention, "draft": draft, "verify": verify["forward_ms"]})
    if shape and peak:
        floor = shape.weight_bytes_read("bfloat16") / float(peak["memory_gb_per_s"]) / 1e6
        seen["other_over_weights"] = (verify["forward_ms"] - verify["attention_ms"]) / floor
    found.unknown.append("floor of the attention: contexts are not in a trace; a log of the server gives the slope")
    return found


def _shape(found: Diagnosis, given: bool) -> ModelShape | None:
    """The shape that the model's name has in it. Names of few letters ("tiny") are parts of other names."""
    shapes = {row["name"]: row["shape"] for row in read_table("engine_models.csv")} | {n: n for n in model_shapes()}
    close = [name for name in shapes if len(name) > 4 and _plain(name) in _plain(found.model or "")]
    name = shapes[max(close, key=len)] if close else found.model if given else None
    shape = model_shape(name) if name else None
    found.model = f"{found.model} (shape {shape.name})" if shape else found.model
    return shape


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _acceptance(found: Diagnosis, windows: pd.DataFrame, k: float | None) -> None:
    """Length by band of context. k: drafts a step, infinite where unknown, None for plain decode."""
    placed = windows[windows["context_len"].astype(float) > 0]
    if placed.empty:
        found.unknown.append("context of the windows: the source does not print cached tokens per request")
        placed = windows
    octave = np.log2(placed["context_len"].astype(float).fillna(1.0).clip(lower=1)).round().astype(int)
    draws, lengths = list[np.ndarray](), list[float]()
    for band, rows in placed.groupby(octave):
        rng, low, high = generator(0, "acceptance", band), math.nan, math.nan
        length, weight = rows["mean_acceptance_length"].to_numpy(float), rows["weight"].to_numpy(float)
        mean, counts = float(np.average(length, weights=weight)), resampled_weights(len(rows), RESAMPLES, rng) * weight
        if len(rows) >= MIN_BAND and k is not None:
            off = counts @ length / counts.sum(axis=1) - mean
            draws, lengths = [*draws, mean + student_spread(len(rows), RESAMPLES, rng) * off], [*lengths, mean]
            low, high = percentile_interval(draws[-1])
            if 1 <= mean <= k + 1:  # no length can be outside of these
                low, high = max(low, 1.0), min(high, k + 1)
        edges = [int(2 ** (float(str(band)) + side)) if placed is not windows else None for side in (-0.5, 0.5)]
        entry: dict[str, Any] = {"context_len_low": edges[0], "context_len_high": edges[1]}
        same = rows["batch_size"].astype(float) == (math.nan if found.batch_size is None else found.batch_size)
        entry["step_ms"] = rows["step_ms"].astype(float)[same].median()
        entry |= {"num_windows": len(rows), "mean_acceptance_length": mean, "low": low, "high": high}
        found.bands.append({name: None if pd.isna(value) else value for name, value in entry.items()})
    if k is None:
        found.acceptance = "none, plain decode"
        return
    if len(lengths) < len(found.bands):
        found.warnings.append(f"bands of fewer than {MIN_BAND} windows have no interval and are not compared")
    if len(lengths) > 1 and min(lengths) > 0:
        _, high = percentile_interval(draws[-1] - draws[0])
        falls = high < 0 and lengths[-1] / lengths[0] - 1 < -FALLING
        found.acceptance = "falling with context" if falls else "flat over context"
    elif placed is not windows:
        text = f"bands of context with at least {MIN_BAND} windows: {len(lengths)}, to compare are 2"
        found.unknown.append(f"whether acceptance depends on context; {text}")


def _cost(found: Diagnosis, timed: pd.DataFrame, shape: ModelShape | None, kv_dtype: str, num_gpus: int | None) -> None:
    if timed.empty:
        text = "no steady window (no prefill, idle time or other batch in it) has batch, context and throughput"
        found.unknown.append(f"step time by context: {text}")
        return
    fits, found.all_batches = step_plane(timed, found.batch_size or 0)
    if not fits:
        little = f"at least {MIN_WINDOWS} are needed" if len(timed) < MIN_WINDOWS else "over too little context"
        found.unknown.append(f"slope of the step time: {len(timed)} steady windows, {little}")
        return
    found.slope_ms_per_1k, found.intercept_ms = fits
    peak = gpu_row(found.gpu)
    if shape is None or peak is None:
        missing = "the model's shape (--model)" if shape is None else "the GPU's peak bandwidth (--gpu)"
        found.unknown.append(f"floor of the step time: {missing}")
        return
    per_token = shape.kv_bytes_per_token("float8_e4m3fn" if "fp8" in kv_dtype or "float8" in kv_dtype else "bfloat16")
    # Tensor parallelism shares the KV heads out, at most one per GPU; None: it was not told.
    floor = per_token / min(num_gpus or 1, shape.num_kv_heads) * 1024 / float(peak["memory_gb_per_s"]) / 1e6
    ratio = (fits[0][0] / floor, fits[0][1] / floor, fits[0][2] / floor)
    if 0 <= ratio[2] < FASTEST:
        text = "what was assumed is wrong: shape, KV type (--kv-dtype), sliding window, GPU or tensor parallelism"
        found.unknown.append(f"floor of the step time: {ratio[0]:.2f} reads of the KV cache are below one; {text}")
    elif ratio[2] >= 0:  # else the slope is impossible
        if num_gpus is None:
            text = f"{ratio[0]:.1f} reads if one GPU holds the cache, of n GPUs it is n times as many"
            found.unknown.append(f"tensor parallelism, the start of the server is not in the log: {text}")
        found.slope_over_floor = ratio if num_gpus or ratio[1] > STEEP else None  # more GPUs only make it steeper


def _judge(found: Diagnosis, windows: pd.DataFrame, k: int | None, is_plain: bool) -> None:
    """The first rule of ``diagnosis_rules.csv`` that holds; what is not known stays named."""
    ratio, slope, eager = found.slope_over_floor, found.slope_ms_per_1k, windows["cuda_graph"].eq(False)
    length = float(np.average(windows["mean_acceptance_length"], weights=windows["weight"])) if len(windows) else 0.0
    batch, many = windows["batch_size"].astype(float), eager.sum() > 0.2 * len(windows)
    mixed = windows["prefill_mixed"].eq(True)
    cells = [cell for cell in found.baseline if cell["batch_size"] == found.batch_size] or found.baseline[:1]
    ends = [cells[i]["relative_step_cost"] for i in (0, -1)] if cells else []
    grows = bool(ends) and ends[1] > GROWS * ends[0] and cells[-1]["speedup"][2] < cells[0]["speedup"][1]
    holds: dict[str, Any] = {
        "no_speculation": windows.empty,
        "plain": is_plain,
        "below_one": length < 1 - SLACK,
        "broken_draft": length < BROKEN,
        "contradiction": length > (k or math.inf) + 1 + SLACK,
        "pinned": length > (k or math.inf) + 1 - SLACK,
        "verify_cost": ratio is not None and ratio[1] > STEEP,
        "growing_cost": grows and found.acceptance == "flat over context" and (not ratio or ratio[2] > NEAR_FLOOR),
        "falling_acceptance": found.acceptance == "falling with context",
        "all_eager": eager.all(),
        # A graph is padded: it takes every batch up to its own.
        "eager_not_by_batch": many and batch[eager].max() <= batch[windows["cuda_graph"].eq(True)].max(),
        "eager": many,
        "impossible_slope": slope is not None and slope[2] < 0,
        "fixed_cost": ratio is not None and ratio[2] < NEAR_FLOOR and found.acceptance == "flat over context",
        "cheap_attention": ratio is not None and ratio[2] < NEAR_FLOOR,
        "between": ratio is not None,
        "no_floor": slope is not None,
        "no_context": windows["context_len"].isna().all(),
        "prefill_mixed": windows["step_ms"].isna().all() and mixed.any(),
        "no_slope": True,
    }
    cost = "how the step grows is unknown" if slope is None else f"the step grows by {slope[0]:.3f} ms per 1,024 tokens"
    cost = f"the step pays {ratio[0]:.1f}x one read of the KV cache" if ratio else cost
    cost = "the slope of its steps is impossible, below 0" if holds["impossible_slope"] else cost
    words = {"length": length, "ceiling": k and k + 1, "ratio": ratio and ratio[0], "cost": cost, "eager": eager.sum()}
    words |= {"mixed": mixed.sum(), "windows": len(windows), "costs": " to ".join(f"{cost:.1f}" for cost in ends)}
    told = windows["cuda_graph"].notna().any()
    words["graphs"] = f"{eager.sum()} of {len(windows)} windows ran eager" if told else "no word of CUDA graphs"
    words["measure"] = "" if cells else "the plain step (--recipe all-reject) and "
    _conclude(found, holds, words)
    if holds["below_one"]:  # step times are derived from lengths
        found.acceptance, found.baseline = "unknown", []
        found.slope_ms_per_1k = found.intercept_ms = found.slope_over_floor = None
        found.bands = [band | {"step_ms": None} for band in found.bands]
    if not is_plain and not found.baseline:
        found.unknown.append("cost of a plain step: not in this log; --recipe all-reject gives it in two minutes")


def _conclude(found: Diagnosis, holds: dict[str, bool], words: dict[str, Any]) -> None:
    """Cause and next step of the first rule that holds."""
    rule = next(row for row in read_table("diagnosis_rules.csv") if holds.get(row["finding"]))
    verify = found.roles.get("verify", Role("unknown", ""))
    costly = rule["finding"] in ("verify_cost", "growing_cost", "trace_attention")
    graph = rows_of(found.engine, "setting", found.engine_version, role="graph")
    runs = kernel(found, verify.backend)
    unsplit = runs is not None and runs["kv_split"] == "no"
    words |= {
        "kernel": f"; {verify.backend} verifies without a KV split ({runs['note']})" if runs and unsplit else "",
        "flag": backend_flag(found, verify) if costly else "",
        "graph_flag": graph[0]["flag"] if graph else "the graph sizes (flag unknown for this version)",
    }
    found.cause, found.next_step = rule["cause"].format(**words), rule["next_step"].format(**words)
    if costly and runs is None:
        found.unknown.append("which kernel the verify pass runs: the table has none for this backend and version")
