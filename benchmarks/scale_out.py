"""One grid on one GPU and on all visible ones: the same rows within intervals, and the throughput.

    python benchmarks/scale_out.py --out build/scale_out [--set context_len=4k,16k ...] [--workers 2]

Prints JSON. Exit 0 when no cell differs by more than its interval and the tolerance, and the throughput is at least
0.95 per device; else 1. The throughput is that of the time from the start of the first point to the end of the last, to
the second: starting workers and calibration are not in it, and the grid should take minutes.
"""

import argparse
import json
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
from distributed import Client

from labkit.axes import parse_axes
from labkit.executor_dask import local_cluster, visible_devices
from labkit.experiments import attention, common
from labkit.results import load_runs

# Two devices of one kind differ by themselves: clocks, memory, cooling.
TOLERANCE = 0.03


def measured(folder: Path, axes: dict, preset: str, executor: object) -> tuple[Path, float]:
    """Path of the run, and the time from the start of its first point to the end of its last, s."""
    options = {"executor": executor, "progress": False, "resume": False}
    result = attention.run(preset, out_dir=folder, options=options, **axes)
    if not set(result.counts) <= {"ok", "unsupported"}:
        sys.exit(f"{result.path}: wanted ok points, got {result.counts}")
    lines = map(json.loads, result.path.with_suffix(".jsonl").read_text().splitlines())
    points = [line for line in lines if line["kind"] == "point"]
    starts = [datetime.fromisoformat(point["started"]).timestamp() for point in points]
    cells = Counter(point["point"]["group"] for point in points)  # the seconds of a group are shared out to its points
    ends = [s + p["seconds"] * cells[p["point"]["group"]] for s, p in zip(starts, points, strict=True)]
    return result.path, max(ends) - min(starts)


def medians(path: Path) -> dict[str, tuple[float, float]]:
    """Point -> median ms of its rounds, and half of the 95 % interval of it, as a share."""
    from labkit.quality import relative_width

    rows = load_runs("attention", path).dropna(subset=["attention_ms"])
    groups = rows.groupby("point_key")["attention_ms"]
    return {str(key): (float(times.median()), relative_width(times.tolist()) / 2) for key, times in groups}


def main() -> int:
    """Both runs, compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/scale_out"))
    parser.add_argument("--set", nargs="+", default=[], dest="assignments")
    parser.add_argument("--workers", type=int, help="on a CPU, to try the script: the times then mean nothing")
    arguments = parser.parse_args()
    device, preset = common.device(), common.auto_preset()
    axes = parse_axes(arguments.assignments, attention.PRESETS[preset])
    names = visible_devices(device) if device != "cpu" else [""] * (arguments.workers or 1)
    variables = [{"CUDA_VISIBLE_DEVICES": name} if name else {} for name in names]
    found = {}
    for label, own in (("one", variables[:1]), ("all", variables)):
        with local_cluster(own) as cluster, Client(cluster) as client:
            client.wait_for_workers(len(own))
            found[label] = measured(arguments.out / label, axes, preset, client)
    one, many = (medians(found[label][0]) for label in ("one", "all"))
    ratios = {key: many[key][0] / one[key][0] for key in one}
    off = {k: r for k, r in ratios.items() if abs(np.log(r)) > np.hypot(one[k][1], many[k][1]) + TOLERANCE}
    speedup = found["one"][1] / found["all"][1]
    result = {
        "num_devices": len(variables),
        "num_points": len(one),
        "seconds_one": round(found["one"][1], 2),
        "seconds_all": round(found["all"][1], 2),
        "throughput_ratio": round(speedup, 3),
        "median_time_ratio": round(float(np.median(list(ratios.values()))), 4),
        "points_off": off,
    }
    print(json.dumps(result, indent=1))
    return 0 if not off and speedup >= 0.95 * len(variables) else 1


if __name__ == "__main__":
    sys.exit(main())
