"""Who calls the measuring function: this process, or a worker process that may crash or hang."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from labkit.errors import InputError
from labkit.provenance import redact, utc_now
from labkit.worker import measure_group, measure_point, resolve

CLOCK_JUMP_S = 2.0
START_TIMEOUT_S = 600.0  # importing torch on a cold network disk

Point = dict[str, Any]
Outcome = dict[str, Any]  # status, samples, fields, reason, detail: see `labkit.worker.measure_point`
Batch = list[tuple[str, Point]]  # keys and points measured in one call: one point, or a whole group


def function_name(measure: str | Callable[..., Any]) -> str:
    """``package.module:function`` of a module-level function, as a worker process can import it.

    Raises InputError: a function another process cannot find: nested, a lambda, or defined in a notebook or script.
    """
    if isinstance(measure, str):
        if measure.count(":") != 1:
            raise InputError(f"measure: wanted 'package.module:function', got {measure!r}")
        return measure
    module, name = measure.__module__, measure.__qualname__
    if module == "__main__" or "<" in name or "." in name:
        raise InputError(
            f"measure: wanted a function of an importable module, got {module}:{name}; or executor='in-process'"
        )
    return f"{module}:{name}"


class Executor(Protocol):
    """Who measures, as a sweep sees it: `InProcess`, `WorkerProcess`, `labkit.executor_dask.DaskExecutor`."""

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` as an outcome."""

    def outcomes(
        self, batches: Iterable[Batch], timeout_s: float, local: Mapping[str, Any]
    ) -> Iterator[tuple[str, Outcome]]:
        """The key of each point and what came of it, as they come; whole batches at once.

        local : what the measuring function gets beside each point.
        """

    def close(self) -> None:
        """End what was started."""


class Measurer(Protocol):
    """Who measures one batch at a time, whoever hands them out."""

    def prepare(self) -> None:
        """Have someone who can measure."""

    def measure(self, points: list[Point], timeout_s: float) -> list[Outcome]:
        """One outcome per point of a batch; ``timeout_s`` is per point."""


def measure_batch(
    measurer: Measurer, batch: Batch, timeout_s: float, local: Mapping[str, Any]
) -> list[tuple[str, Outcome]]:
    """Measure one batch; the seconds of a group are shared out evenly.

    ``begin_s`` is by the monotonic clock of this host, which all its processes share: for what ran at once.
    """
    measurer.prepare()
    started, begin, wall = utc_now(), time.monotonic(), time.time()
    found = measurer.measure([{**point, **local} for _, point in batch], timeout_s)
    elapsed = time.monotonic() - begin
    jump = time.time() - wall - elapsed
    times = {"started": started, "begin_s": round(begin, 6), "seconds": round(elapsed / len(batch), 6)}
    return [(key, _after_jump(outcome, jump) | times) for (key, _), outcome in zip(batch, found, strict=True)]


class _InTurn:
    """One batch after the other."""

    def outcomes(
        self: Measurer, batches: Iterable[Batch], timeout_s: float, local: Mapping[str, Any]
    ) -> Iterator[tuple[str, Outcome]]:
        """As of `Executor`."""
        for batch in batches:
            yield from measure_batch(self, batch, timeout_s, local)


def _after_jump(outcome: Outcome, jump_s: float) -> Outcome:
    """Samples taken while the wall clock was set or the machine slept are marked: they were timed by another clock."""
    if outcome["status"] != "ok" or abs(jump_s) < CLOCK_JUMP_S:
        return outcome
    note, usual = f"clock jumped ({jump_s:+.0f} s)", outcome["fields"].get("quality")
    marked = []
    for sample in outcome["samples"]:
        known = sample.get("quality", usual)
        marked.append({**sample, "quality": note if known in (None, "ok") else f"{known}; {note}"})
    return {**outcome, "samples": marked}


class InProcess(_InTurn):
    """Calls the function here. For tests and debugging: a crash ends the sweep, and no time limit is kept."""

    def __init__(self, measure: str | Callable[..., Any]):
        self._measure = resolve(measure) if isinstance(measure, str) else measure

    def prepare(self) -> None:
        """Nobody is started."""

    def close(self) -> None:
        """Nobody is ended."""

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` as an outcome."""
        return measure_point(resolve(function), argument)

    def measure(self, points: list[Point], timeout_s: float) -> list[Outcome]:
        """One outcome per point of a batch."""
        grouped = "group" in points[0]
        return measure_group(self._measure, points) if grouped else [measure_point(self._measure, points[0])]


class WorkerProcess(_InTurn):
    """Calls the function in one child process that stays alive, so that models stay loaded.

    The child is killed and started anew after a hang, and started anew after a crash or a broken device.
    """

    def __init__(self, measure: str):
        self._measure = measure
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._printed = tempfile.TemporaryFile("a+b")  # noqa: SIM115  lives as long as the worker

    def prepare(self) -> None:
        """Have a worker that has imported the measuring module."""
        if self._process is not None and self._process.poll() is None:
            return
        self._start()
        outcome = self._ask({"function": self._measure}, START_TIMEOUT_S)
        if outcome["status"] != "ok":
            detail = outcome.get("detail", "").strip().splitlines()
            raise InputError(f"measure: cannot import {self._measure}: {detail[-1] if detail else outcome['reason']}")

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labkit.worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)},
            start_new_session=True,  # Ctrl-C is for the parent; and a kill reaches the worker's own children
        )
        theirs.close()
        return self._process

    def _ask(self, request: dict[str, Any], timeout_s: float) -> Outcome:
        assert self._pipe is not None
        self._printed.truncate(0)
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            if self._pipe.poll(timeout_s):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return {"status": "crashed", "reason": self._why_it_died(), "detail": self._last_words()}
        self.close()
        return {"status": "timeout", "reason": f"no result within {timeout_s:g} s", "detail": self._last_words()}

    def _why_it_died(self) -> str:
        assert self._process is not None
        try:
            # Its pipe closes before it is dead, and a kill would hide the true signal.
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.close()
        if code >= 0:
            return f"worker exited with code {code}"
        hint = " (the kernel does so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"worker killed by {signal.Signals(-code).name}{hint}"

    def _last_words(self) -> str:
        """The end of what the worker printed during this point."""
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - 4000))
        return redact(self._printed.read().decode(errors="replace"))

    def _request(self, timeout_s: float, **request: Any) -> Outcome:
        self.prepare()
        outcome = self._ask(request, timeout_s)
        if outcome["status"] == "crashed":  # the worker may live on with a broken device
            self.close()
        return outcome

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` in the worker, as an outcome."""
        return self._request(timeout_s, function=function, point=argument)

    def measure(self, points: list[Point], timeout_s: float) -> list[Outcome]:
        """One outcome per point of a batch; ``timeout_s`` is per point.

        A group that takes the worker down says nothing about which point did it. Each is then tried alone, and those
        that survive are measured together once more: arms that were not interleaved must not be compared.
        """
        if "group" not in points[0]:
            return [self.call(self._measure, points[0], timeout_s)]

        def together(group: list[Point]) -> Outcome:
            return self._request(timeout_s * len(group), function=self._measure, points=group)

        answer = together(points)
        if answer["status"] == "ok":
            return answer["outcomes"]
        if len(points) == 1:
            return [answer]
        alone = [together([point]) for point in points]
        survivors = [point for point, outcome in zip(points, alone, strict=True) if outcome["status"] == "ok"]
        again = together(survivors) if survivors else answer
        found = iter(again["outcomes"] if again["status"] == "ok" else [again] * len(survivors))
        return [next(found) if outcome["status"] == "ok" else outcome for outcome in alone]

    def close(self) -> None:
        """End the worker and what it started. A worker that is told to end may be in no state to listen."""
        if self._process is None or self._pipe is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._pipe.close()
