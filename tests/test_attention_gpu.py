"""Every backend on a CUDA device against the oracle: `pytest -m gpu`. What is missing or unsupported is skipped."""

import pytest
import torch

from labkit.attention.api import AttentionSpec, available_backends, max_error, prepare
from labkit.attention.backend_triton_ladder import VARIANTS
from labkit.attention.inputs import check, expect, make_inputs, random_tree
from labkit.attention.launched import launched_kernels
from labkit.calibrate import read_bandwidth
from labkit.errors import BackendUnavailable, Unsupported
from labkit.shapes import AttentionShape

pytestmark = pytest.mark.gpu
SHAPES = [(32, 8, 128), (64, 8, 128), (24, 4, 256)]
PAGED = ["triton_split", *VARIANTS, "flashinfer_fa2", "flashinfer_fa3", "flashinfer_auto", "flashinfer_decode", "fa3"]
DENSE = ["sdpa", "per_token", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex"]


@pytest.fixture
def cuda() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def check_all(generator, backends, shape, *, page_order="permuted", return_lse=True, **spec):
    """Check each backend that can do the shape; at least one must."""
    if spec.get("tree") == "random":
        spec["tree"] = random_tree(shape, generator)
    spec = AttentionSpec(return_lse=return_lse, **spec)
    q, cache = make_inputs(shape, generator=generator, device="cuda", page_order=page_order)
    expected, num_checked = expect(q, cache, spec), 0
    for backend in backends:
        try:
            check(prepare(q, cache, backend=backend, spec=spec), cache, spec, expected)
        except (Unsupported, BackendUnavailable):
            continue
        num_checked += 1
    assert num_checked


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("q_len", [1, 2, 5, 8, 17, 64])
@pytest.mark.parametrize("context_len", [(4080,), (0,), (127,), (1000, 0, 130)])
def test_odd_sizes(cuda, heads, q_len, context_len):
    check_all(cuda, PAGED, AttentionShape(len(context_len), q_len, context_len, *heads))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(cuda, page_size):
    check_all(cuda, PAGED, AttentionShape(2, 8, (300, 40), 32, 8, 128, page_size=page_size))


@pytest.mark.parametrize("q_len", [1, 8, 16, 32])
@pytest.mark.parametrize("heads", SHAPES)
def test_long_context(cuda, heads, q_len):
    check_all(cuda, PAGED, AttentionShape(1, q_len, 131_072, *heads))


@pytest.mark.parametrize("heads", [(32, 8, 128), (24, 4, 256)])
@pytest.mark.parametrize(("q_len", "context_len"), [(1, (4000,)), (8, (777, 30)), (17, (5000,))])
def test_float8_cache(cuda, heads, q_len, context_len):
    shape = AttentionShape(len(context_len), q_len, context_len, *heads, kv_dtype="float8_e4m3fn")
    check_all(cuda, PAGED, shape)


@pytest.mark.parametrize("heads", [(32, 8, 128), (24, 4, 256)])
@pytest.mark.parametrize("q_len", [1, 2, 7, 16, 33, 64])
def test_random_trees(cuda, heads, q_len):
    check_all(cuda, ["triton_split", "flashinfer_fa2"], AttentionShape(2, q_len, (500, 7), *heads), tree="random")


@pytest.mark.parametrize("window", [1, 37, 1000])
def test_windows(cuda, window):
    check_all(cuda, ["triton_split", "fa3"], AttentionShape(2, 8, (4000, 30), 32, 8, 128), window=window)


def test_shared_prefix(cuda):
    shape = AttentionShape(4, 4, (3000, 3000, 2500, 2050), 32, 8, 128, shared_prefix_len=2048)
    check_all(cuda, ["triton_split", "flashinfer_fa2", "flashinfer_cascade", "fa3"], shape)


@pytest.mark.parametrize("q_len", [1, 8])
def test_dense_kernels(cuda, q_len):
    shape = AttentionShape(2, q_len, 1024, 32, 8, 128)
    check_all(cuda, DENSE, shape, page_order="sequential", return_lse=False)


@pytest.mark.parametrize("max_splits", [1, 3, None])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("q_len", [9, 16, 17, 32])
def test_wide_tiles(cuda, heads, q_len, page_size, max_splits):
    """64 and more rows, where the softmax can overlap on Hopper."""
    for context_len in ((20_000,), (0, 1, 127, 4097)):
        shape = AttentionShape(len(context_len), q_len, context_len, *heads, page_size=page_size)
        check_all(cuda, ["triton_split"], shape, max_splits=max_splits)


def test_wide_tiles_in_float16(cuda):
    shape = AttentionShape(1, 16, 5000, 64, 8, 128, q_dtype="float16")
    check_all(cuda, ["triton_split"], shape)


def test_hopper_takes_the_overlapped_kernel(cuda):
    q, cache = make_inputs(AttentionShape(1, 16, 4096, 64, 8, 128), generator=cuda, device="cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    call = prepare(q, cache, backend="triton_split")
    assert "overlapped" in call.info["resolved_kernel"]
    call()
    split, _ = launched_kernels({"call": call})["call"]
    assert split.name == "overlapped_split_kernel"


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_flat_logits_at_100k_keys(cuda, kv_dtype):
    """All weights alike: a kernel that rounds small weights away shrinks the output."""
    q, cache = make_inputs(AttentionShape(1, 8, 100_000, 32, 8, 128, kv_dtype=kv_dtype), generator=cuda, device="cuda")
    q.zero_()
    spec = AttentionSpec(return_lse=True)
    check(prepare(q, cache, backend="triton_split", spec=spec), cache, spec)


@pytest.mark.parametrize("q_len", [4, 17])
def test_captured_short_replayed_long(cuda, q_len):
    q, cache = make_inputs(AttentionShape(2, q_len, (5000, 3000), 32, 8, 128), generator=cuda, device="cuda")
    cache.truncate([300, 20])
    call = prepare(q, cache, backend="triton_split")
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cache.advance([4700, 2980])
    call.replan()
    call.out.fill_(torch.nan)
    graph.replay()
    expected = expect(q, cache)
    for request, limit in enumerate(expected.limits):
        assert max_error(call.out[request], expected.out[request]) <= limit


def test_the_profiler_sees_the_grid(cuda):
    q, cache = make_inputs(AttentionShape(1, 8, 4096, 64, 8, 128), generator=cuda, device="cuda")
    call = prepare(q, cache, backend="triton_split")
    call()
    split, merge = launched_kernels({"call": call})["call"]
    assert (split.name, split.num_programs) == ("split_kernel", call.info["num_programs"])
    assert (merge.name, merge.num_programs) == ("merge_kernel", 8 * 64)


def test_the_read_bandwidth_grows_with_size():
    read = read_bandwidth("cuda")
    rates = [int(size) / us for size, us in read["us"].items()]
    assert rates[-1] > rates[0]
    assert read["median"] > 0


def test_what_is_installed_is_usable():
    usable = available_backends()
    assert usable["triton_split"] == usable["sdpa"] == ""
