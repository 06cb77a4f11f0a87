"""The process that measures, apart from the one that stores: a crash or a hang costs a point, not the sweep.

Started as ``python -m labkit.worker <descriptor of a pipe> <pid of the parent>``. Requests and answers are JSON over
the pipe; standard output and error stay free for what the measuring code prints.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from labkit.provenance import plain, redact, without_folders

# By class name, since a worker that measures without torch must not import it to ask.
_STATUS_BY_CLASS = {
    "Unsupported": "unsupported",
    "BackendUnavailable": "unsupported",
    "OutOfResources": "unsupported",  # Triton: more shared memory or registers than the device has
    "WrongResult": "wrong",
    "MemoryError": "oom",
    "OutOfMemoryError": "oom",
}
_OOM_TEXTS = ("can't allocate memory", "out of memory", "not enough memory")
_PR_SET_PDEATHSIG = 1


def resolve(name: str) -> Callable[..., Any]:
    """The function named ``package.module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def status_of(error: Exception) -> str:
    """The status an exception stands for; ``crashed`` when it leaves the device unusable for this process."""
    for parent in type(error).__mro__:
        if parent.__name__ in _STATUS_BY_CLASS:
            return _STATUS_BY_CLASS[parent.__name__]
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(part in text for part in _OOM_TEXTS):
        return "oom"
    if "cuda error" in text or "hip error" in text or type(error).__name__ == "AcceleratorError":
        return "crashed"
    return "error"


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, redacted, with its class unless that says nothing new."""
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    known = (name in _STATUS_BY_CLASS or name == "InputError") and lines[0]
    return without_folders(redact(lines[0] if known else f"{name}: {lines[0]}".removesuffix(": ")))[:300]


def measure_point(measure: Callable[[dict[str, Any]], Any], point: dict[str, Any]) -> dict[str, Any]:
    """Call ``measure(point)`` and describe what came of it.

    Returns status; samples (list of dicts) and fields (dict) when ok; else reason (one line) and detail (traceback).
    """
    try:
        return _success(measure(point))
    except Exception as error:  # every failure is a row
        outcome = _failure(error)
    _free_memory()
    return outcome


def measure_group(measure: Callable[[list[dict[str, Any]]], Any], points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Call ``measure(points)`` once for points that must be interleaved; an outcome per point, as of `measure_point`.

    ``measure`` returns, in order, what each point yields, or the exception that stopped this point alone. What it
    raises stops them all.
    """
    try:
        results = list(measure(points))
        if len(results) != len(points):
            raise ValueError(f"measure returned {len(results)} results for a group of {len(points)} points")
    except Exception as error:  # every failure is a row
        results = [error] * len(points)
    outcomes = []
    for result in results:
        try:
            outcomes.append(_failure(result) if isinstance(result, Exception) else _success(result))
        except Exception as error:  # not what a measuring function may return
            outcomes.append(_failure(error))
    _free_memory()
    return outcomes


def _success(result: Any) -> dict[str, Any]:
    fields = dict(result) if isinstance(result, dict) else {"samples": result}
    samples = [dict(sample) for sample in fields.pop("samples")]
    if not samples:
        raise ValueError("measure returned no samples; wanted at least one")
    return {"status": "ok", "samples": samples, "fields": fields}


def _failure(error: Exception) -> dict[str, Any]:
    detail = redact("".join(traceback.format_exception(error))[-4000:])
    return {"status": status_of(error), "reason": one_line(error), "detail": detail}


def _free_memory() -> None:
    """What a failed point allocated must not fail the next one."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a broken device: the parent restarts this process
            print(f"cannot free device memory: {error}", file=sys.stderr)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, even if it hangs in native code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _read_requests(pipe: "Connection[Any, Any]", requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        while True:
            requests.put(json.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # the parent is gone; end what this process started (compilers) with it


def _answer(request: dict[str, Any]) -> bytes:
    function = resolve(request["function"])
    content: dict[str, Any] = {"status": "ok"}
    if "point" in request:
        content = measure_point(function, request["point"])
    elif "points" in request:
        outcomes = measure_group(function, request["points"])
        broken = next((outcome for outcome in outcomes if outcome["status"] == "crashed"), None)
        content = broken or {"status": "ok", "outcomes": outcomes}
    try:
        return json.dumps(content, allow_nan=False, default=plain).encode()
    except (TypeError, ValueError) as error:
        return json.dumps({"status": "error", "reason": f"measured values: {one_line(error)}"}).encode()


def main() -> None:
    """Answer requests ``{"function": ..., "point": ... or "points": [...]}`` until the parent closes the pipe."""
    faulthandler.enable()
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    _die_with_parent(int(sys.argv[2]))
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    while True:
        pipe.send_bytes(_answer(requests.get()))


if __name__ == "__main__":
    main()
