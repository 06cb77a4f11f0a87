"""Attention rows summarised for drawing: median time per cell, floor, share of the read bandwidth, slope."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import InputError
from labkit.plots.style import signed
from labkit.rows import ok_rows

# A setting: inside one only the backend, q_len and context may differ, else times are not comparable.
FIXED = (
    *("gpu", "batch_size", "num_qo_heads", "num_kv_heads", "head_dim", "page_size", "page_order", "q_dtype"),
    *("kv_dtype", "mask", "window", "shared_prefix_len", "launch_mode", "l2_state"),
)
CELL = ("backend", "q_len", "context_len")
_NEEDED = (*CELL, "run_id", "attention_ms", "gb_per_s", "kv_bytes_read")
_FACTS = ("num_programs", "num_splits", "kv_passes")
Bandwidth = float | Mapping[str, float] | None


def cell_table(df: pd.DataFrame, read_gb_per_s: Bandwidth = None) -> pd.DataFrame:
    """One row per setting, run, backend, version of the backend (`backend_digest`), q_len and context.

    ``read_gb_per_s`` is the read bandwidth measured in the same run (1e9 bytes per second), of all rows or per run_id.

    Returns the columns of `FIXED` that ``df`` has, run_id, backend_digest, backend (with its variant, where one is
    set), q_len, context_len, kernel, attention_us (median) with attention_us_low and attention_us_high (20th and 80th
    percentile of the samples), kv_bytes, floor_us (keys and values read once at the measured bandwidth; q and the
    output are not counted), over_floor (attention_us / floor_us), share (unique bytes per time over that bandwidth),
    num_programs, num_splits, kv_passes, num_samples. NaN or None where unknown.

    Raises InputError when there are no ok rows or a column is missing.
    """
    rows = ok_rows(df, "attention", _NEEDED)
    rows = rows.assign(
        **{name: None for name in ("backend_digest", "resolved_kernel", *_FACTS) if name not in rows},
        attention_us=rows["attention_ms"] * 1e3,
    )
    if "variant" in rows and rows["variant"].notna().any():
        rows["backend"] += (" " + rows["variant"]).fillna("")
    keys = [*(name for name in FIXED if name in rows), "run_id", "backend_digest", *CELL]
    cells = rows.groupby(keys, dropna=False, sort=True)
    first = cells[["resolved_kernel", "kv_bytes_read", *_FACTS]].first()
    table = first.rename(columns={"resolved_kernel": "kernel", "kv_bytes_read": "kv_bytes"})
    for name, quantile in (("attention_us", 0.5), ("attention_us_low", 0.2), ("attention_us_high", 0.8)):
        table[name] = cells["attention_us"].quantile(quantile)
    table["gb_per_s"], table["num_samples"] = cells["gb_per_s"].median(), cells.size()
    table = table.reset_index()
    known = read_gb_per_s if isinstance(read_gb_per_s, Mapping) else dict.fromkeys(table["run_id"], read_gb_per_s)
    bandwidth = pd.to_numeric(table["run_id"].map(lambda run: known.get(run) or np.nan))
    table["floor_us"] = table["kv_bytes"] / bandwidth / 1e3
    table["over_floor"] = table["attention_us"] / table["floor_us"]
    table["share"] = table.pop("gb_per_s") / bandwidth
    return table.astype(dict.fromkeys(_FACTS, float))


def attention_table(df: pd.DataFrame, read_gb_per_s: Bandwidth = None) -> pd.DataFrame:
    """`cell_table` of one setting, with one run per cell (the latest) and a column `newest`.

    A backend's newest version is the one measured last (run_ids sort by time); other versions of it stay in the
    table with ``newest`` False. Raises InputError as `cell_table`, and for rows of several settings.
    """
    table = cell_table(df, read_gb_per_s)
    for name in FIXED:
        if name in table and table[name].nunique(dropna=False) > 1:
            values = ", ".join(map(str, table[name].unique()))
            raise InputError(f"attention rows: want one {name}; got {values}; select one first")
    version = table["backend_digest"].map(str)
    latest = table.assign(version=version).sort_values("run_id").drop_duplicates("backend", keep="last")
    table = table.assign(newest=version == table["backend"].map(latest.set_index("backend")["version"]))
    order = ["backend", "backend_digest", "q_len", "context_len"]
    table = table.sort_values([*order, "run_id"]).drop_duplicates(order, keep="last")
    return table.reset_index(drop=True)


def one_setting(df: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows with the ``wanted`` values, of the setting (`FIXED`) that has most cells; failed points included.

    Raises InputError when no ok row has the wanted values; the message names the values there are.
    """
    for name, value in wanted.items():
        known = ok_rows(df, "attention", [*FIXED[:1], name])[name]
        if not (known == value).any():
            raise InputError(f"{name}: want one of {', '.join(map(str, sorted(known.unique())))}; got {value}")
        df = df[df[name] == value]
    names = [name for name in FIXED if name in df]
    cells = ok_rows(df, "attention", CELL)[[*names, *CELL]].drop_duplicates()
    best = cells.groupby(names, dropna=False).size().sort_values(kind="stable").index[-1]
    keep = pd.Series(True, index=df.index)
    for name, value in zip(names, best, strict=True):
        # A failed point may lack what is only known after preparing; it stays.
        keep &= df[name].isna() if pd.isna(value) else (df[name] == value) | (df[name].isna() & df["status"].ne("ok"))
    return df[keep]


def read_bandwidths(sidecars: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """run_id -> read bandwidth (1e9 bytes per second) of the runs whose calibration has one."""
    return calibrated(sidecars, "read_gb_per_s")


def calibrated(sidecars: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """run_id -> one value of the calibration, of the runs that have it."""
    values = {run: (sidecar.get("calibration") or {}).get(name) for run, sidecar in sidecars.items()}
    return {run: value for run, value in values.items() if value}


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
    return f"{signed(slope, digits)} us per 1K"


def verify_q_len(table: pd.DataFrame, q_len: int | None) -> int:
    """``q_len``, or the largest of those with most backends in the table; InputError when it was not measured."""
    backends = table.groupby("q_len")["backend"].nunique()
    if q_len is not None and q_len not in backends.index:
        raise InputError(f"q_len: want one of {', '.join(map(str, backends.index))}; got {q_len}")
    verify = backends[backends.index > 1] if (backends.index > 1).any() else backends
    return int(verify[verify == verify.max()].index.max() if q_len is None else q_len)


def path_name(kernel: Any) -> str:
    """A kernel's name without what it counts (``8 calls``): what tells one path from another. "" when unknown."""
    return re.sub(r"\b\d+\b", "#", kernel) if isinstance(kernel, str) else ""


def kernel_segments(curve: pd.DataFrame) -> list[pd.DataFrame]:
    """A curve in order of context, cut where the kernel that really ran changes (`path_name`)."""
    curve = curve.sort_values("context_len")
    kernel = curve["kernel"].map(path_name)
    return [part for _, part in curve.groupby((kernel != kernel.shift()).cumsum())]


def fitting_context(table: pd.DataFrame, cache_bytes: float) -> float:
    """The longest context whose keys and values fit in ``cache_bytes``, by the bytes per token of the longest cell."""
    last = table.sort_values("context_len").iloc[-1]
    return float(cache_bytes / (last["kv_bytes"] / (last["context_len"] + last["q_len"])))
