"""Is it acceptance or verify cost, and which flag to change: from one log, without GPU, restart or metrics.

Decode windows are grouped by context. Length by band tells acceptance; a line through step time over cached tokens
tells cost: its slope against one read of the KV cache at the GPU's peak, its intercept against reading the weights.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from labkit.engines.record import Record
from labkit.engines.roles import Role, gpu_arch, gpu_row, kernel, resolve_roles, setting, speculative_tokens
from labkit.engines.server import Server
from labkit.intervals import generator, percentile_interval, resampled_weights, student_spread
from labkit.shapes import ModelShape, model_shapes

MAX_WINDOWS, MIN_WINDOWS, RESAMPLES = 20_000, 6, 1000
STEEP, NEAR_FLOOR, BROKEN, FALLING = 3.0, 2.0, 1.1, 0.05


@dataclass
class Diagnosis:
    """What `diagnose` found. Lengths in tokens per step, times in ms; unknown is None.

    ``bands``: context_len_low, context_len_high, num_windows, mean_acceptance_length with its interval, step_ms.
    ``slope_ms_per_1k``: growth of the step with 1,024 cached tokens (all requests together); ``slope_over_floor``:
    that over one read of their keys and values at the GPU's peak bandwidth.
    """

    engine: str = ""
    engine_version: str | None = None
    model: str | None = None
    gpu: str | None = None
    bands: list[dict[str, Any]] = field(default_factory=list)
    acceptance: str = "unknown"
    batch_size: float | None = None
    slope_ms_per_1k: tuple[float, float, float] | None = None
    intercept_ms: tuple[float, float, float] | None = None
    slope_over_floor: tuple[float, float, float] | None = None
    roles: dict[str, Role] = field(default_factory=dict)
    cause: str = ""
    next_step: str = ""
    unknown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def diagnose(
    records: Iterable[Record],
    server: Server,
    *,
    gpu: str | None = None,
    model: str | None = None,
    kv_dtype: str | None = None,
) -> Diagnosis:
    """Diagnose the decode windows of one server.

    Parameters
    ----------
    gpu, model
        Names of ``gpu_peaks.csv`` and ``model_shapes.csv``, where the log does not tell them.
    kv_dtype
        dtype of the KV cache; default: that of the arguments, else bfloat16.

    Raises
    ------
    InputError
        An unknown model name.
    """
    windows, warnings, last, stride = [], dict[str, int](), None, 1
    for count, record in enumerate(records):
        last = record
        for text in record.warnings:
            warnings[text] = warnings.get(text, 0) + 1
        if record.mean_acceptance_length is not None and count % stride == 0:
            windows.append(record)
        if len(windows) > MAX_WINDOWS:  # a long log is thinned evenly
            windows, stride = windows[::2], stride * 2
    engine = server.engine = server.engine or (last.engine if last else "")
    found = Diagnosis(engine, server.version or (last.engine_version if last else None), gpu=gpu or server.gpu)
    found.model = model or server.model or (last.model if last else None)
    found.warnings = [
        f"{n} x {text}" if n > 1 else text for text, n in sorted(warnings.items(), key=lambda x: -x[1])[:10]
    ]
    found.roles = resolve_roles(server, found.gpu)
    speculative = [record for record in windows if not record.details.get("plain")]
    _acceptance(found, speculative)
    _cost(found, speculative, _shape(found.model, given=model), kv_dtype or server.args.get("kv_cache_dtype", ""))
    _judge(found, server, speculative)
    return found


def _weights(records: list[Record]) -> np.ndarray:
    """Verify steps behind each record: its count, else its requests (windows of SGLang have equal numbers of steps)."""
    return np.array([record.steps or record.batch_size or 1.0 for record in records], dtype=float)


def _acceptance(found: Diagnosis, windows: list[Record]) -> None:
    placed = [record for record in windows if record.context_len]
    if not placed:
        found.unknown.append("context of the windows: the source does not print cached tokens per request")
        placed = windows
    contexts = np.array([max(record.context_len or 1.0, 1.0) for record in placed])
    octaves = np.round(np.log2(contexts)).astype(int) if len(placed) else np.array([], dtype=int)
    lengths, weights = np.array([record.mean_acceptance_length for record in placed], dtype=float), _weights(placed)
    draws = []
    for octave in np.unique(octaves):
        rows = np.flatnonzero(octaves == octave)
        length = float(np.average(lengths[rows], weights=weights[rows]))
        rng = generator(0, "acceptance", int(octave))
        counts = resampled_weights(len(rows), RESAMPLES, rng) * weights[rows]
        spread = student_spread(len(rows), RESAMPLES, rng) * (counts @ lengths[rows] / counts.sum(axis=1) - length)
        low, high = percentile_interval(length + spread, 0.95)
        steps = [placed[i].step_ms for i in rows if placed[i].step_ms is not None]
        known = any(record.context_len for record in placed)
        found.bands.append(
            {
                "context_len_low": int(2 ** (octave - 0.5)) if known else None,
                "context_len_high": int(2 ** (octave + 0.5)) if known else None,
                "num_windows": len(rows),
                "mean_acceptance_length": length,
                "low": None if np.isnan(low) else low,
                "high": None if np.isnan(high) else high,
                "step_ms": float(np.median(np.array(steps, dtype=float))) if steps else None,
            }
        )
        draws.append(length + spread)
    if len(draws) > 1 and not np.isnan(draws[0]).any() and not np.isnan(draws[-1]).any():
        low, high = percentile_interval(draws[-1] - draws[0], 0.95)
        change = found.bands[-1]["mean_acceptance_length"] / found.bands[0]["mean_acceptance_length"] - 1
        falls, rises = high < 0 and change < -FALLING, low > 0 and change > FALLING
        found.acceptance = "falling with context" if falls else "rising with context" if rises else "flat over context"
    elif draws:
        found.unknown.append("whether acceptance depends on context: the windows of one band only, or too few")


def _shape(model: str | None, given: str | None) -> ModelShape | None:
    from labkit.shapes import model_shape

    if given:
        return model_shape(given)
    plain = "".join(filter(str.isalnum, (model or "").lower()))
    close = [name for name in model_shapes() if "".join(filter(str.isalnum, name)) in plain]
    return model_shapes()[max(close, key=len)] if close else None


def _cost(found: Diagnosis, windows: list[Record], shape: ModelShape | None, kv_dtype: str) -> None:
    timed = [record for record in windows if record.step_ms and record.context_len and record.batch_size]
    if not timed:
        found.unknown.append("step time by context: no window has batch, context and throughput together")
        return
    batches = [record.batch_size or 0 for record in timed]
    found.batch_size = max(set(batches), key=batches.count)
    timed = [record for record in timed if record.batch_size == found.batch_size]
    cached = np.array([(record.context_len or 0) * (record.batch_size or 0) for record in timed]) / 1024
    step = np.array([record.step_ms or 0.0 for record in timed])
    if len(timed) < MIN_WINDOWS or cached.max() < 1.5 * cached.min():
        found.unknown.append(f"slope of the step time: {len(timed)} windows of one batch size, over too little context")
        return
    rng = generator(0, "step time")
    counts = resampled_weights(len(timed), RESAMPLES, rng)
    spread = student_spread(len(timed), RESAMPLES, rng)
    lines = _line(counts, cached, step)
    estimate = _line(np.ones((1, len(timed))), cached, step)[0]
    fits = []
    for column in range(2):
        low, high = percentile_interval(estimate[column] + spread * (lines[:, column] - estimate[column]), 0.95)
        fits.append((float(estimate[column]), low, high))
    found.slope_ms_per_1k, found.intercept_ms = fits
    peak = gpu_row(found.gpu)
    if shape is None or peak is None:
        missing = "the model's shape (--model)" if shape is None else "the GPU's peak bandwidth (--gpu)"
        found.unknown.append(f"floor of the step time: {missing}")
        return
    tokens = 1 if kv_dtype.startswith("fp8") or "float8" in kv_dtype else 2
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * tokens
    floor = per_token * 1024 / float(peak["memory_gb_per_s"]) / 1e6
    found.slope_over_floor = (fits[0][0] / floor, fits[0][1] / floor, fits[0][2] / floor)


def _line(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slope and intercept of the weighted least-squares line for each row of weights, [resamples, 2]."""
    total = weights.sum(axis=1)
    mean_x, mean_y = weights @ x / total, weights @ y / total
    spread_x = weights @ x**2 / total - mean_x**2
    slope = (weights @ (x * y) / total - mean_x * mean_y) / np.where(spread_x > 0, spread_x, np.nan)
    return np.stack([slope, mean_y - slope * mean_x], axis=1)


def _judge(found: Diagnosis, server: Server, windows: list[Record]) -> None:
    """The likely cause and the next step, by rules; what is not known stays named."""
    length = (
        float(np.average([r.mean_acceptance_length or 1 for r in windows], weights=_weights(windows))) if windows else 0
    )
    verify = found.roles.get("verify", Role("unknown", ""))
    runs = kernel(found.engine, verify.backend, found.engine_version, "verify", gpu_arch(found.gpu))
    ratio, k = found.slope_over_floor, speculative_tokens(server)
    eager = sum(record.cuda_graph is False for record in windows)
    if not windows:
        found.cause = "no speculative windows in this log: speculation is off, or the engine does not print it"
    elif length < BROKEN:
        found.cause = f"acceptance: length {length:.2f}, so the draft path is broken rather than slow"
        found.next_step = (
            "check that drafter and target belong together (layers, vocabulary, quantisation), then the text"
        )
    elif ratio and ratio[1] > STEEP:
        found.cause = f"verify cost: the step pays {ratio[0]:.0f}x one read of the KV cache per cached token"
        if runs and runs["kv_split"] == "no":
            found.cause += f"; {verify.backend} verifies without a KV split ({runs['note']})"
        elif runs is None:
            found.unknown.append(f"which kernel {verify.backend} verifies with in version {found.engine_version}")
        found.next_step = _other_backend(found, verify)
    elif found.acceptance == "falling with context":
        found.cause = "acceptance: it falls with context, while the step time stays near its floor or is unknown"
        found.next_step = (
            "compare the drafter's max_position_embeddings and trained length with these contexts; lower k"
        )
    elif eager > 0.2 * len(windows):
        found.cause = f"launch overhead: {eager} of {len(windows)} windows ran without a CUDA graph"
        row = setting(found.engine, "graph", found.engine_version)
        found.next_step = f"raise {row['flag']} above the running requests" if row else "flag unknown for this version"
    elif ratio and ratio[2] < NEAR_FLOOR:
        found.cause = (
            "neither: acceptance holds and attention is near its floor; what is left is the fixed cost per step"
        )
        found.next_step = "measure the plain step (recipe backend-ab) and k (recipe k-sweep)"
    else:
        found.cause = "undecided: " + ("the interval of the slope is too wide" if ratio else "no floor to compare with")
        found.next_step = "run the recipe all-reject: the cost ratio without the effect of acceptance"
    if k and length > k + 1 + 0.05:
        found.warnings.append(f"contradiction: length {length:.2f} above k + 1 = {k + 1}")
    found.unknown.append(
        "cost of a plain decode step: not in this log; recipe all-reject or backend-ab gives it in minutes"
    )


def _other_backend(found: Diagnosis, verify: Role) -> str:
    """The flag that moves the verify role to a backend with a KV split, if the table has both for this version."""
    if not found.engine_version:
        return "set a verify backend with a KV split; the version is unknown, so the flag is not named"
    arch = gpu_arch(found.gpu)
    for name in {"sglang": ("flashinfer", "fa3"), "vllm": ("FLASH_ATTN", "FLASHINFER")}.get(found.engine, ()):
        row = kernel(found.engine, name, found.engine_version, "verify", arch)
        if row and row["kv_split"] == "yes" and name != verify.backend and (name != "fa3" or arch == "9.0"):
            split = found.roles.get("decode", verify).backend != verify.backend and found.engine == "sglang"
            flag = "--prefill-attention-backend" if split else "--attention-backend"
            return (
                f"{flag} {name} (moves {'prefill and verify' if split else 'plain decode too'}; compare on equal text)"
            )
    return "unknown for this version: no backend with a KV split for verify is in the table"


def render(found: Diagnosis) -> str:
    """The diagnosis as text."""

    def interval(value: tuple[float, float, float] | None, form: str) -> str:
        return "unknown" if value is None else f"{value[0]:{form}} [{value[1]:{form}}, {value[2]:{form}}]"

    lines = [f"{found.engine} {found.engine_version or '(version unknown)'}, {found.model or 'model unknown'}, "]
    lines[0] += found.gpu or "GPU unknown"
    lines += ["", f"acceptance: {found.acceptance}"]
    for band in found.bands:
        where = (
            "context unknown"
            if band["context_len_low"] is None
            else f"{band['context_len_low']} to {band['context_len_high']}"
        )
        bounds = "" if band["low"] is None else f" [{band['low']:.2f}, {band['high']:.2f}]"
        step = "" if band["step_ms"] is None else f", step {band['step_ms']:.1f} ms"
        lines.append(f"  {where}: {band['mean_acceptance_length']:.2f}{bounds}, {band['num_windows']} windows{step}")
    batch = "" if found.batch_size is None else f" (batch {found.batch_size:g})"
    lines += ["", f"step time{batch}: slope {interval(found.slope_ms_per_1k, '.3f')} ms per 1,024 cached tokens, "]
    lines[-1] += f"intercept {interval(found.intercept_ms, '.1f')} ms"
    lines.append(f"  you pay {interval(found.slope_over_floor, '.1f')} x one read of the KV cache")
    lines += ["", "roles:"] + [f"  {name}: {role.backend}, {role.how}" for name, role in found.roles.items()]
    lines += ["", f"likely cause: {found.cause}", f"next step: {found.next_step or 'none'}"]
    lines += [f"unknown: {text}" for text in found.unknown] + [f"warning: {text}" for text in found.warnings]
    return "\n".join(lines)
