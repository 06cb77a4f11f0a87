"""Steps of a torch-profiler trace: draft, draft_extend, verify, accept and gap, attention apart, kernels with grids.

Phases come from named ranges (vLLM prints them), else from kernels that mark a boundary (building the tree, accepting);
``data/reference/engine_trace.csv`` names both. Read event by event; kept are the times and a number per kernel name.
"""

import contextlib
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engines.reading import Input
from labkit.engines.tables import read_table
from labkit.errors import InputError

MAX_EVENT_CHARACTERS, MAX_HEADER_CHARACTERS, MAX_EVENTS = 1 << 20, 64 << 20, 20_000_000
_MAX_US = 1e18  # 30,000 years; NaN and infinity are no times
_DECODER, _BETWEEN = json.JSONDecoder(), " \t\r\n,"
_DEVICE, _RANGES = ("kernel", "gpu_memcpy", "gpu_memset"), {"user_annotation": "cpu", "gpu_user_annotation": "gpu"}
_KINDS = (*_DEVICE, *_RANGES, "cpu_op")
_ENGINES = ("sglang", "vllm")
Phase = tuple[float, float, str]


def is_trace(path: str | Path) -> bool:
    """Whether a file starts like a Chrome trace; standard input is not looked at."""
    if not Path(path).is_file():
        return False
    source = Input(path)
    try:
        return source.start().lstrip()[:1] == b"{" and b'"traceEvents"' in source.start()
    except InputError:
        return False
    finally:
        source.close()


def events(source: Input) -> Iterator[dict[str, Any]]:
    """The events of a trace, one at a time; a file that is cut off ends them.

    Raises InputError: no list of events, or an event larger than any.
    """
    text = ""
    while not (start := re.search(r'"traceEvents"\s*:\s*\[', text)):
        chunk = source.read(1 << 20)
        if not chunk or len(text) > MAX_HEADER_CHARACTERS:
            raise InputError(f"{source.name}: wanted a torch-profiler trace, found no traceEvents")
        text += chunk.decode("utf-8", "replace")
    text = text[start.end() :]
    while True:
        found, text = _whole(text)
        yield from (event for event in found if isinstance(event, dict))
        if text.startswith("]"):
            return
        if len(text) > MAX_EVENT_CHARACTERS:
            raise InputError(f"{source.name}: an event of more than 1 MiB; wanted a torch-profiler trace")
        if not (chunk := source.read(1 << 18)):
            source.notes.append("the trace is cut off; the steps before that were read")
            return
        text += chunk.decode("utf-8", "replace")


def _whole(text: str) -> tuple[list[Any], str]:
    """The whole events at the start of a text, and what follows them."""
    found, text = list[Any](), text.lstrip(_BETWEEN)
    if cut := text.rfind("},\n") + 1:  # as torch writes them an event ends with its line: all of them at once
        with contextlib.suppress(ValueError, RecursionError):  # that was inside of an event: one after the other
            found, text = json.loads(f"[{text[:cut]}]"), text[cut:].lstrip(_BETWEEN)
    position = 0
    while position < len(text):
        try:
            event, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        found.append(event)
        position += len(text[position : position + 64]) - len(text[position : position + 64].lstrip(_BETWEEN))
    return found, text[position:]


def _table(what: str) -> list[tuple[re.Pattern[str], str, str]]:
    rows = [row for row in read_table("engine_trace.csv") if row["what"] == what]
    return [(re.compile(row["pattern"]), row["phase"], row["next_phase"]) for row in rows]


class _Events:
    """Times in us of device kernels, or of CPU operators where there are none, in order; ranges of phases."""

    def __init__(self, source: Input):
        names: dict[tuple[str, str], int] = {}
        times: dict[str, list[Any]] = {side: [array("d"), array("d"), array("i")] for side in ("gpu", "cpu")}
        ranges: dict[str, list[Phase]] = {"gpu": [], "cpu": []}
        patterns = _table("range")
        for event in events(source):
            kind = event.get("cat")
            if event.get("ph") != "X" or kind not in _KINDS:
                continue
            begin, length, name = event.get("ts", 0), event.get("dur", 0), event.get("name", 0)
            usable = isinstance(begin, int | float) and isinstance(length, int | float) and isinstance(name, str)
            if not usable or not (abs(begin) < _MAX_US and 0 <= length < _MAX_US):
                continue
            if kind in _RANGES:
                found = [(pattern.search(name), phase) for pattern, phase, _ in patterns]
                ranges[_RANGES[kind]] += [(begin, begin + length, m[1] if p == "*" else p) for m, p in found if m]
            else:
                grid = str((event.get("args") or {}).get("grid", "")) if isinstance(event.get("args"), dict) else ""
                row = (begin, length, names.setdefault((name[:200], grid[:40]), len(names)))
                for values, value in zip(times["gpu" if kind in _DEVICE else "cpu"], row, strict=True):
                    values.append(value)
                if len(times["gpu"][0]) + len(times["cpu"][0]) > MAX_EVENTS:
                    raise InputError(f"{source.name}: more than {MAX_EVENTS} kernels; record fewer steps")
        self.side = "gpu" if times["gpu"][0] else "cpu"
        self.names, self.ranges = list(names), sorted(ranges[self.side] or ranges["cpu"])
        kept = times.pop(self.side)  # each is given up as it is put in order: millions of kernels
        order = np.lexsort((-np.asarray(kept[1]), np.asarray(kept[0])))
        self.begins, self.lengths, self.numbers = (np.asarray(kept.pop(0))[order] for _ in range(3))
        ends = self.begins + self.lengths
        before = np.full_like(ends, -np.inf)
        np.maximum.accumulate(ends[:-1], out=before[1:])
        self.shown = (ends > before) | (self.side == "gpu")
        # Operators inside others are in their time already; overlapping streams of a device count once.
        ends -= np.maximum(self.begins, before, out=before)
        self.busy = np.maximum(ends, 0, out=ends)

    def phases(self) -> list[Phase]:
        """Phases in order of time, from ranges, else from kernels that mark a boundary."""
        if self.ranges:
            return self.ranges
        marks = {i: mark for i, (name, _) in enumerate(self.names) for mark in _table("mark") if mark[0].search(name)}
        found, position, phase = list[Phase](), np.nan, ""
        for i in np.flatnonzero(np.isin(self.numbers, list(marks))):
            _, own, later = marks[int(self.numbers[i])]
            begin, end = float(self.begins[i]), float(self.begins[i] + self.lengths[i])
            found += [(position, begin, phase), (begin, end, own)] if phase else [(begin, end, own)]
            position, phase = end, later
        return found


def read_steps(path: str | Path) -> tuple[Iterator[dict[str, Any]], list[str]]:
    """Rows of a trace, one per step and phase, and notes on what could not be told.

    Each row: step_index, phase, forward_ms (busy), attention_ms, other_ms, kernels (name, grid, count, ms; the largest
    ten), and of the whole step: step_ms (wall), gap_ms (wall minus busy). The last, unfinished step is left out.

    Raises InputError: no trace, no phases, or fewer than two steps in it.
    """
    source = Input(path)
    try:
        content = _Events(source)
    finally:
        source.close()
    phases, notes = content.phases(), list(source.notes)
    if not content.ranges:
        notes.append("phases are split at marking kernels: draft_extend cannot be told from draft")
    labels = [phase[2] for phase in phases]  # a trace opens anywhere in a step
    first = [i for i, label in enumerate(labels) if label == labels[0] and (i == 0 or labels[i - 1] != label)]
    if not content.ranges and any(pair == (labels[0],) * 2 for pair in itertools.pairwise(labels[1:])):
        first = first[1:]  # only the mark at the end of the first phase is there: it began before the trace
    if len(first) < 2:
        raise InputError(f"{path}: wanted two steps with draft, verify or accept phases (names: docs/importing.md)")
    steps = (_step(content, n, phases[a:b], phases[b][0]) for n, (a, b) in enumerate(itertools.pairwise(first)))
    return itertools.chain.from_iterable(steps), notes


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of a trace: num_steps, step_ms, gap_ms, and by phase forward_ms, attention_ms, kernels.

    kernels: the largest five with ms per step; engine and, by phase, backend: what the names of kernels tell.
    """
    known = [row for row in read_table("engine_trace.csv") if row["what"] != "range"]
    found: dict[str, Any] = {"engine": "", "phases": {}}
    for phase in dict.fromkeys(row["phase"] for row in rows):
        own, total = [row for row in rows if row["phase"] == phase], Counter[tuple[str, str | None]]()
        for kernel in itertools.chain.from_iterable(row["kernels"] for row in own):
            total[kernel["name"], kernel["grid"]] += kernel["ms"] / len(own)
        names, entry = ("forward_ms", "attention_ms"), dict[str, Any]()
        entry |= {name: float(np.median([row[name] for row in own])) for name in names}
        entry["kernels"] = [{"name": n, "grid": grid, "ms": ms} for (n, grid), ms in total.most_common(5)]
        matches = [row for name, _ in total for row in known if re.search(row["pattern"], name)]
        found["engine"] = found["engine"] or next((row["engine"] for row in matches if row["engine"] in _ENGINES), "")
        backends = {row["phase"] for row in matches if row["what"] == "attention"}
        found["phases"][phase] = entry | {"backend": backends.pop() or None if len(backends) == 1 else None}
    steps = list({row["step_index"]: row for row in rows}.values())
    medians = {name: float(np.median([step[name] for step in steps])) for name in ("step_ms", "gap_ms")}
    return found | medians | {"num_steps": len(steps)}


def _step(content: _Events, index: int, phases: list[Phase], end: float) -> Iterator[dict[str, Any]]:
    drafted, attention = any(phase[2].startswith("draft") for phase in phases), [row[0] for row in _table("attention")]
    low, high = np.searchsorted(content.begins, [phases[0][0], end])
    wall = (end - phases[0][0]) / 1000
    whole = {"step_ms": wall, "gap_ms": wall - float(content.busy[low:high].sum()) / 1000, "origin": "imported"}
    for label in dict.fromkeys(phase[2] for phase in phases):
        pieces = [np.searchsorted(content.begins, phase[:2]) for phase in phases if phase[2] == label]
        rows = np.concatenate([np.arange(*piece) for piece in pieces])
        busy, kernels, in_attention = float(content.busy[rows].sum()) / 1000, [], 0.0
        for number in np.unique(content.numbers[rows]):
            name, grid = content.names[number]
            same = rows[content.numbers[rows] == number]
            ms = float(content.lengths[same[content.shown[same]]].sum()) / 1000
            kernels.append({"name": name, "grid": grid or None, "count": len(same), "ms": ms})
            in_attention += ms if any(pattern.search(name) for pattern in attention) else 0.0
        kernels = sorted(kernels, key=lambda kernel: -kernel["ms"])[:10]
        row = {"step_index": index, "phase": "decode" if label == "verify" and not drafted else label}
        row |= {"forward_ms": busy, "attention_ms": in_attention, "other_ms": busy - in_attention}
        yield row | whole | {"kernels": kernels}
