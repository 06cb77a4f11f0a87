"""Who calls the measuring function: this process, or a worker process that may crash or hang."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from labkit.errors import InputError
from labkit.provenance import redact, utc_now
from labkit.worker import measure_group, measure_point, resolve

START_TIMEOUT_S = 600.0  # importing torch on a cold network disk

Point = dict[str, Any]
Outcome = dict[str, Any]  # status, samples, fields, reason, detail, bad_input: see `labkit.worker.measure_point`

Batch = list[tuple[str, Point]]  # keys and points measured in one call: one point, or a whole group


def _timed(batch: Batch, found: list[Outcome], started: str, begin: float) -> Iterator[tuple[str, Outcome]]:
    """Keys and outcomes; the seconds of a group are shared out evenly."""
    seconds = round((time.monotonic() - begin) / len(batch), 6)
    for (key, _), outcome in zip(batch, found, strict=True):
        yield key, {**outcome, "started": started, "seconds": seconds}


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
        raise InputError(f"measure: wanted a function of an importable module, got {module}:{name}; or worker=False")
    return f"{module}:{name}"


class InProcess:
    """Calls the function here. For tests and debugging: a crash ends the sweep, and a hang is not noticed."""

    def __init__(self, measure: str | Callable[..., Any]):
        self._measure = resolve(measure) if isinstance(measure, str) else measure

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` as an outcome; the time limit cannot be kept here."""
        return measure_point(resolve(function), argument)

    def outcomes(self, batches: Iterator[Batch], timeout_s: float) -> Iterator[tuple[str, Outcome]]:
        """The key of each point and what came of it, batch by batch."""
        for batch in batches:
            started, begin = utc_now(), time.monotonic()
            points = [point for _, point in batch]
            if "group" in points[0]:
                found = measure_group(self._measure, points)
            else:
                found = [measure_point(self._measure, points[0])]
            yield from _timed(batch, found, started, begin)

    def close(self) -> None:
        """Nothing to end."""


class WorkerProcess:
    """Calls the function in one child process that stays alive, so that models stay loaded.

    The child is killed and started anew after a hang, and started anew after a crash or a broken device.
    """

    def __init__(self, measure: str):
        self._measure = measure
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115  lives as long as the worker

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        self._received.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labkit.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent; and a kill reaches the worker's own children
        )
        return self._process

    def _running(self) -> subprocess.Popen[bytes]:
        """The worker, with the measuring module imported: that is not part of any point's time."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._errors.truncate(0)
        process = self._start()
        outcome = self._ask(process, {"function": self._measure}, START_TIMEOUT_S)
        if outcome["status"] != "ok":
            detail = outcome.get("detail", "").strip().splitlines()
            raise InputError(f"measure: cannot import {self._measure}: {detail[-1] if detail else outcome['reason']}")
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: dict[str, Any], timeout_s: float) -> Outcome:
        assert process.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._died(process)
        line = self._read_line(process, deadline)
        if line is None:
            self.close()
            return {"status": "timeout", "reason": f"no result within {timeout_s:g} s", "detail": self._printed()}
        return json.loads(line) if line else self._died(process)

    def _read_line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line; empty when the worker is gone, None when the time is up."""
        assert process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                return b""
            self._received += part
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    def _died(self, process: subprocess.Popen[bytes]) -> Outcome:
        try:
            code = process.wait(timeout=10)  # its pipe closes before it is dead, and a kill would hide the true signal
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.close()
        reason = f"worker exited with code {code}" if code >= 0 else f"worker killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += " (the kernel does so when memory runs out)"
        return {"status": "crashed", "reason": reason, "detail": self._printed()}

    def _printed(self) -> str:
        """The end of what the worker printed during this point."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4000))
        return redact(self._errors.read().decode(errors="replace"))

    def call(self, function: str, argument: Any, timeout_s: float) -> Outcome:
        """``function(argument)`` in the worker, as an outcome."""
        process = self._running()
        self._errors.truncate(0)
        outcome = self._ask(process, {"function": function, "point": argument}, timeout_s)
        if outcome["status"] == "crashed":
            self.close()
        return outcome

    def outcomes(self, batches: Iterator[Batch], timeout_s: float) -> Iterator[tuple[str, Outcome]]:
        """The key of each point and what came of it, batch by batch."""
        for batch in batches:
            self._running()
            started, begin = utc_now(), time.monotonic()
            found = self._measure_batch([point for _, point in batch], timeout_s)
            yield from _timed(batch, found, started, begin)

    def _measure_batch(self, points: list[Point], timeout_s: float) -> list[Outcome]:
        """One outcome per point; ``timeout_s`` is per point.

        A group that takes the worker down says nothing about which point did it. Each is then tried alone, and those
        that survive are measured together once more: arms that were not interleaved must not be compared.
        """
        if "group" not in points[0]:
            return [self.call(self._measure, points[0], timeout_s)]
        answer = self._ask_group(points, timeout_s)
        if answer["status"] == "ok":
            return answer["outcomes"]
        if len(points) == 1:
            return [answer]
        alone = [self._ask_group([point], timeout_s) for point in points]
        survivors = [point for point, outcome in zip(points, alone, strict=True) if outcome["status"] == "ok"]
        again = self._ask_group(survivors, timeout_s) if survivors else answer
        together = iter(again["outcomes"] if again["status"] == "ok" else [again] * len(survivors))
        return [next(together) if outcome["status"] == "ok" else outcome for outcome in alone]

    def _ask_group(self, points: list[Point], timeout_s: float) -> Outcome:
        process = self._running()
        self._errors.truncate(0)
        outcome = self._ask(process, {"function": self._measure, "points": points}, timeout_s * len(points))
        if outcome["status"] == "crashed":
            self.close()
        return outcome

    def close(self) -> None:
        """End the worker and what it started. A worker that is told to end may be in no state to listen."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
