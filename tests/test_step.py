"""Whole forwards: the grid, the anatomy from a list of kernels, and a small run on the CPU."""

import json

import pytest

from labkit.attention.launched import Kernel
from labkit.cli import main
from labkit.errors import InputError
from labkit.experiments import step, step_forwards
from labkit.models.anatomy import part_of, split_time
from labkit.results import load_runs


def test_time_is_split_among_the_kernels_that_really_ran():
    kernels = [
        Kernel("few_rows_kernel", 100, 10.0, 0.0),
        Kernel("rope_append_kernel", 40, 9.0, 3.0),  # launched early: waits until 10, runs until 12
        Kernel("split_kernel", 132, 20.0, 15.0),  # after 3 us of nothing
        Kernel("merge_kernel", 32, 21.0, 16.0),  # until 37
        Kernel("nvjet_tst_64x8", 132, 5.0, 37.0),
        Kernel("reduce_kernel#ab12", 1, 4.0, 42.0),
    ]
    parts = split_time(kernels)
    wanted = {"linear_ms": 0.015, "other_ms": 0.002, "attention_ms": 0.022, "sampling_ms": 0.004, "gap_ms": 0.003}
    assert parts == pytest.approx(wanted)
    assert sum(parts.values()) == pytest.approx(0.046), "they add up to the span"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("FlashAttnFwdSm90#1a2b", "attention"),
        ("BatchPrefillWithPagedKVCacheKernel#1a2b", "attention"),
        ("PersistentVariableLengthMergeStatesKernel", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("splitKreduce_kernel#1a2b", "linear"),
        ("gemv2T_kernel_val", "linear"),
        ("add_norm_kernel", "other"),
        ("recurrence_kernel", "other"),
        ("reduce_kernel#77aa", "sampling"),
    ],
)
def test_part_of(name, part):
    assert part_of(name) == part


def test_points_have_phases_and_share_groups():
    points = step.points("full")
    assert {point["phase"] for point in points} == {"decode", "verify", "draft", "draft_extend"}
    first = [point for point in points if point["group"] == points[0]["group"]]
    assert {(point["q_len"], point["phase"]) for point in first if point["drafter"] == "none"} == {
        (1, "decode"),
        (4, "verify"),
        (8, "verify"),
    }
    keys = [json.dumps(point, sort_keys=True) for point in points]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"q_len": [65]}, "q_len: wanted 1 to 64"),
        ({"context_len": [0]}, "context_len: wanted 1 or more"),
        ({"drafter": ["nosuch"]}, "drafter 'nosuch'"),
        ({"backend": ["nosuch"]}, "backend 'nosuch'"),
        ({"target": ["random:nosuch"]}, "model must be one of"),
        ({"context_len": [300_000]}, "holds 262208 tokens"),
        ({"weight_dtype": ["int4"]}, "weight_dtype 'int4'"),
    ],
)
def test_bad_axes_are_named(axes, message):
    with pytest.raises(InputError, match=message):
        step.points("ci", **axes)


def test_a_drafter_of_one_layer_is_a_layer_of_the_target():
    point = step.points("full")[0] | {"drafter": "one layer", "target": "random:hybrid-27b"}
    shape = step_forwards.shape_of(point)
    assert (shape.num_layers, shape.num_delta_layers, shape.vocab_size) == (1, 0, 248_320)


def test_a_small_run(tmp_path, capsys):
    assert main(["run", "step", "--preset", "ci", "--set", "context_len=64", "--out", str(tmp_path)]) == 0
    assert main(["check", str(tmp_path)]) == 0
    rows = load_runs("step", tmp_path)
    assert set(rows["status"]) == {"ok"}
    assert len(rows) == 4 * 3
    assert (rows["forward_ms"] > 0).all()
    verify = rows[rows["phase"] == "verify"]
    assert (verify["kv_bytes_read"] == 2 * 2 * 2 * 32 * 4 * 67).all()  # K and V, layers, heads, head_dim, bytes, keys
    graph = main(["run", "step", "--preset", "ci", "--set", "launch_mode=graph", "--out", str(tmp_path / "g")])
    assert graph == 1
    assert "needs a CUDA device" in capsys.readouterr().out
