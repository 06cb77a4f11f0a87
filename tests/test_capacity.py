"""What fits on a device, by arithmetic; places of a plan that cannot fit."""

import json
import re
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.decide.capacity import capacity, render
from labkit.decide.composed import stored_costs
from labkit.decide.forward_costs import without_shared_prefix
from labkit.decide.recommend import _room
from labkit.paths import RUNS
from labkit.shapes import model_shape
from tests.synthetic import GPU, loop_rows, write_run_of

SETTING_OF_MEMORY = ("target", "weight_dtype", "kv_dtype", "context_len", "batch_size")


def test_what_was_planned_and_cannot_fit_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """qwen3-32b: 65.5 GB of weights, 262,144 bytes of KV per token; an H200 of 141 GB keeps 61.4 GB for KV."""
    grid = {"target": ["qwen3-32b"], "context_len": [1024, 16384, 32768], "batch_size": [1, 8, 16]}
    path = write_run_of(loop_rows(GPU).query("context_len <= 32768"), tmp_path, GPU, "loop", grid=grid)
    assert main(["best-k", str(path), "--acceptance-length", "3", "--json"]) == 0
    found = {
        (row["context_len"], row["batch_size"]): row for row in json.loads(capsys.readouterr().out)["does_not_fit"]
    }
    assert set(found) == {(16384, 16), (32768, 16)}  # 32,768 x 8 would not fit either, but it ran
    row = found[32768, 16]
    assert row["needed_gb"] == pytest.approx(16 * (32768 + 7 + 1) * 262_144 / 1e9)
    assert row["free_gb"] == pytest.approx(141 * 0.9 - model_shape("qwen3-32b").weight_bytes("bfloat16") / 1e9)
    assert row["origin"] == "modelled"
    assert main(["best-k", str(path), "--acceptance-length", "3", "--where", "verify_backend=triton_split"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^32768 +7: .* does not fit$", text, re.MULTILINE)
    assert "context 32,768 x batch 16: needs 137.5 GB of KV cache and states, 61.4 GB free beside 65.5 GB" in text
    assert re.search(r"^1024 .* not measured$", text, re.MULTILINE)
    assert main(["best-k", str(path), "--acceptance-length", "3", "--where", "batch_size=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["does_not_fit"] == []


def test_the_measured_points_of_the_committed_runs_fit_by_capacity() -> None:
    """What was measured is never called too large, and what the step runs left out for its size is."""
    rows = without_shared_prefix(stored_costs([RUNS]).query("status == 'ok' and gpu == 'nvidia-h200'"))
    for target, weight, kv, context, batch in rows[[*SETTING_OF_MEMORY]].drop_duplicates().itertuples(index=False):
        setting = {"gpu": "nvidia-h200", "target": target, "weight_dtype": weight, "kv_dtype": kv}
        assert _room(setting, 143_771, 1).cell(int(context), int(batch), 1)["fits"]
    setting = {"gpu": "nvidia-h200", "target": "random:llama-3-8b", "weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    assert not _room(setting, 143_771, 1).cell(65536, 16, 3)["fits"]


def test_capacity_is_the_arithmetic_of_the_shapes() -> None:
    """llama-3-8b: 16,060,522,496 bytes of weights, 131,072 bytes of KV per token in bfloat16 (published counts)."""
    (plan,) = capacity("llama-3-8b", "h200-sxm", assignments=["context_len=8000", "batch_size=1,64,1k"])["plans"]
    assert plan["weights_gb"] == pytest.approx(16.060522496)
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["free_gb"] == pytest.approx(141 * 0.9 - 16.060522496)
    assert plan["num_tokens"] == int((141 * 0.9 - 16.060522496) * 1e9 // 131_072)
    fits = {cell["batch_size"]: cell for cell in plan["cells"]}
    assert fits[64]["fits"]
    assert fits[1024]["reason"].startswith(
        "needs 1074.4 GB of KV cache and states, 110.8 GB free beside 16.1 GB of weights"
    )


def test_capacity_counts_the_states_of_a_hybrid_once_per_request() -> None:
    """hybrid-27b: 65,536 bytes of KV per token and 150,994,944 bytes of float32 states per request."""
    options = ["context_len=1k,128k", "batch_size=8", "k=3"]
    (plan,) = capacity("hybrid-27b", "h200", assignments=options)["plans"]
    assert plan["kv_bytes_per_token"] == 65_536
    short, long = plan["cells"]
    assert short["needed_gb"] == pytest.approx(8 * (1028 * 65_536 + 150_994_944) / 1e9)
    assert long["needed_gb"] - short["needed_gb"] == pytest.approx(8 * 127 * 1024 * 65_536 / 1e9)


def test_capacity_halves_the_cache_with_its_dtype_and_charges_the_drafter() -> None:
    options = ["context_len=4k", "kv_dtype=bfloat16,float8_e4m3fn", "k=3"]
    plans = capacity("llama-3.3-70b", "h200", draft_model="llama-3-8b", assignments=[*options, "num_gpus=2"])["plans"]
    assert plans[0]["kv_bytes_per_token"] == 2 * plans[1]["kv_bytes_per_token"] == (327_680 + 131_072) / 2
    cell = plans[0]["cells"][0]
    assert cell["batch_slots"] < cell["batch_slots_without_drafter"]
    assert cell["batch_slots"] == plans[0]["num_tokens"] // (4096 + 4)


def test_capacity_knows_the_models_length_and_quantised_weights() -> None:
    options = ["context_len=40k,64k", "batch_size=1", "weight_gb=6.4"]
    (plan,) = capacity("qwen3-8b", "rtx-4090", assignments=options)["plans"]
    assert plan["weights_gb"] == 6.4
    assert [cell["reason"] for cell in plan["cells"]][1] == "65,541 tokens with the drafts, qwen3-8b holds 40,960"
    assert "0 of 2 planned cells fit" in render(capacity("qwen3-8b", "rtx-4090", assignments=options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nosuch", "--gpu", "h200"], "model must be one of"),
        (["--model", "qwen3-8b", "--gpu", "nosuch"], "no such row in gpu_peaks.csv"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "memory_share=1.5"], "above 0 up to 1"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "batch_size=0"], "values above 0"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "kv_dtype=int3"], "dtype must be one of"),
        (["--model", "qwen3-8b", "--gpu", "h200", "--set", "weight_gb=-3"], "wanted 0 (the shape's own) or more"),
        (
            ["--model", "llama-3.3-70b", "--gpu", "h200", "--set", "num_gpus=3"],
            "num_gpus=3: the 64 query and 8 KV heads of llama-3.3-70b do not divide; wanted one of 1, 2, 4, 8, 16, 32",
        ),
    ],
)
def test_capacity_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_kv_heads_that_are_repeated_are_told():
    found = capacity("llama-3.3-70b", "h200", assignments=["num_gpus=8,16"])
    assert [plan["kv_head_copies"] for plan in found["plans"]] == [1, 2]
    assert found["plans"][0]["kv_bytes_per_token"] == found["plans"][1]["kv_bytes_per_token"]
    assert "each KV head of llama-3.3-70b is held by 2 GPUs" in render(found)


def test_the_largest_context_agrees_with_the_cells():
    for k in (0, 4):
        found = capacity("llama-3-8b", "h200-sxm", assignments=[f"k={k}"])["plans"][0]
        longest = found["largest_context_len"]
        assert longest == model_shape("llama-3-8b").max_context_len - k - 1
        for context, fits in ((longest, True), (longest + 1, False)):
            sets = [f"k={k}", f"context_len={context}", "batch_size=1"]
            assert capacity("llama-3-8b", "h200-sxm", assignments=sets)["plans"][0]["cells"][0]["fits"] is fits
