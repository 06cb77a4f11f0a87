"""What notebooks 05 and 06 end with, and the tables they show, computed from the data."""

from typing import Any

import pandas as pd

from labkit.decide.best_k import SETTING
from labkit.decide.published import load_published, published_table
from labkit.decide.recommend import cell_text
from labkit.decide.surface import Surface
from labkit.plots.curves import matching_curves, turning_text
from labkit.plots.style import format_tokens
from labkit.plots.verdict import imposed_note
from labkit.rows import listed, matching


def best_table(surface: Surface) -> pd.DataFrame:
    """Best k per context and batch as text: k, speed-up and interval, ``off``; "?" where the interval holds 1."""
    if surface.best.empty:
        return pd.DataFrame()
    cells = [cell_text(row) for row in surface.best.to_dict("records")]
    table = surface.best.assign(cell=cells, workload=surface.best["workload"].fillna("imposed"))
    index = ["workload", "verify_backend", "context_len"]
    return table.pivot_table(index=index, columns="batch_size", values="cell", aggfunc="first")


def draft_length_answer(surface: Surface) -> str:
    """The best k of each text and backend, what one k everywhere loses, and where not to speculate."""
    cells = surface.result.cells
    lines = [f"How many tokens should a step draft on {listed(cells, 'gpu')} for {listed(cells, 'target')}?"]
    if surface.best.empty:
        return lines[0] + "\n- no acceptance was measured for these costs: only the break-even length is known."
    for key, rows in surface.regret.groupby(SETTING, dropna=False, sort=True):
        names: dict[str, Any] = dict(zip(SETTING, key, strict=True))
        best = rows.sort_values(["mean_regret", "num_speculative_tokens"]).iloc[0]
        own = matching(surface.best, names)
        text = "imposed length" if pd.isna(names["workload"]) else str(names["workload"]).replace("_", " ")
        line = f"- verify on {names['verify_backend']}, {text}: k = {best['num_speculative_tokens']} everywhere"
        line += f" loses at most {best['worst_regret']:.0%} of the best speed-up"
        undecided = own[~own["decided"].astype(bool)]
        off = own[own["best_k"] == 0]
        line += f"; off at {_places(off)}" if len(off) else ""
        line += f"; undecided at {_places(undecided)}" if len(undecided) else ""
        lines.append(line + ".")
    return "\n".join(lines)


def concurrency_answer(surface: Surface) -> str:
    """Up to how many concurrent requests speculation pays; or plainly that only one batch size was measured."""
    cells = surface.result.cells
    lines = [f"How many concurrent requests until speculation stops paying on {listed(cells, 'gpu')}?"]
    lines.append(f"{listed(cells, 'target')} · {listed(cells, 'drafter')} drafter{imposed_note(cells)}")
    batches = sorted(cells["batch_size"].unique())
    if len(batches) < 2:
        lines.append(f"- only batch {batches[0]:g} was measured here: the turning point is not known for this device.")
        lines.append("- `labkit run loop --set batch_size=1,4,16,64` measures it.")
    for curve in surface.result.turning_points:
        where = f"verify on {curve['verify_backend']}, context {format_tokens(curve['context_len'])}, "
        where += f"k = {curve['num_speculative_tokens']}"
        lines += [f"- {where}: {turning_text(crossing)}." for crossing in curve["crossovers"]]
    groups: dict[tuple[str, str, int], list[str]] = {}
    for found, rows in matching_curves(surface.result.turning_points, cells):
        if not found["crossovers"]:
            state = " or ".join(sorted(rows["verdict"].replace("cannot_pay", "loses").unique()))
            most = int(rows["batch_size"].max())
            groups.setdefault((found["verify_backend"], state, most), []).append(format_tokens(found["context_len"]))
    for (backend, state, most), contexts in groups.items():
        where = ", ".join(dict.fromkeys(contexts))
        lines.append(f"- verify on {backend}: {state} at every batch up to {most}, contexts {where}.")
    streams = published_streams()
    lost = streams[(streams["verdict"] == "loses") & (streams["batch_size"] > 1)]
    gained = streams[(streams["verdict"] == "pays") & (streams["batch_size"] == 1)]
    lines.append(
        f"- published: of {gained['arm'].str.split(' np').str[0].nunique()} drafters that gain at one stream "
        f"{lost['arm'].str.split(' np').str[0].nunique()} lose from {lost['batch_size'].min():.0f} streams on."
    )
    return "\n".join(lines)


def published_streams() -> pd.DataFrame:
    """The published case of one, two and four streams: speed-up per drafter, no interval."""
    table = published_table(load_published())
    return table[(table["case"] == "streams 1, 2, 4") & table["speedup"].notna()].reset_index(drop=True)


def _places(rows: pd.DataFrame) -> str:
    pairs = zip(rows["context_len"].astype(float), rows["batch_size"], strict=True)
    places = [f"{format_tokens(context)} x {batch}" for context, batch in pairs]
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
