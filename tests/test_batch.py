"""Verdicts of the batch runner on tiny generated notebooks, one per way a run can end."""

import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.errors import InputError
from labkit.paths import ROOT
from labkit.publish.batch import PRESETS, failed, preset_parameters, run_batch
from labkit.publish.notebook_run import Verdict

PARAMETERS = 'source: str = "committed"  # or "run"\nout_dir: str = ""  # measured data'


def write_notebook(path: Path, *sources: str) -> Path:
    cells = [new_markdown_cell("# a question"), new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One batch over every way to end; the kernels overlap, so the module costs little more than its slowest one."""
    folder = tmp_path_factory.mktemp("batch")
    notebooks = [
        write_notebook(
            folder / "good.ipynb",
            "import os; print(os.environ['PYTHONPATH'])",
            "import sys; print('answer', source, os.environ['LABKIT_BATCH']); print('step 1/2', file=sys.stderr)",
            "from pathlib import Path; print(Path.cwd().name)",
        ),
        write_notebook(folder / "raises.ipynb", "x = 1", "raise KeyError('no such column')", "x"),
        write_notebook(folder / "killed.ipynb", "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)", "1"),
        write_notebook(folder / "slow.ipynb", "import time", "time.sleep(60)"),
        write_notebook(folder / "leaves.ipynb", "import sys", "sys.exit(0)", "1"),
    ]
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        assert Path.cwd() == here  # kernels of other notebooks start meanwhile; the process stays where it is

    here = Path.cwd()
    verdicts = run_batch(notebooks, out_dir=folder / "out", timeout_s=4, progress=say)
    return folder, {verdict.notebook: verdict for verdict in verdicts}, lines


@pytest.mark.parametrize(
    ("name", "status", "error_name", "cell"),
    [
        ("good", "ok", "", None),
        ("raises", "cell-error", "KeyError", 4),
        ("killed", "kernel-died", "DeadKernelError", 4),
        ("slow", "timeout", "CellTimeoutError", 4),
        ("leaves", "cell-error", "SystemExit", 4),
    ],
)
def test_verdict(batch, name, status, error_name, cell):
    folder, verdicts, _ = batch
    verdict = verdicts[name]
    assert (verdict.status, verdict.error_name, verdict.cell) == (status, error_name, cell)
    assert verdict.status in ("ok", "cell-error", "timeout", "kernel-died")
    # Cell 2 holds the injected parameters, so the second own cell is the fourth code cell of the executed copy.
    executed = nbformat.read(folder / "out" / verdict.executed, as_version=4)
    assert len([c for c in executed.cells if c.cell_type == "code"]) >= 4
    record = json.loads((folder / "out" / name / "run.json").read_text())
    assert record["status"] == status
    assert record["notebook_sha256"]
    assert not list((folder / "out").rglob("*.tmp"))


def test_error_message_and_first_outputs_are_kept(batch):
    folder, verdicts, _ = batch
    assert "no such column" in verdicts["raises"].error_value
    assert "no such column" in (folder / "out/raises/raises.html").read_text()


def test_batch_fails_at_the_end_and_says_which(batch):
    folder, verdicts, lines = batch
    assert set(failed(list(verdicts.values()))) == {"raises", "killed", "slow", "leaves"}
    assert json.loads((folder / "out/batch.json").read_text())["status"] == "failed"
    assert lines[-2].startswith("report: ")
    assert lines[-1].startswith("1 of 5 notebooks ok; failed: ")
    assert sum("started" in line for line in lines) == 5


def test_report_holds_verdicts_answers_and_commands(batch):
    folder, _, lines = batch
    report = (folder / "out/report.html").read_text()
    assert f"report: {folder / 'out/report.html'}" in lines
    for name, status in {"good": "ok", "raises": "cell-error", "killed": "kernel-died", "slow": "timeout"}.items():
        assert re.search(rf"<td>{name}</td><td>{status}</td>", report)
    assert "no such column" in report
    assert f"<pre>{folder.name}\n</pre>" in report  # what the last cell printed
    assert re.search(
        r"papermill --cwd notebooks notebooks/good.ipynb copy.ipynb -r out_dir \S+ -r source committed", report
    )
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", report)


def test_what_is_timed_runs_one_at_a_time(tmp_path, monkeypatch):
    from labkit.publish import batch as module

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    running, most = [], []

    def run_notebook(source, values, *, out_dir, timeout_s, say):
        running.append(source.stem)
        most.append(len(running))
        time.sleep(0.15)
        running.remove(source.stem)
        out_dir.mkdir(parents=True)
        (out_dir / "run.json").write_text('{"parameters": {}}')
        return Verdict(source.stem, "ok", 0.1)

    monkeypatch.setattr(module, "run_notebook", run_notebook)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    notebooks = [write_notebook(tmp_path / f"{name}.ipynb", "1") for name in "abcd"]
    for preset, at_once in {"committed": 4, "cpu": 1}.items():
        most.clear()
        verdicts = module.run_batch(notebooks, preset=preset, out_dir=tmp_path / preset, progress=None)
        assert [verdict.notebook for verdict in verdicts] == list("abcd")
        assert max(most) == at_once


def test_two_batches_do_not_time_on_one_device_together(tmp_path, monkeypatch):
    import fcntl

    from labkit.publish.batch import _device_lock

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    said = []
    with (tmp_path / "batch-cuda.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def say(line):
            said.append(line)
            fcntl.flock(other, fcntl.LOCK_UN)

        with _device_lock("gpu", say), _device_lock("cpu", say):
            pass
    assert said == ["waiting for another batch that times on this device"]


def test_progress_carries_what_a_notebook_prints(batch):
    _, _, lines = batch
    assert any(line.endswith("good | answer committed 1") for line in lines)
    # Kernels import this checkout, not what their environment has installed.
    assert any(f"good | {ROOT}" in line for line in lines)
    assert any(line.endswith("good | step 1/2") for line in lines)


def test_runs_in_the_notebooks_folder_with_typed_parameters(batch):
    folder, _, lines = batch
    assert any(line.endswith(f"good | {folder.name}") for line in lines)
    used = json.loads((folder / "out/good/run.json").read_text())["parameters"]
    assert used == {
        "source": "committed",
        "out_dir": str(folder / "out/runs"),
    }  # figures_dir and preset are not declared


def test_html_asks_nothing_of_the_network(batch):
    folder, _, _ = batch
    html = (folder / "out/good/good.html").read_text()
    assert "answer" in html
    outside = re.findall(
        r"""(?:src|href)\s*=\s*["'](?:https?:)?//[^"']*|@import[^;]*//|import\(?\s*["']https?:[^"']*""", html
    )
    assert outside == []
    assert "cdn" not in html


def test_presets():
    assert set(PRESETS) == {"cpu", "gpu", "ci", "committed"}
    assert preset_parameters("committed")["source"] == "committed"
    assert preset_parameters("gpu") == {"source": "run", "preset": "gpu"}


def test_verdict_reads_as_one_line():
    line = str(Verdict("03_acceptance", "cell-error", 3.2, "KeyError", "'workload'\nmore", 7))
    assert "cell-error in cell 7, 3.2 s KeyError: 'workload'" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"preset": "fast"}, "preset: want one of committed, cpu, gpu, ci, auto; got 'fast'"),
        ({"parameters": {"sorce": "run"}}, "no notebook declares sorce"),
        ({"notebooks": ["missing.ipynb"]}, "no such file"),
        ({"notebooks": []}, "at least one"),
    ],
)
def test_bad_input(tmp_path, kwargs, message):
    arguments = {
        "notebooks": [write_notebook(tmp_path / "a.ipynb", "1")],
        "out_dir": tmp_path / "out",
        **kwargs,
    }
    with pytest.raises(InputError, match=message):
        run_batch(arguments.pop("notebooks"), progress=None, **arguments)


def test_broken_and_doubled_files(tmp_path):
    broken = tmp_path / "broken.ipynb"
    broken.write_text("{not json")
    with pytest.raises(InputError, match="not a notebook"):
        run_batch([broken], out_dir=tmp_path / "out", progress=None)
    (tmp_path / "sub").mkdir()
    twins = [write_notebook(tmp_path / "a.ipynb", "1"), write_notebook(tmp_path / "sub/a.ipynb", "1")]
    with pytest.raises(InputError, match="names must differ"):
        run_batch(twins, out_dir=tmp_path / "out", progress=None)
