"""Can labkit's own kernels and forwards foretell a real engine's relative step cost?

Measured: step times inside the engine (rows of experiment replay, record "steps"), k drafts over plain decode.
Predicted: the forward that labkit measured with the backends that ``engine_pairings.csv`` names for the engine's
setting, plus what the engine adds on the host. That is two constants per engine setting, one for plain and one for
speculative steps, fitted at the shortest context only; every other cell is a test.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_weights, student_spread
from labkit.decide.pairings import pairing_rows
from labkit.engines.roles import holds_for, version_key
from labkit.errors import InputError
from labkit.results import find_runs, load_runs
from labkit.shapes import model_shapes

IMPOSED_LENGTHS = (1.5, 2.5, 4.0)
TOLERANCE = 0.1  # a prediction is trusted to this; closer to break-even than that it is undecided
CELL = ["run_id", "gpu", "engine", "engine_version", "endpoint", "setting", "target", "batch_size", "context_len"]
_FORWARD = ["target", "backend", "batch_size", "q_len", "context_len"]
_HEADS = ["num_qo_heads", "num_kv_heads", "head_dim"]
_KERNEL = [*_HEADS, "backend", "batch_size", "q_len", "context_len"]


@dataclass(frozen=True)
class EngineTruth:
    """One row of ``cells`` per engine setting, k, batch and context; ``missing``: what stored rows lack, or "".

    lengths, tolerance : imposed acceptance lengths, and how far a prediction is trusted; drawn beside the cells.
    """

    cells: pd.DataFrame
    missing: str
    files: tuple[Path, ...] = ()
    lengths: tuple[float, ...] = IMPOSED_LENGTHS
    tolerance: float = TOLERANCE


def load_truth(*paths: str | Path) -> EngineTruth:
    """Measured cells and their predictions from stored rows of replay and step; empty, and said so, where none are."""
    files, missing = [], []
    try:
        files += [run.path for run in find_runs("replay", *paths)]
        cells = engine_cells(load_runs("replay", *files))
    except InputError as error:
        return EngineTruth(pd.DataFrame(), f"no step times from inside an engine: {error}")
    forwards = pd.DataFrame(columns=[*_FORWARD, "forward_ms", "rest_ms"])
    kernels = pd.DataFrame(columns=[*_KERNEL, "attention_ms"])
    try:
        found = [run.path for run in find_runs("step", *paths)]
        forwards, files = forward_times(load_runs("step", *found)), files + found
    except InputError as error:
        missing.append(f"no forwards to predict from: {error}")
    with contextlib.suppress(InputError):  # only where a forward is missing
        found = [run.path for run in find_runs("attention", *paths)]
        kernels, files = kernel_times(load_runs("attention", *found)), files + found
    cells = predict(cells, forwards, kernels)
    if not missing:
        missing = sorted(cells["reason"].dropna().unique())
    return EngineTruth(cells, "; ".join(missing), tuple(files))


def engine_cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Relative step cost per engine setting, k, batch and context, both arms from one run.

    step_ms, plain_ms : geometric mean over windows of the windows' median step, ms. relative_step_cost with its low and
    high from resampled windows, widened for their small number (`labkit.decide.intervals`); NaN for a single window of
    an arm. drafts_per_step : as the engine counted them, per request and step. num_windows : of both.

    Raises InputError: no rows of engine steps.
    """
    kept = rows[(rows["record"] == "steps") & (rows["status"] == "ok")].copy()
    if kept.empty:
        raise InputError("replay rows: none holds steps of an engine (record steps)")
    kept["setting"] = kept["verify_backend"].fillna(kept["decode_backend"])
    kept["window_ms"] = [float(np.median(times)) for times in kept["step_times_ms"]]
    found = []
    for key, cell in kept.groupby(CELL, dropna=False):
        plain = cell[cell["num_speculative_tokens"] == 0]["window_ms"].to_numpy()
        for _, arm in cell[cell["num_speculative_tokens"] > 0].groupby("num_speculative_tokens"):
            if len(plain):
                place = dict(zip(CELL, key, strict=True))
                found.append(place | _arm(arm, plain, generator(0, "engine", *key)))
    if not found:
        raise InputError("replay rows: no cell has both plain and speculative steps in one run")
    return pd.DataFrame(found)


def _arm(arm: pd.DataFrame, plain: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    own = arm["window_ms"].to_numpy()
    logs, deviations = zip(*(_mean_and_deviations(np.log(ms), rng) for ms in (own, plain)), strict=True)
    cost = logs[0] - logs[1]
    low, high = np.exp(percentile_interval(cost + deviations[0] - deviations[1]))
    drafts = arm["num_drafted_tokens"].sum() / arm["num_verify_steps"].sum()
    return {
        "num_speculative_tokens": int(arm["num_speculative_tokens"].iloc[0]),
        **{"drafts_per_step": float(drafts), "step_ms": float(np.exp(logs[0])), "plain_ms": float(np.exp(logs[1]))},
        "relative_step_cost": float(np.exp(cost)),
        **{"relative_step_cost_low": low, "relative_step_cost_high": high},
        "draft_ms": float(arm["draft_ms"].median()),
        "num_windows": len(own) + len(plain),
    }


def _mean_and_deviations(logs: np.ndarray, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Mean of the logs of a few windows, and the spread deviations of resampled ones [resamples].

    Each window is a median of many steps already. The median of six such medians has no better interval than theirs: it
    covers in 99 % of planted cells with the spread of small samples.
    """
    means = resampled_weights(len(logs), RESAMPLES, rng) @ logs / len(logs)
    return float(logs.mean()), student_spread(len(logs), RESAMPLES, rng) * (means - logs.mean())


def forward_times(rows: pd.DataFrame) -> pd.DataFrame:
    """forward_ms and rest_ms (without attention): medians of the newest run per cell of a 16-bit target."""
    kept = rows[(rows["status"] == "ok") & rows["phase"].isin(["decode", "verify"])]
    kept = kept[(kept["weight_dtype"] == "bfloat16") & (kept["kv_dtype"] == "bfloat16")]
    if "shared_prefix_len" in kept:
        kept = kept[kept["shared_prefix_len"].fillna(0) == 0]
    if "num_gpus" in kept:
        kept = kept[kept["num_gpus"].fillna(1) == 1]
    if kept.empty:
        raise InputError("step rows: none of a 16-bit target's decode or verify")
    kept = kept.assign(target=kept["target"].str.removeprefix("random:").str.partition("@")[0])
    kept = kept.assign(rest_ms=kept["forward_ms"] - kept["attention_ms"])
    return _newest(kept, _FORWARD, ["forward_ms", "rest_ms"])


def kernel_times(rows: pd.DataFrame) -> pd.DataFrame:
    """attention_ms of one layer: medians of the newest run per cell; 16-bit, causal, no shared prefix, cold cache."""
    kept = rows[(rows["status"] == "ok") & (rows["kv_dtype"] == "bfloat16") & (rows["l2_state"] == "cold")]
    kept = kept[kept["window"].isna() & kept["shared_prefix_len"].fillna(0).eq(0) & kept["mask"].eq("causal")]
    return _newest(kept, _KERNEL, ["attention_ms"])


def _newest(rows: pd.DataFrame, keys: list[str], values: list[str]) -> pd.DataFrame:
    medians = rows.groupby([*keys, "run_id"])[values].median().reset_index()
    return medians.sort_values("run_id").groupby(keys)[values].last().reset_index()


def paired_backends(engine: str, version: str | None, setting: str) -> tuple[str, str] | None:
    """Decode and verify backend that a setting of an engine means here, by ``engine_pairings.csv``; None: unknown."""
    for row in pairing_rows().to_dict("records"):
        if row["engine"] == engine and setting in row["setting"].replace("(", " ").split() and _covers(row, version):
            return row["decode_backend"], row["verify_backend"]
    return None


def _covers(row: dict[Any, str], version: str | None) -> bool:
    text = row["engine_version"]
    if text.startswith("before "):
        return version_key(version) < version_key(text.removeprefix("before "))
    low, _, high = text.partition(" to ")
    return holds_for(version, low, high or low)


def predict(cells: pd.DataFrame, forwards: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Add to measured cells ``predicted`` (NaN with a ``reason``), ``error``, and ``fitted``: the shortest context.

    forwards, kernels : of `forward_times` and `kernel_times`. A forward that was not measured with the paired backend
    is composed (column ``composed``): all but attention of the other backends' forwards, and the backend's attention of
    every layer. Between measured query lengths (the drafts of a step are as the engine counted them) and batch sizes a
    straight line is drawn; nothing is extended past them. Of several runs of a cell the newest is returned.
    """
    parts = pd.DataFrame(
        [_paired_forwards(cell, forwards, kernels) for cell in cells.to_dict("records")], index=cells.index
    )
    table = pd.concat([cells, parts], axis=1)
    columns = ("predicted", "plain_host_ms", "speculation_host_ms")
    table = table.assign(**dict.fromkeys(columns, np.nan), fitted=False)
    for _, part in table[table["reason"].isna()].groupby(["run_id", "endpoint"]):
        first = part[part["context_len"] == part["context_len"].min()]
        plain_host = float((first["plain_ms"] - first["decode_ms"]).median())
        host = float((first["step_ms"] - first["verify_ms"]).median())
        table.loc[part.index, ["plain_host_ms", "speculation_host_ms"]] = [plain_host, host]
        table.loc[part.index, "predicted"] = (part["verify_ms"] + host) / (part["decode_ms"] + plain_host)
        table.loc[first.index, "fitted"] = True
    table = table.assign(error=table["predicted"] / table["relative_step_cost"] - 1)
    same = [name for name in CELL if name != "run_id"] + ["num_speculative_tokens"]
    newest = table["run_id"].eq(table.groupby(same, dropna=False)["run_id"].transform("max"))
    return table[newest]


def _paired_forwards(cell: dict[Any, Any], forwards: pd.DataFrame, kernels: pd.DataFrame) -> dict[str, Any]:
    """The paired backends of a cell, their forwards in ms, and why there are none."""
    found: dict[str, Any] = dict.fromkeys(("decode_backend", "verify_backend", "reason"))
    found |= {"decode_ms": np.nan, "verify_ms": np.nan, "composed": False}
    paired = paired_backends(cell["engine"], cell["engine_version"], cell["setting"])
    if paired is None:
        return found | {"reason": f"{cell['setting']} of {cell['engine']} is paired with no backend"}
    for name, backend, q_len in zip(("decode", "verify"), paired, (1.0, 1 + cell["drafts_per_step"]), strict=True):
        known = forwards[(forwards["target"] == cell["target"]) & (forwards["context_len"] == cell["context_len"])]
        time_ms = _at(known[known["backend"] == backend], "forward_ms", cell["batch_size"], q_len)
        if np.isnan(time_ms):
            time_ms = _composed(cell, backend, q_len, forwards, kernels)
            found["composed"] = True
        found |= {f"{name}_backend": backend, f"{name}_ms": time_ms}
    if np.isnan(found["decode_ms"]) or np.isnan(found["verify_ms"]):
        found["reason"] = f"no forwards of {' and '.join(dict.fromkeys(paired))} at some cells"
    return found


def _composed(cell: dict[Any, Any], backend: str, q_len: float, forwards: pd.DataFrame, kernels: pd.DataFrame) -> float:
    """The rest of a forward, which hardly depends on context and backend, and the attention of every layer, ms."""
    shape = model_shapes().get(cell["target"])
    if shape is None:
        return np.nan
    ours = kernels[(kernels["backend"] == backend) & (kernels["context_len"] == cell["context_len"])]
    for name in _HEADS:
        ours = ours[ours[name] == getattr(shape, name)]
    rest = _at(forwards[forwards["target"] == cell["target"]], "rest_ms", cell["batch_size"], q_len)
    return rest + shape.num_layers * _at(ours, "attention_ms", cell["batch_size"], q_len)


def _at(rows: pd.DataFrame, column: str, batch_size: float, q_len: float) -> float:
    """The median of a column; between measured query lengths and batch sizes on a straight line, NaN beyond."""
    medians = rows.groupby(["batch_size", "q_len"])[column].median().reset_index()
    by_batch = [(size, _between(part["q_len"], part[column], q_len)) for size, part in medians.groupby("batch_size")]
    known = pd.DataFrame([pair for pair in by_batch if not np.isnan(pair[1])], columns=["batch_size", column])
    return _between(known["batch_size"], known[column], batch_size)


def _between(x: pd.Series, y: pd.Series, at: float) -> float:
    order = np.argsort(x.to_numpy(float))
    positions, values = x.to_numpy(float)[order], y.to_numpy(float)[order]
    inside = len(positions) > 0 and positions[0] <= at <= positions[-1]
    return float(np.interp(at, positions, values)) if inside else np.nan


def verdicts(cells: pd.DataFrame, lengths: Sequence[float] = IMPOSED_LENGTHS) -> pd.DataFrame:
    """Per cell and imposed acceptance length: predicted and measured speed-up, decided, right.

    decided : the predicted speed-up is further from 1 than `TOLERANCE`. right : both are on one side of 1; None where
    undecided. Lengths above k+1 cannot occur and are left out. Fitted cells are not tests.
    """
    tested = cells[cells["predicted"].notna() & ~cells["fitted"].astype(bool)] if len(cells) else cells
    rows = []
    for cell in tested.to_dict("records"):
        for length in lengths:
            if length <= cell["num_speculative_tokens"] + 1:
                predicted, measured = length / cell["predicted"], length / cell["relative_step_cost"]
                decided = bool(abs(np.log(predicted)) > np.log1p(TOLERANCE))
                right = bool((predicted > 1) == (measured > 1)) if decided else None
                names = ("endpoint", "setting", "num_speculative_tokens", "batch_size", "context_len")
                values = {"predicted_speedup": predicted, "measured_speedup": measured, "decided": decided}
                rows.append({name: cell[name] for name in names} | {"length": length, **values, "right": right})
    columns = ["length", "predicted_speedup", "measured_speedup", "decided", "right"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def reversals(cells: pd.DataFrame) -> pd.DataFrame:
    """Where the backend alone decides in one engine: one setting pays and another loses, both beyond their interval."""
    rows = []
    if cells.empty:
        return pd.DataFrame()
    names = ["engine", "num_speculative_tokens", "batch_size", "context_len"]
    for key, part in cells.groupby(names):
        ordered = part.sort_values("relative_step_cost")
        best, worst, k = ordered.iloc[0], ordered.iloc[-1], ordered["num_speculative_tokens"].iloc[0]
        for length in IMPOSED_LENGTHS:
            if best["relative_step_cost_high"] < length < worst["relative_step_cost_low"] and length <= k + 1:
                ends = {"pays": best["setting"], "pays_speedup": length / best["relative_step_cost"]}
                ends |= {"loses": worst["setting"], "loses_speedup": length / worst["relative_step_cost"]}
                rows.append(dict(zip(names, key, strict=True)) | {"length": length, **ends})
    return pd.DataFrame(rows)


def truth_answer(truth: EngineTruth) -> str:
    """How near the predictions came, how often the verdict was right, and which backend reverses the conclusion."""
    lines = ["Do labkit's own measurements foretell a real engine's relative step cost?"]
    cells = truth.cells
    if cells.empty:
        return "\n".join([*lines, f"- unknown: {truth.missing}."])
    tested = cells[cells["predicted"].notna() & ~cells["fitted"].astype(bool)]
    if tested.empty:
        lines.append(f"- not predicted: {truth.missing or 'no cell beyond the fitted ones'}.")
    else:
        lines += _judged(cells, tested["error"].abs())
    found = reversals(cells)
    if len(found):  # of each curve the shortest context
        found = found.sort_values("context_len").groupby(["num_speculative_tokens", "batch_size", "length"]).head(1)
    for row in found.to_dict("records"):
        where = f"{row['engine']}, k = {row['num_speculative_tokens']}, batch {row['batch_size']}"
        pays, loses = (f"{row[name]} {name} ({row[f'{name}_speedup']:.2f}x)" for name in ("pays", "loses"))
        lines.append(
            f"- {where}, {row['length']:g} tokens per step: at {int(row['context_len']):,} {pays} and {loses}."
        )
    if found.empty:
        lines.append("- no measured cell in which one backend pays and another loses.")
    return "\n".join(lines)


def _judged(cells: pd.DataFrame, error: pd.Series) -> list[str]:
    table = verdicts(cells)
    decided = table[table["decided"].astype(bool)]
    right = f"{decided['right'].astype(bool).mean():.0%} of them right" if len(decided) else "none to judge"
    lengths = ", ".join(f"{length:g}" for length in IMPOSED_LENGTHS)
    return [
        f"- {len(error)} cells: relative cost off by {error.median():.1%} (median), {error.max():.1%} at most.",
        f"- verdicts at imposed lengths {lengths}: {len(decided)} of {len(table)} decided, {right}.",
    ]
