"""What step rows say about the published comparison of two attention backends: computed sentences and tables.

Published (27B hybrid with 4-bit weights, 8 draft tokens with the root, fp8 KV, one request, consumer Blackwell): at
120K of context a step took 193 ms with one attention backend and 28 ms with the other; with 12.9 and 116.7 tokens per
second that is 2.49 and 3.27 tokens per step. An earlier conclusion, that speculation loses beyond 20K to 25K tokens,
was withdrawn.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit.decide.forward_costs import FREE
from labkit.decide.pairings import Pairing, is_measured, measured_pairings, pairing_cells
from labkit.errors import InputError
from labkit.plots.curves import crossing_text
from labkit.plots.step import default_k, step_parts
from labkit.plots.style import format_tokens
from labkit.rows import listed
from labkit.steps.heldout import MEDIAN_LIMIT, WORST_LIMIT, HeldOut
from labkit.steps.table import CLOSURE_LIMIT, Sidecars, forward_table, one_setting

PUBLISHED_CONTEXT = 120 * 1024
PUBLISHED_MS = (193.0, 28.0)
PUBLISHED_TOKENS_PER_S = (12.9, 116.7)
PUBLISHED_LENGTHS = tuple(rate * ms / 1e3 for rate, ms in zip(PUBLISHED_TOKENS_PER_S, PUBLISHED_MS, strict=True))
PUBLISHED_CROSSING = (20 * 1024, 25 * 1024)
SLOW, FAST = "triton_nosplit", "flashinfer_fa2"


def one_target(step_rows: pd.DataFrame, target: str = "", batch_size: int = 1) -> pd.DataFrame:
    """The rows of one target at one batch size and weight dtype, all KV dtypes; by default the published case's hybrid.

    target : "" takes a target with "hybrid" in its name, else the one with most rows. No rows in, no rows out.

    Raises InputError: no rows of the target at the batch size.
    """
    step_rows = step_rows[step_rows["status"] == "ok"] if len(step_rows) else step_rows
    if step_rows.empty:
        return step_rows
    counts = step_rows["target"].value_counts()
    hybrids = [name for name in counts.index if "hybrid" in name]
    target = target or str((hybrids or list(counts.index))[0])
    rows = step_rows[(step_rows["target"] == target) & (step_rows["batch_size"] == batch_size)]
    if rows.empty:
        raise InputError(f"step rows: none of {target} at batch {batch_size}; targets: {', '.join(counts.index)}")
    return rows[rows["weight_dtype"] == rows["weight_dtype"].mode()[0]]


def measured_drafter(step_rows: pd.DataFrame) -> str:
    """The drafter whose forwards most rows hold, else `FREE`."""
    drafters = step_rows["drafter"].dropna() if len(step_rows) else step_rows
    return str(drafters.mode()[0]) if len(drafters) else FREE


def compared_pairings(step_rows: pd.DataFrame) -> tuple[Pairing, Pairing]:
    """The published pairings (unsplit verify, then FlashInfer) where both were measured, else the first two there are.

    Raises InputError: fewer than two pairings.
    """
    known = measured_pairings(step_rows)
    published = [next((p for p in known if p.verify_backend == name), None) for name in (SLOW, FAST)]
    found = [pairing for pairing in published if pairing is not None]
    found = found if len(found) == 2 else known
    if len(found) < 2:
        raise InputError("pairings: want two to compare in the step rows; got one")
    return found[0], found[1]


def story_table(
    step_rows: pd.DataFrame,
    *,
    pairings: Sequence[Pairing] | None = None,
    num_speculative_tokens: int | None = None,
    drafter: str = FREE,
) -> pd.DataFrame:
    """The published comparison on these rows: two pairings at every context, only the attention backends changed.

    Columns kv_dtype, context_len, slow_ms, fast_ms (speculative steps of the first and the second pairing),
    step_ratio, attention_ratio (of the verify forwards), rest_ms (what of the first pairing's step is not attention of
    the target and so stays), rest_share (of the second's step). NaN where a forward was not profiled.

    Raises InputError: fewer than two pairings, or no common context.
    """
    slow, fast = pairings or compared_pairings(step_rows)
    k = default_k(step_rows) if num_speculative_tokens is None else num_speculative_tokens
    records = []
    for dtype, rows in step_rows[step_rows["status"] == "ok"].groupby("kv_dtype"):
        table = forward_table(one_setting(rows))
        for context in sorted(table["context_len"].unique()):
            options: dict[str, Any] = {"context_len": context, "num_speculative_tokens": k, "drafter": drafter}
            try:
                a, b = (step_parts(table, pairing, **options)["speculative"] for pairing in (slow, fast))
            except InputError:
                continue  # this context lacks one of the pairings
            attention = [part["target attention"] or float("nan") for part in (a, b)]
            records.append({
                "kv_dtype": dtype, "context_len": context, "slow_ms": a["total"], "fast_ms": b["total"],
                "step_ratio": a["total"] / b["total"], "attention_ratio": attention[0] / attention[1],
                "rest_ms": a["total"] - attention[0], "rest_share": 1 - attention[1] / b["total"],
            })  # fmt: skip
    if not records:
        raise InputError(f"pairings: no context has both {slow.label} and {fast.label} at k = {k}")
    return pd.DataFrame(records)


def step_answer(
    step_rows: pd.DataFrame,
    *,
    sidecars: Sidecars | None = None,
    closure: pd.DataFrame | None = None,
    heldout: HeldOut | None = None,
    acceptance_lengths: Sequence[float] = PUBLISHED_LENGTHS,
    drafter: str = FREE,
) -> str:
    """What of the published comparison holds on this device, then closure, then the errors of the step-cost model.

    acceptance_lengths : imposed; by default the two that the published speeds imply.

    Where the rows do not hold the comparison, a sentence says so.
    """
    if not (step_rows["status"] == "ok").any():
        return "Where does the step go? Unknown: no step data is there yet (`labkit run step` measures it)."
    about = ", ".join(listed(step_rows, name) for name in ("gpu", "target"))
    lines = [f"Where does the step go on {about}, batch {listed(step_rows, 'batch_size')}?"]
    try:
        lines += _story_lines(step_rows, acceptance_lengths, drafter)
    except InputError as error:
        lines.append(f"- The published comparison is not in these rows: {error}.")
    lines += _floor_lines(step_rows, sidecars)
    for row in [] if closure is None else closure.to_dict("records"):
        what = f"- Closure of {row['target']} at batch {row['batch_size']}, {row['check']}: residual"
        how = f"{row['median_residual']:.1%} median, {row['worst_residual']:.1%} worst"
        lines.append(f"{what} {how} over {row['num_cells']} cells (wanted {CLOSURE_LIMIT:.0%} median).")
    if heldout is not None:
        how = f"{heldout.median_error:.1%} median and {heldout.worst_error:.1%} worst error"
        wanted = f"wanted {MEDIAN_LIMIT:.0%} and {WORST_LIMIT:.0%}"
        lines.append(f"- Step-cost model, fitted on a third: {how} on {len(heldout.points)} unseen points ({wanted}).")
    return "\n".join(lines)


def _story_lines(step_rows: pd.DataFrame, acceptance_lengths: Sequence[float], drafter: str) -> list[str]:
    k, pairings, lines = default_k(step_rows), compared_pairings(step_rows), []
    story = story_table(step_rows, pairings=pairings, drafter=drafter)
    for dtype, here in step_rows.groupby("kv_dtype"):
        rows = story[story["kv_dtype"] == dtype]
        lines += _ratio_lines(rows, f"k = {k}, {dtype} KV", *pairings) if len(rows) else []
        for pairing in pairings:
            if not is_measured(here, pairing, k):
                lines.append(f"- {dtype} KV, {pairing.label}: not measured at k = {k}.")
                continue
            for baseline, against in (("own", "its own plain decode"), ("fastest", "the fastest plain decode")):
                found = [_crossing(here, pairing, k, length, drafter, baseline) for length in acceptance_lengths]
                lines.append(f"- {dtype} KV, {pairing.label}, against {against}: {'; '.join(found)}.")
    return lines


def _floor_lines(step_rows: pd.DataFrame, sidecars: Sidecars | None) -> list[str]:
    """The fastest plain decode at the longest context beside its floor, per KV dtype; none without a bandwidth."""
    table = forward_table(step_rows, sidecars)
    decode, lines = table[(table["phase"] == "decode") & table["over_floor"].notna()], []
    for dtype, rows in decode.groupby("kv_dtype"):
        rows = rows[rows["context_len"] == rows["context_len"].max()]
        best = rows.loc[rows["forward_ms"].idxmin()]
        where = (
            f"- {dtype} KV at {format_tokens(best['context_len'])}: the fastest plain decode ({best['backend']}) takes"
        )
        share = f"its floor of {best['floor_ms']:,.3g} ms is {1 / best['over_floor']:.0%} of that"
        lines.append(f"{where} {best['forward_ms']:,.3g} ms; {share}.")
    return lines


def _ratio_lines(rows: pd.DataFrame, setting: str, slow: Pairing, fast: Pairing) -> list[str]:
    """The step ratio nearest to the published context beside the published one, and what dilutes it."""
    near = rows.iloc[(rows["context_len"] - PUBLISHED_CONTEXT).abs().argsort().iloc[0]]
    published = PUBLISHED_MS[0] / PUBLISHED_MS[1]
    share = near["step_ratio"] / published
    claim = (
        f"Published at 120K on another card: {PUBLISHED_MS[0]:g} and {PUBLISHED_MS[1]:g} ms, {published:.2g} times; "
    )
    claim += "the same." if 0.9 <= share <= 1.1 else "more here." if share > 1.1 else "less here."
    if (slow.verify_backend, fast.verify_backend) != (SLOW, FAST):
        claim = "The published pairings were not measured."
    context = format_tokens(near["context_len"])
    lines = [
        f"- {setting} at {context}: the step takes {near['slow_ms']:,.3g} ms with {slow.label} and "
        f"{near['fast_ms']:,.3g} ms with {fast.label}: {near['step_ratio']:.2g} times. {claim}"
    ]
    if pd.notna(near["attention_ratio"]):
        lines.append(
            f"- {setting} at {context}, why: target attention alone differs {near['attention_ratio']:.3g} times; "
            f"{near['rest_ms']:,.3g} ms of the slower step are not target attention and stay (layers that the pairing "
            f"does not touch, drafting, sampling, gaps). They are {near['rest_share']:.0%} of the faster step."
        )
    return lines


def _crossing(
    rows: pd.DataFrame, pairing: Pairing, k: int, acceptance_length: float, drafter: str, baseline: str
) -> str:
    cells, curves = pairing_cells(
        rows, pairing, num_speculative_tokens=k, acceptance_length=acceptance_length, drafter=drafter, baseline=baseline
    )
    limits = (cells["context_len"].min(), cells["context_len"].max())
    text = f"with {acceptance_length:.2f} tokens per step it "
    found = [crossing for curve in curves for crossing in curve["crossovers"]]
    if not found:
        verdicts = cells["verdict"].replace("cannot_pay", "loses").unique()
        ends = f"{format_tokens(limits[0])} to {format_tokens(limits[1])}"
        text += f"{verdicts[0]} from {ends}" if len(verdicts) == 1 else f"is undecided in parts of {ends}"
        return text + f", {_speedup(cells)}"
    low, high = PUBLISHED_CROSSING
    inside = any(low <= crossing["context_len"] <= high for crossing in found)
    claims = [crossing_text(crossing, limits) for crossing in found]
    text += " and ".join(claim if claim.startswith("pays") else f"is {claim}" for claim in claims)
    return text + f" ({'as published' if inside else 'published'}: 20K to 25K), {_speedup(cells)}"


def _speedup(cells: pd.DataFrame) -> str:
    """The speed-up at the context nearest to the published one."""
    near = cells.iloc[(cells["context_len"] - PUBLISHED_CONTEXT).abs().argsort().iloc[0]]
    return f"speed-up {near['speedup']:.2f} at {format_tokens(near['context_len'])}"
