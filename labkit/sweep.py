"""Sweeps: measure points in order, store each at once, go on after failures, resume after anything."""

import fcntl
import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.check import check_table
from labkit.errors import InputError
from labkit.executor import Executor, InProcess, Outcome, Point, WorkerProcess, function_name
from labkit.journal import (
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
from labkit.plan import Budget, batches_left, grid, keyed_points, point_key, run_header
from labkit.progress import progress as counter
from labkit.progress import say
from labkit.provenance import collect, command_line, environment, redact, utc_now
from labkit.results import run_folder
from labkit.schema import columns

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["RunResult", "grid", "point_key", "run_sweep"]

CALIBRATE = "labkit.calibrate:calibration_samples"
CALIBRATE_TIMEOUT_S = 180.0
EXECUTORS = ("local", "dask", "in-process")


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


def _record(header: dict[str, Any], key: str, point: Point, outcome: Outcome) -> dict[str, Any]:
    """The journal line of one attempt. Measured values that break the data contract make it an error."""
    record = {"kind": "point", "point_key": key, "point": point, **redact(outcome)}
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


@dataclass(frozen=True)
class _Session:
    """One go at what is left of a run: measured by an executor, stored by this process alone."""

    journal: Journal
    keyed: dict[str, Point]
    budget: Budget
    timeout_s: float
    local: dict[str, Any]
    progress: bool

    def run(self, runner: Executor, calibrate_on: str | None) -> int:
        """The number of points measured. An interrupt is passed on after the run has been closed."""
        try:
            opening = self._opening(runner, calibrate_on)
            self.journal.append(opening)
            if noise_floor_us := opening.get("calibration", {}).get("noise_floor_us"):
                self.local["noise_floor_us"] = noise_floor_us
            return self._measure(runner)
        except KeyboardInterrupt:
            compact(self.journal)
            stored = f"{len(self.journal.attempts)} of {len(self.keyed)} points stored"
            say(f"{_name(self.journal)}: interrupted, {stored}; run again to resume")
            raise

    def _opening(self, runner: Executor, calibrate_on: str | None) -> dict[str, Any]:
        """The journal line that opens a session: when, by what command, on a device of what speed."""
        opening: dict[str, Any] = {"kind": "session", "started": utc_now(), "command": command_line()}
        if calibrate_on is not None:
            outcome = runner.call(CALIBRATE, calibrate_on, CALIBRATE_TIMEOUT_S)
            if outcome["status"] == "ok":
                opening["calibration"] = outcome["samples"][0]
            else:
                opening["calibration_failed"] = outcome["reason"]
                say(f"calibration failed: {outcome['reason']}")
        return opening

    def _measure(self, runner: Executor) -> int:
        todo = batches_left(self.journal, self.keyed)
        num_done, num_measured = len(self.keyed) - sum(map(len, todo)), 0
        label = self.journal.header["experiment"]
        with closing(counter(len(self.keyed), label, initial=num_done)) if self.progress else nullcontext() as bar:
            for key, outcome in runner.outcomes(self.budget.limit(todo), self.timeout_s, self.local):
                self.journal.append(_record(self.journal.header, key, self.keyed[key], outcome))
                self.budget.add(self.keyed[key], outcome["seconds"])
                num_measured += 1
                if bar is not None:
                    bar.update()
        return num_measured


def _executor(
    executor: "str | Client", measure: str | Callable[[Point], Any], name: str, provenance: dict[str, Any], device: str
) -> Executor:
    if executor == "in-process":
        return InProcess(measure)
    if executor == "local":
        return WorkerProcess(name)
    from labkit.executor_dask import DaskExecutor

    client = None if isinstance(executor, str) else executor
    return DaskExecutor(name, client, environment(provenance), device)


def _without_stored(keyed: dict[str, Point], earlier: dict[Path, set[str]], experiment: str) -> dict[str, Point]:
    held = set[str]().union(*earlier.values())
    left = {key: point for key, point in keyed.items() if key not in held}
    if len(left) < len(keyed):
        say(f"{experiment}: {len(keyed) - len(left)} of {len(keyed)} points are stored in earlier runs")
    return left


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
    executor: "str | Client" = "local",
    timeout_s: float = 600.0,
    budget_s: float | None = None,
    budget_is_total: bool = False,
    backend_digest: str | Callable[[Point], str] = "",
    code_digest: str = "",
    provenance: dict[str, Any] | None = None,
    calibrate: bool = False,
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
    executor : ``local``: one child process, which may crash or hang. ``dask``: one Dask worker for each visible device.
        A ``distributed.Client``: the workers of that cluster (docs/scale-out.md). ``in-process``: here, for tests and
        debugging; no time limit is kept, and a crash ends the sweep.
    timeout_s : limit of one point, s, loading a model included, starting the worker not.
    budget_s : stop before the first point that is not expected to end within this time, s. The rest can be resumed.
    budget_is_total : earlier sessions of this run count against the budget: asking again does not measure more.
    backend_digest : what identifies the measured code in the key of a point (`labkit.attention.api.backend_digest`).
    code_digest : digest of the other measuring code (`labkit.provenance.code_digest`); part of the environment.
    provenance : of `labkit.provenance.collect`; by default collected for ``device``.
    calibrate : run `labkit.calibrate.calibrate` first and store its result in the sidecar; ``measure`` gets its
        ``noise_floor_us``.

    Raises InputError: bad arguments, a folder that cannot be written or is being written by another sweep, a measuring
    function that cannot be imported. An interrupt is passed on after the run has been closed; it can be resumed.
    """
    columns(experiment)
    if timeout_s <= 0:
        raise InputError(f"timeout_s: wanted more than 0 s, got {timeout_s}")
    if isinstance(executor, str) and executor not in EXECUTORS:
        raise InputError(f"executor: wanted one of {', '.join(EXECUTORS)} or a Dask client, got {executor!r}")
    keyed = keyed_points(points, seed, backend_digest)
    provenance = provenance or collect(device)
    here = executor == "in-process" and callable(measure)
    name = measure.__qualname__ if here else function_name(measure)  # type: ignore[union-attr]
    header = run_header(keyed, experiment, name, provenance, code_digest, seed)
    folder = run_folder(out_dir, experiment, header["gpu"])
    earlier = _earlier(folder, header) if reuse and resume else {}
    if not (keyed := _without_stored(keyed, earlier, experiment)):
        newest, *others = earlier
        return RunResult(newest.stem, newest, {}, 0, 0, tuple(others))
    with _find_or_create(folder, header, resume) as journal:
        budget = Budget(budget_s, journal, spent_counts=budget_is_total)
        session = _Session(journal, keyed, budget, timeout_s=timeout_s, local=dict(local or {}), progress=progress)
        num_measured = 0
        if _announce(journal, keyed):
            with closing(_executor(executor, measure, name, provenance, device)) as runner:
                num_measured = session.run(runner, device if calibrate else None)
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
