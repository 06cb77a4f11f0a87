"""The command line: one clear line and exit 2 for bad input, 1 for findings, no torch where none is needed."""

import json
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from labkit.attention.api import available_backends
from labkit.attention.registry import _BACKENDS
from labkit.axes import parse_axes, parse_size
from labkit.cli import main
from labkit.errors import InputError
from labkit.experiments import common
from labkit.experiments.launch import MODULES, _outcome, parse_duration
from labkit.sweep import RunResult
from tests.test_weights import write_folder

BAD_INPUT = [
    (["run", "attention", "--set", "backend=nosuch", "--dry-run"], "nosuch"),
    (["run", "attention", "--set", "nosuch=1", "--dry-run"], "no such axis"),
    (["run", "attention", "--preset", "nosuch"], "preset 'nosuch'"),
    (["run", "attention", "--set", "context_len=4x"], "'4x'"),
    (["run", "attention", "--set", "context_len=0"], "context_len"),
    (["run", "attention", "--set", "model=nosuch"], "nosuch"),
    (["run", "attention", "--set", "q_len"], "axis=value"),
    (["run", "attention", "--set", "q_len=5..2"], "backwards"),
    (["run", "loop", "--set", "k=0", "--dry-run"], "num_speculative_tokens"),
    (["run", "loop", "--set", "k=17", "--dry-run"], "1 to 16"),
    (["run", "loop", "--set", "verify_backend=nosuch"], "nosuch"),
    (["run", "loop", "--set", "workload=nosuch"], "nosuch"),
    (["run", "acceptance", "--set", "drafter=nosuch"], "nosuch"),
    (["run", "acceptance", "--set", "workload=/none.jsonl"], "workload '/none.jsonl': no such file; wanted one of"),
    (["run", "loop", "--set", "workload=none.jsonl"], "workload 'none.jsonl': no such file; wanted one of"),
    (["run", "loop", "--set", "drafter=autoregressive+tree", "--dry-run"], "wanted acceptance=real to time trees"),
    (["run", "loop", "--set", "drafter=.", "--dry-run"], "head's folder with config.json in it, which is missing"),
    (["run", "acceptance", "--draft-model", "."], "drafter .: wanted a head's folder with config.json in it"),
    (
        ["run", "acceptance", "--budget", "soon", "--dry-run"],
        "--budget: wanted a time",
    ),
    (["run", "loop", "--timeout", "0s", "--dry-run"], "--timeout"),
    (["run", "acceptance", "--set", "context_len=9000"], "axis context_len: smollm2-135m holds 8192 tokens"),
    (["run", "loop", "--set", "context_len=8192"], "axis context_len: smollm2-135m holds 8192 tokens"),
    (["run", "acceptance", "--set", "context_len=30"], "axis context_len: the shortest code_editing prompt has"),
    (["run", "loop", "--set", "context_len=40"], "axis context_len: the shortest code_editing prompt has"),
    (["run", "acceptance", "--set", "top_p=0"], "axis top_p"),
    (["run", "acceptance", "--set", "top_p=1.5"], "axis top_p"),
    (["run", "acceptance", "--set", "temperature=nan"], "axis temperature"),
    (["run", "acceptance", "--set", "temperature=inf"], "axis temperature"),
    (["run", "acceptance", "--set", "num_prompts=1000"], "at most 24 prompts"),
    (["run", "loop", "--set", "num_prompts=1000"], "at most 24 prompts"),
    (["run", "acceptance", "--set", "max_new_tokens=1"], "axis max_new_tokens"),
    (["run", "loop", "--set", "acceptance=real", "max_new_tokens=1"], "axis max_new_tokens"),
    (["run", "loop", "--set", "weight_dtype=float8_e4m3fn"], "weight_dtype 'float8_e4m3fn'"),
    (["run", "loop", "--model", ""], "model must be"),
    (["run", "attention", "--model", "", "--dry-run"], "model must be"),
    (["run", "loop", "--model", "llama-3.3-70b", "--dry-run"], "random:llama-3.3-70b"),
    (["run", "acceptance", "--model", "random:tiny", "--dry-run"], "no tokenizer"),
    (["run", "nosuch"], "nosuch"),
    (["check", "no/such/folder"], "no/such/folder"),
    (["breakeven", "--cost", "no/such/folder", "--acceptance-length", "2"], "no/such/folder"),
    (["breakeven", "--cost", "x", "--acceptance-length", "two"], "X,low,high"),
    (["breakeven", "--cost", "x", "--acceptance-length="], "wanted X or X,low,high"),
    (["breakeven", "--cost", "x"], "--acceptance"),
    (["batch", "--preset", "nosuch"], "batch: preset: want one of committed, cpu, gpu, ci, auto; got 'nosuch'"),
    (["import", "no/such/file"], "no such file"),
    (["import", "x", "--engine", "nosuch"], "nosuch"),
    (["diagnose"], "wanted a log"),
    (["diagnose", "--launch", "python x.py"], "launch"),
    (["nosuch"], "nosuch"),
]


def outcome(capsys, arguments):
    """Exit code and standard error of a command in this process."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("arguments", "names"), BAD_INPUT, ids=lambda value: "-".join(value)[:40])
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = outcome(capsys, arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert names in err
    assert list(tmp_path.iterdir()) == []


def test_missing_and_corrupt_models_are_named_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.experiments.common.run_sweep", lambda *args, **options: pytest.fail("measured"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for model in ("no-such-model", str(tmp_path / "broken")):
        arguments = ["run", "loop", "--preset", "ci", "--model", model, "--out", str(tmp_path / "runs")]
        code, _, err = outcome(capsys, arguments)
        assert code == 2
        assert model.rsplit("/", 1)[-1] in err.strip().splitlines()[-1]
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    code, _, err = outcome(capsys, ["run", "loop", "--preset", "ci"])
    assert code == 2
    assert "LABKIT_CACHE" in err


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("NAME = 5\n", 2, "NAME must be a text, got 5"),
        ("NAME = 'mine'\ndef supports(shape, device): raise RuntimeError('no idea')\n", 0, ""),
    ],
)
def test_a_bad_backend_file_is_one_line(capsys, tmp_path, text, code, part):
    (tmp_path / "mine.py").write_text(text + "def prepare(q, cache, spec): ...\n")
    arguments = ["run", "attention", "--preset", "ci", "--dry-run", "--backend-file", str(tmp_path / "mine.py")]
    found, _, err = outcome(capsys, arguments)
    assert (found, part in err) == (code, True)
    if code == 0:
        assert available_backends()["mine"] == "its supports raised RuntimeError: no idea"
        _BACKENDS.pop("mine")


def test_a_model_folder_is_planned_and_a_run_without_results_is_a_finding(capsys, tmp_path):
    (tmp_path / "m").mkdir()
    write_folder(tmp_path / "m", {"max_position_embeddings": 4096})
    (tmp_path / "m" / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    model = ["--preset", "ci", "--model", str(tmp_path / "m"), "--json"]
    assert outcome(capsys, ["run", "loop", "--dry-run", *model])[0] == 0
    code, out, _ = outcome(capsys, ["run", "attention", "--dry-run", *model])
    assert (code, json.loads(out)["axes"]["model"]) == (0, ["2/1/8"])
    numbers = ["run", "attention", "--dry-run", "--json", "--set", "context_len=1000,512,128"]
    assert json.loads(outcome(capsys, numbers)[1])["axes"]["context_len"] == [128, 512, 1000]
    graph = ["run", "attention", "--preset", "ci", "--set", "launch_mode=graph", "--out", str(tmp_path / "runs")]
    code, out, _ = outcome(capsys, graph)
    assert code == 1
    assert "8 unsupported" in out


def test_a_run_that_measured_nothing_says_so(tmp_path):
    result = RunResult("r", tmp_path / "r.parquet", {}, num_measured=0, num_left=2)
    _, text, code = _outcome(result)
    assert code == 1
    assert text.endswith("r.parquet: nothing measured, 2 left to resume")


@pytest.mark.parametrize("command", [["batch", "00"], ["demo"]])
def test_an_output_folder_that_is_a_file_is_one_line(capsys, tmp_path, command):
    (tmp_path / "file").write_text("")
    code, _, err = outcome(capsys, [*command, "--out", str(tmp_path / "file")])
    assert code == 2
    assert "out_dir: wanted a folder" in err


def test_sizes_and_ranges():
    assert [parse_size(text) for text in ("512", "4k", "1M")] == [512, 4096, 1 << 20]
    axes = parse_axes(["k=0..2,7", "context_len=4k", "backend=a,b"], {
        "num_speculative_tokens": [1], "context_len": [1], "backend": ["a"],
    })  # fmt: skip
    assert axes == {"num_speculative_tokens": [0, 1, 2, 7], "context_len": [4096], "backend": ["a", "b"]}
    assert [parse_duration(text) for text in ("90", "1.5m", "2h")] == [90, 90, 7200]
    with pytest.raises(InputError, match="twice"):
        parse_axes(["k=1", "k=2"], {"num_speculative_tokens": [1]})


def test_dry_run_tells_cells_minutes_and_memory_and_measures_nothing(capsys, tmp_path):
    code, out, _ = outcome(capsys, ["run", "loop", "--preset", "cpu", "--dry-run", "--json", "--out", str(tmp_path)])
    plan = json.loads(out)
    assert code == 0
    assert plan["num_points"] == 18
    assert plan["num_groups"] == 3
    assert 0 < plan["estimated_minutes"] < 30
    assert 0.5 < plan["estimated_memory_gb"] < 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("experiment", ["attention", "loop", "step"])
def test_dry_run_says_what_this_machine_cannot_run_as_the_run_does(capsys, monkeypatch, experiment):
    monkeypatch.setattr(common, "device", lambda: "cpu")
    arguments = ["run", experiment, "--preset", "ci", "--set", "launch_mode=graph"]
    code, out, _ = outcome(capsys, [*arguments, "--dry-run"])
    assert code == 1
    assert "x unsupported: launch_mode graph needs a CUDA device" in out
    (point, *_) = MODULES[experiment].points("ci", launch_mode=["graph"])
    (error,) = MODULES[experiment].measure([point])
    assert str(error) == "launch_mode graph needs a CUDA device"


def test_a_loop_reads_prompts_of_a_file_and_tells_files_apart_by_their_names(tmp_path):
    files = [tmp_path / "a" / "mine.jsonl", tmp_path / "b" / "mine.jsonl"]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps({"prompt": "Say it again."}) + "\n")
    points = MODULES["loop"].points("ci", workload=[str(files[0])])
    assert {point["group"] for point in points} == {"512/1/mine/mine-01"}
    with pytest.raises(InputError, match="axis workload: wanted files of different names"):
        MODULES["loop"].points("ci", workload=[*map(str, files)])


def test_run_help_lists_the_presets_of_every_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = "".join(capsys.readouterr().out.split())  # wrapped
    for name, module in MODULES.items():
        assert f"{name}:auto,{','.join(module.PRESETS)}" in told


def test_attention_run_check_and_resume(capsys, tmp_path):
    arguments = ["run", "attention", "--preset", "ci", "--set", "num_rounds=3", "--out", str(tmp_path), "--json"]
    code, out, _ = outcome(capsys, arguments)
    result = json.loads(out)
    assert code == 0
    assert result["counts"] == {"ok": 8}
    assert outcome(capsys, ["check", str(tmp_path)])[0] == 0
    code, out, err = outcome(capsys, arguments)
    assert json.loads(out)["run_id"] == result["run_id"]
    assert "nothing to measure" in err

    sidecar = next(tmp_path.rglob("*.json"))
    sidecar.write_text(sidecar.read_text().replace('"seed": 0', '"seed": 1', 1).replace("sha256", "sha257", 1))
    code, out, _ = outcome(capsys, ["check", str(tmp_path)])
    assert code == 1
    assert sidecar.stem in out


ANALYSIS = ["breakeven", "acceptance", "cost", "results", "sweep", "workloads", "plots", "cli", "engines.commands"]


@pytest.mark.parametrize("module", ANALYSIS)
def test_analysis_loads_no_torch(module):
    code = f"import labkit.{module}, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_breakeven_imports_in_under_a_second():
    # Time of the processor: other tests of the same run take their share of the clock.
    code = "import time, labkit.breakeven; print(time.process_time())"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 1.0


def test_help_is_quick():
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "labkit", "--help"], capture_output=True, check=True)
    assert time.perf_counter() - begin < 5
