"""Metrics pages in the Prometheus text format: totals since start, and the run between two scrapes.

Counters are summed over engines and ranks, each of which has a series of its own. Gauges of acceptance are not
averaged: a mean of ratios over ranks is no ratio of the whole.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from labkit.engines.record import COUNTS, Record, difference
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
    counters: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    positions: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    engines: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # counts of each engine

    def record(self, item: Format) -> Record:
        """Totals since start, and gauges of the last window."""
        record = Record(item.engine, item.kind, item.scope, item.definition, self.place, model=self.model)
        record.zero_draft_steps = item.zero_draft_steps
        for name, value in self.counters.items():
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
            record.acceptance_rate_per_pos = [self.positions[i] / steps for i in range(max(self.positions) + 1)]
        if "num_emitted_tokens" in record.details:
            _v0(record)
        if steps is None and record.mean_acceptance_length is not None:
            record.scope = "window"
        _means(record.details)
        self.tell_engines(record, None)
        return record.derive()

    def tell_engines(self, record: Record, before: "_Scrape | None") -> None:
        """The counts of each engine beside the sum, and whether their lengths differ."""
        found = {}
        for name, counts in self.engines.items() if len(self.engines) > 1 else ():
            own = counts - before.engines.get(name, Counter()) if before else counts
            steps, accepted = own["num_drafted_steps"], own["num_accepted_tokens"]
            found[name] = dict(own) | ({"mean_acceptance_length": 1 + accepted / steps} if steps else {})
        if found:
            record.details["engines"] = found
            lengths = sorted(own["mean_acceptance_length"] for own in found.values() if "mean_acceptance_length" in own)
            if lengths and lengths[-1] - lengths[0] > _UNEQUAL * lengths[0]:
                text = f"lengths of the {len(found)} engines lie between {lengths[0]:.2f} and {lengths[-1]:.2f}"
                record.warn(f"{text}; details has the counts of each")


def _v0(record: Record) -> None:
    """The V0 counter of accepted tokens has matches after a miss in it: k follows from the efficiency, A from k."""
    emitted, drafted = record.details["num_emitted_tokens"], record.num_drafted_tokens
    record.details["num_matches"], record.num_accepted_tokens = record.num_accepted_tokens, None
    share = record.details.get("system_efficiency", 0) * (drafted or 0) / (emitted or 1)  # k / (k + 1)
    if drafted and 0 < share < 1 and abs((k := share / (1 - share)) - round(k)) < 0.1 and round(k):
        record.num_speculative_tokens = round(k)
        record.num_drafted_steps = round(drafted / round(k))
        record.num_accepted_tokens = round(emitted - record.num_drafted_steps)
        record.definition = "emitted tokens / verify steps since start; k from efficiency = emitted / (S x (k + 1))"
    else:
        record.warn("V0 counts matches after a miss as accepted; without k neither length nor rate follows from them")


def _means(details: dict[str, Any]) -> None:
    """Sums and counts of latencies to means: ``ttft_s`` over ``num_ttft`` is ``ttft_mean_ms``."""
    for name in [key.removeprefix("num_") for key in details if key.startswith("num_")]:
        if (total := details.get(f"{name}_s")) is not None and details[f"num_{name}"]:
            details[f"{name}_mean_ms"] = 1000 * total / details[f"num_{name}"]


class MetricsPages:
    """Samples to records. A series that comes again starts the next scrape, in the same file or the next one."""

    def __init__(self) -> None:
        self.formats = {item.engine: item for item in formats("metrics")}
        self.open: dict[str, _Scrape] = {}
        self.before: dict[str, tuple[_Scrape, Record]] = {}

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
                scrape.counters[target] += value
                if target in COUNTS:
                    scrape.engines[sample.labels.get("engine", sample.labels.get("dp_rank", ""))][target] += round(
                        value
                    )
        return done

    def flush(self) -> list[Record]:
        """Records of the open scrapes."""
        return [record for engine in list(self.open) for record in self._finish(self.formats[engine])]

    def _finish(self, item: Format) -> list[Record]:
        scrape = self.open.pop(item.engine)
        record, earlier = scrape.record(item), self.before.get(item.engine)
        self.before[item.engine] = (scrape, record)
        window = difference(earlier[1], record) if earlier else None
        if window is not None and earlier is not None:
            _run_between(earlier[0], scrape, window)
        elif earlier is not None:
            fell = any(value < earlier[0].counters.get(name, 0) for name, value in scrape.counters.items())
            record.warn(_FELL if fell else "nothing ran since the page before: there is no run between the two")
        known = (record.steps, record.num_drafted_tokens, record.mean_acceptance_length, record.output_tokens_per_s)
        return ([record] if any(value is not None for value in known) else []) + ([window] if window else [])


def _run_between(before: _Scrape, after: _Scrape, window: Record) -> None:
    """Complete the record of what ran between two scrapes, in place: differences only, no gauges."""
    window.scope = "run"
    window.batch_size = window.output_tokens_per_s = window.step_ms = window.step_ms_source = None
    changed = {name: value - before.counters.get(name, 0) for name, value in after.counters.items()}
    window.details = {name: value for name, value in changed.items() if name in window.details}
    if after.positions and (steps := window.num_drafted_steps):
        counts = [after.positions[i] - before.positions.get(i, 0) for i in range(max(after.positions) + 1)]
        window.acceptance_rate_per_pos = [count / steps for count in counts]
    tokens, steps = changed.get("output_tokens"), window.num_verify_steps
    if window.engine == "sglang" and tokens and steps:
        window.definition = _POOLED
        window.mean_acceptance_length = (tokens - changed.get("num_requests", 0)) / steps
    _means(window.details)
    after.tell_engines(window, before)
    if (iterations := changed.get("num_iterations")) and changed.get("iteration_tokens"):
        window.details["tokens_per_iteration"] = changed["iteration_tokens"] / iterations
    if (seconds := changed.get("itl_s")) and changed.get("num_itl"):
        window.details["inverse_itl_tokens_per_s"] = changed["num_itl"] / seconds
