"""triton_split against the best library of each cell, from a run of `labkit run attention --preset full`.

    python benchmarks/attention_targets.py [RUN.parquet [BACKEND]]

Without a run: the newest that holds the target grid. Prints, per shape and q_len, the ratio of median times with the
interval of resampled rounds, the geometric mean over the 108 cells, the cells whose interval lies wholly above 1.05,
the share of a pure read at 128K tokens, how narrow the intervals are, and how well times repeat in other runs of the
preset. Ratios are taken within the run, whose rounds interleave all backends of a cell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.paths import RUNS

LIBRARIES = ("flashinfer_fa2", "flashinfer_fa3", "flashinfer_auto", "flashinfer_decode", "fa3")
NUM_RESAMPLES = 2000
NUM_POINTS = 1000  # more has only the preset's whole grid


def resampled_medians(samples_ms: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Medians of the resampled rounds; ``picks`` [resamples, rounds] is shared by the backends of a cell."""
    return np.median(samples_ms[picks], axis=1)


def main() -> None:
    """Read the run and print the table."""
    runs = sorted((RUNS / "attention" / "nvidia-h200").glob("*.parquet"))
    whole = [run for run in runs if len(pd.read_parquet(run, columns=["point_key"])["point_key"].unique()) > NUM_POINTS]
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else whole[-1]
    ours = sys.argv[2] if len(sys.argv) > 2 else "triton_split"
    rows = pd.read_parquet(path)
    rows = rows[rows["status"] == "ok"]
    calibration = json.loads(path.with_suffix(".json").read_text())["calibration"]
    generator = np.random.default_rng(0)

    target = rows[~rows["group"].str.contains(":")]  # the first grid of the preset
    cells = []
    for _, cell in target.groupby("group"):
        times = {name: part.sort_values("round")["attention_ms"].to_numpy() for name, part in cell.groupby("backend")}
        best = min((name for name in times if name in LIBRARIES), key=lambda name: float(np.median(times[name])))
        picks = generator.integers(len(times[best]), size=(NUM_RESAMPLES, len(times[best])))
        ratios = resampled_medians(times[ours], picks) / resampled_medians(times[best], picks)
        first = cell.iloc[0]
        heads = f"{first.num_qo_heads}/{first.num_kv_heads}/{first.head_dim}"
        low, high = np.percentile(ratios, [2.5, 97.5])
        ratio = np.median(times[ours]) / np.median(times[best])
        cells.append((heads, first.q_len, int(first.context_len), first.batch_size, best, ratio, low, high))
    table = pd.DataFrame(cells, columns=["heads", "q_len", "context", "batch", "best library", "ratio", "low", "high"])
    with pd.option_context("display.width", 200):
        shown = table.pivot_table(index=["heads", "q_len"], columns=["context", "batch"], values="ratio")
        print(shown.round(3).to_string())
    print(f"\n{path.name}: {len(table)} cells, geometric mean {np.exp(np.log(table['ratio']).mean()):.3f}")
    slower = table[table["low"] > 1.05]
    print(f"wholly above 1.05: {len(slower)} cells")
    print(slower.round(3).to_string(index=False))

    long = rows[(rows["context_len"] == 131072) & (rows["batch_size"] == 1) & (rows["kv_dtype"] == "bfloat16")]
    long = long[long["backend"] == ours]
    medians = long.groupby(["num_qo_heads", "num_kv_heads", "head_dim", "q_len"])["gb_per_s"].median()
    num_bytes = float(long["kv_bytes_read"].median())
    read = calibration["read_spread"]["us"]  # us of a pure, cold read by its bytes
    sizes = np.array(sorted(map(float, read)))
    us = np.interp(num_bytes, sizes, [read[str(int(size))] for size in sizes])
    rate = num_bytes / us / 1e3
    print(f"\nat 128K, batch 1: share of a pure read over as many bytes ({num_bytes / 1e6:.0f} MB: {rate:,.0f} GB/s)")
    print((medians / rate).round(3).unstack("q_len").to_string())
    print("share of the read bandwidth of the run (8.6 GB:", calibration["read_gb_per_s"], "GB/s)")
    print((medians / calibration["read_gb_per_s"]).round(3).unstack("q_len").to_string())

    widths = []
    for _, cell in rows.groupby(["group", "backend"]):
        times_ms = cell["attention_ms"].to_numpy()
        if np.median(times_ms) > 0.02:
            picks = generator.integers(len(times_ms), size=(500, len(times_ms)))
            low, high = np.percentile(resampled_medians(times_ms, picks), [2.5, 97.5])
            widths.append((high - low) / 2 / np.median(times_ms))
    share = np.mean(np.array(widths) <= 0.02)
    print(f"\ninterval half-width at most 2 %: {share:.1%} of {len(widths)} points above 20 us")
    for other in whole:
        if other.name != path.name:
            repeats(path, other)


def repeats(path: Path, other: Path) -> None:
    """Print how far the medians of points above 20 us lie apart in two runs, as they are and over each run's floor."""
    (mine, rate), (theirs, other_rate) = map(medians_ms, (path, other))
    change = (mine / theirs).dropna()
    print(f"\n{len(change)} points of {other.name} again, within 3 %:")
    over_floor = change * rate / other_rate
    print(f"  {((over_floor - 1).abs() <= 0.03).mean():.1%} as time over the run's own read bandwidth")
    print(f"  {((change - 1).abs() <= 0.03).mean():.1%} as time", end="")
    longer = change[theirs > 0.05]
    print(f"; {((longer - 1).abs() <= 0.03).mean():.1%} of the {len(longer)} above 50 us")
    # What a host's clock adds to every sample shows in the short ones.
    offset_ms = (mine - theirs[theirs < 0.05]).median()
    shifted = ((mine - offset_ms) / theirs).dropna()
    share = ((shifted - 1).abs() <= 0.03).mean()
    print(f"  {share:.1%} as time, but for the {1e3 * offset_ms:+.1f} us by which points below 50 us differ (median)")


def medians_ms(path: Path) -> tuple[pd.Series, float]:
    """Median of each point above 20 us, by (group, backend), and the run's read bandwidth."""
    rows = pd.read_parquet(path)
    calibration = json.loads(path.with_suffix(".json").read_text())["calibration"]
    medians = rows[rows["status"] == "ok"].groupby(["group", "backend"])["attention_ms"].median()
    return medians[medians > 0.02], calibration["read_gb_per_s"]


if __name__ == "__main__":
    main()
