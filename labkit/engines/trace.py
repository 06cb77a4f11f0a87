"""Steps of a torch-profiler trace: draft, draft_extend, verify, accept and gap, attention apart, kernels with grids.

Phases come from named ranges (vLLM prints them), else from kernels that mark a boundary (building the tree, accepting).
The file is read event by event; kept are times and a number for the name of each kernel.
"""

import csv
import itertools
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engines.reading import Input
from labkit.errors import InputError
from labkit.paths import REFERENCE

MAX_EVENT_CHARACTERS, MAX_EVENTS = 1 << 20, 20_000_000
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RANGES = {"user_annotation": "cpu", "gpu_user_annotation": "gpu"}


def is_trace(path: str | Path) -> bool:
    """Whether a file starts like a Chrome trace. Standard input is not looked at."""
    if str(path) == "-" or not Path(path).is_file():
        return False
    source = Input(path)
    try:
        return b'"traceEvents"' in source.start() and source.start().lstrip()[:1] == b"{"
    except InputError:
        return False
    finally:
        source.close()


def events(source: Input) -> Iterator[dict[str, Any]]:
    """The events of a trace, one at a time; one that is cut off ends them.

    Raises
    ------
    InputError
        No list of events, or an event that is larger than any event.
    """
    decoder, text = json.JSONDecoder(), ""
    while (start := text.find('"traceEvents"')) < 0 or "[" not in text[start:]:
        chunk = source.read(1 << 20)
        if not chunk or len(text) > 64 << 20:
            raise InputError(f"{source.name}: wanted a torch-profiler trace, found no traceEvents")
        text += chunk.decode("utf-8", "replace")
    text = text[text.index("[", start) + 1 :]
    position = 0
    while True:
        while position < len(text) and text[position] in " \n\r\t,":
            position += 1
        try:
            event, position = decoder.raw_decode(text, position)
            if isinstance(event, dict):
                yield event
        except (ValueError, RecursionError):
            if text[position : position + 1] == "]":
                return
            text, position = text[position:], 0
            if len(text) > MAX_EVENT_CHARACTERS:
                raise InputError(f"{source.name}: an event of more than 1 MiB; wanted a torch-profiler trace") from None
            chunk = source.read(1 << 18)
            if not chunk:
                source.notes.append("the trace is cut off; the steps before that were read")
                return
            text += chunk.decode("utf-8", "replace")


def _table(what: str) -> list[tuple[re.Pattern[str], str, str]]:
    with (REFERENCE / "engine_trace.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == what]
    return [(re.compile(row["pattern"]), row["phase"], row["next_phase"]) for row in rows]


class _Events:
    """Times in us: device kernels where there are any, else CPU operators; ranges and marks of phases."""

    def __init__(self, source: Input):
        self.names: dict[tuple[str, str], int] = {}
        self.times = {side: [array("d"), array("d"), array("d")] for side in ("gpu", "cpu")}
        self.ranges: dict[str, list[tuple[float, float, str]]] = {"gpu": [], "cpu": []}
        patterns = _table("range")
        for event in events(source):
            begin, length, name = event.get("ts"), event.get("dur"), event.get("name")
            if event.get("ph") != "X" or not isinstance(name, str):
                continue
            if not isinstance(begin, int | float) or not isinstance(length, int | float) or length < 0:
                continue
            kind = event.get("cat")
            if kind in _RANGES:
                for pattern, phase, _ in patterns:
                    if match := pattern.search(name):
                        found = match[1] if phase == "*" else phase
                        self.ranges[_RANGES[kind]].append((begin, begin + length, found))
            elif kind in _DEVICE or kind == "cpu_op":
                arguments = event.get("args")
                grid = str(arguments.get("grid", "")) if isinstance(arguments, dict) else ""
                number = self.names.setdefault((name[:200], grid[:40]), len(self.names))
                for values, value in zip(
                    self.times["gpu" if kind in _DEVICE else "cpu"], (begin, length, number), strict=True
                ):
                    values.append(value)
                if len(self.times["gpu"][0]) > MAX_EVENTS:
                    raise InputError(f"{source.name}: more than {MAX_EVENTS} kernels; record fewer steps")
        self.side = "gpu" if self.times["gpu"][0] else "cpu"
        begins, lengths, numbers = (np.array(values) for values in self.times[self.side])
        numbers = numbers.astype(int)
        order = np.lexsort((-lengths, begins))
        begins, lengths, numbers = begins[order], lengths[order], numbers[order]
        ends = begins + lengths
        # Nested operators are inside their parent's time; on a device, overlapping streams count once.
        outer = np.maximum.accumulate(ends) if len(ends) else ends
        before = np.concatenate([[-np.inf], outer[:-1]]) if len(ends) else ends
        self.begins, self.numbers, self.lengths = begins, numbers, lengths
        self.busy = np.maximum(ends - np.maximum(begins, before), 0)
        self.top = ends > before

    def phases(self) -> list[tuple[float, float, str]]:
        """Phases in order of time, from ranges, else from kernels that mark a boundary."""
        found = sorted(self.ranges[self.side] or self.ranges["cpu"])
        if found:
            return found
        marks = [
            (number, own, later)
            for (name, _), number in self.names.items()
            for p, own, later in _table("mark")
            if p.search(name)
        ]
        by_number = {number: (own, later) for number, own, later in marks}
        position, phase = None, ""
        for i in np.flatnonzero(np.isin(self.numbers, list(by_number))):
            own, later = by_number[int(self.numbers[i])]
            begin, end = self.begins[i], self.begins[i] + self.lengths[i]
            if position is not None:
                found.append((position, begin, phase))
            found.append((begin, end, own))
            position, phase = end, later
        return found


def read_steps(path: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Steps of a trace, and notes on what could not be told.

    Returns
    -------
    list of dict
        Per step: step_index, step_ms (wall), gap_ms (wall minus busy), and ``phases``: phase -> forward_ms (busy),
        attention_ms, kernels (name, grid, count, ms; the largest ten). The last, unfinished step is left out.

    Raises
    ------
    InputError
        No trace, or no phases of a speculative step in it.
    """
    source = Input(path)
    try:
        content = _Events(source)
    finally:
        source.close()
    phases = content.phases()
    if not phases:
        raise InputError(
            f"{path}: no draft, verify or accept phases in this trace; docs/importing.md lists their names"
        )
    notes = list(source.notes)
    if not content.ranges[content.side] and not content.ranges["cpu"]:
        notes.append("phases are split at marking kernels: draft_extend cannot be told from draft")
    starts = [
        i for i, phase in enumerate(phases) if phase[2] == phases[0][2] and (i == 0 or phases[i - 1][2] != phase[2])
    ]
    steps = [_step(content, n, phases[a:b], phases[b][0]) for n, (a, b) in enumerate(itertools.pairwise(starts))]
    if not steps:
        raise InputError(f"{path}: wanted at least two steps, found one start of {phases[0][2]}")
    return steps, notes


def _step(content: _Events, index: int, phases: list[tuple[float, float, str]], end: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names, attention = list(content.names), [pattern for pattern, *_ in _table("attention")]
    drafted = any(phase.startswith("draft") for *_, phase in phases)
    for begin, until, label in phases:
        phase = "decode" if label == "verify" and not drafted else label
        entry = found.setdefault(phase, {"forward_ms": 0.0, "attention_ms": 0.0, "kernels": {}})
        low, high = np.searchsorted(content.begins, [begin, until])
        entry["forward_ms"] += float(content.busy[low:high].sum()) / 1000
        for i in range(low, high):
            name, grid = names[content.numbers[i]]
            if content.top[i] or content.side == "gpu":
                count, ms = entry["kernels"].get((name, grid), (0, 0.0))
                entry["kernels"][name, grid] = (count + 1, ms + content.lengths[i] / 1000)
    for entry in found.values():
        kernels = [{"name": n, "grid": g or None, "count": c, "ms": ms} for (n, g), (c, ms) in entry["kernels"].items()]
        hits = [kernel["ms"] for kernel in kernels if any(pattern.search(kernel["name"]) for pattern in attention)]
        entry["attention_ms"] = float(sum(hits))
        entry["kernels"] = sorted(kernels, key=lambda kernel: -kernel["ms"])[:10]
    low, high = np.searchsorted(content.begins, [phases[0][0], end])
    wall = (end - phases[0][0]) / 1000
    gap = wall - float(content.busy[low:high].sum()) / 1000
    return {"step_index": index, "step_ms": wall, "gap_ms": gap, "phases": found, "origin": "imported"}
