"""Everything the verdict knows about a set of costs, in one call: what the explorer and the notebooks draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from labkit.breakeven import Breakeven, breakeven
from labkit.decide.best_k import best_k, cut_acceptance, regret
from labkit.decide.cause import inefficiency, slope_causes, waterfall
from labkit.decide.composed import cost_rows
from labkit.decide.intervals import RESAMPLES
from labkit.decide.step_costs import StepCosts, step_costs
from labkit.decide.verdict import restricted
from labkit.errors import InputError
from labkit.rows import key_value, matching


@dataclass(frozen=True)
class Surface:
    """Costs over context x batch x pairing x k, what is known of their acceptance, and what follows.

    result : cells, crossings in context and turning points in batch; see `labkit.breakeven.Breakeven`.
    waterfall : parts of each step in units of acceptance length, `labkit.decide.cause.waterfall`.
    causes : slopes over the floor and a diagnosis per curve, `labkit.decide.cause.slope_causes`.
    floors : measured break-even beside one read of weights and cache, `labkit.decide.cause.inefficiency`.
    best : best k per context and batch, `labkit.decide.best_k.best_k`; empty without acceptance.
    regret : what one k everywhere loses, `labkit.decide.best_k.regret`; empty without acceptance.
    costs, rows : the cost cells behind it, and the rows that were given.
    """

    result: Breakeven
    waterfall: pd.DataFrame
    causes: pd.DataFrame
    floors: pd.DataFrame
    best: pd.DataFrame
    regret: pd.DataFrame
    costs: list[StepCosts]
    rows: pd.DataFrame


SETTING = ("gpu", "target", "drafter", "weight_dtype", "kv_dtype")


def select(surface: Surface, *, widest: str | None = None, **where: Any) -> Surface:
    """The part of a surface with one gpu, target, drafter and dtypes: what a figure can hold.

    where : values of these columns. widest : of what is left, the setting with most values of this column; then with
    most judged cells, then with most cells.

    Raises InputError: a value that is not there; the ones that are are listed.
    """
    cells = surface.result.cells
    for name, value in where.items():
        if name not in SETTING or not (cells[name] == value).any():
            known = ", ".join(map(str, cells[name].dropna().unique())) if name in SETTING else ", ".join(SETTING)
            raise InputError(f"{name}: want one of {known}; got {value!r}")
        cells = cells[cells[name] == value]
    settings = cells.groupby(list(SETTING), dropna=False)
    counts = settings["speedup"].agg(["count", "size"]).assign(wide=settings[widest].nunique() if widest else 0)
    chosen = dict(zip(SETTING, counts.sort_values(["wide", "count", "size"]).index[-1], strict=True))

    def part(table: pd.DataFrame) -> pd.DataFrame:
        return matching(table, chosen).reset_index(drop=True)

    judged = restricted(surface.result, part(surface.result.cells))
    names = ("waterfall", "causes", "floors", "best", "regret")
    tables: dict[str, Any] = {name: part(getattr(surface, name)) for name in names}
    setting = {name: key_value(value) for name, value in chosen.items()}
    costs = [cost for cost in surface.costs if setting.items() <= cost.key.items()]
    return replace(surface, result=judged, costs=costs, **tables)


def verdict_surface(
    rows: pd.DataFrame,
    acceptance: pd.DataFrame | float | Sequence[float] | None = None,
    *,
    read_gb_per_s: Mapping[str, float] | float | None = None,
    acceptance_from: str | None = None,
    free_drafter: str | None = None,
    baseline: str = "fastest",
    resamples: int = RESAMPLES,
) -> Surface:
    """Judge costs over context x batch x pairing x k.

    rows : loop or step rows, of one or several gpus, targets, drafters.
    acceptance : acceptance rows; an imposed length X or (X, low, high); or None for the cost alone. Of rows, each k
        below a measured one is filled in (`cut_acceptance`, origin modelled). Measured acceptance joins only inside its
        context band and for the same target and drafter; elsewhere a cell keeps its cost and a reason.
    read_gb_per_s : measured read bandwidth, 1e9 B/s, one or per gpu (`read_rates` of sidecars); None leaves the causes
        unknown.
    free_drafter : as `labkit.decide.composed.cost_rows`.
    acceptance_from, baseline, resamples : as `labkit.breakeven.breakeven`.

    Raises InputError as `labkit.breakeven.breakeven` and `labkit.decide.composed.cost_rows`.
    """
    costs = cost_rows(rows, free_drafter=free_drafter)
    if isinstance(acceptance, pd.DataFrame):
        ks = costs["num_speculative_tokens"].dropna().astype(int).unique()
        acceptance = cut_acceptance(acceptance, [int(k) for k in ks])
    cells = step_costs(costs)
    result = breakeven(cells, acceptance, acceptance_from=acceptance_from, baseline=baseline, resamples=resamples)
    judged = result.cells["speedup"].notna().any()
    empty = pd.DataFrame()
    return Surface(
        result,
        waterfall(cells, baseline),
        slope_causes(cells, read_gb_per_s, baseline),
        inefficiency(result.cells),
        best_k(result.cells) if judged else empty,
        regret(result.cells) if judged else empty,
        cells,
        rows,
    )


def read_rates(sidecars: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """gpu -> median of the read bandwidths that its runs measured, 1e9 B/s; sidecars as `load_sidecars` gives them."""
    rates: dict[str, list[float]] = {}
    for sidecar in sidecars.values():
        if rate := (sidecar.get("calibration") or {}).get("read_gb_per_s"):
            rates.setdefault(str(sidecar["gpu"]), []).append(float(rate))
    return {gpu: float(pd.Series(values).median()) for gpu, values in rates.items()}
