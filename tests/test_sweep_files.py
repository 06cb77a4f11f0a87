"""What a sweep leaves on disk: journals torn, corrupt, locked or on a full disk; files made again."""

import json
import os

import pyarrow.parquet as pq
import pytest

from labkit import journal
from labkit.check import check_run
from labkit.errors import InputError
from labkit.results import load_runs
from labkit.sweep import run_sweep
from tests import sweep_points
from tests.swept import contexts


def test_local_values_reach_the_measure_and_no_file(go, tmp_path):
    result = go(contexts(0), sweep_points.measure_local, local={"model_dir": "/secret/place"})
    assert result.counts == {"ok": 1}
    assert all(b"secret/place" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_unknown_experiment_and_unwritable_folder(tmp_path):
    with pytest.raises(InputError, match="experiment: wanted one of attention"):
        run_sweep(contexts(0), sweep_points.measure, experiment="latency", out_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        run_sweep(
            contexts(0), sweep_points.measure, experiment="loop", out_dir=tmp_path / "file", executor="in-process"
        )


def test_second_sweep_on_a_run_is_refused(go):
    points = contexts(0, 1)
    first = go(points, budget_s=0)
    with (
        journal.open_journal(first.path.with_suffix(".jsonl")),
        pytest.raises(InputError, match="another sweep writes this run"),
    ):
        go(points)
    assert go(points).counts == {"ok": 2}


def test_torn_line_is_cut_and_corrupt_line_is_named(go):
    points = contexts(0, 1, 2)
    path = go(points).path
    lines = path.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    path.with_suffix(".jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:-10])
    assert go(points).num_measured == 1
    assert len(load_runs("loop", path)) == 9
    path.with_suffix(".jsonl").write_bytes(b"".join([*lines[:2], b'{"kind": "poi\n', *lines[2:]]))
    with pytest.raises(InputError, match=r"jsonl, line 3: wanted a JSON line"):
        go(points)


def test_missing_or_damaged_files_are_made_again_from_the_journal(go):
    path = go(contexts(0)).path
    for damage in (path.unlink, path.with_suffix(".json").unlink, lambda: path.write_bytes(b"PAR1")):
        damage()
        assert go(contexts(0)).num_measured == 0
        assert check_run(path) == []


def test_full_disk_keeps_the_journal_whole(go, monkeypatch):
    points, write, num_writes = contexts(*range(5)), os.write, []

    def full(handle, content):
        num_writes.append(1)
        if len(num_writes) == 5:
            return write(handle, content[:20])  # a short write, then nothing more fits
        if len(num_writes) > 5:
            raise OSError(28, "No space left on device")
        return write(handle, content)

    monkeypatch.setattr(journal.os, "write", full)
    with pytest.raises(InputError, match=r"No space left on device; the 2 stored points are kept"):
        go(points)
    monkeypatch.undo()
    assert go(points).num_measured == 3


def test_parquet_names_its_schema(go):
    metadata = pq.read_schema(go(contexts(0)).path).metadata
    assert json.loads(metadata[b"labkit"])["schema_version"] == 1


def test_a_folder_in_the_place_of_the_rows_is_named(go, tmp_path):
    path = go(contexts(0)).path
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"parquet"):
        go(contexts(0))


@pytest.mark.parametrize("line", ["{", '{"kind": "point"}', '{"kind": "other"}'])
def test_a_corrupt_journal_is_found_and_the_way_out_is_said(go, tmp_path, line):
    path = go(contexts(0)).path
    assert check_run(tmp_path) == []
    with path.with_suffix(".jsonl").open("a") as file:
        file.write(line + "\n")
    for place in (tmp_path, path):
        (finding,) = check_run(place)
        assert finding.field == "journal"
    with pytest.raises(InputError, match="--no-resume"):
        go(contexts(0))
    assert go(contexts(0), resume=False).counts == {"ok": 1}
