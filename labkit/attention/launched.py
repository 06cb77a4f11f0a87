"""Which kernels a call really launches, with their grids: read from the profiler, not from what a library says."""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A launch: its shortened name, the number of programs (thread blocks), its device time and its begin in us."""

    name: str
    num_programs: int
    time_us: float
    begin_us: float = 0.0


def short_name(name: str) -> str:
    """The innermost function or class of a C++ or Triton kernel name, and 4 digits that tell its template apart."""
    plain_name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    head = plain_name.split("<")[0].split("(")[0].split("::")[-1]
    if head in ("device_kernel", "Kernel", "kernel") and "<" in plain_name:
        inner = re.findall(r"(\w+)<", plain_name)
        head = next((word for word in inner if word not in ("device_kernel", "enable_sm90_or_later")), head)
    digits = hashlib.sha256(name.encode()).hexdigest()[:4]
    return head if "<" not in plain_name else f"{head}#{digits}"


def launched_kernels(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[Kernel]]:
    """Kernels of each call, in order of launch. CUDA only; each call runs once, one after the other."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for name, call in calls.items():
            with record_function(f"labkit:{name}"):
                call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {name: _within(events, f"labkit:{name}") for name in calls}


def _within(events: list[dict[str, Any]], label: str) -> list[Kernel]:
    """Kernels that began inside a labelled range of the host, which waited for the device before it ended."""
    span = next(e for e in events if e.get("name") == label and e.get("cat") == "user_annotation")
    begin, end = span["ts"], span["ts"] + span["dur"]
    inside = [e for e in events if e.get("cat") == "kernel" and begin <= e["ts"] <= end]
    return [
        Kernel(short_name(e["name"]), prod(e["args"]["grid"]), float(e["dur"]), float(e["ts"]))
        for e in sorted(inside, key=lambda e: e["ts"])
    ]
