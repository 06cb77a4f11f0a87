"""What a whole request gains: prefill, the drafter's prefill and the output length beside the speed-up of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.forward_costs import FREE, by_machine
from labkit.decide.step_costs import StepCosts, baseline_ms
from labkit.errors import InputError
from labkit.rows import FORCED_ORIGINS

OUTPUT_TOKENS = (16, 64, 256, 1024, 4096)
REQUEST_KEY = ("context_len", "batch_size", "num_speculative_tokens", "drafter", "verify_backend", "workload")


def request_speedup(
    speedup: float, output_tokens: Any, *, decode_ms: float, prefill_ms: float, draft_prefill_ms: float = 0.0
) -> Any:
    """Time of a request without speculation over its time with it.

    speedup : of a step, mean_acceptance_length / relative_step_cost. output_tokens : the prefill's token included; a
    number or an array. decode_ms, prefill_ms, draft_prefill_ms : a plain step, the target's prompt, the drafter's.

    A request is one prefill and output_tokens - 1 further tokens. Not counted: queueing, and that the last step yields
    tokens beyond the output (the gain of very short outputs is a little smaller than this).

    Raises InputError: fewer than 1 token, or a time or speed-up out of range.
    """
    times = (decode_ms, speedup)
    if np.min(output_tokens) < 1 or min(times) <= 0 or min(prefill_ms, draft_prefill_ms) < 0:
        got = f"{output_tokens}, {decode_ms}, {speedup}, {prefill_ms}, {draft_prefill_ms}"
        raise InputError(
            f"request: want 1 token or more, decode_ms and speedup above 0, prefills of 0 or more; got {got}"
        )
    decode = (np.asarray(output_tokens, float) - 1) * decode_ms
    plain, speculative = prefill_ms + decode, prefill_ms + draft_prefill_ms + decode / speedup
    ratio = np.divide(plain, speculative, out=np.ones_like(decode), where=speculative > 0)
    return ratio if ratio.ndim else float(ratio)


def turning_length(speedup: float, *, decode_ms: float, draft_prefill_ms: float) -> float:
    """Output length in tokens from which a request gains; inf where a step does not.

    The target's prefill is on both sides and cancels: what has to be earned back is the drafter's.
    """
    return 1 + draft_prefill_ms / (decode_ms * (1 - 1 / speedup)) if speedup > 1 else float("inf")


def request_table(
    costs: Sequence[StepCosts], cells: pd.DataFrame, rows: pd.DataFrame, *, output_tokens: Sequence[int] = OUTPUT_TOKENS
) -> pd.DataFrame:
    """Request speed-up of every judged cell at several output lengths, and the length from which it is above 1.

    cells : `Breakeven.cells` of ``costs``. rows : the loop or step rows they came from. draft_prefill_ms is read from
    loop rows at the cell (a mean is no estimate of it: the median), or from ``prefill`` rows with a drafter at q_len +
    context_len = the cell's context; prefill_ms from those without, of the fastest backend. Free drafting has no
    prefill. Unknown ones are NaN and so is what needs them.

    Returns context_len, batch_size, num_speculative_tokens, drafter, verify_backend, workload, decode_ms, prefill_ms,
    draft_prefill_ms, turning_length with _low and _high (from the interval of the speed-up), and one column
    ``at_<n>`` per output length. Raises InputError: neither prefill was measured anywhere.
    """
    rows = by_machine(rows)
    by_key = {tuple(cost.key.values()): cost for cost in costs}
    names = list(costs[0].key) if costs else []
    records = []
    for cell in cells[cells["speedup"].notna()].to_dict("records"):
        cost = by_key[tuple(None if pd.isna(cell[name]) else cell[name] for name in names)]
        decode_ms = float(np.nanmedian(baseline_ms(cost, "fastest")[1]))
        prefill_ms, draft_ms = _prefill(rows, cell, drafter=False), _prefill(rows, cell, drafter=True)
        times = {"decode_ms": decode_ms, "prefill_ms": prefill_ms, "draft_prefill_ms": draft_ms}
        record = {name: cell[name] for name in REQUEST_KEY} | times
        for name, bound in (("", "speedup"), ("_low", "speedup_high"), ("_high", "speedup_low")):
            found = turning_length(cell[bound], decode_ms=decode_ms, draft_prefill_ms=draft_ms)
            record[f"turning_length{name}"] = found
        known = np.isfinite([prefill_ms, draft_ms]).all()
        for n in output_tokens:
            record[f"at_{n}"] = request_speedup(cell["speedup"], n, **times) if known else np.nan
        records.append(record)
    table = pd.DataFrame(records)
    if records and table[["prefill_ms", "draft_prefill_ms"]].isna().all(axis=None):
        raise InputError("request: no prefill was measured beside these costs")
    return table


def _prefill(rows: pd.DataFrame, cell: dict[Any, Any], *, drafter: bool) -> float:
    """Median prefill time of the target or the cell's drafter at a prompt of context_len tokens; NaN: not measured."""
    alike = [n for n in ("target", "batch_size", "gpu", "weight_dtype", "kv_dtype") if n in rows and pd.notna(cell[n])]
    here = (rows[alike] == [cell[name] for name in alike]).all(axis=1)
    if "phase" in rows and (rows["phase"] == "prefill").any():
        if drafter and cell["drafter"] == FREE:
            return 0.0
        prompt = rows["q_len"] + rows["context_len"] == cell["context_len"]
        whose = rows["drafter"] == cell["drafter"] if drafter else rows["drafter"].isna()
        found = rows[here & prompt & whose & (rows["phase"] == "prefill")]
        return float(found.groupby("backend")["forward_ms"].median().min())
    if drafter and "draft_prefill_ms" in rows:
        place = (rows["context_len"] == cell["context_len"]) & rows["origin"].isin(FORCED_ORIGINS)
        times = rows.loc[here & place & (rows["drafter"] == cell["drafter"]), "draft_prefill_ms"].dropna()
        return float(times.median()) if len(times) else float("nan")
    return float("nan")
