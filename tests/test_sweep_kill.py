"""kill -9 at random instants: no stored point lost, none doubled, no worker left."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from labkit.check import check_run
from labkit.results import load_runs
from labkit.sweep import point_key
from tests.kill_sweep import points

ROOT = Path(__file__).parent.parent


def run_once(folder: Path, num_points: int, kill_after_s: float | None, kill_from_output: bool) -> list[str]:
    """Start the sweep; its lines up to the kill, which is timed from the start or from the first output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kill_sweep", str(folder), str(num_points)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    lines = []
    killer = threading.Timer(kill_after_s or 0, process.send_signal, [signal.SIGKILL])
    if kill_after_s is not None and not kill_from_output:
        killer.start()
    for line in process.stdout:
        if line.endswith("\n"):  # a torn line acknowledges nothing
            lines.append(line.strip())
        if len(lines) == 1 and kill_after_s is not None and kill_from_output:
            killer.start()
    process.wait(timeout=60)
    killer.cancel()
    return lines


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # dead, only not collected by the init process


def assert_survives_kills(folder: Path, num_kills: int, num_points: int, seed: int) -> None:
    generator = random.Random(seed)
    stored: list[str] = []
    workers: list[int] = []
    runs: set[str] = set()
    hits = 0
    for attempt in range(num_kills + 1):
        early = attempt % 5 == 4  # also while the program starts, reads the journal, writes the first lines
        delay = generator.uniform(0.2, 1.5) if early else generator.uniform(0.0, 0.5)
        lines = run_once(folder, num_points, None if attempt == num_kills else delay, not early)
        words = [line.split(" ", 1) for line in lines]
        hits += not words or words[-1][0] != "finished"
        stored += [rest for word, rest in words if word == "stored"]
        workers += [int(rest) for word, rest in words if word == "worker"]
        runs |= {path.stem for path in folder.rglob("*.jsonl") if path.stat().st_size}
    assert words[-1][0] == "finished"
    assert hits > 0.6 * num_kills  # else the sweep was over too soon for the kills to tell anything

    assert len(runs) == 1
    (journal_path,) = (path for path in folder.rglob("*.jsonl") if path.stem in runs)
    records = [json.loads(line) for line in journal_path.read_text().splitlines()]
    on_disk = Counter(record["point_key"] for record in records if record["kind"] == "point")
    expected = {point_key({"seed": 0, **point}) for point in points(num_points)}
    assert set(stored) <= set(on_disk)
    assert set(on_disk) == expected
    assert set(on_disk.values()) == {1}

    path = journal_path.with_suffix(".parquet")
    rows = load_runs("loop", path)
    assert len(rows) == 3 * num_points
    assert set(rows.status) == {"ok"}
    assert rows.groupby("point_key").size().eq(3).all()
    assert check_run(path) == []
    assert sorted(p.suffix for p in path.parent.iterdir() if p.stem in runs) == [
        ".json",
        ".jsonl",
        ".parquet",
    ]

    for _ in range(50):
        if not any(is_running(pid) for pid in workers):
            break
        time.sleep(0.1)
    assert workers
    assert not [pid for pid in workers if is_running(pid)]


def test_fifteen_kills(tmp_path):
    assert_survives_kills(tmp_path, num_kills=15, num_points=300, seed=1)


@pytest.mark.soak
def test_two_hundred_kills(tmp_path):
    assert_survives_kills(tmp_path, num_kills=200, num_points=6000, seed=2)


def test_a_worker_hanging_in_native_code_dies_with_its_parent(tmp_path):
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from labkit.executor import WorkerProcess; w = WorkerProcess('tests.kill_native:hang');"
        "w.prepare(); print(w._process.pid, flush=True); w.call('tests.kill_native:hang', {}, 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.5)
    assert is_running(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    assert not is_running(pid)


def start(folder: Path, num_points: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kill_sweep", str(folder), str(num_points)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_ctrl_c_ends_the_worker_and_leaves_a_whole_run(tmp_path):
    process = start(tmp_path, 1000)
    assert process.stdout is not None
    worker = int(process.stdout.readline().split()[1])
    while not process.stdout.readline().startswith("stored"):
        pass
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode not in (0, 2)
    assert "interrupted, " in errors
    assert "run again to resume" in errors
    assert not is_running(worker)
    (path,) = tmp_path.rglob("*.parquet")
    assert check_run(path) == []
    assert load_runs("loop", path).point_key.nunique() >= 1 + output.count("stored")


def test_of_two_sweeps_started_at_once_one_is_refused(tmp_path):
    both = [start(tmp_path, 200) for _ in range(2)]
    ends = [(process.communicate(timeout=60), process.returncode) for process in both]
    assert sorted(code for _, code in ends) == [0, 1]
    (errors,) = (errors for (_, errors), code in ends if code)
    assert "another sweep writes this run" in errors.splitlines()[-1]
    (path,) = tmp_path.rglob("*.parquet")
    assert len(load_runs("loop", path)) == 600
