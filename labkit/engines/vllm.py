"""vLLM: V0 and V1 speculative lines with their throughput lines, per-request blocks, bench serve, offline script."""

import re
from collections.abc import Mapping
from typing import Any

from labkit.engines.reading import printed_by
from labkit.engines.record import Record, difference
from labkit.engines.roles import speculative_tokens
from labkit.engines.server import Server
from labkit.engines.tables import from_histogram, number, numbers

_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_ENGINE = re.compile(r"Engine (\d+):")
_Name = tuple[str, str]  # who printed the line, engine
_LENGTH = 0.006  # two printed decimals


class Log:
    """Throughput and speculative lines: one window where both came, plain decode where no speculative line followed."""

    def __init__(self, server: Server) -> None:
        self.server, self.drafted = server, False  # whether a speculative line came
        self.companions: dict[_Name, Record] = {}  # the last throughput lines that are of no window yet
        self.running: dict[_Name, float] = {}
        self.totals: Record | None = None
        self.kv_tokens: float | None = None

    def forget(self) -> None:
        """Lines were passed over: the throughput lines before that belong to no line after it."""
        self.companions, self.running = {}, {}

    def v1(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """A window; steps, k and the bonus are settled by arithmetic."""
        printed_against_counts(record)
        settle_v1(record, number(values.get("Mean acceptance length")))
        return [self._join(record, text)]

    def v0(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Totals since start, and the window since the line before."""
        k, drafted, emitted = record.num_speculative_tokens, record.num_drafted_tokens, record.details.get("emitted")
        if not (k and drafted and emitted is not None):
            return []
        record.num_drafted_steps = round(drafted / k)
        record.num_accepted_tokens = round(emitted - record.num_drafted_steps)
        rate, efficiency = (number(values.get(name)) for name in ("Draft acceptance rate", "System efficiency"))
        kept = number(values.get("Number of accepted tokens"))  # matches after a miss too
        _compare(record, "efficiency", efficiency, emitted / (record.num_drafted_steps * (k + 1)))
        _compare(record, "acceptance rate", rate, None if kept is None else kept / drafted)
        window = difference(self.totals, record) if self.totals else None
        self.totals = record.derive()
        if window:
            return [record, self._join(window, text)]
        self.companions = {}  # they are of this line
        return [record]

    def throughput(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Printed just before the speculative line, one per engine: the line before it, if still here, was of none."""
        match = _ENGINE.search(text)
        name, record.time = (printed_by(text), match[1] if match else "0"), _time(text)
        done = self._plain(name, self.companions[name]) if name in self.companions else []
        self.companions[name] = record
        return done

    def ready(self) -> list[Record]:
        """The last windows; a file that ends after a throughput line may have lost the speculative one."""
        lines, self.companions = self.companions, {}
        return [found for name, line in lines.items() for found in self._plain(name, line, cut=self.drafted)]

    def _plain(self, name: _Name, record: Record, cut: bool = False) -> list[Record]:
        """The window of a throughput line alone; none where nothing ran."""
        first = name not in self.running
        self._load(record, {name: record})
        if not (record.batch_size or record.output_tokens_per_s):
            return []
        if not record.output_tokens_per_s:
            record.warn(f"no token in this window while {record.batch_size:g} requests ran: prefill or a stall")
        elif cut or self.totals or (speculative_tokens(self.server) and not self.drafted):
            record.warn("no speculative line here, though drafts are on: it was left out of the log, or none ran")
        else:
            record.mean_acceptance_length = 1.0
            record.definition = "plain decode: no speculative line with this one, one token per step and request"
            if first:
                record.details["after_idle"] = True
                record.warn("nothing before this line tells how much of its window was idle: no step time from it")
        return [record.derive()]

    def cache_size(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Tokens that the cache holds: with its usage, the mean context."""
        self.kv_tokens = number(text.partition("GPU KV cache size:")[2])
        return []

    def _join(self, record: Record, text: str) -> Record:
        record.time, self.drafted, mine = _time(text), True, printed_by(text)
        lines = {n: self.companions.pop(n) for n in [*self.companions] if n[0] == mine or "" in (mine, n[0])}
        if lines:
            self._load(record, lines)
            self._zero_draft_steps(record)
        return record.derive()

    def _load(self, record: Record, lines: Mapping[_Name, Record]) -> None:
        """What the throughput lines of a window tell, summed over engines."""
        rate = sum(line.output_tokens_per_s or 0 for line in lines.values())
        batch = sum(line.batch_size or 0 for line in lines.values())
        known = [self.running.get(name) for name in lines]
        self.running |= {name: line.batch_size or 0.0 for name, line in lines.items()}
        record.batch_size, record.output_tokens_per_s = batch or None, rate or None
        record.running_before(None if None in known else sum(filter(None, known)))
        # A prompt token costs far less than a generated one: fewer of them than generated ones do not show.
        record.prefill_mixed = sum(line.details.get("prompt_tokens_per_s", 0) for line in lines.values()) > rate
        record.details["num_queued"] = sum(line.details.get("num_queued", 0) for line in lines.values())
        if self.kv_tokens and batch:
            used = sum(line.details.get("kv_usage", 0) for line in lines.values())
            record.context_len = used * self.kv_tokens / batch
            record.details["context_len_from"] = "KV cache usage x cache size / running"

    def _zero_draft_steps(self, record: Record) -> None:
        """S = generated - accepted tokens of the window: equal to S1 where every step had a draft."""
        per_s, accepted, steps = record.details.get("accepted_tokens_per_s"), record.num_accepted_tokens, record.steps
        if per_s and accepted and steps and not record.prefill_mixed:
            generated = (record.output_tokens_per_s or 0) * accepted / per_s
            if abs(generated - accepted - steps) <= 0.02 * steps + 1:
                record.num_verify_steps, record.zero_draft_steps = steps, "counted"
                record.details["steps_from"] = "generation throughput = accepted + drafts: no step without a draft"


def _time(text: str) -> str | None:
    return match[1] if (match := _TIME.search(text)) else None


def settle_v1(record: Record, printed: float | None) -> None:
    """Settle steps, k and the bonus of a V1 line by arithmetic on its own counts; warn where that fails."""
    accepted, drafted, rates = record.num_accepted_tokens, record.num_drafted_tokens, record.acceptance_rate_per_pos
    if accepted is None or drafted is None:
        record.warn("figures are missing from the line: it may be cut off")
        return
    if printed is None:  # a line that was cut would end with the length: later versions print it first
        record.warn("no acceptance length and no steps in the line (vLLM 0.8): only the rate is known")
        return
    steps_of = {k: drafted // k for k in ([len(rates)] if rates else range(1, 65)) if drafted and drafted % k == 0}
    lengths = {(k, s, bonus): accepted / s + bonus for k, s in steps_of.items() for bonus in (False, True)}
    fits = {key for key, length in lengths.items() if abs(length - printed) < _LENGTH}
    bonuses = {bonus for _, _, bonus in fits}
    if rates:
        slack, total = _LENGTH + 0.0006 * len(rates), sum(rates)
        by_rates = {bonus for bonus in (False, True) if abs(printed - bonus - total) < slack}
        bonuses = bonuses & by_rates or by_rates
        record.num_speculative_tokens = len(rates)
    if rates and not bonuses:
        text = f"the printed length {printed:.2f} is neither sum of rates {total:.2f} nor 1 more"
        record.warn(f"contradiction: {text}; the length is not used")
        return
    if len(bonuses) != 1:
        record.warn("whether the bonus is in this length cannot be told from the line's own figures; it is not used")
        return
    bonus = bonuses.pop()
    sizes = {(k, steps) for k, steps, fit in fits if fit == bonus}
    if len(sizes) == 1:
        record.num_speculative_tokens, record.num_drafted_steps = sizes.pop()
    elif not sizes and (above := printed - bonus) > 0:
        record.warn("drafts were shorter than k at times: steps are taken from the printed length")
        record.steps_from_length(above)
    record.mean_acceptance_length = printed + (not bonus)
    if not bonus:
        record.definition = "accepted / drafts of the window, bonus not counted as printed; 1 was added"
        record.warn("bonus not counted in the printed length (vLLM before 0.9); decided by arithmetic, 1 was added")


def request(record: Record, node: Mapping[str, Any]) -> None:
    """A per-request block; an earlier preview had a map with text keys for its histogram."""
    histogram = node.get("acceptance_histogram")
    if isinstance(histogram, dict):
        keys = [int(key) for key in histogram if str(key).isdecimal() and len(str(key)) < 5 and int(key) < 1024]
        histogram = [number(histogram.get(str(i))) or 0 for i in range(max(keys, default=-1) + 1)]
    if numbers(histogram):
        from_histogram(record, numbers(histogram))


def bench(record: Record, node: Mapping[str, Any]) -> None:
    """One stream at a time: its step is TPOT x length; the run's throughput has the prefill in it."""
    printed_against_counts(record)
    length, tpot = record.derive().mean_acceptance_length, record.details.get("tpot_ms")
    if record.details.get("max_concurrency") != 1:
        return
    record.batch_size = 1.0
    if length and tpot:
        record.step_ms, record.step_ms_source = tpot * length, "derived"
        record.details["step_ms_from"] = "TPOT x length"
    elif length:
        record.prefill_mixed = True
        record.warn("no TPOT: the throughput of the run has prefill in it, so no step time from it")


def printed_against_counts(record: Record) -> None:
    """Warn where a printed length or rate is not that of the printed counts, which are then used."""
    steps, accepted, drafted = record.steps, record.num_accepted_tokens, record.num_drafted_tokens
    if accepted is not None:
        _compare(record, "length", record.mean_acceptance_length, 1 + accepted / steps if steps else None)
        _compare(record, "acceptance rate", record.draft_acceptance_rate, accepted / drafted if drafted else None)


def _compare(record: Record, name: str, printed: float | None, counted: float | None) -> None:
    if printed is not None and counted is not None and abs(printed - counted) > _LENGTH:
        record.warn(f"contradiction: the printed {name} is {printed:.3f}, by the counts it is {counted:.3f}")
