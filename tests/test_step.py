"""Whole forwards: the grid, the anatomy from a list of kernels, and a small run on the CPU."""

import json

import pytest
import torch

from labkit.attention import inputs, reference, registry
from labkit.attention.api import register_backend
from labkit.attention.launched import Kernel
from labkit.cli import main
from labkit.errors import InputError
from labkit.experiments import step, step_communication, step_forwards
from labkit.kv_cache import PagedKVCache
from labkit.models.anatomy import part_of, split_time
from labkit.results import load_runs
from labkit.shapes import model_shape


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
    assert {point["phase"] for point in points} == {"decode", "verify", "draft", "draft_extend", "prefill"}
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
        ({"phase": ["nosuch"]}, "phase 'nosuch'"),
        ({"phase": ["draft"]}, "axis phase: no forward of this grid"),
        ({"num_gpus": [4]}, "num_gpus: wanted a divisor of num_kv_heads 2 of tiny, got 4"),
        ({"num_gpus": [2], "target": ["smollm2-135m"]}, "num_gpus: wanted a divisor of num_qo_heads 9, num_kv"),
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


def test_a_share_of_the_model_per_device():
    whole = model_shape("qwen3-32b")
    share = whole.share_of(8)
    assert (share.num_qo_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (8, 1, 3200, 18992)
    assert share.num_linear_parameters * 8 == whole.num_linear_parameters
    assert share.kv_bytes_per_token("bfloat16") * 8 == whole.kv_bytes_per_token("bfloat16")
    assert model_shape("hybrid-27b").share_of(2).delta_state_bytes * 2 == model_shape("hybrid-27b").delta_state_bytes
    assert whole.share_of(1) == whole


def test_a_prefill_is_a_whole_prompt_in_a_cell_of_its_own():
    points = step.points("gpu", phase=["prefill"], context_len=[2048], backend=["fa3"])
    assert [(p["q_len"], p["context_len"], p["launch_mode"]) for p in points] == [(2048, 0, "eager")]
    both = step.points("ci", phase=["decode", "prefill"], context_len=[64], q_len=[1], backend=["sdpa"])
    assert [p["phase"] for p in both] == ["decode", "prefill"]
    assert both[0]["group"] != both[1]["group"]
    long = step.points("prefill", context_len=[131072])[0]
    assert step_forwards.memory_bytes(long) == pytest.approx(16.06e9 + 131072 * 131072, rel=0.01)  # weights, cache


def test_prefill_in_chunks_gives_the_last_tokens_logits(monkeypatch):
    monkeypatch.setattr(step_forwards, "PREFILL_CHUNK", 24)
    monkeypatch.setattr(step_forwards, "_CHECKED_ROWS", 16)
    points = step.points("ci", phase=["prefill"], context_len=[64], backend=["sdpa", "sdpa_masked"], batch_size=[2])
    made = step_forwards.Forwards(points, "cpu")
    calls = [made.make(point) for point in points]
    ids, logits = calls[0]()
    whole = made.decoder.forward(made._tokens, made._cache, backend="sdpa")
    assert whole.shape[:2] == (2, 64)
    assert made._cache.context_lens == [64, 64], "the call left the cache empty"
    assert logits[:, 0].numpy() == pytest.approx(whole[:, -1].numpy(), rel=1e-4, abs=1e-4)
    assert ids[:, 0].tolist() == whole[:, -1].argmax(-1).tolist()


def test_measured_prefills_also_of_a_hybrid():
    (point,) = step.points("ci", phase=["prefill"], context_len=[64], backend=["sdpa"])
    (rows,) = step.measure([point])
    assert len(rows) == 3
    assert all(row["forward_ms"] > 0 and row["kv_bytes_read"] == 2 * 2 * 2 * 32 * 4 * 64 for row in rows)
    assert "communication_ms" not in rows[0]
    assert rows[0]["delta_backend"] is None
    points = step.points("ci", phase=["prefill"], context_len=[100], backend=["sdpa", "per_token"])
    hybrid = [point | {"target": "random:tiny-hybrid"} for point in points]
    for rows in step.measure(hybrid):
        assert rows[0]["delta_backend"] == "torch chunks"
        assert rows[0]["state_bytes"] == 2 * model_shape("tiny-hybrid").delta_state_bytes
    (outcome,) = step.measure([hybrid[0] | {"phase": "verify", "q_len": 3, "context_len": 64}])
    assert "a hybrid runs as a captured forward only" in str(outcome)


def test_two_processes_share_the_heads_and_their_all_reduces_are_measured():
    axes = {"context_len": [64], "backend": ["sdpa"]}
    two, one = (step.measure(step.points("ci", num_gpus=[n], **axes)) for n in (2, 1))
    for shared, alone in zip(two, one, strict=True):
        row = shared[0]
        assert row["num_gpus"] == 2
        assert row["forward_ms"] > row["communication_ms"] > 0
        assert row["kv_bytes_read"] * 2 == alone[0]["kv_bytes_read"]
        assert row["weight_bytes_read"] < 0.51 * alone[0]["weight_bytes_read"]
        assert "communication not measured" not in row["quality"]


def test_communication_that_was_not_measured_stays_null_and_is_told():
    chain = (1, 8, 4)
    times, reason = step_communication.chain_ms(64, "cuda", "bfloat16", (chain,))
    assert times == {}
    assert reason.endswith("of 64 devices visible")
    rows = [{"forward_ms": 2.0, "quality": "ok"}, {"forward_ms": 2.0, "quality": "unstable"}]
    step_communication.add_to(rows, None, reason)
    assert rows[0] == {"forward_ms": 2.0, "quality": f"communication not measured ({reason})"}
    assert rows[1]["quality"].startswith("unstable; communication not measured")


def test_a_process_that_fails_is_a_reason():
    chain = (1, 8, 4)
    times, reason = step_communication.chain_ms(2, "cpu", "nosuch", (chain,))
    assert times == {}
    assert "of 2: " in reason
    assert "nosuch" in reason


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_forwards_over_a_shared_prefix(batch_size, monkeypatch):
    """As the preset C1 asks for them: also for one request, checked with the prefix, in a cache that holds it once."""
    checked, caches = [], []
    verify, make_cache = inputs.verify_backend, PagedKVCache.__init__
    monkeypatch.setattr(inputs, "verify_backend", lambda *a, **k: checked.append(a[1]) or verify(*a, **k))
    monkeypatch.setattr(PagedKVCache, "__init__", lambda self, **k: caches.append(self) or make_cache(self, **k))
    step_forwards._check_once.cache_clear()
    axes = {"context_len": [80], "shared_prefix_len": [64], "q_len": [1, 4], "num_rounds": [1]}
    points = step.points("ci", batch_size=[batch_size], backend=["sdpa", "per_token", "reference"], **axes)
    found = step.measure(points)
    assert [type(rows) for rows in found] == [list] * 6
    own = [cache for cache in caches if cache.num_layers == 2]
    assert [(cache.k.shape[1], cache.shared_prefix_len) for cache in own] == [(4 + 2 * batch_size, 64)]
    assert {(shape.batch_size, shape.shared_prefix_len) for shape in checked} == {(2, 64)}
    assert len(checked) == 6, "each backend at each query length"
    keys = 64 + batch_size * (16 + 4)
    assert found[1][0]["kv_bytes_read"] == 2 * 2 * 2 * 32 * 4 * keys  # K and V, layers, heads, head_dim, bytes
    cache_bytes = sum(storage.nbytes for cache in own for storage in (cache.k, cache.v))
    assert cache_bytes <= step_forwards.memory_bytes(points[1])


def test_a_shared_prefix_gives_the_logits_of_requests_that_hold_it_themselves():
    axes = {"context_len": [80], "shared_prefix_len": [64], "q_len": [3], "backend": ["sdpa"], "batch_size": [3]}
    (point,) = step.points("ci", **axes)
    made = step_forwards.Forwards([point], "cpu")
    _, shared = made.make(point)()
    alone = made.decoder.new_cache(3, 96, page_size=16)
    for layer in range(alone.num_layers):
        pairs = zip(*(made._cache.dense(layer, request, 80) for request in range(3)), strict=True)
        alone.append(layer, *(torch.stack(tensors) for tensors in pairs))
    alone.advance(80)
    wanted = made.decoder.forward(made._tokens, alone, backend="reference")
    assert shared.numpy() == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-4)


def test_a_backend_that_needs_a_shared_prefix_is_checked_with_one(monkeypatch):
    def supports(shape, device):
        return "" if shape.shared_prefix_len else "needs a prefix that all requests share"

    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    register_backend("needs_prefix", reference.prepare, supports=supports)
    axes = {"context_len": [80], "q_len": [1], "backend": ["needs_prefix"], "batch_size": [4]}
    shared, none = (step.measure(step.points("ci", shared_prefix_len=[n], **axes))[0] for n in (64, 0))
    assert isinstance(shared, list)
    assert "needs a prefix that all requests share" in str(none)


def test_the_shared_prefix_preset_fits_one_device():
    points = step.points("shared-prefix")
    assert {point["batch_size"] for point in points} == {1, 4, 8}
    largest = max(map(step_forwards.memory_bytes, points))
    assert largest == pytest.approx(16.06e9 + (126_976 + 8 * 1088) * 131_072, rel=0.01)  # weights, cache


def test_a_prefix_longer_than_a_context_is_refused():
    with pytest.raises(InputError, match="axis shared_prefix_len: wanted at most the shortest context of 64, got 128"):
        step.points("ci", shared_prefix_len=[128])
