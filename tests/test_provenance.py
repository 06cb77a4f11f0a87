"""Provenance: what is recorded, what must never be."""

import getpass
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from labkit import provenance
from labkit.provenance import PACKAGES, code_digest, collect, environment_digest, redact, slug


def test_collect_tells_what_made_a_number():
    found = collect("cpu")
    assert found["device"]["slug"].startswith("cpu-")
    assert found["device"]["num_cores"] >= 1
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["pyarrow"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["time"])
    assert found["num_threads"] >= 1
    json.dumps(found)


def test_only_listed_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstu")
    found = collect("cpu")
    assert found["num_threads"] == 3
    assert found["env"]["OMP_NUM_THREADS"] == "3"
    assert "HF_TOKEN" not in found["env"]


def test_no_name_of_person_or_machine(monkeypatch):
    home = str(Path.home())
    monkeypatch.setattr(getpass, "getuser", lambda: "marysmith")
    monkeypatch.setattr(socket, "gethostname", lambda: "box-17.lab.example")
    words = [
        f"{home}/bin/labkit",
        "run",
        "--model",
        f"{home}/m",
        "--out=/home/marysmith/x",
        "--api-key=abc",
        "box-17",
    ]
    monkeypatch.setattr(sys, "argv", words)
    text = json.dumps(collect("cpu"))
    assert '"labkit run --model ~/m --out=~/x --api-key=<secret> <host>"' in text
    for secret in ("marysmith", "box-17", 'abc"', home + "/"):
        assert secret not in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("sk-abcdefghijklmnop1234", "<secret>"),
        ("key hf_abcdefghijklmnopqrstu end", "key <secret> end"),
        ("hf_token: abcdef", "hf_token: <secret>"),
        ("verify on per_token: pays", "verify on per_token: pays"),  # a backend's name
        ("Authorization: Bearer eyJhbGciOi", "Authorization: Bearer <secret>"),
        ("https://ann:pw@host.example/x", "https://<secret>@host.example/x"),
        ("--api-key abc --k 4", "--api-key <secret> --k 4"),
        ("OPENAI_API_KEY=abc", "OPENAI_API_KEY=<secret>"),
        ('{"api_key": "abc"}', '{"api_key": "<secret>"}'),
        ("/Users/ann/models", "~/models"),
        ("num_tokens: 5, k=4, sk-8, tokens/s 5", "num_tokens: 5, k=4, sk-8, tokens/s 5"),
    ],
)
def test_redact(text, wanted):
    assert redact(text) == wanted
    assert redact(wanted) == wanted


def test_environment_digest_moves_with_what_changes_times_only():
    base = collect("cpu")
    digest = environment_digest(base, "code")
    same = {**base, "time": "x", "commit": "y", "dirty": None, "command": "z", "platform": "w"}
    same["device"] = {**base["device"], "sm_clock_mhz": 1.0, "temperature_c": 80.0}
    assert environment_digest(same, "code") == digest
    for change in (
        {"device": {**base["device"], "driver": "2"}},
        {"device": {**base["device"], "power_limit_w": 300.0}},
        {"versions": {**base["versions"], "torch": "0"}},
        {"num_threads": 99},
        {"env": {"TRITON_INTERPRET": "1"}},
        {"python": "9.9"},
    ):
        assert environment_digest({**base, **change}, "code") != digest
    assert environment_digest(base, "other code") != digest


def test_gpu_facts_from_nvidia_smi(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    row = "NVIDIA H200, 580.159.03, 1980, 3201, [N/A], 700.00, 143771, 345, 31"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "{row}"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    device = collect("cuda:1")["device"]
    assert device["slug"] == "nvidia-h200"
    assert device["driver"] == "580.159.03"
    assert device["sm_clock_max_mhz"] == 1980.0
    assert device["sm_clock_applied_mhz"] is None
    assert (tmp_path / "arguments").read_text().startswith("-i 5 ")


def test_gpu_that_cannot_tell_is_unknown(monkeypatch):
    monkeypatch.setattr(provenance, "_output_of", lambda *command: None)
    found = collect("cuda")
    assert found["device"]["slug"] == "gpu-unknown"
    assert found["device"]["driver"] is None
    assert found["commit"] is None
    assert found["dirty"] is None


def test_slug():
    assert slug("NVIDIA GeForce RTX 5090 (x)") == "nvidia-geforce-rtx-5090-x"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763"),
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "cpu-intel-xeon-platinum-8480"),
        ("Apple M3 Max", "cpu-apple-m3-max"),
    ],
)
def test_cpu_slug(monkeypatch, name, wanted):
    monkeypatch.setattr(provenance, "cpu_name", lambda: name)
    assert collect("cpu")["device"]["slug"] == wanted


def test_code_digest_follows_the_source():
    assert code_digest(["timing.py"]) == code_digest(["timing.py"])
    assert code_digest(["timing.py"]) != code_digest(["timing.py", "calibrate.py"])
    with pytest.raises(FileNotFoundError):
        code_digest(["nowhere.py"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run loop --out /data/x/runs --model=/m/good", "run loop --out runs --model=good"),
        ("--set model=24/4/256 --out ~/out ../b/c", "--set model=24/4/256 --out ~/out ../b/c"),
        ("http://host:80/v1 a / b", "http://host:80/v1 a / b"),
        ("'/tmp/good/config.json' is bad", "'config.json' is bad"),
    ],
)
def test_absolute_paths_lose_their_folders(text, expected):
    assert provenance.without_folders(text) == expected
