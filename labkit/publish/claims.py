"""What stored runs claim in numbers, each with its interval and conditions; and whether two sets of rows agree.

replay: decode rate of one endpoint over another, per scene and load; of steps inside an engine their relative cost.
loop with acceptance: speed-up per cell. loop alone and step: relative step cost per cell. Attention and acceptance rows
alone have no claim.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.breakeven import CELL_COLUMNS, Breakeven, breakeven
from labkit.decide.engine_truth import engine_cells
from labkit.decide.verdict import verdict_from_files
from labkit.errors import InputError
from labkit.replay.report import comparisons
from labkit.results import load_runs, read_sidecar, run_files
from labkit.rows import fixed_context, is_missing, key_value

ESTIMATORS = {
    "decode_rate_ratio": (
        "ratio of decode rates, the first token's time left out; median over repeats of interleaved pairs, mean of its "
        "log over prompts and launches; prompts and launches are resampled"
    ),
    "speedup": (
        "mean acceptance length (pooled, bonus counted) over relative step cost (median of paired rounds); rounds and "
        "prompts are resampled"
    ),
    "relative_step_cost": "median over rounds of the paired ratio of a speculative and a plain step; rounds resampled",
    "engine_step_cost": (
        "median step inside the engine while it speculates over the one while it does not, medians over windows of a "
        "window's median; windows are resampled"
    ),
}
UNITS = {"decode_rate_ratio": "prompt x launch", "speedup": "round, prompt", "relative_step_cost": "round"}
UNITS["engine_step_cost"] = "window of steps"
EXCLUDED = {
    "decode_rate_ratio": "warm-up, the first request of a scene, failed requests, prefill",
    "speedup": "prefill, the drafter's prefill, steps cut by a stop or the length limit",
    "relative_step_cost": "prefill, the drafter's prefill",
    "engine_step_cost": "prefill, the first steps of a window, in which it settles",
}
_CONDITIONS = CELL_COLUMNS[:13]
_ENGINE_CONDITIONS = (
    *("gpu", "engine", "engine_version", "setting", "target", "batch_size", "context_len"),
    "num_speculative_tokens",
)
# Told where they differ, and no reason not to compare: another GPU is what one wants to know of, and every cost is
# over the fastest plain decode, whichever backend that is.
_NAMED = ("gpu", "decode_backend")


@dataclass(frozen=True)
class Claim:
    """One number. low and high are None where there is no interval.

    n : units behind it; for a speed-up the rounds, with `num_prompts` of the acceptance beside them.
    """

    metric: str
    conditions: Mapping[str, Any]
    value: float
    low: float | None
    high: float | None
    n: int
    num_prompts: int | None = None

    def units(self) -> str:
        """``12 rounds, 8 prompts``."""
        return f"{self.n} rounds, {self.num_prompts} prompts" if self.num_prompts else str(self.n)

    def text(self) -> str:
        """``1.84x [1.77, 1.91]``."""
        bounds = " (no interval)" if self.low is None else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.3g}x{bounds}"


def claims_of(paths: Sequence[Path]) -> list[Claim]:
    """The claims of runs. InputError: a run that cannot be read."""
    files = [file for path in paths for file in run_files(Path(path))]
    by_experiment: dict[str, list[Path]] = {}
    for file in files:
        by_experiment.setdefault(read_sidecar(file)["experiment"], []).append(file)
    found = list(_of_replay(by_experiment["replay"])) if "replay" in by_experiment else []
    if "loop" in by_experiment:
        found += _of_loop(by_experiment["loop"], by_experiment.get("acceptance", []))
    if "step" in by_experiment:
        rows = load_runs("step", *by_experiment["step"])
        if {"decode", "verify"} <= set(rows["phase"]):  # a run of prefills has no costs of steps
            found += _of_cells(breakeven(rows, None), "relative_step_cost")
    return found


def _of_replay(files: Sequence[Path]) -> Iterable[Claim]:
    rows = load_runs("replay", *files)
    for item in comparisons(rows[rows["record"] == "request"]):
        found = item["decode_tokens_per_s"]
        if not is_missing(found["value"]):
            conditions = {name: item[name] for name in ("scene", "concurrency", "a", "b")}
            gpu = {"gpu": ", ".join(sorted(rows["gpu"].unique()))}
            yield _claim("decode_rate_ratio", {**conditions, **gpu}, found, found["num_pairs"])
    if (rows["record"] == "steps").any():
        for cell in engine_cells(rows).to_dict("records"):
            yield _of_cell(cell, "engine_step_cost", _ENGINE_CONDITIONS, "relative_step_cost", cell["num_windows"])


def _of_loop(files: Sequence[Path], acceptance: Sequence[Path]) -> Iterable[Claim]:
    costs = fixed_context(load_runs("loop", *files))
    if costs.empty:
        return []
    if acceptance:
        return _of_cells(verdict_from_files(files, acceptance_paths=acceptance), "speedup")
    return _of_cells(breakeven(costs, None), "relative_step_cost")


def _of_cells(result: Breakeven, metric: str) -> Iterable[Claim]:
    for cell in result.cells.to_dict("records"):
        if not is_missing(cell[metric]):
            prompts = None if metric != "speedup" or is_missing(cell["num_prompts"]) else int(cell["num_prompts"])
            yield replace(_of_cell(cell, metric, _CONDITIONS, metric, int(cell["num_rounds"])), num_prompts=prompts)


def _of_cell(cell: Mapping[Any, Any], metric: str, names: Iterable[str], column: str, n: int) -> Claim:
    values = {"value": cell[column], "low": cell[f"{column}_low"], "high": cell[f"{column}_high"]}
    conditions = {name: key_value(cell[name]) for name in names}
    num_gpus = str(cell["gpu"]).rpartition(" x")[2]  # "nvidia-h200 x2": another device may stand in, two may not
    return _claim(metric, conditions | ({"num_gpus": int(num_gpus)} if num_gpus.isdigit() else {}), values, n)


def _claim(metric: str, conditions: Mapping[str, Any], values: Mapping[str, float], n: int) -> Claim:
    low, high = (None if is_missing(values[name]) else float(values[name]) for name in ("low", "high"))
    return Claim(metric, conditions, float(values["value"]), low, high, n)


def consistent(claim: Claim, yours: Claim) -> bool | None:
    """Whether two numbers agree within both intervals; None without intervals.

    The logs may differ by the root of the squared half widths: at 95% each, 5% of equal truths would not pass.
    """
    if claim.low is None or claim.high is None or yours.low is None or yours.high is None:
        return None
    widths = [math.log(side.high / side.low) / 2 for side in (claim, yours) if side.low and side.high]
    return abs(math.log(yours.value / claim.value)) <= math.hypot(*widths)


def compare_claims(claims: Sequence[Claim], yours: Sequence[Claim]) -> list[dict[str, Any]]:
    """For each claim the number of the same conditions, or the closest one and the fields in which it differs.

    Claims also name what differs and keeps no two numbers from being compared: the backend of the fastest plain decode.
    """
    found = []
    for claim in claims:
        same = [other for other in yours if other.metric == claim.metric]
        best = min(same, key=lambda other: len(_differing(claim, other)), default=None)
        differing = _differing(claim, best) if best else {}
        verdict = "not measured" if best is None else "differs in " + ", ".join(differing) if differing else ""
        if best and not differing:
            verdict = {True: "consistent", False: "not consistent", None: "no interval to judge by"}[
                consistent(claim, best)
            ]
        base, own = claim.conditions.get("decode_backend"), best.conditions.get("decode_backend") if best else None
        named = {"decode_backend": (base, own)} if best and base != own else {}
        found.append({"claim": claim, "yours": best, "verdict": verdict, "differing": differing, "named": named})
    return found


def _differing(claim: Claim, other: Claim) -> dict[str, tuple[Any, Any]]:
    names = [name for name in {**claim.conditions, **other.conditions} if name not in _NAMED]
    pairs = {name: (claim.conditions.get(name), other.conditions.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def from_dicts(items: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """Claims from JSON. InputError: not what a bundle holds."""
    try:
        return [
            Claim(
                str(i["metric"]),
                dict(i["conditions"]),
                float(i["value"]),
                i["low"],
                i["high"],
                int(i["n"]),
                None if i.get("num_prompts") is None else int(i["num_prompts"]),
            )
            for i in items
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"claim.json: wanted claims with metric, conditions, value, low, high and n: {error}"
        ) from error
