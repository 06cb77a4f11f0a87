"""llama.cpp: timings, slot and statistics lines, the speculative programs, llama-bench and its relatives."""

import re
from collections.abc import Mapping
from typing import Any

from labkit.engines.record import Record, difference
from labkit.engines.server import Server
from labkit.engines.tables import number, numbers

_SLOT = re.compile(r"id\s+(\d+)")


class Log:
    """A slot's prompt, eval and draft lines belong together; statistics lines are running totals per drafter."""

    def __init__(self, server: Server) -> None:
        self.server, self.drafted = server, False  # whether a draft line came
        self.slots: dict[str, Record] = {}  # the lines of each slot's open request, in one
        self.totals: dict[str, Record] = {}

    def forget(self) -> None:
        """Lines were passed over: requests that were open may have ended there."""
        self.slots = {}

    def part(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """A prompt or eval line, kept for the draft line that follows; of a plain request there is none."""
        slot = _slot(text)
        done = self._plain(slot) if "prompt_tokens" in record.details else []  # a request begins
        before, self.slots[slot] = self.slots.get(slot), record
        record.details = (before.details if before else {}) | record.details
        return done

    def ready(self) -> list[Record]:
        """The last request of each slot, at the end of the file or of the server."""
        return [record for slot in list(self.slots) for record in self._plain(slot)]

    def _plain(self, slot: str) -> list[Record]:
        """The request of a slot without a draft line, where nothing tells that drafts are on."""
        record = self.slots.pop(slot, None)
        details = record.details if record else {}
        output, ms = details.get("output_tokens", 0), details.pop("decode_ms_total", None)
        # Without a time the line was cut off or garbled.
        if not record or not ms or self.drafted or "drafter" in self.server.named or output < 2:
            return []
        request_steps(record, output, ms, details.get("prompt_tokens"))
        return [record]

    def slot_line(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """All drafters of one request."""
        # Without a slot of their own the lines directly above are meant.
        line, self.drafted = self.slots.pop(_slot(text), None) or self.slots.pop("", None), True
        state = line.details if line else {}
        printed = record.mean_acceptance_length
        request_steps(record, state.get("output_tokens"), state.get("decode_ms_total"), state.get("prompt_tokens"))
        if printed:  # it and the rates are over the steps with a draft
            record.steps_from_length(printed - 1)
            record.details["mean_acceptance_length_of_drafted_steps"] = printed
        if printed and record.num_verify_steps is None:
            record.zero_draft_steps = "excluded"
        elif record.num_verify_steps is None:
            record.warn("steps are not printed here, so the length is unknown; the eval time line would give them")
        return [record.derive()]

    def statistics(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """Totals of one drafter since the start of the process, and the window since its line before."""
        drafter = text.partition("statistics ")[2].partition(":")[0]
        times, record.details["drafter"] = numbers(values.get("dur(b,g,a)")), drafter
        record.details.pop("draft_ms_total", None)
        if record.num_drafted_steps and len(times) == 3:
            record.details["draft_ms"] = times[1] / record.num_drafted_steps
        window = difference(self.totals[drafter], record) if drafter in self.totals else None
        self.totals[drafter] = record.derive()
        return [record] + ([window] if window else [])

    def figures(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """A line that says all by itself."""
        if slot := _slot(text):
            record.details["slot"] = slot
        return [record]

    def bench_row(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """A table row of one plain setting; ``pp`` rows give the time of one forward of q_len tokens."""
        rate, forward, q_len = record.output_tokens_per_s, *map(record.details.get, ("forward_tokens_per_s", "q_len"))
        record.batch_size, record.context_len = record.batch_size or 1.0, record.context_len or 0.0
        if forward and q_len:
            record.step_ms = 1000 * q_len / forward
        elif rate:
            record.mean_acceptance_length, record.step_ms = 1.0, 1000 * record.batch_size / rate
            record.context_len += record.details.get("output_tokens", 0) / 2
        record.step_ms_source = "derived"
        return [record]

    def spec_bench_row(self, record: Record, values: Mapping[str, str], text: str) -> list[Record]:
        """A row with rounds, so its length is exact."""
        record.batch_size, record.details["workload"] = 1.0, values["workload"]
        return [record.derive()]


def _slot(text: str) -> str:
    return match[1] if (match := _SLOT.search(text)) else ""


def request_steps(record: Record, output: float | None, ms: float | None, prompt: float | None) -> None:
    """Steps of one complete request: its tokens are the prefill's one, one a step, and the accepted drafts."""
    if output is None:
        return
    record.details["output_tokens"], record.batch_size = output, 1.0
    steps = round(output - (record.num_accepted_tokens or 0) - 1)
    record.output_tokens_per_s = 1000 * output / ms if ms else record.output_tokens_per_s
    if prompt is not None:
        record.context_len, record.details["prompt_tokens"] = prompt + output / 2, prompt
    if record.num_drafted_tokens is None:
        record.definition, record.mean_acceptance_length = "plain decode: no drafts in this request", 1.0
        record.warn("no draft counts: no drafts ran, or a build that does not print them")
    elif steps > 0:
        record.num_verify_steps, record.zero_draft_steps = steps, "counted"
        record.details["steps_from"] = "generated - accepted - 1 (the prefill token), within 1 or 2"
    else:
        record.warn("contradiction: fewer tokens generated than drafts accepted; the counts have another scope")
    if ms and steps > 0:
        record.step_ms, record.step_ms_source = ms / steps, "derived"


def timings(record: Record, node: Mapping[str, Any]) -> None:
    """The object at the end of a response."""
    prompt = record.details.get("prompt_tokens", 0)
    context = prompt + record.details.get("cached_tokens", 0)
    request_steps(record, number(node.get("predicted_n")), number(node.get("predicted_ms")), context)
    if 0 < prompt < 16:
        record.warn("only a few prompt tokens were not cached: the prompt rate means nothing")


def program(record: Record, node: Mapping[str, Any]) -> None:
    """llama-speculative prints no steps."""
    output, accepted = record.details.get("output_tokens"), record.num_accepted_tokens
    if output is not None and accepted is not None and output > accepted:
        record.num_verify_steps = round(output - accepted)
