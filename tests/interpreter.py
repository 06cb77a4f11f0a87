"""Triton's interpreter must be on before Triton is imported: a test file runs its kernels in a child process."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from labkit.engines.roles import version_key
from labkit.paths import ROOT

IS_CHILD = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_CHILD, reason="runs in the child process of test_under_the_interpreter")


def assert_passes_interpreted(file: str) -> None:
    """Run a test file again under the interpreter; skipped inside it, and where the interpreter itself cannot run."""
    if IS_CHILD:
        pytest.skip("is the child")
    if version_key(version("triton")) < version_key("3.7") and version_key(version("numpy")) >= version_key("2.4"):
        pytest.skip("Triton 3.6's interpreter makes scalars of arrays, which NumPy 2.4 refuses")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
