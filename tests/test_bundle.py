"""Bundles: what is in them, what must not be, and whether another's rows agree."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from labkit import cli, paths
from labkit.check import check_run
from labkit.errors import InputError
from labkit.publish.bundle import MAX_FILES, _claim_text, bundle, reproduce
from labkit.publish.claims import Claim, consistent
from labkit.replay.run import Options, replay
from labkit.replay.scenes import scene
from labkit.results import build_table, load_runs, read_sidecar, run_files, write_run
from tests.fault_server import FaultServer

SECRETS = ("hf_abcdefghijklmnop1234", "someuser42", "host-of-mine", "/home/", "s3cr3tpassw0rd")


def planted_run(
    folder, run_id="20260101T000000Z-aaaaaa", speed=1.5, noise=0.01, seed=0, gpu="nvidia-h200", quality="ok", **sidecar
):
    """A replay run of two endpoints, b `speed` times as fast as a."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in range(6):
        for repeat in range(5):
            for endpoint, rate in (("a", 100.0), ("b", 100.0 * speed)):
                gap = 1e3 / rate * np.exp(rng.normal(0, noise))
                rows.append(
                    {"run_id": run_id, "experiment": "replay", "origin": "measured", "status": "ok", "gpu": gpu}
                    | {
                        "group": f"g{prompt}",
                        "round": repeat,
                        "sample": 0,
                        "point_key": f"{prompt}.{repeat}.{endpoint}",
                    }
                    | {"record": "request", "endpoint": endpoint, "launch": f"start-{endpoint}", "scene": "content"}
                    | {"stage": "measured", "concurrency": 1, "target": "tiny", "prompt_id": f"p{prompt}"}
                    | {"chunk_ms": [10 + gap * i for i in range(9)], "num_chunks": 9, "num_output_tokens": 9}
                    | {
                        "quality": quality,
                        "ttft_ms": 10.0,
                        "output_text": f"text {prompt}",
                        "request_digest": f"d{prompt}",
                    }
                )
    values = {name: [row[name] for row in rows] for name in rows[0]}
    path = folder / "replay" / gpu / f"{run_id}.parquet"
    provenance = {"device": {"name": "NVIDIA H200", "slug": gpu, "sm_clock_max_mhz": 1980.0, "power_limit_w": 700.0}}
    content = {"run_id": run_id, "experiment": "replay", "gpu": gpu, "provenance": provenance, **sidecar}
    return write_run(path, [build_table("replay", values)], content)


def test_a_claim_tells_doubtful_samples_and_both_units(tmp_path):
    mine = planted_run(tmp_path / "mine", quality="device shared (others had 40% of it); unstable")
    with zipfile.ZipFile(bundle([str(mine)], tmp_path / "b.zip")) as archive:
        text = archive.read("CLAIM.md").decode()
    assert "Doubtful samples, of 60: 60 device shared, 60 unstable." in text
    claim = Claim("speedup", {"decode_backend": "per_token|sdpa"}, 1.5, 1.1, 2.0, 12, 8)
    assert claim.units() == "12 rounds, 8 prompts"
    row = _claim_text([claim], [read_sidecar(mine)], "").splitlines()[-1]
    assert row.replace("\\|", "").count("|") == 5
    assert "Doubtful" not in row


def test_claim_and_reproduce(tmp_path):
    mine = planted_run(tmp_path / "mine", command="labkit replay --scene content")
    out = bundle([str(mine)], tmp_path / "b.zip")
    with zipfile.ZipFile(out) as archive:
        text = archive.read("CLAIM.md").decode()
        script = archive.read("reproduce.sh").decode()
        assert archive.testzip() is None
    for part in (
        "1.5",
        "Estimator",
        "Unit: prompt x launch",
        "n = 30",
        "Baseline: a",
        "Not counted",
        "NVIDIA H200",
        "1980 MHz",
    ):
        assert part in text, part
    assert "labkit replay --scene content --out new" in script
    report, met = reproduce(out)
    assert met, report
    same = planted_run(tmp_path / "same", "20260102T000000Z-bbbbbb", seed=1)
    report, met = reproduce(out, [same])
    assert met, report
    assert "consistent" in report
    slower = planted_run(tmp_path / "slower", "20260102T000000Z-cccccc", speed=1.3, seed=1)
    report, met = reproduce(out, [slower])
    assert not met
    assert "not consistent" in report


def test_reproduce_names_the_fields_that_differ(tmp_path):
    out = bundle([str(planted_run(tmp_path / "mine", extra="x"))], tmp_path / "b.zip")
    other = planted_run(tmp_path / "other", "20260102T000000Z-bbbbbb", gpu="nvidia-b200", extra="y")
    report, met = reproduce(out, [other])
    assert met
    assert "extra: x -> y" in report
    assert "gpu: nvidia-h200 -> nvidia-b200" in report


@pytest.mark.parametrize("anonymous", [False, True])
def test_nothing_of_a_person_or_host_leaves(tmp_path, monkeypatch, anonymous):
    monkeypatch.setenv("HOME", "/home/someuser42")
    monkeypatch.setattr("getpass.getuser", lambda: "someuser42")
    monkeypatch.setattr("socket.gethostname", lambda: "host-of-mine")
    launch = "vllm serve /home/someuser42/models/m --api-key s3cr3tpassw0rd --host host-of-mine"
    planted = planted_run(
        tmp_path / "mine",
        command="labkit replay --out /home/someuser42/runs --token hf_abcdefghijklmnop1234",
        endpoints={"a": {"launch": launch, "args": {"model": "/home/someuser42/m"}}},
        env={"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abcdefghijklmnop1234"},
        note=["on host-of-mine by someuser42"],
    )
    table = build_table("replay", {name: [value] for name, value in _row(planted).items()})
    write_run(planted, [table], read_sidecar(planted))
    out = bundle([str(planted)], tmp_path / "b.zip", anonymous=anonymous)
    with zipfile.ZipFile(out) as archive:
        everything = b"".join(archive.read(name) + name.encode() for name in archive.namelist())
        runs = [name for name in archive.namelist() if name.endswith(".parquet")]
        archive.extractall(tmp_path / "unpacked")
    assert check_run(tmp_path / "unpacked" / "runs") == []
    rows = load_runs("replay", tmp_path / "unpacked" / runs[0])
    everything += rows.drop(columns="source").to_json().encode()  # columns are compressed in the file
    for secret in SECRETS:
        assert secret.encode() not in everything, secret
    if anonymous:
        assert rows["output_text"].isna().all()
        assert planted.stem.encode() not in everything
        assert b"vllm serve" not in everything


def _row(path):
    row = load_runs("replay", path).iloc[0].drop("source").to_dict()
    kept = {name: value for name, value in row.items() if value is not None and value == value}
    return kept | {"output_text": "I am someuser42 at host-of-mine, /home/someuser42/x", "status": "ok"}


def test_a_request_with_a_secret_is_left_out(tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "My key is hf_abcdefghijklmnop1234."}\n{"prompt": "Say two."}\n')
    with FaultServer() as server:
        run = replay([server.url], [scene(str(prompts))], out_dir=tmp_path, options=Options(repeats=1))
    out = bundle([str(run)], tmp_path / "b.zip")
    with zipfile.ZipFile(out) as archive:
        name = next(name for name in archive.namelist() if name.endswith("requests.parquet"))
        archive.extract(name, tmp_path)
    import pyarrow.parquet as pq

    content = pq.read_table(tmp_path / name).to_pydict()
    assert sorted(body is None for body in content["body"]) == [False, True]
    assert None not in content["request_digest"]


def test_bundle_of_a_committed_figure(tmp_path):
    figure = sorted(paths.FIGURES.glob("*breakeven.json"))[0].stem
    out = bundle([figure], tmp_path / "b.zip")
    with zipfile.ZipFile(out) as archive:
        names = archive.namelist()
    assert f"figures/{figure}.svg" in names
    assert any(name.startswith("runs/loop/") for name in names)
    _, met = reproduce(out)
    assert met


def broken(tmp_path, name, data=b"x", **info):
    path = tmp_path / "bad.zip"
    entry = zipfile.ZipInfo(name)
    for slot, value in info.items():
        setattr(entry, slot, value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


@pytest.mark.parametrize(
    "name", ["../up.json", "/etc/x.json", "runs/../../x", "a\\..\\b", "C:/x", "runs//x", "./x", "a/./b"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="no plain relative file name"):
        reproduce(broken(tmp_path, name))


def test_links_are_refused(tmp_path):
    with pytest.raises(InputError, match="no plain relative file name"):
        reproduce(broken(tmp_path, "manifest.json", b"/etc/passwd", external_attr=0o120777 << 16))


def test_bombs_are_refused(tmp_path):
    with pytest.raises(InputError, match="zip bomb"):
        reproduce(broken(tmp_path, "manifest.json", b"\0" * (64 << 20)))
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(MAX_FILES + 1):
            archive.writestr(f"f{index}", b"")
    with pytest.raises(InputError, match="wanted at most"):
        reproduce(path)


def test_a_changed_bundle_is_refused(tmp_path):
    out = bundle([str(planted_run(tmp_path / "mine"))], tmp_path / "b.zip")
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(out) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            copy.writestr(name, data.replace(b"1.5", b"2.5") if name == "claim.json" else data)
    with pytest.raises(InputError, match="not the file that was bundled"):
        reproduce(changed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bundle", "nosuch", "--out", "b.zip"], "wanted a run, a folder of runs, or a figure of"),
        (["reproduce", "nosuch.zip"], "nosuch.zip: wanted a bundle"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_consistency_passes_equal_truths_and_fails_others():
    rng, passed = np.random.default_rng(0), {1.0: 0, 1.2: 0}
    for truth in passed:
        for _ in range(400):
            a, b = rng.normal(0, 0.03), rng.normal(np.log(truth), 0.03)
            sides = [Claim("speedup", {}, np.exp(x), np.exp(x - 0.0588), np.exp(x + 0.0588), 8) for x in (a, b)]
            passed[truth] += bool(consistent(*sides))
    assert 0.92 < passed[1.0] / 400 < 0.98
    assert passed[1.2] / 400 < 0.05
    assert consistent(*[replace(side, low=None) for side in sides]) is None


def test_command_line(tmp_path, capsys):
    run = planted_run(tmp_path / "mine")
    assert cli.main(["bundle", str(run), "--out", str(tmp_path / "b.zip"), "--anonymous"]) == 0
    assert cli.main(["reproduce", str(tmp_path / "b.zip"), "--rows", str(run)]) == 0
    assert "consistent" in capsys.readouterr().out
    assert (
        json.loads(zipfile.ZipFile(tmp_path / "b.zip").read("claim.json"))["claims"][0]["metric"] == "decode_rate_ratio"
    )


def test_an_anonymous_bundle_agrees_with_its_own_rows(tmp_path):
    planted = [
        planted_run(
            tmp_path / "mine", f"20260101T00000{index}Z-aaaaaa", seed=index, lot=index, command=f"labkit x {index}",
            started="2026-01-01T00:00:00Z", launch=f"vllm serve {index}", grid={"scene": ["content"]},
            endpoints={"a": {"launch": "vllm serve m", "engine": "vllm"}},
        )
        for index in range(3)
    ]  # fmt: skip
    for anonymous in (False, True):
        out = bundle([str(tmp_path / "mine")], tmp_path / "b.zip", anonymous=anonymous)
        report, met = reproduce(out, planted)
        assert met
        assert "differ" not in report
        assert report.endswith("consistent")


@pytest.mark.parametrize(("experiment", "metric"), [("step", "relative_step_cost"), ("replay", "engine_step_cost")])
def test_rows_of_steps_make_a_claim(experiment, metric, tmp_path):
    stored = sorted((paths.RUNS / experiment).glob("*/*.parquet"))[-2:]  # several runs, not all: that takes 20 s
    out = bundle([str(run) for run in stored], tmp_path / "b.zip")
    report, met = reproduce(out, stored)
    assert met
    lines = report.splitlines()
    assert all(line.startswith(metric) and line.endswith(": consistent") for line in lines)
    assert "[" in lines[0]


def test_a_long_column_is_redacted_once_per_text(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("labkit.publish.bundle.redact", lambda text: calls.append(text) or text)
    run = planted_run(tmp_path / "mine")
    bundle([str(run)], tmp_path / "b.zip")
    assert len(calls) < 3 * len(set(calls)) + 50  # 60 rows of some 20 text columns


@pytest.mark.parametrize(("out", "said"), [("b.tar", "file ending in .zip"), ("none/b.zip", "no such folder")])
def test_a_bad_out_is_refused_before_the_rows_are_read(out, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("labkit.publish.bundle.claims_of", lambda runs: pytest.fail("read before --out was looked at"))
    assert cli.main(["bundle", str(planted_run(tmp_path / "mine")), "--out", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_found_by_its_id(tmp_path, monkeypatch, capsys):
    run = planted_run(tmp_path / "mine")
    other = planted_run(tmp_path / "mine", "20260102T000000Z-bbbbbb", seed=1)
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "mine"))
    assert run_files(Path(run.stem)) == [run]
    assert cli.main(["compare", run.stem, other.stem]) in (0, 1)
    assert cli.main(["bundle", run.stem, "--out", str(tmp_path / "b.zip")]) == 0
    assert cli.main(["compare", run.stem, "20260103T000000Z-cccccc"]) == 2
    assert "no run of this id in" in capsys.readouterr().err
