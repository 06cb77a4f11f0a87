"""What stored rows must satisfy. The sweep asks before it stores a point, `labkit check` asks of files."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from labkit.acceptance import row_counts
from labkit.errors import InputError
from labkit.parquet import read_table
from labkit.provenance import environment_digest
from labkit.results import RUN_ID, file_digest, read_sidecar, run_files
from labkit.schema import IDENTITY, LISTS, ORIGIN_ALIASES, REAL, SAMPLE_KEYS, TEXT, arrow_schema, columns

# Parts of a step may miss its wall time by the reading of the clock, not by more.
PARTS_TOLERANCE, PARTS_TOLERANCE_MS = 0.01, 0.01
PROFILE_TOLERANCE = 0.10  # the parts of a forward are those of another, profiled replay, at another clock
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Finding:
    """One problem. ``row`` counts from 0 and is the first it holds for; None: the whole file."""

    file: str
    row: int | None
    field: str
    problem: str

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row}"
        return f"{self.file}{where}: {self.field}: {self.problem}"


class _Rows:
    """Columns of a table as NumPy arrays; numbers as float64 with NaN for null."""

    def __init__(self, table: pa.Table):
        self.table = table
        self.names = set(table.schema.names)
        status = table["status"].to_pylist() if "status" in self.names else ["ok"] * table.num_rows
        self.ok = np.array([value == "ok" for value in status], dtype=bool)

    def numbers(self, name: str) -> np.ndarray:
        if name not in self.names:
            return np.full(self.table.num_rows, np.nan)
        return pc.cast(self.table[name], REAL, safe=False).to_numpy()  # beyond 2**53 it rounds

    def texts(self, name: str) -> list[str | None]:
        return self.table[name].to_pylist() if name in self.names else [None] * self.table.num_rows


# A rule yields (field, mask of the rows that break it, what is wrong).
_Broken = Iterator[tuple[str, np.ndarray, str]]


def _types(table: pa.Table, experiment: str) -> Iterator[Finding]:
    wanted = arrow_schema(experiment)
    younger = {column.name for column in columns(experiment) if column.nullable} - set(table.schema.names)
    for field in wanted:
        if field.name in younger:  # a run from before the column: null throughout
            continue
        if field.name not in table.schema.names:
            yield Finding("", None, field.name, "column is missing")
        elif table.schema.field(field.name).type != field.type:
            got = table.schema.field(field.name).type
            yield Finding("", None, field.name, f"wanted type {field.type}, got {got}")
    for name in table.schema.names:
        if name not in wanted.names:
            yield Finding("", None, name, f"no column of {experiment}")


def _values(rows: _Rows, experiment: str) -> _Broken:
    """Nulls, enumerations, NaN, infinity, signs."""
    for column in columns(experiment):
        name = column.name
        if name not in rows.names:
            continue
        null = rows.table[name].is_null().to_numpy()
        if name in IDENTITY:
            yield name, null, "is null"
        elif not column.nullable:
            yield name, null & rows.ok, "is null in a row with status ok"
        if column.type == TEXT:
            allowed = {*column.choices, *(ORIGIN_ALIASES if name == "origin" else ())}
            values = rows.texts(name)
            if column.choices:
                wrong = [value is not None and value not in allowed for value in values]
                yield name, np.array(wrong, bool), f"wanted one of {', '.join(column.choices)}"
            yield name, np.array([value == "" for value in values], bool), "is empty; a missing value is null"
        elif column.type not in LISTS:
            numbers = rows.numbers(name)
            yield name, ~null & ~np.isfinite(numbers), "is NaN or infinite; a missing value is null"
            if name != "seed":
                yield name, numbers < 0, "is negative"
                yield name, numbers >= 2**53, "is beyond what is counted or timed"
    reasonless = [value is None for value in rows.texts("reason")]
    yield "reason", ~rows.ok & np.array(reasonless, bool), "is null though the status is not ok"


def _counts(rows: _Rows) -> _Broken:
    """Acceptance counts among one another."""
    drafted, accepted = rows.numbers("num_drafted_tokens"), rows.numbers("num_accepted_tokens")
    yield "num_accepted_tokens", accepted > drafted, "is above num_drafted_tokens"
    steps, drafted_steps = rows.numbers("num_verify_steps"), rows.numbers("num_drafted_steps")
    yield "num_drafted_steps", drafted_steps > steps, "is above num_verify_steps"
    most = rows.numbers("num_speculative_tokens")
    if "num_verify_steps" in rows.names:
        passes = steps + rows.numbers("num_truncated_steps")
        chain = np.isnan(rows.numbers("num_draft_nodes"))
        yield ("num_drafted_tokens", chain & (drafted > most * passes), "is above num_speculative_tokens x steps")
    elif "arm" in rows.names:
        batch = rows.numbers("batch_size")
        yield "num_drafted_tokens", drafted > most * batch, "is above num_speculative_tokens x batch_size"
        nodes = rows.numbers("num_draft_nodes")
        yield "num_draft_nodes", np.abs(rows.numbers("q_len") - nodes - 1) > 0, "is not q_len - 1"
    if "num_output_tokens" in rows.names:  # emitted by the steps, at most one by the prefill, the rest by cut steps
        extra = rows.numbers("num_output_tokens") - steps - accepted
        off = (extra < 0) | (extra > 1 + rows.numbers("num_truncated_steps") * (most + 1))
        yield "num_output_tokens", off, "does not fit num_verify_steps + num_accepted_tokens"
    low, high = rows.numbers("context_len_low"), rows.numbers("context_len_high")
    yield "context_len_high", high <= low, "is not above context_len_low"
    yield ("context_len_max", rows.numbers("context_len_max") < rows.numbers("context_len"), "is below the mean")


def _histograms(rows: _Rows) -> _Broken:
    """The joint histogram against the totals; equal where no step was truncated, else not above them."""
    name = "accepted_by_draft_length"
    if name not in rows.names:
        return
    k, truncated = rows.numbers("num_speculative_tokens"), rows.numbers("num_truncated_steps")
    fields = ("num_verify_steps", "num_drafted_steps", "num_drafted_tokens", "num_accepted_tokens")
    stored = {field: rows.numbers(field) for field in fields}
    for index, histogram in enumerate(rows.table[name].to_pylist()):
        if histogram is None:
            continue
        here = np.arange(len(k)) == index
        try:
            totals = row_counts({name: histogram, "num_speculative_tokens": k[index]}).columns()
        except (TypeError, ValueError) as error:  # TypeError: a null among the counts
            yield name, here, str(error)
            continue
        for field in fields:
            exact = truncated[index] == 0 or field == "num_verify_steps"
            if totals[field] > stored[field][index] or (exact and totals[field] != stored[field][index]):
                yield field, here, f"does not fit {name}, which gives {totals[field]}"


def _times(rows: _Rows) -> _Broken:
    """Parts against the whole, bytes against time: what a unit off by 1,000 breaks."""
    step = rows.numbers("step_ms")
    parts = sum(rows.numbers(name) for name in ("draft_ms", "verify_ms", "accept_ms", "gap_ms"))
    off = np.abs(parts - step) > PARTS_TOLERANCE * step + PARTS_TOLERANCE_MS
    yield "step_ms", off, "differs from draft_ms + verify_ms + accept_ms + gap_ms"
    inside = sum(np.nan_to_num(rows.numbers(name)) for name in ("attention_ms", "linear_ms", "other_ms"))
    forward = rows.numbers("forward_ms")
    too_much = inside > forward * (1 + PROFILE_TOLERANCE) + PARTS_TOLERANCE_MS
    yield "forward_ms", too_much, "is below attention_ms + linear_ms + other_ms"
    moved = rows.numbers("gb_per_s") * rows.numbers("attention_ms") * 1e6
    kv_bytes = rows.numbers("kv_bytes_read")
    item = np.array([_DTYPE_BYTES.get(name or "", 1) for name in rows.texts("q_dtype")])
    size = rows.numbers("batch_size") * rows.numbers("q_len") * rows.numbers("num_qo_heads") * rows.numbers("head_dim")
    off = (moved < 0.95 * kv_bytes) | (moved > 1.05 * (kv_bytes + 3 * size * item))
    yield "gb_per_s", off, "is not the unique bytes over attention_ms"


# Axes that are stored as they are given; others become something else (``as q``, a context that grows).
_KEY_AXES = ("arm", "backend", "verify_backend", "decode_backend", "drafter", "target", "batch_size", "prompt_id")


def _point_keys(rows: _Rows) -> _Broken:
    """Columns against the point key, and one version of each backend: a run is one environment."""
    keys = rows.texts("point_key")
    wanted = {key: _axes_of_key(key) for key in set(keys) if key}
    for name in _KEY_AXES:
        if name in rows.names:
            values = rows.table[name].to_pylist()
            pairs = zip(keys, values, strict=True)
            off = [value is not None and wanted.get(str(key), {}).get(name, value) != value for key, value in pairs]
            yield name, rows.ok & np.array(off, bool), "is not what the point_key says"
    versions: dict[str | None, str] = {}
    both = zip(rows.texts("backend"), rows.texts("backend_digest"), strict=True)
    mixed = [bool(digest) and versions.setdefault(name, str(digest)) != digest for name, digest in both]
    yield (
        "backend_digest",
        rows.ok & np.array(mixed, bool),
        "is not that of the backend's other rows: mixed environments",
    )


def _axes_of_key(key: str) -> dict[str, object]:
    """The axes of a point key (`labkit.plan.point_key`); those that it cannot tell are left out."""
    decoder, axes, place = json.JSONDecoder(), dict[str, object](), 0
    try:
        while place < len(key) and key[place] != "@":
            name, separator, _ = key[place:].partition("=")
            axes[name], place = decoder.raw_decode(key, place + len(name) + len(separator))
            place += key[place : place + 1] == ","
    except (ValueError, RecursionError):  # no key of ours: there is nothing to compare with
        return {}
    return axes


def check_table(table: pa.Table, experiment: str) -> list[Finding]:
    """Problems of rows in memory (``file`` is empty).

    table : rows in the experiment's schema, or what claims to be.
    """
    findings = list(_types(table, experiment))
    typed = {f.name for f in arrow_schema(experiment)} - {finding.field for finding in findings}
    rows = _Rows(table.select([name for name in table.schema.names if name in typed]))
    rules = [_values(rows, experiment), _counts(rows), _histograms(rows), _times(rows), _point_keys(rows)]
    if typed.issuperset(keys := SAMPLE_KEYS[experiment]):
        keys = tuple(name for name in keys if name in rows.names)  # the run may be older than the column
        rules.append(iter([("sample", table.select(keys).to_pandas().duplicated().to_numpy(), "stored twice")]))
    with np.errstate(invalid="ignore"):
        for rule in rules:
            for field, broken, problem in rule:
                (where,) = np.nonzero(broken)
                if len(where):
                    more = f" (and {len(where) - 1} more rows)" if len(where) > 1 else ""
                    findings.append(Finding("", int(where[0]), field, problem + more))
    return findings


def _against_sidecar(path: Path, table: pa.Table, sidecar: dict[str, Any]) -> Iterator[tuple[int | None, str, str]]:
    if file_digest(path) != sidecar["sha256"]:
        yield None, "sha256", "the file is not the one the sidecar was written for"
    if sidecar.get("num_rows") != table.num_rows:
        yield (None, "num_rows", f"the file has {table.num_rows} rows, the sidecar says {sidecar.get('num_rows')}")
    if sidecar["run_id"] != path.stem:
        yield None, "run_id", f"the sidecar says {sidecar['run_id']}, the file name {path.stem}"
    for name in ("run_id", "experiment", "gpu"):
        values = table[name].to_pylist() if name in table.schema.names else []
        other = [row for row, value in enumerate(values) if value != sidecar[name]]
        if other:
            yield other[0], name, f"is {values[other[0]]!r}, the sidecar says {sidecar[name]!r}"
    yield from ((None, field, problem) for field, problem in _sidecar_itself(sidecar, table))
    if path.parent.name != sidecar["gpu"] or path.parent.parent.name != sidecar["experiment"]:
        yield None, "gpu", f"wanted the folder {sidecar['experiment']}/{sidecar['gpu']}"


def _sidecar_itself(sidecar: dict[str, Any], table: pa.Table) -> Iterator[tuple[str, str]]:
    """What the sidecar says of the environment and of its points, against itself and the rows."""
    provenance, written = sidecar.get("provenance"), sidecar.get("environment_digest")
    if written is not None:
        try:
            wanted = environment_digest(provenance, sidecar.get("code_digest", ""))  # type: ignore[arg-type]
        except (TypeError, KeyError, AttributeError):
            wanted = "nothing that can be digested"
        if wanted != written:
            yield "environment_digest", f"is {written}, the provenance gives {wanted}: mixed environments"
    if {"point_key", "status"} <= set(table.schema.names) and isinstance(sidecar.get("counts"), dict):
        pairs = set(zip(table["point_key"].to_pylist(), table["status"].to_pylist(), strict=True))
        if (got := dict(Counter(str(status) for _, status in pairs))) != sidecar["counts"]:
            yield "counts", f"the rows have {got}, the sidecar says {sidecar['counts']}"


def _check_file(path: Path) -> Iterator[Finding]:
    name = str(path)
    if not RUN_ID.fullmatch(path.stem):
        yield Finding(name, None, "run_id", "wanted a file named <utc yyyymmddThhmmssZ>-<6 hex>.parquet")
    try:
        sidecar = read_sidecar(path)
        table = read_table(path)
        columns(sidecar["experiment"])
    except InputError as error:
        yield Finding(name, None, "file", str(error))
        return
    for row, field, problem in _against_sidecar(path, table, sidecar):
        yield Finding(name, row, field, problem)
    for finding in check_table(table, sidecar["experiment"]):
        yield Finding(name, finding.row, finding.field, finding.problem)


def check_run(path: str | Path) -> list[Finding]:
    """Everything wrong with a stored run, or with all runs and journals below a folder; empty when all is well.

    Raises InputError: no such path, or nothing to check there. Broken runs do not raise, they are found.
    """
    from labkit.journal import check_journal

    files = run_files(Path(path))
    journals = [file.with_suffix(".jsonl") for file in files] if Path(path).is_file() else Path(path).rglob("*.jsonl")
    journals = sorted(journal for journal in journals if RUN_ID.fullmatch(journal.stem) and journal.is_file())
    if not files and not journals:
        raise InputError(f"{path}: no runs to check; wanted <run_id>.parquet files")
    findings = [finding for file in files for finding in _check_file(file)]
    for journal in journals:
        try:
            check_journal(journal)
        except InputError as error:
            findings.append(Finding(str(journal), None, "journal", str(error)))
    return findings
