"""Stored runs in, verdicts out: what `labkit breakeven`, the tour and the notebooks have in common."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.axes import keep_where
from labkit.breakeven import Breakeven, breakeven, verdict_table
from labkit.decide.composed import cost_rows, stored_costs
from labkit.decide.intervals import CONFIDENCE
from labkit.errors import InputError
from labkit.paths import check_out
from labkit.results import load_runs
from labkit.rows import distinct, is_missing, listed

MOST_CELLS = 40  # printed one by one
PRINTED_SETTING = ["gpu", "target", "drafter", "batch_size", "draft_backend", "weight_dtype", "kv_dtype"]


def parse_length(text: str) -> float | tuple[float, float, float]:
    """``X`` or ``X,low,high`` as numbers. Raises InputError for anything else."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise InputError(f"--acceptance-length: wanted X or X,low,high, got {text!r}")
    return values[0] if len(values) == 1 else (values[0], values[1], values[2])


def judging_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that `labkit breakeven` and `labkit best-k` have in common."""
    names = ("acceptance_length", "acceptance_from", "baseline", "where")
    return {name: getattr(arguments, name) for name in names}


def verdict_from_files(
    cost_paths: Sequence[Path | str],
    *,
    acceptance_paths: Sequence[Path | str] | None = None,
    acceptance_length: str | None = None,
    acceptance_from: str | None = None,
    baseline: str = "fastest",
    where: Sequence[str] = (),
) -> Breakeven:
    """Join stored costs of loop and step runs (`labkit.decide.composed.cost_rows`) with stored acceptance or an imposed
    length; see `labkit.breakeven.breakeven`.

    where : ``column=value,..`` of the cells to keep.

    Raises InputError: no run where one was named, a broken one, sides that do not join, or nothing that is kept.
    """
    imposed = parse_length(acceptance_length) if acceptance_length is not None else None
    costs = cost_rows(stored_costs(cost_paths))
    acceptance = load_runs("acceptance", *(acceptance_paths or ())) if imposed is None else imposed
    result = breakeven(costs, acceptance, acceptance_from=acceptance_from, baseline=baseline)
    return restricted(result, keep_where(result.cells, where)) if where else result


def restricted(result: Breakeven, cells: pd.DataFrame) -> Breakeven:
    """The same verdicts with some of their cells, and the curves that these lie on."""
    from labkit.plots.curves import matching_curves  # loads matplotlib, which a plain verdict does without

    found: list[list[Any]] = [
        [curve for curve, _ in matching_curves(curves, cells)] for curves in (result.crossovers, result.turning_points)
    ]
    return replace(result, cells=cells.reset_index(drop=True), crossovers=found[0], turning_points=found[1])


def render(result: Breakeven, *, everything: bool = False) -> str:
    """What was measured, the verdicts as a table, then one line per crossing.

    Up to ``MOST_CELLS`` cells are printed one by one. Of more, the setting (``PRINTED_SETTING``) with most cells is
    printed with one line per curve, and the others are named with their number of cells; ``everything``: all cells.
    """
    if everything or len(result.cells) <= MOST_CELLS:
        table, rest = verdict_table(result.cells), acceptance_notes(result.cells)
        # What is said below the table is left out of the cells' reasons.
        own = table["reason"].str.split("; ")
        table["reason"] = ["; ".join(part for part in parts if part not in rest) for parts in own]
    else:
        all_cells = result.cells
        result, rest = _one_setting(result)
        rest = [*not_judged_lines(all_cells[all_cells["speedup"].isna()]), *rest]
        table = curve_table(result.cells)
    about = [listed(result.cells, name) for name in ("gpu", "target", "drafter")]
    lines = [f"{', '.join(about)} drafter", table.to_string(index=False), "", *crossing_lines(result), *rest]
    return "\n".join([*lines, f"baseline: {result.baseline}; intervals: {CONFIDENCE:.0%}"])


def _one_setting(result: Breakeven) -> tuple[Breakeven, list[str]]:
    """The setting with most cells, and lines that name the others."""
    groups = [(key, rows) for key, rows in result.cells.groupby(PRINTED_SETTING, dropna=False, sort=True)]
    varying = [name for name in PRINTED_SETTING if len(distinct(result.cells, name)) > 1]
    chosen = max(range(len(groups)), key=lambda index: len(groups[index][1]))
    names = []
    for key, rows in groups:
        values = dict(zip(PRINTED_SETTING, key, strict=True))
        told = [f"{name}={values[name]}" for name in varying if not is_missing(values[name])]
        names.append((" ".join(map(shlex.quote, told)), len(rows)))
    lines = [
        f"one line per curve of {names[chosen][0] or 'the one setting'}; breakeven --all: {len(result.cells)} cells"
    ]
    others = [f"  --where {name}   ({count} cells)" for index, (name, count) in enumerate(names) if index != chosen]
    lines += [f"not shown: {len(others)} further settings", *others] if others else []
    return restricted(result, groups[chosen][1]), [*acceptance_notes(groups[chosen][1]), *lines]


def not_judged_lines(cells: pd.DataFrame) -> list[str]:
    """Per k in how many cells there is no speed-up, and the first reason; a listing of curves does not show it."""
    lines = []
    for k, own in cells.groupby("num_speculative_tokens"):
        reasons = own["reason"].fillna("unknown").str.split("; ").str[0].value_counts()
        more = f" and {len(reasons) - 1} more reasons (--json)" if len(reasons) > 1 else ""
        lines.append(f"k = {k} not judged in {len(own)} of its cells: {reasons.index[0]}{more}")
    return lines


def acceptance_notes(cells: pd.DataFrame) -> list[str]:
    """In what the acceptance behind cells differs from their cost: device, dtypes, target."""
    parts = pd.Series([part for reason in cells["reason"].dropna() for part in reason.split("; ")], dtype=object)
    notes = parts[parts.str.startswith("acceptance ")].drop_duplicates().tolist()
    changes_tokens = any("dtype" in note for note in notes)
    return notes + ["another dtype may choose other tokens: no acceptance of this cost's own"] * changes_tokens


def curve_table(cells: pd.DataFrame) -> pd.DataFrame:
    """One row per curve of one setting: contexts, break-even length and speed-up at both ends, verdicts counted."""
    rows = []
    for key, curve in cells.groupby(["workload", "num_speculative_tokens", "verify_backend"], dropna=False, sort=True):
        ends = curve.sort_values("context_len").iloc[[0, -1]]
        counts = curve["verdict"].value_counts()
        rows.append(
            dict(zip(("workload", "k", "verify_backend"), key, strict=True))
            | {"context": " to ".join(f"{value:.0f}" for value in ends["context_len"])}
            | {"break-even length": _ends(ends["relative_step_cost"]), "speed-up": _ends(ends["speedup"])}
            | {"verdicts": ", ".join(f"{count} {name}" for name, count in counts.items())}
        )
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def _ends(values: pd.Series) -> str:
    return " to ".join("unknown" if is_missing(value) else f"{value:.2f}" for value in values)


def crossing_lines(result: Breakeven) -> list[str]:
    """Where each curve crosses break-even, in words, with the interval; ``open``: beyond the measured cells.

    Along the context first, then along the batch size. Behind it the decided cells that bound it.
    """
    lines = []
    all_curves = [*result.crossovers, *result.turning_points]
    told = ("gpu", "target", "drafter", "batch_size", "draft_backend", "weight_dtype", "kv_dtype", "temperature")
    varying = [name for name in told if len({str(curve.get(name)) for curve in all_curves}) > 1]
    for curves, axis, unit in (
        (result.crossovers, "context_len", "tokens of context"),
        (result.turning_points, "batch_size", "concurrent requests"),
    ):
        for curve in curves:
            name = f"{curve['verify_backend']}, k={curve['num_speculative_tokens']:.0f}"
            name += f", {curve['workload'] or 'imposed'}"
            name += f", context {curve['context_len']:,.0f}" if axis == "batch_size" else ""
            for field in varying:
                value = curve.get(field)
                if field != axis and value is not None:
                    name += f", {f'batch {value:.0f}' if field == 'batch_size' else value}"
            for crossing in curve["crossovers"]:
                bounds = ["open" if crossing[side] is None else f"{crossing[side]:,.0f}" for side in ("low", "high")]
                claim = crossing["direction"] if crossing["decided"] else "undecided around"
                sides = [
                    f"no decided cell beside it {verdict}" if at is None else f"{verdict} at {at:,.0f}"
                    for verdict, at in (("pays", crossing["pays_at"]), ("loses", crossing["loses_at"]))
                ]
                lines.append(f"{name}: {claim} {crossing[axis]:,.0f} [{', '.join(bounds)}] {unit} ({', '.join(sides)})")
    return lines


def run_from_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """`labkit breakeven`."""
    from labkit.publish.tables import FORMATS, write_table

    if arguments.out:
        check_out(arguments.out, FORMATS)
    result = verdict_from_files(arguments.cost, acceptance_paths=arguments.acceptance, **judging_options(arguments))
    if arguments.out:
        write_table(result, arguments.out)
    return result.to_dict(), render(result, everything=arguments.all), 0
