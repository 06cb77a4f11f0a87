"""The explorer's two panels, and what the pointer reads in them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from labkit.breakeven import Breakeven
from labkit.decide.cause import breakeven_floor
from labkit.plots.breakeven import ACCEPTANCE_ORIGINS, plot_breakeven
from labkit.plots.style import INK, NOTE_SIZE, display_name, format_tokens, series_styles
from labkit.plots.verdict import COLORS

_GUIDE: dict[str, Any] = {"gid": "guide", "zorder": 1.4, "color": "0.3"}
_MARK = "_context"


def points(found: Breakeven) -> list[tuple[float, float, str]]:
    """What the pointer can read: context_len (tokens), length (tokens per step) and what to say about it."""
    read = []
    for cell in found.cells.to_dict("records"):
        at = f"at {format_tokens(cell['context_len'])}; speed-up {cell['speedup']:.2f}, {cell['verdict']}"
        owners = {"relative_step_cost": cell["pairing"], "mean_acceptance_length": cell["workload"] or "typed length"}
        for name, owner in owners.items():
            what = "break-even length" if name == "relative_step_cost" else "acceptance length"
            about_text = (cell["origin"] in ACCEPTANCE_ORIGINS) == (name == "mean_acceptance_length")
            origin = cell["origin"] if about_text else "measured"
            interval = f"[{cell[f'{name}_low']:.2f}, {cell[f'{name}_high']:.2f}]"
            text = f"{owner}: {what} {cell[name]:.2f} {interval}, {origin}, {at}"
            read.append((float(cell["context_len"]), float(cell[name]), text))
    return read


def plot_choice(ax: Axes, found: Breakeven, *, context_range: Sequence[float]) -> None:
    """Break-even and acceptance length against context, marked at the ends of a range (tokens)."""
    cells = found.cells
    styles = series_styles(cells["pairing"].drop_duplicates())
    floor = breakeven_floor(cells)
    plot_breakeven(cells, ax=ax, crossovers=found.crossovers, floor=floor, hue="pairing", styles=styles)
    for end in context_range:
        ax.axvline(end, linewidth=0.8, linestyle=(0, (6, 3)), **_GUIDE)
    title = [f"k = {cells['num_speculative_tokens'].iloc[0]}", f"batch {cells['batch_size'].iloc[0]}"]
    title += [display_name(name, None) for name in cells["workload"].dropna().unique()]
    ax.set_title(" · ".join(title), y=1.0)  # told, or each drawing looks for it


def mark_context(ax: Axes, context_len: float) -> None:
    """A dotted line at a context (tokens), in place of the one that was there."""
    for line in [line for line in ax.lines if line.get_label() == _MARK]:
        line.remove()
    ax.axvline(context_len, linewidth=0.8, linestyle=(0, (1, 1.5)), label=_MARK, **_GUIDE)


def plot_parts(ax: Axes, parts: pd.DataFrame, acceptance_length: float) -> None:
    """Rows of `labkit.decide.cause.waterfall` at one context as stacked bars, in tokens per verify step, one a pairing.

    The dashed line is what a step yields (NaN: no line): what stands to its right is not paid for.
    """
    if parts.empty:  # no plain decode of this baseline here
        return
    names, shown = list(parts["pairing"].drop_duplicates()), list(dict.fromkeys(parts["part"]))
    table = (
        parts.pivot(index="pairing", columns="part", values="tokens").reindex(index=names, columns=shown).fillna(0.0)
    )
    left, key = np.zeros(len(names)), list[tuple[str, str, str]]()
    for name, tokens in zip(shown, table.to_numpy(float).T, strict=True):
        look: dict[str, Any] = {"facecolor": COLORS.get(name, "0.6"), "edgecolor": "white"}
        if name == "unexplained":
            look = {"hatch": "//////", "facecolor": "white", "edgecolor": "0.45"}
        if np.abs(tokens).max() > 0.004:
            ax.barh(range(len(names)), tokens, left=left, height=0.62, linewidth=0.5, label=name, **look)
            key.append(("\u25a8", "0.45", name) if "hatch" in look else ("\u25a0", look["facecolor"], name))
        left = left + tokens
    if np.isfinite(acceptance_length):
        ax.axvline(acceptance_length, color=INK, linewidth=1.0, linestyle=(0, (3, 2)))
        key.append(("\u254e", INK, "it yields"))
    ax.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.06 * np.nanmax([left.max(), acceptance_length])))
    ax.set_yticks(range(len(names)), names)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("cost of a step with k drafts (decode steps)")
    # Plain texts: a legend takes as long to draw as all the bars.
    look = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center", "size": NOTE_SIZE}
    for index, (sign, color, name) in enumerate(key):
        down = 8.2 * ((len(key) - 1) / 2 - index)
        ax.annotate(sign, (1, 0.5), (6, down), color=color, family="DejaVu Sans", **look)
        ax.annotate(name, (1, 0.5), (15, down), **look)
