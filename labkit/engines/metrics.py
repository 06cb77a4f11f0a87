"""Metrics pages in the Prometheus text format: totals since start, and the run between two scrapes.

Counters are summed over engines and ranks, each of which has a series of its own. Gauges of acceptance are not
averaged: a mean of ratios over ranks is no ratio of the whole.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from labkit.engines.record import COUNTS, Record
from labkit.engines.tables import Format, formats, number, store

SAMPLE = re.compile(
    r"^(sglang|vllm|llamacpp|trtllm)[:_][A-Za-z_]\w*(?:\{.{0,4096}\})?\s+[-+\d.eENaInf]+(?:\s+[\d.]+)?$"
)
_FELL = "counters are below those of the page before: the pages are in reverse order, or the server restarted"
_UNEQUAL = 0.1  # lengths of engines that differ by more are told
_SUMMED_GAUGES = ("batch_size", "output_tokens_per_s", "num_queued")
_POOLED = "(generated tokens - requests) / verify calls from counter differences: bonus counted, prefill tokens not"


@dataclass
class _Scrape:
    place: str
    model: str | None = None
    seen: set[tuple[str, str]] = field(default_factory=set)
    counters: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    positions: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def total(self) -> dict[str, float]:
        """The counters, which are kept by engine, summed."""
        names = dict.fromkeys(name for own in self.counters.values() for name in own)
        return {name: sum(own.get(name, 0) for own in self.counters.values()) for name in names}

    def since(self, before: "_Scrape") -> "_Scrape":
        """What ran between two scrapes: differences only, no gauges."""
        found = _Scrape(self.place, self.model)
        for engine, own in self.counters.items():
            old = before.counters.get(engine, {})
            found.counters[engine] = {name: value - old.get(name, 0) for name, value in own.items()}
        found.positions = {i: count - before.positions.get(i, 0) for i, count in self.positions.items()}
        return found

    def record(self, item: Format) -> Record:
        """Totals since start, and gauges of the last window."""
        record = Record(item.engine, item.kind, item.scope, item.definition, self.place, model=self.model)
        record.zero_draft_steps = item.zero_draft_steps
        for name, value in self.total().items():
            store(record, name, value)
        for name, values in self.gauges.items():
            if name in _SUMMED_GAUGES or len(values) == 1:
                store(record, name, sum(values))
            else:
                record.details[f"{name}_of_ranks"] = values
                if name == "mean_acceptance_length":
                    record.warn(f"{name} is a gauge per rank; a mean of ranks is no pooled value, so it is left out")
        if rows := record.details.get("num_draft_tokens_with_root"):
            record.num_speculative_tokens = round(rows) - 1
        steps = record.num_drafted_steps
        if steps and self.positions:
            rates = [self.positions.get(i, 0) / steps for i in range(max(self.positions) + 1)]
            record.acceptance_rate_per_pos = rates
        if "num_emitted_tokens" in record.details:
            _v0(record)
        if steps is None and record.mean_acceptance_length is not None:
            record.scope = "window"
        for name in [key.removeprefix("num_") for key in record.details if key.startswith("num_")]:
            if (seconds := record.details.get(f"{name}_s")) is not None and (count := record.details[f"num_{name}"]):
                record.details[f"{name}_mean_ms"] = 1000 * seconds / count
        self._tell_engines(record)
        return record.derive()

    def _tell_engines(self, record: Record) -> None:
        """The counts of each engine beside the sum, and whether their lengths differ."""
        found = {name: {n: own[n] for n in COUNTS if n in own} for name, own in self.counters.items()}
        found = {name: own for name, own in found.items() if own}
        if len(found) < 2:
            return
        record.details["engines"], lengths = found, list[float]()
        for own in found.values():
            if steps := own.get("num_drafted_steps"):
                own["mean_acceptance_length"] = 1 + own.get("num_accepted_tokens", 0) / steps
                lengths.append(own["mean_acceptance_length"])
        if lengths and max(lengths) - min(lengths) > _UNEQUAL * min(lengths):
            text = f"lengths of the {len(found)} engines lie between {min(lengths):.2f} and {max(lengths):.2f}"
            record.warn(f"{text}; details has the counts of each")


def _v0(record: Record) -> None:
    """The V0 counter of accepted tokens has matches after a miss in it: k follows from the efficiency, A from k."""
    emitted, drafted = record.details["num_emitted_tokens"], record.num_drafted_tokens
    record.details["num_matches"], record.num_accepted_tokens = record.num_accepted_tokens, None
    share = record.details.get("system_efficiency", 0) * (drafted or 0) / (emitted or 1)  # k / (k + 1)
    k = record.num_speculative_tokens or (share / (1 - share) if 0 < share < 1 else 0)
    if drafted and round(k) and abs(k - round(k)) < 0.1:
        record.num_speculative_tokens = round(k)
        record.num_drafted_steps = round(drafted / round(k))
        record.num_accepted_tokens = round(emitted - record.num_drafted_steps)
        record.definition = "emitted tokens / verify steps since start; k from efficiency = emitted / (S x (k + 1))"
    else:
        record.warn("V0 counts matches after a miss as accepted; without k neither length nor rate follows from them")


class MetricsPages:
    """Samples to records. A series that comes again starts the next scrape, in the same file or the next one."""

    def __init__(self) -> None:
        self.formats = {item.engine: item for item in formats("metrics")}
        self.open: dict[str, _Scrape] = {}
        self.before: dict[str, _Scrape] = {}

    def feed(self, text: str, place: str) -> list[Record]:
        """Records of a scrape that this sample (a line that `SAMPLE` matches) ends."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = text_string_to_metric_families(text + "\n")
            samples = [(sample, float(sample.value)) for family in families for sample in family.samples]
        except (ValueError, OverflowError):  # cut off inside the labels
            return []
        done, item = [], next(item for engine, item in self.formats.items() if text.startswith(engine))
        for sample, value in samples:
            name = sample.name[len(item.engine) + 1 :]
            key = (name, str(sorted(sample.labels.items())))
            if item.engine in self.open and key in self.open[item.engine].seen:
                done += self._finish(item)
            scrape = self.open.setdefault(item.engine, _Scrape(place))
            scrape.seen.add(key)
            scrape.model = scrape.model or sample.labels.get("model_name")
            base, position = name.removesuffix("_total"), sample.labels.get("position", "")
            target = item.fields.get(base, ("", 1.0))[0]
            if number(value) is None:  # NaN as well
                continue
            if (
                base == "spec_decode_num_accepted_tokens_per_pos"
                and position.isdecimal()
                and len(position) < 5
                and int(position) < 1024
            ):
                scrape.positions[int(position)] += value
            elif target.startswith("gauge "):
                scrape.gauges[target.removeprefix("gauge ")].append(value)
            elif target:
                scrape.counters[sample.labels.get("engine", sample.labels.get("dp_rank", ""))][target] += value
        return done

    def flush(self) -> list[Record]:
        """Records of the open scrapes."""
        return [record for engine in list(self.open) for record in self._finish(self.formats[engine])]

    def _finish(self, item: Format) -> list[Record]:
        scrape = self.open.pop(item.engine)
        record, before = scrape.record(item), self.before.get(item.engine)
        self.before[item.engine] = scrape
        known = (record.steps, record.num_drafted_tokens, record.mean_acceptance_length, record.output_tokens_per_s)
        found = [record] if any(value is not None for value in known) else []
        if before is None:
            return found
        between = scrape.since(before)
        changed = between.total()
        if min(changed.values(), default=0) < 0:
            record.warn(_FELL)
            return found
        if not any([changed[name] for name in COUNTS if name in changed] or changed.values()):
            record.warn("nothing ran since the page before: there is no run between the two")
            return found
        if record.num_speculative_tokens:
            between.gauges["num_speculative_tokens"] = [record.num_speculative_tokens]
        return [*found, _run(between.record(item), changed)]


def _run(run: Record, changed: dict[str, float]) -> Record:
    """Complete the record of what ran between two scrapes."""
    run.scope, run.kind = "run", f"{run.kind} difference"
    if run.engine == "sglang" and (tokens := changed.get("output_tokens")) and run.num_verify_steps:
        run.definition = _POOLED
        run.mean_acceptance_length = (tokens - changed.get("num_requests", 0)) / run.num_verify_steps
    if (iterations := changed.get("num_iterations")) and changed.get("iteration_tokens"):
        run.details["tokens_per_iteration"] = changed["iteration_tokens"] / iterations
    if (seconds := changed.get("itl_s")) and changed.get("num_itl"):
        run.details["inverse_itl_tokens_per_s"] = changed["num_itl"] / seconds
    return run
