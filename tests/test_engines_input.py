"""What `labkit import` reads however it was captured, and what it does with broken, hostile and endless input."""

import contextlib
import gzip
import io
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from labkit.cli import main
from labkit.engines.importing import Reader, import_files
from labkit.engines.reading import Input, clean
from labkit.errors import InputError
from tests.engine_forms import BENCH, CAPTURES, DECODE, FORMS, FULL, SERVE, STEP, check, records_of


@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_in_any_way(tmp_path, capture):
    records = records_of(tmp_path, CAPTURES[capture](DECODE))
    assert len(records) == 2
    check(records[1], FULL | STEP)


def test_cut_gzip_keeps_what_came_before(tmp_path):
    path = tmp_path / "x.gz"
    lines = "".join(f"{DECODE.replace('5120', str(5120 + i))}\n" for i in range(3000))
    path.write_bytes(gzip.compress(lines.encode())[:-200])
    reader = Reader()
    assert len(list(import_files([path], reader=reader))) > 10
    assert "cut off" in reader.notes[0]


def test_mixed_file_and_forced_engine(tmp_path):
    text = "\n".join(
        [FORMS[name][0] for name in ("sglang old rate", "vllm 0.9", "llama.cpp statistics", "sglang meta_info")]
    )
    engines = [record.engine for record in records_of(tmp_path, text + "\nnoise | noise\n")]
    assert sorted(engines) == ["llamacpp", "sglang", "sglang", "vllm"]
    assert {record.engine for record in records_of(tmp_path, text, engine="vllm")} == {"vllm"}
    with pytest.raises(InputError, match="no figures of trtllm"):
        records_of(tmp_path, text, engine="trtllm")


def test_truncated_json_with_whole_lines(tmp_path):
    lines = "\n".join(json.dumps(BENCH) for _ in range(3))
    assert len(records_of(tmp_path, lines + '\n{"mean_e2e_lat')) == 3
    with pytest.raises(InputError, match="cut off"):
        records_of(tmp_path, json.dumps(SERVE, indent=1)[:-20])


GARBLED = [
    DECODE.replace("2026-06-03", "2026-42-03"),
    DECODE.replace("2.80", "nan").replace("5120", "9" * 400),
    "llamacpp:spec_decode_num_draft_tokens_total " + "9" * 400,
    "| llama | pp" + "9" * 400 + " @ d8192 | 50.00 |",
    "draft acceptance = 0.6 (  360 accepted /   600 generated), mean acceptance length = " + "9" * 400,
    '{"internal_states": -1, "version": []}',
    '{"spec_verify_ct": [], "completion_tokens": {"a": 1}, "spec_accept_histogram": [null, "x", -1]}',
    "Decode batch, " + "#a (b): " * 5000,
]


@pytest.mark.parametrize("text", GARBLED)
def test_garbled_lines_do_no_harm(text):
    records = [record.to_dict() for record in Reader().read_text(f"{text}\n{DECODE}\n{text}", "x")]
    assert json.dumps(records, allow_nan=False)
    (alone,) = [record.to_dict() for record in Reader().read_text(DECODE, "x")]
    assert alone["mean_acceptance_length"] in [record["mean_acceptance_length"] for record in records]


def test_secrets_of_the_arguments_are_not_kept():
    reader = Reader()
    text = "server_args=ServerArgs(model_path='m', api_key='sk-1', attention_backend='fa3', version='0.5.21')\n"
    list(reader.read_text(text + DECODE, "x"))
    assert reader.server.args == {"attention_backend": "fa3"}


IMPORT = """
import sys
from labkit.engines.importing import import_files

def peak():  # ru_maxrss of a child starts at what its parent had
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))

before = peak()
n = sum(1 for _ in import_files(sys.argv[1:]))
print(n, peak() - before)
"""


def run_import(path):
    """Number of records and MiB of memory that reading took; standard error."""
    done = subprocess.run([sys.executable, "-c", IMPORT, str(path)], capture_output=True, text=True)
    return done.stdout.split(), done.stderr


def test_long_logs_take_no_memory(tmp_path):
    path = tmp_path / "long.log"
    noise = "[2026-06-03 10:00:00] INFO: 127.0.0.1 - POST /generate HTTP/1.1 200 OK\n" * 50
    with path.open("w") as file:
        for i in range(12_000):
            file.write(noise + DECODE.replace("5120", str(5120 + i)) + "\n")
    (count, memory), progress = run_import(path)  # 45 MB
    assert int(count) == 12_000
    assert int(memory) < 50
    assert progress == ""


def test_one_endless_line_is_left_out(tmp_path):
    path = tmp_path / "line.log"
    with path.open("w") as file:
        file.write(DECODE + "\n")
        for _ in range(160):
            file.write("x" * (1 << 20))
        file.write("\n" + DECODE + "\n")
    (count, memory), progress = run_import(path)
    assert int(count) == 2
    assert int(memory) < 300
    assert "read line.log MiB" in progress


def test_bombs_and_deep_nesting(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(InputError, match="nested too deep"):
        list(import_files([deep]))
    lines = records_of(tmp_path, "[" * 100_000 + "\n" + DECODE + "\n" + DECODE + "\n")
    assert len(lines) == 2
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(300):
            file.write(b"\0" * (1 << 20))
    (*_,), error = run_import(bomb)
    assert "gzip bomb" in error


@pytest.mark.parametrize(
    ("content", "name", "wanted"),
    [
        (None, "no/such", "no such file"),
        ("nothing here\n", "x.log", "no figures of a known engine"),
        ('{"a": 1}', "x.json", "no figures"),
        (b"\x1f\x8bnot gzip", "x.gz", "gzip"),
        ("", "empty.log", "no figures"),
        (b"\0" * 4096, "zeros", "no figures"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, capsys, content, name, wanted):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path)]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert wanted in err


def test_unknown_engine_and_folder(tmp_path, capsys):
    assert main(["import", str(tmp_path), "--engine", "auto"]) == 2
    assert main(["import", "x", "--engine", "nosuch"]) == 2
    assert "wanted one of auto, sglang" in capsys.readouterr().err


def test_out_that_is_no_folder(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n")
    assert main(["import", str(path), "--out", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_command_line_json_text_and_out(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n{DECODE}\n")
    assert main(["import", str(path), "--json", "--out", str(tmp_path / "out")]) == 0
    records = json.loads(capsys.readouterr().out)
    names = "engine engine_version model time scope origin definition warnings num_verify_steps num_drafted_steps"
    names += " zero_draft_steps num_drafted_tokens num_accepted_tokens mean_acceptance_length draft_acceptance_rate"
    names += " acceptance_rate_per_pos num_speculative_tokens batch_size context_len output_tokens_per_s step_ms"
    names += " step_ms_source cuda_graph prefill_mixed"
    assert set(names.split()) <= set(records[0])
    written = pq.read_table(tmp_path / "out" / "import.parquet").to_pylist()
    nested = ("backend", "details")
    assert [row | {name: row[name] and json.loads(row[name]) for name in nested} for row in written] == records
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["import.parquet"]
    assert main(["import", str(path)]) == 0
    assert "2.80" in capsys.readouterr().out


def test_stdin():
    command = [sys.executable, "-m", "labkit", "import", "-", "--json"]
    for data in (f"{DECODE}\n".encode(), gzip.compress(f"{DECODE}\n".encode())):
        done = subprocess.run(command, input=data, capture_output=True)
        assert json.loads(done.stdout)[0]["mean_acceptance_length"] == 2.8


def test_pipe(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(f"{DECODE}\n")
    command = f"{sys.executable} -m labkit import <(cat {path}) --json"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert json.loads(done.stdout)[0]["mean_acceptance_length"] == 2.8


def test_no_torch():
    code = "import labkit.engines.commands, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_clean_leaves_other_json_alone():
    assert clean('{"log": 3, "x": 1}') == '{"log": 3, "x": 1}'
    with contextlib.closing(io.BytesIO()):
        assert clean(json.dumps({"log": "\x1b[1mbold\x1b[0m\n"})) == "bold"
    with pytest.raises(InputError):
        Input("no/such/file")


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("import - - < {log}", "only once"),
        ("import - <&-", "closed"),
        ("diagnose - <&-", "closed"),
        ("import {log} --out {folder}", "this is a folder"),
        ("import {log} > /dev/full", "No space left"),
        ("diagnose {log} --launch 'vllm serve m'", "one launch line alone"),
        ("diagnose --launch 'vllm serve m' --launch 'vllm serve n'", "one launch line alone"),
    ],
)
def test_input_and_output_that_cannot_be_used(tmp_path, command, wanted):
    (tmp_path / "import.parquet").mkdir()
    log = tmp_path / "x.json"
    log.write_text(json.dumps(SERVE))
    shell = f"{sys.executable} -m labkit {command.format(log=log, folder=tmp_path)}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert wanted in done.stderr
