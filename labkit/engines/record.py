"""One figure group as a source printed it, in labkit's words, with its scope, its definition and what is wrong with it.

Letters in this package: S verify steps, S1 those with a draft, A accepted and D drafted tokens, k drafts per step.
"""

import copy
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STEADY = 0.05  # a change of running requests within it does not show in the step time
COUNTS = ("num_verify_steps", "num_drafted_steps", "num_drafted_tokens", "num_accepted_tokens")


@dataclass(slots=True)
class Record:
    """What one line, response, metrics page or result file says. Unknown is None, never 0.

    scope: window (since the last line), request, run (one load test) or since_start (of the server). definition: what
    the acceptance figure counts. mean_acceptance_length: tokens per step, bonus counted, over S1 instead of S where
    zero_draft_steps is "excluded". batch_size: running requests; context_len: mean tokens in the cache of each.
    step_ms: of the whole batch, "printed" or "derived". backend: by role, as far as told by then. details: further
    figures under labkit names with units (ttft_ms, itl_ms, output_tokens, ...).
    """

    engine: str
    kind: str
    scope: str
    definition: str
    place: str = ""
    engine_version: str | None = None
    model: str | None = None
    time: str | None = None
    origin: str = "imported"
    warnings: list[str] = field(default_factory=list)
    num_verify_steps: int | None = None
    num_drafted_steps: int | None = None
    zero_draft_steps: str = "unknown"
    num_drafted_tokens: int | None = None
    num_accepted_tokens: int | None = None
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    acceptance_rate_per_pos: list[float] | None = None
    num_speculative_tokens: int | None = None
    batch_size: float | None = None
    context_len: float | None = None
    output_tokens_per_s: float | None = None
    step_ms: float | None = None
    step_ms_source: str | None = None
    cuda_graph: bool | None = None
    prefill_mixed: bool | None = None
    backend: dict[str, str | None] | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, for JSON; lists and dicts are the record's own."""
        return {name: getattr(self, name) for name in self.__slots__}

    def warn(self, text: str) -> None:
        """Add a warning once."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def steps(self) -> int | None:
        """The steps that this source's length is over: S, else S1."""
        return self.num_drafted_steps if self.num_verify_steps is None else self.num_verify_steps

    @property
    def plain(self) -> bool:
        """Whether it is of decoding without drafts."""
        return bool(self.details.get("plain")) or self.definition.startswith(("plain", "one token"))

    @property
    def has_figures(self) -> bool:
        """Whether it has a figure, or a warning that says why a line of figures gave none."""
        if self.mean_acceptance_length is not None or self.output_tokens_per_s is not None:
            return True
        values = (*(getattr(self, name) for name in self.__slots__ if name != "details"), *self.details.values())
        return bool(self.warnings) or any(isinstance(value, int | float | list) and value != [] for value in values)

    def derive(self) -> "Record":
        """Fill length, rate, k and step time from counts and throughput; returns itself.

        Printed figures stay where they cannot be derived. The step time is batch_size x length / throughput. That
        holds where neither changes: a window with prefill, idle or stalled time in it, or with other running requests
        at its end than at its start, gives none.
        """
        steps, accepted, drafted = self.steps, self.num_accepted_tokens, self.num_drafted_tokens
        if steps and accepted is not None:
            self.mean_acceptance_length = 1 + accepted / steps
        if drafted and accepted is not None:
            self.draft_acceptance_rate = accepted / drafted
        if self.num_speculative_tokens is None and self.acceptance_rate_per_pos:
            self.num_speculative_tokens = len(self.acceptance_rate_per_pos)
        elif self.num_speculative_tokens is None and steps and drafted and drafted % steps == 0:
            self.num_speculative_tokens = drafted // steps
        batch, length, rate = self.batch_size, self.mean_acceptance_length, self.output_tokens_per_s
        steady = not (self.prefill_mixed or self.details.get("after_idle") or self.details.get("stalled"))
        steady = steady and self.details.get("batch_change", 0) <= STEADY
        if batch and length and rate and steady and self.step_ms is None:
            self.step_ms, self.step_ms_source = 1000 * batch * length / rate, "derived"
        return self

    def running_before(self, before: float | None) -> None:
        """Keep by which share the running requests changed since the line before, if they did."""
        if self.batch_size and before not in (None, self.batch_size):
            self.details["batch_change"] = abs((before or 0) - self.batch_size) / self.batch_size

    def steps_from_length(self, above: float) -> None:
        """S1 = A / (length - 1), where two decimals of the length make that exact."""
        accepted = self.num_accepted_tokens or 0
        if self.num_drafted_steps is None and above > 0 and accepted * 0.005 / above**2 < 0.5:
            self.num_drafted_steps = round(accepted / above)


def counted(warnings: Counter[str], limit: int) -> list[str]:
    """The most frequent warnings with their number; those that differ in figures only are one."""
    alike: dict[str, Counter[str]] = {}
    for text, times in warnings.items():
        alike.setdefault(re.sub(r"\d+(\.\d+)?", "", text), Counter())[text] += times
    most = sorted(((texts.total(), texts) for texts in alike.values()), key=lambda item: -item[0])[:limit]
    return [f"{n} x " * (n > 1) + "such as: " * (len(t) > 1) + t.most_common(1)[0][0] for n, t in most]


def difference(before: Record, after: Record) -> Record | None:
    """The window between two records of running totals; None where a counter went down (a restart) or nothing ran."""
    window = copy.deepcopy(after)
    window.scope, window.warnings, window.kind = "window", [], f"{after.kind} difference"
    window.mean_acceptance_length = window.draft_acceptance_rate = window.acceptance_rate_per_pos = None
    counted = []
    for name in COUNTS:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None:
            counted.append(new - old)
        setattr(window, name, new - old if old is not None and new is not None else None)
    return None if counted and (min(counted) < 0 or not any(counted)) else window.derive()
