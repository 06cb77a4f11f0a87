"""The captured forward's kernels under the interpreter, against the decoder's own forward and a plain hybrid layer."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from labkit.errors import Unsupported
from labkit.models.few_rows import FewRows
from labkit.models.gated_delta import DeltaLayer, DeltaState
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


def reference_delta(layer, x, columns, state, shape):
    """One request through a gated-delta layer, token by token, as the papers write it. Returns the mixed values."""
    heads, dim, channels = shape.num_delta_value_heads, shape.delta_head_dim, shape.delta_channels
    raw = layer.projections(x)
    qkv, rest = raw[:, :channels], raw[:, channels:]
    z, beta, step = rest[:, : heads * dim], rest[:, heads * dim :][:, :heads], rest[:, heads * dim + heads :][:, :heads]
    window = torch.cat([columns, qkv])
    mixed = F.silu(torch.stack([(window[t : t + 4] * layer.conv_weight).sum(0) for t in range(len(x))]))
    q, k, v = mixed.split([shape.num_delta_key_heads * dim] * 2 + [heads * dim], dim=1)
    group = heads // shape.num_delta_key_heads
    q = F.normalize(q.view(len(x), -1, dim), dim=-1).repeat_interleave(group, 1) * dim**-0.5
    k = F.normalize(k.view(len(x), -1, dim), dim=-1).repeat_interleave(group, 1)
    v = v.view(len(x), heads, dim)
    decay = torch.exp(-layer.log_rate.exp() * F.softplus(step + layer.time_bias))
    out = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        surprise = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * surprise[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    value = torch.stack(out)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + shape.rms_norm_eps) * layer.value_norm
    return value.flatten(1) * F.silu(z), window, state


@interpreted
def test_gated_delta_layer_against_a_plain_one(generator):
    decoder = tiny("tiny-hybrid")
    shape = decoder.shape
    states = DeltaState(shape, 2, 4, torch.float32, "cpu")
    states.states.normal_(generator=generator)
    states.columns.normal_(generator=generator)
    states.keep([1, 3])
    before = states.columns[0].clone(), states.states[0].clone()
    layer = decoder.layers[0]
    assert isinstance(layer, DeltaLayer)
    forward = StaticForward(decoder, filled(decoder, generator), q_len=3, backend="triton_split", delta_state=states)
    x = torch.randn(6, shape.hidden_size, generator=generator)
    forward._normed.copy_(x)
    mixed = forward._mix_delta(0, layer)
    for request, kept in enumerate([1, 3]):
        columns, state = before[0][request, kept : kept + 3], before[1][request, kept - 1]
        rows = slice(3 * request, 3 * request + 3)
        wanted, window, last = reference_delta(layer, x[rows], columns, state, shape)
        torch.testing.assert_close(mixed[rows], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.columns[0][request, :6], window, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.states[0][request, 2], last, rtol=1e-4, atol=1e-5)


@interpreted
def test_a_hybrid_goes_on_after_a_rejection(generator):
    """Five tokens at once, of which two are kept, then three others: as if the rejected ones had never been there."""
    decoder = tiny("tiny-hybrid")
    shape, ids = decoder.shape, torch.randint(256, (2, 8), generator=generator)

    def run(cache, states, tokens):
        forward = StaticForward(decoder, cache, q_len=tokens.shape[1], backend="triton_split", delta_state=states)
        forward.token_ids.copy_(tokens)
        forward.run()
        return forward.logits.clone()

    cache = filled(decoder, generator)
    plain, states = cache.clone(), [DeltaState(shape, 2, 5, torch.float32, "cpu") for _ in range(2)]
    run(cache, states[0], ids[:, :5])
    run(plain, states[1], ids[:, :2])
    for side, state in zip((cache, plain), states, strict=True):
        side.advance(2)
        state.keep([2, 2])
    after = [run(side, state, ids[:, 5:]) for side, state in zip((cache, plain), states, strict=True)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-4)


def test_hybrids_have_no_eager_forward(generator):
    decoder = tiny("tiny-hybrid")
    with pytest.raises(Unsupported, match="captured forward only"):
        decoder.forward(torch.zeros(1, 1, dtype=torch.int64), decoder.new_cache(1, 64), backend="sdpa")


def test_states_must_have_room(generator):
    decoder = tiny("tiny-hybrid")
    with pytest.raises(ValueError, match="max_q_len of at least 3"):
        StaticForward(decoder, decoder.new_cache(1, 64), q_len=3, backend="sdpa")
