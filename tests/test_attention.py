"""Every backend against the oracle over the sizes where kernels break, and the oracle against a plain softmax."""

import math

import pytest
import torch

from labkit.attention.api import AttentionSpec, max_error, prepare
from labkit.attention.inputs import check, expect, make_inputs, verify_backend
from labkit.attention.reference import eager, oracle
from labkit.errors import WrongResult
from labkit.shapes import AttentionShape

BACKENDS = ["sdpa", "per_token"]
DTYPES = ["float32", "bfloat16", "float16"]
WITH_LSE = AttentionSpec(return_lse=True)


def make_shape(q_len, context_len, heads=(6, 2), head_dim=64, page_size=16, dtype="float32"):
    batch_size = 1 if isinstance(context_len, int) else len(context_len)
    return AttentionShape(batch_size, q_len, context_len, *heads, head_dim, page_size=page_size, q_dtype=dtype)


def check_backends(shape, generator, page_order="permuted", spec=WITH_LSE):
    q, cache = make_inputs(shape, generator=generator, page_order=page_order)
    for backend in BACKENDS:
        check(prepare(q, cache, backend=backend, spec=spec), cache, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_len", [1, 127, 128, 4097])
@pytest.mark.parametrize("q_len", [1, 2, 5, 17])
def test_odd_sizes(generator, q_len, kv_len, page_size, dtype):
    check_backends(make_shape(q_len, max(kv_len - q_len, 0), page_size=page_size, dtype=dtype), generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1), (6, 1)])
def test_groups_and_head_dims(generator, heads, head_dim, dtype):
    check_backends(make_shape(3, 70, heads=heads, head_dim=head_dim, dtype=dtype), generator)


@pytest.mark.parametrize("page_order", ["sequential", "permuted"])
@pytest.mark.parametrize("context_len", [(40, 40, 40), (0, 500, 33), (7, 7), (1000, 0)])
@pytest.mark.parametrize("q_len", [1, 5])
def test_batches(generator, q_len, context_len, page_order):
    check_backends(make_shape(q_len, context_len), generator, page_order)


@pytest.mark.parametrize("context_len", [0, 77, (5, 300)])
@pytest.mark.parametrize("q_len", [64, 128, 300])
def test_prefill_chunks_in_row_blocks(generator, q_len, context_len):
    q, cache = make_inputs(make_shape(q_len, context_len), generator=generator)
    check(prepare(q, cache, backend="sdpa", spec=WITH_LSE), cache, WITH_LSE)


def test_scale_is_used(generator):
    check_backends(make_shape(2, 50), generator, spec=AttentionSpec(sm_scale=0.3, return_lse=True))


def test_every_layer_and_new_query(generator):
    q, cache = make_inputs(make_shape(2, (30, 9)), generator=generator, num_layers=3)
    other = torch.randn(q.shape, generator=generator)
    for backend in ["reference", *BACKENDS]:
        call = prepare(q, cache, backend=backend)
        for layer in range(3):
            out = torch.full_like(q, math.nan)
            call.run(other, layer, out)
            assert max_error(out, oracle(other, cache, layer)[0]) < 1e-5


def test_rows_of_a_larger_cache(generator):
    q, cache = make_inputs(make_shape(2, (30, 9, 30, 50)), generator=generator, page_order="sequential")
    for requests in ([2], [0, 2], [2, 0], [3, 1]):
        view = cache.rows(requests)
        for backend in BACKENDS:
            check(prepare(q[requests].contiguous(), view, backend=backend, spec=WITH_LSE), view, WITH_LSE)


def test_what_really_ran_is_reported(generator):
    q, cache = make_inputs(make_shape(5, (40, 40)), generator=generator, page_order="sequential")
    sdpa, per_token = (prepare(q, cache, backend=name).info for name in BACKENDS)
    assert (sdpa["kv_passes"], per_token["kv_passes"]) == (1, 5)
    assert "read in place" in sdpa["resolved_kernel"]
    assert "1 calls" in sdpa["resolved_kernel"]
    q, cache = make_inputs(make_shape(5, (40, 40)), generator=generator)
    assert "gathered" in prepare(q, cache, backend="sdpa").info["resolved_kernel"]
    assert prepare(q, cache, backend="sdpa", spec=WITH_LSE).info["kv_passes"] == 2


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_oracle_equals_a_plain_softmax(generator, heads, monkeypatch):
    """Against PyTorch in float64 with K and V laid out by a plain loop over tokens; small chunks of keys."""
    monkeypatch.setattr("labkit.attention.reference.KEYS_PER_CHUNK", 16)
    q, cache = make_inputs(make_shape(4, (0, 61), heads=heads, page_size=4), generator=generator)
    out, lse = oracle(q, cache, 0)
    for request, context_len in enumerate((0, 61)):
        slots = [(cache.page_table[request, t // 4], t % 4) for t in range(context_len + 4)]
        k, v = (torch.stack([side[0, page, place] for page, place in slots]).double() for side in (cache.k, cache.v))
        for row in range(4):
            for head in range(heads[0]):
                kv_head, seen = head // (heads[0] // heads[1]), context_len + row + 1
                logits = k[:seen, kv_head] @ q[request, row, head].double() * 0.125
                expected = logits.softmax(0) @ v[:seen, kv_head]
                torch.testing.assert_close(out[request, row, head], expected)
                torch.testing.assert_close(lse[request, row, head], logits.logsumexp(0))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("q_len", [1, 5])
def test_inputs_show_a_page_that_was_skipped(generator, q_len, page_size):
    q, cache = make_inputs(make_shape(q_len, 1500, page_size=page_size), generator=generator)
    ref, _ = oracle(q, cache, 0)
    for page in cache.page_table[0, : -(-(1500 + q_len) // page_size)].tolist():
        broken = cache.clone()
        broken.v[:, page] = 0
        assert max_error(oracle(q, broken, 0)[0], ref) > 0.02


def test_eager_error_follows_the_dtype(generator):
    errors = []
    for dtype in ("float32", "float16", "bfloat16"):
        q, cache = make_inputs(make_shape(5, 200, dtype=dtype), generator=generator)
        errors.append(max_error(eager(q, cache, 0), oracle(q, cache, 0)[0]))
    assert errors[0] < 1e-5 < errors[1] < errors[2] < 0.02


def test_wrong_results_are_located(generator):
    shape = make_shape(3, (20, 60))
    q, cache = make_inputs(shape, generator=generator)
    call = prepare(q, cache, backend="reference", spec=WITH_LSE)
    right = call._run

    def one_wrong_entry(q, layer, out, lse):
        right(q, layer, out, lse)
        out[1, 2, 4, 7] = math.nan

    def base_two_lse(q, layer, out, lse):
        right(q, layer, out, lse)
        lse *= math.log2(math.e)

    call._run = one_wrong_entry
    with pytest.raises(WrongResult, match=r"'reference': error is not finite .* request 1, query row 2, query head 4"):
        check(call, cache, WITH_LSE)
    call._run = base_two_lse
    with pytest.raises(WrongResult, match="lse error"):
        check(call, cache, WITH_LSE)


@pytest.mark.parametrize("mistake", ["top_left_mask", "one_key_less", "one_key_more", "wrong_head", "swapped_pages"])
def test_typical_kernel_mistakes_are_caught(generator, mistake):
    q, cache = make_inputs(make_shape(3, 200, dtype="bfloat16"), generator=generator)

    def broken(q, layer, out, lse):
        other = cache.clone()
        if mistake == "one_key_less":
            other.truncate(199)
        elif mistake == "one_key_more":
            other.advance(1)
        elif mistake == "top_left_mask":
            other.truncate(0)
        elif mistake == "swapped_pages":
            other.page_table = other.page_table.flip(1)
        elif mistake == "wrong_head":
            q = q.flip(2)
        out.copy_(oracle(q, other, layer)[0])

    call = prepare(q, cache, backend="sdpa")
    call._run = broken
    with pytest.raises(WrongResult):
        check(call, cache, AttentionSpec())


def test_verify_backend_returns_the_error(generator):
    assert 0 < verify_backend("sdpa", make_shape(2, 100, dtype="bfloat16"), generator=generator) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [*BACKENDS, "triton_nosplit", "triton_split"])
@pytest.mark.parametrize("context_len", [0, 4096, (0, 513, 4000)])
@pytest.mark.parametrize("q_len", [1, 5, 17, 64])
def test_backends_on_the_gpu(q_len, context_len, backend, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    for heads, head_dim, page_size in (((9, 3), 64, 16), ((32, 8), 128, 64), ((24, 4), 256, 1)):
        shape = make_shape(q_len, context_len, heads, head_dim, page_size, dtype)
        verify_backend(backend, shape, generator=generator, device="cuda")


def test_values_of_another_head_show(generator):
    """Right keys with a neighbour's values are caught by the planted values alone."""
    q, cache = make_inputs(make_shape(2, 200, dtype="bfloat16"), generator=generator)
    call = prepare(q, cache, backend="sdpa", spec=WITH_LSE)
    expected = expect(q, cache, WITH_LSE)
    cache.v.copy_(cache.v.flip(-2))
    with pytest.raises(WrongResult, match="query head"):
        check(call, cache, WITH_LSE, expected)
