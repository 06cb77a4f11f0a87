"""TensorRT-LLM's and the load tools' JSON, and console blocks of labelled lines of any tool."""

import sys
from collections.abc import Mapping
from typing import Any

from labkit.engines import llamacpp, sglang, vllm
from labkit.engines.record import Record
from labkit.engines.tables import Format, at, formats, from_histogram, number, numbers

MODULES = {"sglang": sglang, "vllm": vllm, "llamacpp": llamacpp}
_MAX_BLOCK_LINES = 120
_REPEATED_STARTS = ("Serving Benchmark Result", "total_num_output_tokens")


def _average(value: Any) -> float | None:
    """The mean of a percentiles object, or a plain number."""
    if not isinstance(value, dict):
        return number(value)
    return next((found for name in ("average", "avg", "mean") if (found := number(value.get(name))) is not None), None)


def trtllm_bench(record: Record, node: Mapping[str, Any]) -> None:
    """Percentiles of the requests, or tagged lines; drafts are reconstructed from iterations."""
    stats = at(node, "decoding_stats") or {}
    printed = _average(at(stats, "acceptance_length_percentiles"))
    length = record.mean_acceptance_length if printed is None else printed
    older = record.details.get("older_acceptance_rate", record.draft_acceptance_rate)
    rate = _average(at(stats, "draft_acceptance_rate_percentiles")) or older
    if rate is not None and rate > 1:
        record.warn("older builds call output / iterations an acceptance rate: it is a length and was taken as one")
        length, rate = length or rate, record.draft_acceptance_rate
    if rate is not None:
        record.warn("the rate is over reconstructed drafts (k x iterations): a lower bound")
    record.mean_acceptance_length, record.draft_acceptance_rate = length, rate


def aiperf(record: Record, node: Mapping[str, Any]) -> None:
    """The pooled histogram has the counts."""
    if histogram := numbers(node.get("pooled_spec_decode_acceptance_histogram")):
        record.zero_draft_steps = "excluded"
        from_histogram(record, histogram)


def trtllm_request(record: Record, node: Mapping[str, Any]) -> None:
    """Per-request counts."""
    if not record.num_drafted_tokens:
        record.num_drafted_tokens = record.num_accepted_tokens = None
        record.warn("no drafts counted: the one-model path printed 0 before Jul 2026")


def llama_benchy(record: Record, node: Mapping[str, Any]) -> None:
    """Its token counter changed."""
    record.warn("builds before Apr 2026 count one token per chunk: tg is chunks/s there when the server speculates")


def specforge(record: Record, node: Mapping[str, Any]) -> None:
    """Its headline is a mean over requests; the pooled length follows from the totals."""
    tokens, steps = number(node.get("output_tokens")), number(node.get("spec_verify_count"))
    if tokens is not None and steps:
        record.num_verify_steps, record.mean_acceptance_length = round(steps), tokens / steps
    else:
        record.warn("only the mean over requests is given: the pooled length is unknown")


class Blocks:
    """Collects labelled lines; a block ends at its rule, at the next block, or at the end of the file."""

    def __init__(self) -> None:
        self.start, self.values, self.place, self.left = "", dict[str, Any](), "", 0

    def feed(self, text: str, place: str) -> list[Record]:
        """Records of the block that this line ends."""
        begun = next((f.mark for f in formats("block") if f.has in text and f.pattern.search(text)), "")
        begun = "" if begun == self.start and begun not in _REPEATED_STARTS else begun
        rule = bool(self.start and text.strip() and set(text.strip()) == {"="})
        done = self.flush() if begun or rule or self.left == 1 else []
        if begun:
            self.start, self.values, self.place, self.left = begun, {}, place, _MAX_BLOCK_LINES
        if self.start:
            self.left -= 1
            name, mark, value = text.strip().partition(" = " if " = " in text else ":")
            name = name.strip(" -=")
            if name.startswith(("Position ", "acceptance at token")):
                self.values.setdefault("positions", []).extend(numbers(value)[:1])
            elif mark and value.strip():
                self.values[name] = value.strip()
        return done

    def flush(self) -> list[Record]:
        """The record of the open block, of the most specific format whose figure is there."""
        start, values, self.start, self.left = self.start, self.values, "", 0
        mine = (item for item in formats("block") if item.mark == start)
        found = [item for item in mine if any(label in values for label in item.needs.split("|"))]
        best = max(found, key=lambda item: item.kind == "bench_serving console", default=None)
        return [finish(best, best.record(values, self.place), {})] if best else []


def finish(item: Format, record: Record, node: Mapping[str, Any]) -> Record:
    """Do what the table cannot, by the function that the format names."""
    if item.then:
        home = MODULES.get(item.engine)
        getattr(home if hasattr(home, item.then) else sys.modules[__name__], item.then)(record, node)
    # A run's throughput is over its wall time: no step time from it.
    return record.derive() if record.scope != "run" or record.steps else record
