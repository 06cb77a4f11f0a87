"""Step cost and break-even of engine pairings against context, and the ladder of backends at one cell."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.decide.forward_costs import FREE
from labkit.decide.pairings import Pairing, is_measured, measured_pairings, pairing_cells
from labkit.errors import InputError
from labkit.plots.canvas import finished, new_figure
from labkit.plots.curves import crossing_text
from labkit.plots.labels import EndLabels, Notes
from labkit.plots.step import COMPONENT_OF, COMPONENTS, MAX_PAIRS, default_k, describe
from labkit.plots.style import (
    INK,
    NOTE_SIZE,
    TEXT_WIDTH_IN,
    SeriesStyle,
    context_axis,
    format_tokens,
    log_axis,
    series_styles,
    styled,
)
from labkit.steps.table import PARTS, Sidecars, forward_table, one_setting

_DASHED, _DOTTED = (0, (3.0, 1.6)), (0, (1.0, 1.4))


@styled
def figure_pairings(
    step_rows: pd.DataFrame,
    *,
    acceptance_length: float,
    pairings: Sequence[Pairing] | None = None,
) -> Figure:
    """Left: the speculative step (solid) and the pairing's plain decode (dashed), ms. Right: their ratio, 95% band.

    The ratio is the break-even acceptance length: solid over the fastest plain decode of the cell (the verdict), dashed
    over the pairing's own, which flatters a pairing whose decode is slow too. The dotted line is ``acceptance_length``,
    imposed; crossings of the solid curves with it are marked. One row of panels per KV dtype.

    step_rows : of one GPU, target, batch size and weight dtype. pairings : default the first `MAX_PAIRS` measured.

    Raises InputError: rows of several settings, or nothing to draw.
    """
    for name in ("gpu", "target", "batch_size", "weight_dtype"):
        if step_rows.loc[step_rows["status"] == "ok", name].nunique() > 1:
            raise InputError(f"step rows: one figure holds one {name}; select one first")
    k = default_k(step_rows)
    pairings = list(pairings or measured_pairings(step_rows)[:MAX_PAIRS])
    measured = {
        str(dtype): [pairing for pairing in pairings if is_measured(rows, pairing, k)]
        for dtype, rows in step_rows.groupby("kv_dtype")
    }
    measured = {dtype: own for dtype, own in measured.items() if own}
    if not measured:
        raise InputError(f"pairings: none of {', '.join(p.label for p in pairings)} was measured at k = {k}")
    figure = new_figure(TEXT_WIDTH_IN, 1.2 + 2.2 * len(measured))
    axes = figure.subplots(len(measured), 2, squeeze=False, sharex=True, sharey="col")
    styles = series_styles([pairing.label for pairing in pairings])
    for row, (dtype, own) in enumerate(measured.items()):
        rows = step_rows[step_rows["kv_dtype"] == dtype]
        options: dict[str, Any] = {"num_speculative_tokens": k, "acceptance_length": acceptance_length}
        curves = [
            (one, *pairing_cells(rows, one, **options), pairing_cells(rows, one, baseline="own", **options)[0])
            for one in own
        ]
        _draw_times(axes[row][0], curves, styles)
        _draw_ratios(axes[row][1], curves, styles, acceptance_length)
        missing = ", ".join(pairing.label for pairing in pairings if pairing not in own)
        axes[row][0].set_title(f"{dtype} KV" + (f" (not measured: {missing})" if missing else ""))
        for ax in axes[row] if row < len(measured) - 1 else ():
            ax.set_xlabel("")
    solid = Line2D([], [], color=INK, linewidth=1.4)
    dashed = Line2D([], [], color=INK, linewidth=0.9, linestyle=_DASHED)
    entries: list[tuple[Artist, str]] = [
        (solid, "left: speculative step; right: over the fastest plain decode"),
        (dashed, "left: the pairing's plain decode; right: over the pairing's own plain decode"),
    ]
    title = "Only the pairing changes: what a step costs, and up to where it pays"
    return finished(figure, title, _subtitle(step_rows, k, acceptance_length, pairings), entries)


def _subtitle(step_rows: pd.DataFrame, k: int, acceptance_length: float, pairings: Sequence[Pairing]) -> str:
    table = forward_table(one_setting(step_rows))
    if step_rows["kv_dtype"].nunique() > 1:
        table = table.assign(kv_dtype=" and ".join(sorted(step_rows["kv_dtype"].dropna().unique())))
    roles = (f"{p.label}: {p.decode_backend} decodes, {p.verify_backend} verifies" for p in pairings)
    return " · ".join([describe(table, k, acceptance_length, FREE), *roles])


_Curve = tuple[Pairing, pd.DataFrame, list[dict[str, Any]], pd.DataFrame]


def _draw_times(ax: Axes, curves: Sequence[_Curve], styles: dict[str, SeriesStyle]) -> None:
    every = pd.concat([own for *_, own in curves])
    context_axis(ax, every["context_len"].min(), every["context_len"].max())
    ends = EndLabels(ax)
    for pairing, _, _, own in curves:
        own, style = own.sort_values("context_len"), styles[pairing.label]
        x = own["context_len"].to_numpy(float)
        ax.plot(x, own["decode_ms"], color=style.color, linewidth=0.9, linestyle=_DASHED)
        ax.plot(x, own["step_ms"], color=style.color, marker=style.marker, clip_on=False)
        ends.add(x[-1], own["step_ms"].iloc[-1], f"{own['step_ms'].iloc[-1]:,.3g} ms", color=style.color)
    _log_axis(ax, 10)
    ax.set_ylabel("time of a step (ms)")


def _draw_ratios(ax: Axes, curves: Sequence[_Curve], styles: dict[str, SeriesStyle], acceptance_length: float) -> None:
    every = pd.concat([cells for _, cells, _, _ in curves])
    limits = (every["context_len"].min(), every["context_len"].max())
    context_axis(ax, *limits)
    ends, notes = EndLabels(ax), Notes(ax)
    ax.axhline(acceptance_length, color="0.0", linewidth=0.9, linestyle=_DOTTED, gid="guide")
    ends.add(ax.get_xlim()[1], acceptance_length, f"{acceptance_length:g} tokens", color="0.0")
    for pairing, cells, crossovers, own in curves:
        color, marker = styles[pairing.label].color, styles[pairing.label].marker
        cells, own = cells.sort_values("context_len"), own.sort_values("context_len")
        x = cells["context_len"].to_numpy(float)
        low, high = cells["relative_step_cost_low"], cells["relative_step_cost_high"]
        ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        ax.plot(x, cells["relative_step_cost"], color=color, marker=marker, clip_on=False)
        ax.plot(own["context_len"], own["relative_step_cost"], color=color, linewidth=0.9, linestyle=_DASHED)
        ends.add(x[-1], cells["relative_step_cost"].iloc[-1], pairing.label.replace(", ", ",\n"), color=color)
        for crossing in [found for curve in crossovers for found in curve["crossovers"]]:
            at = crossing["context_len"]
            bottom = every["relative_step_cost"].min()
            ax.plot([at, at], [bottom, acceptance_length], color=color, linewidth=0.7, gid="guide")
            ax.plot([at], [acceptance_length], color=color, marker="o", markersize=5, markerfacecolor="white", zorder=4)
            notes.add([(crossing_text(crossing, limits), color)], stretch=(at, bottom, acceptance_length))
    _log_axis(ax, 2)
    ax.set_ylabel("step / plain decode\n(break-even acceptance length)")


def _log_axis(ax: Axes, base: int) -> None:
    ax.set_yscale("log", base=base)
    low, high = ax.get_ylim()
    log_axis(ax.yaxis, base, (1.0, 2.0, 5.0) if base == 10 and high / low < 1000 else (1.0,))


def ladder_table(
    step_rows: pd.DataFrame,
    *,
    context_len: float | None = None,
    q_len: int | None = None,
    sidecars: Sidecars | None = None,
) -> pd.DataFrame:
    """The verify forwards of every backend at one cell, the slowest attention first: how far a faster kernel carries.

    Returns rows of `labkit.steps.table.forward_table` with attention_gain and step_gain (time of the rung before over
    this one's; NaN at the first), and bottleneck (the largest part) with its share of the forward. By default the
    longest context and the q_len of `default_k`, of the setting with most forwards.

    Raises InputError: fewer than two backends with a profile at the cell.
    """
    table = forward_table(one_setting(step_rows), sidecars)
    q_len = default_k(step_rows) + 1 if q_len is None else q_len
    rows = table[(table["phase"] == "verify") & (table["q_len"] == q_len) & table["residual_ms"].notna()]
    counts = rows.groupby("context_len")["backend"].nunique()
    if context_len is None and (counts > 1).any():
        context_len = counts.index[counts > 1].max()
    rows = rows[rows["context_len"] == context_len].sort_values("attention_ms", ascending=False, ignore_index=True)
    if len(rows) < 2:
        raise InputError("ladder: want two backends with profiled verify forwards at one cell; not measured")
    parts = rows[list(PARTS)].fillna(0.0)
    names = {f"{name}_ms": name for name in ("attention", "linear", "other", "sampling", "communication", "gap")}
    return rows.assign(
        attention_gain=rows["attention_ms"].shift() / rows["attention_ms"],
        step_gain=rows["forward_ms"].shift() / rows["forward_ms"],
        bottleneck=parts.idxmax(axis=1).map(names),
        bottleneck_share=parts.max(axis=1) / rows["forward_ms"],
    )


def _draw_rung(ax: Axes, place: int, row: pd.Series, whole: float) -> set[str]:
    left, drawn = 0.0, set()
    for part, name in COMPONENT_OF.items():
        if row[part] > 0:
            ax.barh(place, row[part] / whole, left=left / whole, height=0.62, color=COMPONENTS[name], linewidth=0)
            left += row[part]
            drawn.add(name)
    return drawn


@styled
def figure_step_ladder(step_rows: pd.DataFrame, **cell: Any) -> Figure:
    """`ladder_table` as bars. Left: ms, with the gains over the rung above. Right: the share of each part.

    cell : context_len, q_len and sidecars as `ladder_table` takes them. Raises InputError as `ladder_table`.
    """
    table = ladder_table(step_rows, **cell)
    figure = new_figure(TEXT_WIDTH_IN, 1.3 + 0.3 * len(table))
    left_ax, right_ax = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1.0))
    longest, drawn = table["forward_ms"].max(), set()
    for place, (_, row) in enumerate(table.iterrows()):
        for ax, whole in ((left_ax, 1.0), (right_ax, row["forward_ms"] / 100)):
            drawn |= _draw_rung(ax, place, row, whole)
        text = f"{row['forward_ms']:,.3g} ms"
        if np.isfinite(row["step_gain"]):
            text += f": attention {row['attention_gain']:.2f}x, step {row['step_gain']:.2f}x"
        left_ax.text(row["forward_ms"] + 0.015 * longest, place, text, va="center", size=NOTE_SIZE)
    if np.isfinite(table["floor_ms"].iloc[0]):
        left_ax.axvline(table["floor_ms"].iloc[0], color="0.0", linewidth=1.2, zorder=3)
    left_ax.set(xlim=(0, 1.3 * longest), ylim=(len(table) - 0.45, -0.55), xlabel="time of a verify forward (ms)")
    right_ax.set(xlim=(0, 100), xlabel="share of the forward (%)")
    left_ax.set_yticks(range(len(table)), list(table["backend"]))
    for ax in (left_ax, right_ax):
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False, axis="y")
    first = table.iloc[0]
    where = f"context {format_tokens(first['context_len'])}, q_len {first['q_len']}, batch {first['batch_size']}"
    setting = f"{first['gpu']} · {first['target']} · {first['weight_dtype']} weights, {first['kv_dtype']} KV"
    note = "gains are over the bar above"
    entries: list[tuple[Any, str]] = [
        (Patch(facecolor=COMPONENTS[name], linewidth=0), name) for name in COMPONENTS if name in drawn
    ]
    if np.isfinite(first["floor_ms"]):
        entries.append((Line2D([], [], color="0.0", linewidth=1.2), "floor: weights, states, keys and values once"))
    return finished(figure, "A faster kernel is not a faster step", f"{setting} · {where} · {note}", entries)
