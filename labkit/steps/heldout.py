"""How well the step-cost model predicts forwards that it has not seen: fit on a third, predict the rest."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.errors import InputError
from labkit.steps.model import EXTRAPOLATION, MIN_POINTS, fit_points, fit_step_models
from labkit.steps.terms import AXES, DTYPES, FIT_KEY, Sidecars

SHARE = 1 / 3
GOLDEN = (np.sqrt(5) - 1) / 2
MEDIAN_LIMIT, WORST_LIMIT = 0.05, 0.15


@dataclass(frozen=True)
class HeldOut:
    """Predictions of unseen points.

    points : `FIT_KEY`, dtypes, `AXES`, measured_ms, forward_ms, low, high (modelled), relative_error (signed, of the
        measured), held_out: "longer context", "larger batch" or "inside"; num_fitted, num_points of the model.
    """

    points: pd.DataFrame

    @property
    def median_error(self) -> float:
        """Median of the relative errors without sign."""
        return float(self.points["relative_error"].abs().median())

    @property
    def worst_error(self) -> float:
        """Largest of the relative errors without sign."""
        return float(self.points["relative_error"].abs().max())

    @property
    def holds(self) -> bool:
        """Whether median and worst error are within `MEDIAN_LIMIT` and `WORST_LIMIT`."""
        return self.median_error <= MEDIAN_LIMIT and self.worst_error <= WORST_LIMIT

    def summary(self) -> pd.DataFrame:
        """Per target, backend and kind of held-out point: num_points, median and worst error, share within interval."""
        errors = self.points.assign(error=self.points["relative_error"].abs())
        errors["within"] = errors["measured_ms"].between(errors["low"], errors["high"])
        groups = errors.groupby(["gpu", "target", "backend", "held_out"])
        table = groups["error"].agg(num_points="size", median_error="median", worst_error="max")
        return table.assign(within_interval=groups["within"].mean()).reset_index()


def held_out(step_rows: pd.DataFrame, sidecars: Sidecars | None = None) -> HeldOut:
    """Fit each model on a third of its points and predict the others.

    Held out are always the longest context and, where there are several, the largest batch size. The third is taken
    from the rest, in order of batch, context and q_len, where the multiples of the golden ratio are smallest modulo 1:
    evenly spread, without a random choice. It holds no point of either extreme, so both are extrapolated. Points beyond
    what the model extrapolates to (`EXTRAPOLATION`) are left out of both.

    Raises InputError as `fit_step_models`, and when no model has three times `MIN_POINTS` points.
    """
    keys, found = [*FIT_KEY, *DTYPES], []
    cells = [*keys, *AXES, "run_id", "group"]
    points = fit_points(step_rows).drop(columns="rounds")
    for _, model_points in points.groupby(keys, dropna=False):
        fitted = _third(model_points.sort_values(list(AXES), ignore_index=True))
        if len(fitted) < MIN_POINTS:
            continue
        rows = step_rows.merge(fitted[cells], on=cells)
        (model,) = fit_step_models(rows, sidecars)
        others = model_points.merge(fitted[cells], on=cells, how="left", indicator=True)
        others = others[others.pop("_merge") == "left_only"].rename(columns={"forward_ms": "measured_ms"})
        for axis, factor in EXTRAPOLATION.items():  # refused by the model, so not predicted
            others = others[others[axis] <= factor * fitted[axis].max()]
        predicted = model.predict(others)
        predicted["relative_error"] = predicted["forward_ms"] / predicted["measured_ms"] - 1
        longer = predicted["context_len"] > fitted["context_len"].max()
        larger = predicted["batch_size"] > fitted["batch_size"].max()
        predicted["held_out"] = np.select([longer, larger], ["longer context", "larger batch"], "inside")
        found.append(predicted.assign(num_fitted=len(fitted), num_points=len(model_points)))
    if not found:
        raise InputError(f"held-out points: want a backend with {3 * MIN_POINTS} or more decode and verify points")
    return HeldOut(pd.concat(found, ignore_index=True))


def _third(points: pd.DataFrame) -> pd.DataFrame:
    inner = points["context_len"] < points["context_len"].max()
    if points["batch_size"].nunique() > 1:
        inner &= points["batch_size"] < points["batch_size"].max()
    inside = points[inner]
    order = np.argsort((np.arange(len(inside)) * GOLDEN) % 1.0, kind="stable")
    return inside.iloc[np.sort(order[: int(len(points) * SHARE)])]
