"""The captured forward's kernels under the interpreter, against the decoder's own forward."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from labkit.errors import Unsupported
from labkit.models.few_rows import FewRows
from labkit.models.linear import Float8Linear, PlainLinear
from labkit.models.static_forward import StaticForward
from labkit.models.weights import load_model
from labkit.shapes import model_shape
from tests.interpreter import assert_passes_interpreted, interpreted

LENS = [37, 90]


def test_under_the_interpreter():
    assert_passes_interpreted(__file__)


def tiny(name: str = "tiny", **changes):
    shape = replace(model_shape(name), vocab_size=256, intermediate_size=192, **changes)
    return load_model(shape, linear_backend="torch.linear")


def filled(decoder, generator):
    cache = decoder.new_cache(len(LENS), 256, page_order="permuted", generator=generator)
    cache.fill_random(LENS, generator)
    return cache


@interpreted
@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True}, {"qkv_bias": True, "tied_embeddings": False}], ids=["llama", "qwen3", "qwen2"]
)
def test_equals_the_decoders_forward(generator, changes):
    decoder = tiny(**changes)
    ours = filled(decoder, generator)
    theirs = ours.clone()
    ids = torch.randint(256, (2, 3), generator=generator)
    wanted = decoder.forward(ids, theirs, backend="sdpa")
    forward = StaticForward(decoder, ours, q_len=3, backend="triton_split")
    forward.token_ids.copy_(ids)
    forward.run()
    torch.testing.assert_close(forward.logits, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(forward.next_ids, wanted.argmax(-1))
    assert ours.context_lens == LENS, "the caller advances"
    for layer in range(decoder.shape.num_layers):
        for row, context_len in enumerate(LENS):
            pair = [cache.dense(layer, row, context_len + 3) for cache in (ours, theirs)]
            for a, b in zip(*pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@interpreted
def test_a_replan_serves_other_lengths(generator):
    decoder = tiny()
    ours = filled(decoder, generator)
    forward = StaticForward(decoder, ours, q_len=1, backend="triton_split")
    ours.truncate([20, 60])
    theirs = ours.clone()
    forward.replan()
    forward.run()
    wanted = decoder.forward(torch.zeros(2, 1, dtype=torch.int64), theirs, backend="sdpa")
    torch.testing.assert_close(forward.logits, wanted, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("kind", [PlainLinear, Float8Linear])
@pytest.mark.parametrize(("n_size", "k_size"), [(64, 256), (80, 192), (192, 100)])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_products_of_few_rows(generator, kind, n_size, k_size, num_rows):
    linear = kind(torch.randn(n_size, k_size, generator=generator), None)
    x = torch.randn(num_rows, k_size, generator=generator)
    if kind is Float8Linear and num_rows > 32:
        with pytest.raises(Unsupported, match="at most 32 rows"):
            FewRows(linear, num_rows, torch.empty(1 << 20), pdl=False)
        return
    parts = FewRows(linear, num_rows, torch.full((1 << 20,), torch.nan), pdl=False)(x)
    torch.testing.assert_close(parts.sum(0), linear(x), rtol=1e-4, atol=1e-4)


def test_hybrids_have_no_eager_forward(generator):
    decoder = tiny("tiny-hybrid")
    with pytest.raises(Unsupported, match="captured forward only"):
        decoder.forward(torch.zeros(1, 1, dtype=torch.int64), decoder.new_cache(1, 64), backend="sdpa")


def test_states_must_have_room(generator):
    decoder = tiny("tiny-hybrid")
    with pytest.raises(ValueError, match="max_q_len of at least 3"):
        StaticForward(decoder, decoder.new_cache(1, 64), q_len=3, backend="sdpa")
