"""Small scenes, replayed against a local server."""

from dataclasses import replace

import pandas as pd

from labkit.check import check_run
from labkit.replay.run import Options, replay
from labkit.replay.scenes import scene
from labkit.results import load_runs, load_sidecars

FAST = Options(repeats=2, timeout_s=60, sleep=lambda seconds: None)


def small(name: str, **changes):
    """A scene of the table with short prompts and answers."""
    sizes = {"max_tokens": 8, "num_prompts": 2}
    return replace(scene(name), **{**sizes, **changes})


def run(servers, scenes, tmp_path, options=FAST):
    path = replay([server.url for server in servers], scenes, out_dir=tmp_path, options=options)
    assert check_run(path) == []
    return load_runs("replay", path), load_sidecars("replay", path), path


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["record"] == "request") & (rows["stage"] != "warm_up")]
