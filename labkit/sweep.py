"""Sweeps: measure points in order, store each at once, go on after failures, resume after anything."""

import fcntl
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.check import check_table
from labkit.errors import InputError
from labkit.executor import Batch, InProcess, Outcome, Point, WorkerProcess, function_name, outcomes
from labkit.journal import (
    RESERVED,
    Journal,
    compact,
    counts_by_status,
    create_journal,
    is_compacted,
    open_journal,
    read_header,
    rows_table,
)
from labkit.paths import RUNS
from labkit.progress import progress as counter
from labkit.progress import say
from labkit.provenance import collect, command_line, digest, environment_digest, plain, utc_now
from labkit.results import new_run_id, run_folder
from labkit.schema import columns

_ENCODER = json.JSONEncoder(allow_nan=False, default=plain)  # json.dumps makes one per call
CALIBRATE = "labkit.calibrate:calibration_samples"
CALIBRATE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class RunResult:
    """What a sweep left: ``path`` of the Parquet file, points by status, points not yet measured.

    ``earlier`` are the files of runs of the same points with other versions of a backend (only with ``reuse``).
    """

    run_id: str
    path: Path
    counts: dict[str, int]
    num_measured: int
    num_left: int
    earlier: tuple[Path, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every point has a row."""
        return self.num_left == 0


def grid(**axes: Any) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest.

    **axes : a list, tuple or range of values, or one value.

    Raises InputError: an axis without values.
    """
    values = {n: list(v) if isinstance(v, list | tuple | range) else [v] for n, v in axes.items()}
    for name, options in values.items():
        if not options:
            raise InputError(f"{name}: wanted at least one value, got none")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def point_key(point: Point, backend_digest: str = "") -> str:
    """Every parameter of a point as one stable string, in any order: ``k=4,name="sdpa"@1a2b``."""
    parts = [f"{name}={_ENCODER.encode(point[name])}" for name in sorted(point)]
    return ",".join(parts) + (f"@{backend_digest}" if backend_digest else "")


def _keyed(points: Iterable[Point], seed: int, backend_digest: str | Callable[[Point], str]) -> dict[str, Point]:
    """point_key -> point, with the seed in it, as JSON gives it back: lists, no tuples."""
    keyed: dict[str, Point] = {}
    for given in points:
        try:
            point = json.loads(_ENCODER.encode({"seed": seed, **given}))
        except (TypeError, ValueError) as error:
            raise InputError(f"points: wanted numbers, texts, lists and null, got {given!r}: {error}") from error
        taken = [name for name in RESERVED if name in point]
        if taken:
            raise InputError(f"points: {', '.join(taken)} cannot be an axis; the sweep fills it in")
        key = point_key(point, backend_digest(given) if callable(backend_digest) else backend_digest)
        if key in keyed:
            raise InputError(f"points: the same point twice: {key}")
        keyed[key] = point
    if not keyed:
        raise InputError("points: wanted at least one, got none")
    return keyed


def _axes(points: Iterable[Point]) -> dict[str, list[Any]]:
    """Axis -> its values in the order they come, for the sidecar."""
    axes: dict[str, dict[str, Any]] = {}
    for point in points:
        for name, value in point.items():
            axes.setdefault(name, {}).setdefault(_ENCODER.encode(value), value)
    return {name: list(values.values()) for name, values in axes.items()}


def _find_or_create(folder: Path, header: dict[str, Any], resume: bool) -> Journal:
    """The latest run of the same plan and environment, else a new one; locked either way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # two sweeps started at once must not both find nothing to resume
        same = ("plan_digest", "environment_digest")
        for path in sorted(folder.glob("*.jsonl"), reverse=True) if resume else []:
            found = read_header(path)
            if found is not None and all(found.get(name) == header[name] for name in same):
                return open_journal(path)
        return create_journal(folder, header)
    finally:
        os.close(handle)


def _earlier(folder: Path, header: dict[str, Any]) -> dict[Path, set[str]]:
    """Runs of the same points and environment with another version of a backend: file -> final points, newest first."""
    found = {}
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        known = read_header(path) or {}
        same = all(known.get(name) == header[name] for name in ("points_digest", "environment_digest"))
        if same and known["plan_digest"] != header["plan_digest"]:
            with open_journal(path) as journal:
                found[path.with_suffix(".parquet")] = {key for key in journal.attempts if journal.is_final(key)}
    return found


class _Budget:
    """Stops before a point that is not expected to fit into the time left."""

    def __init__(self, budget_s: float | None, journal: Journal, *, spent_counts: bool):
        earlier = journal.attempts.values()
        spent_s = sum(attempt.seconds for attempt in earlier) if spent_counts else 0.0
        self._deadline = None if budget_s is None else time.monotonic() + budget_s - spent_s
        self._seconds: dict[str, list[float]] = {}
        self.stopped = False
        for attempt in earlier:
            self.add(attempt.point, attempt.seconds)

    @staticmethod
    def _kind(point: Point) -> str:
        """Points are alike when they differ in numbers only."""
        return json.dumps({n: v for n, v in sorted(point.items()) if not isinstance(v, int | float | list)})

    def add(self, point: Point, seconds: float) -> None:
        if self._deadline is not None:
            self._seconds.setdefault(self._kind(point), []).append(seconds)

    def _expected_s(self, point: Point) -> float:
        alike = self._seconds.get(self._kind(point)) or [s for part in self._seconds.values() for s in part]
        return statistics.median(alike) if alike else 0.0

    def limit(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            expected_s = sum(self._expected_s(point) for _, point in batch)
            if self._deadline is not None and time.monotonic() + expected_s >= self._deadline:
                self.stopped = True
                return
            yield batch


def _batches(journal: Journal, keyed: dict[str, Point]) -> list[Batch]:
    """What is left to measure, in order. A group that is not whole is measured again as a whole.

    Its arms must have been interleaved to be compared; of those, only arms that cannot run are left out.
    """
    batches = []
    for _, batch in itertools.groupby(keyed.items(), lambda item: item[1].get("group", item[0])):
        points = list(batch)
        if not all(journal.is_final(key) for key, _ in points):
            batches.append(
                [(key, point) for key, point in points if not journal.is_final(key) or journal.status(key) == "ok"]
            )
    return batches


def _record(header: dict[str, Any], key: str, point: Point, outcome: Outcome) -> dict[str, Any]:
    """The journal line of one attempt. Measured values that break the data contract make it an error."""
    record = {"kind": "point", "point_key": key, "point": point, **outcome}
    if outcome["status"] != "ok":
        return record
    try:
        findings = check_table(rows_table(header, [record]), header["experiment"])
        problem = f"{findings[0].field}: {findings[0].problem}" if findings else ""
    except InputError as error:
        problem = str(error)
    if not problem:
        return record
    kept = {name: value for name, value in record.items() if name not in ("samples", "fields")}
    return {**kept, "status": "error", "reason": f"measured values break the data contract: {problem}"}


def _session(executor: InProcess | WorkerProcess, calibrate_on: str | None) -> dict[str, Any]:
    """The journal line that opens a session: when, by what command, on a device of what speed."""
    session: dict[str, Any] = {"kind": "session", "started": utc_now(), "command": command_line()}
    if calibrate_on is not None:
        outcome = executor.call(CALIBRATE, calibrate_on, CALIBRATE_TIMEOUT_S)
        if outcome["status"] == "ok":
            session["calibration"] = outcome["samples"][0]
        else:
            session["calibration_failed"] = outcome["reason"]
            say(f"calibration failed: {outcome['reason']}")
    return session


def _measure_all(
    journal: Journal,
    keyed: dict[str, Point],
    runner: InProcess | WorkerProcess,
    *,
    budget: _Budget,
    timeout_s: float,
    local: dict[str, Any],
    progress: bool,
) -> int:
    """Measure and store what is not final yet; the number of points measured."""
    todo = _batches(journal, keyed)
    num_done, num_measured = len(keyed) - sum(map(len, todo)), 0
    label = journal.header["experiment"]
    with closing(counter(len(keyed), label, initial=num_done)) if progress else nullcontext() as bar:
        for key, outcome in outcomes(runner, budget.limit(todo), timeout_s, local):
            journal.append(_record(journal.header, key, keyed[key], outcome))
            budget.add(keyed[key], outcome["seconds"])
            num_measured += 1
            if bar is not None:
                bar.update()
    return num_measured


def _header(
    keyed: dict[str, Point], experiment: str, measure: str, provenance: dict[str, Any], code_digest: str, seed: int
) -> dict[str, Any]:
    return {
        "run_id": new_run_id(),
        "experiment": experiment,
        "gpu": provenance["device"]["slug"],
        "plan_digest": digest([experiment, measure, sorted(keyed), seed]),
        "points_digest": digest([experiment, measure, sorted(map(point_key, keyed.values())), seed]),
        "environment_digest": environment_digest(provenance, code_digest),
        "code_digest": code_digest,
        "num_points": len(keyed),
        "grid": _axes(keyed.values()),
        "measure": measure,
        "seed": seed,
        "command": provenance["command"],
        "provenance": provenance,
    }


def run_sweep(
    points: Iterable[Point],
    measure: str | Callable[[Point], Any],
    *,
    experiment: str,
    local: dict[str, Any] | None = None,
    out_dir: str | Path = RUNS,
    device: str = "cpu",
    seed: int = 0,
    resume: bool = True,
    reuse: bool = False,
    timeout_s: float = 600.0,
    budget_s: float | None = None,
    budget_is_total: bool = False,
    backend_digest: str | Callable[[Point], str] = "",
    code_digest: str = "",
    provenance: dict[str, Any] | None = None,
    calibrate: bool = False,
    worker: bool = True,
    progress: bool = True,
) -> RunResult:
    """Measure every point, in the order given, and store each as soon as it is done.

    points : parameters by name (`grid`), important ones first. Those that are columns of the experiment become columns.
    measure : ``measure(point)``, as ``package.module:function`` or a module-level function. It gets the point with
        ``seed`` in it, and returns a list of samples (dicts of columns) or ``{"samples": [...], column: value, ...}``
        with values that hold for all of them. What it raises becomes the status (`labkit.worker.status_of`). Adjacent
        points with one ``group`` are interleaved: ``measure`` gets them as a list and returns a list, for each point
        its samples or the exception that stopped it alone.
    local : what ``measure`` gets with every point and no file holds: where things lie on this machine.
    device : ``cpu``, ``cuda`` or ``cuda:N``. Names the folder, unless ``provenance`` is given.
    seed : put into every point that has none.
    resume : go on with the latest run of the same points, seed, measuring function and environment. Points that are ok,
        unsupported, oom or wrong stay; those that timed out, crashed or failed get one more attempt.
    reuse : with ``resume``, leave out points that a run of the same points and environment holds already: after an edit
        of one backend its points alone are measured, in a run of their own, not interleaved with the others.
    timeout_s : limit of one point, s, loading a model included, starting the worker not. Only with ``worker``.
    budget_s : stop before the first point that is not expected to end within this time, s. The rest can be resumed.
    budget_is_total : earlier sessions of this run count against the budget: asking again does not measure more.
    backend_digest : what identifies the measured code in the key of a point (`labkit.attention.api.backend_digest`).
    code_digest : digest of the other measuring code (`labkit.provenance.code_digest`); part of the environment.
    provenance : of `labkit.provenance.collect`; by default collected for ``device``.
    calibrate : run `labkit.calibrate.calibrate` first and store its result in the sidecar; ``measure`` gets its
        ``noise_floor_us``.
    worker : False: measure in this process, for tests and debugging.

    Raises InputError: bad arguments, a folder that cannot be written or is being written by another sweep, a measuring
    function that cannot be imported. An interrupt is passed on after the run has been closed; it can be resumed.
    """
    columns(experiment)
    if timeout_s <= 0:
        raise InputError(f"timeout_s: wanted more than 0 s, got {timeout_s}")
    keyed = _keyed(points, seed, backend_digest)
    provenance = provenance or collect(device)
    name = function_name(measure) if worker or isinstance(measure, str) else measure.__qualname__
    header = _header(keyed, experiment, name, provenance, code_digest, seed)
    folder = run_folder(out_dir, experiment, header["gpu"])
    earlier = _earlier(folder, header) if reuse and resume else {}
    num_asked, held = len(keyed), set[str]().union(*earlier.values())
    keyed = {key: point for key, point in keyed.items() if key not in held}
    if len(keyed) < num_asked:
        say(f"{experiment}: {num_asked - len(keyed)} of {num_asked} points are stored in earlier runs")
    if not keyed:
        newest, *others = earlier
        return RunResult(newest.stem, newest, {}, 0, 0, tuple(others))
    with _find_or_create(folder, header, resume) as journal:
        budget = _Budget(budget_s, journal, spent_counts=budget_is_total)
        num_measured = 0
        if _announce(journal, keyed):
            try:
                with closing(WorkerProcess(name) if worker else InProcess(measure)) as runner:
                    session = _session(runner, device if calibrate else None)
                    journal.append(session)
                    given = dict(local or {})
                    if noise_floor_us := session.get("calibration", {}).get("noise_floor_us"):
                        given["noise_floor_us"] = noise_floor_us
                    options: dict[str, Any] = {"budget": budget, "timeout_s": timeout_s, "progress": progress}
                    num_measured = _measure_all(journal, keyed, runner, local=given, **options)
            except KeyboardInterrupt:
                compact(journal)
                stored = f"{len(journal.attempts)} of {len(keyed)} points stored"
                say(f"{_name(journal)}: interrupted, {stored}; run again to resume")
                raise
        if num_measured or not is_compacted(journal):
            compact(journal)
        num_left = sum(key not in journal.attempts for key in keyed)
        if budget.stopped:
            rest = f"{num_left} of {len(keyed)} points left"
            say(f"{_name(journal)}: budget of {budget_s:g} s, {rest}; run again to go on")
        path, left = journal.path.with_suffix(".parquet"), (num_measured, num_left, tuple(earlier))
        return RunResult(journal.header["run_id"], path, counts_by_status(journal), *left)


def _name(journal: Journal) -> str:
    return f"{journal.header['experiment']} {journal.header['run_id']}"


def _announce(journal: Journal, keyed: dict[str, Point]) -> bool:
    """Say what is stored already; whether anything is left to measure."""
    num_done = sum(journal.is_final(key) for key in keyed)
    if num_done == len(keyed):
        say(f"{_name(journal)}: all {num_done} points are stored, nothing to measure")
    elif num_done:
        say(f"{_name(journal)}: resuming, {num_done} of {len(keyed)} points are stored")
    return num_done < len(keyed)
