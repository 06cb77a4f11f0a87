"""One HTML file about a batch: verdicts, answers, figures, tables, where the numbers come from, how to repeat it."""

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit import __version__, paths
from labkit.provenance import command_line, redact
from labkit.publish.figures import SavedFigure
from labkit.publish.notebook_run import Verdict

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; border-top: 1px solid #ccc; padding-top: 1em; margin-top: 2em; }
pre { background: #f6f6f6; padding: 0.7em; white-space: pre-wrap; overflow-wrap: anywhere; } img { max-width: 100%; }
table { border-collapse: collapse; font-size: 12px; } .wide { overflow-x: auto; margin: 1em 0; }
th, td { padding: 2px 9px; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 15em; }
th:first-child, td:first-child { text-align: left; } .bad { color: #b3261e; }
"""
_SUMMARY = ("notebook", "status", "cell", "seconds", "error")
_SOURCE = ("file", "device", "driver", "commit", "sha256")


def write_report(folder: Path, verdicts: Sequence[Verdict], *, preset: str, figures_dir: Path) -> Path:
    """Write ``<folder>/report.html`` from what a batch left there; nothing in it is loaded from anywhere else."""
    records = {verdict.notebook: _figures_of(verdict.notebook, figures_dir) for verdict in verdicts}
    parts = [f"<h1>labkit batch, preset {html.escape(preset)}</h1>", _summary(verdicts)]
    for verdict in verdicts:
        parts += [f"<h2>{html.escape(verdict.notebook)}</h2>", *_section(folder, verdict, records[verdict.notebook])]
    sources = {source["run_id"]: source for found in records.values() for _, record in found for source in record}
    digits = {"commit": 12, "sha256": 12}  # whole ones stand in the sidecars of the figures
    rows = [[str(source.get(name) or "unknown")[: digits.get(name)] for name in _SOURCE] for source in sources.values()]
    parts += ["<h2>Where the numbers come from</h2>", _table(_SOURCE, rows) if rows else "<p>No figure was saved.</p>"]
    parts += ["<h2>Commands</h2>", f"<pre>{html.escape(_commands(folder, verdicts))}</pre>"]
    head = f"<title>labkit batch: {html.escape(preset)}</title><style>{_STYLE}</style>"
    page = f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{head}</head><body>{"".join(parts)}'
    return paths.write_whole(folder / "report.html", f"{page}<p>labkit {__version__}</p></body></html>\n".encode())


def _figures_of(notebook: str, folder: Path) -> list[tuple[Path, list[dict[str, Any]]]]:
    """The PNG of each figure of a notebook, and the data runs behind it."""
    found = []
    for sidecar in sorted(folder.glob(f"{notebook.partition('_')[0]}_*.json")):
        png = sidecar.with_suffix(".png")
        if png.exists():
            found.append((png, json.loads(sidecar.read_text(encoding="utf-8"))["sources"]))
    return found


def _summary(verdicts: Sequence[Verdict]) -> str:
    rows = [
        [v.notebook, v.status, str(v.cell or ""), f"{v.seconds:.1f}", f"{v.error_name} {v.error_value}".strip()]
        for v in verdicts
    ]
    return _table(_SUMMARY, rows, bad=[not verdict.ok for verdict in verdicts])


def _section(folder: Path, verdict: Verdict, figures: Sequence[tuple[Path, Any]]) -> list[str]:
    """Answer, figures and tables of one notebook, and links to its copies."""
    outputs = _outputs(folder / verdict.executed) if verdict.executed else []
    links = [
        f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in (verdict.html, verdict.executed) if name
    ]
    printed = ["".join(output["text"]) for cell in outputs[-1:] for output in cell if "text" in output]
    parts = [f"<p>{' · '.join(links)}</p>", *(f"<pre>{html.escape(text)}</pre>" for text in printed)]
    for png, _ in figures:
        data, looks = SavedFigure(png.stem, (png,), png.with_suffix(".json"))._repr_mimebundle_()
        look = " ".join(f'{name}="{html.escape(str(value))}"' for name, value in looks["image/png"].items())
        parts.append(f'<p><img {look} src="data:image/png;base64,{data["image/png"]}"></p>')
    bundles = [output.get("data", {}) for cell in outputs for output in cell]
    texts = ["".join(bundle.get("text/html", "")) for bundle in bundles]
    return parts + [f'<div class="wide">{text}</div>' for text in texts if "<table" in text and "<img" not in text]


def _outputs(executed: Path) -> list[list[Mapping[str, Any]]]:
    """The outputs of each code cell of an executed notebook."""
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells
    return [cell.outputs for cell in cells if cell.cell_type == "code"]


def _commands(folder: Path, verdicts: Sequence[Verdict]) -> str:
    """What was run, and each notebook alone with the same parameters."""
    lines = [command_line(), ""]
    for verdict in verdicts:
        record = json.loads((folder / verdict.notebook / "run.json").read_text(encoding="utf-8"))
        # -r keeps texts as texts; every parameter of these notebooks is one.
        values = " ".join(
            f"-r {name} {shlex.quote(str(value))}" for name, value in sorted(record["parameters"].items())
        )
        lines.append(f"papermill --cwd notebooks notebooks/{verdict.notebook}.ipynb copy.ipynb {values}")
    return redact("\n".join(lines))


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[bool] = ()) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = []
    for index, row in enumerate(rows):
        look = ' class="bad"' if index < len(bad) and bad[index] else ""
        lines.append(f"<tr{look}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
