"""A fitted cost model of forwards: a sum of physical terms per GPU, target and backend, and predictions from it.

    forward_ms = fixed + weight bytes / bandwidth + attention + state bytes / bandwidth + tokens x time
                 + tokens beyond the ridge x time + communication (fixed + tokens x time, fitted to communication_ms)

Attention is one of `labkit.steps.terms.PATHS`: bytes over a bandwidth, or serial tiles by a tile time for kernels that
do not fill the device. Coefficients are the non-negative least squares of the relative error. Weights of a single size
cannot be told from the fixed cost; both are then one term. The ridge is the number of tokens from which matrices are
bound by computing. Predictions have origin "modelled"; beyond `EXTRAPOLATION` times the fitted range they are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.forward_costs import without_shared_prefix
from labkit.decide.intervals import generator, percentile_interval, student_spread
from labkit.errors import InputError
from labkit.plots.style import format_tokens
from labkit.rows import ok_rows
from labkit.steps.terms import (
    AXES,
    BEYOND_DECODE,
    DTYPES,
    FIT_KEY,
    PATHS,
    TILE_US,
    Facts,
    Sidecars,
    facts_of,
    nonnegative_fit,
    structure,
    term_columns,
)

EXTRAPOLATION = {"batch_size": 4.0, "q_len": 2.0, "context_len": 4.0}
MIN_POINTS = 6
UNITS = {"attention": "us per tile", BEYOND_DECODE: "us per GB"}
TOLERANCE = 0.05  # of a bandwidth above the measured one, for noise
JUMP = 0.10  # of the residual between neighbouring contexts


@dataclass(frozen=True)
class StepModel:
    """One fitted model.

    key : GPU, target, backend and so on, and the dtypes where they are fitted apart.
    kv_path : one of `PATHS`; ridge in tokens.
    terms : one row per term: term, unit, value, low, high (95%, rounds resampled), ms_per_unit.
    points : the fitted points: `AXES`, dtypes, forward_ms, modelled_ms, residual (log of measured over modelled).
    findings : what contradicts physics, and where the residual jumps along the context (another path?).
    """

    key: dict[str, Any]
    kv_path: str
    ridge: int
    terms: pd.DataFrame
    points: pd.DataFrame
    findings: tuple[str, ...]
    draws: np.ndarray
    facts: Facts

    def predict(self, points: pd.DataFrame, *, weight_bytes: float | None = None) -> pd.DataFrame:
        """`points` (columns `AXES`, and dtypes where fitted together) with forward_ms, low, high (95%) and origin.

        The interval holds the noise of the rounds and the spread of the fit's residuals. `weight_bytes` replaces the
        weight term, for a dtype that was not run (4-bit weights); it needs weights of two sizes in the fit.

        Raises InputError: a point beyond `EXTRAPOLATION` times the fitted range, or an unknown dtype.
        """
        points = points.assign(**{name: self.key[name] for name in DTYPES if name in self.key and name not in points})
        for axis, factor in EXTRAPOLATION.items():
            low, high = self.points[axis].min(), self.points[axis].max()
            off = points.loc[~points[axis].between(low / factor, high * factor), axis]
            if len(off):
                fitted = f"fitted {low:g} to {high:g}, at most {factor:g} times beyond"
                raise InputError(
                    f"{axis}: wanted {low / factor:g} to {high * factor:g} ({fitted}), got {off.iloc[0]:g}"
                )
        for name, known in (("weight_dtype", self.facts.weight_bytes), ("kv_dtype", self.facts.kv_bytes_per_token)):
            if not points[name].isin(list(known)).all() and not (name == "weight_dtype" and weight_bytes):
                raise InputError(f"{name}: wanted one of {', '.join(known)}, got {points[name].iloc[0]!r}")
        names = list(self.terms["term"])
        if weight_bytes is not None and "weights" not in names:
            raise InputError("weight_bytes: the fit holds weights of one size; fit several weight dtypes together")
        columns = term_columns(points, self.facts, self.kv_path, self.ridge, weight_bytes)
        matrix = np.column_stack([columns[name] for name in names])
        middle = matrix @ self.terms["ms_per_unit"].to_numpy(float)
        rng = generator(0, "predict", *self.key.values())
        free = max(len(self.points) - len(names), 1)
        residuals = self.points["residual"].to_numpy(float) * np.sqrt(len(self.points) / free)
        noise = np.exp(rng.choice(residuals, size=(len(points), self.draws.shape[1])))
        bounds = [percentile_interval(row, 0.95) for row in matrix @ self.draws * noise]
        low, high = np.array(bounds).reshape(-1, 2).T
        return points.assign(forward_ms=middle, low=low, high=high, origin="modelled")


def fit_step_models(
    step_rows: pd.DataFrame,
    sidecars: Sidecars | None = None,
    *,
    separate: Sequence[str] = DTYPES,
    resamples: int = 200,
    seed: int = 0,
) -> list[StepModel]:
    """A model for each GPU, target and backend from its decode and verify forwards, by default for each pair of dtypes.

    sidecars : run_id -> sidecar; the calibration has the read bandwidth (a check) and the number of SMs (for waves of
        serial tiles; without it or the target's shape, serial paths are not tried).
    separate : dtypes that get a model of their own; without weight_dtype the weight term has a coefficient of its own.

    Backends with fewer than `MIN_POINTS` points are left out, and so are rows with a shared prefix. Raises InputError:
    no ok rows, a missing column, or no backend with enough points.
    """
    points = fit_points(step_rows)
    models = []
    for key, group in points.groupby([*FIT_KEY, *separate], dropna=False, sort=True):
        if len(group) >= MIN_POINTS:
            named = dict(zip([*FIT_KEY, *separate], key, strict=True))
            models.append(_fit(named, group.reset_index(drop=True), sidecars or {}, resamples, seed))
    if not models:
        raise InputError(f"step model: want {MIN_POINTS} decode and verify points of one backend; got fewer")
    return models


def fit_points(step_rows: pd.DataFrame) -> pd.DataFrame:
    """Decode and verify points without a shared prefix: forward_ms (median over rounds) and `rounds`, their medians."""
    needed = [*FIT_KEY, *DTYPES, *AXES, "phase", "run_id", "group", "round", "forward_ms"]
    rows = ok_rows(step_rows, "step", [*needed, "weight_bytes_read", "kv_bytes_read"])
    rows = without_shared_prefix(rows[rows["phase"].isin(("decode", "verify"))])
    extra = ("communication_ms", "state_bytes")  # null: none
    rows = rows.assign(**{name: rows[name].fillna(0.0) if name in rows else 0.0 for name in extra})
    keys = [*FIT_KEY, *DTYPES, *AXES, "run_id", "group"]
    rounds = rows.groupby([*keys, "round"], dropna=False)["forward_ms"].median()
    facts = rows.groupby(keys, dropna=False)[["weight_bytes_read", "kv_bytes_read", *extra]].median()
    per_round = rounds.groupby(level=list(range(len(keys))), dropna=False).agg(np.array).rename("rounds")
    table = facts.join(per_round).reset_index()
    return table.assign(forward_ms=[float(np.median(values)) for values in table["rounds"]])


def _fit(key: dict[str, Any], points: pd.DataFrame, sidecars: Sidecars, resamples: int, seed: int) -> StepModel:
    facts = facts_of(key, points, sidecars)
    measured = points["forward_ms"].to_numpy(float)
    path, ridge = structure(points, facts)
    columns = term_columns(points, facts, path, ridge)
    draws = _resampled(points, resamples, seed)
    own = [name for name in columns if not name.startswith("communication")]
    shared = [name for name in columns if name.startswith("communication")]
    communication = points["communication_ms"].to_numpy(float)[:, None]
    both = np.column_stack([measured, draws])
    weight = 1 / measured[:, None]
    parts = [(own, both - communication), (shared, np.broadcast_to(communication, both.shape))]
    coefficients = np.vstack([
        nonnegative_fit(np.column_stack([columns[name] for name in names]) * weight, times * weight)
        for names, times in parts if names
    ])  # fmt: skip
    modelled = np.column_stack([columns[name] for name in [*own, *shared]]) @ coefficients[:, 0]
    points = points.assign(modelled_ms=modelled, residual=np.log(measured / modelled))
    terms = _terms([*own, *shared], coefficients, path)
    findings = (*_violations(terms, points, facts, path), *_jumps(points))
    if (key["num_gpus"] or 1) > 1 and not communication.all():
        findings = (f"communication of {key['num_gpus']:g} devices: not measured, not in these times", *findings)
    return StepModel(key, path, ridge, terms, points.drop(columns="rounds"), findings, coefficients[:, 1:], facts)


def _resampled(points: pd.DataFrame, resamples: int, seed: int) -> np.ndarray:
    """Medians of resampled rounds [num_points, resamples]; the points of a group draw the same rounds."""
    draws = np.empty((len(points), resamples))
    for (run, group), rows in points.groupby(["run_id", "group"]):
        rng = generator(seed, "step model", run, group)
        for length, alike in rows.groupby(rows["rounds"].map(len)):
            chosen = rng.integers(0, length, size=(resamples, length))
            values = np.log(np.stack(list(alike["rounds"])))
            middle = np.median(values, axis=1, keepdims=True)
            spread = student_spread(length, resamples, rng, of_medians=True) if length > 1 else np.ones(resamples)
            deviations = spread * (np.median(values[:, chosen], axis=2) - middle)
            draws[alike.index] = np.exp(middle + deviations.clip(-5, 5))  # wider than this says nothing more
    return draws


def _terms(names: list[str], coefficients: np.ndarray, path: str) -> pd.DataFrame:
    """Coefficients in the units that physics knows: ms, GB/s, us per token, per tile or per GB of keys and values."""
    records = []
    for name, values in zip(names, coefficients, strict=True):
        low, high = percentile_interval(values[1:], 0.95)
        record: dict[str, Any] = {"term": name, "ms_per_unit": values[0]}
        if name in ("weights", "states") or (name == "attention" and path in (*PATHS[:2], PATHS[4])):
            with np.errstate(divide="ignore"):
                value, low, high = (1e3 / np.array([values[0], high, low])).tolist()
            record |= {"unit": "GB/s", "value": value, "low": low, "high": high}
        else:
            ms = name in ("fixed", "fixed and weights", "communication, fixed")
            unit = "ms" if ms else UNITS.get(name, "us per token")
            factor = 1.0 if ms else 1e3
            record |= {"unit": unit, "value": values[0] * factor, "low": low * factor, "high": high * factor}
        records.append(record)
    return pd.DataFrame(records)[["term", "unit", "value", "low", "high", "ms_per_unit"]]


def _violations(terms: pd.DataFrame, points: pd.DataFrame, facts: Facts, path: str) -> list[str]:
    """Coefficients that no device can have, beyond noise. Times cannot be negative, the fit sees to that."""
    found, rate = [], facts.read_gb_per_s
    for row in terms.to_dict("records"):
        if row["unit"] == "GB/s" and row["low"] > (1 + TOLERANCE) * rate:
            what = "not seen in the times" if np.isinf(row["value"]) else f"{row['value']:,.0f} GB/s"
            found.append(f"{row['term']}: {what}, above the {rate:,.0f} GB/s that the run read")
        if row["term"] == "fixed and weights":
            floor = points["weight_bytes_read"].median() / rate / 1e6
            if row["high"] * (1 + TOLERANCE) < floor:
                found.append(f"fixed and weights: {row['value']:.2f} ms, below {floor:.2f} ms of reading the weights")
        if row["unit"] == "us per tile" and not TILE_US[0] <= row["value"] <= TILE_US[1]:
            found.append(f"{path}: {row['value']:.2f} us per tile, not within {TILE_US[0]:g} to {TILE_US[1]:g}")
    return found


def _jumps(points: pd.DataFrame) -> list[str]:
    """Neighbouring contexts of one series between which the residual jumps, the largest per model first."""
    found = []
    series = [*DTYPES, "batch_size", "q_len"]
    for key, rows in points.groupby(series):
        rows = rows.sort_values("context_len")
        steps = rows["residual"].diff().abs()
        if len(rows) > 1 and steps.max() > JUMP:
            at = int(np.nanargmax(steps.to_numpy(float)))
            ends = " and ".join(format_tokens(value) for value in rows["context_len"].iloc[at - 1 : at + 1])
            text = f"residual jumps by {steps.iloc[at]:.0%} between {ends} at batch {key[2]}, q_len {key[3]}"
            found.append((steps.iloc[at], f"{text}: another path?"))
    return [text for _, text in sorted(found, reverse=True)]


def model_table(models: Sequence[StepModel]) -> pd.DataFrame:
    """The terms of all models, one row each, with the attention path, worst residual and findings of the model."""
    tables = []
    for model in models:
        about = {name: model.key[name] for name in ("target", "backend", "num_gpus")}
        about |= {name: model.key[name] for name in DTYPES if name in model.key}
        worst = float(np.expm1(model.points["residual"].abs().max()))
        about |= {"attention_path": model.kv_path, "worst_residual": worst, "findings": "; ".join(model.findings)}
        tables.append(model.terms.drop(columns="ms_per_unit").assign(**about))
    names = [name for name in about if name != "findings"]
    return pd.concat(tables, ignore_index=True)[[*names, "term", "unit", "value", "low", "high", "findings"]]
