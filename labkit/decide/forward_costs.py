"""Isolated forwards (experiment "step") in the form of loop rows, so that costs and verdicts are computed once.

A speculative step with j drafts is one verify forward of q_len j+1 and the drafter's forwards before it; its baseline
is one decode forward. Not in it, unlike in the loop's wall time: host time between forwards, bookkeeping, and whatever
drafts without a model. `labkit.steps.table.closure_table` says how much that is.
"""

from collections.abc import Sequence

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
    """Rows of `labkit.decide.step_costs.step_costs` from forwards: per round one row per draft length of each cell.

    Cells: every verify backend, every k = q_len - 1 that it verified, with drafting free (drafter `FREE`) and, for each
    drafter whose forwards were measured in the group, with its cost: on the verify backend where it was measured there,
    else on each of its backends. A step drafts j tokens by ``draft_extend`` over
    the tokens of the last step (q_len j+1, or the one length measured), which gives the first draft, and j-1 ``draft``
    forwards of one token; by j of these where no extend was measured; or by one ``draft`` forward of q_len j+1 (a
    block). A step without a draft is the decode forward of the same backend and costs no drafting. Rows with a shared
    prefix are left out: they are costs of another kind of batch.

    Raises InputError: columns or phases are missing, or a draft forward without its drafter's name.
    """
    rows = by_machine(without_shared_prefix(ok_rows(step_rows, "step", [*UNIT, *_CONSTANT, *_FORWARD, "forward_ms"])))
    if rows[UNIT].isna().any(axis=None):
        raise InputError("step rows need run_id, group and round in every row: ratios are paired by them")
    quality = rows.get("quality", pd.Series(None, index=rows.index, dtype=object))
    rows = rows.assign(quality=quality.where(quality != "ok"))
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


def by_machine(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the number of devices in `gpu` where there are several: ``nvidia-h200 x2`` is another machine."""
    if "num_gpus" not in rows or not (several := rows["num_gpus"].fillna(1) > 1).any():
        return rows
    names = rows["gpu"].astype(str) + " x" + rows["num_gpus"].fillna(1).astype(int).astype(str)
    return rows.assign(gpu=names.where(several, rows["gpu"]))


def without_shared_prefix(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of forwards whose requests share no context."""
    return rows[rows["shared_prefix_len"].fillna(0) == 0] if "shared_prefix_len" in rows else rows


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
    for key, own in drafts.groupby(["drafter", "backend"]):
        drafter, backend = map(str, key)
        times = own.groupby([*UNIT, "phase", "q_len"])["forward_ms"].median().unstack(["phase", "q_len"])
        measured = list(own[["phase", "q_len"]].drop_duplicates().itertuples(index=False, name=None))
        # One engine flag moves verify and drafter together, so a drafter is paired with its own backend where it can.
        alone = ~free["verify_backend"].isin(drafts.loc[drafts["drafter"] == drafter, "backend"])
        for j, steps in free[alone | (free["verify_backend"] == backend)].groupby("num_drafted_tokens"):
            plan = draft_forwards(measured, int(str(j)))
            if plan is None:
                continue
            draft_ms = sum(
                (count * times[forward] for forward, count in plan), start=0.0 * times.iloc[:, 0].fillna(0.0)
            )
            drafted = steps.assign(drafter=drafter, draft_backend=backend).join(draft_ms.rename("draft_ms"), on=UNIT)
            drafted["forward_ms"] += drafted.pop("draft_ms")
            arms.append(drafted[drafted["forward_ms"].notna()])
    return arms


def draft_forwards(
    measured: Sequence[tuple[str, int]], num_drafted_tokens: int
) -> list[tuple[tuple[str, int], int]] | None:
    """The forwards (phase, q_len) that draft so many tokens, and how often each runs; None where one was not measured.

    measured : the (phase, q_len) of the drafter that were measured in the group.
    """
    j = num_drafted_tokens
    extends = [forward for forward in measured if forward[0] == "draft_extend"]
    first = [forward for forward in extends if forward[1] == j + 1 or len(extends) == 1]
    if j == 0:
        return []
    if ("draft", 1) not in measured and ("draft", j + 1) in measured:
        return [(("draft", j + 1), 1)]
    if bool(extends) != bool(first) or (j > len(first) and ("draft", 1) not in measured):
        return None
    rest = [(("draft", 1), j - len(first))] if j > len(first) else []
    return [(forward, 1) for forward in first] + rest
