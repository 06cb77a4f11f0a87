"""Isolated forwards (experiment "step") in the form of loop rows, so that costs and verdicts are computed once.

A speculative step with j drafts is one verify forward of q_len j+1 and the drafter's forwards before it; its baseline is
one decode forward. Not in it, unlike in the loop's wall time: host time between forwards, bookkeeping, and whatever
drafts without a model. `labkit.step_table.closure_table` says how much that is.
"""

import pandas as pd

from labkit.errors import InputError
from labkit.rows import ok_rows

FREE = "none (drafting free)"
UNIT = ["run_id", "group", "round"]
# Of the target's forwards, carried over; the group fixes all but the launch mode.
_CONSTANT = [
    *("gpu", "origin", "target", "batch_size", "context_len", "weight_dtype", "kv_dtype", "linear_backend"),
    "launch_mode",
]
_FORWARD = ["phase", "drafter", "backend", "q_len"]


def loop_rows(step_rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `labkit.step_costs.step_costs` from forwards: per round one row for each draft length of each cell.

    Cells: every verify backend, every k = q_len - 1 that it verified, with drafting free (drafter `FREE`) and, for each
    drafter whose forwards were measured in the group, with its cost. A step drafts j tokens by ``draft_extend`` over the
    tokens of the last step (q_len j+1, or the one length measured), which gives the first draft, and j-1 ``draft``
    forwards of one token; by j of these where no extend was measured; or by one ``draft`` forward of q_len j+1 (a block).
    A step without a draft is the decode forward of the same backend and costs no drafting.

    Raises InputError: columns or phases are missing, or a draft forward without its drafter's name.
    """
    rows = ok_rows(step_rows, "step", [*UNIT, *_CONSTANT, *_FORWARD, "forward_ms"])
    if rows[UNIT].isna().any(axis=None):
        raise InputError("step rows need run_id, group and round in every row: ratios are paired by them")
    quality = rows["quality"] if "quality" in rows else None
    rows = rows.assign(quality=None if quality is None else quality.where(quality != "ok"))
    # "first" skips nulls, so one doubtful sample marks the median of its round.
    forwards = rows.groupby([*UNIT, *_FORWARD], dropna=False, as_index=False).agg(
        {"forward_ms": "median", "quality": "first", **dict.fromkeys(_CONSTANT, "first")}
    )
    decode = forwards[(forwards["phase"] == "decode") & (forwards["q_len"] == 1)]
    verify = forwards[(forwards["phase"] == "verify") & (forwards["q_len"] > 1)]
    if decode.empty or verify.empty:
        found = ", ".join(sorted(forwards["phase"].unique()))
        raise InputError(f"step rows must hold the phases decode and verify as costs, got {found}")
    plain = decode.assign(arm="plain", decode_backend=decode["backend"], num_drafted_tokens=0)
    free = _speculative(decode, verify)
    arms = [plain, free.assign(drafter=FREE), *_drafted(free, forwards)]
    return pd.concat([arm.rename(columns={"forward_ms": "step_ms"}) for arm in arms], ignore_index=True).drop(
        columns=["phase", "backend"]
    )


def _speculative(decode: pd.DataFrame, verify: pd.DataFrame) -> pd.DataFrame:
    """Verify forwards of every draft length up to k, for every k of a group and backend."""
    cells = verify[["run_id", "group", "backend", "q_len"]].drop_duplicates()
    cells = cells.assign(num_speculative_tokens=cells.pop("q_len") - 1)
    steps = pd.concat([decode, verify]).merge(cells, on=["run_id", "group", "backend"])
    steps = steps.assign(
        arm="speculative", verify_backend=steps["backend"], draft_backend=None, num_drafted_tokens=steps["q_len"] - 1
    )
    return steps[steps["num_drafted_tokens"] <= steps["num_speculative_tokens"]]


def _drafted(free: pd.DataFrame, forwards: pd.DataFrame) -> list[pd.DataFrame]:
    """The steps of `free` with the forwards of each drafter added; rounds and lengths that lack one are left out."""
    drafts = forwards[forwards["phase"].isin(("draft", "draft_extend"))]
    if drafts["drafter"].isna().any():
        raise InputError("drafter must be given in every step row of phase draft or draft_extend")
    arms = []
    for (drafter, backend), own in drafts.groupby(["drafter", "backend"]):
        extend, draft = own[own["phase"] == "draft_extend"], own[own["phase"] == "draft"]
        drafted = free.assign(drafter=drafter, draft_backend=backend)
        one = _draft_ms(drafted, draft[draft["q_len"] == 1], by_length=False)
        block = _draft_ms(drafted, draft[draft["q_len"] > 1], by_length=True)
        first = _draft_ms(drafted, extend, by_length=extend["q_len"].nunique() > 1)
        j = drafted["num_drafted_tokens"]
        draft_ms = one * j if extend.empty else first + (one * (j - 1)).where(j > 1, 0.0)
        draft_ms = draft_ms.fillna(block).where(j > 0, 0.0)
        drafted = drafted.assign(forward_ms=drafted["forward_ms"] + draft_ms)
        arms.append(drafted[drafted["forward_ms"].notna()])
    return arms


def _draft_ms(steps: pd.DataFrame, forwards: pd.DataFrame, *, by_length: bool) -> pd.Series:
    """The drafter's forward of the same round (and q_len) for each step, NaN where there is none."""
    keys = [*UNIT, *(["q_len"] if by_length else [])]
    found = forwards.groupby(keys)["forward_ms"].median().rename("draft_ms")
    return steps[keys].join(found, on=keys)["draft_ms"]
