"""Planted wrong backends: the located request, head, row and key tile are the ones that were broken."""

import math

import pytest
import torch

from labkit.attention import registry
from labkit.attention.api import AttentionSpec, prepare, register_backend
from labkit.attention.inputs import check, make_inputs
from labkit.attention.locate import TILE, locate
from labkit.errors import WrongResult
from labkit.shapes import AttentionShape

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64


@pytest.fixture(autouse=True)
def _same_backends_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))


def eager_backend(mistake):
    """Attention in float64 with one mistake, made where a kernel would make it."""

    def prepare_eager(q, cache, spec):
        group, scale, q_len = q.shape[2] // cache.num_kv_heads, spec.scale(q.shape[-1]), q.shape[1]

        def run(q, layer, out, lse):
            for request, context_len in enumerate(cache.context_lens):
                kv_len = context_len + q_len
                token = torch.arange(kv_len)
                page = cache.page_table[request].long()[token // cache.page_size]
                if mistake == "wrong_page" and request == 1:
                    page[160:176] = cache.page_table[0, 2].long()
                k, v = (side[layer, page, token % cache.page_size].double() for side in (cache.k, cache.v))
                k, v = (side.repeat_interleave(group, dim=1) for side in (k, v))
                if mistake == "misplaced_head":
                    k[:, 4], v[:, 4] = k[:, 0].clone(), v[:, 0].clone()
                if mistake == "misplaced_v_head":
                    v[:, 4] = v[:, 0].clone()
                logits = torch.einsum("qhd,khd->hqk", q[request].double(), k) * scale
                seen = context_len + torch.arange(q_len)[:, None]
                if mistake == "causal_edge" and request == 1:
                    seen = seen + 1
                logits.masked_fill_(token > seen, -math.inf)
                if mistake == "skipped_split" and request == 1:
                    logits[:, :, 2 * TILE : 3 * TILE] = -math.inf
                weights = logits.softmax(-1)
                out[request] = torch.einsum("hqk,khd->qhd", weights, v * (2 if mistake == "scale_of_v" else 1))
                if mistake == "row_left_out" and request == 0:
                    out[request, 1, 3] = math.nan

        return run, {"resolved_kernel": mistake, "num_programs": None, "num_splits": None, "kv_passes": 1}

    return prepare_eager


def located(mistake, dtype="float32", context_len=(300, 250), q_len=3, generator=None):
    register_backend("planted", eager_backend(mistake), supports=lambda shape, device: "")
    shape = AttentionShape(2, q_len, context_len, HEADS, KV_HEADS, HEAD_DIM, q_dtype=dtype)
    q, cache = make_inputs(shape, generator=generator)
    stored = cache.v.clone()
    call = prepare(q, cache, backend="planted")
    with pytest.raises(WrongResult):
        check(call, cache, AttentionSpec())
    fault = locate("planted", q, cache, AttentionSpec())
    assert torch.equal(cache.v, stored)
    return fault


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(4))
class TestPlanted:
    def test_skipped_split(self, dtype, seed):
        fault = located("skipped_split", dtype, generator=torch.Generator().manual_seed(seed))
        assert (fault.request, fault.key_tile) == (1, 2)

    def test_causal_edge(self, dtype, seed):
        fault = located("causal_edge", dtype, generator=torch.Generator().manual_seed(seed))
        assert fault.request == 1
        assert fault.query_row < 2  # the last row has nothing beyond it to see
        assert fault.key_tile == (250 + fault.query_row + 1) // TILE

    def test_wrong_page(self, dtype, seed):
        fault = located("wrong_page", dtype, generator=torch.Generator().manual_seed(seed))
        assert fault.request == 1
        # Keys 160 to 175 came from a page of tile 0 of another request: too much there, too little here.
        assert fault.key_tile in (0, 160 // TILE)

    def test_misplaced_head(self, dtype, seed):
        fault = located("misplaced_head", dtype, generator=torch.Generator().manual_seed(seed))
        assert fault.head == 4

    def test_row_left_out(self, dtype, seed):
        fault = located("row_left_out", dtype, generator=torch.Generator().manual_seed(seed))
        assert fault == (0, 1, 3, 0)

    def test_right_weights_wrong_values(self, dtype, seed):
        fault = located("scale_of_v", dtype, generator=torch.Generator().manual_seed(seed))
        assert fault.key_tile is None
        assert "the 64-key tiles share the weight rightly" in str(fault)


def test_v_of_a_wrong_head(generator):
    fault = located("misplaced_v_head", generator=generator)
    assert fault.head == 4
    assert fault.key_tile == 0


def test_more_tiles_than_elements(generator):
    """65 tiles and more need a second pass over a head of 64 elements."""
    fault = located("skipped_split", context_len=(4400, 5000), q_len=2, generator=generator)
    assert (fault.request, fault.key_tile) == (1, 2)
    assert "first wrong key tile 2 (keys 128 to 191)" in str(fault)
