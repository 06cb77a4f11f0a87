"""A zip with what stands behind a claim: rows, sidecars, request bytes, versions, how to run it again, CLAIM.md.

Nothing of a person, host or account is in it: texts are redacted, folders cut, the environment is an allow list.
``anonymous`` also leaves out commits, times, commands, launch lines, answers' texts and figures (which name runs in
their metadata), and gives the runs new names.
"""

import argparse
import hashlib
import io
import json
import re
import secrets
import stat
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from labkit import __version__, paths
from labkit.decide.compare import compare_runs
from labkit.errors import InputError
from labkit.provenance import ENV_VARS, redact, without_folders
from labkit.publish.claims import ESTIMATORS, EXCLUDED, UNITS, Claim, claims_of, compare_claims, from_dicts
from labkit.quality import kinds
from labkit.results import RUN_ID, file_digest, read_sidecar, read_table, run_files, write_run
from labkit.schema import TEXT, arrow_schema

MAX_FILES, MAX_FILE_BYTES, MAX_TOTAL_BYTES, MAX_RATIO = 2000, 1 << 30, 4 << 30, 500
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.@-]*/)*[A-Za-z0-9_][A-Za-z0-9_.@-]*")
BAR = "\\|"  # of a value, in a table of Markdown
_STAMP = (1980, 1, 1, 0, 0, 0)
_ANONYMOUS_DROPS = {
    *("commit", "dirty", "command", "platform", "python", "time", "started", "ended", "sessions", "launch", "grid"),
    "journal_bytes",
}
_DROPPED_COLUMNS = ("output_text", "verified_at")


def bundle(names: Sequence[str], out: Path, *, anonymous: bool = False) -> Path:
    """Write the zip of runs (files or folders) and figures (names in ``figures/``).

    Raises InputError: no run and no figure of that name, a broken run, or a file that cannot be written.
    """
    paths.check_out(out, ("zip",))
    runs, figures = _resolve(names)
    claims = claims_of(runs)
    contents: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        sidecars = []
        for run in runs:
            sidecar, files = _clean_run(run, Path(folder), anonymous)
            sidecars.append(sidecar)
            contents |= files
    if not anonymous:
        contents |= {f"figures/{file.name}": file.read_bytes() for file in figures}
    made = {"claims": [vars(claim) for claim in claims], "labkit": __version__, "anonymous": anonymous}
    contents["claim.json"] = _json(made)
    contents["CLAIM.md"] = _claim_text(claims, sidecars, _doubts(runs)).encode()
    contents["reproduce.sh"] = _script(sidecars).encode()
    contents["manifest.json"] = _json(
        {name: hashlib.sha256(data).hexdigest() for name, data in sorted(contents.items())}
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name, _STAMP), data, zipfile.ZIP_DEFLATED)
    return paths.write_whole(out, buffer.getvalue())


def _resolve(names: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Run files, and the files of figures with the runs that they were drawn from."""
    runs, figures = dict[str, Path](), list[Path]()
    for name in names:
        record = paths.FIGURES / f"{name}.json"
        if Path(name).exists() or RUN_ID.fullmatch(name):
            found = run_files(Path(name))
        elif Path(name).name == name and record.exists():
            content = json.loads(record.read_text(encoding="utf-8"))
            figures += [record, *(record.with_name(file) for file in content["files"])]
            found = [paths.RUNS / source["file"] for source in content["sources"]]
        else:
            known = ", ".join(sorted(file.stem for file in paths.FIGURES.glob("*.json")))
            raise InputError(f"{name}: wanted a run, a folder of runs, or a figure of {known}")
        runs |= {file.stem: file for file in found}
    if not runs:
        raise InputError(f"{', '.join(names)}: no runs there")
    return sorted(runs.values()), figures


def _clean_run(path: Path, folder: Path, anonymous: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The run without what must not leave, as its sidecar and its files by their names in the zip."""
    sidecar, table = read_sidecar(path), read_table(path)
    if file_digest(path) != sidecar["sha256"]:
        raise InputError(f"{path}: does not match the sha256 in its sidecar")
    run_id = f"20000101T000000Z-{secrets.token_hex(3)}" if anonymous else sidecar["run_id"]
    clean = _clean_tree(sidecar, anonymous) | {"run_id": run_id}
    schema = arrow_schema(sidecar["experiment"])
    arrays = {name: _clean_column(name, table[name], run_id, anonymous) for name in table.schema.names}
    whole = {field.name: arrays.get(field.name, pa.nulls(table.num_rows, field.type)) for field in schema}
    stored = folder / sidecar["experiment"] / sidecar["gpu"] / f"{run_id}.parquet"
    write_run(stored, [pa.table(whole, schema=schema)], clean)
    place = f"runs/{sidecar['experiment']}/{sidecar['gpu']}/{run_id}"
    files = {f"{place}{suffix}": stored.with_suffix(suffix).read_bytes() for suffix in (".parquet", ".json")}
    if (requests := path.with_suffix(".requests.parquet")).exists():
        files[f"{place}.requests.parquet"] = _clean_requests(requests)
    return read_sidecar(stored), files


def _clean_column(name: str, column: pa.ChunkedArray, run_id: str, anonymous: bool) -> Any:
    """The column without what must not leave; each distinct text is looked at once, columns repeat few of them."""
    if column.type != TEXT:
        return column
    if name == "run_id":
        return pa.array([run_id] * len(column), TEXT)
    if anonymous and name in _DROPPED_COLUMNS:
        return pa.nulls(len(column), TEXT)
    coded = column.combine_chunks().dictionary_encode()
    texts = coded.dictionary.to_pylist()
    if anonymous and name == "launch":
        known = sorted(texts)
        texts = [f"launch {known.index(text)}" for text in texts]
    return pa.array([redact(text) for text in texts], TEXT).take(coded.indices)


def _clean_requests(path: Path) -> bytes:
    """Bodies as sent; one that holds what must not leave is left out whole, its digest stays."""
    content = read_table(path).to_pydict()
    bodies = [body if body is not None and redact(body.decode()) == body.decode() else None for body in content["body"]]
    sink = pa.BufferOutputStream()
    table = pa.table({"request_digest": content["request_digest"], "body": pa.array(bodies, pa.binary())})
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, data_page_size=1 << 28)
    return sink.getvalue().to_pybytes()


def _clean_tree(value: Any, anonymous: bool, name: str = "") -> Any:
    """Redacted texts, folders cut, an allow list for the environment; for anonymous bundles without what identifies."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (anonymous and key in _ANONYMOUS_DROPS)}
        if name == "env":
            kept = {key: item for key, item in kept.items() if key in ENV_VARS}
        return {key: _clean_tree(item, anonymous, key) for key, item in kept.items()}
    if isinstance(value, list):
        return [_clean_tree(item, anonymous) for item in value]
    return without_folders(redact(value)) if isinstance(value, str) else value


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str).encode() + b"\n"


def _doubts(runs: Sequence[Path]) -> str:
    """How many samples of the runs are doubtful, and why."""
    qualities = [text for run in runs for text in read_table(run)["quality"].to_pylist()]
    found = Counter(kind for text in qualities if text not in (None, "ok") for kind in kinds(text))
    told = ", ".join(f"{count} {kind}" for kind, count in found.most_common())
    return f" Doubtful samples, of {len(qualities)}: {told}." if told else ""


def _claim_text(claims: Sequence[Claim], sidecars: Sequence[dict[str, Any]], doubts: str) -> str:
    """One paragraph to paste, then every claim as a table."""
    devices = sorted({_device_text(sidecar) for sidecar in sidecars})
    if not claims:
        return f"Rows of {len(sidecars)} runs on {'; '.join(devices)}. No claim is derived from them.\n"
    first = claims[0]
    conditions = ", ".join(f"{name} {value}" for name, value in first.conditions.items() if value is not None)
    base = first.conditions.get("decode_backend") or first.conditions.get("a") or "plain decode"
    lines = [
        f"**{first.metric.replace('_', ' ')} {first.text()}** (n = {first.units()}; {conditions}). "
        f"Estimator: {ESTIMATORS[first.metric]}. Unit: {UNITS[first.metric]}. Baseline: {base}. "
        f"Not counted: {EXCLUDED[first.metric]}. Measured on {'; '.join(devices)}.{doubts}",
        *("", "| metric | value | n | conditions |", "|---|---|---|---|"),
    ]
    for claim in claims:
        conditions = ", ".join(f"{name} {value}" for name, value in claim.conditions.items() if value is not None)
        cells = (claim.metric, claim.text(), claim.units(), conditions)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _device_text(sidecar: dict[str, Any]) -> str:
    device = (sidecar.get("provenance") or {}).get("device") or {}
    clock, power = device.get("sm_clock_applied_mhz") or device.get("sm_clock_max_mhz"), device.get("power_limit_w")
    told = [f"SM clock {clock:g} MHz" if clock else "clocks unknown", f"power limit {power:g} W" if power else ""]
    return f"{device.get('name') or sidecar['gpu']} ({', '.join(filter(None, told))})"


def _script(sidecars: Sequence[dict[str, Any]]) -> str:
    lines = ["#!/bin/sh", "# Measure again, then compare: labkit reproduce BUNDLE --rows NEW", "set -e"]
    for sidecar in sidecars:
        command = str(sidecar.get("command") or "").partition(" ")[2]
        lines.append(
            f"labkit {command} --out new" if command else f"# {sidecar['experiment']}: see claim.json for the settings"
        )
        for name, endpoint in (sidecar.get("endpoints") or {}).items():
            if line := (endpoint or {}).get("launch"):
                lines.append(f"# server {name}: {' '.join(str(line).split())}")
    return "\n".join(lines) + "\n"


def _entries(path: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a zip that may have been made by anyone: names, number and real sizes are checked while reading."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: wanted a bundle: {getattr(error, 'strerror', None) or error}") from error
    with archive:
        infos = archive.infolist()
        if len(infos) > MAX_FILES or len({info.filename for info in infos}) < len(infos):
            raise InputError(f"{path}: {len(infos)} files; wanted at most {MAX_FILES}, each once")
        total = 0
        for info in infos:
            if not _NAME.fullmatch(info.filename) or stat.S_ISLNK(info.external_attr >> 16) or info.flag_bits & 1:
                raise InputError(f"{path}: {info.filename!r} is no plain relative file name; nothing was unpacked")
            limit = min(MAX_FILE_BYTES, MAX_RATIO * info.compress_size + (1 << 20), MAX_TOTAL_BYTES - total)
            try:
                with archive.open(info) as file:
                    data = file.read(limit + 1)  # the header may lie about the size
            except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
                raise InputError(f"{path}: {info.filename}: damaged: {error}") from error
            if len(data) > limit:
                raise InputError(
                    f"{path}: {info.filename} expands beyond {limit} bytes; wanted a bundle, not a zip bomb"
                )
            total += len(data)
            yield info.filename, data


def reproduce(path: Path, rows: Sequence[Path] = ()) -> tuple[str, bool]:
    """Compare the bundle's claims with other rows, or with its own where none are given.

    Returns the report, and whether every claim was met by a consistent number.

    Raises InputError: no bundle, one that was changed or is unsafe to read, or rows that cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        contents = dict(_entries(path))
        listed = _load(contents, path, "manifest.json")
        for name, data in contents.items():
            if name != "manifest.json" and listed.get(name) != hashlib.sha256(data).hexdigest():
                raise InputError(f"{path}: {name} is not the file that was bundled")
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        made = _load(contents, path, "claim.json")
        claims = from_dicts(made.get("claims", []))
        runs = run_files(Path(folder) / "runs") if (Path(folder) / "runs").is_dir() else []
        yours = claims_of(rows or runs)
        sidecars = [read_sidecar(run) for run in runs]
        # Cleaned like the bundle's own: what was left out there is no difference.
        files = [file for row in rows for file in run_files(row)]
        others = [_clean_tree(read_sidecar(file), made.get("anonymous") is True) for file in files]
    results = compare_claims(claims, yours)
    lines = [_line(item, own=not rows) for item in results] or ["the bundle makes no claim; its runs were read"]
    lines += _differences(sidecars, others)
    return "\n".join(lines), all(item["verdict"] == "consistent" for item in results)


def _load(contents: dict[str, bytes], path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(contents[name])
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: wanted {name} with a JSON object in it: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: {name}: wanted a JSON object")
    return content


def _line(item: dict[str, Any], *, own: bool) -> str:
    claim, yours = item["claim"], item["yours"]
    kept = {name: value for name, value in claim.conditions.items() if value is not None}
    where = ", ".join(f"{name} {value}" for name, value in kept.items() if name != "gpu")
    text = f"{claim.metric} ({where}): claim {claim.text()}; {'its rows give' if own else 'yours'} "
    text += (yours.text() if yours else "nothing") + f": {item['verdict']}"
    for name, (theirs, mine) in (item["differing"] | item["named"]).items():
        text += f"\n  {name}: {theirs} -> {mine}"
    return text


def _differences(sidecars: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[str]:
    """Fields in which a run of the bundle and the nearest of the other runs differ, and which may explain a number."""
    lines = dict[str, None]()
    for theirs in sidecars:
        same = [mine for mine in others if mine["experiment"] == theirs["experiment"]]
        found = min((compare_runs(theirs, mine).unexplained for mine in same), key=len, default=())
        lines |= {f"  {theirs['experiment']}: {item.field}: {item.a} -> {item.b}": None for item in found}
    return ["fields that differ:", *lines] if lines else []


def run_bundle(arguments: argparse.Namespace) -> None:
    """`labkit bundle`."""
    print(bundle(arguments.names, arguments.out, anonymous=arguments.anonymous))


def run_reproduce(arguments: argparse.Namespace) -> int:
    """`labkit reproduce`: 1 where a claim was not met."""
    text, met = reproduce(arguments.bundle, arguments.rows)
    print(text)
    return 0 if met else 1
