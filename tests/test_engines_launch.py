"""Launch lines: mistakes, ceilings, flags that are not known."""

import pytest

from labkit.engines.roles import (
    launch_findings,
    launch_notes,
)
from labkit.engines.server import parse_launch
from labkit.errors import InputError
from tests.engine_logs import LAUNCH


@pytest.mark.parametrize(
    ("line", "version", "wanted"),
    [
        (LAUNCH.format(4, 1, 24), "0.5.21", ["hold 5 rows"]),
        (LAUNCH.format(3, 1, 4), "0.5.21", []),
        (LAUNCH.format(2, 2, 8), "0.5.21", ["hold 7 rows"]),
        (LAUNCH.format(3, 2, 8), "0.5.21", []),
        (LAUNCH.format(5, 8, 64), "0.5.21", []),
        (LAUNCH.format(5, 8, 500), "0.5.21", ["hold 265 rows"]),
        (
            LAUNCH.format(3, 1, 4) + " --speculative-draft-attention-backend fa3",
            "0.5.6",
            ["not a flag of sglang 0.5.6"],
        ),
        (LAUNCH.format(3, 1, 4) + " --speculative-draft-attention-backend fa3", "0.5.21", []),
        (LAUNCH.format(3, 1, 4) + " --max-running-requests 64 --cuda-graph-max-bs 16", "0.5.21", ["below 64 running"]),
        (
            "vllm serve m --speculative-config '{\"num_speculative_tokens\": 7}' --max-num-seqs 64 "
            "--max-cudagraph-capture-size 256",
            "0.33.0",
            ["below batch x q_len = 64 x 8"],
        ),
        ("llama-server -m m.gguf --draft-max 4", "6123", []),
        (LAUNCH.format("x", -1, 4), "0.5.21", ["eagle_topk: wanted a whole", "num_steps: wanted a whole"]),
        (
            'vllm serve m --speculative-config \'{"num_speculative_tokens": "abc"}\'',
            "0.33.0",
            ["wanted a whole number"],
        ),
        (
            "vllm serve m --compilation-config '{\"cudagraph_capture_sizes\":[1,2,4,8]}' --max-num-seqs 64",
            "0.33.0",
            ["largest CUDA graph 8: below batch x q_len = 64 x 1"],
        ),
        ("vllm serve m --mm-attention-backend TORCH", "0.33.0", []),
        ("sglang serve --model-path m --disable-cuda-graph", "0.5.21", ["without a CUDA graph"]),
        ("sglang serve --model-path m --attention-backend fa9", "0.5.21", ["fa9: no backend"]),
        ("llama-server -m m.gguf --spec-draft-n-max 4", "9030", []),
        (LAUNCH.format(3, 1, 4) + " --cuda-graph-max-bs 4", "0.5.21", ["below 48 running"]),
        (LAUNCH.format(3, 1, 4).replace("EAGLE", "EAGEL"), "0.5.21", ["EAGEL"]),
        ("sglang serve --model-path m --speculative-algorithm DSPARK", "0.5.15", ["DSPARK: not in sglang 0.5.15"]),
        ("vllm serve m --speculative-config.method medusa", "0.33.0", ["medusa: not in vllm 0.33.0; known for 0.9.2"]),
        (
            'vllm serve m --speculative_config \'{"method": "deepseek_mtp", "num_speculative_token": 3}\'',
            "0.33.0",
            ["did you mean num_speculative_tokens?"],
        ),
        (
            "vllm serve m --speculative-config.num_speculative_tokens 3 --max-num-seqs 64 "
            "-O '{\"cudagraph_capture_sizes\":[1,2,4,8]}'",
            "0.33.0",
            ["below batch x q_len = 64 x 4"],
        ),
        ("vllm serve m --cudagraph-capture-sizes 1 2 4 128 --max-num-seqs 64", "0.33.0", []),
        ("vllm serve m --cudagraph-capture-sizes 1 2 4 8 --max-num-seqs 64", "0.33.0", ["CUDA graph 8: below batch"]),
        (
            "llama-server -m m.gguf --spec-type draft-mpt,ngram-mod",
            "9030",
            ["draft-mpt: unknown for this version; did"],
        ),
        (
            'vllm serve m --speculative-config \'{"num_speculative_tokens": 3, "draft_sample_method": "greedy"}\'',
            "0.20.0",
            ["draft_sample_method: not a flag of vllm 0.20.0; known for 0.24 to 0.33.0"],
        ),
        ("vllm serve m --speculative-config.rejection_sample_method strict", "0.33.0", ["strict: not in vllm 0.33.0"]),
        (
            "sglang serve --model-path m --attention-backend nsa",
            "0.5.23",
            ["nsa: not in sglang 0.5.23; known for 0.5.6"],
        ),
        ("sglang serve --model-path m --attention-backend nsa", "0.5.6", []),
        (
            LAUNCH.format(3, 1, 4) + " --cuda-graph-bs 1 2 4 8 --max-running-requests 64",
            "0.5.21",
            ["8: below 64 running"],
        ),
        (LAUNCH.format(3, 2, 8) + " --attention-backend trtllm_mha", "0.5.21", ["trtllm_mha verifies chains only"]),
        (
            "sglang serve --model-path m --speculative-algorithm DFLASH --speculative-dflash-block-size 8 "
            "--speculative-num-draft-tokens 16",
            "0.5.23",
            ["--speculative-dflash-block-size 8: num-draft-tokens must be 8, not 16"],
        ),
        (
            "sglang serve --model-path m --speculative-algorithm DSPARK --speculative-dspark-block-size 7 "
            "--speculative-num-draft-tokens 7",
            "0.5.23",
            ["--speculative-dspark-block-size 7: num-draft-tokens must be 8, not 7"],
        ),
        (
            "vllm serve m --attention-backend FLASH_ATTN --attention-config.backend TRITON_ATTN",
            "0.33.0",
            ["--attention-backend and --attention-config.backend: both are set"],
        ),
        (
            "vllm serve m --spec-method eagle3 --spec-model x --spec-tokens 3 --max-num-seqs 256 "
            "--max-cudagraph-capture-size 512",
            "0.33.0",
            ["largest CUDA graph 512: below batch x q_len = 256 x 4"],
        ),
    ],
)
def test_launch_lines(line, version, wanted):
    made, flags = parse_launch(line, version)
    found = list(launch_findings(made, flags))
    assert len(found) == len(wanted)
    assert all(text in problem for text, problem in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("settings", "ceiling"), [((3, 1, 4), 4), ((5, 8, 64), 6), ((5, 8, 4), 4), ((3, 1, 16), 4), ((5, 8, 500), 6)]
)
def test_launch_notes_tell_the_ceiling(settings, ceiling):
    made, _ = parse_launch(LAUNCH.format(*settings), "0.5.21")
    notes = " ".join(launch_notes(made, []))
    assert f"at most {ceiling}:" in notes
    assert "48" in notes
    block = parse_launch("sglang serve --speculative-algorithm DSPARK --speculative-dspark-block-size 7", "0.5.23")
    assert any("at most 8: 7 drafts" in text for text in launch_notes(*block))  # the root is not in it
    unset, flags = parse_launch("sglang serve --model-path m --speculative-algorithm NGRAM", "0.5.23")
    assert any("so the ceiling is unknown" in text for text in launch_notes(unset, flags))


@pytest.mark.parametrize(
    "line",
    [
        f"docker run -e SGLANG_SIMULATE_ACC_LEN=3 lmsysorg/sglang {LAUNCH.format(3, 1, 4)}",
        "llama-server -m m.gguf --spec-type draft-mtp --spec-synth-len 2.5",
        'vllm serve m --speculative-config \'{"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}\'',
    ],
)
def test_a_launch_line_that_imposes_acceptance_is_told(line):
    assert any("acceptance is imposed" in text for text in launch_notes(*parse_launch(line, None)))


def test_spec_tokens_of_vllm_are_the_ceiling():
    made = parse_launch("vllm serve m --spec-method eagle3 --spec-model x --spec-tokens 3", "0.33.0")
    assert any("at most 4: 3 drafts" in text for text in launch_notes(*made))


@pytest.mark.parametrize(
    ("line", "version", "flag"),
    [
        ("sglang serve --model-path m --specultive-foo 3", "0.5.21", "--specultive-foo"),
        ("vllm serve m --foo", "0.33.0", "--foo"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --max-num-seq 3", "0.33.0", "--max-num-seq"),
        ("sglang serve --model-path m --speculative-draft-attention-backend fa3", "0.5.10", "--speculative-draft-att"),
        ("llama-server -m m.gguf --draft-max 4", "6123", "--draft-max"),
        ("llama-server -m m.gguf --draft-max 4", None, "--draft-max"),
        ("llama-server -m m.gguf --metrics", "6123", "--metrics"),
        ("llama-server -m m.gguf --spec-type nosuch", None, "spec_type nosuch"),
    ],
)
def test_flags_that_are_not_known_are_said_to_be(line, version, flag):
    made, flags = parse_launch(line, version)
    assert [text.startswith(flag) and "unknown for this version" in text for text in launch_notes(made, flags)] == [
        True
    ]


def test_flags_of_other_programs_and_underscores_are_no_notes():
    line = "docker run --gpus all lmsysorg/sglang:v0.5.21 python3 -m sglang.launch_server --model-path m"
    made, flags = parse_launch(line, "0.5.21")
    assert flags == ["--model-path"]
    made, flags = parse_launch("vllm serve m --speculative_config '{\"num_speculative_tokens\": 3}'", "0.33.0")
    assert (made.model, flags[0]) == ("m", "--speculative-config")
    assert [text for text in launch_notes(made, flags) if "unknown" in text] == []


@pytest.mark.parametrize(
    "line",
    [
        *("", "python train.py", "sglang serve 'open", "vllm serve m --speculative-config '{bad'"),
        *("vllm serve m --speculative-config '[1]'", "vllm serve m --speculative-config"),
    ],
)
def test_bad_launch_lines(line):
    with pytest.raises(InputError, match="launch: "):
        parse_launch(line, None)
