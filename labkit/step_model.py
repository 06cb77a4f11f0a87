"""A fitted cost model of forwards: a sum of physical terms per GPU, target and backend, and predictions from it.

    forward_ms = fixed + weight bytes / bandwidth + attention + tokens x time + tokens beyond the ridge x time
                 + communication (fixed + tokens x time, fitted to communication_ms)

Attention is one of `PATHS`: bytes over a bandwidth, or serial tiles times a tile time for kernels that do not fill the
device. Coefficients are the non-negative least squares of the relative error. Weights of a single size cannot be told
from the fixed cost; both are then one term. The ridge is the number of tokens from which matrices are bound by
computing. Predictions have origin "modelled"; beyond `EXTRAPOLATION` times the fitted range they are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from labkit.attention_table import calibrated, read_bandwidths
from labkit.errors import InputError
from labkit.forward_costs import without_shared_prefix
from labkit.intervals import generator, percentile_interval, student_spread
from labkit.rows import ok_rows
from labkit.shapes import dtype_bytes, model_shapes
from labkit.style import format_tokens

FIT_KEY = ("gpu", "target", "backend", "linear_backend", "num_gpus", "launch_mode")
DTYPES = ("weight_dtype", "kv_dtype")
AXES = ("batch_size", "q_len", "context_len")
PATHS = ("keys read once", "keys read per query token", "serial tiles, 8 splits", "serial tiles, no split")
RIDGES = (0, 32, 64, 128, 256)  # tokens; 0: no ridge
EXTRAPOLATION = {"batch_size": 4.0, "q_len": 2.0, "context_len": 4.0}
MIN_POINTS, TILE, SPLITS = 6, 64, 8
# A path that explains times as well as another must also be plausible: a bandwidth of at least this share of the read
# bandwidth of the run, a tile within these us (3 to 4 were measured for unsplit kernels on one H200).
MIN_SHARE, TILE_US = 0.2, (1.0, 12.0)
TOLERANCE = 0.05  # of a bandwidth above the measured one, for noise
RIDGE_GAIN, PATH_GAIN = 0.9, 1.1
JUMP = 0.10  # of the residual between neighbouring contexts
Sidecars = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Facts:
    """What turns a point into terms. Heads per device and layers are 0 where the target's shape is not known."""

    weight_bytes: dict[str, float]
    kv_bytes_per_token: dict[str, float]
    num_sms: float
    num_qo_heads: int
    num_kv_heads: int
    num_layers: int
    read_gb_per_s: float


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
    facts: _Facts

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
                wanted = f"{low / factor:g} to {high * factor:g} (fitted {low:g} to {high:g}, at most {factor:g} times beyond)"
                raise InputError(f"{axis}: wanted {wanted}, got {off.iloc[0]:g}")
        for name, known in (("weight_dtype", self.facts.weight_bytes), ("kv_dtype", self.facts.kv_bytes_per_token)):
            if not points[name].isin(list(known)).all() and not (name == "weight_dtype" and weight_bytes):
                raise InputError(f"{name}: wanted one of {', '.join(known)}, got {points[name].iloc[0]!r}")
        names = list(self.terms["term"])
        if weight_bytes is not None and "weights" not in names:
            raise InputError("weight_bytes: the fit holds weights of one size; fit several weight dtypes together")
        columns = _columns(points, self.facts, self.kv_path, self.ridge, weight_bytes)
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
    rows = rows.assign(communication_ms=rows["communication_ms"].fillna(0.0) if "communication_ms" in rows else 0.0)
    keys = [*FIT_KEY, *DTYPES, *AXES, "run_id", "group"]
    rounds = rows.groupby([*keys, "round"], dropna=False)["forward_ms"].median()
    facts = rows.groupby(keys, dropna=False)[["weight_bytes_read", "kv_bytes_read", "communication_ms"]].median()
    per_round = rounds.groupby(level=list(range(len(keys))), dropna=False).agg(np.array).rename("rounds")
    table = facts.join(per_round).reset_index()
    return table.assign(forward_ms=[float(np.median(values)) for values in table["rounds"]])


def _fit(key: dict[str, Any], points: pd.DataFrame, sidecars: Sidecars, resamples: int, seed: int) -> StepModel:
    facts = _facts(key, points, sidecars)
    measured = points["forward_ms"].to_numpy(float)
    path, ridge = _structure(points, facts)
    columns = _columns(points, facts, path, ridge)
    draws = _resampled(points, resamples, seed)
    own = [name for name in columns if not name.startswith("communication")]
    shared = [name for name in columns if name.startswith("communication")]
    communication = points["communication_ms"].to_numpy(float)[:, None]
    both = np.column_stack([measured, draws])
    parts = [(own, both - communication), (shared, np.broadcast_to(communication, both.shape))]
    coefficients = np.vstack([
        _nnls(np.column_stack([columns[name] for name in names]) / measured[:, None], times / measured[:, None])
        for names, times in parts if names
    ])  # fmt: skip
    modelled = np.column_stack([columns[name] for name in [*own, *shared]]) @ coefficients[:, 0]
    points = points.assign(modelled_ms=modelled, residual=np.log(measured / modelled))
    terms = _terms([*own, *shared], coefficients, path)
    findings = (*_violations(terms, points, facts, path), *_jumps(points))
    return StepModel(key, path, ridge, terms, points.drop(columns="rounds"), findings, coefficients[:, 1:], facts)


def _facts(key: dict[str, Any], points: pd.DataFrame, sidecars: Sidecars) -> _Facts:
    tokens = points["batch_size"] * (points["context_len"] + points["q_len"])
    per_token = (points["kv_bytes_read"] / tokens).groupby(points["kv_dtype"]).median()
    weights = points.groupby("weight_dtype")["weight_bytes_read"].median()
    runs = set(points["run_id"])
    rates = [value for run, value in read_bandwidths(sidecars).items() if run in runs]
    sms = [value for run, value in calibrated(sidecars, "num_sms").items() if run in runs]
    shape = model_shapes().get(str(key["target"]).removeprefix("random:"))
    heads, layers = (0, 0), 0
    if shape is not None:
        num_gpus = int(key["num_gpus"]) if pd.notna(key["num_gpus"]) else 1
        heads = (shape.num_qo_heads // num_gpus, max(shape.num_kv_heads // num_gpus, 1))
        dtype, value = next(iter(per_token.items()))
        layers = round(value / (2 * heads[1] * shape.head_dim * dtype_bytes(str(dtype))))
    rate, num_sms = (float(np.median(values)) if values else float("nan") for values in (rates, sms))
    return _Facts(weights.to_dict(), per_token.to_dict(), num_sms, *heads, layers, rate)


def _columns(
    points: pd.DataFrame, facts: _Facts, path: str, ridge: int, weight_bytes: float | None = None
) -> dict[str, np.ndarray]:
    """Term -> amount per point [num_points]: GB, tiles in a row, tokens, or 1."""
    batch, q_len, context = (points[name].to_numpy(float) for name in AXES)
    tokens, kv_len = batch * q_len, context + q_len
    per_token = points["kv_dtype"].map(facts.kv_bytes_per_token).to_numpy(float)
    gigabytes = per_token * batch * kv_len / 1e9
    if path == PATHS[0]:
        attention = gigabytes
    elif path == PATHS[1]:
        attention = gigabytes * q_len
    else:
        splits = SPLITS if path == PATHS[2] else 1
        programs = batch * (facts.num_kv_heads * SPLITS if splits > 1 else facts.num_qo_heads) * np.ceil(q_len / TILE)
        attention = facts.num_layers * np.ceil(kv_len / TILE / splits) * np.ceil(programs / facts.num_sms)
    columns = {"fixed": np.ones(len(points))}
    if len(set(facts.weight_bytes.values())) > 1:
        own = points["weight_dtype"].map(facts.weight_bytes).to_numpy(float)
        columns["weights"] = (own if weight_bytes is None else np.full(len(points), weight_bytes)) / 1e9
    else:
        columns = {"fixed and weights": columns["fixed"]}
    columns |= {"attention": attention, "tokens": tokens}
    if ridge:
        columns["tokens beyond the ridge"] = np.maximum(tokens - ridge, 0.0)
    if "communication_ms" not in points or (points["communication_ms"] > 0).any():
        columns |= {"communication, fixed": np.ones(len(points)), "communication, tokens": tokens}
    return columns


def _structure(points: pd.DataFrame, facts: _Facts) -> tuple[str, int]:
    """The attention path and the ridge with the least relative error; a tie goes to what is plausible and simple."""
    measured = points["forward_ms"].to_numpy(float)
    target = 1 - points["communication_ms"].to_numpy(float)[:, None] / measured[:, None]
    serial = facts.num_layers > 0 and facts.num_sms > 0
    tokens = points["batch_size"] * points["q_len"]
    ridges = [ridge for ridge in RIDGES if not ridge or tokens.min() <= ridge < tokens.max()]
    found = []
    for path in PATHS if serial else PATHS[:2]:
        errors, values = [], []
        for ridge in ridges:
            columns = {k: v for k, v in _columns(points, facts, path, ridge).items() if not k.startswith("comm")}
            matrix = np.column_stack(list(columns.values())) / measured[:, None]
            solved = _nnls(matrix, target)
            errors.append(float(np.sqrt(np.mean((matrix @ solved - target) ** 2))))
            values.append(solved[list(columns).index("attention"), 0])
        best = int(np.argmin(errors))
        best = best if errors[best] < RIDGE_GAIN * errors[0] else 0
        found.append((path, ridges[best], errors[best], _plausible(path, values[best], facts)))
    least = min(error for *_, error, _ in found)
    close = [entry for entry in found if entry[2] <= PATH_GAIN * least + 1e-3]
    path, ridge, *_ = next((entry for entry in close if entry[3]), close[0])
    return path, ridge


def _plausible(path: str, ms_per_unit: float, facts: _Facts) -> bool:
    if path in PATHS[:2]:
        return not ms_per_unit * facts.read_gb_per_s * MIN_SHARE > 1e3  # True where no bandwidth was measured
    return bool(TILE_US[0] <= ms_per_unit * 1e3 <= TILE_US[1])


def _nnls(matrix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Non-negative least squares for every column of `targets`, [num_columns, num_targets].

    Exact: of all subsets of columns whose least squares are not negative, the one with the least error.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scaled, size = matrix / np.where(scale > 0, scale, 1.0), matrix.shape[1]
    best = np.zeros((size, targets.shape[1]))
    least = (targets**2).sum(axis=0)
    for count in range(1, size + 1):
        for subset in map(list, combinations(range(size), count)):
            solved = np.linalg.lstsq(scaled[:, subset], targets, rcond=None)[0]
            error = ((scaled[:, subset] @ solved - targets) ** 2).sum(axis=0)
            better = (solved >= 0).all(axis=0) & (error < least * (1 - 1e-12))
            best[:, better] = 0.0
            best[np.ix_(subset, better)] = solved[:, better]
            least = np.where(better, error, least)
    return best / np.where(scale > 0, scale, 1.0)[:, None]


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
            draws[alike.index] = np.exp(middle + spread * (np.median(values[:, chosen], axis=2) - middle))
    return draws


def _terms(names: list[str], coefficients: np.ndarray, path: str) -> pd.DataFrame:
    """Coefficients in the units that physics knows: ms, GB/s, us per token, us per tile."""
    records = []
    for name, values in zip(names, coefficients, strict=True):
        low, high = percentile_interval(values[1:], 0.95)
        record: dict[str, Any] = {"term": name, "ms_per_unit": values[0]}
        if name == "weights" or (name == "attention" and path in PATHS[:2]):
            with np.errstate(divide="ignore"):
                value, low, high = (1e3 / np.array([values[0], high, low])).tolist()
            record |= {"unit": "GB/s", "value": value, "low": low, "high": high}
        else:
            ms = name in ("fixed", "fixed and weights", "communication, fixed")
            unit = "ms" if ms else "us per tile" if name == "attention" else "us per token"
            factor = 1.0 if ms else 1e3
            record |= {"unit": unit, "value": values[0] * factor, "low": low * factor, "high": high * factor}
        records.append(record)
    return pd.DataFrame(records)[["term", "unit", "value", "low", "high", "ms_per_unit"]]


def _violations(terms: pd.DataFrame, points: pd.DataFrame, facts: _Facts, path: str) -> list[str]:
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
            text = f"residual jumps by {steps.iloc[at]:.0%} between {ends} at batch {key[2]}, q_len {key[3]}: another path?"
            found.append((steps.iloc[at], text))
    return [text for _, text in sorted(found, reverse=True)]
