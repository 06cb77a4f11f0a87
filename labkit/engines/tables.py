"""The formats of ``data/reference/engine_formats.csv`` and ``engine_fields.csv``, and reading a source by them.

A format is a kind of line, block, JSON object or metrics page; its fields say which printed label becomes which field
of `Record`, and the factor to labkit's unit. A name that a record does not have goes to its ``details``.
"""

import csv
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from labkit.engines.record import COUNTS, Record
from labkit.paths import REFERENCE

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
_RECORD_FIELDS = {item.name for item in fields(Record)}
_KINDS = {"cuda_graph": "flag", "acceptance_rate_per_pos": "rates"}
_KINDS |= dict.fromkeys(("model", "engine_version", "time"), "text")
_MAX_NODES = 200_000


@dataclass(frozen=True)
class Format:
    """One row of the table of formats. ``fields``: label -> (name in labkit, factor to its unit, kind of value)."""

    engine: str
    kind: str
    read: str
    scope: str
    has: str  # text that every such line holds: looked for before the mark, which is a pattern
    mark: str
    needs: str  # keys of a JSON object, or the figure of a block, split by |
    zero_draft_steps: str
    then: str  # name of the function in the engine's module that does what a table cannot
    definition: str
    fields: Mapping[str, tuple[str, float, str]]
    pattern: re.Pattern[str]

    def record(self, values: Mapping[str, Any], place: str = "") -> Record:
        """A record of the values that the table knows."""
        record = Record(self.engine, self.kind, self.scope, self.definition, place)
        record.zero_draft_steps = self.zero_draft_steps
        details, fields = record.details, self.fields
        for label, value in values.items():
            if value is None or label not in fields:
                continue
            name, factor, kind = fields[label]
            if kind == "flag":
                record.cuda_graph = str(value).strip().lower() == "true"
            elif kind == "rates":
                record.acceptance_rate_per_pos = [x * factor for x in numbers(value)] or None
            elif kind == "text":
                setattr(record, name, str(value)[:200])
            elif (found := number(value)) is not None:
                found = found if factor == 1 else round(found * factor, 12)
                if name in _RECORD_FIELDS or found < 0:
                    store(record, name, found)
                else:
                    details[name] = found
        return record


@functools.cache
def formats(*reads: str) -> tuple[Format, ...]:
    """The formats that are read in one of these ways (json, labels, regex, block, metrics, server), in table order."""
    labels: dict[tuple[str, str], dict[str, tuple[str, float, str]]] = {}
    for row in read_table("engine_fields.csv"):
        names = labels.setdefault((row["engine"], row["kind"]), {})
        names[row["label"]] = (row["field"], float(row["factor"]), _KINDS.get(row["field"], "number"))
    found = []
    for row in read_table("engine_formats.csv"):
        if row["read"] in reads:
            kept = {name: text for name, text in row.items() if name != "source"}
            names = labels.get((row["engine"], row["kind"]), {})
            found.append(Format(**kept, fields=names, pattern=re.compile(row["mark"])))
    return tuple(found)


@functools.cache
def read_table(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a table of ``data/reference``."""
    with (REFERENCE / name).open(newline="") as file:
        return tuple(csv.DictReader(file))


def number(value: Any) -> float | None:
    """The number of a JSON value or at the start of a text; None for none, NaN or one beyond any figure."""
    if isinstance(value, str):
        try:
            value = float(value)  # most are plain numbers
        except ValueError:
            match = _NUMBER.match(value.strip())
            value = float(match[0].replace(",", "").rstrip(".")) if match else None
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # No figure is larger or smaller; NaN is neither.
    return float(value) if value is not None and (1e-12 < abs(value) < 1e15 or value == 0) else None


def numbers(value: Any) -> list[float]:
    """All numbers of a list or of a text."""
    values = re.findall(r"\d+\.?\d*", value) if isinstance(value, str) else value if isinstance(value, list) else []
    return [item for item in map(number, values) if item is not None]


def pairs(text: str) -> dict[str, str]:
    """``label: value`` or ``label = value`` pairs of a line, with ``, `` between; a value may be a list of numbers."""
    found, last = dict[str, str](), ""
    for part in text.rstrip(" ,").split(", "):
        label, mark, value = part.partition(": ")
        if not mark:
            label, mark, value = part.partition(" = ")
        if mark:
            last = label.strip(" .|")
            found[last] = value
        elif last:
            found[last] += ", " + part
    return found


def store(record: Record, name: str, value: float) -> None:
    """One number into the field of that name, a whole one into a count, any other into the details; none below 0."""
    if value < 0:
        record.warn(f"{name} of {value:g} is below 0: not used")
    elif name in _RECORD_FIELDS:
        record.step_ms_source = "printed" if name == "step_ms" else record.step_ms_source
        setattr(record, name, round(value) if name in (*COUNTS, "num_speculative_tokens") else value)
    else:
        record.details[name] = value


def at(node: Any, path: str) -> Any:
    """The value at a dotted path of nested objects, None where there is none."""
    if isinstance(node, dict) and path in node:
        return node[path]
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def objects(content: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a JSON value, outer ones first, without recursion."""
    waiting, seen = [content], 0
    while waiting and seen < _MAX_NODES:
        node, seen = waiting.pop(), seen + 1
        if isinstance(node, dict):
            yield node
        if isinstance(node, dict | list):
            inner = list(node.values()) if isinstance(node, dict) else node
            waiting.extend(value for value in reversed(inner) if isinstance(value, dict | list))


@functools.cache
def _json_keys() -> tuple[tuple[Format, list[tuple[str, str]]], ...]:
    """The formats of JSON objects, and the paths that each needs with the first key of each."""
    needs = [(item, item.needs.split("|")) for item in formats("json")]
    return tuple((item, [(path, path.partition(".")[0]) for path in paths]) for item, paths in needs)


@functools.cache
def json_marks() -> tuple[str, ...]:
    """Keys, one of which JSON text holds where it holds an object of a known format or a server's arguments."""
    marks = {keys[0][0].rpartition(".")[2] for _, keys in _json_keys()} | {"attention_backend", "vllm_config"}
    return tuple(f'"{mark}"' for mark in sorted(marks))


def match_json(node: Mapping[str, Any]) -> tuple[Format, Record] | None:
    """The record of an object of a known format: one that has all keys which the format needs."""
    for item, keys in _json_keys():
        for path, first in keys:
            if (first not in node and path not in node) or at(node, path) is None:
                break
        else:
            return item, item.record({path: at(node, path) for path in item.fields})
    return None


def from_histogram(record: Record, histogram: list[float]) -> None:
    """Counts from steps by accepted drafts (index = accepted): S1 or S, A, rates per position."""
    steps, accepted = sum(histogram), sum(i * count for i, count in enumerate(histogram))
    store(record, "num_drafted_steps" if record.zero_draft_steps == "excluded" else "num_verify_steps", steps)
    record.num_accepted_tokens = round(accepted)
    if steps:
        record.acceptance_rate_per_pos = [sum(histogram[i:]) / steps for i in range(1, len(histogram))]
