"""One recorded generation under other costs: another pairing, k, context, batch or GPU, without running it again.

The trace keeps what was drafted and kept at which context; the price of each step comes from measured cost cells,
linear in context between them. Origin of what comes out: modelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.decide.intervals import (
    RESAMPLES,
    generator,
    percentile_interval,
    resampled_medians,
    resampled_weights,
    student_spread,
)
from labkit.decide.step_costs import StepCosts, baseline_ms, step_costs
from labkit.errors import InputError
from labkit.rows import distinct, ok_rows

NEEDED = ("arm", "prompt_id", "round", "context_len", "num_drafted_tokens", "num_accepted_tokens", "step_ms")
# A step may lie this many times below or above the measured contexts; it is then priced at the nearest one and said so.
REACH = 2.0


@dataclass(frozen=True)
class Repriced:
    """A trace under other costs.

    speedup, low, high : over plain decode at the same contexts; the interval resamples the rounds of the costs.
    text_low, text_high : prompts resampled as well: for other text of the kind.
    by_prompt : prompt_id, num_steps, num_tokens, speedup.
    notes : what was clamped or cut.
    """

    speedup: float
    low: float
    high: float
    text_low: float
    text_high: float
    by_prompt: pd.DataFrame
    notes: tuple[str, ...]
    origin: str = "modelled"


def reprice(
    trace_rows: pd.DataFrame,
    cost_rows: pd.DataFrame,
    *,
    where: Mapping[str, Any] | None = None,
    k: int | None = None,
    context_len: int | None = None,
    baseline: str = "fastest",
) -> Repriced:
    """Price the steps of recorded generations by cost cells.

    trace_rows : loop rows of real generations, one target, drafter and k; truncated steps (no accepted count) are left
        out, as everywhere.
    cost_rows : loop rows at fixed contexts, or `labkit.decide.composed.cost_rows` of step rows.
    where : columns of the cost cells that say what to price under: verify_backend, draft_backend, batch_size, gpu. The
        drafter is the trace's, unless it is named here.
    k : drafts per step, at most the trace's: its steps are cut (see `labkit.decide.best_k.cut_acceptance`), and more
        of them are needed for the same output. None: the trace's.
    context_len : price every step at this context instead of its own.

    Raises InputError: no speculative steps, no or several cost curves, a k above the trace's, costs of no such draft
    length, or contexts more than `REACH` times outside the measured ones.
    """
    trace = ok_rows(trace_rows, "trace", NEEDED)
    trace = trace[(trace["arm"] == "speculative") & trace["num_accepted_tokens"].notna()]
    if trace.empty or len(distinct(trace, "num_speculative_tokens")) > 1:
        found = distinct(trace, "num_speculative_tokens")
        raise InputError(f"trace: want speculative steps of one num_speculative_tokens, got {found or 'none'}")
    if len(distinct(trace, "num_draft_nodes")):
        raise InputError("trace: want steps with chains, got draft trees, whose steps have no cost at a fixed context")
    recorded = int(trace["num_speculative_tokens"].iloc[0])
    k = recorded if k is None else k
    if not 1 <= k <= recorded:
        raise InputError(f"trace: k must lie between 1 and the recorded {recorded}, got {k}: no draft was seen beyond")
    # What drafts is part of the cost: another drafter's would be another step.
    drafters = distinct(trace, "drafter") if "drafter" in trace else []
    if len(drafters) > 1:
        raise InputError(f"trace: want the steps of one drafter, got {', '.join(map(str, drafters))}")
    cells = _curve(cost_rows, dict.fromkeys(["drafter"], *drafters) | dict(where or {}), k)
    priced = [baseline_ms(cost, baseline)[1] for cost in cells]
    contexts = np.array([cost.key["context_len"] for cost in cells], float)
    steps, tokens, notes = _usage(trace, contexts, k, context_len)
    tables = [np.column_stack([cost.step_ms[:, : k + 1], plain]) for cost, plain in zip(cells, priced, strict=True)]
    tables = [_complete(table, steps[:, i].sum(axis=0) > 0, contexts[i]) for i, table in enumerate(tables)]
    if k < recorded:
        notes.append(f"cut from k = {recorded}")
    modes = [", ".join(distinct(rows, "launch_mode")) for rows in (trace, cost_rows)]
    if modes[0] != modes[1] and all(modes):
        notes.append(f"launch_mode: trace {modes[0]}, costs {modes[1]}")
    return _result(trace, steps, tokens, tables, notes, generator(0, "reprice", k, *contexts))


def _curve(cost_rows: pd.DataFrame, where: Mapping[str, Any], k: int) -> list[StepCosts]:
    """The cost cells of one curve at the smallest k that is at least ``k``, by context."""
    cells = step_costs(cost_rows)
    for name, value in where.items():
        known = sorted({str(cost.key.get(name)) for cost in cells})
        cells = [cost for cost in cells if cost.key.get(name) == value]
        if not cells:
            raise InputError(f"cost: {name} {value!r} was not measured; there is {', '.join(known)}")
    usable = [cost for cost in cells if cost.num_speculative_tokens >= k]
    smallest = min((cost.num_speculative_tokens for cost in usable), default=None)
    chosen = [cost for cost in usable if cost.num_speculative_tokens == smallest]
    varying = [
        n for n in (chosen[0].key if chosen else {}) if n != "context_len" and len({c.key[n] for c in chosen}) > 1
    ]
    if not chosen or varying:
        raise InputError(f"cost: want one curve for k = {k}, got {'several ' + varying[0] if varying else 'none'}")
    return sorted(chosen, key=lambda cost: float(cost.key["context_len"]))


def _usage(
    trace: pd.DataFrame, contexts: np.ndarray, k: int, context_len: int | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Use of each cell by each prompt: steps [prompts, contexts, k+1] and tokens [prompts, contexts], and notes."""
    at = np.full(len(trace), float(context_len)) if context_len else trace["context_len"].to_numpy(float)
    outside = (at < contexts[0]) | (at > contexts[-1])
    if (at < contexts[0] / REACH).any() or (at > contexts[-1] * REACH).any():
        measured = f"{contexts[0]:.0f} to {contexts[-1]:.0f}"
        raise InputError(f"trace: contexts {at.min():.0f} to {at.max():.0f}, costs only at {measured}")
    clamped = f"{outside.mean():.0%} of the steps lie outside the measured contexts: priced at the nearest"
    notes = [clamped] if outside.any() else []
    position = np.interp(at, contexts, np.arange(len(contexts)))
    left = np.minimum(position.astype(int), max(len(contexts) - 2, 0))
    share = position - left
    prompts, names = pd.factorize(trace["prompt_id"])
    drafted = np.minimum(trace["num_drafted_tokens"].to_numpy(int), k)
    kept = np.minimum(trace["num_accepted_tokens"].to_numpy(int), k)
    # A cut step yields less, so the same output takes proportionally more steps.
    full = trace["num_accepted_tokens"].to_numpy(int) + 1.0
    steps, tokens = np.zeros((len(names), len(contexts), k + 1)), np.zeros((len(names), len(contexts)))
    more = np.array([full[prompts == i].sum() / (kept[prompts == i] + 1).sum() for i in range(len(names))])[prompts]
    for column, weight in ((left, 1 - share), (np.minimum(left + 1, len(contexts) - 1), share)):
        np.add.at(steps, (prompts, column, drafted), weight * more)
        np.add.at(tokens, (prompts, column), weight * full)
    return steps, tokens, notes


def _complete(table: np.ndarray, used: np.ndarray, context: float) -> np.ndarray:
    """Rounds that hold every draft length in use; the others' columns become 0."""
    table = np.where(np.append(used, True), table, 0.0)
    kept = table[np.isfinite(table).all(axis=1)]
    if not len(kept):
        raise InputError(
            f"cost: no round at context {context:.0f} holds plain decode and every draft length of the trace"
        )
    return kept


def _result(
    trace: pd.DataFrame, steps: np.ndarray, tokens: np.ndarray, tables: Sequence[np.ndarray], notes: list[str],
    rng: np.random.Generator,
) -> Repriced:  # fmt: skip
    median = np.stack([np.median(table, axis=0) for table in tables])
    drawn = np.stack([resampled_medians(table, RESAMPLES, rng) for table in tables], axis=1)
    speculative, plain = np.tensordot(steps, median[:, :-1], 2), tokens @ median[:, -1]
    log = float(np.log(plain.sum() / speculative.sum()))
    in_draws = np.log(
        (drawn[:, :, -1] @ tokens.sum(axis=0)) / np.einsum("bij,ij->b", drawn[:, :, :-1], steps.sum(axis=0))
    )
    rounds = student_spread(min(map(len, tables)), RESAMPLES, rng, of_medians=True) * (in_draws - log)
    weights = resampled_weights(len(steps), RESAMPLES, rng)
    of_text = student_spread(len(steps), RESAMPLES, rng) * (np.log((weights @ plain) / (weights @ speculative)) - log)
    own, text = (np.exp(log + np.array(percentile_interval(d))) for d in (rounds, rounds + of_text))
    by_prompt = pd.DataFrame({"prompt_id": pd.factorize(trace["prompt_id"])[1], "num_steps": steps.sum(axis=(1, 2))})
    by_prompt = by_prompt.assign(num_tokens=tokens.sum(axis=1), speedup=plain / speculative)
    low, high, text_low, text_high = (float(bound) for bound in (*own, *text))
    return Repriced(float(np.exp(log)), low, high, text_low, text_high, by_prompt, tuple(notes))


def measured_speedup(trace_rows: pd.DataFrame) -> pd.DataFrame:
    """What the generations really gained: per prompt_id plain ms per token over speculative ms per token.

    trace_rows : loop rows of both arms. Truncated steps are left out on the speculative side, as in `reprice`; the last
    row, prompt_id None, is the total. Raises InputError: an arm is missing.
    """
    rows = ok_rows(trace_rows, "trace", NEEDED)
    arms = {}
    for arm in ("plain", "speculative"):
        own = rows[(rows["arm"] == arm) & rows["num_accepted_tokens"].notna()]
        if own.empty:
            raise InputError(f"trace: want rows of both arms, there are none of {arm}")
        grouped = own.assign(tokens=own["num_accepted_tokens"] + 1).groupby("prompt_id")[["step_ms", "tokens"]].sum()
        arms[arm] = pd.concat([grouped, grouped.sum().to_frame(None).T])
    per_token = {arm: table["step_ms"] / table["tokens"] for arm, table in arms.items()}
    return (per_token["plain"] / per_token["speculative"]).rename("speedup").rename_axis("prompt_id").reset_index()


def reprice_check(trace_rows: pd.DataFrame, cost_rows: pd.DataFrame, **options: Any) -> pd.DataFrame:
    """`reprice` of every recorded setting under its own costs, beside what was measured.

    options : of `reprice`.

    Returns target, verify_backend, weight_dtype, drafter, k, predicted with low and high, measured, error (predicted /
    measured - 1), inside (measured within low .. high), median_error and worst_error over prompts (absolute),
    num_prompts, notes. Settings whose costs were not measured are left out.

    Raises InputError: no setting could be priced; the last reason is given.
    """
    columns = ["target", "weight_dtype", "verify_backend", "drafter", "num_speculative_tokens"]
    rows = ok_rows(trace_rows, "trace", [*NEEDED, *columns])
    records, reason = [], "no generations"
    for key, own in rows.groupby(["run_id", "target", "weight_dtype"], dropna=False):
        plain, steps = own[own["arm"] == "plain"], own[own["arm"] == "speculative"]
        for (backend, drafter, _), arm in steps.groupby(columns[2:]):
            where = {"target": key[1], "weight_dtype": key[2], "verify_backend": backend, "drafter": drafter}
            trace = pd.concat([plain, arm])
            decode = distinct(plain, "decode_backend")
            try:
                # What was measured is a gain over the plain arm of the same run.
                own_baseline: dict[str, Any] = {"baseline": decode[0] if len(decode) == 1 else "fastest"}
                found = reprice(trace, cost_rows, where=where, **(own_baseline | options))
                measured = measured_speedup(trace)
            except InputError as error:
                reason = str(error)
                continue
            total = float(measured["speedup"].iloc[-1])
            both = found.by_prompt.merge(measured, on="prompt_id", suffixes=("_predicted", "_measured"))
            errors = (both["speedup_predicted"] / both["speedup_measured"] - 1).abs()
            values: dict[str, Any] = {"k": int(arm["num_speculative_tokens"].iloc[0]), "predicted": found.speedup}
            values |= {"low": found.low, "high": found.high, "measured": total, "error": found.speedup / total - 1}
            values |= {"inside": found.low <= total <= found.high, "median_error": errors.median()}
            values |= {"worst_error": errors.max(), "num_prompts": len(errors), "notes": "; ".join(found.notes)}
            records.append(where | values)
    if not records:
        raise InputError(f"reprice: no recorded generation has costs of its own: {reason}")
    return pd.DataFrame(records)
