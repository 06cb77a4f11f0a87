"""A journal of 100,000 points: planning, resume and compaction take under 10 s and 1 GB each."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.journal import _line, open_journal
from labkit.plan import keyed_points
from labkit.provenance import collect
from labkit.sweep import grid, run_sweep
from tests import sweep_points

ROOT = Path(__file__).parent.parent
LIMIT_S, LIMIT_BYTES = 10.0, 1 << 30


def phases(folder: Path, num_points: int) -> dict[str, float]:
    """CPU seconds of each phase, and the most memory in bytes, of this process."""
    points, provenance = grid(context_len=list(range(num_points)), batch_size=1), collect("cpu")
    options = {"experiment": "loop", "out_dir": folder, "provenance": provenance, "executor": "in-process"}
    found = {}

    def timed(name: str, **more):
        begin = time.process_time()
        result = run_sweep(points, sweep_points.measure, progress=False, **options, **more)
        found[name] = time.process_time() - begin
        return result

    path = timed("plan", budget_s=0).path.with_suffix(".jsonl")
    with path.open("ab") as file:  # what measuring them would append
        for key, point in keyed_points(points, 0, "").items():
            record = {"kind": "point", "point_key": key, "point": point, "status": "ok", "seconds": 0.1, "fields": {}}
            file.write(_line(record | {"samples": sweep_points.rows(point), "started": "2026-01-01T00:00:00Z"}))
    begin = time.process_time()
    with open_journal(path) as journal:
        assert len(journal.attempts) == num_points
    found["read"] = time.process_time() - begin
    result = timed("resume_and_compact")
    assert result.counts == {"ok": num_points}
    assert timed("resume").num_measured == 0
    found["compact"] = found.pop("resume_and_compact") - found["read"]
    # Not ru_maxrss: a child starts with its parent's, and a test run has loaded much.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return found | {"max_bytes": 1024 * int(peak[1])}


def run(folder: Path, num_points: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.test_sweep_scale", str(folder), str(num_points)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_thousand_points(tmp_path):
    found = run(tmp_path, 2000)
    assert set(found) == {"plan", "read", "resume", "compact", "max_bytes"}
    assert found["max_bytes"] < LIMIT_BYTES


@pytest.mark.soak
def test_a_hundred_thousand_points(tmp_path):
    found = run(tmp_path, 100_000)
    print(found)
    assert found.pop("max_bytes") < LIMIT_BYTES
    assert all(seconds < LIMIT_S for seconds in found.values()), found


if __name__ == "__main__":
    print(json.dumps(phases(Path(sys.argv[1]), int(sys.argv[2]))))
