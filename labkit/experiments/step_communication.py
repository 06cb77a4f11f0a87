"""The all-reduces of a forward whose heads are divided among devices, measured with one process per device.

``python -m labkit.experiments.step_communication SPEC`` is one of these processes; `of_cell` starts them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.experiments.step_forwards import activation_dtype, shape_of
from labkit.worker import one_line

if TYPE_CHECKING:
    from torch import Tensor

PER_LAYER = 2  # behind attention's output projection, and behind the MLP
_ROUNDS = 21
_TIMEOUT_S = 180.0  # importing torch in every process, and NCCL's first connection
_PEER_TIMEOUT = timedelta(seconds=60)


class Chain(NamedTuple):
    """The all-reduces of one forward: so many in a row, each of ``[num_rows, hidden_size]``."""

    num_rows: int
    hidden_size: int
    count: int


class Communication(NamedTuple):
    """Milliseconds of a forward's all-reduces; None: not measured, and why."""

    ms: float | None
    reason: str

    def add_to(self, rows: list[dict[str, Any]]) -> None:
        """Set communication_ms, which forward_ms then holds too; or say in quality that it is missing."""
        for row in rows:
            if self.ms is not None:
                row |= {"communication_ms": self.ms, "forward_ms": row["forward_ms"] + self.ms}
            elif self.reason:
                note = f"communication not measured ({self.reason})"
                row["quality"] = note if row["quality"] in (None, "ok") else f"{row['quality']}; {note}"


def of_cell(cell: list[dict[str, Any]], device: str) -> list[Communication]:
    """The all-reduces of every forward of a cell, whose number of devices is the same."""
    num_gpus = cell[0]["num_gpus"]
    if num_gpus == 1:
        return [Communication(None, "")] * len(cell)
    if cell[0]["phase"] == "prefill":
        return [Communication(None, "of a prefill")] * len(cell)
    chains = []
    for point in cell:
        shape = shape_of(point)
        chains.append(Chain(point["batch_size"] * point["q_len"], shape.hidden_size, PER_LAYER * shape.num_layers))
    times, reason = chain_ms(num_gpus, device, activation_dtype(cell[0]), tuple(sorted(set(chains))))
    return [Communication(times.get(chain), reason) for chain in chains]


@cache
def chain_ms(num_gpus: int, device: str, dtype: str, chains: tuple[Chain, ...]) -> tuple[dict[Chain, float], str]:
    """Median time of each chain in ms over `num_gpus` processes, NCCL on ``cuda`` and Gloo on ``cpu``.

    Returns no times, and why, where fewer devices are visible or a process failed.
    """
    if device != "cpu":
        import torch

        if (visible := torch.cuda.device_count()) < num_gpus:
            return {}, f"{visible} of {num_gpus} devices visible"
    with tempfile.TemporaryDirectory() as folder:
        spec = {"num_gpus": num_gpus, "device": device, "dtype": dtype, "chains": chains, "folder": folder}
        try:
            _run_ranks(num_gpus, spec, Path(folder))
            times = json.loads((Path(folder) / "times.json").read_text())
        except (OSError, RuntimeError, ValueError) as error:
            return {}, one_line(error)
    return dict(zip(chains, times, strict=True)), ""


def _run_ranks(num_gpus: int, spec: dict[str, Any], folder: Path) -> None:
    """One process per device, with this one's environment; all end here. Raises RuntimeError: one failed or hung."""
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"rank{rank}.txt" for rank in range(num_gpus)]
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "labkit.experiments.step_communication", json.dumps(spec | {"rank": rank})]
            with log.open("wb") as file:
                ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no all-reduce within {_TIMEOUT_S:g} s")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if failed := [rank for rank, code in enumerate(codes) if code]:
        lines = logs[failed[0]].read_text(errors="replace").strip().splitlines() or ["no message"]
        raise RuntimeError(f"process {failed[0]} of {num_gpus}: {lines[-1]}")


def _rank(spec: dict[str, Any]) -> None:
    """Measure all chains as one of the processes; the first one writes their times."""
    import torch
    import torch.distributed as dist

    rank, num_gpus, folder = spec["rank"], spec["num_gpus"], Path(spec["folder"])
    device = torch.device("cpu")
    if spec["device"] != "cpu":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl", init_method=f"file://{folder}/store",
        rank=rank, world_size=num_gpus, timeout=_PEER_TIMEOUT,
    )  # fmt: skip
    times = []
    for chain in (Chain(*values) for values in spec["chains"]):
        x = torch.full(
            (chain.num_rows, chain.hidden_size), rank + 1.0, dtype=getattr(torch, spec["dtype"]), device=device
        )
        dist.all_reduce(x)
        if not bool((x == num_gpus * (num_gpus + 1) / 2).all()):
            raise RuntimeError(f"all-reduce of {list(x.shape)} gave a wrong sum")
        times.append(_median_ms(x.zero_(), chain.count))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    sys.stdout.flush()
    os._exit(0)  # every rank has waited for its last sum; taking down a communicator that was captured can hang


def _median_ms(x: Tensor, count: int) -> float:
    """Median over the rounds of `count` all-reduces in a row, on CUDA one graph as in a captured forward.

    Each timed run follows an untimed one, which brings the processes together.
    """
    import torch
    import torch.distributed as dist

    def run() -> None:
        for _ in range(count):
            dist.all_reduce(x)

    run()
    if not x.is_cuda:
        times = []
        for _ in range(_ROUNDS):
            dist.all_reduce(x)
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    # Other threads, of which NCCL's watchdog is one, may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_ROUNDS):
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
