"""`labkit try`: right and wrong backends, the matrix, ratios, JSON, bad input."""

import json
import math
import time
from pathlib import Path

import pytest

from labkit.attention import api, registry
from labkit.attention.api import register_backend
from labkit.cli import main
from labkit.experiments import attention, common, matrix, trial
from labkit.plots.attention_table import attention_table
from labkit.results import load_runs

RIGHT = """
from labkit.attention.reference import oracle

NAME = "mine"

def supports(shape, device):
    return "" if shape.q_len < 17 else "needs q_len below 17"

def prepare(q, cache, spec):
    def run(q, layer, out, lse):
        result, sums = oracle(q, cache, layer, spec)
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
    return run, {"resolved_kernel": "mine", "num_programs": 7, "num_splits": 2, "kv_passes": 1}
"""
# One request too many walks the first request's pages.
WRONG = RIGHT.replace("oracle(q, cache,", "oracle(q, cache.rows([0] if len(q) == 1 else [0, *range(2, len(q)), 1]),")
SMALL = ["--set", "context_len=64,300", "q_len=1,3", "num_rounds=4", "model=tiny"]


@pytest.fixture(autouse=True)
def _same_backends_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))


@pytest.fixture
def backend_file(tmp_path):
    def write(text):
        (tmp_path / "mine.py").write_text(text)
        return ["--backend-file", str(tmp_path / "mine.py")]

    return write


def test_right_backend_with_ratio_structure_and_reasons(capsys, backend_file):
    begin = time.monotonic()
    assert main(["try", "mine", "--against", "sdpa", *backend_file(RIGHT), *SMALL, "--json"]) == 0
    assert time.monotonic() - begin < 30
    found = json.loads(capsys.readouterr().out)
    assert found["correct"]
    assert found["num_right"] == 4
    assert found["unsupported"] == {"needs q_len below 17": 1}
    assert found["read_gb_per_s"] > 0
    assert len(found["cells"]) == 8
    for cell in found["cells"]:
        assert cell["over_floor"] == pytest.approx(cell["attention_us"] / cell["floor_us"])
        if cell["backend"] == "mine":
            assert (cell["num_programs"], cell["num_splits"], cell["kernel"]) == (7, 2, "mine")
            assert cell["ratio_low"] <= cell["ratio"] <= cell["ratio_high"]
        else:
            assert cell["ratio"] is None


def test_text_names_the_numbers(capsys, backend_file):
    assert main(["try", "mine", *backend_file(RIGHT), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "correct on 4 of 4 shapes" in out
    assert "not supported, 1 shapes: needs q_len below 17" in out
    assert "x floor" in out
    assert len([line for line in out.splitlines() if line.endswith("  mine")]) == 4


def test_wrong_backend_is_located_not_timed_and_exit_1(capsys, backend_file):
    assert main(["try", "mine", *backend_file(WRONG), *SMALL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["correct"]
    assert found["cells"] == []
    fault = found["faults"][0]
    assert fault["request"] > 0
    assert {"query_row", "head", "key_tile"} <= set(fault)
    assert "first wrong key tile" in fault["where"]


def test_a_shape_that_is_not_supported_gives_its_reason_in_the_table(capsys, backend_file):
    arguments = ["--set", "context_len=64", "q_len=17", "num_rounds=2", "model=tiny"]
    assert main(["try", "mine", *backend_file(RIGHT), *arguments]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert " unsupported " in line
    assert "needs q_len below 17" in line


def test_nothing_checked_is_not_correct(capsys, backend_file):
    assert main(["try", "mine", *backend_file(RIGHT.replace("< 17", "< 0")), *SMALL]) == 2  # on no machine
    text = RIGHT.replace("shape.q_len < 17", "shape.batch_size == 1 and shape.num_kv_heads == 1")
    assert main(["try", "mine", *backend_file(text), *SMALL]) == 1
    assert "NOT CHECKED" in capsys.readouterr().out


def test_a_kernel_that_ends_its_process_is_reported(capsys, backend_file):
    text = RIGHT.replace("    def run(q, layer, out, lse):", "    def run(q, layer, out, lse):\n        os.abort()")
    assert main(["try", "mine", *backend_file("import os\n" + text), *SMALL]) == 1
    assert "mine: the process that ran it was killed by SIGABRT" in capsys.readouterr().out


def test_a_file_that_exits_and_a_prepare_that_returns_too_little_are_refused(capsys, backend_file):
    assert main(["try", "mine", *backend_file("import sys\nsys.exit(0)"), *SMALL]) == 2
    assert "backend file mine.py failed: SystemExit: 0" in capsys.readouterr().err
    text = RIGHT.partition("    return run, ")[0] + "    return run\n"
    assert main(["try", "mine", *backend_file(text), *SMALL]) == 2
    assert "backend 'mine': prepare must return (run, info)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["nosuch"], "nosuch"),
        (["sdpa", "--against", "nosuch"], "nosuch"),
        (["sdpa", "--against", "sdpa"], "another backend"),
        (["sdpa", "--set", "nosuch=1"], "no such axis"),
        (["sdpa", "--backend-file", "no/such/file.py"], "existing Python file"),
    ],
)
def test_bad_input(capsys, arguments, names):
    assert main(["try", *arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert names in err


def test_the_full_matrix_has_every_size():
    shapes = list(matrix.full_matrix())
    assert {shape.q_len for shape in shapes} == {1, 2, 5, 17, 64}
    assert {max(shape.kv_lens) for shape in shapes} == {1, 127, 128, 4097}
    assert {shape.page_size for shape in shapes} == {1, 16, 64}
    assert {shape.group_size for shape in shapes} == {1, 4, 6, 8}
    assert {shape.head_dim for shape in shapes} == {64, 128, 256}
    assert {shape.batch_size for shape in shapes} == {1, 3}
    assert {(shape.q_dtype, shape.kv_dtype) for shape in shapes} == set(matrix.DTYPES)


def test_full_matrix_reports_reasons_and_stops_after_three_faults(capsys, backend_file, monkeypatch):
    monkeypatch.setattr(matrix, "KV_LENS", (1, 127))
    monkeypatch.setattr(matrix, "HEAD_DIMS", (64,))
    monkeypatch.setattr(matrix, "GROUP_SIZES", (4,))
    found = trial.try_backend("sdpa", full=True, assignments=SMALL[1:])
    assert found["correct"]
    assert "correct on 72 of 72 shapes" in trial.render(found)
    assert "float32, bfloat16, float16" in trial.render(found)  # why float8 keys are not supported
    assert "check sdpa 96/96" in capsys.readouterr().err
    api.load_backend_file(backend_file(WRONG)[1])
    assert trial.render(trial.try_backend("mine", full=True, assignments=SMALL[1:])).count("WRONG") == 3


def test_wrong_only_at_the_timed_size_is_exit_1():
    """Right on the odd shapes, wrong where it is timed."""

    def prepare(q, cache, spec):
        def run(q, layer, out, lse):
            source(q, layer, out, lse)
            if max(cache.context_lens) > 2000:
                out[0, 0, 0] = math.nan

        source, info = registry.lookup("reference").prepare(q, cache, spec)
        return run, info

    register_backend("late", prepare, supports=lambda shape, device: "")
    assignments = ["context_len=64,2048", "q_len=1", "num_rounds=2", "model=tiny"]
    found = trial.try_backend("late", assignments=assignments)
    assert not found["correct"]
    assert [cell["status"] for cell in found["cells"]] == ["ok", "wrong"]
    assert "query row 0" in trial.render(found)


def test_an_edited_backend_alone_is_measured_again_and_its_old_version_stays(tmp_path, backend_file):
    def measure(text):
        axes = {"model": ["tiny"], "context_len": [64, 128], "q_len": [1, 2], "num_rounds": [2]}
        (name, path) = backend_file(text)
        assert name == "--backend-file"
        api.load_backend_file(path)
        points = attention.points("ci", backend=["mine", "sdpa"], **axes)
        return common.sweep("attention", points, out_dir=tmp_path / "runs", backend_file=Path(path), progress=False)

    first = measure(RIGHT)
    assert first.num_measured == 8
    assert measure(RIGHT).num_measured == 0
    edited = measure(RIGHT.replace('"num_programs": 7', '"num_programs": 8'))
    assert edited.run_id != first.run_id
    assert edited.earlier == (first.path,)
    assert edited.counts == {"ok": 4}
    rows = load_runs("attention", edited.path)
    assert set(rows["backend"]) == {"mine"}
    assert set(rows["num_programs"]) == {8}
    table = attention_table(load_runs("attention", edited.path, *edited.earlier))
    mine = table[table["backend"] == "mine"]
    assert mine.groupby("newest")["num_programs"].first().to_dict() == {False: 7, True: 8}
    assert table[table["backend"] == "sdpa"]["newest"].all()
    back = measure(RIGHT)
    assert (back.run_id, back.num_measured) == (first.run_id, 0)
