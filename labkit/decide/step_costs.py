"""Loop or step rows -> costs of a cell: per-round medians of the speculative step and of every plain decode, paired.

A ratio is only ever taken inside one (run_id, group, round), where both sides were interleaved.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.forward_costs import loop_rows
from labkit.errors import InputError
from labkit.quality import kinds
from labkit.rows import FORCED_ORIGINS, distinct, key_value, ok_rows, single_value

CELL_KEY = (
    *("gpu", "target", "drafter", "batch_size", "context_len", "num_speculative_tokens", "verify_backend"),
    *("draft_backend", "weight_dtype", "kv_dtype"),
)
PAIR = ["run_id", "group", "round"]
# Both arms of a group must agree in these, or its ratio would compare two different things.
SHARED = ("gpu", "target", "batch_size", "context_len", "weight_dtype", "kv_dtype", "linear_backend")
# Columns that rarely vary and are looked at cell by cell when they do.
MIXED = ("linear_backend", "launch_mode")
NEEDED = (*PAIR, "arm", *CELL_KEY[1:7], "decode_backend", "num_drafted_tokens", "step_ms")
# Parts of a step, in the order in which a step runs; attention apart only where it was timed apart.
PARTS = (
    *("draft_ms", "draft_attention_ms", "draft_rest_ms", "verify_ms", "verify_attention_ms", "verify_rest_ms"),
    *("accept_ms", "sampling_ms", "communication_ms", "gap_ms"),
)


@dataclass(frozen=True)
class StepCosts:
    """Times of one cell; a round is a (run_id, group, round), in sorted order.

    `step_ms` [num_rounds, k+1] holds the median speculative step with j drafts in column j, `decode_ms` per plain
    backend the median decode step [num_rounds]; NaN where a round lacks it. `parts_ms` holds the parts of a step with k
    drafts that the rows have, per name of ``PARTS`` [num_rounds].
    """

    key: dict[str, Any]
    step_ms: np.ndarray
    decode_ms: dict[str, np.ndarray]
    parts_ms: dict[str, np.ndarray]
    origin: str
    notes: tuple[str, ...]

    @property
    def num_speculative_tokens(self) -> int:
        """k of the cell."""
        return int(self.key["num_speculative_tokens"])


def step_costs(cost_rows: pd.DataFrame) -> list[StepCosts]:
    """Sort loop rows with status ok into cells; step rows are first made loop rows by `labkit.decide.forward_costs`.

    Costs come from runs at a fixed context. Rows of origin forced are welcome: only their acceptance is imposed, their
    times are real, so the cell counts as measured. Of several runs of one cell the newest counts: another code, card or
    day is no further round of the same measurement.

    Raises InputError: columns are missing, an arm is missing or unknown, a time is not above 0, or a group or a cell
    mixes contexts, dtypes, linear backends, launch modes or origins.
    """
    rows = ok_rows(loop_rows(cost_rows) if "forward_ms" in cost_rows else cost_rows, "cost", NEEDED)
    rows = rows.reset_index(drop=True).assign(**{name: None for name in CELL_KEY if name not in rows})
    if "imposed_acceptance" in rows:  # generations beside the costs, see `labkit.decide.forcing`
        rows = rows[rows["imposed_acceptance"].isna()].reset_index(drop=True)
    _check(rows)
    plain = rows[rows["arm"] == "plain"]
    speculative = rows[rows["arm"] == "speculative"].astype({"num_speculative_tokens": int})
    newest = speculative.groupby(list(CELL_KEY), dropna=False)["run_id"].transform("max")
    speculative = speculative[speculative["run_id"] == newest]
    decode_ms = plain.groupby([*PAIR, "decode_backend"])["step_ms"].median().unstack("decode_backend")
    cell_ids = speculative.groupby(list(CELL_KEY), dropna=False, sort=True).ngroup().rename("cell")
    by_length = [cell_ids, *(speculative[name] for name in (*PAIR, "num_drafted_tokens"))]
    step_ms = speculative["step_ms"].groupby(by_length).median().unstack("num_drafted_tokens")
    parts = [name for name in PARTS if name in rows]
    full = speculative["num_drafted_tokens"] == speculative["num_speculative_tokens"]
    by_cell = [cell_ids[full], *(speculative.loc[full, name] for name in PAIR)]
    at_rounds = speculative.loc[full, parts].astype(float).groupby(by_cell).median().reindex(step_ms.index)
    # One pass over arrays in the order of the cells: a selection by pandas for each would take most of the time.
    of_cell = step_ms.index.get_level_values("cell").to_numpy()
    lengths = range(int(speculative["num_speculative_tokens"].max()) + 1)
    steps = step_ms.reindex(columns=list(lengths)).to_numpy(float)
    decode = decode_ms.reindex(step_ms.reset_index("cell").index).to_numpy(float)
    part_ms = at_rounds.to_numpy(float)
    keys = speculative[list(CELL_KEY)].assign(cell=cell_ids).drop_duplicates("cell").sort_values("cell")
    notes = _notes(rows, speculative, cell_ids)
    origins = speculative.groupby(cell_ids)["origin"].unique().to_dict() if "origin" in speculative else {}
    costs = []
    for cell, *values in keys[["cell", *CELL_KEY]].itertuples(index=False, name=None):
        key = {name: key_value(value) for name, value in zip(CELL_KEY, values, strict=True)}
        own = slice(*np.searchsorted(of_cell, [cell, cell + 1]))
        by_backend = {str(name): ms for name, ms in zip(decode_ms, decode[own].T, strict=True) if np.isfinite(ms).any()}
        of_parts = {name: ms for name, ms in zip(parts, part_ms[own].T, strict=True) if np.isfinite(ms).any()}
        own_steps = steps[own, : key["num_speculative_tokens"] + 1]
        origin = _origin(origins.get(cell, []), key)
        costs.append(StepCosts(key, own_steps, by_backend, of_parts, origin, notes(cell, key)))
    return costs


def _check(rows: pd.DataFrame) -> None:
    arms = distinct(rows, "arm")
    if arms != ["plain", "speculative"]:
        raise InputError(f"cost rows must hold the arms plain and speculative, got {', '.join(arms) or 'none'}")
    if rows[PAIR].isna().any(axis=None):
        raise InputError("cost rows need run_id, group and round in every row: ratios are paired by them")
    if not (rows["step_ms"] > 0).all():
        raise InputError("step_ms must be above 0 in every cost row with status ok")
    speculative = rows[rows["arm"] == "speculative"]
    for name in ("num_speculative_tokens", "num_drafted_tokens", "verify_backend", "drafter"):
        if speculative[name].isna().any():
            raise InputError(f"{name} must be given in every speculative cost row")
    if (speculative["num_drafted_tokens"] > speculative["num_speculative_tokens"]).any():
        raise InputError("num_drafted_tokens must not exceed num_speculative_tokens in any cost row")
    for name in SHARED:
        if name in rows:
            counts = rows.groupby(PAIR[:2])[name].nunique(dropna=False)
            if (counts > 1).any():
                run_id, group = counts.index[counts > 1][0]
                mixed = rows[(rows["run_id"] == run_id) & (rows["group"] == group)]
                single_value(mixed, name, f"cost rows of run {run_id}, group {group},")


def _origin(found: Iterable[Any], key: dict[str, Any]) -> str:
    origins = {"measured" if origin in FORCED_ORIGINS else str(origin) for origin in found} or {"measured"}
    if len(origins) > 1:
        raise InputError(f"cost rows of {_name(key)} mix origin {', '.join(sorted(origins))}; keep one of them")
    return origins.pop()


def _notes(
    rows: pd.DataFrame, speculative: pd.DataFrame, cell_ids: pd.Series
) -> Callable[[int, dict[str, Any]], tuple[str, ...]]:
    """What else to know about a cell, as a function of its number and key."""
    doubtful, names = _doubtful(rows), [name for name in MIXED if name in rows]
    twice = rows["also_composed"].eq(True).to_numpy() if "also_composed" in rows else np.zeros(len(rows), bool)
    if not doubtful.any() and not twice.any() and not any(len(set(rows[name])) > 1 for name in names):
        return lambda cell, key: ()
    slim = rows[["arm", *names, *(["quality"] if "quality" in rows else [])]].assign(doubtful=doubtful)
    groups = pd.Series(rows.groupby(PAIR[:2]).ngroup().to_numpy(), rows.index)
    plain = (rows["arm"] == "plain").to_numpy()
    cell_of = cell_ids.reindex(rows.index).to_numpy()

    def of_cell(cell: int, key: dict[str, Any]) -> tuple[str, ...]:
        own = cell_of == cell
        both = slim[own | (plain & np.isin(groups, np.unique(groups[own])))]
        where = f"cost rows of {_name(key)}"
        single_value(both, "linear_backend", where)
        arms = {arm: both[both["arm"] == arm] for arm in ("speculative", "plain")}
        modes = {arm: single_value(part, "launch_mode", where) for arm, part in arms.items() if len(part)}
        found = []
        if len(set(modes.values())) > 1:
            found.append(f"launch_mode: {', '.join(f'{arm} {mode}' for arm, mode in modes.items())}")
        qualities = both.loc[both["doubtful"], "quality"] if both["doubtful"].any() else []
        counts = Counter(kind for quality in qualities for kind in kinds(quality))
        found += ["timed in the loop; the step runs of this cell are left out"] * bool((own & twice).any())
        found += [f"{count} of {len(both)} samples with quality {name!r}" for name, count in counts.items()]
        return tuple(found)

    return of_cell


def _doubtful(rows: pd.DataFrame) -> pd.Series:
    quality = rows["quality"] if "quality" in rows else pd.Series(None, index=rows.index, dtype=object)
    return quality.notna() & (quality != "ok")


def _name(key: dict[str, Any]) -> str:
    return f"{key['verify_backend']} at context_len {key['context_len']}, k {key['num_speculative_tokens']}"


def baseline_ms(costs: StepCosts, baseline: str) -> tuple[str | None, np.ndarray]:
    """The plain decode that the cell is compared with: its backend, and its time per round [num_rounds].

    baseline : ``"fastest"``, ``"same"`` (the backend that verifies) or the name of a plain-decode backend.

    The fastest of several noisy candidates looks faster than it is where it was chosen. So rounds are halved by turns,
    the backend is chosen by its median on one half and measured on the other, in both directions; each round is used
    once. Where the halves choose differently (a tie within noise), both names are given, joined by ``|``.
    """
    num_rounds = len(costs.step_ms)
    if baseline != "fastest":
        name = costs.key["verify_backend"] if baseline == "same" else baseline
        return (name, costs.decode_ms[name]) if name in costs.decode_ms else (None, np.full(num_rounds, np.nan))
    half = np.arange(num_rounds) % 2
    # With a single round there is no other half; such a cell stays undecided anyway.
    choosers = [half != side if num_rounds > 1 else half == 0 for side in (0, 1)]
    medians = [[finite_median(ms[chooser]) for ms in costs.decode_ms.values()] for chooser in choosers]
    # A NaN of either half leaves its backend out; so does a cell without any.
    complete = np.isfinite(medians).all(axis=0)
    if not complete.any():
        return None, np.full(num_rounds, np.nan)
    fastest = [int(np.where(complete, half_medians, np.inf).argmin()) for half_medians in medians]
    chosen = [list(costs.decode_ms)[index] for index in fastest]
    return "|".join(sorted(set(chosen))), np.where(half == 0, *(costs.decode_ms[name] for name in chosen))


def finite_median(values: np.ndarray) -> float:
    """Median of the finite ones of a few values, NaN without any. ``np.nanmedian`` takes many times as long for ten."""
    finite = [value for value in values.tolist() if isfinite(value)]
    return median(finite) if finite else float("nan")


def paired_ratios(costs: StepCosts, decode_ms: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Cost of a step with j drafts over plain decode, float64 [num_complete_rounds, k+1], 0 where no step has j drafts.

    Only rounds that hold the baseline and every draft length with a share above 0 are complete.
    """
    needed = shares > 0
    ratios = np.where(needed, costs.step_ms / decode_ms[:, None], 0.0)
    return ratios[np.isfinite(ratios).all(axis=1)]
