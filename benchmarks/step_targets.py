"""Whole steps against a real engine and against the floor, from the committed runs of one GPU.

    python benchmarks/step_targets.py [DATA]

Prints, for one target: device-busy time of our forwards over the engine's, by context and drafts per step; wall time
of our loop's steps over the engine's; how far apart the runs began; and plain decode over its floor (weights, keys and
values at the run's bandwidth). Of several runs of a cell the newest counts. Engine steps are rows of experiment replay
(record "steps", `engine_steps.py`), which keep every draft; our loop keeps none, and so delivers one token per step.
"""

from __future__ import annotations

import sys

import pandas as pd

from labkit.paths import RUNS
from labkit.results import load_runs, load_sidecars

TARGET, BACKEND = "llama-3-8b", "triton_split"


def newest(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Rows of the newest run of each cell."""
    return rows[rows["run_id"] == rows.groupby(keys)["run_id"].transform("max")]


def hours_apart(run: str, other: str) -> float:
    """Between the starts of two runs, from their names."""
    begun = [pd.to_datetime(name.partition("Z")[0], format="%Y%m%dT%H%M%S") for name in (run, other)]
    return abs((begun[0] - begun[1]).total_seconds()) / 3600


def main() -> None:
    """Read the runs and print the tables."""
    roots = sys.argv[1:] or [str(RUNS)]
    steps, loop, engine = (load_runs(name, *roots) for name in ("step", "loop", "replay"))
    steps = steps[(steps["status"] == "ok") & (steps["backend"] == BACKEND) & steps["drafter"].isna()]
    steps = steps[(steps["weight_dtype"] == "bfloat16") & (steps["kv_dtype"] == "bfloat16")]
    steps = steps[(steps["num_gpus"] == 1) & (steps["batch_size"] == 1) & (steps["phase"] != "prefill")]
    steps = newest(steps, ["target", "context_len", "q_len"])
    keys = ["context_len", "q_len"]
    forwards = steps[steps["target"] == f"random:{TARGET}"].groupby(keys)
    forward_ms, forward_run = forwards["forward_ms"].median(), forwards["run_id"].first()

    engine = engine[(engine["status"] == "ok") & (engine["record"] == "steps") & (engine["batch_size"] == 1)]
    keys = ["endpoint", "context_len", "num_speculative_tokens"]
    engine = newest(engine, keys)
    cells = engine.explode("step_times_ms").astype({"step_times_ms": float}).groupby(keys)

    own = loop[(loop["status"] == "ok") & (loop["target"] == f"random:{TARGET}") & (loop["batch_size"] == 1)]
    own = own[own["decode_backend"].fillna(own["verify_backend"]) == BACKEND]
    keys = ["context_len", "arm", "num_drafted_tokens"]
    ours = newest(own, keys).groupby(keys)
    ours_ms, ours_run = ours["step_ms"].median(), ours["run_id"].first()
    records = []
    for (endpoint, context_len, k), cell in cells:
        busy, wall, run = cell["device_busy_ms"].median(), cell["step_times_ms"].median(), cell["run_id"].iloc[0]
        record = {"engine": endpoint, "context_len": int(context_len), "k": int(k)}
        if (forward := (context_len, k + 1)) in forward_ms:
            record |= {"device_ms": forward_ms[forward], "engine_device_ms": busy}
            record |= {"device_ratio": forward_ms[forward] / busy, "hours": hours_apart(forward_run[forward], run)}
        if (step := (context_len, *(("speculative", k) if k else ("plain", 0)))) in ours_ms:
            record |= {"wall_ms": ours_ms[step], "engine_wall_ms": wall}
            record |= {"wall_ratio": ours_ms[step] / wall, "hours_wall": hours_apart(ours_run[step], run)}
        records.append(record)
    print(pd.DataFrame(records).round(3).to_string(index=False))

    rates = {run: sidecar["calibration"]["read_gb_per_s"] for run, sidecar in load_sidecars("step", *roots).items()}
    plain = steps[steps["phase"] == "decode"]
    floor_ms = (plain["weight_bytes_read"] + plain["kv_bytes_read"]) / plain["run_id"].map(rates) / 1e6
    share = (floor_ms / plain["forward_ms"]).groupby([plain["target"], plain["context_len"]]).median()
    print("\nplain decode: floor over time, by target and context")
    print(share.unstack().round(3).to_string())


if __name__ == "__main__":
    main()
