"""Measuring functions for the sweep tests: importable, so that a worker process finds them."""

import os
import signal
import sys
import time
from typing import Any

from labkit.errors import BackendUnavailable, InputError, Unsupported, WrongResult


def rows(point: dict[str, Any], num: int = 3) -> list[dict[str, Any]]:
    """Valid samples of a plain step whose time tells the point."""
    return [
        {
            "arm": "plain",
            "target": "tiny",
            "decode_backend": "sdpa",
            "q_len": 1,
            "step_ms": 1.0 + point["context_len"] + index,
            "weight_dtype": "float32",
            "kv_dtype": "float32",
            "num_drafted_tokens": 0,
            "launch_mode": "eager",
            "round": index,
            "sample": 0,
        }
        for index in range(num)
    ]


def measure(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples after ``sleep_s``."""
    time.sleep(point.get("sleep_s", 0))
    return rows(point)


def measure_and_log(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples after ``sleep_s``; the ``log`` gets a line: point, process of the Dask worker, begin and end."""
    begin = time.monotonic()
    time.sleep(point["sleep_s"])
    with open(point["log"], "a") as file:
        file.write(f"{point['context_len']} {os.getppid()} {begin} {time.monotonic()}\n")
    return rows(point)


def measure_local(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples, if the point comes with its ``model_dir``."""
    assert point["model_dir"] == "/secret/place"
    return rows(point)


def measure_noise_floor(point: dict[str, Any]) -> dict[str, Any]:
    """Samples whose quality tells the noise floor that came with the point."""
    return {"samples": rows(point), "quality": f"floor {point['noise_floor_us']}"}


def measure_with_fields(point: dict[str, Any]) -> dict[str, Any]:
    """Samples and what holds for all of them."""
    print("noise on standard output")
    return {"samples": rows(point), "quality": "ok", "group": "both"}


def _out_of_memory() -> None:
    class OutOfMemoryError(RuntimeError):
        """Named like torch's."""

    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class CompilationError(Exception):
    """Named like Triton's."""


def _raise(error: Exception) -> None:
    raise error


_FAULTS = {
    "ok": lambda: None,
    "unsupported": lambda: _raise(Unsupported("head_dim 80 needs padding")),
    "unavailable": lambda: _raise(BackendUnavailable("flashinfer", "no GPU")),
    "memory": lambda: _raise(MemoryError()),
    "torch_oom": _out_of_memory,
    "cpu_oom": lambda: _raise(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 TB")),
    "wrong": lambda: _raise(WrongResult("row 3 differs")),
    "error": lambda: _raise(KeyError("no such layer")),
    "home": lambda: _raise(OSError(f"cannot read {os.path.expanduser('~')}/models/x, token=abc123")),
    "bad_input": lambda: _raise(InputError("model: no such folder")),
    "device": lambda: _raise(RuntimeError("CUDA error: an illegal memory access was encountered")),
    "compile": lambda: _raise(CompilationError("at 3:11: incompatible types\n    q = tl.dot(a, b)")),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "timer": lambda: None,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: sys.exit(7),
    "hang": lambda: time.sleep(600),
}


def measure_fault(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Do what ``fault`` says, then return the process that did it."""
    _FAULTS[point["fault"]]()
    backwards = -1.0 if point["fault"] == "timer" else 1.0
    return [{**row, "prompt_id": str(os.getpid()), "step_ms": backwards * row["step_ms"]} for row in rows(point)]


def measure_bad_values(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples that break the data contract as ``fault`` says."""
    samples = rows(point)
    if point["fault"] == "nan":
        samples[1]["step_ms"] = float("nan")
    elif point["fault"] == "unknown":
        samples[0]["step_mss"] = 1.0
    elif point["fault"] == "float":
        samples[0]["q_len"] = 1.5
    elif point["fault"] == "negative":
        samples[2]["step_ms"] = -1.0
    elif point["fault"] == "duplicate":
        samples.append(samples[0])
    elif point["fault"] == "empty":
        return []
    elif point["fault"] == "reserved":
        samples[0]["status"] = "ok"
    elif point["fault"] == "object":
        samples[0]["step_ms"] = object()
    return samples


def measure_once_broken(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Fail the first time, by a mark on disk."""
    if not os.path.exists(point["mark"]):
        with open(point["mark"], "w"):
            pass
        raise ValueError("first time")
    return rows(point)


def measure_interrupted_once(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Ctrl-C during the third point, unless it has been pressed before."""
    if point["context_len"] == 2 and not os.path.exists(point["mark"]):
        with open(point["mark"], "w"):
            pass
        raise KeyboardInterrupt
    return rows(point)


def fake_calibration(device: str) -> list[dict[str, Any]]:
    """What `labkit.calibrate.calibration_samples` gives, in a moment."""
    return [{"read_gb_per_s": 7.0, "noise_floor_us": 2.0}]


def no_calibration(device: str) -> list[dict[str, Any]]:
    """A device that does not answer."""
    raise RuntimeError("no such device")
