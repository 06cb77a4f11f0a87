"""Cost rows of either experiment, steps with their parts: where the time of a composed step goes.

`labkit.decide.forward_costs.loop_rows` adds up the forwards of a step. It is linear in their times, so the same
sum over one part of every forward gives that part of the step, and the sum without the drafter's forwards verify alone.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.decide.forward_costs import FREE, loop_rows
from labkit.decide.step_costs import CELL_KEY
from labkit.errors import InputError
from labkit.results import experiments_in, load_runs
from labkit.rows import fixed_context, ok_rows

# Parts of a forward that get a bar of their own; the rest is the layers' other work.
_TIMED = ("attention_ms", "sampling_ms", "communication_ms", "gap_ms")


def cost_rows(rows: pd.DataFrame, *, free_drafter: str | None = None) -> pd.DataFrame:
    """Loop rows at a fixed context as they are, step rows as steps with their parts; of a frame with both, both.

    Where the loop itself was timed at a cell, composed steps of that cell are left out: the two are different
    quantities (host time, bookkeeping) and must not be pooled. Such loop rows say so in ``also_composed``.

    free_drafter : what drafts at no cost on the device in the step rows (``ngram``), so that its acceptance joins; None
        keeps the name that says so.

    Raises InputError: rows of neither experiment, or loop rows that only generated from prompts.
    """
    parts = []
    is_step = rows["forward_ms"].notna() if "forward_ms" in rows else pd.Series(False, index=rows.index)
    if "experiment" in rows:
        is_step = rows["experiment"] == "step"
    loop = rows[~is_step].dropna(axis="columns", how="all")
    if len(loop):
        parts.append(fixed_context(loop) if "origin" in loop else loop)
    if is_step.any():
        steps = composed_costs(rows[is_step])
        parts.append(steps.assign(drafter=steps["drafter"].replace(FREE, free_drafter)) if free_drafter else steps)
    parts = [part for part in parts if len(part)]
    if len(parts) == 2:
        keys = [name for name in CELL_KEY if name in parts[0] and name in parts[1]]
        timed = pd.MultiIndex.from_frame(parts[0].loc[parts[0]["arm"] == "speculative", keys].astype(str))
        again = pd.MultiIndex.from_frame(parts[1][keys].astype(str)).isin(timed) & (parts[1]["arm"] == "speculative")
        parts[1] = parts[1][~again]
        composed = pd.MultiIndex.from_frame(steps[keys].astype(str))
        parts[0] = parts[0].assign(also_composed=pd.MultiIndex.from_frame(parts[0][keys].astype(str)).isin(composed))
    if not parts:
        raise InputError("cost: want step rows, or loop rows of a cost run (acceptance=none); got none")
    return pd.concat(parts, ignore_index=True)


def stored_costs(paths: Sequence[Path | str]) -> pd.DataFrame:
    """All loop and step rows at the paths, failed points included; none: LABKIT_DATA or ``data/runs``.

    Raises InputError: neither is there, or a broken run.
    """
    parts = []
    for name in ("loop", "step"):
        own = [path for path in paths if name in experiments_in(path)]
        if own or (not paths and name in experiments_in()):
            parts.append(load_runs(name, *own))
    if not parts:
        found = ", ".join(sorted(experiments_in(*paths))) or "no runs"
        raise InputError(f"cost: want loop or step runs for the cost; found {found}")
    return pd.concat(parts, ignore_index=True)


def stored_acceptance(paths: Sequence[Path | str]) -> pd.DataFrame:
    """The acceptance rows at the paths, beside runs of other kinds. Raises InputError: none there, or a broken one."""
    own = [path for path in paths if "acceptance" in experiments_in(path)]
    if paths and not own:
        found = ", ".join(sorted(experiments_in(*paths))) or "no runs"
        raise InputError(f"acceptance: want acceptance runs too, or --acceptance-length X; found only {found}")
    return load_runs("acceptance", *own)


def composed_costs(step_rows: pd.DataFrame) -> pd.DataFrame:
    """`labkit.decide.forward_costs.loop_rows` with the parts of each step.

    Further columns, ms: draft_ms, verify_ms; draft_attention_ms, draft_rest_ms, verify_attention_ms, verify_rest_ms
    (NaN where attention was not timed apart); sampling_ms, communication_ms, gap_ms (of all forwards; 0 where not
    timed).
    """
    rows = ok_rows(step_rows, "step", ["phase", "forward_ms"])
    rows = rows.assign(**{name: np.nan for name in (*_TIMED, "drafter") if name not in rows})
    costs = loop_rows(rows)
    drafting = rows["phase"].isin(("draft", "draft_extend"))

    def total(times: pd.Series) -> np.ndarray:
        if not times.fillna(0).any():  # not timed, or nobody's: each sum is a pass over all rows
            return np.zeros(len(costs))
        return loop_rows(rows.assign(forward_ms=times.astype(float).fillna(0.0)))["step_ms"].to_numpy(float)

    whole: dict[str, dict[str, np.ndarray]] = {"draft": {}, "verify": {}}
    for name in ("forward_ms", *_TIMED):
        verify = total(rows[name].where(~drafting))
        whole["verify"][name], whole["draft"][name] = verify, total(rows[name]) - verify
    columns = {name: whole["verify"][name] + whole["draft"][name] for name in _TIMED[1:]}
    for side, mine in (("verify", ~drafting), ("draft", drafting)):
        times = whole[side]
        unknown = total((rows["attention_ms"].isna() & mine).astype(float)) > 0
        attention = np.where(unknown, np.nan, times["attention_ms"])
        rest = times["forward_ms"] - attention - sum(times[name] for name in _TIMED[1:])
        columns |= {f"{side}_ms": times["forward_ms"], f"{side}_attention_ms": attention, f"{side}_rest_ms": rest}
    return costs.assign(**columns, status="ok")
