"""The columns of stored rows, from ``data/reference/columns.csv``: `data/README.md` and `labkit check` follow them.

Rows are long form, one per sample. A missing value is null, never 0, "" or NaN. Counts are stored, ratios are not.
"""

import csv
import functools
from dataclasses import dataclass

import pyarrow as pa

from labkit.errors import InputError
from labkit.paths import REFERENCE

SCHEMA_VERSION = 1

FINAL_STATUSES = ("ok", "unsupported", "oom", "wrong")  # measuring such a point again would tell nothing new
ORIGIN_ALIASES = {"synthetic": "forced", "simulated": "forced"}

TEXT, COUNT, REAL = pa.string(), pa.int64(), pa.float64()
SERIES, HISTOGRAM, LIST = pa.list_(REAL), pa.list_(pa.list_(COUNT)), pa.list_(COUNT)
LISTS = (SERIES, HISTOGRAM, LIST)
_TYPES = {"text": TEXT, "count": COUNT, "real": REAL, "series": SERIES, "histogram": HISTOGRAM, "list": LIST}


@dataclass(frozen=True)
class Column:
    """One column. ``nullable=False``: set in every row with status ok (a failed row has no results)."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool
    choices: tuple[str, ...]


# Set in every row, failed or not.
IDENTITY = ("run_id", "experiment", "origin", "status", "gpu", "point_key", "group")

# Two ok rows of one run must differ in one of these; else a sample was stored twice.
SAMPLE_KEYS: dict[str, tuple[str, ...]] = {
    "attention": ("point_key", "group", "backend", "variant", "phase", "q_len", "context_len", "round", "sample"),
    "step": (
        *("point_key", "group", "phase", "drafter", "backend", "q_len", "batch_size", "context_len"),
        *("round", "sample"),
    ),
    "acceptance": (
        *("point_key", "group", "workload", "prompt_id", "num_speculative_tokens", "context_len_low", "sample"),
    ),
    "loop": (
        *("point_key", "group", "arm", "decode_backend", "verify_backend", "drafter", "num_drafted_tokens"),
        *("prompt_id", "step_index", "round", "sample"),
    ),
    "replay": ("point_key", "group", "record", "round", "sample"),
}


def _read_columns() -> dict[str, tuple[Column, ...]]:
    """The columns of every row and of each experiment beside, in the order in which they are stored."""
    found: dict[str, list[Column]] = {}
    with (REFERENCE / "columns.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            what = (row["name"], _TYPES[row["type"]], row["unit"], row["meaning"])
            column = Column(*what, nullable=row["nullable"] == "yes", choices=tuple(row["choices"].split()))
            found.setdefault(row["experiment"], []).append(column)
    return {name: tuple(own) for name, own in found.items()}


_OWN = _read_columns()
COMMON = _OWN.pop("every")
EXPERIMENTS = {name: COMMON + own for name, own in _OWN.items()}
_CHOICES = {column.name: column.choices for column in COMMON}
STATUSES, ORIGINS = _CHOICES["status"], _CHOICES["origin"]


def columns(experiment: str) -> tuple[Column, ...]:
    """The columns of an experiment. Raises InputError: unknown experiment."""
    if experiment not in EXPERIMENTS:
        raise InputError(f"experiment: wanted one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    return EXPERIMENTS[experiment]


@functools.cache
def arrow_schema(experiment: str) -> pa.Schema:
    """The Arrow schema of an experiment; only the identity columns are declared not null."""
    return pa.schema([pa.field(c.name, c.type, c.name not in IDENTITY) for c in columns(experiment)])


def dictionary() -> str:
    """The data dictionary as Markdown: one table for the common columns, one per experiment."""
    lines = []
    for title, table in ({"Every row": COMMON} | _OWN).items():
        lines += [f"### {title}", "", "| column | type | unit | null | meaning |", "|---|---|---|---|---|"]
        for c in table:
            meaning = c.meaning + (f" ({', '.join(c.choices)})" if c.choices else "")
            null = "yes" if c.nullable else ("never" if c.name in IDENTITY else "if not ok")
            lines.append(f"| `{c.name}` | {c.type} | {c.unit} | {null} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(dictionary())
