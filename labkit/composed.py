"""Step rows -> cost rows: a speculative step put together from forwards that were timed one by one.

Nothing is fitted. What the sum cannot hold (overlap, the loop's own bookkeeping) is found by comparing with loop rows
of the same cell.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import InputError
from labkit.rows import is_missing, ok_rows

PLACE = (
    "run_id",
    "gpu",
    "target",
    "batch_size",
    "context_len",
    "weight_dtype",
    "kv_dtype",
    "linear_backend",
    "num_gpus",
)
TIMES = ("forward_ms", "attention_ms", "sampling_ms", "communication_ms", "gap_ms")
NO_DRAFTER = "none"
_Forward = tuple[str, str, str | None, int]  # phase, backend, drafter, q_len


def composed_costs(step_rows: pd.DataFrame) -> pd.DataFrame:
    """Cost rows in the form of loop rows (see `labkit.step_costs`), with the parts of each step beside it.

    A step that verifies j drafts is one ``verify`` forward at q_len j+1 plus its drafting. Drafting is one ``draft``
    forward at q_len j or j+1 where there is one (block drafters); else ``draft_extend`` (the first draft, over the
    tokens of the last step; the one at q_len j+1 or the longest) and j-1 forwards at q_len 1; without a
    ``draft_extend`` j forwards at q_len 1. A step without a draft is the ``decode`` forward of the verify backend.

    Rows of one run and place are paired by round, whatever their group; a drafter timed in a group of its own shares
    the round's number and not its minute. sampling_ms is added to either arm. gap_ms is added where every forward of
    the place has one, else nowhere.

    Returns one row per round, arm and draft length: the columns that `step_costs` needs, `step_ms`, `draft_ms`,
    `verify_ms`, and draft_attention_ms, draft_rest_ms, verify_attention_ms, verify_rest_ms (NaN where attention was not
    timed apart), sampling_ms, communication_ms, gap_ms. Without draft rows the drafter is ``none`` and free, a lower
    bound.

    Raises InputError: no ok rows, or no place with both a decode and a verify forward.
    """
    rows = ok_rows(step_rows, "step", ["run_id", "round", "phase", "backend", "q_len", "forward_ms"])
    rows = rows.assign(**{name: None for name in (*PLACE, *TIMES, "drafter", "launch_mode") if name not in rows})
    records: list[dict[str, Any]] = []
    for key, place in rows.groupby(list(PLACE), dropna=False, sort=True):
        shared = {name: None if is_missing(value) else value for name, value in zip(PLACE, key, strict=True)}
        shared["group"] = "/".join(str(value) for value in shared.values())
        records += [shared | record for record in _of_place(place)]
    if not {"plain", "speculative"} <= {record["arm"] for record in records}:
        raise InputError("step rows: want a decode and a verify forward of one run, batch and context; found none")
    origins = rows["origin"].unique().tolist() if "origin" in rows else ["measured"]
    return pd.DataFrame(records).assign(status="ok", origin=origins[0] if len(origins) == 1 else "modelled")


def _of_place(place: pd.DataFrame) -> Iterator[dict[str, Any]]:
    with_gap = bool(place["gap_ms"].notna().all())
    launch_mode = "|".join(sorted(place["launch_mode"].dropna().unique())) or None
    keys = ["phase", "backend", "drafter", "q_len"]
    medians = place.assign(**{name: pd.to_numeric(place[name]) for name in TIMES})
    forwards: dict[_Forward, pd.DataFrame] = {}
    for (phase, backend, drafter, q_len), rows in medians.groupby(keys, dropna=False, sort=True):
        name = None if is_missing(drafter) else str(drafter)
        forwards[str(phase), str(backend), name, int(str(q_len))] = rows.groupby("round")[list(TIMES)].median()
    decode = {backend: times for (phase, backend, _, q_len), times in forwards.items() if phase == "decode"}
    verify = {
        (backend, q_len - 1): times for (phase, backend, _, q_len), times in forwards.items() if phase == "verify"
    }
    for backend, times in decode.items():
        for row in _rows(times, None, with_gap):
            yield row | {"arm": "plain", "decode_backend": backend, "num_drafted_tokens": 0, "launch_mode": launch_mode}
    for verify_backend in sorted({backend for backend, _ in verify}):
        steps = {j: times for (backend, j), times in verify.items() if backend == verify_backend}
        if verify_backend in decode:
            steps.setdefault(0, decode[verify_backend])
        for drafter, draft_backend in _drafters(forwards):
            for k in (k for k in steps if k):
                names: dict[str, Any] = {
                    "drafter": drafter or NO_DRAFTER,
                    "draft_backend": draft_backend,
                    "launch_mode": launch_mode,
                }
                names |= {"arm": "speculative", "verify_backend": verify_backend, "num_speculative_tokens": k}
                for j in (j for j in steps if j <= k):
                    drafting = _drafting(forwards, drafter, draft_backend, j)
                    if drafting is not None or drafter is None or j == 0:
                        for row in _rows(steps[j], drafting, with_gap):
                            yield row | names | {"num_drafted_tokens": j}


def _drafters(forwards: dict[_Forward, pd.DataFrame]) -> list[tuple[str | None, str | None]]:
    found = {(drafter, backend) for phase, backend, drafter, _ in forwards if phase == "draft"}
    return sorted(found, key=str) or [(None, None)]


def _drafting(
    forwards: dict[_Forward, pd.DataFrame], drafter: str | None, backend: str | None, j: int
) -> pd.DataFrame | None:
    """Times of drafting j tokens by round; None where that was not measured."""
    own = {(phase, q): times for (phase, at, name, q), times in forwards.items() if (at, name) == (backend, drafter)}
    if j == 0:
        return None
    for q_len in (j, j + 1):
        if q_len > 1 and ("draft", q_len) in own:
            return own["draft", q_len]
    extend = {q: times for (phase, q), times in own.items() if phase == "draft_extend"}
    one = own.get(("draft", 1))
    if one is None or not extend:
        return None if one is None else one * j
    first = extend.get(j + 1, extend[max(extend)])
    return first if j == 1 else first + one * (j - 1)


def _rows(target: pd.DataFrame, drafting: pd.DataFrame | None, with_gap: bool) -> Iterator[dict[str, Any]]:
    """One record per round: times of a target forward and what it takes to draft."""
    zeros = pd.DataFrame(0.0, index=target.index, columns=list(TIMES))
    draft = zeros if drafting is None else drafting.reindex(target.index)
    extra = {name: target[name].fillna(0) + draft[name].fillna(0) for name in TIMES[2:]}
    gap = extra["gap_ms"] if with_gap else extra["gap_ms"] * np.nan
    rest = {name: frame["forward_ms"] - frame["attention_ms"] for name, frame in (("verify", target), ("draft", draft))}
    table = pd.DataFrame(
        {
            "verify_ms": target["forward_ms"], "draft_ms": draft["forward_ms"], "gap_ms": gap,
            "verify_attention_ms": target["attention_ms"],
            # Time between devices is inside the forward; it gets a bar of its own.
            "verify_rest_ms": rest["verify"] - target["communication_ms"].fillna(0),
            "draft_attention_ms": draft["attention_ms"],
            "draft_rest_ms": rest["draft"] - draft["communication_ms"].fillna(0),
            "sampling_ms": extra["sampling_ms"], "communication_ms": extra["communication_ms"],
            "step_ms": target["forward_ms"] + draft["forward_ms"] + extra["sampling_ms"] + gap.fillna(0),
        }
    )  # fmt: skip
    for index, row in zip(table.index, table.to_dict("records"), strict=True):
        yield {"round": index} | {str(name): value for name, value in row.items()}
