"""What was predicted about verify attention before it was measured, and what the rows say about it.

The predictions were made for 24 query and 4 KV heads of 256 at batch 1; where that shape was not measured, the setting
with most cells stands in, and the table says which. Times are compared within one run only.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from labkit.decide.diagnosis import slope_table
from labkit.errors import InputError
from labkit.plots.attention_table import cell_table, one_setting, read_bandwidths
from labkit.plots.style import format_tokens

REF = {"num_qo_heads": 24, "num_kv_heads": 4, "head_dim": 256}
SAME, BANDWIDTH = 0.2, 2.0  # equal within 20%; near the bandwidth within twice the floor
# A published case (8B class, one token per step): tokens per second at 200 and at 2,000 tokens of context.
PUBLISHED = {"triton": (147.64, 126.41), "flashinfer": (144.17, 143.35)}
PUBLISHED_SHAPE, PUBLISHED_LAYERS = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 32
PUBLISHED_CONTEXTS = ((150, 300), (1800, 2200))
Sidecars = Mapping[str, Mapping[str, Any]]
Verdict = tuple[bool | None, str]


def _unsplit(cells: pd.DataFrame, slopes: pd.DataFrame) -> Verdict:
    """The first prediction, from the slopes of all batch sizes whose programs run at once."""
    rows = slopes[(slopes["backend"] == "triton_nosplit") & (slopes["num_contexts"] >= 3)]
    rows = rows[(rows["run_id"] == rows["run_id"].max()) & ~(rows["num_programs"] > rows["num_sms"])]
    rows = rows.sort_values(["batch_size", "q_len"])
    if rows.empty:
        return None, "needs triton_nosplit at three contexts"
    tile, first, last = rows["slope_us_per_1k"] / 16, rows.iloc[0], rows.iloc[-1]
    text = f"{tile.min():.1f} to {tile.max():.1f} us per 64 keys, q_len {rows['q_len'].min()} to {rows['q_len'].max()}"
    text += f", batch {first['batch_size']} to {last['batch_size']}"
    text += "" if rows["num_sms"].notna().all() else " (number of SMs not recorded)"
    flat = tile.max() <= (1 + SAME) * tile.min()
    return bool(flat and tile.between(3, 6).all() and rows["jump_at"].isna().all()), text


def _compare(first: str, second: str, holds: Callable[[pd.Series], Any], longest: float = float("inf")) -> Any:
    """A prediction about two backends in one run, at the longest context (up to ``longest``) and the largest q_len.

    ``holds`` gets the cell of ``first``, that of ``second`` as ``.._b``, and the ``ratio`` of its time to the first's.
    """

    def judge(cells: pd.DataFrame, slopes: pd.DataFrame) -> Verdict:
        keys = ["context_len", "q_len", "run_id"]
        a, b = (cells[(cells["backend"] == name) & (cells["context_len"] <= longest)] for name in (first, second))
        both = a.merge(b, on=keys, suffixes=("", "_b")).sort_values(keys)
        if both.empty:
            return None, f"needs {first} and {second} in one run" + (" at 1K or below" if longest < 2**20 else "")
        pair = both.iloc[-1]
        pair["ratio"] = pair["attention_us_b"] / pair["attention_us"]
        parts = [f"q_len {pair['q_len']}, context {format_tokens(pair['context_len'])}"]
        for name, end in ((first, ""), (second, "_b")):
            splits = "" if pd.isna(pair[f"num_splits{end}"]) else f", {pair[f'num_splits{end}']:.0f} split(s)"
            over = "" if pd.isna(pair["over_floor"]) else f", {pair[f'over_floor{end}']:.1f} times the floor"
            parts.append(f"{name} {pair[f'attention_us{end}']:,.0f} us{splits}{over} ({pair[f'kernel{end}']})")
        return bool(holds(pair)), "; ".join([*parts, f"ratio {pair['ratio']:.2f}"])

    return judge


def _split_pays(pair: pd.Series) -> bool:
    few = pair["num_splits_b"] <= 11
    return bool(1 / pair["ratio"] >= (1 - SAME) * pair["num_splits_b"] if few else pair["over_floor_b"] <= BANDWIDTH)


PREDICTIONS: Mapping[str, Callable[[pd.DataFrame, pd.DataFrame], Verdict]] = {
    "no split: linear in context, 3 to 6 us per 64 keys, flat in q_len and batch while programs run at once": _unsplit,
    "KV split alone: as many times faster as there are splits, up to 5 to 11, then bandwidth":
        _compare("triton_nosplit", "triton_ladder_split", _split_pays),
    "packing query heads without a split gains nothing at batch 1":
        _compare("triton_nosplit", "triton_segmented_2d", lambda pair: pair["ratio"] >= 1 - SAME),
    "more stages alone: at most twice as fast":
        _compare("triton_ladder_packed", "triton_ladder_staged", lambda pair: pair["ratio"] >= 0.5),
    "FlashInfer's automatic choice degenerates with 16-bit keys, fa2 stays near the bandwidth":
        _compare("flashinfer_auto", "flashinfer_fa2", lambda p: p["ratio"] < 1 / 3 and p["over_floor_b"] <= BANDWIDTH),
    "one decode call per query token beats the unsplit kernel":
        _compare("triton_nosplit", "triton_per_token", lambda pair: pair["ratio"] < 1),
    "a split loses to no split below 1K to 2K":
        _compare("triton_nosplit", "triton_split", lambda pair: pair["ratio"] > 1, longest=1024),
}  # fmt: skip


def predictions(df: pd.DataFrame, sidecars: Sidecars | None = None) -> pd.DataFrame:
    """Each prediction with its verdict (confirmed, refuted, not measured), the numbers, and the shape they are of.

    Raises InputError when there are no ok rows.
    """
    try:
        rows = one_setting(df, batch_size=1, **REF)
    except InputError:
        rows = one_setting(df)
    cells, same = cell_table(rows, read_bandwidths(sidecars or {})), rows.iloc[0]
    but_batch = ("num_qo_heads", "head_dim", "kv_dtype", "q_dtype", "page_size", "launch_mode", "l2_state")
    slopes = slope_table(df[(df[list(but_batch)] == same[list(but_batch)]).all(axis=1)], sidecars)
    records = []
    for claim, judge in PREDICTIONS.items():
        holds, numbers = judge(cells, slopes)
        verdict = "not measured" if holds is None else "confirmed" if holds else "refuted"
        records.append({"prediction": claim, "verdict": verdict, "numbers": numbers})
    shape = f"{same['num_qo_heads']}/{same['num_kv_heads']}/{same['head_dim']}"
    return pd.DataFrame(records, index=range(1, len(records) + 1)).assign(shape=shape)


def published_growth(df: pd.DataFrame) -> pd.DataFrame:
    """The published fall of speed from 200 to 2,000 tokens of context beside the same growth of attention here.

    Decode of one token, 32/8/128 heads, batch 1. Columns backend, run_id, origin, added_ms (over 32 layers, between the
    two contexts) and added_us (per layer); of the published rows from their tokens per second. On another device: what
    compares is the growth of one backend beside another's. Raises InputError when no run has both contexts.
    """
    records: list[dict[str, Any]] = [
        {"backend": name, "run_id": None, "origin": "published", "added_ms": 1e3 / slow - 1e3 / fast}
        for name, (fast, slow) in PUBLISHED.items()
    ]
    rows = one_setting(df, batch_size=1, q_len=1, **PUBLISHED_SHAPE)
    for (run, name), cells in cell_table(rows).groupby(["run_id", "backend"]):
        ends = [cells[cells["context_len"].between(*limits)]["attention_us"] for limits in PUBLISHED_CONTEXTS]
        if all(map(len, ends)):
            added_ms = float(ends[1].iloc[-1] - ends[0].iloc[0]) * PUBLISHED_LAYERS / 1e3
            records.append({"backend": name, "run_id": run, "origin": "measured", "added_ms": added_ms})
    if len(records) == len(PUBLISHED):
        raise InputError("growth from 200 to 2,000 tokens at 32/8/128, q_len 1: no run has contexts near both")
    table = pd.DataFrame(records)
    return table.assign(added_us=table["added_ms"] * 1e3 / PUBLISHED_LAYERS)
