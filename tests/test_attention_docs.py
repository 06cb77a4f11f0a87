"""The page on attention: its example works in all the ways it names, and its thresholds are those of the code."""

import re

import pytest

from labkit import paths
from labkit.attention import api, registry
from labkit.attention.inputs import verify_backend
from labkit.cli import main
from labkit.decide import diagnosis
from labkit.experiments.trial import try_backend
from labkit.shapes import AttentionShape

PAGE = (paths.ROOT / "docs" / "attention.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
SMALL = ["context_len=64", "q_len=1,3", "num_rounds=2", "model=tiny"]


@pytest.fixture(autouse=True)
def _same_backends_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE)
    return path


@pytest.mark.parametrize("context_len", [(0, 1), (127, 300)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_example_is_right(file, generator, context_len, dtype):
    assert api.load_backend_file(file) == ["mine"]
    shape = AttentionShape(2, 5, context_len, 6, 2, 64, q_dtype=dtype)
    assert verify_backend("mine", shape, generator=generator) < 0.01


def test_example_from_a_notebook(file):
    api.load_backend_file(file)  # as a cell would: the source is at hand and the name is registered
    found = try_backend("mine", against="sdpa", assignments=SMALL)
    assert found["correct"]
    assert {cell["num_splits"] for cell in found["cells"] if cell["backend"] == "mine"} == {4}


def test_example_from_the_command_line(file, tmp_path, capsys):
    arguments = ["--backend-file", str(file), "--set", *SMALL]
    assert main(["try", "mine", "--against", "sdpa", *arguments]) == 0
    out = tmp_path / "runs"
    assert main(["run", "attention", "--preset", "ci", *arguments, "backend=mine,sdpa", "--out", str(out)]) == 0
    assert "4 ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["JUMP", "RENAMED", "FIXED_SHARE", "HEALTHY", "LINEAR", "FLAT", "MIN_CONTEXTS", "MIN_SPAN"]
)
def test_thresholds_are_named(name):
    assert f"`{name}`" in PAGE
    assert f"`{name}`" in diagnosis.__doc__
    value = getattr(diagnosis, name)
    shown = "half" if value == 0.5 else f"{value:g}"
    (line,) = [line for line in PAGE.splitlines() if f"`{name}`" in line and line.startswith("| ")]
    assert re.search(rf"(?<![\d.]){shown}(?![\d.]\d)", line), f"{name} = {value}"
