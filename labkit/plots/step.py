"""Where the step goes: plain decode and the speculative step as pairs of stacked bars, with the line of what pays."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.decide.forward_costs import FREE, draft_forwards
from labkit.decide.pairings import Pairing, drafter_rows, measured_pairings, pairing_cells
from labkit.errors import InputError
from labkit.plots.canvas import finished, new_figure
from labkit.plots.style import INK, MUTED, NOTE_SIZE, TEXT_WIDTH_IN, format_tokens, signed, styled, text_color
from labkit.rows import matching
from labkit.steps.table import PARTS, Sidecars, forward_table, one_setting

# Colour of each component, from the bottom of a bar up.
COMPONENTS = {
    "linear layers": "#0072B2",
    "other layers": "#56B4E9",
    "target attention": "#D55E00",
    "draft attention": "#E69F00",
    "draft rest": "#F0E442",
    "accept": "#009E73",
    "communication": "#CC79A7",
    "gap": "0.80",
}
RESIDUAL = "residual"
COMPONENT_OF = {
    "linear_ms": "linear layers",
    "other_ms": "other layers",
    "attention_ms": "target attention",
    "sampling_ms": "accept",
    "communication_ms": "communication",
    "gap_ms": "gap",
}
_HATCH: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.45", "hatch": "//////", "linewidth": 0.5}
_PAYS, _LOSES = "#009E73", "#D55E00"
MAX_PAIRS, MAX_PANELS = 3, 3


def default_k(step_rows: pd.DataFrame) -> int:
    """7 where a q_len of 8 was verified (what the published comparison ran), else the largest k there is.

    Raises InputError: no verify forward.
    """
    ok = step_rows["status"] == "ok"
    lengths = step_rows.loc[ok & (step_rows["phase"] == "verify") & (step_rows["q_len"] > 1), "q_len"]
    if lengths.empty:
        raise InputError("step rows: want a verify forward of two or more tokens; got none")
    return 7 if (lengths == 8).any() else int(lengths.max()) - 1


def step_parts(
    table: pd.DataFrame, pairing: Pairing, *, context_len: float, num_speculative_tokens: int, drafter: str = FREE
) -> dict[str, dict[str, float]]:
    """`COMPONENTS`, `RESIDUAL` and "total" of "plain" and "speculative", ms; `table` is of `labkit.steps.table`.

    The speculative step is one verify forward and the drafter's (`labkit.decide.forward_costs.draft_forwards`);
    accept is sampling. The residual is the total less the parts; NaN where a forward was not profiled.

    Raises InputError: a forward that the step needs was not measured at this context.
    """
    k, here = num_speculative_tokens, table[table["context_len"] == context_len]
    found = {}
    for name, phase, backend, q_len in (
        ("plain", "decode", pairing.decode_backend, 1),
        ("speculative", "verify", pairing.verify_backend, k + 1),
    ):
        row = _forward(here, phase=phase, backend=backend, q_len=q_len)
        parts = {component: float(np.nan_to_num(row[part])) for part, component in COMPONENT_OF.items()}
        found[name] = parts | {RESIDUAL: float(row["residual_ms"]), "total": float(row["forward_ms"])}
    if drafter != FREE:
        own = drafter_rows(here, pairing, drafter)
        plan = draft_forwards(list(zip(own["phase"], own["q_len"], strict=True)), k)
        if plan is None:
            raise InputError(f"{drafter}: its forwards for {k} drafts were not measured at context {context_len:g}")
        step = found["speculative"]
        for (phase, q_len), count in plan:
            row = _forward(own, phase=phase, q_len=q_len)
            attention = float(np.nan_to_num(row["attention_ms"]))
            step["draft attention"] = step.get("draft attention", 0.0) + count * attention
            step["draft rest"] = step.get("draft rest", 0.0) + count * (float(row["forward_ms"]) - attention)
            step["total"] += count * float(row["forward_ms"])
    return found


def _forward(table: pd.DataFrame, **wanted: Any) -> pd.Series:
    if (table := matching(table, wanted)).empty:
        told = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise InputError(f"step rows: no forward with {told} at this context")
    return table.iloc[0]


@styled
def figure_step_parts(
    step_rows: pd.DataFrame,
    *,
    acceptance_length: float,
    sidecars: Sidecars | None = None,
    drafter: str = FREE,
    width_in: float = TEXT_WIDTH_IN,
) -> Figure:
    """One panel per context: for each pairing the fastest plain decode and the speculative step, ms, by component.

    The dashed line across a pair is ``acceptance_length`` (imposed) times the plain decode of the pair: a step under it
    pays. The printed margin is that line less the step; the verdict is `labkit.breakeven`'s.

    step_rows : of the setting (target, batch size, dtypes) with most forwards; select others first. Drawn are the first
        `MAX_PAIRS` of `measured_pairings` at `default_k`, and `MAX_PANELS` of their common contexts, evenly spread.

    Raises InputError: nothing to draw, or a forward that was not measured.
    """
    step_rows = one_setting(step_rows)
    table = forward_table(step_rows, sidecars)
    k, pairings = default_k(step_rows), measured_pairings(step_rows)[:MAX_PAIRS]
    options: dict[str, Any] = {"num_speculative_tokens": k, "drafter": drafter}
    cells = pd.concat(
        pairing_cells(step_rows, pairing, acceptance_length=acceptance_length, **options)[0] for pairing in pairings
    )
    contexts = _spread_contexts(cells, len(pairings))
    figure = new_figure(width_in, 3.3 if width_in > 5 else 1.0 + 2.2 * len(contexts))
    shape = (1, len(contexts)) if width_in > 5 else (len(contexts), 1)
    axes = figure.subplots(*shape, squeeze=False).ravel()
    drawn: set[str] = set()
    for ax, context in zip(axes, contexts, strict=True):
        for place, pairing in enumerate(pairings):
            cell = cells[(cells["label"] == pairing.label) & (cells["context_len"] == context)].iloc[0]
            parts = step_parts(table, pairing, context_len=context, **options)
            # Where two backends tie for the fastest, their names are joined; either is the baseline.
            decoder = replace(pairing, decode_backend=str(cell["decode_backend"]).partition("|")[0])
            parts["plain"] = step_parts(table, decoder, context_len=context, num_speculative_tokens=k)["plain"]
            drawn |= _draw_pair(ax, place, parts)
            _draw_line(ax, place, acceptance_length * parts["plain"]["total"], parts["speculative"]["total"], cell)
        _finish(ax, context, pairings)
    for ax in axes[: 1 if width_in > 5 else None]:
        ax.set_ylabel("time of a step (ms)")
    decoders = ", ".join(sorted({name for names in cells["decode_backend"].dropna() for name in names.split("|")}))
    note = f" · left bar: fastest plain decode ({decoders}), right bar: speculative step"
    entries: list[tuple[Any, str]] = [
        (Patch(facecolor=color, linewidth=0), name) for name, color in COMPONENTS.items() if name in drawn
    ]
    if RESIDUAL in drawn:
        entries.append((Patch(**_HATCH), "residual: not explained by the parts"))
    dashes = Line2D([], [], color=INK, linestyle=(0, (3, 2)), linewidth=1.0)
    entries.append((dashes, f"{acceptance_length:g} x plain decode: a step under it pays"))
    about = describe(table, k, acceptance_length, drafter) + note
    return finished(figure, "Where the step goes", about, entries)


def _spread_contexts(cells: pd.DataFrame, num_pairings: int) -> list[float]:
    counts = cells.groupby("context_len")["label"].nunique()
    shared = counts.index[counts == num_pairings]
    if not len(shared):
        raise InputError("step rows: want a context that all pairings were measured at; got none")
    picks = np.unique(np.linspace(0, len(shared) - 1, min(MAX_PANELS, len(shared))).round().astype(int))
    return [float(shared[index]) for index in picks]


def _draw_pair(ax: Axes, place: int, parts: dict[str, dict[str, float]]) -> set[str]:
    """Both bars of a pair; returns the components that are in them."""
    drawn = set()
    for offset, own in ((-0.2, parts["plain"]), (0.2, parts["speculative"])):
        bottom, x = 0.0, place + offset
        known = np.isfinite(own[RESIDUAL])
        for name, color in COMPONENTS.items():
            height = own.get(name, 0.0)
            if known and height > 0:
                ax.bar(x, height, 0.36, bottom=bottom, color=color, edgecolor="white", linewidth=0.4)
                bottom += height
                drawn.add(name)
        # Parts that exceed the total overlap the hatch; either way its ends are the sum and the measured time.
        low, high = sorted((bottom, own["total"]))
        if high - low > 0.002 * high:
            ax.bar(x, high - low, 0.36, bottom=low, **_HATCH)
            drawn.add(RESIDUAL)
        ax.plot([x - 0.18, x + 0.18], [own["total"]] * 2, color=INK, linewidth=0.8, solid_capstyle="butt")
    return drawn


def _draw_line(ax: Axes, place: int, line_ms: float, step_ms: float, cell: pd.Series) -> None:
    ax.plot([place - 0.44, place + 0.44], [line_ms] * 2, color=INK, linestyle=(0, (3, 2)), linewidth=1.0)
    verdict = {"cannot_pay": "loses"}.get(cell["verdict"], cell["verdict"])
    color = {"pays": _PAYS, "loses": _LOSES}.get(verdict, MUTED)
    margin = line_ms - step_ms
    text = f"{verdict}\n{signed(margin, 0 if abs(margin) >= 99.5 else 1 if abs(margin) >= 9.95 else 2)} ms"
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "size": NOTE_SIZE, "linespacing": 1.1}
    shade = text_color(color) if color != MUTED else MUTED
    ax.annotate(text, (place, max(line_ms, step_ms)), (0, 2), textcoords="offset points", color=shade, **look)


def _finish(ax: Axes, context: float, pairings: Sequence[Pairing]) -> None:
    ax.set_title(f"context {format_tokens(context)}")
    ax.set_ylim(0, 1.22 * ax.dataLim.y1)
    ax.set_xlim(-0.6, len(pairings) - 0.4)
    names = [_wrapped(pairing.label, 12 if len(pairings) > 2 else 18) for pairing in pairings]
    ax.set_xticks(range(len(pairings)), names, size=5.5)
    ax.tick_params(axis="x", length=0)


def _wrapped(label: str, width: int) -> str:
    """A label in lines of at most `width` letters, broken at blanks and underscores."""
    words = textwrap.wrap(label.replace("_", "_ "), width)
    return "\n".join(words).replace("_ ", "_")


def describe(table: pd.DataFrame, k: int, acceptance_length: float, drafter: str) -> str:
    """The setting of a step figure, as its subtitle."""
    first = table.iloc[0]
    weights, cache = first["weight_dtype"], first["kv_dtype"]
    parts = [
        str(first["gpu"]),
        str(first["target"]),
        weights if weights == cache else f"{weights} weights, {cache} KV",
        f"batch {first['batch_size']}",
        f"k = {k}",
        drafter if drafter == FREE else f"{drafter} drafter",
        f"acceptance length {acceptance_length:g}, imposed",
    ]
    if not table[list(PARTS)].notna().any(axis=None):
        parts.append("not profiled: parts unknown")
    return " · ".join(parts)
