"""How far each backend is from the floor at every context, and which change of a kernel closes the gap."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from labkit.errors import InputError
from labkit.plots.attention import describe
from labkit.plots.attention_table import Bandwidth, attention_table, cell_table, read_bandwidths, verify_q_len
from labkit.plots.canvas import finished, new_figure
from labkit.plots.style import INK, NOTE_SIZE, TEXT_WIDTH_IN, format_tokens, log_axis, series_styles, signed, styled

# Each rung changes one thing of the rung before.
LADDER: Mapping[str, str] = {
    "triton_nosplit": "no KV split, one query head per program",
    "triton_ladder_split": "keys split over programs",
    "triton_ladder_packed": "query heads of a KV head packed",
    "triton_ladder_staged": "loads ahead of the arithmetic",
    "triton_split": "tuned tiles and splits",
}
_WORST = 100.0  # times the floor; beyond it the colour no longer changes
_CELL_IN = 0.27  # width of a number of three digits
Sidecars = Mapping[str, Mapping[str, Any]]


@styled
def figure_over_floor(
    df: pd.DataFrame,
    *,
    sidecars: Sidecars,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
) -> Figure:
    """Time over the floor as a table of backend and context, at the largest q_len, best backend on top.

    Raises InputError as `labkit.plots.attention.plot_attention_time`, and without a read bandwidth.
    """
    bandwidth = read_bandwidths(sidecars)
    table = attention_table(df, bandwidth)
    q_len = verify_q_len(table, None)
    table = table[table["newest"] & (table["q_len"] == q_len)]
    if table["over_floor"].isna().all():
        raise InputError("time over the floor: want the read bandwidth of a run; none was measured")
    cells = table.pivot_table(index="backend", columns="context_len", values="over_floor")
    cells = cells.loc[cells.ffill(axis=1).iloc[:, -1].sort_values().index]
    cells = cells[_spaced(cells.columns, int((width_in - 1.3) / _CELL_IN))]
    figure = new_figure(width_in, 1.1 + 0.2 * len(cells))
    ax = figure.subplots()
    values = np.log(cells.clip(1.0, _WORST).to_numpy(float)) / np.log(_WORST)
    ax.pcolormesh(values, cmap="YlOrBr", vmin=-0.1, vmax=1.15, edgecolors="white", linewidth=1.0)
    for (row, column), ratio in np.ndenumerate(cells.to_numpy(float)):
        text = "\u2013" if np.isnan(ratio) else f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 1.995 else 2}f}"
        dark = values[row, column] > 0.75
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", size=7.0, color="white" if dark else INK)
    ax.set_xticks(np.arange(cells.shape[1]) + 0.5, [format_tokens(float(context)) for context in cells.columns])
    ax.set_yticks(np.arange(len(cells)) + 0.5, [(labels or {}).get(name, name) for name in cells.index])
    ax.set(ylim=(len(cells), 0), xlabel="context length (tokens)")
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return finished(figure, f"Attention time over the floor, q_len {q_len}", describe(df, bandwidth, labels))


def _spaced(contexts: pd.Index, most: int) -> list[float]:
    """At most ``most`` contexts: powers of two first, the longest ones kept."""
    powers = [value for value in contexts if np.log2(value) % 1 == 0]
    return list(contexts) if len(contexts) <= most else powers[::-1][:most][::-1]


def ladder_table(
    df: pd.DataFrame, read_gb_per_s: Bandwidth = None, *, q_len: int | None = None, context_len: float | None = None
) -> pd.DataFrame:
    """The rungs of `LADDER` at one cell of one run, in order: `cell_table` rows with the `gain` over the rung before.

    By default the cell with most rungs, of the longest context, largest q_len and latest run. Raises InputError when
    no run holds two rungs at such a cell, or for several settings.
    """
    attention_table(df)  # one setting
    cells = cell_table(df, read_gb_per_s)
    cells = cells[cells["backend"].isin(list(LADDER))]
    for name, value in (("q_len", q_len), ("context_len", context_len)):
        cells = cells if value is None else cells[cells[name] == value]
    cells = cells.sort_values("backend", key=lambda names: names.map(list(LADDER).index))
    keys = ["num_rungs", "context_len", "q_len", "run_id"]
    cells["num_rungs"] = cells.groupby(keys[1:])["backend"].transform("nunique")
    rows = cells[(cells[keys] == cells.sort_values(keys)[keys].iloc[-1]).all(axis=1)] if len(cells) else cells
    if len(rows) < 2:
        raise InputError(f"ladder: want two of {', '.join(LADDER)} in one run at one cell; not measured")
    rows = rows.reset_index(drop=True)
    return rows.assign(gain=rows["attention_us"].shift() / rows["attention_us"])


@styled
def figure_ladder(
    df: pd.DataFrame,
    *,
    sidecars: Sidecars,
    labels: Mapping[str, str] | None = None,
    width_in: float = TEXT_WIDTH_IN,
) -> Figure:
    """A waterfall of `ladder_table`, us on a log axis: each bar is what one change takes away (or adds).

    Raises InputError as `ladder_table`.
    """
    bandwidth = read_bandwidths(sidecars)
    table = ladder_table(df, bandwidth)
    figure = new_figure(width_in, 1.15 + 0.42 * len(table))
    ax = figure.subplots()
    color, before = series_styles(["triton_split"])["triton_split"].color, table["attention_us"].iloc[0]
    low = table[["attention_us", "floor_us"]].min().min() / 1.5
    start = 1.08 * np.nanmax([low, table["floor_us"].iloc[0]])
    for index, (_, row) in enumerate(table.iterrows()):
        time, first = row["attention_us"], index == 0
        left, right = sorted((low if first else before, time))
        shade = "0.6" if first else color if time <= before else "#D55E00"
        ax.barh(index + 0.16, right - left, left=left, height=0.4, color=shade, linewidth=0)
        gain = "" if first else f"  ({signed(time - before, 0)} us, {row['gain']:.3g}x)"
        ax.text(right * 1.06, index + 0.16, f"{time:,.0f} us{gain}", va="center", size=NOTE_SIZE)
        name = (labels or {}).get(row["backend"], row["backend"])
        ax.text(start, index - 0.2, f"{name}: {LADDER[row['backend']]}", va="center", size=NOTE_SIZE, color=INK)
        before = time
    if np.isfinite(table["floor_us"].iloc[0]):
        ax.axvline(table["floor_us"].iloc[0], color="0.0", linewidth=1.2, zorder=3)
    ax.set_xscale("log")
    ax.set(xlim=(low, table["attention_us"].max() * (5 if width_in > 5 else 12)), ylim=(len(table) - 0.45, -0.55))
    ax.set_yticks([])
    log_axis(ax.xaxis)
    ax.spines["left"].set_visible(False)  # nothing starts there: a log axis has no zero
    ax.set_xlabel("attention time per layer (us)\nblack: floor, keys and values read once")
    ax.grid(visible=False, axis="y")
    where = f"q_len {table['q_len'].iloc[0]}, context {format_tokens(table['context_len'].iloc[0])} · "
    missing = [name for name in LADDER if name not in set(table["backend"])]
    note = f" · not measured there: {', '.join(missing)}" if missing else ""
    about = where + describe(df, bandwidth, labels) + note
    return finished(figure, "From the slow kernel to the fast one", about)
