"""Saved figures: same bytes twice, fonts as text, provenance in every file and in the sidecar, staleness."""

import json
import re
import subprocess
import sys
import zlib

import pytest
from PIL import Image

from labkit import paths
from labkit.errors import InputError
from labkit.plots.attention import figure_attention
from labkit.publish import figures
from labkit.publish.figures import DRAWING_CODE, SavedFigure, save_figure, stale_figures
from tests.synthetic import CPU, attention_rows, write_runs

ELSEWHERE = {"errors.py", "paths.py"}  # imported by what draws; nothing in them shows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, write_runs(folder, CPU, ("attention",))


def draw():
    return figure_attention(attention_rows(CPU), labels={"sdpa": "SDPA <&>"})


@pytest.fixture(scope="module")
def saved(runs, tmp_path_factory) -> SavedFigure:
    return save_figure(draw(), "01_attention", runs[1], out_dir=tmp_path_factory.mktemp("figures"))


def pdf_streams(content: bytes) -> bytes:
    """All streams of a PDF, inflated."""
    raw = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)
    return b"\n".join(zlib.decompressobj().decompress(part) if part[:1] == b"x" else part for part in raw)


def test_same_bytes_twice(runs, saved, tmp_path):
    figure = draw()
    for folder in ("first", "second"):  # also when one figure is saved again
        again = save_figure(figure, "01_attention", runs[1], out_dir=tmp_path / folder)
        for file in (*again, again.sidecar):
            assert file.read_bytes() == saved.sidecar.with_name(file.name).read_bytes(), file.name


def test_a_users_matplotlibrc_changes_nothing(runs, saved, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 14, "pdf.fonttype": 3, "svg.fonttype": "path", "axes.grid": False}):
        again = save_figure(draw(), "01_attention", runs[1], out_dir=tmp_path)
    for file in again:
        assert file.read_bytes() == saved.sidecar.with_name(file.name).read_bytes(), file.name


def test_pdf_has_truetype_fonts_only(saved):
    content = saved.sidecar.with_suffix(".pdf").read_bytes()
    everything = content + pdf_streams(content)
    assert b"/FontFile2" in everything
    assert b"/Type3" not in everything
    assert b"CreationDate" not in everything


def test_svg_text_is_text(saved):
    svg = saved.sidecar.with_suffix(".svg").read_text()
    assert "<text" in svg
    for words in ("context length (tokens)", "per_token", "SDPA &lt;&amp;&gt;", "us per 1K"):
        assert words in svg
    assert "<dc:date>" not in svg


def test_provenance_is_in_every_file(runs, saved):
    record = json.loads(saved.sidecar.read_text())
    assert record.pop("files").keys() == {file.name for file in saved}
    with Image.open(saved.sidecar.with_suffix(".png")) as image:
        assert json.loads(image.text["labkit:provenance"]) == record
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    svg = saved.sidecar.with_suffix(".svg").read_text()
    assert text in svg.replace("&quot;", '"')
    pdf = saved.sidecar.with_suffix(".pdf").read_bytes()
    keywords = re.search(rb"/Keywords \((.*?)\)(?=\s*/|\s*>>)", pdf, re.DOTALL)
    assert keywords
    assert keywords[1].decode("latin-1").replace("\\(", "(").replace("\\)", ")").replace("\\\n", "") == text


def test_sidecar_names_run_device_commit_and_digests(runs, saved):
    record = json.loads(saved.sidecar.read_text())
    (source,) = record["sources"]
    assert source["run_id"] == runs[1][0].stem
    assert source["device"] == "Synthetic device"
    assert source["commit"] == "0" * 40
    assert source["file"] == f"attention/{CPU.gpu}/{source['run_id']}.parquet"
    assert re.fullmatch(r"[0-9a-f]{64}", source["sha256"])
    assert source["versions"].keys() == {"numpy"}
    assert record["code_digest"]
    text = saved.sidecar.read_text()
    assert str(paths.ROOT) not in text
    assert str(runs[0]) not in text
    assert "time" not in record


def test_stale(runs, saved, tmp_path, monkeypatch):
    folder, (run,) = runs
    assert stale_figures(saved.sidecar.parent, runs=folder) == {}
    assert "is gone" in stale_figures(saved.sidecar.parent, runs=tmp_path)["01_attention"]
    monkeypatch.setattr(figures, "DRAWING_CODE", ("plots/style.py",))
    assert stale_figures(saved.sidecar.parent, runs=folder) == {"01_attention": "the drawing code changed"}
    monkeypatch.undo()
    again = save_figure(draw(), "x", [run], formats=("svg",), out_dir=tmp_path)
    again.files[0].write_text("edited")
    assert "not the file" in stale_figures(tmp_path, runs=folder)["x"]


def test_drawing_code_is_everything_that_drawing_imports():
    drawing = sorted(path.stem for path in (paths.ROOT / "labkit/plots").glob("[a-z]*.py"))
    code = f"import sys, labkit.plots.{', labkit.plots.'.join(drawing)}; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT
    ).stdout.split()
    folders = {"labkit.decide", "labkit.steps"}
    modules = {name for name in loaded if name.startswith("labkit.") and name not in folders}
    files = {"/".join(name.split(".")[1:]) + ".py" for name in modules if "plots" not in name}
    assert files - ELSEWHERE | {"plots", "explorer.py", "publish/explorer_rows.py", "publish/figures.py"} == set(
        DRAWING_CODE
    )
    assert "torch" not in loaded
    assert "matplotlib.pyplot" not in loaded


def test_shows_the_png_in_a_notebook(saved):
    bundle, metadata = saved._repr_mimebundle_()
    assert bundle.keys() == {"image/png"}
    assert metadata["image/png"]["width"] == int(7.0 * 130)


def test_figure_shows_itself():
    figure = draw()
    data, metadata = figure._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert metadata == {"width": 910}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formats": ("svg", "jpg")}, "formats: want some of svg, pdf, png; got 'jpg'"),
        ({"name": "a/b"}, "name: want a plain file name"),
        ({"sources": []}, "sources: want the run files"),
    ],
)
def test_bad_input(runs, tmp_path, change, message):
    arguments = {"name": "x", "sources": runs[1], **change}
    with pytest.raises(InputError, match=message):
        save_figure(draw(), arguments.pop("name"), arguments.pop("sources"), out_dir=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []
