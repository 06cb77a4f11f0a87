"""`labkit import` and `labkit diagnose`: arguments to calls, results to text, JSON and files."""

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.engines import recipes, roles
from labkit.engines.diagnose import Diagnosis, diagnose, render
from labkit.engines.importing import Reader, import_files, summary
from labkit.engines.record import Record
from labkit.engines.trace import is_trace, read_steps
from labkit.errors import InputError
from labkit.progress import say

MAX_PAGE_BYTES = 8 << 20
_PAGES = ("/get_server_info", "/server_info", "/metrics")


def run_import(arguments: argparse.Namespace) -> None:
    """Import files; records and steps are streamed, so a long log takes no memory."""
    traces = [path for path in arguments.files if is_trace(path)]
    logs = [path for path in arguments.files if path not in traces]
    reader = Reader(arguments.engine)
    items = _items(traces, import_files(logs, reader=reader), reader)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        items = _written(items, arguments.out / ("steps.jsonl" if traces else "import.jsonl"))
    if arguments.json:
        print("[", end="")
        for i, item in enumerate(items):
            print(
                ",\n " if i else "\n ", json.dumps(item if isinstance(item, dict) else item.to_dict()), sep="", end=""
            )
        print("\n]")
    elif traces:
        print("\n".join(_step_line(item) for item in items if isinstance(item, dict)))
    else:
        print(summary(item for item in items if isinstance(item, Record)))
    for note in reader.notes:
        say(note)


def _items(traces: list[str], records: Iterator[Record], reader: Reader) -> Iterator[Record | dict[str, Any]]:
    for path in traces:
        steps, notes = read_steps(path)
        reader.notes += [f"{path}: {note}" for note in notes]
        yield from steps
    yield from records


def _written(items: Iterator[Record | dict[str, Any]], path: Path) -> Iterator[Record | dict[str, Any]]:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        for item in items:
            file.write(json.dumps(item if isinstance(item, dict) else item.to_dict()) + "\n")
            yield item
    temporary.replace(path)


def _step_line(step: dict[str, Any]) -> str:
    parts = [
        f"{name} {part['forward_ms']:.3f} (attention {part['attention_ms']:.3f})"
        for name, part in step["phases"].items()
    ]
    return f"step {step['step_index']}: {step['step_ms']:.3f} ms = {' + '.join(parts)} + gap {step['gap_ms']:.3f}"


def run_diagnose(arguments: argparse.Namespace) -> int:
    """Diagnose a log, a trace, a launch line, or print a recipe; 1 where a launch line has a mistake."""
    if arguments.launch:
        server, problems = roles.launch_findings(arguments.launch, arguments.engine_version)
        found = roles.resolve_roles(server, arguments.gpu)
        notes = list(roles.launch_notes(server))
        shown = {name: vars(role) for name, role in found.items()}
        content = {"engine": server.engine, "problems": problems, "notes": notes, "roles": shown}
        lines = problems or ["no mistake found"]
        lines = lines + notes + [f"{name}: {role.backend}, {role.how}" for name, role in found.items()]
        if arguments.recipe:
            lines += ["", *recipes.recipe(arguments.recipe, server, arguments.launch)]
        print(json.dumps(content, indent=1) if arguments.json else "\n".join(lines))
        return 1 if problems else 0
    if not arguments.file and not arguments.base_url:
        raise InputError("diagnose: wanted a log or trace, --base-url or --launch")
    if arguments.file and is_trace(arguments.file):
        steps, notes = read_steps(arguments.file)
        print(json.dumps({"steps": steps, "notes": notes}) if arguments.json else "\n".join(map(_step_line, steps)))
        return 0
    reader = Reader()
    with tempfile.TemporaryDirectory() as folder:
        pages = _fetched(arguments.base_url, Path(folder)) if arguments.base_url else []
        result = _diagnosed(reader, [*pages, *([arguments.file] if arguments.file else [])], arguments)
    if arguments.recipe:
        print("\n".join(recipes.recipe(arguments.recipe, reader.server, None)))
    else:
        print(json.dumps(result.to_dict(), indent=1, default=str) if arguments.json else render(result))
    return 0


def _diagnosed(reader: Reader, paths: list[Any], arguments: argparse.Namespace) -> Diagnosis:
    server = reader.server
    records = (record for path in paths for record in reader.read(path, server))
    server.version = arguments.engine_version
    options = {"gpu": arguments.gpu, "model": arguments.model, "kv_dtype": arguments.kv_dtype}
    return diagnose(records, server, **options)


def _fetched(url: str, folder: Path) -> list[Path]:
    """Pages of a running server, those it has. Raises InputError when none answers."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"base-url: wanted http://host:port, got {url!r}")
    found, problem = [], ""
    for page in _PAGES:
        try:
            with urllib.request.urlopen(url.rstrip("/") + page, timeout=3) as answer:
                path = folder / page.strip("/")
                path.write_bytes(answer.read(MAX_PAGE_BYTES))
                found.append(path)
        except (OSError, ValueError) as error:
            problem = str(error)
    if not found:
        raise InputError(f"base-url: no page of {url} answers ({problem}); wanted one of {', '.join(_PAGES)}")
    print(f"read {', '.join(path.name for path in found)}", file=sys.stderr)
    return found
