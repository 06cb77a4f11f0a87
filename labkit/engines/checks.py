"""The checks that any imported figure must pass, in plain words (numbers: docs/importing.md); two arms compared."""

import itertools
from collections.abc import Iterator

from labkit.engines.record import STEADY, Record

MIN_STEPS = 20  # below this a length of exactly 1 or k+1 is chance
_RATE, _LENGTH = 0.006, 0.011  # two printed decimals each


def check(record: Record, *, imposed: bool = False, graphs: set[bool] | None = None) -> Record:
    """Add what is wrong with one record to its warnings; returns it. ``graphs``: launch modes of the file so far."""
    if imposed:  # 10
        record.origin = "forced"
        record.warn("acceptance was imposed by a server switch: the length is an input, only times are real")
    if graphs is not None and record.cuda_graph is not None:  # 8
        graphs.add(record.cuda_graph)
        if len(graphs) == 2:
            record.warn("eager and graph mixed: some windows of this file ran without a CUDA graph, others with one")
    for text in (*_counts(record), *(_timing(record) if record.scope != "window" else ()), *_load(record)):
        record.warn(text)
    return record


def _counts(record: Record) -> Iterator[str]:
    length, rates, k = record.mean_acceptance_length, record.acceptance_rate_per_pos, record.num_speculative_tokens
    drafted, accepted, steps = record.num_drafted_tokens, record.num_accepted_tokens, record.steps
    most = record.details.get("draft_depth") or k  # of a tree one path is kept
    printed = record.details.get("mean_acceptance_length_of_drafted_steps")
    over = printed or length  # what the rates are over
    counted = accepted / (printed - 1) if printed and printed > 1 and accepted else steps
    with_draft = record.num_drafted_steps or counted
    if over is not None and rates and abs(1 + sum(rates) - over) > _LENGTH + 0.0006 * len(rates):  # 1
        yield f"contradiction: 1 + sum of rates per position is {1 + sum(rates):.2f}, the length {over:.2f}"
    if over and accepted and record.num_verify_steps and 1 + accepted / (record.num_verify_steps + 2) > over + _LENGTH:
        yield f"contradiction: length {length:.2f} over all steps, {over:.2f} over those with a draft"
    if rates and any(later > earlier + _RATE for earlier, later in itertools.pairwise(rates)):
        yield "contradiction: a rate per position is above that of the position before it"
    if length is not None and length < 1 - _LENGTH:
        yield f"contradiction: a length of {length:.2f} is below 1: no bonus in it, or counts of two scopes"
    if length is not None and most and length > most + 1 + _LENGTH:
        yield f"contradiction: a length of {length:.2f} is above k + 1 = {most + 1}"
    if drafted is not None and accepted is not None and accepted > drafted:
        yield f"contradiction: {accepted} accepted of {drafted} drafted tokens"
    per_step = drafted / with_draft if drafted and with_draft and k else None
    if per_step and k and not 0.995 * k < per_step < 1.005 * k:
        text = "drafts are shorter than asked for" if per_step < k else "contradiction"
        yield f"{text}: {per_step:.2f} per step, k is {k}"
    enough = steps >= MIN_STEPS if steps is not None else record.scope != "request"
    if length is not None and enough and not record.plain and 1 - _LENGTH <= length < 1.1:  # 2
        text = "almost no draft is kept: a broken draft path (head, quantisation, tokenizer), not a weak one"
        yield f"pinned acceptance: length {length:.2f}, {text}"
    if length is not None and enough and most and most + 0.995 < length <= most + 1 + _LENGTH:
        yield f"pinned acceptance: every draft is kept (length {length:.2f} = k + 1); the text may be garbage"
    output, again = (record.details.get(name) for name in ("output_tokens", "output_tokens_retokenized"))
    if output is not None and steps is not None and accepted is not None and record.scope in ("request", "run"):  # 4
        known = record.details.get("num_requests") or (1 if record.scope == "request" else None)
        extra, requests = output - steps - accepted, known or 1
        if extra < 0:
            yield f"steps + accepted exceed the output by {-extra:g} tokens: last steps overshoot the stop or the limit"
        elif extra > 2 and not known:
            text = "prefill gives one a request and steps without a draft the others; requests are not counted here"
            yield f"{extra:g} output tokens are not in steps + accepted: {text}"
        elif extra > 2 * requests and record.zero_draft_steps == "excluded":
            yield f"{extra - requests:g} output tokens came from steps without a draft, which are not in the length"
        elif extra > 2 * requests:
            yield f"contradiction: {extra:g} tokens more than steps + accepted: counts of another scope"
    if output and again and abs(again / output - 1) > 0.2:  # 9
        text = f"{output:.0f} tokens generated, {again:.0f} when tokenised again"
        yield f"degenerate text: {text}; acceptance on it is not representative"


def _timing(record: Record) -> Iterator[str]:
    details, rate = record.details, record.output_tokens_per_s
    peak, itl, tpot = (details.get(name) for name in ("peak_output_tokens_per_s", "itl_ms", "tpot_ms"))
    streams, gap = record.batch_size or details.get("max_concurrency"), itl or details.get("itl_median_ms")
    if peak and rate and peak < 0.98 * rate:  # 5
        text = f"peak of {peak:g} tok/s below the mean of {rate:g}"
        yield f"chunk-counted client: a {text}; the peak counts chunks, about {rate / peak:.1f} tokens each"
    if itl and tpot and itl > 1.3 * tpot:
        yield f"chunk-counted client: ITL {itl:g} ms is {itl / tpot:.1f} times TPOT {tpot:g} ms; it is time per chunk"
    if gap and not tpot and rate and streams == 1 and gap > 1.5 * 1000 / rate:
        yield f"chunk-counted client: ITL {gap:g} ms, but one stream at {rate:g} tok/s needs {1000 / rate:.2f} ms"
    if details.get("tokens_per_chunk", 1) > 1.2:
        yield f"chunk-counted client: {details['tokens_per_chunk']:.2f} tokens per chunk, so ITL is time per chunk"
    if rate and record.scope in ("request", "run") and rate > 1e5 * (streams or 1):
        yield f"{rate:g} tok/s is no decode rate: the whole answer came in one chunk; leave the request out"
    first, rest = details.get("ttft_first_ms"), details.get("ttft_rest_median_ms")
    mean, median = details.get("ttft_ms"), details.get("ttft_median_ms")
    if first and rest and first > 3 * rest:  # 7
        yield f"first request apart: TTFT {first:.0f} ms, then {rest:.0f} ms (median); the first one compiled or loaded"
    if mean and median and mean > 1.3 * median:
        yield f"mean TTFT {mean:g} ms is {mean / median:.1f} times the median: first requests compiled, show them apart"
    usual, per_step = record.mean_acceptance_length or 1, details.get("tokens_per_iteration")
    if record.engine == "vllm" and record.scope == "run" and per_step and per_step > 2 * usual:
        yield f"prefill-mixed: {per_step:.1f} tokens per engine step, {usual:.1f} in decode; no tok/s from its ITL"


def _load(record: Record) -> Iterator[str]:
    """What else ran."""
    details = record.details
    if record.prefill_mixed and record.scope == "window":
        yield "prefill-mixed window: prefill ran between this line and the one before; no step time from it"
    if change := details.get("batch_change"):
        so = "no step time from it" if change > STEADY else "its step time is of several batch sizes"
        yield f"running requests changed inside this window: {so}"
    if details.get("num_queued"):  # 8
        yield f"{details['num_queued']:g} requests were waiting: throughput is limited by admission, TTFT by the queue"
    if details.get("cached_tokens"):
        yield f"{details['cached_tokens']:g} prompt tokens came from the prefix cache"


def compare_arms(plain: Record, speculative: Record) -> dict[str, float | str | None]:
    """speedup of two runs by output tokens per second, relative_step_cost = length / speedup, warning."""
    base, rate, length = plain.output_tokens_per_s, speculative.output_tokens_per_s, speculative.mean_acceptance_length
    speedup = rate / base if base and rate else None
    cost = length / speedup if speedup and length else None
    warning = None
    if cost is not None and cost < 1:  # 6: a step cannot be cheaper than plain decode
        reason = "the baseline is slow (eager, cold, another build) or tokens are counted in two ways"
        warning = f"speed-up {speedup:.2f} above the acceptance length {length:.2f}: {reason}"
    return {"speedup": speedup, "relative_step_cost": cost, "warning": warning}
