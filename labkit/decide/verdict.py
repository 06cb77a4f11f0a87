"""Stored runs in, verdicts out: what `labkit breakeven`, the tour and the notebooks have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from labkit.breakeven import Breakeven, breakeven, verdict_table
from labkit.errors import InputError
from labkit.results import find_runs, load_runs
from labkit.rows import listed


def parse_length(text: str) -> float | tuple[float, float, float]:
    """``X`` or ``X,low,high`` as numbers. Raises InputError for anything else."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise InputError(f"--acceptance-length: wanted X or X,low,high, got {text!r}")
    return values[0] if len(values) == 1 else (values[0], values[1], values[2])


def fixed_context(rows: pd.DataFrame) -> pd.DataFrame:
    """The loop rows that are costs: those of runs at a fixed context (all drafts rejected, origin forced)."""
    return rows[rows["origin"] == "forced"]


def cost_rows(*paths: Path | str, gpu: str | None = None) -> pd.DataFrame:
    """The rows that are costs at the paths: loop runs at a fixed context, or step runs where there is no loop run.

    Raises InputError: neither is there, a broken run, or loop runs that only generated from prompts.
    """
    if not _holds("loop", paths, gpu) and _holds("step", paths, gpu):
        return load_runs("step", *paths, gpu=gpu)
    rows = fixed_context(load_runs("loop", *paths, gpu=gpu))
    if rows.empty:
        raise InputError("cost: these loop runs generated from prompts; wanted a cost run (acceptance=none)")
    return rows


def _holds(experiment: str, paths: Sequence[Path | str], gpu: str | None) -> bool:
    try:
        return bool(find_runs(experiment, *paths, gpu=gpu))
    except InputError:
        return False


def verdict_from_files(
    cost_paths: Sequence[Path | str],
    *,
    acceptance_paths: Sequence[Path | str] | None = None,
    acceptance_length: str | None = None,
    acceptance_from: str | None = None,
    baseline: str = "fastest",
    gpu: str | None = None,
) -> Breakeven:
    """Join stored costs (`cost_rows`) with stored acceptance or an imposed length; see `labkit.breakeven.breakeven`.

    Raises InputError: no run where one was named, a broken one, or sides that do not join.
    """
    imposed = parse_length(acceptance_length) if acceptance_length is not None else None
    costs = cost_rows(*cost_paths, gpu=gpu)
    acceptance = load_runs("acceptance", *(acceptance_paths or ()), gpu=gpu) if imposed is None else imposed
    return breakeven(costs, acceptance, acceptance_from=acceptance_from, baseline=baseline)


def render(result: Breakeven) -> str:
    """What was measured, the verdicts as a table, then one line per crossing."""
    about = [listed(result.cells, name) for name in ("gpu", "target", "drafter")]
    lines = [f"{', '.join(about)} drafter", verdict_table(result.cells).to_string(index=False), ""]
    lines += crossing_lines(result)
    lines.append(f"baseline: {result.baseline}; intervals: {result.confidence:.0%}")
    return "\n".join(lines)


def crossing_lines(result: Breakeven) -> list[str]:
    """Where each curve crosses break-even, in words, with the interval; ``open``: beyond the measured cells.

    Along the context first, then along the batch size.
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
                lines.append(f"{name}: {claim} {crossing[axis]:,.0f} [{', '.join(bounds)}] {unit}")
    return lines
