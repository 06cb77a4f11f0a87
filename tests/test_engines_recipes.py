"""Recipes: launch lines and requests that settle what a log leaves open."""

import json
import shlex

import pytest

from labkit.cli import main
from labkit.engines.importing import Reader
from labkit.engines.recipes import plain, recipe
from labkit.engines.roles import (
    known_flags,
)
from labkit.engines.server import parse_launch
from labkit.errors import InputError
from tests.engine_logs import CONFIG, LAUNCH, NON_DEFAULT, server


@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_recipes_are_printed_with_the_bench_tool(name, engine):
    made = server(engine, {"sglang": "0.5.21", "vllm": "0.33.0"}[engine], attention_backend="fa3")
    made.take_args(
        {"speculative_algorithm": "EAGLE3"} if engine == "sglang" else {"speculative_config": {"method": "ngram"}}
    )
    lines = recipe(name, made, None)
    *commands, replay = [line for line in lines if not line.startswith("#")]
    assert replay.startswith("labkit replay --base-url http://127.0.0.1:")
    assert commands[1::2] == [commands[1]] * (len(commands) // 2)
    assert commands[1].startswith({"sglang": "python -m sglang.bench_serving", "vllm": "vllm bench serve"}[engine])
    assert not any(word.startswith("--") and line.split().count(word) > 1 for line in commands for word in line.split())
    assert {"all-reject": "1", "k-sweep": "8", "backend-ab": "flashinfer"}[name] in " ".join(commands).lower()


@pytest.mark.parametrize("text", [NON_DEFAULT, CONFIG, None])
@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
def test_recipes_of_vllm_are_valid_launch_lines(text, name):
    launch = None
    if text:
        reader = Reader()
        list(reader.read_text(text, "log"))
        made = reader.server
    else:
        settings = '{"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3}'
        launch = f"vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config '{settings}'"
        made, _ = parse_launch(launch, "0.33.0")
    lines = [shlex.split(line) for line in recipe(name, made, launch) if line.startswith("vllm serve")]
    for words in lines:
        assert words[2] == "meta-llama/Llama-3.1-8B-Instruct"
        assert {word for word in words if word.startswith("-")} <= known_flags("vllm")
        assert not {"torch.bfloat16", "SpeculativeConfig"} & set(words)
    found = [json.loads(words[words.index("--speculative-config") + 1]) for words in lines if "method" in str(words)]
    assert len(found) < len(lines)  # the baseline is plain
    for settings in found:
        assert settings["method"] == "eagle3"
        assert settings["model"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
        assert settings["num_speculative_tokens"] in ((1, 2, 4, 8) if name == "k-sweep" else (3,))


def test_recipe_from_a_launch_line():
    line = LAUNCH.format(3, 1, 4) + " --attention-backend fa3"
    made, _ = parse_launch(line, "0.5.21")
    lines = recipe("all-reject", made, line)
    assert lines[2] == f"SGLANG_SIMULATE_ACC_LEN=1.0 {line}"
    assert "sglang serve --model-path m --attention-backend fa3" in lines
    assert plain("llama-server -m a -md b --spec-draft-n-max 3 -c 1") == "llama-server -m a -c 1"
    assert plain("X=1 vllm serve m --speculative-config '{}' --port 1") == "X=1 vllm serve m --port 1"
    with pytest.raises(InputError, match="recipe: wanted"):
        recipe("nosuch", made, line)
    with pytest.raises(InputError, match="recipe: both servers would be the same"):
        recipe("backend-ab", server("llamacpp", None), None)


def test_recipes_take_port_and_model_of_the_launch_line():
    line = "vllm serve org/m --port 9123 --speculative-config.method ngram"
    made, _ = parse_launch(line, "0.33.0")
    text = "\n".join(recipe("all-reject", made, line))
    assert "--base-url http://127.0.0.1:9123 --model org/m" in text
    assert "http://127.0.0.1:9123 http://127.0.0.1:9124" in text
    assert ":8000" not in text


@pytest.mark.parametrize(
    ("line", "version", "wanted"),
    [
        ("vllm serve m", "0.33.0", "both servers would be the same"),
        ("sglang serve --model-path m", "0.5.21", "both servers would be the same"),
        ("trtllm-serve m --port 1", "1.2", "the YAML file"),
        ("vllm serve m --speculative-config.method ngram", "0.9.2", "unknown for this version"),
        ("sglang serve --model-path m --speculative-algorithm EAGLE", "0.5.1", "unknown for this version"),
    ],
)
def test_recipes_that_cannot_be_are_refused(line, version, wanted):
    made, _ = parse_launch(line, version)
    with pytest.raises(InputError, match=wanted):
        recipe("all-reject", made, line)


def test_recipes_of_trtllm_name_a_yaml_file_for_each_server():
    line = "trtllm-serve m --extra_llm_api_options spec.yaml"
    made, _ = parse_launch(line, "1.2")
    lines = recipe("k-sweep", made, line)
    for name in ("k1.yaml", "k8.yaml", "plain.yaml"):
        assert f"trtllm-serve m --extra_llm_api_options {name}" in lines
    assert any("k8.yaml is spec.yaml with speculative_config.max_draft_len = 8" in text for text in lines)
    assert any("spec.yaml without speculative_config is plain.yaml" in text for text in lines)


@pytest.mark.parametrize("name", ["all-reject", "k-sweep", "backend-ab"])
def test_recipes_of_llamacpp_name_the_drafter_and_what_is_unknown_of_this_build(tmp_path, capsys, name):
    path = tmp_path / "l.log"
    line = "slot print_timing: id  0 | task 1 | draft acceptance = 0.75000 (  150 accepted /   200 generated), "
    line += "mean acceptance length =  2.50, acceptance rate per position = (0.800, 0.700)\n"
    path.write_text("build: 6700 (abc) with cc\nadding speculative implementation 'draft-mtp'\n" + line)
    assert main(["diagnose", str(path), "--recipe", name]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("# --spec-type, --spec-draft-n-max")
    assert "unknown for this version; read without a version range (ggml-org/llama.cpp server manual" in first
    assert any("--spec-type draft-mtp --spec-draft-n-max" in text for text in rest)
    own = {"all-reject": "--spec-synth-len 1", "k-sweep": "--spec-draft-n-max 8", "backend-ab": "--flash-attn off"}
    assert any(text.endswith(own[name]) for text in rest)


def test_imposed_acceptance_is_on_above_0_only():
    """SGLang and TensorRT-LLM switch it off at 0, so TensorRT-LLM cannot be told to keep no draft."""
    for value, on in (("0", False), ("0.0", False), ("-1", False), ("1", True), ("0.5", True)):
        for name, line in (
            ("SGLANG_SIMULATE_ACC_LEN", "sglang serve"),
            ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "trtllm-serve m"),
        ):
            assert parse_launch(f"{name}={value} {line}", None)[0].imposed == on
    line = "trtllm-serve m --config s.yaml"
    lines = recipe("all-reject", parse_launch(line, "1.2")[0], line)
    assert f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=1 {line}" in lines
    assert any("one draft kept in every step" in text and "2 x its time" in text for text in lines)


def test_recipes_of_trtllm_compare_backends_by_their_files():
    line = "trtllm-serve m --extra_llm_api_options spec.yaml"
    lines = recipe("backend-ab", parse_launch(line, "1.2")[0], line)
    for name in ("trtllm", "flashinfer", "plain-trtllm", "plain-flashinfer"):
        assert f"trtllm-serve m --extra_llm_api_options {name}.yaml" in lines
    assert any("spec.yaml with attn_backend = FLASHINFER and no speculative_config" in text for text in lines)


def test_a_recipe_says_that_the_version_is_unknown():
    line = "sglang serve --model-path m --speculative-algorithm EAGLE"
    first = recipe("all-reject", parse_launch(line, None)[0], line)[0]
    assert first.startswith("# SGLANG_SIMULATE_ACC_LEN: the server's version is unknown (--engine-version); known for")


def test_drafts_of_the_windows_are_in_the_recipe(tmp_path, capsys):
    path = tmp_path / "v.log"
    counts = "Accepted: 360 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400"
    path.write_text(f"INFO 05-08 10:00:00 SpecDecoding metrics: Mean acceptance length: 2.80, {counts}\n")
    assert main(["diagnose", str(path), "--recipe", "all-reject", "--engine-version", "0.33.0"]) == 0
    assert '"num_speculative_tokens": 3' in capsys.readouterr().out


def test_recipes_say_that_random_tokens_tell_no_lengths():
    made, _ = parse_launch(LAUNCH.format(3, 1, 4), "0.5.21")
    assert "# random tokens" in recipe("k-sweep", made, None)[1]
    assert not [text for text in recipe("all-reject", made, None) if "# random tokens" in text]
