"""Why a step costs what it costs: its parts in units of acceptance length, slopes in context, and the floor.

Slopes are those of whole forwards: weights do not depend on the context, so what grows with it is attention. The floor
of a slope is the KV cache of one token of every request, read once at the read bandwidth of the same run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.cost import floor_relative_cost
from labkit.decide.diagnosis import FLAT, HEALTHY, LINEAR
from labkit.decide.step_costs import CELL_KEY, StepCosts, baseline_ms, finite_median
from labkit.errors import InputError
from labkit.shapes import model_shape, model_shapes

# Bars of the waterfall, and the stored parts that each is the sum of.
BARS: Mapping[str, tuple[str, ...]] = {
    "draft attention": ("draft_attention_ms",),
    "draft rest": ("draft_rest_ms",),
    "verify attention": ("verify_attention_ms",),
    "verify rest": ("verify_rest_ms",),
    "sampling": ("sampling_ms", "accept_ms"),
    "communication": ("communication_ms",),
    "gap": ("gap_ms",),
}
# Where attention was not timed apart, one bar stands for the whole forward.
WHOLE = {"draft": "draft_ms", "verify": "verify_ms"}
CURVE = [name for name in CELL_KEY if name not in ("context_len", "num_speculative_tokens")]
DRAFT_SCAN = 0.5


def waterfall(costs: Sequence[StepCosts], baseline: str = "fastest") -> pd.DataFrame:
    """Each part of a step with k drafts, in plain decode steps: how much acceptance length pays for it.

    One row per cell and bar: the cell's key, part, tokens (median over rounds of part / decode_ms) and
    relative_step_cost. ``unexplained`` is what the parts leave of it, overlap below 0. A forward without an attention
    time of its own is one bar, ``draft`` or ``verify``. Cells without a baseline are left out.
    """
    records = []
    for cost in costs:
        decode_ms = baseline_ms(cost, baseline)[1]
        ratio = cost.step_ms[:, cost.num_speculative_tokens] / decode_ms
        total = finite_median(ratio)
        if not np.isfinite(total):
            continue
        parts = {name: _tokens(cost.parts_ms, columns, decode_ms) for name, columns in BARS.items()}
        for name, column in WHOLE.items():
            halves = [f"{name} attention", f"{name} rest"]
            if not all(np.isfinite(parts[half]) for half in halves):
                parts = {name: _tokens(cost.parts_ms, (column,), decode_ms)} | parts
                for half in halves:
                    del parts[half]
        parts = {name: tokens for name, tokens in parts.items() if np.isfinite(tokens)}
        parts["unexplained"] = total - sum(parts.values())
        records += [
            cost.key | {"part": name, "tokens": tokens, "relative_step_cost": total} for name, tokens in parts.items()
        ]
    return pd.DataFrame(records, columns=[*CELL_KEY, "part", "tokens", "relative_step_cost"])


def _tokens(parts_ms: Mapping[str, np.ndarray], columns: Sequence[str], decode_ms: np.ndarray) -> float:
    known = [parts_ms[name] for name in columns if name in parts_ms]
    return finite_median(sum(known) / decode_ms) if known else float("nan")


def diagnose_slopes(
    verify: float, decode: float, q_len: int, *, draft: float = 0.0, exponent: float = float("nan")
) -> tuple[str, str]:
    """A cause and the numbers behind it.

    verify, decode, draft : growth in context over the floor's (1 = each key and value read once); ``draft`` of all
        drafting of a step, in reads of the target's cache.
    exponent : of the power of q_len that the verify slope follows; NaN where one q_len was measured.

    Thresholds as in `labkit.decide.diagnosis`: up to `HEALTHY` floors is healthy. A verify slope that grows with q_len
    (from `LINEAR` on) re-reads the cache per draft token, one that does not (up to `FLAT`) lacks a KV split. With one
    q_len a ratio to decode within 1.5 times q_len is called a re-read, "likely".
    """
    text = (
        f"verify grows {verify:.1f} and decode {decode:.1f} times as fast as one KV read, ratio {verify / decode:.1f}"
    )
    if not np.isfinite([verify, decode]).all() or min(verify, decode) <= 0:
        return "unknown", "too few contexts, no read bandwidth of the run, or no growth with context"
    scans = draft > max(DRAFT_SCAN, verify - 1)
    text += f", drafting {draft:.1f}" if draft else ""
    if scans and verify <= HEALTHY:
        return "drafter scans the full context", text
    if verify <= HEALTHY:
        return "healthy", text
    if decode > HEALTHY and verify / decode <= HEALTHY:
        return "baseline degenerate: decode as well as verify is far above one KV read", text
    rereads = exponent >= LINEAR if np.isfinite(exponent) else q_len / 1.5 <= verify / decode <= 1.5 * q_len
    if rereads:
        return "KV re-read per draft token" + ("" if np.isfinite(exponent) else " (likely)"), text
    flat = np.isnan(exponent) or exponent <= FLAT
    return ("verify lacks a KV split" if flat else "verify far above the floor, neither flat nor linear in q_len"), text


def slope_causes(
    costs: Sequence[StepCosts], read_gb_per_s: Mapping[str, float] | float | None, baseline: str = "fastest"
) -> pd.DataFrame:
    """One row per curve and k: slopes of verify, decode and drafting over the floor, their ratio, the diagnosis.

    read_gb_per_s : measured read bandwidth in 1e9 B/s, one or per gpu; without it slopes over the floor are NaN and the
        cause is unknown, verify_decode_slope_ratio stands.

    Returns the curve's key, num_speculative_tokens, num_contexts, verify_slope_over_floor, decode_slope_over_floor,
    draft_slope_over_floor, verify_decode_slope_ratio, diagnosis, because. Models without a known shape have no floor.
    """
    curves: dict[tuple[Any, ...], list[StepCosts]] = {}
    for cost in costs:
        curves.setdefault(tuple(cost.key[name] for name in (*CURVE, "num_speculative_tokens")), []).append(cost)
    records = []
    for key, cells in curves.items():
        names = dict(zip((*CURVE, "num_speculative_tokens"), key, strict=True))
        floor = _floor_us_per_token(names, read_gb_per_s)
        slopes = {
            "verify": _slope(cells, lambda cost: cost.parts_ms.get("verify_ms")),
            "decode": _slope(cells, lambda cost: baseline_ms(cost, baseline)[1]),
            "draft": _slope(cells, lambda cost: cost.parts_ms.get("draft_ms")),
        }
        over = {f"{name}_slope_over_floor": slope / floor for name, slope in slopes.items()}
        ratio = slopes["verify"] / slopes["decode"]
        contexts = len({cost.key["context_len"] for cost in cells})
        records.append(names | {"num_contexts": contexts} | over | {"verify_decode_slope_ratio": ratio})
    table = pd.DataFrame(records)
    curve = table.groupby(CURVE, dropna=False).ngroup().to_numpy()
    found = [_diagnosed(row, table[curve == own]) for own, (_, row) in zip(curve, table.iterrows(), strict=True)]
    return table.assign(diagnosis=[label for label, _ in found], because=[text for _, text in found])


def _diagnosed(row: pd.Series, same: pd.DataFrame) -> tuple[str, str]:
    """``same``: the rows of the curve at every k."""
    same = same[same["verify_slope_over_floor"] > 0]
    q_lens = same["num_speculative_tokens"].to_numpy(float) + 1
    exponent = np.nan
    if len(q_lens) > 1:
        exponent = np.polyfit(np.log(q_lens), np.log(same["verify_slope_over_floor"].to_numpy(float)), 1)[0]
    draft = row["draft_slope_over_floor"]
    return diagnose_slopes(
        row["verify_slope_over_floor"], row["decode_slope_over_floor"], int(row["num_speculative_tokens"]) + 1,
        draft=max(draft, 0.0) if np.isfinite(draft) else 0.0, exponent=float(exponent),
    )  # fmt: skip


def _slope(cells: Sequence[StepCosts], times: Any) -> float:
    """Least-squares growth in us per token of context, of medians over rounds; NaN below three contexts over 4 x."""
    points = [(cost.key["context_len"], times(cost)) for cost in cells]
    found = [(x, finite_median(ms) * 1e3) for x, ms in points if ms is not None and np.isfinite(ms).any()]
    x, y = np.array(found, float).reshape(-1, 2).T
    if len(set(x)) < 3 or max(x) < 4 * min(x):
        return float("nan")
    return float(np.polyfit(x, y, 1)[0])


def _floor_us_per_token(names: Mapping[str, Any], read_gb_per_s: Mapping[str, float] | float | None) -> float:
    rate = read_gb_per_s.get(names["gpu"]) if isinstance(read_gb_per_s, Mapping) else read_gb_per_s
    try:
        per_request = model_shape(names["target"].removeprefix("random:")).kv_bytes_per_token(names["kv_dtype"])
    except (InputError, TypeError):
        return float("nan")
    return per_request * names["batch_size"] / rate / 1e3 if rate else float("nan")


def breakeven_floor(cells: pd.DataFrame) -> pd.DataFrame:
    """Break-even length if verify read weights and KV cache once (modelled), per context, batch size and k.

    Columns context_len, batch_size, num_speculative_tokens, relative_step_cost, origin. Empty where the shape of the
    target is not known. A drafter without a known shape (n-grams, heads) counts as free: the floor stays a lower bound.
    """
    keys = ["target", "drafter", "context_len", "batch_size", "num_speculative_tokens", "weight_dtype", "kv_dtype"]
    rows = []
    for row in cells[keys].drop_duplicates().to_dict("records"):
        try:
            model = model_shape(row["target"].removeprefix("random:"))
            draft_model = model_shapes().get(row["drafter"])
            sizes = {name: int(row[name]) for name in keys[2:5]}
            cost = floor_relative_cost(model, draft_model=draft_model, **{n: row[n] for n in keys[5:]}, **sizes)
        except InputError:
            continue
        rows.append(sizes | {"relative_step_cost": cost, "origin": "modelled"})
    return pd.DataFrame(rows, columns=[*keys[2:5], "relative_step_cost", "origin"])


def inefficiency(cells: pd.DataFrame) -> pd.DataFrame:
    """Measured break-even length beside its floor: how much of the needed length the kernels and the host cost.

    cells : `labkit.breakeven.Breakeven.cells`. Returns its key columns, relative_step_cost, floor and above_floor
    (tokens of acceptance length that one read of weights and cache would not need); NaN where no floor is known.
    """
    keys = ["context_len", "batch_size", "num_speculative_tokens"]
    names = ["gpu", "target", "drafter", "weight_dtype", "kv_dtype"]
    columns = [*names, "verify_backend", "draft_backend", *keys, "relative_step_cost"]
    tables = []
    for _, own in cells[columns].drop_duplicates().groupby(names, dropna=False):
        floor = breakeven_floor(own)[[*keys, "relative_step_cost"]].rename(columns={"relative_step_cost": "floor"})
        tables.append(own.merge(floor.drop_duplicates(keys), on=keys, how="left"))
    table = pd.concat(tables, ignore_index=True)
    table = table.assign(above_floor=table["relative_step_cost"] - table["floor"])
    return table.sort_values(["verify_backend", *keys], ignore_index=True)
