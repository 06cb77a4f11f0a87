"""Mutated inputs: a slice here, 100,000 per reader in `make soak`; inputs that once failed are read ever after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import CASES, TARGETS, attempt, fuzz

ROOT = Path(__file__).parent.parent
SLICE = {"importer": 150, "trace": 150, "run": 100, "grid": 300, "gguf": 300}


@pytest.mark.parametrize("target", TARGETS)
def test_a_slice(target):
    assert fuzz(target, SLICE[target], seed=0) == []


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir() if "-" in path.name))
def test_what_once_failed(case, tmp_path):
    assert attempt(case.partition("-")[0], (CASES / case).read_bytes(), tmp_path) is None


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_a_hundred_thousand(target):
    seed = str(int.from_bytes(os.urandom(3)))  # another one each time; a process of its own may crash alone
    command = [sys.executable, "-m", "tests.fuzzing", target, "100000", seed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
