"""Long inputs: everything is read in bounded memory with progress; a diagnosis reads a stated part of a long log."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from tests.big_logs import LENGTHS, STEP_MS, STEP_MS_PER_1K, write

# ru_maxrss of a child starts at what its parent had: the high-water mark of the process itself does not.
PEAK = """
import sys, time

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
"""
MAIN = (
    PEAK
    + """
from labkit.cli import main
code = main(sys.argv[1:])
print("peak MiB", peak(), "CPU s", round(time.process_time(), 1), file=sys.stderr)
raise SystemExit(code)
"""
)


def labkit(*arguments, stdin=None):
    """Standard output, standard error and the peak memory in MiB of a command."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True)
    line = done.stderr.strip().splitlines()[-1].split()
    return done.stdout, done.stderr, int(line[2])


def check_import(path, count, out, piped):
    """All decode lines arrive as records, in little memory, with progress."""
    if piped:
        with path.open("rb") as file:
            text, error, peak = labkit("import", "-", "--out", out, stdin=file)
    else:
        text, error, peak = labkit("import", path, "--out", out)
    print(path.name, "stdin" if piped else "", error.strip().splitlines()[-1])
    assert f"... {count - 20} more records" in text
    assert peak < 400
    stored = pq.ParquetFile(out / "import.parquet")
    assert stored.metadata.num_rows == count
    lengths = next(stored.iter_batches(5000, columns=["mean_acceptance_length"]))["mean_acceptance_length"].to_pylist()
    assert sorted(set(lengths)) == sorted(float(length) for length, _ in LENGTHS)
    return [line for line in error.splitlines() if line.startswith("read ")]


def test_a_mixed_log_is_read_whole(tmp_path):
    path = tmp_path / "mixed.log"
    assert check_import(path, write(path, 70), tmp_path / "out", piped=False)


@pytest.mark.soak
@pytest.mark.parametrize("way", ["plain", "gz", "stdin"])
def test_one_gigabyte(tmp_path, way):
    path = tmp_path / ("mixed.log.gz" if way == "gz" else "mixed.log")
    count = write(path, 1000)
    progress = check_import(path, count, tmp_path / "out", piped=way == "stdin")
    assert progress or path.stat().st_size < 64 << 20


@pytest.mark.parametrize("way", ["plain", "gz", "stdin"])
def test_a_diagnosis_reads_a_stated_part_of_a_long_log(tmp_path, way):
    path = tmp_path / ("dense.log.gz" if way == "gz" else "dense.log")
    write(path, 36, dense=True)
    if way == "stdin":
        with path.open("rb") as file:
            text, _, _ = labkit("diagnose", "-", "--json", stdin=file)
    else:
        text, _, _ = labkit("diagnose", path, "--json")
    found = json.loads(text)
    (note,) = [warning for warning in found["warnings"] if "MiB were read" in warning]
    assert ("ever fewer" if way == "stdin" else "evenly spread") in note
    read, whole = (int(note.split(": ", 1)[1].split()[i]) for i in (0, 2))
    assert 8 <= read <= 24
    assert whole in (36, 37)
    assert found["slope_ms_per_1k"][0] == pytest.approx(STEP_MS_PER_1K, rel=0.02)
    assert found["intercept_ms"][0] == pytest.approx(STEP_MS, rel=0.02)
    assert found["roles"]["verify"]["backend"] == "triton"
    assert not any("idle" in warning or "starved" in warning for warning in found["warnings"])


def traced(path, num_steps, kernels):
    """A trace of a server under vLLM's ranges: ``num_steps`` of 1.6 ms, each with this many kernels."""
    args = {"grid": [24, 4, 1], "stream": 7, "registers per thread": 128, "est. achieved occupancy %": 30, "device": 0}
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{}], "traceEvents": [\n')
        for i in range(num_steps):
            names = ("forward", 0, 1000), ("sample", 1000, 100), ("draft", 1100, 300)
            events = [
                {
                    "ph": "X",
                    "cat": "gpu_user_annotation",
                    "name": f"gpu_model_runner: {n}",
                    "ts": 1600 * i + t,
                    "dur": d,
                }
                for n, t, d in names
            ]
            events += [
                {"ph": "X", "cat": "kernel", "name": name, "ts": 1600 * i + 1400 * j / kernels, "dur": 1000 / kernels}
                | {"args": args}
                for j in range(kernels)
                for name in ["flash_fwd_splitkv_kernel" if j % 2 else "gemm"]
            ]
            file.write(",\n".join(json.dumps(event, indent=1) for event in events) + ",\n")
        file.write('{"ph": "M", "name": "end"}\n]}')


TRACE = (
    PEAK
    + """
from labkit.engines.trace import read_steps
before = peak()
rows, notes = read_steps(sys.argv[1])
count = sum(row["phase"] == "verify" for row in rows)
print(count, peak() - before, "MiB,", round(time.process_time(), 1), "s", notes)
"""
)


@pytest.mark.parametrize("mib", [16, pytest.param(300, marks=pytest.mark.soak)])
def test_a_long_trace_takes_little_memory(tmp_path, mib):
    path, num_steps = tmp_path / "trace.json", 5 * mib
    traced(path, num_steps, 1000)
    assert path.stat().st_size > mib << 20
    done = subprocess.run([sys.executable, "-c", TRACE, str(path)], capture_output=True, text=True, check=True)
    count, memory, *_ = done.stdout.split()
    print(mib, "MiB:", done.stdout)
    assert int(count) == num_steps - 1
    assert int(memory) < 60 + mib // 8  # 20 bytes a kernel, more while they are put in order
