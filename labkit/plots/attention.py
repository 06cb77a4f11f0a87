"""What verify attention costs: time per layer against context beside its floor, and the share of the read bandwidth."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.errors import InputError
from labkit.plots.attention_table import (
    Bandwidth,
    attention_table,
    calibrated,
    fitting_context,
    kernel_segments,
    read_bandwidths,
    slope_text,
    slope_us_per_1k,
    verify_q_len,
)
from labkit.plots.canvas import axes_or_new, finished, new_figure
from labkit.plots.curves import by_name
from labkit.plots.labels import EndLabels, Notes
from labkit.plots.style import (
    INK,
    TEXT_WIDTH_IN,
    SeriesStyle,
    attention_order,
    context_axis,
    log_axis,
    series_styles,
    styled,
)
from labkit.rows import ok_rows

_DASHED = (0, (3.0, 1.6))
MAX_BACKENDS = 10


@styled
def plot_attention_time(
    df: pd.DataFrame,
    *,
    ax: Axes | None = None,
    q_len: int | None = None,
    read_gb_per_s: Bandwidth = None,
    cache_bytes: float | None = None,
    labels: Mapping[str, str] | None = None,
    styles: Mapping[str, SeriesStyle] | None = None,
) -> Axes:
    """Attention time of one layer against context: solid at ``q_len``, thin dashes at q_len 1, floor black.

    Bands are the 20th to 80th percentile of the samples. A curve breaks, with a tag, where the kernel that ran
    changes. The end label has the slope in us per 1,024 tokens, of the last kernel where it changed. Older versions
    of a backend are faint thin lines behind.

    df : attention rows, one per sample, of one device and shape.
    q_len : query tokens of the verify call; the largest in ``df`` when None.
    read_gb_per_s : measured read bandwidth, of all rows or per run_id; without it no floor is drawn.
    cache_bytes : size of the last-level cache; the contexts whose keys and values fit into it are shaded.

    Raises InputError as `attention_table`, and when ``q_len`` was not measured.
    """
    ax, table = axes_or_new(ax), attention_table(df, read_gb_per_s)
    ends, verify = _draw_curves(ax, table, "attention_us", q_len, cache_bytes=cache_bytes, labels=labels, styles=styles)
    floor = verify.drop_duplicates("context_len").sort_values("context_len")
    if floor["floor_us"].notna().all():
        x, y = floor["context_len"].to_numpy(float), floor["floor_us"].to_numpy(float)
        ax.plot(x, y, color="0.0", linewidth=1.2)
        ends.add(x[-1], y[-1], _with_slope("floor", slope_us_per_1k(x, y)), color="0.0")
    ax.set_yscale("log")
    log_axis(ax.yaxis)
    ax.set_ylabel("attention time per layer (us)")
    return ax


@styled
def plot_bandwidth_share(
    df: pd.DataFrame,
    *,
    ax: Axes | None = None,
    q_len: int | None = None,
    read_gb_per_s: Bandwidth = None,
    **options: Any,
) -> Axes:
    """Unique bytes per time as a share of the read bandwidth measured in the same run, against context, per backend.

    Solid at ``q_len``, thin dashes at q_len 1; the black line at 1 is the bandwidth. A share above 1 means that the
    cache served a part. Parameters, options and errors as `plot_attention_time`; ``read_gb_per_s`` must be known here.
    """
    ax, table = axes_or_new(ax), attention_table(df, read_gb_per_s)
    if table["share"].isna().all():
        raise InputError("read_gb_per_s: want the read bandwidth of the run, for the share; got none")
    ends, _ = _draw_curves(ax, table, "share", q_len, **options)
    ax.axhline(1.0, color="0.0", linewidth=1.2, gid="guide", zorder=1.5)
    ends.add(ax.get_xlim()[1], 1.0, "read bandwidth", color="0.0")
    ax.set_ylim(0.0, max(1.08, 1.05 * table["share"].max()))
    ax.set_ylabel("share of read bandwidth")
    return ax


@styled
def figure_attention(
    df: pd.DataFrame,
    *,
    sidecars: Mapping[str, Mapping[str, Any]] | None = None,
    q_len: int | None = None,
    backends: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
) -> Figure:
    """Time per layer and share of the read bandwidth, side by side (stacked at column width).

    df : attention rows of one device and shape.
    sidecars : run_id -> sidecar (`labkit.results.load_sidecars`); their calibration has the read bandwidth and the
        cache size. Without a bandwidth there is only the first panel, without floor.
    backends : which to draw; None: the first `MAX_BACKENDS` of `labkit.plots.style.attention_order`.

    Raises InputError as `plot_attention_time`, and when one of ``backends`` was not measured.
    """
    sidecars = sidecars or {}
    bandwidth, caches = read_bandwidths(sidecars), set(calibrated(sidecars, "cache_bytes").values())
    df, note = _chosen(df, backends)
    table = attention_table(df, bandwidth)
    styles = series_styles(attention_order(table["backend"].unique()))
    options: dict[str, Any] = {"q_len": verify_q_len(table, q_len), "read_gb_per_s": bandwidth, "labels": labels}
    options |= {"cache_bytes": max(caches, default=None), "styles": styles}
    draws = [plot_attention_time] + ([plot_bandwidth_share] if table["share"].notna().any() else [])
    stacked = width_in <= 5
    shape = (len(draws), 1) if stacked else (1, len(draws))
    # Two lines of label for each backend and for the floor must fit beside a panel.
    panel = max(2.1 if stacked else 2.4, 0.27 * (table["backend"].nunique() + 1))
    figure = new_figure(width_in, 1.05 + panel * shape[0])
    axes = figure.subplots(*shape, squeeze=False, sharex=True).ravel()
    for draw, ax in zip(draws, axes, strict=True):
        draw(df, ax=ax, **options)
        if stacked and ax is not axes[-1]:
            ax.set_xlabel("")
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=INK, linewidth=1.4), f"verify, q_len {options['q_len']}")
    ]
    if options["q_len"] > 1 and (table["q_len"] == 1).any():
        entries.append((Line2D([], [], color=INK, linewidth=0.8, linestyle=_DASHED), "decode, q_len 1"))
    if not table["newest"].all():
        entries.append((Line2D([], [], color=INK, linewidth=0.6, alpha=0.35), "older version of the backend"))
    if table["floor_us"].notna().any():
        entries.append((Line2D([], [], color="0.0", linewidth=1.2), "floor: keys and values read once"))
    if caches and fitting_context(table, max(caches)) > table["context_len"].min():
        text = f"keys and values fit in the last-level cache ({max(caches) / 2**20:.0f} MiB)"
        entries.append((Patch(facecolor="0.93", linewidth=0), text))
    return finished(figure, "What verify attention costs", describe(df, bandwidth, labels) + note, entries)


def _chosen(df: pd.DataFrame, backends: Sequence[str] | None) -> tuple[pd.DataFrame, str]:
    """The rows of the backends to draw, and a note when some are left out."""
    known = attention_order(ok_rows(df, "attention", ["backend"])["backend"].unique())
    if missing := [name for name in backends or () if name not in known]:
        raise InputError(f"backends: want some of {', '.join(known)}; got {missing[0]!r}")
    wanted = list(backends or known[:MAX_BACKENDS])
    left = [name.replace("triton_ladder_", "ladder ") for name in known if name not in wanted]
    note = f" · {len(wanted)} of {len(known)} backends, not drawn: {', '.join(left)}" if left else ""
    return df[df["backend"].isin(wanted)], note


def _draw_curves(
    ax: Axes,
    table: pd.DataFrame,
    column: str,
    q_len: int | None,
    *,
    cache_bytes: float | None = None,
    labels: Mapping[str, str] | None = None,
    styles: Mapping[str, SeriesStyle] | None = None,
) -> tuple[EndLabels, pd.DataFrame]:
    """A column of every backend against context, labelled at the line ends; the labels, and the cells at ``q_len``."""
    q_len = verify_q_len(table, q_len)
    context_axis(ax, table["context_len"].min(), table["context_len"].max())
    limits, cached = ax.get_xlim(), fitting_context(table, cache_bytes or 0.0)
    if cached > table["context_len"].min():
        ax.axvspan(limits[0], min(cached, limits[1]), color="0.93", linewidth=0, zorder=0)
        ax.set_xlim(limits)
    ends, notes, is_time = EndLabels(ax), Notes(ax), column == "attention_us"
    styles = styles or series_styles(table["backend"].drop_duplicates())
    for backend, rows in by_name(table, "backend"):
        style, now = styles[backend], rows[rows["newest"]]
        for _, old in rows[~rows["newest"] & (rows["q_len"] == q_len)].groupby("backend_digest"):
            ax.plot(old["context_len"], old[column], color=style.color, linewidth=0.6, alpha=0.35, zorder=1.8)
        if q_len > 1:
            for part in kernel_segments(now[now["q_len"] == 1]):
                _draw_line(ax, part, column, style, thin=True)
        segments = kernel_segments(now[now["q_len"] == q_len])
        for part in segments:
            if is_time:
                low, high = part["attention_us_low"], part["attention_us_high"]
                ax.fill_between(part["context_len"], low, high, color=style.color, alpha=0.2, linewidth=0)
            _draw_line(ax, part, column, style, thin=False)
        if not segments:
            continue
        last, text = segments[-1], (labels or {}).get(backend, backend)
        if is_time:
            _tag_kernels(segments, column, style, notes)
            slope = slope_us_per_1k(last["context_len"].to_numpy(float), last[column].to_numpy(float))
            text = _with_slope(text, slope)
        ends.add(last["context_len"].iloc[-1], last[column].iloc[-1], text, color=style.color)
    return ends, table[table["q_len"] == q_len]


def _draw_line(ax: Axes, part: pd.DataFrame, column: str, style: SeriesStyle, thin: bool) -> None:
    width, dashes, size = (0.8, _DASHED, 2.2) if thin else (1.4, "-", 3.4)
    x, y, face = part["context_len"], part[column], "white" if thin else style.color
    ax.plot(x, y, color=style.color, linewidth=width, linestyle=dashes)
    dots: dict[str, Any] = {"marker": style.marker, "markersize": size, "markerfacecolor": face, "markeredgewidth": 0.7}
    ax.plot(x, y, linestyle="none", color=style.color, clip_on=False, zorder=3, **dots)


def _tag_kernels(segments: list[pd.DataFrame], column: str, style: SeriesStyle, notes: Notes) -> None:
    for before, after in pairwise(segments):
        left, right = before.iloc[-1], after.iloc[0]
        x = float(np.sqrt(left["context_len"] * right["context_len"]))
        low, high = sorted((left[column], right[column]))
        notes.add(
            [(_change_of_kernel(str(left["kernel"]), str(right["kernel"])), style.color)],
            stretch=(x, low, high),
            size=6.0,
            leader=True,
        )


def _change_of_kernel(before: str, after: str) -> str:
    """``keys split``, ``keys no longer split``, else the word of the new kernel that the old one lacks."""
    for sign in (r"(?<!un)split", "merge|combine|reduce"):
        splits = [bool(re.search(sign, name, re.IGNORECASE)) for name in (before, after)]
        if splits[0] != splits[1]:
            return "keys split" if splits[1] else "keys no longer split"
    known = set(re.findall(r"[\w#]+", before))
    new = [word.split("#")[0] for word in re.findall(r"[\w#]+", after) if word not in known] or ["another kernel"]
    return new[0] if len(new[0]) <= 18 else new[0][:17] + "…"


def _with_slope(name: str, slope: float) -> str:
    return name if np.isnan(slope) else f"{name}\n{slope_text(slope)}"


def describe(df: pd.DataFrame, bandwidth: Mapping[str, float], labels: Mapping[str, str] | None = None) -> str:
    """The setting that a figure's rows share, as its subtitle."""
    first = ok_rows(df, "attention", ["gpu"]).iloc[0]
    q_dtype, kv_dtype = first["q_dtype"], first["kv_dtype"]
    parts = [
        (labels or {}).get(str(first["gpu"]), str(first["gpu"])),
        f"{first['num_qo_heads']} query and {first['num_kv_heads']} KV heads of {first['head_dim']}",
        q_dtype if q_dtype == kv_dtype else f"{q_dtype}, {kv_dtype} KV",
        f"batch {first['batch_size']}",
        f"pages of {first['page_size']}, {first['page_order']}",
        f"{first['l2_state']} cache, {first['launch_mode']}",
        "plan not included",
    ]
    if bandwidth:
        parts.append(f"read bandwidth {np.median(list(bandwidth.values())):,.0f} GB/s")
    return " · ".join(parts)
