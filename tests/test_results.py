"""Stored runs: what is written comes back, what is damaged is refused and named."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labkit import schema
from labkit.check import check_run, check_table
from labkit.errors import InputError
from labkit.paths import DATA
from labkit.results import (
    build_table,
    file_digest,
    load_runs,
    load_sidecars,
    read_sidecar,
    run_files,
    run_folder,
    write_run,
)
from labkit.schema import COUNT, EXPERIMENTS, HISTOGRAM, LIST, REAL, SAMPLE_KEYS, SERIES, TEXT, arrow_schema, columns

RUN_ID = "20260131T120000Z-1a2b3c"
OTHER_ID = "20260201T120000Z-00ffee"

# Values that make a row of each experiment sound; the rest is filled by type.
_SOUND = {
    "loop": {
        "arm": "speculative",
        "num_speculative_tokens": 4,
        "num_drafted_tokens": 4,
        "num_accepted_tokens": 2,
    }
    | {"draft_ms": 1.0, "verify_ms": 5.0, "accept_ms": 0.5, "gap_ms": 0.25, "step_ms": 6.75, "num_draft_nodes": None},
    "acceptance": {"num_speculative_tokens": 2, "accepted_by_draft_length": [[1, 0, 0], [0, 1, 0], [2, 0, 3]]}
    | {"num_verify_steps": 7, "num_truncated_steps": 0, "num_drafted_steps": 6, "num_drafted_tokens": 11}
    | {"num_accepted_tokens": 7, "context_len_low": 256, "context_len_high": 1024, "num_draft_nodes": None}
    | {"num_output_tokens": 15},
    "attention": {"attention_ms": 0.5, "batch_size": 1, "q_len": 1, "num_qo_heads": 8, "head_dim": 64}
    | {"q_dtype": "float32", "kv_bytes_read": 1_000_000, "gb_per_s": 1_004_096 / 0.5e6},
    "replay": {"num_verify_steps": 7, "num_drafted_tokens": 9, "num_accepted_tokens": 7, "num_output_tokens": 15},
    "step": {"forward_ms": 9.0, "attention_ms": 3.0, "linear_ms": 4.0, "other_ms": 1.5},
}


def row(experiment: str, **changes) -> dict:
    values: dict = {}
    for column in columns(experiment):
        by_type = {
            TEXT: column.choices[0] if column.choices else "x",
            COUNT: 3,
            REAL: 3.0,
            SERIES: [3.0],
            HISTOGRAM: [[0]],
            LIST: [1],
        }
        values[column.name] = by_type[column.type]
    identity = {"run_id": RUN_ID, "experiment": experiment, "gpu": "nvidia-h200", "reason": None}
    return values | identity | {"status": "ok", "origin": "measured"} | _SOUND[experiment] | changes


def rows(experiment: str, num: int = 4, **changes) -> list[dict]:
    return [row(experiment, sample=index, **changes) for index in range(num)]


def table(experiment: str, content: list[dict]) -> pa.Table:
    return build_table(experiment, {name: [r[name] for r in content] for name in content[0]})


def write(folder: Path, experiment: str = "loop", run_id: str = RUN_ID, gpu: str = "nvidia-h200", content=None) -> Path:
    content = content or rows(experiment, run_id=run_id, gpu=gpu)
    path = run_folder(folder, experiment, gpu) / f"{run_id}.parquet"
    return write_run(path, [table(experiment, content)], {"run_id": run_id, "experiment": experiment, "gpu": gpu})


# ----- the schema


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_schema_is_sound(experiment):
    names = [column.name for column in columns(experiment)]
    assert len(names) == len(set(names))
    assert set(SAMPLE_KEYS[experiment]) < set(names)
    assert set(schema.IDENTITY) < set(names)
    for column in columns(experiment):
        assert column.meaning
        unit = {"_ms": "ms", "_us": "us", "_bytes": "bytes", "_mhz": "MHz", "_w": "W", "_j": "J"}
        for suffix, wanted in unit.items():
            if column.name.endswith(suffix):
                assert column.unit == wanted, column.name


def test_dictionary_in_the_data_folder_is_the_schema():
    text = (DATA / "README.md").read_text(encoding="utf-8")
    assert text.rpartition("-->")[2].strip() == schema.dictionary().strip()
    for experiment in EXPERIMENTS:
        for column in columns(experiment):
            assert f"| `{column.name}` | {column.type} |" in text


def test_statuses_and_origins():
    assert schema.STATUSES == ("ok", "unsupported", "oom", "wrong", "timeout", "crashed", "error", "skipped")
    assert set(schema.ORIGIN_ALIASES.values()) <= set(schema.ORIGINS)
    found = table("loop", rows("loop", origin="synthetic"))
    assert set(found["origin"].to_pylist()) == {"forced"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("q_len", [1.5]),
        ("q_len", [True]),
        ("q_len", ["4"]),
        ("step_ms", ["4.0"]),
        ("step_ms", [True]),
        ("target", [4]),
        ("step_ms", [[1.0]]),
        ("q_len", [1, "x"]),
        ("q_len", [2**70]),
    ],
)
def test_values_are_neither_rounded_nor_parsed(name, values):
    with pytest.raises(InputError, match=f"{name}: wanted"):
        build_table("loop", {name: values})


def test_numpy_values_and_nulls_fit():
    found = build_table("loop", {"q_len": [np.int32(4), None], "step_ms": [np.float32(0.5), 2], "target": [None, "x"]})
    assert found["q_len"].to_pylist() == [4, None]
    assert found["step_ms"].to_pylist() == [0.5, 2.0]
    with pytest.raises(InputError, match="unknown column step_s"):
        build_table("loop", {"step_s": [1.0]})


# ----- write and load


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_round_trip(tmp_path, experiment):
    path = write(tmp_path, experiment)
    frame = load_runs(experiment, path)
    assert list(frame.columns) == [*arrow_schema(experiment).names, "source"]
    for name, value in row(experiment, sample=0).items():
        if value is None:
            assert frame[name].isna().all()
        else:
            assert frame[name][0] == value
    assert check_run(path) == []
    assert load_sidecars(experiment, path)[RUN_ID]["sha256"] == file_digest(path)
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_histograms_come_back_as_lists(tmp_path):
    frame = load_runs("acceptance", write(tmp_path, "acceptance"))
    assert frame.accepted_by_draft_length[0] == [[1, 0, 0], [0, 1, 0], [2, 0, 3]]


def test_trees_sources_and_devices(tmp_path, monkeypatch):
    ann, bob = tmp_path / "ann", tmp_path / "bob"
    write(ann)
    write(bob, run_id=OTHER_ID, gpu="cpu-x")
    write(bob, "step")
    frame = load_runs("loop", ann, bob)
    assert frame.groupby("run_id").source.unique().map(list).to_dict() == {
        RUN_ID: [str(ann)],
        OTHER_ID: [str(bob)],
    }
    assert set(load_runs("loop", ann, bob, gpu="cpu-x").run_id) == {OTHER_ID}
    assert len(load_runs("loop", ann, ann / "loop")) == 4  # the same run twice is one run
    monkeypatch.setenv("LABKIT_DATA", f"{ann}:{bob}")
    pd.testing.assert_frame_equal(load_runs("loop"), frame)
    with pytest.raises(InputError, match="gpu: wanted one of cpu-x, nvidia-h200"):
        load_runs("loop", gpu="tpu")
    with pytest.raises(InputError, match=r"no runs of acceptance in .*ann, .*bob"):
        load_runs("acceptance")


def test_one_name_with_two_contents_is_refused(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", content=rows("loop", num=5))
    with pytest.raises(InputError, match=f"run {RUN_ID} is also"):
        load_runs("loop", tmp_path)


def test_nulls_in_one_run_do_not_change_the_type_of_texts(tmp_path):
    write(tmp_path, content=rows("loop", drafter=None, num_accepted_tokens=None))
    write(tmp_path, run_id=OTHER_ID)
    frame = load_runs("loop", tmp_path)
    assert frame.num_accepted_tokens.isna().sum() == 4
    assert frame.drafter.isna().sum() == 4
    assert frame.q_len.dtype == np.int64


def edit_sidecar(path: Path, **changes) -> None:
    sidecar = path.with_suffix(".json")
    content = json.loads(sidecar.read_text()) | changes
    sidecar.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def damage_nothing_but_size(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


_DAMAGES = {
    "no sidecar": (lambda p: p.with_suffix(".json").unlink(), "missing; wanted the sidecar"),
    "no rows": (lambda p: p.unlink(), "missing; its sidecar is there"),
    "sidecar is no JSON": (lambda p: p.with_suffix(".json").write_text("{"), "wanted a JSON sidecar"),
    "sidecar is a list": (lambda p: p.with_suffix(".json").write_text("[]"), "wanted a JSON object"),
    "sidecar is deep": (lambda p: p.with_suffix(".json").write_text("[" * 200_000), "wanted a JSON sidecar"),
    "sidecar is binary": (lambda p: p.with_suffix(".json").write_bytes(b"\xff\xfe"), "wanted a JSON sidecar"),
    "newer schema": (lambda p: edit_sidecar(p, schema_version=2), "schema version 2, wanted 1"),
    "no schema": (lambda p: edit_sidecar(p, schema_version=None), "schema version None, wanted 1"),
    "no digest": (lambda p: edit_sidecar(p, sha256=None), "sha256 missing"),
    "truncated": (damage_nothing_but_size, "does not match the sha256"),
    "other experiment": (lambda p: edit_sidecar(p, experiment="step"), "a run of step, wanted loop"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_runs_are_refused_and_found(tmp_path, damage):
    path = write(tmp_path)
    act, problem = _DAMAGES[damage]
    act(path)
    with pytest.raises(InputError, match=re.escape(problem)):
        load_runs("loop", path)
    assert check_run(path)
    assert check_run(tmp_path)


def resign(path: Path) -> None:
    edit_sidecar(path, sha256=file_digest(path))


def test_no_parquet_file_in_disguise(tmp_path):
    path = write(tmp_path)
    path.write_bytes(b"\x80\x04\x95pickle")
    resign(path)
    with pytest.raises(InputError, match="wanted a Parquet file"):
        load_runs("loop", path)
    assert "wanted a Parquet file" in check_run(path)[0].problem


def test_other_columns_are_refused(tmp_path):
    path = write(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns(["step_ms"]), path)
    resign(path)
    with pytest.raises(InputError, match="column step_ms: wanted double, got nothing"):
        load_runs("loop", path)


def test_a_run_from_before_a_nullable_column_reads_as_unknown(tmp_path):
    path = write(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns(["draft_prefill_ms"]), path)
    resign(path)
    assert load_runs("loop", path)["draft_prefill_ms"].isna().all()
    assert check_run(path) == []


def test_paths_that_are_no_runs(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for path, problem in (
        (tmp_path / "gone", "no such file"),
        (tmp_path / "notes.txt", "wanted a run's .parquet"),
    ):
        with pytest.raises(InputError, match=problem):
            load_runs("loop", path)
        with pytest.raises(InputError, match=problem):
            check_run(path)
    with pytest.raises(InputError, match="no runs to check"):
        check_run(tmp_path)
    with pytest.raises(InputError, match="experiment: wanted one of"):
        load_runs("latency")


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path)
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("labkit.results.os.fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write(tmp_path, content=rows("loop", num=9))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert check_run(path) == []
    assert len(list(path.parent.iterdir())) == 2


# ----- checks (the planted corruptions are in test_check.py)


def test_sidecar_is_checked_against_the_rows(tmp_path):
    path = write(tmp_path)
    edit_sidecar(path, num_rows=5)
    assert [f.field for f in check_run(path)] == ["num_rows"]
    pq.write_table(pq.read_table(path).slice(1), path)
    assert [f.field for f in check_run(path)] == ["sha256", "num_rows"]
    moved = tmp_path / "loop" / "cpu-x" / path.name
    write(tmp_path / "again")
    moved.parent.mkdir(parents=True)
    (tmp_path / "again/loop/nvidia-h200" / path.name).rename(moved)
    (tmp_path / "again/loop/nvidia-h200" / f"{RUN_ID}.json").rename(moved.with_suffix(".json"))
    assert [f.problem for f in check_run(moved)] == ["wanted the folder loop/nvidia-h200"]


def test_findings_of_a_tree_name_their_file(tmp_path):
    good, bad = write(tmp_path), write(tmp_path, run_id=OTHER_ID)
    bad.with_suffix(".json").unlink()
    (finding,) = check_run(tmp_path)
    assert finding.file == str(bad)
    assert str(finding).startswith(f"{bad}: file: ")
    assert check_run(good) == []


def test_truncated_steps_may_be_outside_the_histogram():
    content = rows("acceptance", num_truncated_steps=1, num_drafted_tokens=13, num_accepted_tokens=8)
    assert check_table(table("acceptance", content), "acceptance") == []


def test_failed_rows_need_no_results():
    null = {c.name: None for c in columns("loop") if c.name not in schema.IDENTITY}
    content = [row("loop", **null | {"reason": "out of memory", "status": "oom"})]
    assert check_table(table("loop", content), "loop") == []


def test_sidecar_is_found_from_either_file(tmp_path):
    path = write(tmp_path)
    assert read_sidecar(path) == read_sidecar(path.with_suffix(".json"))
    assert len(load_runs("loop", path.with_suffix(".json"))) == 4


def test_a_missing_folder_of_labkit_data_is_told(tmp_path, monkeypatch, capsys):
    path = tmp_path / "there" / "20260131T120000Z-abcdef.parquet"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv("LABKIT_DATA", f"{tmp_path / 'gone'}:{path.parent}")
    assert run_files(Path(path.stem)) == [path]
    assert capsys.readouterr().err == f"LABKIT_DATA: no folder {tmp_path / 'gone'}; passed over\n"
