"""What leaves the workbench: figures by name, tables for write-ups, the page to send."""

import dataclasses
import json
import re
import shutil
import subprocess

import pandas as pd
import pytest

from labkit import paths
from labkit.breakeven import breakeven, verdict_table
from labkit.cli import main
from labkit.errors import InputError
from labkit.publish.named_figures import FIGURES, Request, write_figure
from labkit.publish.page import page_html
from labkit.publish.tables import html_table, latex_table, write_table
from tests.synthetic import CPU, acceptance_rows, loop_rows, write_run_of, write_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publishing")
    write_runs(folder, CPU)
    return folder


@pytest.fixture(scope="module")
def result():
    return breakeven(loop_rows(CPU), acceptance_rows(CPU), resamples=200)


def test_every_figure_by_name(folder, tmp_path, capsys):
    drawn = [name for name in FIGURES if name in ("breakeven", "speedup", "attention", "over_floor", "acceptance")]
    for name in drawn:
        out, named = tmp_path / f"{name}.svg", "prose" if name == "acceptance" else "sdpa"
        assert (
            main(["figure", name, str(folder), "--out", str(out), "--width", "column", "--label", f"{named}=Ours"]) == 0
        )
        svg = out.read_text()
        assert "Ours" in svg
        assert 'width="244.8pt"' in svg  # 3.4 in
        assert json.loads(out.with_suffix(".json").read_text())["sources"]
    assert str(tmp_path / "breakeven.svg") in capsys.readouterr().out


def test_where_selects_rows(folder, tmp_path):
    request = Request([folder], where={"num_speculative_tokens": ["4"], "workload": ["prose"]})
    write_figure("breakeven", tmp_path / "a.svg", request)
    svg = (tmp_path / "a.svg").read_text()
    assert "k = 4" in svg
    assert "code editing" not in svg
    assert main(["figure", "breakeven", str(folder), "--out", str(tmp_path / "b.pdf"), "--where", "k=9"]) == 2


def test_loop_and_step_cells_are_one_table_in_every_command(tmp_path, capsys):
    runs, out, length = paths.RUNS, str(tmp_path / "a.svg"), ["--acceptance-length", "3"]
    kept = ["--where", "target=random:hybrid-27b", "drafter=one layer", "k=7", "context_len=1k,4k", "draft_backend=fa3"]
    assert main(["breakeven", "--cost", str(runs), *length, *kept, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {(cell["drafter"], cell["context_len"]) for cell in cells} == {("one layer", 1024), ("one layer", 4096)}
    assert main(["figure", "breakeven", str(runs), *length, *kept, "--out", out]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert {source["experiment"] for source in record["sources"]} == {"step"}
    both = "drafter=one layer,none (drafting free)"
    assert main(["figure", "breakeven", str(runs), *length, *kept[:2], both, "--out", out]) == 2
    assert "select with --where drafter=" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["breakeven", "speedup", "acceptance"])
def test_of_several_settings_the_default_is_drawn_and_named(name, tmp_path):
    """Two temperatures, drafters and batches: temperature 0, the fuller drafter, where panels run out batch 1."""
    cost, rows = (make(dataclasses.replace(CPU, batch_sizes=(1, 8))) for make in (loop_rows, acceptance_rows))
    other = rows[rows["prompt_id"] == rows["prompt_id"].iloc[0]].assign(drafter="eagle3")
    costs = pd.concat([cost, cost[cost["arm"] == "speculative"].assign(drafter="eagle3")])
    write_run_of(costs, tmp_path, CPU, "loop")
    write_run_of(pd.concat([rows, rows.assign(temperature=1.0), other]), tmp_path, CPU, "acceptance")
    for width in ("column", "text"):
        out = tmp_path / f"{width}.svg"
        assert main(["figure", name, str(tmp_path), "--out", str(out), "--width", width]) == 0
        said = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", out.read_text()))
        assert "of several (--where): drafter ngram, temperature 0" in said
        assert ("batch size 1" in said) == (name != "acceptance")
    # What is asked for is not narrowed.
    asked = ["--where", "temperature=0,1"]
    assert main(["figure", name, str(tmp_path), *asked, "--out", str(tmp_path / "a.svg")]) == 2


@pytest.mark.parametrize("name", ["breakeven", "acceptance"])
def test_the_committed_data_draw_without_a_choice(name, tmp_path):
    assert main(["figure", name, "--width", "column", "--out", str(tmp_path / "a.svg")]) == 0
    assert "of several (--where)" in (tmp_path / "a.svg").read_text()


def test_imposed_length_needs_no_acceptance(folder, tmp_path):
    write_figure("breakeven", tmp_path / "a.svg", Request([folder / "loop"], acceptance_length="2.4,2.1,2.7"))
    assert "imposed 2.4" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--out", "a.pdf"], "figure: want one of breakeven, speedup"),
        (["breakeven", "--out", "a.jpg"], "want a file ending in .svg, .pdf, .png, or .html"),
        (["breakeven", "--out", "a.pdf", "--width", "wide"], "--width: wanted column, text or inches"),
        (["breakeven", "--out", "a.pdf", "--label", "mine"], "--label 'mine': wanted name=value"),
        (["breakeven", "--out", "a.pdf", "--label", "mine=Ours"], "--label mine: not in these rows; known: "),
        (["acceptance", "--out", "a.pdf", "--label", "sdpa=Ours"], "--label sdpa: not in these rows; known: "),
        (["attention", "--out", "a.pdf", "--where", "workload_x=1"], "--where workload_x: not in these rows; known: "),
        (["breakeven", "--out", "a.pdf", "--label", "sdpa=X", "per_token=X"], "--label: 'X' would name several things"),
        (["attention", "--out", "a.pdf", "--acceptance-length", "3"], "--acceptance-length: wanted with breakeven"),
        (["attention", "--out", "a.pdf", "--where", "batch_size=1,4"], "batch_size=1,4: one figure holds one"),
        (
            ["breakeven", "--out", "/dev/null/a.pdf"],
            "--out /dev/null/a.pdf: wanted a folder to write to, got /dev/null",
        ),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    assert main(["figure", name, str(folder), *rest]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_attention_figure_takes_the_asked_batch(tmp_path):
    for batch in ("4", "16"):
        write_figure("attention", tmp_path / f"{batch}.svg", Request([paths.RUNS], where={"batch_size": [batch]}))
        assert f"batch {batch}" in (tmp_path / f"{batch}.svg").read_text()


def test_a_file_that_cannot_be_written_is_named_as_asked(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*/a\.csv: "):
        paths.write_whole(tmp_path / "a.csv", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_latex_table_is_booktabs_with_intervals(result):
    text = latex_table(verdict_table(result.cells), "baseline: fastest")
    lines = text.splitlines()
    assert "baseline: fastest" in text
    assert re.fullmatch(r"\\begin\{tabular\}\{[lr]+\}", lines[0])
    assert [line for line in lines if line in (r"\toprule", r"\midrule", r"\bottomrule")] == [
        *(r"\toprule", r"\midrule", r"\bottomrule"),
    ]
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert len(body) == len(result.cells)
    columns = lines[0].count("l", len(r"\begin{tabular}{")) + lines[0].count("r", len(r"\begin{tabular}{"))
    assert all(line.count(" & ") == columns - 1 and line.endswith(r" \\") for line in body)
    assert r"per\_token" in text
    assert re.search(r"\d\.\d\d~\[\d\.\d\d, \d\.\d\d\]", text)


def test_reasons_and_what_is_missing_are_told_below_the_table():
    table = pd.DataFrame(
        {
            "draft_backend": [None, "sdpa"],
            "speed-up": ["unknown", "1.20 [1.10, 1.30]"],
            "verdict": ["cannot_pay", "pays"],
        }
    )
    text = latex_table(table.assign(reason=["too dear; one round", "one round"]))
    assert text.splitlines()[2:5] == [
        *(r"draft backend & speed-up & verdict \\", r"\midrule"),
        "\N{EN DASH} & unknown & cannot pay\\textsuperscript{1,2} \\\\",
    ]
    assert r"sdpa & 1.20~[1.10, 1.30] & pays\textsuperscript{2} \\" in text
    assert "\\textsuperscript{1}~too dear\\\\\n\\textsuperscript{2}~one round\n" in text
    assert text.startswith(r"\begin{tabular}{lrl}")


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
@pytest.mark.parametrize("copies", [1, 4])
def test_latex_compiles_and_fits_the_page(result, tmp_path, copies):
    table = pd.concat([verdict_table(result.cells)] * copies)
    hostile = table.iloc[:1].assign(verdict="~^\\$|<>", reason="[odd] & {end} 50% #1; a_b")
    (tmp_path / "table.tex").write_text(latex_table(pd.concat([table, hostile]), "95% intervals"), encoding="utf-8")
    packages = r"\usepackage[a4paper,margin=1cm]{geometry}\usepackage{booktabs,longtable}"
    start = rf"\documentclass{{article}}{packages}\begin{{document}}\noindent\scriptsize"
    (tmp_path / "page.tex").write_text(f"{start}\n\\input{{table.tex}}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_tables_escape_what_the_data_hold():
    table = pd.DataFrame({"backend": ["<b>a_b</b> & 50% #1 ~^\\"], "speed-up": ["1.20 [1.10, 1.30]"]})
    assert r"\textless{}b\textgreater{}a\_b" in latex_table(table)
    assert r"\& 50\% \#1 \textasciitilde{}\textasciicircum{}\textbackslash{}" in latex_table(table)
    assert latex_table(pd.DataFrame({"a|b": ["[1"]})).splitlines()[2:5] == [r"a\textbar{}b \\", r"\midrule", r"{[}1 \\"]
    html = html_table(table)
    assert "<b>" not in html
    assert "&lt;b&gt;a_b" in html
    assert html.count("text-align: right") == 2  # the head and the number


@pytest.mark.parametrize("suffix", ["tex", "html", "csv", "parquet"])
def test_breakeven_writes_tables(folder, tmp_path, suffix):
    out = tmp_path / f"cells.{suffix}"
    paths = [str(folder)]
    assert main(["breakeven", "--cost", *paths, "--acceptance", *paths, "--out", str(out)]) == 0
    if suffix in ("csv", "parquet"):
        cells = pd.read_csv(out) if suffix == "csv" else pd.read_parquet(out)
        assert len(cells) == 24
        assert {"relative_step_cost", "speedup_low", "verdict"} <= set(cells)
    else:
        assert "pays" in out.read_text()


def test_table_of_another_kind_is_refused(result, tmp_path):
    with pytest.raises(InputError, match=r"want a file ending in .tex, .html, .csv, .parquet"):
        write_table(result, tmp_path / "a.xlsx")
    with pytest.raises(InputError, match="no such folder"):
        write_table(result, tmp_path / "nowhere" / "a.csv")


def test_page_is_whole_and_asks_nothing_of_the_network(result, folder, tmp_path):
    hostile = breakeven(loop_rows(CPU), acceptance_rows(CPU).replace("prose", "</script><b>"), resamples=200)
    text = page_html(hostile, runs=("20260131T120000Z-aaaaaa",))
    assert text.count("</script>") == 2
    assert "default-src 'none'" in text
    own = re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)=""", own)
    assert "window.vegaEmbed" in text
    assert "20260131T120000Z-aaaaaa" in text
    assert len(text) < 2e6
    saved = write_figure("breakeven", tmp_path / "page.html", Request([folder]))
    assert saved.files[0].read_text().startswith("<!DOCTYPE html>")
