"""`labkit import` and `labkit diagnose`: arguments to calls, results to text, JSON and files."""

import argparse
import functools
import itertools
import json
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.engines.diagnose import diagnose, diagnose_trace
from labkit.engines.importing import Reader, import_files
from labkit.engines.recipes import recipe
from labkit.engines.report import render, summary
from labkit.engines.roles import gpu_row, launch_findings, launch_notes, resolve_roles, version_key
from labkit.engines.server import Server, parse_launch
from labkit.engines.stored import write
from labkit.engines.tables import read_table
from labkit.engines.trace import is_trace, read_steps
from labkit.errors import InputError
from labkit.progress import say
from labkit.provenance import redact, redactor
from labkit.results import RUN_ID, load_runs, load_sidecars
from labkit.rows import plain_record

MAX_PAGE_BYTES = 8 << 20
KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "half", "fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn")
_TEXTS = ("engine_version", "model", "warnings")
_PAGES = ("/get_server_info", "/server_info", "/metrics")


def run_import(arguments: argparse.Namespace) -> None:
    """Import files; records and steps are streamed, so a long log takes no memory."""
    reader, clean = Reader(arguments.engine), redactor()
    roles = functools.cache(lambda backends: clean(dict(backends)))  # the same for most records

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return clean(item)
        file, mark, line = item.place.rpartition(":")  # the other fields hold numbers and words of our tables
        texts = {name: clean(value) for name in _TEXTS if (value := getattr(item, name))}
        texts |= {"backend": roles(tuple(item.backend.items()))} if item.backend else {}
        details = {n: clean(x) if isinstance(x, str | list | dict) else x for n, x in item.details.items()}
        return item.to_dict() | texts | {"details": details, "place": f"{clean(file)}{mark}{line}"}

    traces = [path for path in arguments.files if is_trace(path)]
    logs = [path for path in arguments.files if path not in traces]
    steps, records = _steps(traces, reader), import_files(logs, reader=reader)
    if arguments.out:
        steps = write(steps, arguments.out / "steps.parquet", plain) if traces else steps
        records = write(records, arguments.out / "import.parquet", plain) if logs else records
    if arguments.json:
        for i, item in enumerate(itertools.chain(steps, records)):
            print(",\n " if i else "[\n ", json.dumps(plain(item)), sep="", end="")
        print("\n]")
    else:
        print(*map(_step_line, steps), *([redact(summary(records))] if logs else []), sep="\n")
    for note in reader.notes:
        say(note)


def _steps(traces: list[str], reader: Reader) -> Iterator[Any]:
    for path in traces:
        steps, notes = read_steps(path)
        reader.notes += [f"{path}: {note}" for note in notes]
        yield from steps


def _step_line(row: dict[str, Any]) -> str:
    head = f"step {row['step_index']} {row['phase']}: {row['forward_ms']:.3f} ms, attention {row['attention_ms']:.3f}"
    return f"{head} (whole step {row['step_ms']:.3f}, gap {row['gap_ms']:.3f})"


def run_diagnose(arguments: argparse.Namespace) -> tuple[Any, str, int]:
    """Diagnose a log, a trace or a launch line, or print a recipe; 1 where a launch line has a mistake."""
    _check_options(arguments)
    if len(arguments.launch or []) > 1 or (arguments.launch and (arguments.file or arguments.base_url)):
        raise InputError("launch: wanted one launch line alone; a log, a server or another line is its own question")
    arguments.launch = arguments.launch[0] if arguments.launch else None
    path = Path(arguments.file or "-")
    if path.is_dir() or path.suffix == ".parquet" or RUN_ID.fullmatch(path.stem):
        return _diagnose_run(arguments)
    if arguments.launch:
        server, flags = parse_launch(arguments.launch, arguments.engine_version)
        problems, notes = list(launch_findings(server, flags)), list(launch_notes(server, flags))
        roles = {name: vars(role) for name, role in resolve_roles(server, arguments.gpu).items()}
        content: Any = {"engine": server.engine, "problems": problems, "notes": notes, "roles": roles}
        lines = [*(problems or ["no mistake found in what was checked"]), *notes]
        lines += [f"{name}: {role['backend']}, {role['how']}" for name, role in roles.items()]
    elif arguments.file and is_trace(arguments.file):
        steps, notes = read_steps(arguments.file)
        version, problems = arguments.engine_version, []
        found = diagnose_trace(list(steps), gpu=arguments.gpu, model=arguments.model, version=version)
        found.warnings += notes
        server = Server(found.engine, version, arguments.model, arguments.gpu)
        content, lines = asdict(found), [render(found)]
    elif arguments.file or arguments.base_url:
        reader, problems = Reader(), []
        server = reader.server
        server.version = arguments.engine_version
        with tempfile.TemporaryDirectory() as folder:
            paths = _fetched(arguments.base_url, Path(folder)) if arguments.base_url else []
            paths += [arguments.file] if arguments.file else []
            records = (record for path in paths for record in reader.read(path, server, sampled=True))
            found = diagnose(records, server, gpu=arguments.gpu, model=arguments.model, kv_dtype=arguments.kv_dtype)
        found.warnings += reader.notes
        server.take_drafts(reader.sizes)
        if not found.engine:
            raise InputError(f"{arguments.file}: no figures of a known engine; docs/importing.md lists what is read")
        content, lines = asdict(found), [render(found)]
    else:
        raise InputError("wanted a log, a trace, --base-url or --launch")
    if arguments.recipe:
        content = lines = recipe(arguments.recipe, server, arguments.launch)
    return redact(content), redact("\n".join(lines)), 1 if problems else 0


def _diagnose_run(arguments: argparse.Namespace) -> tuple[Any, str, int]:
    """What explains the times of stored attention runs; 1 where a backend is neither healthy nor launch-bound."""
    from labkit.decide.diagnosis import degenerate_paths  # pandas and plots, which no log needs
    from labkit.decide.diagnosis import diagnose as diagnose_rows

    rows, sidecars = load_runs("attention", arguments.file), load_sidecars("attention", arguments.file)
    found = diagnose_rows(rows[rows["status"] == "ok"], sidecars)
    bad = degenerate_paths(found)
    records, lines = [plain_record(row) for row in found.astype(object).to_dict("records")], []
    for row in records:
        sure = f" ({row['sure']})" if row["sure"] else ""
        setting = f"{row['num_qo_heads']}/{row['num_kv_heads']}/{row['head_dim']}, batch {row['batch_size']}"
        lines.append(f"{setting}, {row['backend']}: {row['diagnosis']}{sure}: {row['because']}")
    return redact(records), "\n".join(lines), 1 if len(bad) else 0


def _check_options(arguments: argparse.Namespace) -> None:
    """InputError: a version without a number, a GPU without a row, a KV dtype without a size."""
    if arguments.engine_version and not version_key(arguments.engine_version):
        raise InputError(f"engine-version: wanted a version such as 0.5.21, got {arguments.engine_version!r}")
    if arguments.gpu and gpu_row(arguments.gpu) is None:
        known = ", ".join(row["gpu"] for row in read_table("gpu_peaks.csv"))
        raise InputError(f"gpu: wanted one of {known}, got {arguments.gpu!r}")
    if arguments.kv_dtype and arguments.kv_dtype not in KV_DTYPES:
        raise InputError(f"kv-dtype: wanted one of {', '.join(KV_DTYPES)}, got {arguments.kv_dtype!r}")


def _fetched(url: str, folder: Path) -> list[Any]:
    """Pages of a running server, those it has. Raises InputError when none answers."""
    found, problem = list[Any](), "the scheme is not http"
    for page in _PAGES if url.startswith(("http://", "https://")) else ():
        if page == "/server_info" and found:  # the newer name of the page before
            continue
        try:
            with urllib.request.urlopen(url.rstrip("/") + page, timeout=3) as answer:
                found.append(folder / page.strip("/"))
                found[-1].write_bytes(answer.read(MAX_PAGE_BYTES))
        except (OSError, ValueError) as error:
            problem = str(error)
    if not found:
        raise InputError(f"base-url: wanted a server with one of {', '.join(_PAGES)}, got {url!r} ({problem})")
    return found
