"""Runs that hold less than was planned: no error, but something a reader of their figures must be told."""

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.check import check_run
from labkit.errors import InputError
from labkit.results import RUN_ID, read_sidecar, run_files


def unmeasured(path: Path) -> Iterator[tuple[str, str]]:
    """File and what it lacks, for every run or journal at the path with fewer points than its plan."""
    files = run_files(path)
    for file in files:
        try:
            sidecar = read_sidecar(file)
            planned, known = int(sidecar["num_points"]), sum(sidecar["counts"].values())
        except (InputError, KeyError, TypeError, AttributeError, ValueError):
            continue  # broken, which the check reports, or made without a plan
        if known < planned:
            yield str(file), f"{planned - known} of {planned} planned points were not measured"
    for journal in sorted(path.rglob("*.jsonl")) if path.is_dir() else ():
        if RUN_ID.fullmatch(journal.stem) and journal.with_suffix(".parquet") not in files:
            yield str(journal), _of_journal(journal)


def _of_journal(journal: Path) -> str:
    planned, keys = "an unknown number of", set[str]()
    for line in journal.read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # torn lines, and those of no point
            record = json.loads(line)
            planned = record["num_points"] if record["kind"] == "header" else planned
            keys.add(record["point_key"])
    return f"interrupted with {len(keys)} of {planned} planned points and no rows; the same command goes on"


def check_command(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str, int]:
    """`labkit check`: 1 where something is wrong; what is merely missing is a note."""
    findings = [finding for path in arguments.paths for finding in check_run(path)]
    notes = [note for path in arguments.paths for note in unmeasured(Path(path))]
    content = [{**vars(finding), "level": "finding"} for finding in findings]
    content += [
        {"file": file, "row": None, "field": "points", "problem": text, "level": "note"} for file, text in notes
    ]
    lines = [str(finding) for finding in findings] or ["no findings"]
    lines += [f"note: {file}: {text}" for file, text in notes]
    return content, "\n".join(lines), int(bool(findings))
