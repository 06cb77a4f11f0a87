"""Shapes: published parameter counts, derived sizes, and messages that name the argument."""

import csv
import subprocess
import sys

import pytest

from labkit.errors import InputError
from labkit.paths import REFERENCE, ROOT
from labkit.shapes import AttentionShape, dtype_bytes, model_shape, model_shapes

PUBLISHED_PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "hybrid-27b": 26_895_998_464,  # text part
}
VALID = {
    "batch_size": 2,
    "q_len": 5,
    "context_len": 100,
    "num_qo_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_equals_the_published_one(name):
    assert model_shape(name).num_parameters == PUBLISHED_PARAMETERS[name]


def test_every_model_row_is_checked_and_has_a_source():
    assert set(model_shapes()) == {*PUBLISHED_PARAMETERS, "tiny", "tiny-hybrid"}
    assert all(shape.source for shape in model_shapes().values())


def test_weight_and_kv_bytes():
    shape = model_shape("smollm2-135m")
    assert shape.num_linear_parameters == 106_168_320
    assert shape.weight_bytes("float32") == 4 * shape.num_parameters
    assert shape.weight_bytes_read("bfloat16") == shape.weight_bytes("bfloat16")
    assert shape.kv_bytes_per_token("bfloat16") == 23_040
    hybrid = model_shape("hybrid-27b")
    assert hybrid.num_linear_parameters == 24_326_963_200
    assert (hybrid.num_attention_layers, hybrid.num_delta_layers) == (16, 48)
    assert hybrid.kv_bytes_per_token("bfloat16") == 16 * 2 * 4 * 256 * 2
    assert hybrid.delta_state_bytes == 150_994_944
    untied = model_shape("llama-3-8b")
    assert untied.weight_bytes_read("bfloat16") == 2 * 7_504_924_672
    assert untied.weight_bytes("float8_e4m3fn") == 6_979_321_856 + 2 * (8_030_261_248 - 6_979_321_856)


def test_unknown_model_lists_the_known():
    with pytest.raises(InputError, match=r"model must be one of llama-3-8b.*got 'gpt-5'"):
        model_shape("gpt-5")


def test_gpu_peaks_have_sources_and_numbers():
    with (REFERENCE / "gpu_peaks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["gpu"] for row in rows}) == len(rows) > 10
    for row in rows:
        assert row["source"]
        assert float(row["memory_gb_per_s"]) > 0
        for column in ("l2_mb", "num_sms", "bf16_tflops_per_s", "fp8_tflops_per_s", "fp4_tflops_per_s"):
            assert row[column] == "" or float(row[column]) > 0


def test_lengths_of_a_ragged_batch():
    shape = AttentionShape(**VALID | {"context_len": [10, 30]})
    assert shape.context_lens == (10, 30)
    assert shape.kv_lens == (15, 35)
    assert shape.context_len_max == 30
    assert shape.group_size == 3
    assert shape.kv_dtype == "bfloat16"
    assert AttentionShape(**VALID).context_lens == (100, 100)
    assert hash(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_qo_heads": 10}, "num_qo_heads must be a multiple of num_kv_heads=3, got 10"),
        ({"q_len": 0}, "q_len must be an integer of at least 1, got 0"),
        ({"page_size": 0}, "page_size must be an integer of at least 1, got 0"),
        ({"head_dim": 64.0}, "head_dim must be an integer of at least 1, got 64.0"),
        ({"batch_size": True}, "batch_size must be an integer"),
        ({"context_len": -1}, "context_len must be an integer of at least 0, got -1"),
        (
            {"context_len": (1, 2, 3)},
            r"context_len must hold one context_len per request \(batch_size=2\), got 3",
        ),
        ({"q_dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, float8_e4m3fn, got 'int8'"),
        ({"kv_dtype": "fp4"}, "got 'fp4'"),
    ],
)
def test_bad_shape_names_the_argument(change, message):
    with pytest.raises(InputError, match=message):
        AttentionShape(**VALID | change)


def test_dtype_bytes():
    assert [dtype_bytes(name) for name in ("float32", "bfloat16", "float8_e4m3fn")] == [4, 2, 1]


def test_import_needs_no_torch():
    code = "import sys, labkit.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
