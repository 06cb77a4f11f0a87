"""The journal of a run: one JSON line per measured point, on disk before the next point starts.

Line 1 is the header (schema version, run, digests, provenance), then a line per session and per attempt at a
point. A later attempt replaces an earlier one. `compact` turns it all into the run's Parquet file and
sidecar.
"""

import fcntl
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from labkit.errors import InputError
from labkit.paths import sync_folder
from labkit.provenance import digest, plain, utc_now
from labkit.results import build_table, file_digest, read_sidecar, write_run
from labkit.schema import FINAL_STATUSES, SCHEMA_VERSION, columns

# Columns that a sweep fills in; neither a point nor what was measured may name them.
RESERVED = ("run_id", "experiment", "status", "reason", "gpu", "point_key")
_POINTS_PER_ROW_GROUP = 5000
MAX_LINE_BYTES = 16 << 20  # far above any point; a longer line would have to be held in memory to be judged
# What a line of each kind must have to be read.
_FIELDS: dict[str, dict[str, Any]] = {
    "header": {"run_id": str},
    "session": {"started": str},
    "point": {"point_key": str, "point": dict, "status": str, "seconds": (int, float)},
}


@dataclass(frozen=True)
class Attempt:
    """The last attempt at a point: how it ended, how long it took, where its line starts."""

    status: str
    seconds: float
    point: dict[str, Any]
    offset: int


def _line(record: dict[str, Any]) -> bytes:
    # NaN is no JSON, and no value either: a missing value is null.
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=plain)
    return text.encode() + b"\n"


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())  # of bytes, json guesses the encoding
        wanted = _FIELDS[record["kind"]]
        if all(isinstance(record[name], kind) for name, kind in wanted.items()):
            return record
        problem = f"kind {record['kind']!r} with another type of {', '.join(wanted)}"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise _corrupt(path, number, problem)


def _corrupt(path: Path, number: int, problem: str) -> InputError:
    wanted = "wanted a JSON line of a journal (--no-resume starts a new run)"
    return InputError(f"{path}, line {number}: {wanted}, got {problem}")


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number from 1 and bytes of each line; a torn last line is left out. Raises InputError: a line is too long."""
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise _corrupt(path, number, f"more than {MAX_LINE_BYTES >> 20} MiB")
                return
            yield number, line


def read_header(path: Path) -> dict[str, Any] | None:
    """The header of a journal, or None where the process died before it was whole."""
    return next((_parse(path, number, line) for number, line in _whole_lines(path)), None)


def check_journal(path: Path) -> None:
    """Raise InputError for a line that a sweep could not read; a torn last line is none."""
    for number, line in _whole_lines(path):
        _parse(path, number, line)


class Journal:
    """An open journal, locked against a second writer. Use `create_journal` or `open_journal`."""

    def __init__(self, path: Path, flags: int = 0):
        self.path = path
        self.attempts: dict[str, Attempt] = {}
        self.sessions: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}
        self._size = 0
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o644)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            reason = f"cannot be locked: {error.strerror}"
            if isinstance(error, BlockingIOError):
                reason = "another sweep writes this run; wait for it, or start a new run (--no-resume)"
            raise InputError(f"{path}: {reason}") from error

    def read(self) -> None:
        """Index the lines, and cut a last line that a killed process left torn."""
        self.attempts, self.sessions, self._size = {}, [], 0
        for number, line in _whole_lines(self.path):
            self._index(_parse(self.path, number, line), self._size)
            self._size += len(line)
        if self._size < self.path.stat().st_size:
            os.ftruncate(self._handle, self._size)

    def _index(self, record: dict[str, Any], offset: int) -> None:
        if record["kind"] == "header":
            self.header = record
        elif record["kind"] == "session":
            self.sessions.append({name: value for name, value in record.items() if name != "kind"})
        else:
            attempt = Attempt(record["status"], record["seconds"], record["point"], offset)
            self.attempts[record["point_key"]] = attempt

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; on return it survives a crash of the process and of the machine.

        Raises InputError: the disk is full or refuses; the journal holds what it held before. ValueError, TypeError:
        the record holds NaN, infinity or something that JSON has no word for.
        """
        line = _line(record)
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
            os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, self._size)
            kept = f"the {len(self.attempts)} stored points are kept, make room and run again to resume"
            raise InputError(f"{self.path}: cannot write: {error.strerror}; {kept}") from error
        self._index(record, self._size)
        self._size += len(line)

    def status(self, point_key: str) -> str | None:
        """How the last attempt at a point ended, None without one."""
        attempt = self.attempts.get(point_key)
        return attempt.status if attempt else None

    def is_final(self, point_key: str) -> bool:
        """Whether the point has been measured, or has failed in a way that would only repeat."""
        return self.status(point_key) in FINAL_STATUSES

    def records(self) -> Iterator[dict[str, Any]]:
        """The last attempt at each point, in the order of the journal."""
        with open(self.path, "rb") as file:
            for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.offset):
                file.seek(attempt.offset)
                yield json.loads(file.readline().decode())

    def close(self) -> None:
        """Close the file and with it the lock."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def create_journal(folder: Path, header: dict[str, Any]) -> Journal:
    """A new journal ``<folder>/<run_id>.jsonl``. Raises InputError: the folder cannot be written."""
    journal = Journal(folder / f"{header['run_id']}.jsonl", os.O_CREAT | os.O_EXCL)
    journal.append({"kind": "header", "schema_version": SCHEMA_VERSION, **header})
    sync_folder(folder)
    return journal


def open_journal(path: Path) -> Journal:
    """An existing journal, to go on with.

    Raises InputError: another process writes it, it is corrupt, or of another schema version.
    """
    journal = Journal(path)
    try:
        journal.read()
        version = journal.header.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {version!r}, wanted {SCHEMA_VERSION}")
    except BaseException:
        journal.close()
        raise
    return journal


def rows_table(header: dict[str, Any], records: Iterable[dict[str, Any]]) -> pa.Table:
    """Long form: one row per sample of the records, one per failed point.

    A value of a sample wins over one of the whole measurement, that over the point's. Parameters of a point
    that are no column stay in the point key.

    Raises InputError: a measured column that the experiment does not have or that a sweep fills in, or a value of the
    wrong type.
    """
    names = {column.name for column in columns(header["experiment"])}
    values: dict[str, list[Any]] = {name: [] for name in names}
    for record in records:
        samples = record.get("samples") or [{}]
        measured = set(record.get("fields", {})).union(*samples)
        strange = sorted(measured - names) + sorted(measured & set(RESERVED))
        if strange:
            raise InputError(f"measured {', '.join(strange)}: wanted columns of {header['experiment']}")
        base: dict[str, Any] = {"origin": "measured", "group": digest(record["point_key"])}
        base |= {name: value for name, value in record["point"].items() if name in names}
        base |= record.get("fields", {})
        base |= {"run_id": header["run_id"], "experiment": header["experiment"], "gpu": header["gpu"]}
        base |= {"point_key": record["point_key"], "status": record["status"], "reason": record.get("reason")}
        if record["status"] == "ok":
            measured.add("sample")
            samples = [{"sample": index, **sample} for index, sample in enumerate(samples)]
        for name in names:
            usual = base.get(name)
            values[name] += [s.get(name, usual) for s in samples] if name in measured else [usual] * len(samples)
    return build_table(header["experiment"], values)


def _tables(journal: Journal) -> Iterator[pa.Table]:
    records = journal.records()
    while chunk := list(itertools.islice(records, _POINTS_PER_ROW_GROUP)):
        yield rows_table(journal.header, chunk)


def counts_by_status(journal: Journal) -> dict[str, int]:
    """Status -> number of points, statuses that occur."""
    return dict(sorted(Counter(attempt.status for attempt in journal.attempts.values()).items()))


def is_compacted(journal: Journal) -> bool:
    """Whether the run's Parquet file and sidecar are there, whole, and hold every point of the journal."""
    path = journal.path.with_suffix(".parquet")
    try:
        sidecar = read_sidecar(path)
        whole = path.exists() and file_digest(path) == sidecar["sha256"]
    except InputError:
        return False  # missing or damaged: to be written anew
    return whole and sidecar.get("journal_bytes") == journal.path.stat().st_size


def compact(journal: Journal) -> Path:
    """Write ``<run_id>.parquet`` and ``.json`` beside the journal, which stays.

    Raises InputError: the files cannot be written.
    """
    if journal.path.stat().st_size != journal._size:  # an interrupt between a line on disk and its entry in memory
        journal.read()
    calibrations = [s["calibration"] for s in journal.sessions if s.get("calibration")]
    counts = counts_by_status(journal)
    sidecar = {
        **{name: value for name, value in journal.header.items() if name != "kind"},
        "sessions": journal.sessions,
        "calibration": calibrations[-1] if calibrations else None,
        "counts": counts,
        "complete": sum(counts.values()) == journal.header["num_points"],
        "started": journal.sessions[0]["started"] if journal.sessions else None,
        "ended": utc_now(),
        "journal_bytes": journal.path.stat().st_size,
    }
    return write_run(journal.path.with_suffix(".parquet"), _tables(journal), sidecar)
