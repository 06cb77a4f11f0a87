"""The oracle: eager attention in float64, chunked over keys. It does its own page arithmetic and shares no code."""

import math
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import DEFAULT_SPEC, AttentionSpec, Run
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "reference"
KEYS_PER_CHUNK = 4096


def supports(shape: AttentionShape, device: str) -> str:
    """Everything with q in 16-bit or 32-bit floats."""
    allowed = ("float32", "bfloat16", "float16")
    return "" if shape.q_dtype in allowed else f"needs q in {', '.join(allowed)}"


def paged_keys(
    cache: PagedKVCache, layer: int, request: int, first: int, last: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens `first` to `last` (exclusive) in `dtype`, ``[tokens, num_kv_heads, head_dim]``.

    Read by page table; a quantised cache is scaled.
    """
    token = torch.arange(first, last, device=cache.device)
    page = cache.page_table[request].long()[token // cache.page_size]
    k, v = (storage[layer][page, token % cache.page_size].to(dtype) for storage in (cache.k, cache.v))
    return (k, v) if cache.k_scale == cache.v_scale == 1.0 else (k * cache.k_scale, v * cache.v_scale)


def hidden_keys(spec: AttentionSpec, request: int, context_len: int, q_len: int, key: Tensor) -> Tensor:
    """Which of the keys (their places in the cache) each new token does not see, bool ``[q_len, keys]``."""
    own = context_len + torch.arange(q_len, device=key.device)[:, None]
    if spec.tree is None and not spec.causal:
        return (key >= context_len + q_len).expand(q_len, -1)
    if spec.tree is None:
        hidden = key > own
        return hidden if spec.window is None else hidden | (key <= own - spec.window)
    sees = (spec.tree[request][:, None] >> (key - context_len).clamp(0, 63)) & 1
    return (key >= context_len) & (sees == 0)


def oracle(q: Tensor, cache: PagedKVCache, layer: int, spec: AttentionSpec = DEFAULT_SPEC) -> tuple[Tensor, Tensor]:
    """Attention over the cached and the `q_len` new tokens, with a running softmax over chunks of keys.

    A row that sees no key gives 0 and an lse of -inf.

    Returns out float64 ``[batch_size, q_len, num_qo_heads, head_dim]``; lse float64 ``[batch_size, q_len,
    num_qo_heads]``, natural logarithm.
    """
    _, q_len, num_qo_heads, head_dim = q.shape
    group_size = num_qo_heads // cache.num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for request, context_len in enumerate(cache.context_lens):
        rows = q[request].double().view(q_len, cache.num_kv_heads, group_size, head_dim) * spec.scale(head_dim)
        top = torch.full(rows.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(top)
        weighted = torch.zeros_like(rows)
        for first in range(0, context_len + q_len, KEYS_PER_CHUNK):
            last = min(first + KEYS_PER_CHUNK, context_len + q_len)
            k, v = paged_keys(cache, layer, request, first, last, torch.float64)
            logits = torch.einsum("qhgd,khd->qhgk", rows, k)
            key = torch.arange(first, last, device=q.device)
            logits.masked_fill_(hidden_keys(spec, request, context_len, q_len, key)[:, None, None, :], -math.inf)
            new_top = torch.maximum(top, logits.amax(dim=-1))
            base = new_top.masked_fill(new_top == -math.inf, 0.0)
            shrink = torch.exp(top - base)
            weights = torch.exp(logits - base[..., None])
            total = total * shrink + weights.sum(dim=-1)
            weighted = weighted * shrink[..., None] + torch.einsum("qhgk,khd->qhgd", weights, v)
            top = new_top
        out[request] = (weighted / total.clamp(min=torch.finfo(torch.float64).tiny)[..., None]).flatten(1, 2)
        lse[request] = (top + torch.log(total)).flatten(1, 2)
    return out, lse


def eager(q: Tensor, cache: PagedKVCache, layer: int, spec: AttentionSpec = DEFAULT_SPEC) -> Tensor:
    """Plain attention in the dtype of `q`, rounding after each step: the yardstick for what its dtype explains.

    One KV head at a time, so that its ``[rows, kv_len]`` weights stay small. Returns a tensor like `q`.
    """
    q_len = q.shape[1]
    group_size = q.shape[2] // cache.num_kv_heads
    out = torch.empty_like(q)
    for request, context_len in enumerate(cache.context_lens):
        k, v = paged_keys(cache, layer, request, 0, context_len + q_len, q.dtype)
        key = torch.arange(context_len + q_len, device=q.device)
        hidden = hidden_keys(spec, request, context_len, q_len, key)
        for head in range(cache.num_kv_heads):
            heads = slice(head * group_size, (head + 1) * group_size)
            logits = torch.matmul(q[request, :, heads] * spec.scale(q.shape[-1]), k[:, head].T)
            weights = logits.masked_fill_(hidden[:, None], -math.inf).softmax(dim=-1)
            # Fully masked rows: softmax gives NaN where attention gives 0.
            out[request, :, heads] = torch.matmul(weights.nan_to_num_(nan=0.0), v[:, head])
    return out


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """The oracle, rounded to the dtype of `out`."""

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        result, result_lse = oracle(q, cache, layer, spec)
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)

    return run, {"resolved_kernel": "eager float64, running softmax over chunks of keys", "kv_passes": 1}
