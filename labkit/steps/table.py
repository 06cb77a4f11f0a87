"""Step rows summarised: median time of every forward, its parts, the floor of each part, and what is unexplained."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.cost import floor_ms, forward_flops
from labkit.decide.forward_costs import FREE, by_machine, loop_rows, without_shared_prefix
from labkit.errors import InputError
from labkit.plots.attention_table import calibrated, read_bandwidths
from labkit.rows import fixed_context, ok_rows
from labkit.shapes import dtype_bytes, model_shapes

PARTS = ("attention_ms", "linear_ms", "other_ms", "sampling_ms", "communication_ms", "gap_ms")
# A setting: inside one only phase, backend, q_len and context may differ.
SETTING = (
    *("gpu", "target", "batch_size", "shared_prefix_len", "weight_dtype", "kv_dtype"),
    *("linear_backend", "num_gpus", "launch_mode"),
)
CELL = (*SETTING, "drafter", "phase", "backend", "q_len", "context_len")
CLOSURE_LIMIT = 0.05  # of the median residual at batch 1
Sidecars = Mapping[str, Mapping[str, Any]]


def forward_table(step_rows: pd.DataFrame, sidecars: Sidecars | None = None) -> pd.DataFrame:
    """One row per forward of the latest run that has it: its time, parts, bytes and floors.

    sidecars : run_id -> sidecar; their calibration has the read bandwidth and the matrix rate of the floors.

    Returns
    -------
    DataFrame
        `CELL`, run_id, forward_ms (median of the samples), the columns of `PARTS` (null where not profiled),
        residual_ms (forward_ms less its parts; NaN where attention or linear is unknown), weight_bytes_read,
        kv_bytes_read, state_bytes, attention_floor_ms (keys and values once), state_floor_ms (states of gated-delta
        layers), linear_floor_ms (weights once, or two FLOPs per weight and token at the measured matrix rate if that is
        longer; no rate is measured for float8), floor_ms (all three), over_floor, peak_memory_bytes,
        energy_j_per_step, num_samples. The floors hold no activations, sampling, launches or communication, and are of
        one device. A target's prefill has floor_ms alone: FLOPs over the matrix rate, where its shape is a known one.

    Raises InputError: no ok rows or a missing column.
    """
    needed = [name for name in CELL if name != "shared_prefix_len"]
    rows = ok_rows(step_rows, "step", [*needed, "run_id", "forward_ms"])
    rows = rows.assign(shared_prefix_len=rows["shared_prefix_len"].fillna(0) if "shared_prefix_len" in rows else 0)
    facts = [*PARTS, "weight_bytes_read", "kv_bytes_read", "state_bytes", "peak_memory_bytes", "energy_j", "num_steps"]
    rows = rows.assign(**{name: np.nan for name in facts if name not in rows})
    cells = rows.groupby([*CELL, "run_id"], dropna=False)
    table = cells[facts].median().assign(forward_ms=cells["forward_ms"].median(), num_samples=cells.size())
    table = table.reset_index().sort_values("run_id", kind="stable")
    # Energy takes runs of its own, which a later run of the same forward does not replace.
    table["energy_j_per_step"] = table.pop("energy_j") / table.pop("num_steps")
    table["energy_j_per_step"] = table.groupby(list(CELL), dropna=False)["energy_j_per_step"].ffill()
    table = table.drop_duplicates(list(CELL), keep="last").sort_values(list(CELL), ignore_index=True)
    known = table["attention_ms"].notna() & table["linear_ms"].notna()
    table["residual_ms"] = (table["forward_ms"] - table[list(PARTS)].sum(axis=1)).where(known)
    return _with_floors(table, sidecars or {})


def _with_floors(table: pd.DataFrame, sidecars: Sidecars) -> pd.DataFrame:
    rate = pd.to_numeric(table["run_id"].map(read_bandwidths(sidecars)))
    table["attention_floor_ms"] = table["kv_bytes_read"] / rate / 1e6
    table["state_floor_ms"] = table["state_bytes"].fillna(0.0) / rate / 1e6
    known = table["run_id"].map(calibrated(sidecars, "matrix_tflops_per_s"))
    rows = table.to_dict("records")
    rates = [x.get(row["weight_dtype"]) if isinstance(x, Mapping) else None for x, row in zip(known, rows, strict=True)]
    table["linear_floor_ms"] = [_linear_floor(*args) for args in zip(rows, rate, rates, strict=True)]
    parts = ["attention_floor_ms", "state_floor_ms", "linear_floor_ms"]
    is_prefill = table["phase"] == "prefill"
    prefill_ms = pd.Series([_prefill_floor(*args) for args in zip(rows, rates, strict=True)], table.index, dtype=float)
    table["floor_ms"] = table[parts].sum(axis=1, skipna=False).mask(is_prefill, prefill_ms)
    table[parts] = table[parts].mask(is_prefill)
    table["over_floor"] = table["forward_ms"] / table["floor_ms"]
    return table


def _linear_floor(row: Mapping[Any, Any], read_gb_per_s: float, tflops_per_s: float | None) -> float:
    num_bytes = row["weight_bytes_read"]
    if not (num_bytes > 0 and read_gb_per_s > 0):
        return float("nan")
    flops = 2 * num_bytes / dtype_bytes(row["weight_dtype"]) * row["batch_size"] * row["q_len"]
    return floor_ms(num_bytes, read_gb_per_s, flops=flops, tflops_per_s=tflops_per_s)


def _prefill_floor(row: Mapping[Any, Any], tflops_per_s: float | None) -> float:
    shape = model_shapes().get(str(row["target"]).removeprefix("random:"))
    if row["phase"] != "prefill" or shape is None or not tflops_per_s or pd.notna(row["drafter"]):
        return float("nan")
    shape = shape.share_of(1 if pd.isna(row["num_gpus"]) else int(row["num_gpus"]))
    call = {"batch_size": int(row["batch_size"]), "q_len": int(row["q_len"]), "context_len": 0, "num_logits": 1}
    return forward_flops(shape, **call) / tflops_per_s / 1e9


def one_setting(step_rows: pd.DataFrame) -> pd.DataFrame:
    """The ok rows, without a shared prefix, of the machine, target, batch size and dtypes that have most rows.

    Drafters' forwards stay with the target they draft for. Raises InputError: no ok rows, or a missing column.
    """
    keys = ["gpu", "target", "batch_size", "weight_dtype", "kv_dtype"]
    rows = by_machine(without_shared_prefix(ok_rows(step_rows, "step", [*keys, "forward_ms"])))
    best = rows.groupby(keys).size().sort_values(kind="stable").index[-1]
    return rows[(rows[keys] == list(best)).all(axis=1)]


def throughput_table(
    step_rows: pd.DataFrame, *, acceptance_length: float = 3.25, num_speculative_tokens: int = 3
) -> pd.DataFrame:
    """Batches that share a prefix: time of a verify step of k+1 tokens and the tokens per second that follow.

    Columns gpu, target, batch_size, shared_prefix_len, context_len, backend, step_ms, tokens_per_s (batch_size times
    ``acceptance_length``, imposed, over step_ms; drafting free), plain_ms and plain_tokens_per_s (NaN where decode was
    not measured on the backend). Raises InputError: no such rows.
    """
    table = by_machine(forward_table(step_rows))
    table = table[table["shared_prefix_len"] > 0]
    keys = ["gpu", "target", "batch_size", "shared_prefix_len", "context_len", "weight_dtype", "kv_dtype", "backend"]
    verify = table[(table["phase"] == "verify") & (table["q_len"] == num_speculative_tokens + 1)]
    if verify.empty:
        raise InputError(f"shared prefix: want verify forwards of {num_speculative_tokens + 1} tokens; not measured")
    plain = table[table["phase"] == "decode"].set_index(keys)["forward_ms"].rename("plain_ms")
    found = verify[[*keys, "forward_ms"]].rename(columns={"forward_ms": "step_ms"}).join(plain, on=keys)
    requests = found["batch_size"] * 1e3
    return found.assign(
        tokens_per_s=requests * acceptance_length / found["step_ms"], plain_tokens_per_s=requests / found["plain_ms"]
    ).reset_index(drop=True)


def closure_table(step_rows: pd.DataFrame, loop_costs: pd.DataFrame | None = None) -> pd.DataFrame:
    """What the sum of the parts leaves unexplained, per GPU, target, batch size and kind of check.

    ``parts of a forward``: the profiled parts against forward_ms. ``forwards of a step``: isolated forwards (drafting
    included where the drafter's were measured), and what the loop itself timed as drafting without a model and
    accepting, against the loop's wall time per step of the same target, backend, drafts, dtypes, launch mode and
    context; the residual is host time of a pass and the gap. The two come from different runs, so clocks may differ; it
    is a residual, never a verdict.

    loop_costs : loop rows; those at a fixed context count (origin forced).

    Returns columns gpu, target, batch_size, check, num_cells, median_residual, worst_residual (share of the whole,
    without sign), closes (median at most `CLOSURE_LIMIT`).
    """
    table = by_machine(forward_table(step_rows))
    share = (table["residual_ms"] / table["forward_ms"]).abs()
    found = [table.assign(check="parts of a forward", share=share)]
    if loop_costs is not None and len(fixed_context(loop_costs)):
        found.append(_loop_residuals(step_rows, fixed_context(loop_costs)))
    both = pd.concat(found).dropna(subset="share")
    if both.empty:
        raise InputError("closure: want forwards with profiled parts, or loop rows of the same cells; there are none")
    groups = both.groupby(["gpu", "target", "batch_size", "check"])["share"]
    summary = groups.agg(num_cells="size", median_residual="median", worst_residual="max").reset_index()
    return summary.assign(closes=summary["median_residual"] <= CLOSURE_LIMIT)


def _loop_residuals(step_rows: pd.DataFrame, loop_costs: pd.DataFrame) -> pd.DataFrame:
    keys = ["gpu", "target", "batch_size", "context_len", "weight_dtype", "kv_dtype", "launch_mode", "arm"]
    loop, isolated = (
        ok_rows(loop_costs, "loop", [*keys, "drafter", "step_ms", "draft_ms", "accept_ms"]),
        loop_rows(step_rows),
    )
    # Where the loop's drafter has no measured forward (n-grams), its step is verified alone.
    known = set(isolated["drafter"].dropna())
    loop = loop.assign(drafter=loop["drafter"].map(lambda name: name if name in known else FREE))
    # Not a forward: accepting, and drafting where no model drafts.
    modelled = loop["drafter"].isin(known)
    extra_ms = loop["accept_ms"].fillna(0.0) + loop["draft_ms"].fillna(0.0).mask(modelled, 0.0)
    loop = loop.assign(extra_ms=extra_ms)
    found = []
    for arm, more in (
        ("plain", ["decode_backend"]),
        ("speculative", ["verify_backend", "num_drafted_tokens", "drafter"]),
    ):
        wall, sums = (
            rows[rows["arm"] == arm].groupby([*keys, *more])["step_ms"].median().rename(name)
            for rows, name in ((loop, "wall_ms"), (isolated, "sum_ms"))
        )
        extra = loop[loop["arm"] == arm].groupby([*keys, *more])["extra_ms"].median()
        found.append(pd.concat([wall, sums, extra], axis=1, join="inner").reset_index())
    cells = pd.concat(found)
    share = (1 - (cells["sum_ms"] + cells["extra_ms"]) / cells["wall_ms"]).abs()
    return cells.assign(check="forwards of a step", share=share)
