"""Attention through ``scaled_dot_product_attention`` on dense K and V: what `sdpa` and `per_token` share.

The query heads of one KV head become query rows (``[batch_size, num_kv_heads, rows * group_size, head_dim]``),
so K and V are read once per call and not once per query head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

KEYS_PER_CHUNK = 4096


def dense_supports(shape: AttentionShape, device: str) -> str:
    """16-bit and 32-bit floats, the same for q and the cache; the causal mask without a window."""
    if shape.mask != "causal" or shape.window is not None:
        return "has the causal mask only, without a window"
    allowed = ("float32", "bfloat16", "float16")
    if shape.q_dtype not in allowed or shape.kv_dtype != shape.q_dtype:
        return f"scaled_dot_product_attention needs q and K/V in one of {', '.join(allowed)}"
    return ""


@dataclass(frozen=True)
class _Call:
    """One call of the kernel: some query rows of one request, or of all requests when their lengths agree."""

    fetch: Callable[[int, int], tuple[Tensor, Tensor]]
    batch: slice
    rows: slice
    kv_len: int
    mask: Tensor | None
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_whole else tensor[self.batch, self.rows]


def _mask(q: Tensor, num_rows: int, group_size: int, width: int) -> Tensor:
    """Additive causal mask ``[num_rows * group_size, width]`` whose last row sees every key.

    Row blocks and requests of any length use its lower-right corner, so one mask serves a whole step.
    """
    row = torch.arange(num_rows, device=q.device).repeat_interleave(group_size)
    hidden = torch.arange(width, device=q.device) > (width - num_rows + row)[:, None]
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)


def _plan(q: Tensor, cache: PagedKVCache, rows_per_call: int) -> list[_Call]:
    batch_size, q_len, num_qo_heads, _ = q.shape
    group_size = num_qo_heads // cache.num_kv_heads
    lens = cache.context_lens
    num_rows = min(q_len, rows_per_call)
    width = max(lens) + q_len
    mask = _mask(q, num_rows, group_size, width) if num_rows > 1 else None
    if len(set(lens)) == 1:
        parts = [(cache, slice(0, batch_size), lens[0])]
    else:
        parts = [(cache.rows([r]), slice(r, r + 1), context_len) for r, context_len in enumerate(lens)]
    calls = []
    for part, batch, context_len in parts:
        for first in range(0, q_len, rows_per_call):
            last = min(first + rows_per_call, q_len)
            kv_len = context_len + last
            corner = None
            if mask is not None and last - first > 1:
                corner = mask[(num_rows - (last - first)) * group_size :, width - kv_len :]
                # CUDA kernels want an aligned mask; the CPU kernel takes any strides.
                corner = corner.contiguous() if q.is_cuda else corner
            is_whole = len(parts) == 1 and last - first == q_len
            calls.append(_Call(part.stacked, batch, slice(first, last), kv_len, corner, is_whole))
    return calls


def _lse(rows: Tensor, k: Tensor, mask: Tensor | None, sm_scale: float) -> Tensor:
    """Natural-log sum of exponentials of the logits, float32 ``[batch_size, num_kv_heads, rows]``."""
    parts = []
    for first in range(0, k.shape[2], KEYS_PER_CHUNK):
        keys = slice(first, first + KEYS_PER_CHUNK)
        logits = torch.matmul(rows.float() * sm_scale, k[:, :, keys].float().transpose(-1, -2))
        if mask is not None:
            logits += mask[:, keys]
        parts.append(torch.logsumexp(logits, dim=-1))
    return torch.stack(parts).logsumexp(dim=0)


def prepare_dense(
    q: Tensor, cache: PagedKVCache, spec: AttentionSpec, *, rows_per_call: int
) -> tuple[Run, dict[str, Any]]:
    """Attention of at most `rows_per_call` query tokens per kernel call; each call reads all of its K and V.

    ``scaled_dot_product_attention`` returns no lse, so asking for it adds a pass over K (counted in `kv_passes`).
    """
    calls = _plan(q, cache, rows_per_call)
    sm_scale = spec.scale(q.shape[-1])
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    group_size = q.shape[2] // num_kv_heads

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        for call in calls:
            q_part = call.of(q)
            grouped = (q_part.shape[0], q_part.shape[1], num_kv_heads, group_size)
            packed = (grouped[0], num_kv_heads, grouped[1] * group_size)
            rows = q_part.view(*grouped, head_dim).transpose(1, 2).reshape(*packed, head_dim)
            k, v = call.fetch(layer, call.kv_len)
            result = F.scaled_dot_product_attention(rows, k, v, attn_mask=call.mask, scale=sm_scale)
            result = result.view(grouped[0], num_kv_heads, grouped[1], group_size, head_dim)
            call.of(out).view(*grouped, head_dim).copy_(result.transpose(1, 2))
            if lse is not None:
                logsums = _lse(rows, k, call.mask, sm_scale).view(grouped[0], num_kv_heads, grouped[1], group_size)
                call.of(lse).view(grouped).copy_(logsums.transpose(1, 2))

    is_ragged = len(set(cache.context_lens)) > 1
    is_view = all(map(cache.is_view, range(cache.batch_size))) if is_ragged else cache.stacked_is_view()
    where = "K/V read in place" if is_view else "K/V gathered from the pages in every call"
    kernel = f"scaled_dot_product_attention on {q.device.type}, packed GQA rows, {len(calls)} calls, {where}"
    passes = -(-q.shape[1] // rows_per_call) * (2 if spec.return_lse else 1)
    return run, {"resolved_kernel": kernel, "kv_passes": passes}
