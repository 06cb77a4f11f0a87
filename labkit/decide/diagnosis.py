"""Why a backend's attention time grows with context as it does: slopes over the floor, and a cause in plain words.

Rules, in this order. "Slope" is the growth of time per token of context over the floor's (KV bytes of one token, read
once at the read bandwidth of the same run); "few programs" are fewer than the device has SMs.

1. **other path at (q, context)**: from one measured cell to the next longer one time grows more than `JUMP` times as
   much as the context, or falls by more than `JUMP` (`RENAMED` instead where the kernel's name changes too); or from
   one q_len to the next the slope changes more than `JUMP` times what the number of query tokens explains, or by more
   than `JUMP` while kernel or splitting change and the number of KV reads does not explain it.
2. **launch-bound**: at the longest context the fixed part of the time is at least `FIXED_SHARE` of it.
3. **healthy**: the slope is at most `HEALTHY`, of verify and of decode. A ratio of the two near 1 proves nothing.
4. **no KV split**: one split, and few programs or a slope above `JUMP` times what the repeated reads cost.
5. **too few KV splits**: several splits, each key read once, few programs.
6. **KV read per draft token**, **KV read per query head**: several reads per key explain the slope (at most `HEALTHY`
   times their number); per draft token where the number grows with q_len or is below the query heads per KV head.
7. Without the number of splits and reads (libraries), "likely": linear in q_len (exponent at least `LINEAR`) is per
   draft token; flat in q_len (at most `FLAT`) is no KV split with few programs or a slope above `JUMP` times the
   query heads per KV head, else per query head where the programs fill the device.
8. **unknown** otherwise, also below `MIN_CONTEXTS` contexts or a span of `MIN_SPAN`, or without a read bandwidth.

The thresholds are for a cold cache: one that holds the keys and values between calls makes time jump where they no
longer fit.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit.plots.attention_table import FIXED, calibrated, cell_table, path_name, read_bandwidths, slope_us_per_1k
from labkit.plots.style import format_tokens

HEALTHY, JUMP, RENAMED, FIXED_SHARE = 2.0, 1.5, 1.25, 0.5
LINEAR, FLAT = 0.75, 0.25
MIN_CONTEXTS, MIN_SPAN = 3, 4.0
TILE = 64
GOOD = ("healthy", "launch-bound")


class Diagnosis(NamedTuple):
    """A label of the rules above, how sure (measured, likely), and the numbers that led to it."""

    label: str
    sure: str
    because: str


def slope_table(df: pd.DataFrame, sidecars: Mapping[str, Mapping[str, Any]] | None = None) -> pd.DataFrame:
    """One row per setting, run, backend, version and q_len: how time grows with context.

    ``df`` holds attention rows, one per sample, of any number of settings; the calibration in ``sidecars`` (run_id ->
    sidecar) has the read bandwidth and the number of SMs.

    Returns the columns of `FIXED` that ``df`` has, run_id, backend, backend_digest, q_len, num_contexts, first_context,
        last_context (tokens), slope_us_per_1k (least squares, after the last jump), slope_over_floor, fixed_us (time
        at context 0 by that line), fixed_share (of the time at the longest context), tile_us (serial time of one
        program per 64-key tile; NaN unless there is one split and the programs run at once), jump_at (context of the
        first jump), kernel, num_programs, num_splits, kv_passes (at the longest context) and num_sms. NaN: unknown.

    Raises InputError as `cell_table`.
    """
    cells = cell_table(df, read_bandwidths(sidecars or {}))
    num_sms = calibrated(sidecars or {}, "num_sms")
    keys = _series(cells, "q_len")
    records = [
        dict(zip(keys, key, strict=True))
        | _slope(curve.sort_values("context_len"), num_sms.get(curve["run_id"].iloc[0]))
        for key, curve in cells.groupby(keys, dropna=False, sort=True)
    ]
    return pd.DataFrame(records)


def _series(table: pd.DataFrame, *more: str) -> list[str]:
    return [*(name for name in FIXED if name in table), "run_id", "backend", "backend_digest", *more]


def _slope(curve: pd.DataFrame, num_sms: float | None) -> dict[str, Any]:
    jumps = [at for at in range(1, len(curve)) if _jumps(curve.iloc[at - 1], curve.iloc[at])]
    part, last = curve.iloc[jumps[-1] if jumps else 0 :], curve.iloc[-1]
    x, y = part["context_len"].to_numpy(float), part["attention_us"].to_numpy(float)
    per_token = slope_us_per_1k(x, y) / 1024
    floor = slope_us_per_1k(x, part["floor_us"].to_numpy(float)) / 1024
    fixed = float(np.mean(y) - per_token * np.mean(x))
    at_once = last["num_splits"] == 1 and last["num_programs"] <= (num_sms or 0)
    return {
        "num_contexts": len(curve), "first_context": curve["context_len"].iloc[0], "last_context": x[-1],
        "slope_us_per_1k": per_token * 1024, "slope_over_floor": per_token / floor, "fixed_us": fixed,
        "fixed_share": fixed / y[-1], "tile_us": TILE * per_token if at_once else np.nan,
        "jump_at": curve["context_len"].iloc[jumps[0]] if jumps else np.nan, "num_sms": num_sms or np.nan,
        **last[["kernel", "num_programs", "num_splits", "kv_passes"]],
    }  # fmt: skip


def _jumps(short: pd.Series, long: pd.Series) -> bool:
    limit = JUMP if path_name(short["kernel"]) == path_name(long["kernel"]) else RENAMED
    growth = long["attention_us"] / short["attention_us"]
    return bool(growth > limit * long["context_len"] / short["context_len"] or growth < 1 / limit)


def diagnose(df: pd.DataFrame, sidecars: Mapping[str, Mapping[str, Any]] | None = None) -> pd.DataFrame:
    """One row per setting, run, backend and version: its slopes, its structure, and a diagnosis.

    Returns the columns of `FIXED` that ``df`` has, run_id, backend, backend_digest, q_len (of verify: the largest),
        decode_slope_over_floor (q_len 1), verify_slope_over_floor, verify_decode_slope_ratio, fixed_us, tile_us,
        num_programs, num_sms, num_splits, kv_passes (of verify), kernel, diagnosis, sure (measured, likely) and
        because. Within one run_id only: no ratio crosses runs. Raises as `slope_table`.
    """
    slopes = slope_table(df, sidecars)
    keys = _series(slopes)
    records = []
    for key, rows in slopes.groupby(keys, dropna=False, sort=True):
        rows = rows.sort_values("q_len")
        verify, decode, found = rows.iloc[-1], rows[rows["q_len"] == 1]["slope_over_floor"], _of_backend(rows)
        decode_slope = float(decode.iloc[0]) if len(decode) else np.nan
        records.append({
            **dict(zip(keys, key, strict=True)), "q_len": verify["q_len"], "decode_slope_over_floor": decode_slope,
            "verify_slope_over_floor": verify["slope_over_floor"],
            "verify_decode_slope_ratio": verify["slope_over_floor"] / decode_slope,
            **verify[["fixed_us", "tile_us", "num_programs", "num_sms", "num_splits", "kv_passes", "kernel"]],
            "diagnosis": found.label, "sure": found.sure, "because": found.because,
        })  # fmt: skip
    return pd.DataFrame(records)


def _of_backend(rows: pd.DataFrame) -> Diagnosis:
    """Rows of `slope_table` of one backend, by q_len."""
    per_q = [(row, _of_curve(row, rows)) for _, row in rows.iterrows()]
    found = per_q[-1][1]
    for row, own in per_q:
        if np.isfinite(row["jump_at"]):
            where = f"other path at (q {row['q_len']}, context {format_tokens(row['jump_at'])})"
            return Diagnosis(where, own.sure, f"time jumps there; at longer contexts {own.label}: {own.because}")
    for (short, _), (long, own) in pairwise(per_q):
        if _changes_with_q(short, long):
            where = f"other path at (q {long['q_len']}, context {format_tokens(long['first_context'])})"
            slopes = f"the slope goes from {short['slope_over_floor']:.1f} to {long['slope_over_floor']:.1f} times"
            return Diagnosis(where, own.sure, f"{slopes} the floor from q_len {short['q_len']} on; there {own.label}")
    for row, own in per_q if found.label in GOOD else []:
        if own.label not in (*GOOD, "unknown"):
            return Diagnosis(own.label, own.sure, f"at q_len {row['q_len']}: {own.because}")
    return found


def _changes_with_q(short: pd.Series, long: pd.Series) -> bool:
    slopes = short["slope_over_floor"], long["slope_over_floor"]
    bound = max(short["fixed_share"], long["fixed_share"]) >= FIXED_SHARE
    if bound or not np.isfinite(slopes).all() or min(slopes) <= 0 or max(slopes) <= HEALTHY:
        return False
    growth = slopes[1] / slopes[0]
    paths = [(path_name(row["kernel"]), row["num_splits"] == 1) for row in (short, long)]
    reads = long["kv_passes"] / short["kv_passes"]
    explained = reads * JUMP >= growth  # False where the number of reads is unknown
    if paths[0] != paths[1] and not explained and max(growth, 1 / growth) > JUMP:
        return True
    return bool(growth > JUMP * long["q_len"] / short["q_len"] or growth < 1 / JUMP)


def _of_curve(row: pd.Series, rows: pd.DataFrame) -> Diagnosis:
    slope = row["slope_over_floor"]
    if row["num_contexts"] < MIN_CONTEXTS or row["last_context"] < MIN_SPAN * row["first_context"]:
        return Diagnosis("unknown", "", f"{row['num_contexts']} context(s) are too few or too close")
    if not np.isfinite(slope):
        return Diagnosis("unknown", "", "no read bandwidth in the run, or one context behind the last jump")
    if row["fixed_share"] >= FIXED_SHARE:
        text = f"{row['fixed_us']:.0f} us of the time at context {format_tokens(row['last_context'])} are fixed"
        return Diagnosis("launch-bound", "measured", text)
    text = f"slope {slope:.1f} times the floor"
    if slope <= HEALTHY:
        return Diagnosis("healthy", "measured", text)
    splits, passes, programs = row["num_splits"], row["kv_passes"], row["num_programs"]
    # Without a split at most one program per request, query head and 64 query tokens has work, however many start.
    busy = row["batch_size"] * row["num_qo_heads"] * -(-row["q_len"] // TILE) if splits == 1 else programs
    few = min(busy, programs) < row["num_sms"]  # False where either is unknown
    if np.isfinite(programs):
        text += f", {programs:.0f} programs" + (f" on {row['num_sms']:.0f} SMs" if row["num_sms"] > 0 else "")
    group = row["num_qo_heads"] / row["num_kv_heads"]
    if np.isfinite(passes):
        text += f", each key read {passes:g} times"
    if splits == 1 and (few or slope > JUMP * (passes if np.isfinite(passes) else group)):
        return Diagnosis("no KV split", "measured", text)
    if splits > 1 and few and passes < JUMP:
        return Diagnosis("too few KV splits", "measured", f"{text}, {splits:.0f} splits")
    exponent, known = _exponent(rows, "slope_over_floor"), rows["kv_passes"].notna().all()
    if passes >= JUMP and slope <= HEALTHY * passes:
        grows = _exponent(rows, "kv_passes") if known and len(rows) > 1 else np.log(max(passes / group, 1))
        per_token = grows > FLAT or passes < group  # fewer reads than heads: tiles of rows, which grow with q_len
        return Diagnosis("KV read per draft token" if per_token else "KV read per query head", "measured", text)
    if exponent >= LINEAR and not passes < JUMP:
        return Diagnosis("KV read per draft token", "likely", f"{text}, linear in q_len")
    if not np.isfinite(splits) and not exponent > FLAT:
        text += ", flat in q_len" if np.isfinite(exponent) else ""
        if few or (np.isnan(passes) and slope > JUMP * group):
            return Diagnosis("no KV split", "likely", text)
        if np.isnan(passes) and programs >= row["num_sms"]:
            return Diagnosis("KV read per query head", "likely", text)
    return Diagnosis("unknown", "", f"{text}; no rule explains it, kernel: {row['kernel']}")


def _exponent(rows: pd.DataFrame, column: str) -> float:
    """Of the power of q_len that a column follows, NaN for fewer than two query lengths."""
    rows = rows[(rows[column] > 0) & (rows["fixed_share"] < FIXED_SHARE)]
    if len(rows) < 2:
        return float("nan")
    return float(np.polyfit(np.log(rows["q_len"].to_numpy(float)), np.log(rows[column].to_numpy(float)), 1)[0])


def degenerate_paths(diagnoses: pd.DataFrame) -> pd.DataFrame:
    """The rows of `diagnose` that are neither healthy nor launch-bound nor unknown, the steepest first."""
    bad = diagnoses[~diagnoses["diagnosis"].isin([*GOOD, "unknown"])]
    return bad.sort_values("verify_slope_over_floor", ascending=False).reset_index(drop=True)
