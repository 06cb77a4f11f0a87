"""Whole steps against a real engine and against the floor, from the committed runs of one GPU.

    python benchmarks/step_targets.py [DATA]

Prints, for one target: device-busy time of our forwards over the engine's, by context and drafts per step; wall time of
our loop's steps over the engine's; and plain decode over its floor (weights, keys and values at the run's bandwidth).
Engine steps are rows of experiment replay (record "steps", `engine_steps.py`), which keep every draft; our loop keeps
none, and so delivers one token per step.
"""

from __future__ import annotations

import sys

import pandas as pd

from labkit.paths import RUNS
from labkit.results import load_runs, load_sidecars

TARGET, BACKEND = "llama-3-8b", "triton_split"


def main() -> None:
    """Read the runs and print the tables."""
    roots = sys.argv[1:] or [str(RUNS)]
    steps, loop = (load_runs(name, *roots) for name in ("step", "loop"))
    steps = steps[(steps["status"] == "ok") & (steps["target"] == f"random:{TARGET}") & steps["drafter"].isna()]
    steps = steps[(steps["weight_dtype"] == "bfloat16") & (steps["batch_size"] == 1) & (steps["backend"] == BACKEND)]
    steps = steps[steps["num_gpus"] == 1]
    forward_ms = steps.groupby(["context_len", "q_len"])["forward_ms"].median()

    engine = load_runs("replay", *roots)
    engine = engine[(engine["status"] == "ok") & (engine["record"] == "steps") & (engine["batch_size"] == 1)]
    keys = ["endpoint", "context_len", "num_speculative_tokens"]
    busy_ms = engine.groupby(keys)["device_busy_ms"].median()
    wall_ms = engine.explode("step_times_ms").astype({"step_times_ms": float}).groupby(keys)["step_times_ms"].median()

    own = loop[(loop["status"] == "ok") & (loop["target"] == f"random:{TARGET}") & (loop["batch_size"] == 1)]
    own = own[own["decode_backend"].fillna(own["verify_backend"]) == BACKEND]
    ours_ms = own.groupby(["context_len", "arm", "num_drafted_tokens"])["step_ms"].median()
    records = []
    for (endpoint, context_len, k), busy in busy_ms.items():
        arm = ("speculative", k) if k else ("plain", 0)
        record = {"engine": endpoint, "context_len": int(context_len), "k": int(k)}
        if (context_len, k + 1) in forward_ms:
            record |= {"device_ms": forward_ms[context_len, k + 1], "engine_device_ms": busy}
            record["device_ratio"] = record["device_ms"] / busy
        if (context_len, *arm) in ours_ms:
            record |= {"wall_ms": ours_ms[context_len, *arm], "engine_wall_ms": wall_ms[endpoint, context_len, k]}
            record["wall_ratio"] = record["wall_ms"] / record["engine_wall_ms"]
        records.append(record)
    print(pd.DataFrame(records).round(3).to_string(index=False))

    rates = {run: sidecar["calibration"]["read_gb_per_s"] for run, sidecar in load_sidecars("step", *roots).items()}
    plain = steps[steps["phase"] == "decode"]
    floor_ms = (plain["weight_bytes_read"] + plain["kv_bytes_read"]) / plain["run_id"].map(rates) / 1e6
    share = (floor_ms / plain["forward_ms"]).groupby(plain["context_len"]).median()
    print("\nplain decode: floor over time, by context")
    print(share.round(3).to_string())


if __name__ == "__main__":
    main()
