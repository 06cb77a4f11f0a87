"""SGLang: decode lines of all generations, server info, meta_info, bench_serving."""

import re
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from labkit.engines.record import Record
from labkit.engines.server import Server
from labkit.engines.tables import from_histogram, number, numbers

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[^\]]*?((?: [A-Z]+\d+)*)\]")
_MAX_PENDING, _STALL, _SILENT_S = 500, 5.0, 60
OLD, STRICT = "length / draft tokens", "(length - 1) / (draft tokens - 1)"
_IDLE = "first line after idle: its throughput is divided by the idle time too, so no step time from it"


def rate_forms(length: float, rate: float, num_draft_tokens: int | None) -> set[tuple[str, int]]:
    """The forms of "accept rate", and draft tokens (root counted), that a printed pair of two decimals fits."""
    half, fits = 0.005 + 1e-9, set()
    for rows in [num_draft_tokens] if num_draft_tokens else range(2, 65):
        if abs(length / rows - rate) <= half * (1 + 1 / rows):
            fits.add((OLD, rows))
        if rows > 1 and abs((length - 1) / (rows - 1) - rate) <= half * (1 + 1 / (rows - 1)):
            fits.add((STRICT, rows))
    return {(form, rows) for form, rows in fits if length <= rows + half}


class Log:
    """Decode lines to records. Lines wait until arithmetic over them tells which form the accept rate has."""

    def __init__(self, server: Server):
        self.server, self.forms = server, set[tuple[str, int]]()
        self.pending: list[Record] = []
        self.prefill: dict[str, dict[str, float]] = {}
        self.recent: dict[str, deque[float]] = {}
        self.last_time: dict[str, datetime] = {}

    def prefill_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Remember that prefill ran, from the cache or not, and whether nothing was decoding."""
        seen = self.prefill.setdefault(_rank(text), {"cached_tokens": 0, "from_idle": 0})
        seen["cached_tokens"] += record.details.get("cached_tokens", 0)
        seen["from_idle"] += record.batch_size == 0
        return []

    def decode_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Records that are complete with this line."""
        if record.output_tokens_per_s is None:  # cut off before the figures
            return []
        match, rank = _PREFIX.search(text), _rank(text)
        record.time = match[1] if match else None
        if rank:
            record.details["rank"] = rank
        if record.batch_size and (tokens := record.details.get("kv_tokens")):
            record.context_len = tokens / record.batch_size
        if record.mean_acceptance_length is None:
            record.mean_acceptance_length, record.details["plain"] = 1.0, True
            record.definition = "plain decode: the line has no accept len, one token per step and request"
        elif (rate := number(values.get("accept rate"))) is not None:
            record.details["printed_accept_rate"] = rate
        self._window(record, rank)
        self.pending.append(record)
        return list(self.ready())

    def _window(self, record: Record, rank: str) -> None:
        """What this window holds besides steady decoding: prefill, idle time, a stall."""
        prefill = self.prefill.pop(rank, {})
        record.prefill_mixed = bool(prefill)
        if prefill.get("cached_tokens"):
            record.details["cached_tokens"] = prefill["cached_tokens"]
        batch, rate, recent = (
            record.batch_size,
            record.output_tokens_per_s,
            self.recent.setdefault(rank, deque(maxlen=9)),
        )
        step = 1000 * batch * (record.mean_acceptance_length or 1) / rate if batch and rate else None
        usual = statistics.median(recent) if recent else None
        if prefill.get("from_idle"):
            _idle(record)
        elif step and usual and step > _STALL * usual:
            record.details["stalled"] = True
            record.warn(f"this window took {step / usual:.0f} times the usual step: idle or stalled time is in it")
        elif step and usual and len(recent) == 1 and usual > _STALL * step and self.pending:
            _idle(self.pending[0])  # the first line of a log has nothing before it to compare with
            recent.clear()
        if step and not record.details.get("stalled") and not record.details.get("after_idle"):
            recent.append(step)
        if record.time:
            now, before = datetime.fromisoformat(record.time), self.last_time.get(rank)
            self.last_time[rank] = now
            silence = (now - before).total_seconds() if before else 0
            if silence > _SILENT_S and record.prefill_mixed:
                record.details["silent_s"] = silence
                record.warn(
                    f"no decode line for {silence:.0f} s while prefill ran: decoding was starved, means hide it"
                )

    def ready(self, at_end: bool = False) -> Iterator[Record]:
        """Settle the rate form by the waiting lines; give out what needs no further lines."""
        rows = self.server.number("speculative_num_draft_tokens")
        for record in self.pending:
            rate = record.details.get("printed_accept_rate")
            if rate is not None and "fits" not in record.details:
                fits = record.details["fits"] = rate_forms(record.mean_acceptance_length or 0, rate, rows)
                self.forms = (self.forms & fits) or fits or self.forms
        undecided = len(self.forms) > 1 and any("fits" in record.details for record in self.pending)
        alone = len(self.pending) == 1 and not any(len(recent) > 1 for recent in self.recent.values())
        if at_end or len(self.pending) >= _MAX_PENDING or not (undecided or alone):
            waiting, self.pending = self.pending, []
            yield from (self._settle(record, rows) for record in waiting)

    def _settle(self, record: Record, rows: int | None) -> Record:
        fits, rate = record.details.pop("fits", None), record.details.get("printed_accept_rate")
        if record.details.get("plain"):
            return record.derive()
        record.num_speculative_tokens = rows - 1 if rows else None
        chosen = self.forms & fits if fits else set()
        forms, sizes = {form for form, _ in chosen}, {size for _, size in chosen}
        if fits is not None and not fits:
            record.warn(f"accept rate {rate:g} fits neither form with this accept len; the rate is not used")
        elif len(forms) > 1:
            record.warn(
                "accept rate fits both forms on these lines (draft tokens unknown), so it is not used; the server_args "
                "line or a line with another acceptance would decide"
            )
        elif forms:
            record.details["accept_rate_form"] = form = forms.pop()
            record.definition += f"; accept rate = {form}, decided by arithmetic"
            record.num_speculative_tokens = sizes.pop() - 1 if len(sizes) == 1 else record.num_speculative_tokens
            record.draft_acceptance_rate = rate if form == STRICT else None
            if form == OLD:
                record.warn("accept rate is length / draft tokens (bonus in it); converted to (length - 1) / k")
        k, length = record.num_speculative_tokens, record.mean_acceptance_length
        if k and length and record.draft_acceptance_rate is None and fits != set():
            record.draft_acceptance_rate = (length - 1) / k
        return record.derive()


def _rank(text: str) -> str:
    match = _PREFIX.search(text)
    return match[2].strip() if match else ""


def _idle(record: Record) -> None:
    record.details["after_idle"] = True
    record.warn(_IDLE)


def meta_info(record: Record, node: Mapping[str, Any]) -> None:
    """Counts of one response; their names changed twice."""
    steps, output = record.num_verify_steps or 0, record.details.get("output_tokens")
    if histogram := numbers(node.get("spec_correct_drafts_histogram") or node.get("spec_accept_histogram")):
        from_histogram(record, histogram)
    for field, names in (
        ("num_accepted_tokens", ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")),
        ("num_drafted_tokens", ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")),
    ):
        found = next((value for name in names if (value := number(node.get(name))) is not None), None)
        if found is not None:
            setattr(record, field, round(found))
    if record.num_accepted_tokens is None and output and steps:
        record.mean_acceptance_length = (output - 1) / steps
        record.definition = "(completion - 1) / verify steps: without the token that prefill emits"


def server_info(record: Record, node: Mapping[str, Any]) -> None:
    """One length per rank; they cannot be pooled without their step counts."""
    states = [state for state in node["internal_states"] if isinstance(state, dict)]
    ranks = [number(state.get("avg_spec_accept_length")) for state in states]
    known = [value for value in ranks if value is not None]
    record.details["mean_acceptance_length_of_ranks"] = ranks
    if len(ranks) == 1 and known:
        record.mean_acceptance_length = known[0]
    elif known:
        record.warn(
            f"{len(known)} of {len(ranks)} ranks have a length (the others have not decoded yet); their verify counts "
            "are not given, so the lengths cannot be pooled"
        )
    rows = number(node.get("speculative_num_draft_tokens"))
    record.num_speculative_tokens = round(rows) - 1 if rows else None


def bench(record: Record, node: Mapping[str, Any]) -> None:
    """A load test prints the server's length, which is not the run's."""
    if record.mean_acceptance_length is not None:
        record.details["acceptance_scope"] = "since_start"
        record.warn("accept length is the server's value since its start (rank 0), not this run's")


def one_batch(record: Record, node: Mapping[str, Any]) -> None:
    """Plain decode only."""
    record.mean_acceptance_length, record.step_ms_source = 1.0, "printed"
