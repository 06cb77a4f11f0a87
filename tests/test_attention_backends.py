"""Backends around libraries: what runs on a CPU, what is handed to the library, and what the profiler tells."""

import csv

import pytest
import torch

from labkit.attention.api import AttentionSpec, available_backends, backend_digest, prepare, shape_of
from labkit.attention.flashinfer_plan import last_page_lens, prefill_plan
from labkit.attention.inputs import check, make_inputs, random_tree
from labkit.attention.launched import Kernel, _within, short_name
from labkit.attention.reference import hidden_keys
from labkit.errors import BackendUnavailable, InputError, Unsupported
from labkit.experiments import attention
from labkit.paths import REFERENCE
from labkit.shapes import AttentionShape

WITH_LSE = AttentionSpec(return_lse=True)


def make(generator, q_len, context_len, order="sequential", **options):
    batch_size = 1 if isinstance(context_len, int) else len(context_len)
    shape = AttentionShape(batch_size, q_len, context_len, 6, 2, 64, **{"q_dtype": "float32"} | options)
    return shape, *make_inputs(shape, generator=generator, page_order=order)


@pytest.mark.parametrize("backend", ["flex", "sdpa_math"])
@pytest.mark.parametrize("q_len", [1, 2, 17])
def test_dense_backends(generator, backend, q_len):
    _, q, cache = make(generator, q_len, (130, 130))
    check(prepare(q, cache, backend=backend, spec=WITH_LSE), cache, WITH_LSE)


@pytest.mark.parametrize("backend", ["flex", "sdpa_math"])
def test_dense_backends_refuse_what_has_no_dense_view(generator, backend):
    _, q, cache = make(generator, 2, (130, 130), "permuted")
    with pytest.raises(Unsupported, match="takes no page table"):
        prepare(q, cache, backend=backend)


def test_ragged_batches_of_dense_backends(generator):
    _, q, cache = make(generator, 2, (130, 20))
    check(prepare(q, cache, backend="sdpa_math", spec=WITH_LSE), cache, WITH_LSE)
    with pytest.raises(Unsupported, match="takes no page table"):
        prepare(q, cache, backend="flex")


@pytest.mark.parametrize("options", [{"window": 5}, {"tree": torch.tensor([[1, 3]])}])
def test_a_mask_that_a_backend_lacks_is_refused(generator, options):
    _, q, cache = make(generator, 2, 30)
    for backend in ("sdpa", "per_token", "flex"):
        with pytest.raises(Unsupported, match="causal mask only"):
            prepare(q, cache, backend=backend, spec=AttentionSpec(**options))


def test_float8_cache_against_the_oracle_alone(generator):
    shape, q, cache = make(generator, 2, 30, kv_dtype="float8_e4m3fn")
    assert (cache.k_scale, cache.v_scale) == (0.5, 2.0)
    check(prepare(q, cache, backend="reference", spec=WITH_LSE), cache, WITH_LSE)
    with pytest.raises(Unsupported):
        prepare(q, cache, backend="sdpa")
    assert shape_of(q, cache).kv_dtype == shape.kv_dtype


@pytest.mark.parametrize("name", ["flashinfer_fa2", "flashinfer_auto", "flashinfer_decode", "fa3", "fa3_nosplit"])
def test_libraries_that_are_not_there_say_so(generator, name):
    _, q, cache = make(generator, 1, 30)
    reason = available_backends()[name]
    if not reason:
        pytest.skip("is installed here")
    with pytest.raises(BackendUnavailable, match=r"needs"):
        prepare(q, cache, backend=name)


def test_each_variant_of_a_file_has_a_digest_of_its_own():
    names = ("triton_nosplit", "triton_ladder_split", "triton_split", "sdpa", "per_token")
    assert len({backend_digest(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (torch.tensor([[1, 2]], dtype=torch.int32), "int64"),
        (torch.tensor([[1, 2, 4]]), "int64"),
        (torch.tensor([[3, 2]]), "tokens before it"),
    ],
)
def test_bad_trees(generator, tree, message):
    _, q, cache = make(generator, 2, 30)
    with pytest.raises(ValueError, match=message):
        prepare(q, cache, backend="reference", spec=AttentionSpec(tree=tree))


def test_random_trees_hang_each_token_below_an_earlier_one(generator):
    shape = AttentionShape(3, 64, 5, 2, 1, 32, q_dtype="float32")
    sees = (random_tree(shape, generator)[:, :, None] >> torch.arange(64)) & 1
    assert (sees.diagonal(dim1=1, dim2=2) == 1).all()
    assert (sees.triu(1) == 0).all()
    assert (sees[:, :, 0] == 1).all()  # the root


def test_the_plan_given_to_flashinfer(generator):
    _, q, cache = make(generator, 3, (30, 13), "permuted")
    plan = prefill_plan(q, cache, AttentionSpec(window=7, sm_scale=0.5))
    assert plan["qo_indptr"].tolist() == [0, 3, 6]
    assert plan["paged_kv_indptr"].tolist() == [0, 3, 4]  # 33 and 16 tokens
    assert plan["paged_kv_last_page_len"].tolist() == [1, 16]
    assert plan["paged_kv_indices"].tolist() == [*cache.page_table[0, :3].tolist(), int(cache.page_table[1, 0])]
    assert (plan["window_left"], plan["sm_scale"], plan["causal"], plan["custom_mask"]) == (6, 0.5, True, None)
    assert last_page_lens(cache, [1, 16, 17]).tolist() == [1, 16, 1]


def test_the_tree_mask_given_to_flashinfer(generator):
    _, q, cache = make(generator, 3, (4, 2))
    tree = torch.tensor([[1, 3, 5], [1, 3, 7]])
    mask = prefill_plan(q, cache, AttentionSpec(tree=tree))["custom_mask"]
    expected = [
        ~hidden_keys(AttentionSpec(tree=tree), r, n, 3, torch.arange(n + 3)).flatten() for r, n in enumerate((4, 2))
    ]
    assert torch.equal(mask, torch.cat(expected))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("split_kernel", "split_kernel"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<a, b>>>(x)", "FlashAttn"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<1>>(y)", "BatchPrefill"),
        ("void (anonymous namespace)::elementwise_kernel<128, 2, at::native::foo>(int)", "elementwise_kernel"),
    ],
)
def test_short_names(name, short):
    assert short_name(name).startswith(short)
    assert "<" not in short_name(name)


def test_kernels_within_a_range_of_the_trace():
    def kernel(name, ts, grid):
        return {"cat": "kernel", "name": name, "ts": ts, "dur": 5, "args": {"grid": grid}}

    events = [
        {"cat": "user_annotation", "name": "labkit:a", "ts": 100, "dur": 50},
        {"cat": "gpu_user_annotation", "name": "labkit:a", "ts": 110, "dur": 20},
        kernel("merge_kernel", 130, [512, 1, 1]),
        kernel("split_kernel", 110, [1, 8, 33]),
        kernel("other", 160, [1, 1, 1]),
    ]
    wanted = [Kernel("split_kernel", 264, 5.0, 110.0), Kernel("merge_kernel", 512, 5.0, 130.0)]
    assert _within(events, "labkit:a") == wanted


def test_grid_of_the_experiment():
    points = attention.points("full")
    assert len({(point["group"], point["backend"]) for point in points}) == len(points)
    target = [point for point in points if ":" not in point["group"] and point["backend"] == "triton_split"]
    assert len(target) == 108
    assert attention.heads_of("24/4/256") == (24, 4, 256)
    for axes, message in (
        ({"model": ["24/4"]}, "24/4/256"),
        ({"model": ["24/5/256"]}, "num_qo_heads"),
        ({"q_len": [65]}, "1 to 64"),
        ({"kv_dtype": ["int8"]}, "kv_dtype"),
        ({"shared_prefix_len": [10**6]}, "shared_prefix_len"),
    ):
        with pytest.raises(InputError, match=message):
            attention.points("ci", **axes)


def test_graphs_need_a_gpu():
    point = attention.points("ci", launch_mode=["graph"])[0]
    if attention.common.device() == "cpu":
        assert isinstance(attention.measure([point])[0], Unsupported)


def test_engine_pairings_name_backends_that_exist():
    with (REFERENCE / "engine_pairings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = available_backends()
    for row in rows:
        assert {row["decode_backend"], row["verify_backend"]} <= set(known), row["setting"]
        assert row["source"]
        assert row["engine_version"]
