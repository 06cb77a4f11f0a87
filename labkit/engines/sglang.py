"""SGLang: decode lines of all generations, server info, meta_info, bench_serving."""

import functools
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from labkit.engines.record import Record
from labkit.engines.roles import speculative_tokens
from labkit.engines.server import Server
from labkit.engines.tables import from_histogram, number, numbers

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[^\]]*?((?: [A-Z]+\d+)*)\]")
_MAX_PENDING, _STALL, _SILENT_S = 500, 5.0, 60
OLD, STRICT = "length / draft tokens", "(length - 1) / (draft tokens - 1)"
_BOTH = "accept rate fits both forms on these lines, so it is not used; server_args or another acceptance would decide"
_DEFINITIONS = {form: f"{{}}; accept rate = {form}, decided by arithmetic" for form in (OLD, STRICT)}


@functools.lru_cache(1 << 14)
def rate_forms(length: float, rate: float, low: int, high: int) -> frozenset[tuple[str, int]]:
    """The forms of "accept rate", and draft tokens low..high (root counted), that a pair of two decimals fits."""
    half, fits = 0.005 + 1e-9, set[tuple[str, int]]()
    for n in range(low, high + 1):
        if length <= n + half and abs(length / n - rate) <= half * (1 + 1 / n):
            fits.add((OLD, n))
        if n > 1 and length <= n + half and abs((length - 1) / (n - 1) - rate) <= half * (1 + 1 / (n - 1)):
            fits.add((STRICT, n))
    return frozenset(fits)


@functools.lru_cache(1 << 12)
def _decision(forms: frozenset[tuple[str, int]], fits: frozenset[tuple[str, int]]) -> tuple[str, int | None, str]:
    """The one form that is left on this line, the draft tokens if one number is left, and a warning."""
    names, sizes = {form for form, _ in forms & fits}, {size for _, size in forms & fits}
    if not fits:
        return "", None, "accept rate fits neither form with this accept len; the rate is not used"
    if len(names) != 1:
        return "", None, _BOTH if names else ""
    (form,) = names
    text = "accept rate is length / draft tokens (bonus in it); converted to (length - 1) / k" if form == OLD else ""
    return form, sizes.pop() if len(sizes) == 1 else None, text


class _Rank:
    """What one rank has printed since its last decode line, and its usual steps by octave of cached tokens."""

    __slots__ = ("batch", "cached_tokens", "from_idle", "last", "num_recent", "prefill_lines", "recent")

    def __init__(self) -> None:
        self.recent: dict[int, deque[float]] = {}
        self.num_recent = 0  # windows to compare with
        self.restart(None, None)

    def restart(self, now: str | None, batch: float | None) -> None:
        """A decode line ends the window: nothing has been printed since."""
        self.prefill_lines = self.cached_tokens = self.from_idle = 0.0
        self.last, self.batch = now, batch

    def usual(self, octave: int) -> tuple[float, float]:
        """The usual step near this many cached tokens (0: none yet), and how many times more tokens this is."""
        near = octave if octave in self.recent else min(self.recent, key=lambda key: abs(key - octave), default=octave)
        steps = sorted(self.recent.get(near) or (0.0,))
        return steps[len(steps) // 2], 2.0 ** (octave - near)

    def add(self, octave: int, step: float) -> None:
        """One more steady window."""
        if octave not in self.recent:
            self.recent[octave] = deque(maxlen=9)
        self.recent[octave].append(step)
        self.num_recent += 1


class Log:
    """Decode lines to records. Lines wait until arithmetic over them tells which form the accept rate has."""

    def __init__(self, server: Server):
        self.server, self.forms, self.pending = server, frozenset[tuple[str, int]](), list[Record]()
        self.ranks: dict[str, _Rank] = defaultdict(_Rank)
        self._seen: tuple[int, int | None, int | None] = (-1, None, None)

    def forget(self) -> None:
        """Lines were passed over: what ran before the next decode line is unknown."""
        for rank in self.ranks.values():
            rank.restart(None, None)

    def _given(self) -> tuple[int | None, int | None]:
        """Draft tokens, root counted, and depth by the server's arguments."""
        if self._seen[0] != self.server.changes:
            rows = self.server.number("speculative_num_draft_tokens")
            self._seen = self.server.changes, rows, speculative_tokens(self.server)
        return self._seen[1:]

    def prefill_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Remember that prefill ran, from the cache or not, and whether nothing was decoding."""
        rank = self.ranks[_prefix(text)[1]]
        rank.prefill_lines += 1
        rank.cached_tokens += record.details.get("cached_tokens", 0)
        rank.from_idle += record.batch_size == 0
        return []

    def decode_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Records that are complete with this line."""
        if record.output_tokens_per_s is None:  # cut off before the figures
            return []
        record.time, rank = _prefix(text)
        if rank:
            record.details["rank"] = rank
        if record.batch_size and (tokens := record.details.get("kv_tokens")):
            record.context_len = tokens / record.batch_size
        if record.mean_acceptance_length is None and "accept len" not in values:
            record.mean_acceptance_length, record.details["plain"] = 1.0, True
            record.definition = "plain decode: the line has no accept len, one token per step and request"
        elif record.mean_acceptance_length is None:
            record.warn(f"accept len of {values['accept len'][:20]!r} is no number: the length is unknown")
        elif (rate := number(values.get("accept rate"))) is not None:
            self._fit(record, rate)
        self._window(record, self.ranks[rank])
        self.pending.append(record)
        return self.ready()

    def one_batch_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """bench_one_batch prints the median step and batch / median step."""
        one_batch(record, values)
        if record.step_ms and record.output_tokens_per_s:
            record.batch_size = float(round(record.step_ms * record.output_tokens_per_s / 1000)) or None
        if record.batch_size is None:
            record.warn("median latency x throughput is no batch: one of the two is garbled or cut off")
        return [record]

    def _window(self, record: Record, rank: _Rank) -> None:
        """What this window holds besides steady decoding: prefill, idle time, a stall."""
        record.prefill_mixed = rank.prefill_lines > 0
        if rank.cached_tokens:
            record.details["cached_tokens"] = rank.cached_tokens
        batch, rate, length = record.batch_size, record.output_tokens_per_s, record.mean_acceptance_length
        step = 1000 * batch * length / rate if batch and rate and length else None
        octave = round(math.log2(max(record.details.get("kv_tokens", 0), 1)))
        usual, growth = rank.usual(octave)  # a step grows at most as the tokens that it reads
        steady = not rank.from_idle
        if rank.from_idle:
            _idle(record)
        elif step and usual and step > _STALL * usual * max(growth, 1):
            record.details["stalled"], steady = True, False
            record.warn(f"this window took {step / usual:.0f} times the usual step: idle or stalled time is in it")
        elif step and usual and rank.num_recent == 1 and usual > _STALL * step * max(1 / growth, 1) and self.pending:
            _idle(self.pending[0])  # the first line of a log has nothing before it to compare with
            rank.recent, rank.num_recent = {}, 0
        if step and steady:
            rank.add(octave, step)
        if record.prefill_mixed and (silence := _seconds(rank.last, record.time)) > _SILENT_S:
            record.details["silent_s"] = silence
            record.warn(f"no decode line for {silence:.0f} s while prefill ran: decoding was starved, means hide it")
        record.running_before(rank.batch)
        rank.restart(record.time, batch)

    def ready(self, at_end: bool = False) -> list[Record]:
        """Settle the rate form by the waiting lines; give out what needs no further lines."""
        alone = len(self.pending) == 1 and not any(rank.num_recent > 1 for rank in self.ranks.values())
        waits = alone or (len(self.forms) > 1 and any("fits" in record.details for record in self.pending))
        if waits and not at_end and len(self.pending) < _MAX_PENDING:
            return []
        done, self.pending = self.pending, []
        return [self._settle(record) for record in done]

    def _fit(self, record: Record, rate: float) -> None:
        """Which forms of the rate this line leaves."""
        rows, length = self._given()[0], record.mean_acceptance_length or 0
        known = rows or (next(iter(self.forms))[1] if len(self.forms) == 1 else 0)
        fits = rate_forms(length, rate, known, known) if known else frozenset()
        record.details |= {"printed_accept_rate": rate, "fits": fits or rate_forms(length, rate, 2, 1 if rows else 64)}
        if fits is not self.forms and (fits := record.details["fits"]):
            self.forms = self.forms & fits or fits

    def _settle(self, record: Record) -> Record:
        if record.details.get("plain"):
            return record.derive()
        given, depth = self._given()
        record.num_speculative_tokens, fits = given - 1 if given else None, record.details.pop("fits", None)
        if fits is not None:
            form, rows, warning = _decision(self.forms, fits)
            if warning:
                record.warn(warning)
            if form:
                record.details["accept_rate_form"] = form
                record.definition = _DEFINITIONS[form].format(record.definition)
                record.num_speculative_tokens = rows - 1 if rows else record.num_speculative_tokens
                record.draft_acceptance_rate = record.details["printed_accept_rate"] if form == STRICT else None
        k, length = record.num_speculative_tokens, record.mean_acceptance_length
        if k and length and record.draft_acceptance_rate is None and fits != frozenset():
            record.draft_acceptance_rate = (length - 1) / k
        if k and depth and depth < k:  # of a tree one path is kept
            record.details["draft_depth"] = depth
        return record.derive()


def _prefix(text: str) -> tuple[str | None, str]:
    """Time and rank of a line."""
    match = _PREFIX.search(text)
    return (match[1], match[2].strip()) if match else (None, "")


def _seconds(begin: str | None, end: str | None) -> float:
    """Time between two lines, 0 where a line is cut or garbled."""
    try:
        return (datetime.fromisoformat(end or "") - datetime.fromisoformat(begin or "")).total_seconds()
    except ValueError:
        return 0.0


def _idle(record: Record) -> None:
    record.details["after_idle"] = True
    record.warn("first line after idle: its throughput is divided by the idle time too, so no step time from it")


def meta_info(record: Record, node: Mapping[str, Any]) -> None:
    """Counts of one response; the table has the names of three generations, the last one last."""
    steps, output = record.num_verify_steps or 0, record.details.get("output_tokens")
    accepted = record.num_accepted_tokens
    if histogram := numbers(node.get("spec_correct_drafts_histogram") or node.get("spec_accept_histogram")):
        from_histogram(record, histogram)
    record.num_accepted_tokens = record.num_accepted_tokens if accepted is None else accepted
    if record.num_accepted_tokens is None and output and steps:
        record.mean_acceptance_length = (output - 1) / steps
        record.definition = "(completion - 1) / verify steps: without the token that prefill emits"


def server_info(record: Record, node: Mapping[str, Any]) -> None:
    """One length per rank; they cannot be pooled without their step counts."""
    states = node["internal_states"] if isinstance(node["internal_states"], list) else []
    ranks = [number(state.get("avg_spec_accept_length")) for state in states if isinstance(state, dict)]
    known = [value for value in ranks if value is not None]
    record.details["mean_acceptance_length_of_ranks"] = ranks
    if len(ranks) == 1 and known:
        record.mean_acceptance_length = known[0]
    elif known:
        text = f"{len(known)} of {len(ranks)} ranks have a length, {min(known):.2f} to {max(known):.2f}"
        record.warn(f"{text}; their verify counts are not given, so the lengths cannot be pooled")
    rows = number(node.get("speculative_num_draft_tokens"))
    record.num_speculative_tokens = round(rows) - 1 if rows else None
    server = Server()
    server.take_args(node)
    if (depth := speculative_tokens(server)) and rows and depth < rows - 1:
        record.details["draft_depth"] = depth


def bench(record: Record, node: Mapping[str, Any]) -> None:
    """A load test prints the server's length, which is not the run's."""
    if record.mean_acceptance_length is not None:
        record.details["acceptance_scope"] = "since_start"
        record.warn("accept length is the server's value since its start (rank 0), not this run's")


def one_batch(record: Record, node: Mapping[str, Any]) -> None:
    """Plain decode only."""
    record.mean_acceptance_length = 1.0
