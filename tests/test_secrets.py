"""Keys, tokens, home folders, user and host names are planted and searched for in everything that is written."""

import json
import os
import socket
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pyarrow.parquet as pq
import pytest

from labkit.cli import main
from labkit.errors import InputError
from labkit.provenance import collect, redact
from labkit.publish.notebook_run import run_notebook
from labkit.sweep import run_sweep
from tests import sweep_points

USER, HOST, HOME = "jdoepersona", "nodename4711", "/home/jdoepersona"
TOKENS = {
    "OPENAI_API_KEY": "sk-proj-PLANTEDabcdefghijkl0123456789",
    "HF_TOKEN": "hf_PLANTEDabcdefghijklmnopqrstuv",
    "GH_TOKEN": "ghp_PLANTEDabcdefghijklmnopqrstuvwx",
    "CLUSTER_PASSWORD": "PLANTED.correct!horse7",
    "SESSION_SECRET": "PLANTEDwithoutanyprefix",
    "AUTH": "Bearer PLANTEDbearervalue0123456789",
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJQTEFOVEVEIjoxfQ.PLANTEDsignature",
    "URL": "https://jane:PLANTEDpass@example.org/v1",
}
LEAKS = (*TOKENS.values(), *(v.split()[-1] for v in TOKENS.values()), "PLANTED", USER, HOST, "persona", "nodename")
EVERYTHING = f"{HOME}/models/x on {HOST} by {USER}: " + " ".join(f"{n}={v}" for n, v in TOKENS.items())


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, HOME if name == "HOME" else USER)
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: f"{HOST}.cluster.example")
    monkeypatch.setattr("sys.argv", ["labkit", "run", "--api-key", TOKENS["OPENAI_API_KEY"], "--out", f"{HOME}/runs"])


def leaks(content: bytes | str) -> list[str]:
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    return [leak for leak in LEAKS if leak in text]


def leaks_below(folder: Path) -> dict[str, list[str]]:
    """File -> what was found in its bytes, its name, and, of a Parquet file, its values and metadata."""
    found = {}
    for path in folder.rglob("*"):
        texts: list[bytes | str] = [path.name]
        if path.is_file():
            texts.append(path.read_bytes())
            if path.suffix == ".parquet":
                table = pq.read_table(path)
                texts += [json.dumps(table.to_pylist()), str(table.schema.metadata)]
        found[str(path)] = [leak for text in texts for leak in leaks(text)]
    return {name: own for name, own in found.items() if own}


def test_the_search_finds_what_is_planted(tmp_path):
    (tmp_path / "file").write_text(EVERYTHING)
    assert set(leaks_below(tmp_path)[str(tmp_path / "file")]) >= {*TOKENS.values(), USER, HOST}


def test_a_text_is_redacted_once_and_for_all():
    clean = redact(EVERYTHING)
    assert leaks(clean) == []
    assert redact(clean) == clean
    value = {"a": [EVERYTHING, 1, None, {"b": EVERYTHING}], EVERYTHING: 2, "image/png": "hf_PLANTEDpicture00000"}
    assert leaks(json.dumps(redact(value) | {"image/png": ""})) == []
    assert redact(value)["image/png"] == value["image/png"]


def leaky(point: dict) -> list[dict]:
    """Samples, or an error, with everything in them that should not be there."""
    print(EVERYTHING)
    if point["context_len"] == 1:
        raise RuntimeError(EVERYTHING)
    return [row | {"prompt_id": EVERYTHING, "linear_backend": EVERYTHING} for row in sweep_points.rows(point)]


@pytest.mark.parametrize("executor", ["in-process", "local"])
def test_rows_sidecars_and_journals(tmp_path, capfd, executor):
    points = [{"context_len": n, "batch_size": 1} for n in range(2)]
    options = {"experiment": "loop", "local": {"model_dir": f"{HOME}/x"}, "executor": executor, "progress": False}
    result = run_sweep(points, leaky, out_dir=tmp_path, provenance=collect("cpu"), **options)
    assert result.counts == {"error": 1, "ok": 1}
    assert leaks_below(tmp_path) == {}
    assert leaks(capfd.readouterr().err) == []


def test_a_point_with_a_secret_is_refused(tmp_path):
    for value in (f"{HOME}/models/x", [TOKENS["HF_TOKEN"]]):
        points = [{"context_len": 1, "batch_size": 1, "where": value}]
        with pytest.raises(InputError, match="points: where holds a home folder, a name or a secret") as error:
            run_sweep(points, leaky, experiment="loop", out_dir=tmp_path, executor="in-process")
        assert leaks(str(error.value)) == []
    assert not any(tmp_path.rglob("*"))


def test_executed_notebooks_their_html_and_the_record_of_the_run(tmp_path):
    cell = "import os, sys, pathlib\nprint(os.environ['HF_TOKEN'], pathlib.Path.home() / 'x')\n"
    cell += "print(os.environ['CLUSTER_PASSWORD'], file=sys.stderr)\nraise RuntimeError(os.environ['OPENAI_API_KEY'])"
    source = tmp_path / "source" / "leaky.ipynb"
    source.parent.mkdir()
    meta = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)], metadata=meta), source)
    said: list[str] = []
    verdict = run_notebook(source, {}, out_dir=tmp_path / "out", say=said.append)
    assert verdict.status == "cell-error"
    assert verdict.html
    assert leaks_below(tmp_path / "out") == {}
    assert leaks("\n".join(said)) == []


def test_figures_and_their_records(tmp_path):
    from labkit.publish.figures import save_figure
    from tests.test_results import write

    path = write(tmp_path / USER)
    fig, _ = plt.subplots()
    save_figure(fig, "figure", [path], out_dir=tmp_path / "figures")
    plt.close(fig)
    assert len(list((tmp_path / "figures").iterdir())) == 4
    assert leaks_below(tmp_path / "figures") == {}


LOG = f"""\
INFO 11-30 10:00:00 [api_server.py] args: Namespace(model='{HOME}/llama', api_key='{TOKENS["SESSION_SECRET"]}')
INFO 11-30 10:00:01 [loggers.py] Engine 000: Avg prompt throughput: 0.0 tokens/s, \
Avg generation throughput: 100.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, \
Prefix cache hit rate: 0.0%
INFO 11-30 10:00:02 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 2.50, \
Accepted throughput: 60.00 tokens/s, Drafted throughput: 120.00 tokens/s, Accepted: 600 tokens, \
Drafted: 1200 tokens, Per-position acceptance rate: 0.800, 0.450, 0.250, Avg Draft acceptance rate: 50.0%
"""


@pytest.mark.parametrize("words", [["import"], ["import", "--json"], ["diagnose"], ["diagnose", "--json"]])
def test_what_is_read_from_logs(tmp_path, capsys, monkeypatch, words):
    folder = tmp_path / USER
    folder.mkdir()
    (folder / "server.log").write_text(LOG)
    monkeypatch.chdir(tmp_path)
    more = ["--out", "out"] if words[0] == "import" else []
    assert main([words[0], f"{USER}/server.log", *words[1:], *more]) == 0
    said = capsys.readouterr()
    assert "2.5" in said.out
    assert leaks(said.out + said.err) == []
    assert leaks_below(tmp_path / "out") == {} if more else True


def test_messages_of_the_command_line(capsys):
    assert main(["check", f"{HOME}/gone"]) == 2
    assert leaks(capsys.readouterr().err) == []
    assert os.environ["HOME"] == HOME


def test_a_count_per_token_is_no_secret():
    text = "229,376 bytes per token = 210,641 tokens"
    assert redact(text) == text
    assert redact("token = abc123") == "token = <secret>"
