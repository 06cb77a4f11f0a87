"""The checks that any imported figure must pass, told in plain words; and two arms compared.

Numbers in the comments are those of `docs/importing.md`.
"""

import itertools
from collections.abc import Iterator

from labkit.engines.record import Record

MIN_STEPS = 20  # below this a length of exactly 1 or k+1 is chance
_RATE, _LENGTH = 0.006, 0.011  # two printed decimals each


def check(record: Record, *, imposed: bool = False, graphs: set[bool] | None = None) -> Record:
    """Add what is wrong with one record to its warnings; returns it. ``graphs``: launch modes of the file so far."""
    if imposed:
        record.origin = "forced"
        record.warn("acceptance was imposed by a server switch: the length is an input, only times are real")
    if graphs is not None and record.cuda_graph is not None:
        graphs.add(record.cuda_graph)
        if len(graphs) == 2:
            record.warn(
                "eager and graph mixed: some windows of this file ran without a CUDA graph, others with one"
            )  # 8
    for text in (*_identities(record), *_pinned(record), *_tokens(record), *_chunks(record), *_window(record)):
        record.warn(text)
    return record


def _identities(record: Record) -> Iterator[str]:
    length, rates, k = record.mean_acceptance_length, record.acceptance_rate_per_pos, record.num_speculative_tokens
    if length is not None and rates:
        slack = _LENGTH + 0.0006 * len(rates)
        # A server's request may draft less than k, and then rates are over the steps that had a draft.
        if abs(1 + sum(rates) - length) > slack:
            yield f"contradiction: 1 + sum of rates per position is {1 + sum(rates):.2f}, the length {length:.2f}"  # 1
    if rates and any(later > earlier + _RATE for earlier, later in itertools.pairwise(rates)):
        yield "contradiction: a rate per position is above that of the position before it"
    if length is not None and length < 1 - _LENGTH:
        yield f"contradiction: a length of {length:.2f} is below 1: no bonus in it, or counts of two scopes"
    if length is not None and k and length > k + 1 + _LENGTH:
        yield f"contradiction: a length of {length:.2f} is above k + 1 = {k + 1}"  # 2
    drafted, accepted, steps = record.num_drafted_tokens, record.num_accepted_tokens, record.steps
    if drafted is not None and accepted is not None and accepted > drafted:
        yield f"contradiction: {accepted} accepted of {drafted} drafted tokens"
    if drafted and steps and k and drafted < 0.995 * k * steps:
        yield f"drafts are shorter than asked for: {drafted / steps:.2f} per step, k is {k}"
    if drafted and steps and k and drafted > 1.005 * k * steps:
        yield f"contradiction: {drafted / steps:.2f} drafts per step, k is {k}"


def _pinned(record: Record) -> Iterator[str]:
    length, k, steps = record.mean_acceptance_length, record.num_speculative_tokens, record.steps
    if length is None or record.details.get("plain") or record.definition.startswith(("plain", "one token")):
        return
    # Counts are exact; a printed window of SGLang holds 40 steps.
    enough = steps >= MIN_STEPS if steps is not None else record.scope != "request"
    if enough and length < 1.1:
        yield (
            f"pinned acceptance: length {length:.2f} means that almost no draft is kept: a broken draft path (wrong or "
            "mis-quantised head, wrong layers, other tokenizer) more likely than a weak one"
        )
    if enough and k and length > k + 1 - 0.005:
        yield f"pinned acceptance: every draft is kept (length {length:.2f} = k + 1); the text may be garbage"


def _tokens(record: Record) -> Iterator[str]:
    output, steps, accepted = record.details.get("output_tokens"), record.steps, record.num_accepted_tokens
    if output is not None and steps is not None and accepted is not None and record.scope in ("request", "run"):
        extra = output - steps - accepted  # 4
        requests = record.details.get("num_requests") or 1
        if extra < 0:
            yield f"steps + accepted exceed the output by {-extra:g} tokens: last steps overshoot the stop or the limit"
        elif extra > 2 * requests and record.zero_draft_steps == "excluded":
            yield f"{extra - requests:g} output tokens came from steps without a draft, which are not in the length"
        elif extra > 2 * requests:
            yield f"contradiction: {extra:g} tokens more than steps + accepted: counts of another scope"
    again = record.details.get("output_tokens_retokenized")
    if output and again and abs(again / output - 1) > 0.2:
        yield (
            f"degenerate text: {output:.0f} tokens generated, {again:.0f} when tokenised again; "
            "acceptance on it is not representative"
        )


def _chunks(record: Record) -> Iterator[str]:
    details, rate = record.details, record.output_tokens_per_s
    peak, itl, tpot = (details.get(name) for name in ("peak_output_tokens_per_s", "itl_ms", "tpot_ms"))
    if peak and rate and peak < 0.98 * rate:  # 5
        yield (
            f"chunk-counted client: the peak of {peak:g} tok/s is below the mean of {rate:g}; the peak counts chunks, "
            f"about {rate / peak:.1f} tokens each"
        )
    if itl and tpot and itl > 1.3 * tpot:
        yield f"chunk-counted client: ITL {itl:g} ms is {itl / tpot:.1f} times TPOT {tpot:g} ms; it is time per chunk"
    streams = record.batch_size or details.get("max_concurrency")
    gap = itl or details.get("itl_median_ms")
    if gap and not tpot and rate and streams == 1 and gap > 1.5 * 1000 / rate:
        yield f"chunk-counted client: ITL {gap:g} ms, but one stream at {rate:g} tok/s needs {1000 / rate:.2f} ms"
    if rate and record.scope in ("request", "run") and rate > 1e5 * (streams or 1):
        yield f"{rate:g} tok/s is no decode rate: the whole answer came in one chunk; leave the request out"
    if details.get("tokens_per_chunk", 1) > 1.2:
        yield f"chunk-counted client: {details['tokens_per_chunk']:.2f} tokens per chunk, so ITL is time per chunk"
    first, rest = details.get("ttft_first_ms"), details.get("ttft_rest_median_ms")
    if first and rest and first > 3 * rest:
        yield f"first request apart: TTFT {first:.0f} ms, then {rest:.0f} ms (median); the first one compiled or loaded"
    mean, median = details.get("ttft_ms"), details.get("ttft_median_ms")
    if mean and median and mean > 1.3 * median:
        yield f"mean TTFT {mean:g} ms is {mean / median:.1f} times the median: first requests compiled, show them apart"


def _window(record: Record) -> Iterator[str]:
    details = record.details
    if record.prefill_mixed and record.scope == "window":  # 7
        yield "prefill-mixed window: prefill ran between this line and the one before; no step time from it"
    if details.get("num_queued"):
        yield f"{details['num_queued']:g} requests were waiting: throughput is limited by admission, TTFT by the queue"
    if details.get("cached_tokens"):
        yield f"{details['cached_tokens']:g} prompt tokens came from the prefix cache"  # 8
    if record.engine == "vllm" and (per_step := details.get("tokens_per_iteration")) and record.scope == "run":
        usual = record.mean_acceptance_length or 1
        if per_step > 2 * usual:
            yield f"prefill-mixed: {per_step:.1f} tokens per engine step, {usual:.1f} in decode; no tok/s from its ITL"


def compare_arms(plain: Record, speculative: Record) -> dict[str, float | str | None]:
    """Speed-up of two runs by throughput, the step cost it implies, and what is suspicious.

    Returns
    -------
    dict
        speedup (ratio of output tokens per second), relative_step_cost = length / speed-up, warning.
    """
    base, rate, length = plain.output_tokens_per_s, speculative.output_tokens_per_s, speculative.mean_acceptance_length
    speedup = rate / base if base and rate else None
    cost = length / speedup if speedup and length else None
    warning = None
    if cost is not None and cost < 1:  # 6
        warning = (
            f"speed-up {speedup:.2f} above the acceptance length {length:.2f}: a step cannot be cheaper than plain "
            "decode; the baseline is slow (eager, cold, another build) or tokens are counted in two ways"
        )
    return {"speedup": speedup, "relative_step_cost": cost, "warning": warning}
