"""Verdict tables for write-ups: HTML and booktabs LaTeX with intervals, CSV and Parquet of the cells themselves."""

import html
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from labkit import paths
from labkit.breakeven import Breakeven, verdict_table
from labkit.decide.intervals import CONFIDENCE

PAGE = 40  # rows that one page of a write-up holds
FORMATS = ("tex", "html", "csv", "parquet")
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
# In text the default font encoding has other signs in the places of these three.
_LATEX |= {"|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
_DASH = "\u2013"
_STYLE = "border-collapse: collapse; font: 13px sans-serif"


def write_table(result: Breakeven, path: Path) -> Path:
    """Write the verdicts as ``path``: .tex or .html to read, .csv or .parquet for programs (every column of the cells).

    Raises as `labkit.paths.check_out`.
    """
    suffix = paths.check_out(path, FORMATS).suffix.lstrip(".")
    if suffix == "parquet":
        # Snappy: pages of `labkit.publish.page` read it in a browser.
        content = result.cells.to_parquet(compression="snappy", index=False)
    elif suffix == "csv":
        content = result.cells.to_csv(index=False).encode()
    else:
        about = f"baseline: {result.baseline}; {CONFIDENCE:.0%} intervals in brackets, lengths in tokens/step"
        make = latex_table if suffix == "tex" else html_table
        content = make(verdict_table(result.cells), about).encode()
    return paths.write_whole(path, content)


def latex_table(table: pd.DataFrame, caption: str = "") -> str:
    """A booktabs table (``\\usepackage{booktabs}``); texts flush left, numbers and intervals flush right.

    Caption and reasons are notes below. More than ``PAGE`` rows break over pages (``\\usepackage{longtable}``).
    """
    notes = list(dict.fromkeys(note for reason in table.get("reason", ()) for note in reason.split("; ") if note))
    marks = ["" for _ in range(len(table))]
    if notes:
        of_row = (sorted(1 + notes.index(n) for n in reason.split("; ") if n) for reason in table["reason"])
        marks = [rf"\textsuperscript{{{','.join(map(str, found))}}}" if found else "" for found in of_row]
    table = _shown(table.drop(columns="reason", errors="ignore"))
    if "verdict" in table:
        table["verdict"] = table["verdict"].str.replace("_", " ")
    sides = "".join("r" if _is_number(column) else "l" for _, column in table.items())
    rows = [" & ".join(map(_tex, row)) for row in table.itertuples(index=False)]
    head = " & ".join(_tex(str(name).replace("_", " ")) for name in table) + r" \\"
    kind, repeat = ("longtable", [r"\endhead"]) if len(table) > PAGE else ("tabular", [])
    lines = [rf"\begin{{{kind}}}{{{sides}}}", r"\toprule", head, r"\midrule", *repeat]
    lines += [rf"{row}{mark} \\" for row, mark in zip(rows, marks, strict=True)]
    lines += [r"\bottomrule", rf"\end{{{kind}}}"]
    below = [_tex(caption)] if caption else []
    below += [rf"\textsuperscript{{{index}}}~{_tex(note)}" for index, note in enumerate(notes, 1)]
    if below:
        lines += [r"\par\smallskip\noindent", r"\begin{minipage}{\linewidth}\footnotesize\raggedright"]
        lines += ["\\\\\n".join(below), r"\end{minipage}"]
    return "\n".join(lines) + "\n"


def html_table(table: pd.DataFrame, caption: str = "") -> str:
    """A table element that stands on its own, numbers and intervals flush right."""
    table, line = _shown(table), "padding: 2px 10px; border-bottom: 1px solid #ddd; white-space: nowrap"
    looks = [f"text-align: {'right' if _is_number(column) else 'left'}; {line}" for _, column in table.items()]

    def row(tag: str, cells: Iterable[object]) -> str:
        parts = [f'<{tag} style="{look}">{html.escape(str(c))}</{tag}>' for look, c in zip(looks, cells, strict=True)]
        return f"<tr>{''.join(parts)}</tr>"

    lines = [row("th", table.columns), *(row("td", cells) for cells in table.itertuples(index=False))]
    about = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f'<table style="{_STYLE}">{about}\n' + "\n".join(lines) + "\n</table>\n"


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that say something, as texts; a dash is what is missing."""
    texts = table.astype(object).where(table.notna(), _DASH).astype(str)
    return texts[[name for name in texts if not texts[name].isin(["", _DASH]).all()]]


def _is_number(column: pd.Series) -> bool:
    return bool(column.str.match(rf"^[-\d.<>]+( \[.*\])?$|^unknown$|^{_DASH}$").all())


def _tex(text: str) -> str:
    escaped = re.sub(r"[\\~^&%$#_{}|<>]", lambda match: _LATEX[match[0]], text)
    # A bracket at the start of a row would be read as an option of the line break before it.
    return re.sub(r"^\[", "{[}", re.sub(r" \[", r"~[", escaped))
