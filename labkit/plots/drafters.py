"""Drafters side by side: what each has accepted, where, and what its drafts cost."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.acceptance import acceptance_table
from labkit.errors import InputError
from labkit.plots.acceptance import Styles, other_definition, plot_acceptance
from labkit.plots.canvas import axes_or_new, bars, finished, marks, new_figure
from labkit.plots.labels import EndLabels
from labkit.plots.style import TEXT_WIDTH_IN, display_name, series_styles, styled
from labkit.rows import distinct, listed, ok_rows


def drafter_label(name: str) -> str:
    """A head without the digest and the target in its name: ``smollm2-135m-block@1a2b3c4d+tree`` -> ``block, tree``."""
    base, _, rest = name.partition("@")
    option = rest.partition("+")[2]
    short = base.rpartition("-")[2] if rest and base.rpartition("-")[2] in ("autoregressive", "block") else base
    return f"{short}, {option}" if option else short


def pareto_table(acceptance: pd.DataFrame, loop: pd.DataFrame) -> pd.DataFrame:
    """Mean acceptance length and median time of a draft, by drafter and k.

    acceptance, loop : ok rows of one target; times of complete steps with drafts.

    Returns ``drafter num_speculative_tokens mean_acceptance_length (_low, _high) draft_ms is_best``: is_best where no
    other pair yields more tokens for less time. Raises InputError: no drafter and k in both.
    """
    by = ["drafter", "num_speculative_tokens"]
    lengths = acceptance_table(acceptance, by=by)
    steps = ok_rows(loop, "loop", ["draft_ms", *by])
    whole = (steps["origin"] == "measured") | (steps["num_drafted_tokens"] == steps["num_speculative_tokens"])
    steps = steps[(steps["arm"] == "speculative") & (steps["num_drafted_tokens"] > 0) & whole]
    table = lengths.merge(steps.groupby(by, as_index=False)["draft_ms"].median(), on=by)
    if table.empty:
        raise InputError("acceptance and loop rows: want a drafter and k that both hold; got none")
    table = table.sort_values(["draft_ms", "mean_acceptance_length"], ascending=[True, False]).reset_index(drop=True)
    best = table["mean_acceptance_length"].cummax()
    table["is_best"] = table["mean_acceptance_length"].gt(best.shift(fill_value=0.0))
    return table


@styled
def plot_length_against_draft_cost(acceptance: pd.DataFrame, loop: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Tokens per verify step against the time of a draft, a mark per drafter and k, the best pairs joined by a step.

    As `pareto_table`. Bars are 95 % intervals over prompts.
    """
    ax, table = axes_or_new(ax), pareto_table(acceptance, loop)
    styles = series_styles(table["drafter"].drop_duplicates())
    front = table[table["is_best"]]
    ax.step(front["draft_ms"], front["mean_acceptance_length"], where="post", color="0.6", linewidth=0.9, zorder=1)
    ends = EndLabels(ax)
    for name in map(str, table["drafter"].drop_duplicates()):
        rows = table[table["drafter"] == name]
        x, y = rows[["draft_ms", "mean_acceptance_length"]].to_numpy(float).T
        bounds = rows[["mean_acceptance_length_low", "mean_acceptance_length_high"]].to_numpy(float).T
        marks(ax, x, y, styles[name], hollow=False, size=4.2, yerr=bars(y, *bounds))
        # Marks of one drafter that hide each other have their k's side by side.
        near = (np.hypot(np.diff(x) / table["draft_ms"].max(), np.diff(y) / y.max()) > 0.03).cumsum()
        for _, group in rows.groupby(np.concatenate([[0], near])):
            place = tuple(group[["draft_ms", "mean_acceptance_length"]].mean())
            ks = ", ".join(f"{k:.0f}" for k in sorted(group["num_speculative_tokens"]))
            # On the left, where the ticks' labels begin, to the right of the mark.
            side, shift = ("left", 5) if place[0] < 0.05 * table["draft_ms"].max() else ("right", -4)
            ax.annotate(ks, place, (shift, 3), textcoords="offset points", fontsize=6, ha=side)
        ends.add(x.max(), y[np.argmax(x)], drafter_label(name), color=styles[name].color)
    ax.set_xlim(-0.03 * table["draft_ms"].max(), 1.06 * table["draft_ms"].max())
    ax.set_xlabel("draft time per step (ms); numbers at marks: k")
    ax.set_ylabel("tokens per verify step\n(pooled, bonus counted)")
    return ax


@styled
def figure_pareto(acceptance: pd.DataFrame, loop: pd.DataFrame) -> Figure:
    """`plot_length_against_draft_cost` of one target and temperature, with a header that says which."""
    figure = new_figure(3.6, 3.0)
    plot_length_against_draft_cost(acceptance, loop, ax=figure.subplots())
    device = f"{listed(acceptance, 'target')} · costs on {listed(loop, 'gpu')}"
    return finished(figure, "What a draft yields for its time", device)


@styled
def figure_drafters(df: pd.DataFrame) -> Figure:
    """Acceptance by position, in all, and by context, a colour per drafter, pooled over workloads.

    Of the largest k that all drafters have. Raises InputError: rows of several targets or temperatures, or no such k.
    """
    for name in ("target", "temperature"):
        if len(distinct(df, name)) > 1:
            raise InputError(f"acceptance rows: want one {name}; got {listed(df, name)}; select one first")
    ks = [set(distinct(rows, "num_speculative_tokens")) for _, rows in df.groupby("drafter")]
    shared = sorted(set.intersection(*ks)) if ks else []
    if not shared:
        raise InputError("num_speculative_tokens: want one that all drafters have; there is none")
    k = int(shared[-1])
    rows = df[df["num_speculative_tokens"] == k]
    names = {str(name): drafter_label(str(name)) for name in distinct(rows, "drafter")}
    styles: Styles = series_styles(distinct(rows, "drafter"))
    figure = new_figure(TEXT_WIDTH_IN, 2.9)
    titles = {"position": "by draft position", "workload": "in all", "context": "by context"}
    for ax, (along, name) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        plot_acceptance(rows, along, ax=ax, hue="drafter", labels=names, styles=styles)
        ax.set_title(name)
    workloads = ", ".join(display_name(name, None) for name in distinct(rows, "workload"))
    about = f"{listed(rows, 'target')} · k = {k} · {workloads} · 95 % intervals over prompts"
    return finished(figure, "Which drafter has how much accepted", about, [other_definition()])
