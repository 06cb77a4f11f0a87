"""`labkit run`: from typed words to a sweep, with a plan to look at first."""

import argparse
import re
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import axes
from labkit.acceptance import doubtful_drafters
from labkit.errors import InputError
from labkit.experiments import acceptance, attention, common, loop, step
from labkit.paths import cache_dir
from labkit.quality import kinds
from labkit.sweep import RunResult

MODULES: dict[str, ModuleType] = {"attention": attention, "acceptance": acceptance, "loop": loop, "step": step}
Shown = tuple[dict[str, Any], str, int]  # for JSON, as text, exit code
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_duration(text: str, option: str = "time") -> float:
    """``90``, ``90s``, ``20m`` or ``2h`` in seconds. Raises InputError, which names the option, for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match or float(match[1]) == 0:
        raise InputError(f"{option}: wanted a time such as 90s, 20m or 2h, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def presets_text() -> str:
    """The presets of every experiment, for `labkit run --help`."""
    known = (f"{name}: auto, {', '.join(module.PRESETS)}" for name, module in MODULES.items())
    return f"Presets of {'. '.join(known)}."


def run_from_arguments(arguments: argparse.Namespace) -> Shown:
    """Measure what `labkit run` was asked for. 0 when every point has a result, else 1: some failed or are left."""
    module = MODULES[arguments.experiment]
    timeout_s = parse_duration(arguments.timeout, "--timeout")
    budget_s = None if arguments.budget is None else parse_duration(arguments.budget, "--budget")
    if arguments.experiment != "attention" and not arguments.dry_run:
        cache_dir()  # a folder that cannot be made is told before torch is loaded
    preset = common.auto_preset() if arguments.preset == "auto" else arguments.preset
    if preset not in module.PRESETS:
        raise InputError(f"preset {preset!r}: no such preset; the presets are auto, {', '.join(module.PRESETS)}")
    if arguments.backend_file:
        from labkit.attention.api import load_backend_file

        load_backend_file(arguments.backend_file)
    given = axes.parse_axes(arguments.assignments, module.PRESETS[preset])
    if arguments.model is not None:
        given["model" if arguments.experiment == "attention" else "target"] = [arguments.model]
    if arguments.draft_model is not None:
        given["drafter"] = [arguments.draft_model]
    # Attention knows a model by its heads: a folder is stored as these.
    if folders := [name for name in given.get("model", []) if Path(name).is_dir()]:
        heads = {folder: "/".join(map(str, attention.heads_of(folder))) for folder in folders}
        given["model"] = [heads.get(name, name) for name in given["model"]]
    if "seed" in module.PRESETS[preset]:
        given.setdefault("seed", [arguments.seed])
    points = module.points(preset, **given)
    if arguments.dry_run:
        return _plan(arguments.experiment, points, module)
    with _executor(arguments) as executor:
        options: dict[str, Any] = {"executor": executor, "timeout_s": timeout_s, "budget_s": budget_s}
        options |= {"seed": arguments.seed, "resume": not arguments.no_resume, "backend_file": arguments.backend_file}
        result = common.sweep(arguments.experiment, points, out_dir=arguments.out, **options)
    return _outcome(result)


def _executor(arguments: argparse.Namespace) -> AbstractContextManager[Any]:
    """What `run_sweep` takes as its executor: a name, or a client of the cluster whose scheduler was named."""
    if arguments.scheduler is None:
        return nullcontext(arguments.executor)
    if arguments.executor != "dask":
        raise InputError("--scheduler: wanted --executor dask beside it")
    from distributed import Client

    place = {"scheduler_file": arguments.scheduler} if Path(arguments.scheduler).is_file() else {}
    try:
        return Client(**place) if place else Client(arguments.scheduler, timeout=30)
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(f"--scheduler {arguments.scheduler}: no Dask scheduler answers there ({error})") from None


def _plan(experiment: str, points: list[dict[str, Any]], module: ModuleType) -> Shown:
    """`--dry-run`: how many points, in which cells, how long and how much memory at most; 1 where none can run here."""
    from labkit.experiments import estimate

    groups = len({point["group"] for point in points})
    minutes = round(estimate.minutes(experiment, points), 1)
    memory_gb = round(estimate.memory_bytes(experiment, points) / 1e9, 2)
    axes = {
        name: sorted({point[name] for point in points if point.get(name) is not None})
        for name in module.PRESETS["cpu"]
        if any(name in point for point in points)
    }
    plan = {"experiment": experiment, "num_points": len(points), "num_groups": groups, "axes": axes}
    plan |= {"estimated_minutes": minutes, "estimated_memory_gb": memory_gb}
    about = f"about {minutes} min and {memory_gb} GB (estimated from bytes moved, not measured)"
    lines = [f"{len(points)} points in {groups} interleaved groups, {about}"]
    lines += [f"  {name}: {', '.join(map(str, values))}" for name, values in axes.items()]
    graphs = sum(point.get("launch_mode") == "graph" for point in points)
    if graphs and common.device() == "cpu":  # what the run would store of them, and exit with
        plan["reasons"] = {f"unsupported: {common.NO_GRAPHS}": graphs}
        lines += [f"on this machine: {graphs} x unsupported: {common.NO_GRAPHS} (launch_mode=eager runs)"]
    return plan, "\n".join(lines), int(graphs == len(points) and "reasons" in plan)


def _outcome(result: RunResult) -> Shown:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(result.counts.items())) or "nothing measured"
    left = f", {result.num_left} left to resume" if result.num_left else ""
    reasons, doubtful = _remarks(result) if result.counts else ({}, {})
    content = {"run_id": result.run_id, "path": str(result.path), "counts": result.counts, "num_left": result.num_left}
    lines = [f"{result.path}: {counts}{left}", *(f"  {count} x {reason}" for reason, count in reasons.items())]
    lines += [f"  {count} ok points with samples of quality {name!r}" for name, count in doubtful.items()]
    good = result.complete and "ok" in result.counts and set(result.counts) <= {"ok", "unsupported", "oom"}
    return content | {"reasons": reasons, "doubtful": doubtful}, "\n".join(lines), 0 if good else 1


def _remarks(result: RunResult) -> tuple[dict[str, int], dict[str, int]]:
    """Why points have no samples, and qualities other than ok, with how many points each."""
    from labkit.results import load_runs

    experiment = result.path.parent.parent.name
    rows = load_runs(experiment, result.path)
    if experiment == "acceptance" and (rows["status"] == "ok").any():
        for line in doubtful_drafters(rows):
            print(line, file=sys.stderr)
    failed = rows[rows["status"] != "ok"]
    doubtful = rows[rows["quality"].notna() & (rows["quality"] != "ok")]
    points = doubtful.drop_duplicates(["quality", "point_key"])
    found = {
        (key, kind) for key, value in zip(points["point_key"], points["quality"], strict=True) for kind in kinds(value)
    }
    reasons = Counter(failed["status"] + ": " + failed["reason"].astype(str))
    return dict(reasons), dict(sorted(Counter(kind for _, kind in found).items()))
