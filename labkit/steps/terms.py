"""The terms of a forward's cost: how much of each a point has, which attention path explains the times, and the fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from labkit.plots.attention_table import calibrated, read_bandwidths
from labkit.shapes import dtype_bytes, model_shapes

FIT_KEY = ("gpu", "target", "backend", "linear_backend", "num_gpus", "launch_mode")
DTYPES = ("weight_dtype", "kv_dtype")
AXES = ("batch_size", "q_len", "context_len")
PATHS = (
    *("keys read once", "keys read per query token", "serial tiles, 8 splits", "serial tiles, no split"),
    "keys read once, verify on a slower path",
)
BEYOND_DECODE = "attention, verify beyond decode"
# Programs per SM that run together where each query token has a small tile of its own, as in 8-split decode kernels.
RESIDENT = 4
RIDGES = (0, 32, 64, 128, 256)  # tokens; 0: no ridge
TILE, SPLITS = 64, 8
# A path that explains times as well as another must also be plausible: a bandwidth of at least this share of the read
# bandwidth of the run, a tile within these us (3 to 4 were measured for unsplit kernels on one H200).
MIN_SHARE, TILE_US = 0.2, (1.0, 12.0)
RIDGE_GAIN, PATH_GAIN = 0.9, 1.1
Sidecars = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Facts:
    """What turns a point into terms. Heads per device and layers are 0 where the target's shape is not known."""

    weight_bytes: dict[str, float]
    kv_bytes_per_token: dict[str, float]
    num_sms: float
    num_qo_heads: int
    num_kv_heads: int
    num_layers: int
    read_gb_per_s: float
    batch_varies: bool  # of one batch size the states cannot be told from fixed cost and tokens
    state_bytes: float  # per request and state that is read or written: 1 + q_len of them in a forward


def facts_of(key: Mapping[str, Any], points: pd.DataFrame, sidecars: Sidecars) -> Facts:
    """From the bytes that the points read, the calibration of their runs, and the shape of the target."""
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
    weight_bytes, kv_bytes = ({str(k): float(v) for k, v in s.items()} for s in (weights, per_token))
    states = float((points["state_bytes"] / points["batch_size"] / (1 + points["q_len"])).median())
    return Facts(weight_bytes, kv_bytes, num_sms, *heads, layers, rate, points["batch_size"].nunique() > 1, states)


def term_columns(
    points: pd.DataFrame, facts: Facts, path: str, ridge: int, weight_bytes: float | None = None
) -> dict[str, np.ndarray]:
    """Term -> amount per point [num_points]: GB, tiles in a row, tokens, or 1."""
    batch, q_len, context = (points[name].to_numpy(float) for name in AXES)
    tokens, kv_len = batch * q_len, context + q_len
    per_token = points["kv_dtype"].map(facts.kv_bytes_per_token).to_numpy(float)
    gigabytes = per_token * batch * kv_len / 1e9
    if path in (PATHS[0], PATHS[4]):
        attention = gigabytes
    elif path == PATHS[1]:
        attention = gigabytes * q_len
    elif path == PATHS[2]:
        waves = np.ceil(batch * facts.num_kv_heads * SPLITS * q_len / (RESIDENT * facts.num_sms))
        attention = facts.num_layers * np.ceil(kv_len / TILE / SPLITS) * waves
    else:
        waves = np.ceil(batch * facts.num_qo_heads * np.ceil(q_len / TILE) / facts.num_sms)
        attention = facts.num_layers * np.ceil(kv_len / TILE) * waves
    one = np.ones(len(points))
    columns: dict[str, np.ndarray] = {}
    if len(set(facts.weight_bytes.values())) > 1:
        own = points["weight_dtype"].map(facts.weight_bytes).to_numpy(float)
        columns |= {"fixed": one, "weights": (own if weight_bytes is None else weight_bytes * one) / 1e9}
    else:
        columns["fixed and weights"] = one
    columns |= {"attention": attention, "tokens": tokens}
    if path == PATHS[4]:
        columns[BEYOND_DECODE] = gigabytes * (q_len > 1)
    if facts.state_bytes and facts.batch_varies:
        columns["states"] = facts.state_bytes * batch * (1 + q_len) / 1e9
    if ridge:
        columns["tokens beyond the ridge"] = np.maximum(tokens - ridge, 0.0)
    if "communication_ms" not in points or (points["communication_ms"] > 0).any():
        columns |= {"communication, fixed": one, "communication, tokens": tokens}
    return columns


def structure(points: pd.DataFrame, facts: Facts) -> tuple[str, int]:
    """The attention path and the ridge with the least relative error; a tie goes to what is plausible and simple."""
    measured = points["forward_ms"].to_numpy(float)
    target = 1 - points["communication_ms"].to_numpy(float)[:, None] / measured[:, None]
    serial = facts.num_layers > 0 and facts.num_sms > 0
    tokens = points["batch_size"] * points["q_len"]
    ridges = [ridge for ridge in RIDGES if not ridge or tokens.min() <= ridge < tokens.max()]
    found = []
    for path in PATHS if serial else (*PATHS[:2], PATHS[4]):
        errors, values = [], []
        for ridge in ridges:
            columns = {k: v for k, v in term_columns(points, facts, path, ridge).items() if not k.startswith("comm")}
            matrix = np.column_stack(list(columns.values())) / measured[:, None]
            solved = nonnegative_fit(matrix, target)
            errors.append(float(np.sqrt(np.mean((matrix @ solved - target) ** 2))))
            values.append(solved[list(columns).index("attention"), 0])
        best = int(np.argmin(errors))
        best = best if errors[best] < RIDGE_GAIN * errors[0] else 0
        found.append((path, ridges[best], errors[best], _plausible(path, values[best], facts)))
    least = min(error for *_, error, _ in found)
    close = [entry for entry in found if entry[2] <= PATH_GAIN * least + 1e-3]
    path, ridge, *_ = next((entry for entry in close if entry[3]), close[0])
    return path, ridge


def _plausible(path: str, ms_per_unit: float, facts: Facts) -> bool:
    if path in (*PATHS[:2], PATHS[4]):
        return not ms_per_unit * facts.read_gb_per_s * MIN_SHARE > 1e3  # True where no bandwidth was measured
    return bool(TILE_US[0] <= ms_per_unit * 1e3 <= TILE_US[1])


def nonnegative_fit(matrix: np.ndarray, targets: np.ndarray) -> np.ndarray:
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
