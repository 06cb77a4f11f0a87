"""One grid on one GPU and on all visible ones: the same rows within intervals, and the throughput.

    python benchmarks/scale_out.py --out build/scale_out [--set context_len=4k,16k ...] [--warm-up 6] [--workers 2]

Prints JSON. Exit 0 when the workers saw as many devices, at most 5 % of the points differ by more than their 95 %
interval and the tolerance, and the throughput is at least 0.95 per device; else 1.

The throughput is the work done per second by warm workers: from the moment when each of them has ``--warm-up`` groups
behind it, in which it imports, compiles and loads kernels, to the end of the last point. The work of a group is its
time on one warm device. A pass over the grid with one round comes first, so that what is compiled once lies on the disk
for both runs. No cell is measured again (``max_repeats``): the work is the same. The grid should take minutes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from labkit.axes import parse_axes
from labkit.decide.intervals import RESAMPLES, generator, percentile_interval, resampled_medians
from labkit.executor_dask import local_cluster, visible_devices
from labkit.experiments import attention, common
from labkit.results import load_runs

# Two devices of one kind differ by themselves: clocks, memory, cooling.
TOLERANCE = 0.03
MOST_OFF = 0.05  # of points: what 95 % intervals let through by chance
WARM_UP = 6


@dataclass(frozen=True)
class Span:
    """A group of points on one worker: begin and end by the clock of the host, s."""

    worker: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def spans_of(run: Path) -> dict[str, Span]:
    """Group -> when it was measured, from the journal of a run; the seconds of a group are shared out to its points."""
    lines = map(json.loads, run.with_suffix(".jsonl").read_text().splitlines())
    spans: dict[str, Span] = {}
    for line in (line for line in lines if line["kind"] == "point"):
        group, begin = line["point"]["group"], line["begin_s"]
        end = spans[group].end if group in spans else begin
        spans[group] = Span(line.get("worker", ""), begin, end + line["seconds"])
    return spans


def warm(spans: Mapping[str, Span], num_warm_up: int) -> float:
    """When the last worker has its first ``num_warm_up`` groups behind it. Raises ValueError: one has no more."""
    ends: dict[str, list[float]] = {}
    for span in spans.values():
        ends.setdefault(span.worker, []).append(span.end)
    if (fewest := min(map(len, ends.values()))) <= num_warm_up:
        raise ValueError(f"wanted more than {num_warm_up} groups on each worker, got {fewest}")
    return max(sorted(own)[num_warm_up - 1] if num_warm_up else 0.0 for own in ends.values())


def throughput(spans: Mapping[str, Span], work: Mapping[str, float], begin: float) -> float:
    """Work done per second from ``begin`` to the end of the last group; of a group under way then, its share."""
    done = sum(
        work.get(group, 0.0) * (span.end - max(span.begin, begin)) / span.seconds
        for group, span in spans.items()
        if span.end > begin
    )
    return done / (max(span.end for span in spans.values()) - begin)


def compared(one: Mapping[str, Span], many: Mapping[str, Span], num_warm_up: int = WARM_UP) -> dict[str, float]:
    """Seconds of both runs with warm workers, and the ratio of their throughputs."""
    begins = warm(one, num_warm_up), warm(many, num_warm_up)
    # A group that one device did cold has no known work; with many workers it is among their first ones too.
    work = {group: span.seconds for group, span in one.items() if span.end > begins[0]}
    ends = [max(span.end for span in spans.values()) for spans in (one, many)]
    return {
        "warm_seconds_one": round(ends[0] - begins[0], 2),
        "warm_seconds_all": round(ends[1] - begins[1], 2),
        "throughput_ratio": round(throughput(many, work, begins[1]) / throughput(one, work, begins[0]), 3),
    }


def measured(folder: Path, axes: Mapping[str, Any], preset: str, executor: object) -> Path:
    """Path of a new run of the grid."""
    options = {"executor": executor, "progress": False, "resume": False}
    result = attention.run(preset, out_dir=folder, options=options, **axes)
    if not set(result.counts) <= {"ok", "unsupported"}:
        sys.exit(f"{result.path}: wanted ok points, got {result.counts}")
    return result.path


def is_off(one: np.ndarray, many: np.ndarray, key: str) -> bool:
    """Whether the 95 % interval of the ratio of the medians of a point's rounds stays outside the tolerance.

    By resampling: a kernel whose rounds fall into two modes has an interval that holds both.
    """
    rng = generator(0, key)
    medians = [resampled_medians(times[:, None], RESAMPLES, rng)[:, 0] for times in (one, many)]
    low, high = percentile_interval(np.log(medians[1] / medians[0]))
    return low > TOLERANCE or high < -TOLERANCE


def differences(one: Path, many: Path) -> tuple[dict[str, float], list[str]]:
    """Point -> ratio of the medians of its rounds; and the points that are off."""
    ratios, off = {}, []
    rows = [load_runs("attention", path).dropna(subset=["attention_ms"]) for path in (one, many)]
    others = {key: own["attention_ms"].to_numpy() for key, own in rows[1].groupby("point_key")}
    for key, own in rows[0].groupby("point_key"):
        name, times = f"{own['backend'].iloc[0]}: {own['group'].iloc[0]}", own["attention_ms"].to_numpy()
        ratios[name] = round(float(np.median(others[key]) / np.median(times)), 4)
        if is_off(times, others[key], str(key)):
            off.append(name)
    return ratios, off


def _device() -> str:
    """The device that the measuring processes of this Dask worker get, by its own number."""
    code = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Both runs, compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/scale_out"))
    parser.add_argument("--set", nargs="+", default=[], dest="assignments")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="groups of each worker that do not count")
    parser.add_argument("--workers", type=int, help="on a CPU, to try the script: the times then mean nothing")
    arguments = parser.parse_args()
    device, preset = common.device(), common.auto_preset()
    axes = {"max_repeats": [1]} | parse_axes(arguments.assignments, attention.PRESETS[preset])
    names = visible_devices(device) if device != "cpu" else [""] * (arguments.workers or 1)
    variables = [{"CUDA_VISIBLE_DEVICES": name} if name else {} for name in names]
    runs, num_devices = {}, len(names)
    passes = (("compile", variables, {"num_rounds": [1]}), ("one", variables[:1], {}), ("all", variables, {}))
    for label, own, changes in passes:
        with local_cluster(own) as cluster, Client(cluster) as client:
            client.wait_for_workers(len(own))
            if label == "all" and device != "cpu":
                num_devices = len(set(client.run(_device).values()))
            runs[label] = measured(arguments.out / label, axes | changes, preset, client)
    ratios, off = differences(runs["one"], runs["all"])
    found = compared(spans_of(runs["one"]), spans_of(runs["all"]), arguments.warm_up)
    result = {
        "num_workers": len(names),
        "num_devices": num_devices,
        "num_points": len(ratios),
        **found,
        "median_time_ratio": round(float(np.median(list(ratios.values()))), 4),
        "points_off": {name: ratios[name] for name in off},
    }
    print(json.dumps(result, indent=1))
    same = num_devices == len(names) and len(off) <= MOST_OFF * len(ratios)
    return 0 if same and found["throughput_ratio"] >= 0.95 * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
