"""The all-reduces of a forward whose heads are divided among devices, measured with one process per device.

``python -m labkit.experiments.step_communication SPEC`` is one of these processes; `chain_ms` starts them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from labkit.experiments.step_forwards import activation_dtype, shape_of
from labkit.provenance import redact
from labkit.timing import captured, event_timer, host_timer

Chain = tuple[int, int, int]  # rows and hidden size of a sum, and how many of these sums a forward has
_PER_LAYER = 2  # behind attention's output projection, and behind the MLP
_ROUNDS, _TIMEOUT_S = 21, 180.0  # in it every process imports torch, and NCCL connects


def of_cell(cell: Sequence[dict[str, Any]], device: str) -> list[tuple[float | None, str]]:
    """Milliseconds of each forward's all-reduces, or None and why they were not measured ("" on one device)."""
    num_gpus = cell[0]["num_gpus"]
    if num_gpus == 1 or cell[0]["phase"] == "prefill":
        return [(None, "" if num_gpus == 1 else "prefill")] * len(cell)
    rows, shapes = [point["batch_size"] * point["q_len"] for point in cell], [shape_of(point) for point in cell]
    chains = [(n, shape.hidden_size, _PER_LAYER * shape.num_layers) for n, shape in zip(rows, shapes, strict=True)]
    times, reason = chain_ms(num_gpus, device, activation_dtype(cell[0]), tuple(sorted(set(chains))))
    return [(times.get(chain), reason) for chain in chains]


def add_to(rows: list[dict[str, Any]], ms: float | None, reason: str) -> None:
    """Set communication_ms, which forward_ms then holds too; or say in quality that it is missing."""
    for row in rows:
        if ms is not None:
            row |= {"communication_ms": ms, "forward_ms": row["forward_ms"] + ms}
        elif reason:
            note = f"communication not measured ({reason})"
            row["quality"] = note if row["quality"] == "ok" else f"{row['quality']}; {note}"


@cache
def chain_ms(num_gpus: int, device: str, dtype: str, chains: tuple[Chain, ...]) -> tuple[dict[Chain, float], str]:
    """Median time of each chain in ms over `num_gpus` processes, NCCL on ``cuda`` and Gloo on ``cpu``.

    The processes get this one's environment. Returns no times, and why, where fewer devices are visible or one failed.
    """
    if device != "cpu":
        import torch

        if (visible := torch.cuda.device_count()) < num_gpus:
            return {}, f"{visible} of {num_gpus} devices visible"
    with tempfile.TemporaryDirectory() as folder:
        spec = {"num_gpus": num_gpus, "device": device, "dtype": dtype, "chains": chains, "folder": folder}
        logs = [Path(folder) / f"{rank}.txt" for rank in range(num_gpus)]
        processes, codes, deadline = list[subprocess.Popen[bytes]](), [], time.monotonic() + _TIMEOUT_S
        try:
            for rank, path in enumerate(logs):
                command = [sys.executable, "-m", __name__, json.dumps(spec | {"rank": rank})]
                with path.open("wb") as log:
                    processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                if time.monotonic() > deadline:
                    return {}, f"no result within {_TIMEOUT_S:g} s"
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed := [rank for rank, code in enumerate(codes) if code]:
            lines = logs[failed[0]].read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            return {}, redact(f"process {failed[0]} of {num_gpus}: {lines[-1]}")[:300]
        return dict(zip(chains, json.loads((Path(folder) / "times.json").read_text()), strict=True)), ""


def _rank(rank: int, num_gpus: int, device: str, dtype: str, chains: list[Chain], folder: str) -> None:
    """Measure all chains as one of the processes; the first one writes their times."""
    import torch
    import torch.distributed as dist

    def sums(x: torch.Tensor, num_sums: int) -> None:
        for _ in range(num_sums):
            dist.all_reduce(x)

    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    where: dict[str, Any] = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", rank=rank, world_size=num_gpus, **where)
    times = []
    for num_rows, hidden_size, num_sums in chains:
        x = torch.full((num_rows, hidden_size), rank + 1.0, dtype=getattr(torch, dtype), device=device)
        sums(x, 1)
        if not bool((x == num_gpus * (num_gpus + 1) / 2).all()):
            raise RuntimeError(f"all-reduce of {list(x.shape)} gave a wrong sum")
        times.append(_median_ms(partial(sums, x.zero_(), num_sums), device))
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    os._exit(0)  # each process has waited for its last sum; taking down a communicator that was captured can hang


def _median_ms(chain: Callable[[], object], device: str) -> float:
    """Median over the rounds, on CUDA of one graph, like that of a captured forward.

    Each timed run follows an untimed one, which brings the processes together.
    """
    import torch

    chain()
    # NCCL's watchdog, another thread, may ask for events during the capture.
    replay = chain if device == "cpu" else captured(chain, capture_error_mode="thread_local")
    timer, times = host_timer if device == "cpu" else event_timer, []
    for _ in range(_ROUNDS):
        replay()
        read = timer(replay)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(read())
    return statistics.median(times)


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[1]))
