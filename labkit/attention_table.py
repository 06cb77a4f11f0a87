"""Attention rows summarised for drawing: median time per cell, floor, share of the read bandwidth, slope."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import InputError
from labkit.rows import ok_rows

# Inside one table only the backend, q_len and context may differ, else times are not comparable.
FIXED = (
    "gpu",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "page_order",
    "q_dtype",
    "kv_dtype",
    "launch_mode",
    "l2_state",
)
CELL = ("backend", "q_len", "context_len")
_NEEDED = (*CELL, "run_id", "attention_ms", "gb_per_s", "kv_bytes_read")


def attention_table(df: pd.DataFrame, read_gb_per_s: float | Mapping[str, float] | None = None) -> pd.DataFrame:
    """One row per backend, q_len and context.

    Parameters
    ----------
    df
        Attention rows, one per sample, of one device and shape.
    read_gb_per_s
        Read bandwidth measured in the same run (1e9 bytes per second), or one per run_id; None or a run without one:
        unknown.

    Returns
    -------
    DataFrame
        backend, q_len, context_len, run_id, kernel, attention_us (median) with attention_us_low and attention_us_high
        (20th and 80th percentile of the samples), kv_bytes, floor_us (keys and values read once at the measured
        bandwidth; q and the output are not counted), share (unique bytes per time over that bandwidth), num_samples.
        NaN where the bandwidth is unknown.

    Raises
    ------
    InputError
        No ok rows, rows of several devices, shapes or cache states, or one cell in several runs.
    """
    rows = ok_rows(df, "attention", _NEEDED)
    for name in FIXED:
        if name in rows and rows[name].nunique(dropna=False) > 1:
            values = ", ".join(map(str, rows[name].unique()))
            raise InputError(f"attention rows: want one {name}; got {values}; select one first")
    known = (
        read_gb_per_s if isinstance(read_gb_per_s, Mapping) else dict.fromkeys(rows["run_id"].unique(), read_gb_per_s)
    )
    records = []
    for key, cell in rows.groupby(list(CELL), sort=True):
        runs = sorted(cell["run_id"].unique())
        if len(runs) > 1:
            raise InputError(
                f"attention rows: {key[0]} at q_len {key[1]}, context {key[2]:g} is in several runs ({', '.join(runs)})"
            )
        bandwidth = known.get(runs[0]) or np.nan
        low, middle, high = np.percentile(cell["attention_ms"] * 1e3, [20, 50, 80])
        kv_bytes = float(cell["kv_bytes_read"].iloc[0])
        kernel = cell["resolved_kernel"].iloc[0] if "resolved_kernel" in cell else None
        records.append(
            dict(zip(CELL, key, strict=True))
            | {
                "run_id": runs[0],
                "kernel": kernel,
                "attention_us": middle,
                "attention_us_low": low,
                "attention_us_high": high,
                "kv_bytes": kv_bytes,
                "floor_us": kv_bytes / bandwidth / 1e3,
                "share": float(np.median(cell["gb_per_s"])) / bandwidth,
                "num_samples": len(cell),
            }
        )
    return pd.DataFrame(records)


def read_bandwidths(sidecars: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """run_id -> read bandwidth (1e9 bytes per second) of the runs whose calibration has one."""
    calibrations = {run: sidecar.get("calibration") or {} for run, sidecar in sidecars.items()}
    return {run: values["read_gb_per_s"] for run, values in calibrations.items() if values.get("read_gb_per_s")}


def slope_us_per_1k(context_len: np.ndarray, attention_us: np.ndarray) -> float:
    """Least-squares slope of time in context, in us per 1,024 tokens; NaN for fewer than two contexts.

    Contexts are spaced by factors, so the longest ones decide: it is the growth that a long context pays.
    """
    if len(context_len) < 2:
        return float("nan")
    return float(np.polyfit(context_len, attention_us, 1)[0] * 1024)


def slope_text(slope: float) -> str:
    """``+9.8 us per 1K``: a slope of `slope_us_per_1k` as labels and answers print it."""
    digits = 0 if abs(slope) >= 9.95 else 1 if abs(slope) >= 0.95 else 2
    return f"{slope:+,.{digits}f} us per 1K"


def kernel_segments(curve: pd.DataFrame) -> list[pd.DataFrame]:
    """A curve in order of context, cut where the kernel that really ran changes."""
    curve = curve.sort_values("context_len")
    kernel = curve["kernel"].fillna("")
    return [part for _, part in curve.groupby((kernel != kernel.shift()).cumsum())]


def fitting_context(table: pd.DataFrame, cache_bytes: float) -> float:
    """The longest context whose keys and values fit in ``cache_bytes``, by the bytes per token of the longest cell."""
    last = table.sort_values("context_len").iloc[-1]
    return float(cache_bytes / (last["kv_bytes"] / (last["context_len"] + last["q_len"])))
