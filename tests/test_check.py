"""`labkit check` finds planted corruptions and names file, row and field; hostile files harm nobody."""

import gzip
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labkit.check import check_run
from labkit.errors import InputError
from labkit.journal import check_journal, read_header
from labkit.provenance import collect, environment_digest
from labkit.results import file_digest, load_runs, write_run
from labkit.schema import arrow_schema
from labkit.unmeasured import unmeasured
from tests.test_results import OTHER_ID, RUN_ID, resign, row, rows, table, write

ROOT = Path(__file__).parent.parent

# ---- one value of one row: experiment, what is planted in row 3, the field that is named, words of the problem

IN_ROW_3 = [
    ("loop", {"step_ms": math.nan}, "step_ms", "NaN"),
    ("loop", {"draft_ms": math.inf, "step_ms": math.inf}, "draft_ms", "NaN"),
    ("loop", {"step_ms": -1.0}, "step_ms", "negative"),
    ("loop", {"gap_ms": -0.1}, "gap_ms", "negative"),
    ("loop", {"step_ms": None}, "step_ms", "null in a row with status ok"),
    ("loop", {"group": None}, "group", "is null"),
    ("loop", {"status": "fine"}, "status", "wanted one of ok"),
    ("loop", {"status": None}, "status", "is null"),
    ("loop", {"origin": "guessed"}, "origin", "wanted one of measured"),
    ("loop", {"arm": "both"}, "arm", "wanted one of speculative"),
    ("loop", {"drafter": ""}, "drafter", "is empty"),
    ("loop", {"status": "oom"}, "reason", "is null though"),
    ("loop", {"num_accepted_tokens": 5}, "num_accepted_tokens", "above num_drafted_tokens"),
    ("loop", {"num_drafted_tokens": 13}, "num_drafted_tokens", "above num_speculative_tokens"),
    ("loop", {"step_ms": 6750.0}, "step_ms", "differs from"),
    ("loop", {"verify_ms": 0.005}, "step_ms", "differs from"),
    ("loop", {"sample": 2}, "sample", "stored twice"),
    ("loop", {"run_id": OTHER_ID}, "run_id", "the sidecar says"),
    ("loop", {"gpu": "nvidia-a100"}, "gpu", "the sidecar says"),
    ("loop", {"experiment": "step"}, "experiment", "the sidecar says"),
    ("acceptance", {"num_accepted_tokens": 12}, "num_accepted_tokens", "above num_drafted_tokens"),
    ("acceptance", {"num_accepted_tokens": 6}, "num_accepted_tokens", "which gives 7"),
    ("acceptance", {"num_drafted_tokens": 12}, "num_drafted_tokens", "which gives 11"),
    ("acceptance", {"num_drafted_steps": 8}, "num_drafted_steps", "above num_verify_steps"),
    ("acceptance", {"num_output_tokens": 13}, "num_output_tokens", "does not fit"),
    ("acceptance", {"num_output_tokens": 16}, "num_output_tokens", "does not fit"),
    ("acceptance", {"num_verify_steps": 8}, "num_verify_steps", "which gives 7"),
    ("acceptance", {"accepted_by_draft_length": [[7]]}, "accepted_by_draft_length", "must have k+1 = 3 rows"),
    (
        "acceptance",
        {"accepted_by_draft_length": [[0, 1, 0], [0, 1, 0], [2, 0, 3]]},
        "accepted_by_draft_length",
        "cannot keep more than it drafted",
    ),
    (
        "acceptance",
        {"accepted_by_draft_length": [[1, 0, 0], [0, 1, 0], [2, -3, 6]]},
        "accepted_by_draft_length",
        "at least 0, got -3",
    ),
    ("acceptance", {"context_len_high": 256}, "context_len_high", "not above"),
    ("attention", {"context_len_max": 2}, "context_len_max", "below the mean"),
    ("attention", {"attention_ms": 500.0}, "gb_per_s", "unique bytes"),
    ("attention", {"gb_per_s": 0.002}, "gb_per_s", "unique bytes"),
    ("attention", {"l2_state": "hot"}, "l2_state", "wanted one of cold"),
    ("step", {"forward_ms": 0.009}, "forward_ms", "below"),
]
IN_ROW_3 += [
    ("loop", {"batch_size": 8, "point_key": "batch_size=1@00"}, "batch_size", "is not what the point_key says"),
    ("loop", {"drafter": "y", "point_key": 'drafter="x"'}, "drafter", "is not what the point_key says"),
    ("attention", {"backend_digest": "other"}, "backend_digest", "mixed environments"),
    ("attention", {"attention_ms": 0.0005}, "gb_per_s", "unique bytes"),  # seconds for ms: off by 1,000
    (
        "acceptance",
        {"accepted_by_draft_length": [[1, 0, 0], [0, 1, 0], [2, 0, 2]]},
        "num_verify_steps",
        "which gives 6",
    ),
]


@pytest.mark.parametrize(("experiment", "changes", "field", "problem"), IN_ROW_3)
def test_a_corrupt_value_is_found_with_row_and_field(tmp_path, experiment, changes, field, problem):
    content = rows(experiment)
    content[3] = content[3] | changes
    loose = pa.schema([pa.field(f.name, f.type) for f in arrow_schema(experiment)])
    arrays = {f.name: pa.array([r[f.name] for r in content], f.type) for f in loose}
    path = write(tmp_path, experiment)
    pq.write_table(pa.table(arrays, schema=loose), path)
    resign(path)
    match = [f for f in check_run(path) if f.field == field and problem in f.problem]
    assert match, check_run(path)
    assert (match[0].file, match[0].row) == (str(path), 3)


# ---- the file, the table or the sidecar as a whole: what is done to it, the field that is named, words of the problem


def rewrite(change: Callable[[pa.Table], pa.Table], sign: bool = True) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        pq.write_table(change(pq.read_table(path)), path)
        if sign:
            resign(path)

    return act


def sidecar(**changes: Any) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        file = path.with_suffix(".json")
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return act


def overwrite(suffix: str, content: bytes) -> Callable[[Path], None]:
    return lambda path: path.with_suffix(suffix).write_bytes(content) and None


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def of_another_run(stored: pa.Table) -> pa.Table:
    place = stored.schema.get_field_index("run_id")
    return stored.set_column(place, stored.schema.field("run_id"), pa.array([OTHER_ID] * stored.num_rows))


def another_python(path: Path) -> None:
    known = json.loads(path.with_suffix(".json").read_text())["provenance"]
    sidecar(provenance=known | {"python": "2"})(path)


AS_TEXT = pa.string()
WHOLE = {
    "missing column": (rewrite(lambda t: t.drop_columns(["arm"])), "arm", "column is missing"),
    "dtype": (
        rewrite(lambda t: t.set_column(t.schema.get_field_index("q_len"), "q_len", t["q_len"].cast(AS_TEXT))),
        "q_len", "wanted type int64, got string",
    ),
    "a ratio is stored": (
        rewrite(lambda t: t.append_column("speedup", pa.array([1.5] * 4))), "speedup", "no column of loop",
    ),
    "rows of two runs": (rewrite(lambda t: pa.concat_tables([t, of_another_run(t)])), "run_id", OTHER_ID),
    "a row is gone": (rewrite(lambda t: t.slice(1)), "num_rows", "has 3 rows, the sidecar says 4"),
    "digest mismatch": (rewrite(lambda t: t.slice(0, 4), sign=False), "sha256", "is not the one the sidecar was"),
    "a flipped byte": (flip_a_byte, "", ""),
    "truncated Parquet": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "file", "wanted a Parquet file"),
    "empty file": (lambda path: path.write_bytes(b""), "file", "wanted a Parquet file"),
    "no rows": (lambda path: path.unlink(), "file", "missing"),
    "no sidecar": (lambda path: path.with_suffix(".json").unlink(), "file", "wanted the sidecar"),
    "sidecar cut": (overwrite(".json", b'{"run_id": '), "file", "wanted a JSON sidecar"),
    "newer schema": (sidecar(schema_version=2), "file", "schema version 2, wanted 1"),
    "another experiment": (sidecar(experiment="step"), "experiment", "the sidecar says 'step'"),
    "unknown experiment": (sidecar(experiment="latency"), "file", "wanted one of attention"),
    "another device": (sidecar(gpu="nvidia-a100"), "gpu", "the sidecar says 'nvidia-a100'"),
    "mixed environments": (another_python, "environment_digest", "mixed environments"),
    "counts": (sidecar(counts={"ok": 7}), "counts", "the rows have {'ok': 1}, the sidecar says {'ok': 7}"),
    "journal line": (overwrite(".jsonl", b'{"kind":"header","run_id":"x"}\n{"kind":"point"}\n'), "journal", "line 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def provenance() -> dict:
    return collect("cpu")


def written(folder: Path, provenance: dict) -> Path:
    """A loop run with everything in its sidecar that a sweep writes there."""
    path = write(folder)
    content = {"run_id": RUN_ID, "experiment": "loop", "gpu": "nvidia-h200", "counts": {"ok": 1}, "code_digest": "c0de"}
    content |= {"provenance": provenance, "environment_digest": environment_digest(provenance, "c0de")}
    return write_run(path, [table("loop", rows("loop"))], content)


@pytest.mark.parametrize("name", WHOLE)
def test_a_corrupt_file_is_found_and_named(tmp_path, provenance, name):
    act, field, problem = WHOLE[name]
    path = written(tmp_path, provenance)
    assert check_run(path) == []
    act(path)
    match = [f for f in check_run(tmp_path) if (not field or f.field == field) and problem in f.problem]
    assert match, check_run(tmp_path)
    assert Path(match[0].file).stem == RUN_ID


def test_at_least_thirty_kinds():
    assert len(IN_ROW_3) + len(WHOLE) >= 30


def test_the_command_line_names_file_row_and_field(tmp_path, capsys):
    from labkit.cli import main

    path = write(tmp_path, content=[*rows("loop", 3), row("loop", sample=3, num_accepted_tokens=5)])
    assert main(["check", str(tmp_path)]) == 1
    assert f"{path}, row 3: num_accepted_tokens: is above num_drafted_tokens" in capsys.readouterr().out


# ---- hostile files

MARK = "labkit-was-here"


class Payload:
    """What a pickle does when it is loaded."""

    def __reduce__(self):
        return (Path.touch, (Path(MARK),))


def limited(code: str, cwd: Path, memory: int = 3 << 30) -> str:
    """What Python code says at its end, within a limit of address space: an allocation beyond it raises."""
    head = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}));"
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=120, cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"},
    )  # fmt: skip
    return done.stdout + done.stderr


FIND = "from labkit.check import check_run; print(check_run(__import__('pathlib').Path('.')))"


def test_a_parquet_bomb_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path)
    schema = pa.schema([pa.field("a", pa.int64())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        batch = pa.table({"a": pa.repeat(pa.scalar(1), 5_000_000)})
        for _ in range(9):
            writer.write_table(batch)
    resign(path)
    assert path.stat().st_size < 1 << 20
    assert "MiB when read; wanted at most 256 MiB" in limited(FIND, tmp_path)


def test_a_run_older_than_a_column_that_tells_samples_apart_is_checked(tmp_path):
    path = write(tmp_path)
    rewrite(lambda t: t.drop_columns(["decode_backend"]))(path)
    assert check_run(path) == []
    rewrite(lambda t: pa.concat_tables([t.slice(0, 3), t.slice(2, 1)]))(path)
    assert "stored twice" in [finding.problem.partition(" (")[0] for finding in check_run(path)]


def test_a_long_text_in_every_row_is_refused_before_it_is_repeated(tmp_path):
    path = write(tmp_path)
    words = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 100_000), ["x" * 100_000])
    pq.write_table(pa.table({"reason": words}), path, compression="zstd", store_schema=False)
    resign(path)
    assert path.stat().st_size < 1 << 20
    assert "MiB when read; wanted at most 256 MiB" in limited(FIND, tmp_path)


def test_columns_that_share_bytes_of_the_file_are_refused(tmp_path):
    path = write(tmp_path)
    pq.write_table(pa.table({"a": range(300), "b": range(300)}), path, compression="none", use_dictionary=False)
    size = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    own, both = (bytes([0x16, 2 * n & 0x7F | 0x80, 2 * n >> 7]) for n in (size, 2 * size))  # as Thrift writes them
    path.write_bytes(path.read_bytes().replace(own + own, own + both, 1))
    resign(path)
    assert "its columns overlap" in check_run(path)[0].problem


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_a_pickle_in_disguise_is_not_loaded(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    path.with_suffix(suffix).write_bytes(pickle.dumps(Payload()) + b"\n")
    assert check_run(path)
    for other in (path.with_suffix(".pkl"), path.with_suffix(".pt")):
        other.write_bytes(pickle.dumps(Payload()))
        with pytest.raises(InputError, match=r"wanted a run's \.parquet"):
            load_runs("loop", other)
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 100_000, '"' + "9" * 100_000, "9" * 5_000_000, "1e999999"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_deep_and_huge_json_is_a_finding(tmp_path, suffix, text):
    path = write(tmp_path)
    path.with_suffix(suffix).write_text(text + "\n")
    assert check_run(path)


def test_a_line_of_a_gigabyte_is_not_held_in_memory(tmp_path):
    path = write(tmp_path).with_suffix(".jsonl")
    with path.open("wb") as file:
        file.write(b'{"kind":"header","run_id":"x","schema_version":1}\n')
        file.truncate(1 << 30)  # sparse: it takes no room on disk
    code = "from labkit.journal import *; from pathlib import Path; check_journal(next(Path('.').rglob('*.jsonl')))"
    assert "line 2: wanted a JSON line of a journal" in limited(code, tmp_path, memory=2 << 30)
    with pytest.raises(InputError, match="more than 16 MiB"):
        check_journal(path)
    path.write_bytes(b"")
    assert read_header(path) is None


def test_a_log_with_a_line_of_a_gigabyte_or_a_gzip_bomb_is_streamed(tmp_path):
    (tmp_path / "long.log").write_bytes(b"x" * 100 + b"\n")
    with (tmp_path / "long.log").open("r+b") as file:
        file.truncate(1 << 30)
    with gzip.open(tmp_path / "bomb.log.gz", "wb") as bomb:
        for _ in range(400):
            bomb.write(bytes(1 << 20))
    code = (
        "from labkit.engines.importing import import_files\n"
        "for name in ('long.log', 'bomb.log.gz'):\n"
        "    try: list(import_files([name]))\n"
        "    except ValueError as error: print(error)"
    )
    said = limited(code, tmp_path, memory=2 << 30).splitlines()
    assert "no figures of a known engine" in said[0]
    assert "gzip bomb" in said[1]


def test_a_path_in_a_sidecar_leads_nowhere(tmp_path):
    path = write(tmp_path)
    for name in ("../../etc", "/etc/passwd", "a\x00b"):
        sidecar(run_id=name, gpu=name)(path)
        assert check_run(path)


def test_the_digest_is_of_the_whole_file(tmp_path):
    path = write(tmp_path)
    content = path.read_bytes()
    digests = set()
    for place in np.linspace(0, len(content) - 1, 20).astype(int):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        digests.add(file_digest(path))
    assert len(digests) == 20


def test_points_that_were_not_measured_are_a_note(tmp_path, capsys):
    from labkit.cli import main

    path = write(tmp_path, content=rows("loop", 3))
    sidecar = json.loads(path.with_suffix(".json").read_text())
    counts = {"ok": len({row["point_key"] for row in rows("loop", 3)})}
    path.with_suffix(".json").write_text(json.dumps(sidecar | {"num_points": 9, "counts": counts}))
    assert main(["check", str(tmp_path)]) == 0
    assert f"note: {path}: {9 - counts['ok']} of 9 planned points were not measured" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--json"]) == 0
    assert [item["level"] for item in json.loads(capsys.readouterr().out)] == ["note"]
    other = path.with_name("20270101T000000Z-abcdef.jsonl")
    lines = [{"kind": "header", "num_points": 4}]
    lines += [{"kind": "point", "point_key": f"a={i}", "status": "ok", "seconds": 1.0, "point": {}} for i in (0, 1, 1)]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [text for _, text in unmeasured(tmp_path)][1].startswith("interrupted with 2 of 4 planned points")
