"""The oracle: eager attention in float64, chunked over keys. It does its own page arithmetic and shares no code."""

import math
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "reference"
KEYS_PER_CHUNK = 4096


def supports(shape: AttentionShape, device: str) -> str:
    """Everything that has 16-bit or 32-bit floats."""
    allowed = ("float32", "bfloat16", "float16")
    if shape.q_dtype not in allowed or shape.kv_dtype not in allowed:
        return f"needs q and K/V in {', '.join(allowed)}"
    return ""


def paged_keys(cache: PagedKVCache, layer: int, request: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """K and V of the tokens `first` to `last` (exclusive), ``[tokens, num_kv_heads, head_dim]``, read by page table."""
    token = torch.arange(first, last, device=cache.device)
    page = cache.page_table[request].long()[token // cache.page_size]
    return cache.k[layer, page, token % cache.page_size], cache.v[layer, page, token % cache.page_size]


def oracle(q: Tensor, cache: PagedKVCache, layer: int, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Attention over the cached and the `q_len` new tokens, with a running softmax over chunks of keys.

    Returns
    -------
    out : float64 ``[batch_size, q_len, num_qo_heads, head_dim]``
    lse : float64 ``[batch_size, q_len, num_qo_heads]``, natural logarithm
    """
    _, q_len, num_qo_heads, head_dim = q.shape
    group_size = num_qo_heads // cache.num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for request, context_len in enumerate(cache.context_lens):
        rows = q[request].double().view(q_len, cache.num_kv_heads, group_size, head_dim) * sm_scale
        top = torch.full(rows.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(top)
        weighted = torch.zeros_like(rows)
        last_key = context_len + torch.arange(q_len, device=q.device)
        for first in range(0, context_len + q_len, KEYS_PER_CHUNK):
            last = min(first + KEYS_PER_CHUNK, context_len + q_len)
            k, v = (side.double() for side in paged_keys(cache, layer, request, first, last))
            logits = torch.einsum("qhgd,khd->qhgk", rows, k)
            hidden = torch.arange(first, last, device=q.device) > last_key[:, None]
            logits.masked_fill_(hidden[:, None, None, :], -math.inf)
            # The first chunk shows key 0 to every row, so the running maximum is finite from then on.
            new_top = torch.maximum(top, logits.amax(dim=-1))
            shrink = torch.exp(top - new_top)
            weights = torch.exp(logits - new_top[..., None])
            total = total * shrink + weights.sum(dim=-1)
            weighted = weighted * shrink[..., None] + torch.einsum("qhgk,khd->qhgd", weights, v)
            top = new_top
        out[request] = (weighted / total[..., None]).flatten(1, 2)
        lse[request] = (top + torch.log(total)).flatten(1, 2)
    return out, lse


def eager(q: Tensor, cache: PagedKVCache, layer: int, sm_scale: float) -> Tensor:
    """Plain attention in the dtype of `q`, rounding after each step: the yardstick for what its dtype explains.

    One KV head at a time, so that its ``[rows, kv_len]`` weights stay small. Returns a tensor like `q`.
    """
    q_len = q.shape[1]
    group_size = q.shape[2] // cache.num_kv_heads
    out = torch.empty_like(q)
    for request, context_len in enumerate(cache.context_lens):
        k, v = paged_keys(cache, layer, request, 0, context_len + q_len)
        key = torch.arange(context_len + q_len, device=q.device)
        hidden = key > context_len + torch.arange(q_len, device=q.device)[:, None]
        for head in range(cache.num_kv_heads):
            heads = slice(head * group_size, (head + 1) * group_size)
            logits = torch.matmul(q[request, :, heads] * sm_scale, k[:, head].to(q.dtype).T)
            weights = logits.masked_fill_(hidden[:, None], -math.inf).softmax(dim=-1)
            out[request, :, heads] = torch.matmul(weights, v[:, head].to(q.dtype))
    return out


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """The oracle, rounded to the dtype of `out`."""
    sm_scale = spec.scale(q.shape[-1])

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        result, result_lse = oracle(q, cache, layer, sm_scale)
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)

    info = {
        "resolved_kernel": "eager float64, running softmax over chunks of keys",
        "num_programs": None,
        "num_splits": None,
        "kv_passes": 1,
    }
    return run, info
