"""The notebooks: thin, clean, and running to their answer on stored data from any working directory."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest

from labkit import paths
from labkit.breakeven import breakeven
from labkit.decide.answers import acceptance_answer, attention_answer, breakeven_answer, crossings_table, engine_table
from labkit.errors import InputError
from labkit.publish.batch import run_batch
from labkit.publish.notebook import Session
from tests.step_worlds import CPU_STEPS, step_rows
from tests.synthetic import CPU, acceptance_rows, attention_rows, loop_rows, write_run_of, write_runs

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
PARAMETERS = {"source": "committed", "preset": "cpu", "data_dir": "", "out_dir": "", "figures_dir": ""}
FIGURES = {
    "00_start_here": {"00_breakeven"},
    "01_verify_attention": {"01_attention", "01_over_floor"},
    "02_step_anatomy": {"02_step", "02_pairings", "02_ladder"},
    "03_acceptance": {"03_acceptance", "03_drafters", "03_pareto"},
    "04_breakeven": {"04_breakeven", "04_cause", "04_speedup"},
    "05_draft_length": {"05_draft_length"},
    "06_concurrency": set(),
    "07_engine_truth": set(),
    "08_field_conclusions": set(),
    "09_explorer": {"09_explorer"},
}
ANSWERS = {
    "00_start_here": "verify on per_token: pays in",
    "01_verify_attention": "times the floor of reading keys and values once",
    "02_step_anatomy": "Closure of random:llama-3-8b at batch 1, parts of a forward",
    "03_acceptance": "How many tokens does a verify step yield",
    "04_breakeven": "verify on sdpa: pays in",
    "05_draft_length": "everywhere loses at most",
    "06_concurrency": "only batch 1 was measured here",
    "07_engine_truth": "no step times from inside an engine",
    "08_field_conclusions": "published cases",
    "09_explorer": "verify on per_token: pays in",
}


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_all_are_here():
    assert {path.stem for path in NOTEBOOKS} == set(FIGURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestHygiene:
    def test_thin(self, path):
        lengths = [len(cell.source.splitlines()) for cell in cells(path)]
        assert max(lengths) <= 10
        assert sorted(lengths)[len(lengths) // 2] <= 3
        for cell in cells(path):
            assert not re.search(r"^\s*(def|class|lambda|for|while|try)\b", cell.source, re.MULTILINE), cell.source
            assert "torch" not in cell.source

    def test_no_outputs(self, path):
        assert all(not cell.outputs and cell.execution_count is None for cell in cells(path))

    def test_one_parameters_cell_with_types_and_comments(self, path):
        (cell,) = [cell for cell in cells(path) if "parameters" in cell.metadata.get("tags", [])]
        assert cell is not None
        namespace: dict = {}
        exec(cell.source, namespace)
        assert {name: namespace[name] for name in PARAMETERS} == PARAMETERS
        assert all(re.fullmatch(r"\w+: \w+ = .+  # .+", line) for line in cell.source.splitlines())
        assert nbformat.read(path, as_version=4).cells[1].metadata["tags"] == ["parameters"]

    def test_opens_with_the_question_and_ends_with_the_answer(self, path):
        everything = nbformat.read(path, as_version=4).cells
        title = everything[0].source.splitlines()[0]
        assert title.startswith("# ")
        assert title.endswith("?")
        assert "answer(" in everything[-1].source
        assert everything[-2].source.strip().endswith("## The answer")

    def test_nothing_local_and_no_results_in_the_text(self, path):
        text = path.read_text()
        assert "/home/" not in text
        assert str(paths.ROOT) not in text
        assert not re.search(r"\d+\.\d+ ?x\b|(?<!95 )%", "\n".join(cell.source for cell in cells(path, "markdown")))


def test_nbstripout_agrees():
    keys = "metadata.papermill metadata.widgets metadata.language_info.version"
    keys += " cell.metadata.papermill cell.metadata.execution"
    command = [sys.executable, "-m", "nbstripout", "--verify", "--keep-id", "--extra-keys", keys, *map(str, NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One batch over all notebooks on synthetic runs, started in a folder outside the repository."""
    folder = tmp_path_factory.mktemp("notebooks")
    write_runs(folder / "data", CPU)
    write_run_of(step_rows(CPU_STEPS), folder / "data", CPU, "step")
    (folder / "elsewhere").mkdir()
    # Whoever imports torch meets this one: committed data are read without it.
    (folder / "without" / "torch").mkdir(parents=True)
    (folder / "without" / "torch" / "__init__.py").write_text("raise RuntimeError('a notebook imported torch')\n")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.setenv("LABKIT_DATA", str(folder / "data"))
    # The package is found by import alone; this makes the kernel take the checkout under test.
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(folder / "without"), str(paths.ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    )
    verdicts = run_batch(NOTEBOOKS, out_dir=folder / "out", progress=None)
    monkeypatch.undo()
    return folder / "out", {verdict.notebook: verdict for verdict in verdicts}


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_notebook_runs(batch, name):
    folder, verdicts = batch
    assert verdicts[name].ok, str(verdicts[name])
    executed = cells(folder / verdicts[name].executed)
    printed = "".join(output.text for output in executed[-1].outputs if output.output_type == "stream")
    assert ANSWERS[name] in printed
    for figure in FIGURES[name]:
        for suffix in (".svg", ".pdf", ".png", ".json"):
            assert (folder / "figures" / f"{figure}{suffix}").stat().st_size > 0
        runs = json.loads((folder / "figures" / f"{figure}.json").read_text())["sources"]
        assert {run["gpu"] for run in runs} == {CPU.gpu}
    pictures = [output for cell in executed for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == len(FIGURES[name])
    html = (folder / verdicts[name].html).read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", html)


def test_step_notebook_without_step_data(tmp_path, monkeypatch):
    write_runs(tmp_path / "data", CPU, ("acceptance",))
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(paths.ROOT))
    (verdict,) = run_batch([paths.NOTEBOOKS / "02_step_anatomy.ipynb"], out_dir=tmp_path / "out", progress=None)
    assert verdict.ok, str(verdict)
    executed = cells(tmp_path / "out" / verdict.executed)
    assert "no step data is there yet" in executed[-1].outputs[0].text
    printed = "".join(output.get("text", "") for cell in executed for output in cell.outputs)
    assert "No data of step yet: no runs of step in" in printed


def test_session_takes_one_device(tmp_path, capsys):
    h200 = dataclasses.replace(CPU, gpu="nvidia-h200")
    write_runs(tmp_path, CPU, ("acceptance",))
    frame = acceptance_rows(h200).assign(run_id="20260201T000000Z-dddddd")
    write_run_of(frame, tmp_path, h200, "acceptance")
    assert set(Session(data_dir=str(tmp_path)).rows("acceptance")["gpu"]) == {CPU.gpu}
    assert set(Session(preset="gpu", data_dir=str(tmp_path)).rows("acceptance")["gpu"]) == {"nvidia-h200"}
    assert (
        capsys.readouterr().out
        == "acceptance: 1 run(s) on cpu-amd-epyc, committed\nacceptance: 1 run(s) on nvidia-h200, committed\n"
    )


def test_draft_costs_are_of_the_device_that_timed_the_drafters(tmp_path, capsys):
    h200 = dataclasses.replace(CPU, gpu="nvidia-h200")
    write_runs(tmp_path, CPU, ("loop", "acceptance"))
    session = Session(preset="gpu", data_dir=str(tmp_path))
    greedy = session.rows("acceptance")
    frame = loop_rows(h200).assign(run_id="20260201T000000Z-dddddd")
    write_run_of(frame, tmp_path, h200, "loop")
    assert set(session.draft_costs(greedy)["gpu"]) == {"nvidia-h200"}
    frame.loc[frame["drafter"].notna(), "drafter"] = "another"
    write_run_of(frame, tmp_path, h200, "loop")
    assert set(session.draft_costs(greedy)["gpu"]) == {CPU.gpu}
    assert "1 of these drafters were timed on cpu-amd-epyc" in capsys.readouterr().out


def test_session_measures_when_told_to(tmp_path, monkeypatch):
    (path,) = write_runs(tmp_path, CPU, ("acceptance",))
    asked = []

    def run(preset, *, out_dir):
        asked.append((preset, out_dir))
        return SimpleNamespace(path=path, earlier=())

    monkeypatch.setitem(sys.modules, "labkit.experiments.acceptance", SimpleNamespace(run=run))
    session = Session(source="run", preset="ci", out_dir=str(tmp_path))
    assert len(session.rows("acceptance"))
    assert asked == [("ci", tmp_path)]
    assert session.used == [path]


def test_unknown_source():
    with pytest.raises(InputError, match="source: want one of committed, run; got 'comitted'"):
        Session(source="comitted")


def test_answers_are_computed_from_the_data():
    costs, acceptance = loop_rows(CPU), acceptance_rows(CPU)
    result = breakeven(costs, acceptance, resamples=200)
    text = breakeven_answer(result)
    sdpa = result.cells.loc[result.cells["verify_backend"] == "sdpa", "verdict"]
    assert f"sdpa: pays in {sdpa.eq('pays').sum()} of 12 cells" in text
    found = crossings_table(result)["direction"]
    assert text.count("pays up to") == (found == "pays below").sum() > 0
    assert text.count("undecided around") == (found == "undecided").sum() > 0
    assert "code editing: 2." in acceptance_answer(acceptance)
    assert set(engine_table(acceptance)["engine"]) >= {"labkit", "SGLang"}
    attention = attention_rows(CPU)
    assert "per_token: 8." in attention_answer(attention)
    assert "floor" not in attention_answer(attention)  # the bandwidth is unknown without a sidecar
    never = breakeven(costs, 1.0, resamples=200)
    assert crossings_table(never).empty
