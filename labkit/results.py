"""Stored runs: one Parquet file of rows and one JSON sidecar per run, written whole, read strictly.

Layout: ``<out_dir>/<experiment>/<gpu slug>/<run_id>.parquet``, ``.json`` and, while measuring, ``.jsonl``.
"""

import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from labkit import schema
from labkit.errors import InputError
from labkit.parquet import read_table
from labkit.paths import ROOT, RUNS, write_whole
from labkit.provenance import plain, redact
from labkit.schema import COUNT, LISTS, REAL, SCHEMA_VERSION, TEXT, Column, arrow_schema, columns

RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
MAX_SIDECAR_BYTES = 16 << 20  # far above any real one


def new_run_id() -> str:
    """A name that sorts by time: ``20260131T120000Z-1a2b3c``."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def run_folder(out_dir: str | Path, experiment: str, gpu: str) -> Path:
    """Where the runs of an experiment on a device lie."""
    columns(experiment)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", gpu):
        raise InputError(f"gpu: wanted a slug such as nvidia-h200, got {gpu!r}")
    return Path(out_dir) / experiment / gpu


def _array(column: Column, values: list[Any]) -> pa.Array:
    """Arrow converts 4.5 to the integer 4 and True to 1 silently, so the inferred type is looked at first."""
    try:
        array = pa.array(values)
        kind = array.type
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        lists = dict.fromkeys(LISTS, pa.types.is_list(kind))
        fits = {TEXT: pa.types.is_string(kind), COUNT: number, REAL: number} | lists
        if not (fits[column.type] or pa.types.is_null(kind)):
            raise InputError(f"{column.name}: wanted {column.type}, got {kind}")
        return array.cast(column.type)
    except (pa.ArrowException, OverflowError) as error:
        raise InputError(f"{column.name}: wanted {column.type}, got {str(error).splitlines()[0]}") from error


def build_table(experiment: str, values: dict[str, list[Any]]) -> pa.Table:
    """A table in the experiment's schema from lists of equal length; absent columns are null.

    Raises InputError: an unknown column, or values that do not fit the column's type. Nothing is rounded or parsed.
    """
    wanted = columns(experiment)
    unknown = sorted(set(values) - {c.name for c in wanted})
    if unknown:
        raise InputError(f"unknown column {', '.join(unknown)} in rows of {experiment}")
    num_rows = max((len(v) for v in values.values()), default=0)
    arrays = [_array(c, values.get(c.name, [None] * num_rows)) for c in wanted]
    origin = [c.name for c in wanted].index("origin")
    arrays[origin] = pa.array([schema.ORIGIN_ALIASES.get(o, o) for o in arrays[origin].to_pylist()], TEXT)
    return pa.Table.from_arrays(arrays, schema=arrow_schema(experiment))


def file_digest(path: Path) -> str:
    """SHA-256 of a file. Raises InputError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: wanted a file to read: {error.strerror}") from error


def write_run(path: Path, tables: Iterable[pa.Table], sidecar: dict[str, Any]) -> Path:
    """Write ``.../<run_id>.parquet`` (a row group per table of `build_table`) and its sidecar, replacing both.

    sidecar : at least experiment, run_id, gpu. ``schema_version``, ``sha256`` and ``num_rows`` are added.

    Raises InputError: the files cannot be written (full disk, read-only folder).
    """
    identity = {"schema_version": SCHEMA_VERSION, **{n: sidecar[n] for n in ("run_id", "experiment", "gpu")}}
    arrow = arrow_schema(sidecar["experiment"]).with_metadata({"labkit": json.dumps(identity)})
    path.parent.mkdir(parents=True, exist_ok=True)
    num_rows = 0

    def write_rows(file: IO[bytes]) -> None:
        nonlocal num_rows
        with pq.ParquetWriter(file, arrow, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(arrow.metadata))
                num_rows += table.num_rows

    write_whole(path, write_rows)
    content = {**identity, **sidecar, "num_rows": num_rows, "sha256": file_digest(path)}
    text = json.dumps(content, indent=1, ensure_ascii=False, default=plain)
    write_whole(path.with_suffix(".json"), text.encode() + b"\n")
    return path


def read_sidecar(path: Path) -> dict[str, Any]:
    """The sidecar beside a run's Parquet file. Raises InputError: missing, not JSON, or of another schema version."""
    path = path.with_suffix(".json")
    try:
        if path.stat().st_size > MAX_SIDECAR_BYTES:
            raise OSError(f"more than {MAX_SIDECAR_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; wanted the sidecar of {path.stem}.parquet") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: wanted a JSON sidecar, got {str(error) or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema version {version!r}, wanted {SCHEMA_VERSION}")
    absent = [name for name in ("run_id", "experiment", "gpu", "sha256") if not isinstance(content.get(name), str)]
    if absent:
        raise InputError(f"{path}: {', '.join(absent)} missing; wanted a run's sidecar")
    return content


@dataclass(frozen=True)
class StoredRun:
    """One run: its Parquet file, its sidecar, and the root it was found under, as the user named it."""

    path: Path
    sidecar: dict[str, Any]
    source: str


def _roots(paths: Sequence[str | Path]) -> list[Path]:
    if paths:
        return [Path(p) for p in paths]
    named = [part for part in os.environ.get("LABKIT_DATA", "").split(os.pathsep) if part]
    return [Path(part) for part in named] or [RUNS]


def run_files(path: Path) -> list[Path]:
    """The Parquet files of runs at ``path``: a file or sidecar of a run, a folder, or the id of a stored run.

    Raises InputError: no such file, folder or run, or a file of another kind.
    """
    if RUN_ID.fullmatch(str(path)) and not path.exists():
        roots = _roots(())
        for root in roots:
            if not root.is_dir():
                print(f"LABKIT_DATA: no folder {_source_name(root)}; passed over", file=sys.stderr)
            if found := sorted(root.rglob(f"{path}.parquet")):
                return found[:1]
        where = ", ".join(map(_source_name, roots))
        raise InputError(f"{path}: no run of this id in {where} (LABKIT_DATA); give the path of its file")
    if path.is_dir():
        # A sidecar alone counts: a run whose rows are gone must be missed, not passed over.
        named = (file for suffix in (".parquet", ".json") for file in path.rglob(f"*{suffix}"))
        return sorted({file.with_suffix(".parquet") for file in named if RUN_ID.fullmatch(file.stem)})
    if not path.exists() and not (path.suffix == ".parquet" and path.with_suffix(".json").exists()):
        raise InputError(f"{path}: no such file or folder; wanted a run or a folder of runs")
    if path.suffix not in (".parquet", ".json"):
        raise InputError(f"{path}: wanted a run's .parquet or .json, or a folder of runs")
    return [path.with_suffix(".parquet")]


def _source_name(root: Path) -> str:
    full = root.resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else redact(str(root))


def experiments_in(*paths: str | Path) -> set[str]:
    """The experiments of the runs at the paths, else in LABKIT_DATA, else in ``data/runs``. Raises as `find_runs`."""
    return {read_sidecar(file)["experiment"] for root in _roots(paths) for file in run_files(root)}


def find_runs(experiment: str, *paths: str | Path, gpu: str | None = None) -> list[StoredRun]:
    """The runs of one experiment at the paths, else in LABKIT_DATA (``dir1:dir2``), else in ``data/runs``.

    Raises InputError: nothing found; a named file of another experiment; a missing or broken sidecar; two runs of one
    name.
    """
    columns(experiment)
    roots = _roots(paths)
    found: dict[str, StoredRun] = {}
    devices, others = set[str](), set[str]()
    for root in roots:
        for path in run_files(root):
            folder = path.parent.parent.name
            if root.is_dir() and folder in schema.EXPERIMENTS and folder != experiment:
                others.add(folder)
                continue
            sidecar = read_sidecar(path)
            if sidecar["experiment"] != experiment:
                if root.is_dir():
                    others.add(sidecar["experiment"])
                    continue
                raise InputError(f"{path}: a run of {sidecar['experiment']}, wanted {experiment}")
            devices.add(sidecar["gpu"])
            known = found.get(sidecar["run_id"])
            if known and known.sidecar["sha256"] != sidecar["sha256"]:
                raise InputError(f"{path}: run {sidecar['run_id']} is also {known.path}, with other rows")
            if known is None and gpu in (None, sidecar["gpu"]):
                found[sidecar["run_id"]] = StoredRun(path, sidecar, _source_name(root))
    if not found:
        where = ", ".join(_source_name(root) for root in roots)
        if devices:
            raise InputError(f"gpu: wanted one of {', '.join(sorted(devices))} (in {where}), got {gpu!r}")
        command = experiment if experiment == "replay" else f"run {experiment}"
        only = f" (only of {', '.join(sorted(others))})" if others else ""
        raise InputError(f"no runs of {experiment} in {where}{only}; `labkit {command}` makes one")
    return [found[run_id] for run_id in sorted(found)]


def _checked_rows(run: StoredRun, experiment: str) -> pa.Table:
    if not run.path.exists():
        raise InputError(f"{run.path}: missing; its sidecar is there, wanted both")
    if file_digest(run.path) != run.sidecar["sha256"]:
        raise InputError(f"{run.path}: does not match the sha256 in its sidecar; wanted the file that was measured")
    table = read_table(run.path).replace_schema_metadata(None)
    for column in columns(experiment):
        if column.nullable and column.name not in table.schema.names:  # the run is older than the column: unknown
            table = table.append_column(column.name, pa.nulls(table.num_rows, column.type))
    for field in arrow_schema(experiment):
        got = table.schema.field(field.name).type if field.name in table.schema.names else "nothing"
        if got != field.type:
            raise InputError(f"{run.path}: column {field.name}: wanted {field.type}, got {got}")
    table = table.select(arrow_schema(experiment).names)
    return table.append_column("source", pa.array([run.source] * table.num_rows, TEXT))


def load_runs(experiment: str, *paths: str | Path, gpu: str | None = None) -> pd.DataFrame:
    """The rows of all runs of one experiment, long form, one row per sample.

    *paths : run files, folders or trees; by default LABKIT_DATA (``dir1:dir2``), else ``data/runs``.
    gpu : only runs of this device slug.

    Returns the columns of `labkit.schema` plus ``source``, the root a run was found under. Failed points are rows too:
    select ``status == "ok"`` to compute. Counts that can be null come as floats; histograms as lists of lists.

    Raises InputError: nothing found, another schema version, a missing or corrupt file. No file is skipped.
    """
    table = pa.concat_tables(_checked_rows(run, experiment) for run in find_runs(experiment, *paths, gpu=gpu))
    frame = table.to_pandas()
    for column in columns(experiment):
        if column.type in LISTS:
            frame[column.name] = pd.Series(table[column.name].to_pylist(), dtype=object)
    return frame


def load_sidecars(experiment: str, *paths: str | Path, gpu: str | None = None) -> dict[str, dict[str, Any]]:
    """run_id -> sidecar (provenance, calibration, grid, ...) of the runs that `load_runs` would read."""
    return {run.sidecar["run_id"]: run.sidecar for run in find_runs(experiment, *paths, gpu=gpu)}
