"""A sweep to be killed: prints the key of each point once it is stored, and the process id of its worker."""

import signal
import sys
from pathlib import Path
from typing import Any

from labkit import executor, sweep
from labkit.journal import Journal
from labkit.provenance import collect
from tests import sweep_points

_append, _start = Journal.append, executor.WorkerProcess._start


def _append_and_acknowledge(journal: Journal, record: dict[str, Any]) -> None:
    _append(journal, record)
    if record["kind"] == "point":
        print("stored", record["point_key"], flush=True)


def _start_and_tell(worker: executor.WorkerProcess) -> Any:
    process = _start(worker)
    print("worker", process.pid, flush=True)
    return process


def points(num: int) -> list[dict[str, Any]]:
    """A grid of ``num`` points of a few ms each."""
    return sweep.grid(context_len=list(range(num)), batch_size=1, sleep_s=0.004)


def main() -> None:
    """Run the sweep into the folder, of as many points, given as arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    Journal.append = _append_and_acknowledge  # type: ignore[method-assign]
    executor.WorkerProcess._start = _start_and_tell  # type: ignore[method-assign]
    provenance = collect("cpu")
    result = sweep.run_sweep(
        points(int(sys.argv[2])),
        sweep_points.measure,
        experiment="loop",
        out_dir=Path(sys.argv[1]),
        provenance=provenance,
        progress=False,
    )
    print("finished", result.run_id, flush=True)


if __name__ == "__main__":
    main()
