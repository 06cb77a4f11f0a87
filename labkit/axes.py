"""Axes of a grid as users write them: ``context_len=512,4k``, ``k=0..7``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from labkit.errors import InputError

ALIASES = {"k": "num_speculative_tokens"}
MAX_VALUES = 10_000  # of one range
MOST_LISTED = 12  # values in a message
_SIZE = re.compile(r"(\d{1,15})([kKmM]?)", re.ASCII)
_RANGE = re.compile(r"(\d{1,15})\.\.(\d{1,15})", re.ASCII)


def parse_size(text: str) -> int:
    """``4096``, ``4k`` (1,024 each) or ``1m`` as a number. Raises InputError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InputError(f"wanted a whole number such as 4096 or 4k, got {text!r}")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def parse_axes(assignments: Sequence[str], defaults: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """``axis=v,..`` assignments as lists, typed like the axis's defaults (whole numbers, decimals or names).

    Raises InputError: not of the form ``axis=v,...``, an unknown axis (the known ones are listed), or a value of the
    wrong kind.
    """
    axes: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, separator, values = assignment.partition("=")
        name = ALIASES.get(name.strip(), name.strip())
        if not separator or not values.strip():
            raise InputError(f"--set {assignment!r}: wanted axis=value,...")
        if name not in defaults:
            raise InputError(f"--set {name}: no such axis; the axes are {', '.join(sorted(defaults))}")
        if name in axes:
            raise InputError(f"--set {name}: given twice")
        axes[name] = [value for part in values.split(",") for value in _values(name, part.strip(), defaults[name])]
    return axes


def _values(name: str, text: str, default: Sequence[Any]) -> list[Any]:
    kind = type(default[0])
    try:
        if kind is not int:
            return [kind(text)]
        if match := _RANGE.fullmatch(text):
            first, last = int(match[1]), int(match[2])
            if last < first:
                raise InputError(f"range {text!r} runs backwards")
            if last - first >= MAX_VALUES:
                raise InputError(f"range {text!r}: wanted at most {MAX_VALUES} values, got {last - first + 1}")
            return list(range(first, last + 1))
        return [parse_size(text)]
    except ValueError as error:
        raise InputError(f"--set {name}={text}: {error}") from None


def with_sizes(texts: Sequence[str]) -> set[str]:
    """The texts, and those that are sizes (``4k``) also as plain numbers."""
    return {*texts, *(str(parse_size(text)) for text in texts if _SIZE.fullmatch(text))}


def keep_where(table: pd.DataFrame, conditions: Sequence[str], *, strict: bool = True) -> pd.DataFrame:
    """The rows that hold one of the values of every ``column=v,..``; numbers may be written as sizes (``4k``).

    Raises InputError: not of that form; and unless ``strict`` is off, no such column, or no row is left.
    """
    for condition in conditions:
        name, separator, values = condition.partition("=")
        name, wanted = ALIASES.get(name, name), with_sizes(values.split(","))
        if not separator or not values:
            raise InputError(f"--where {condition!r}: wanted column=value,...")
        if name not in table and not strict:
            continue
        if name not in table:
            raise InputError(f"--where {condition}: no such column; want one of {', '.join(map(str, table))}")
        texts = table[name].map(lambda value: str(int(value)) if _is_whole(value) else str(value))
        if strict and not texts.isin(wanted).any():
            known = some_values(table[name])
            raise InputError(f"--where {condition}: no cell is left; {name} is {known or 'unknown'}")
        table = table[texts.isin(wanted)]
    return table


def some_values(values: pd.Series) -> str:
    """Up to ``MOST_LISTED`` of the distinct values in order, and how many there are; missing ones are left out."""
    known = sorted(values.dropna().unique().tolist(), key=lambda value: (isinstance(value, str), value))
    texts = [str(int(value)) if _is_whole(value) else str(value) for value in known]
    more = [f"... ({len(texts)} in all)"] if len(texts) > MOST_LISTED else []
    return ", ".join([*texts[:MOST_LISTED], *more])


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
