"""``scaled_dot_product_attention`` with any mask of `AttentionSpec`: trees, and blocks whose tokens see each other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "sdpa_masked"


def supports(shape: AttentionShape, device: str) -> str:
    """16-bit and 32-bit floats, the same for q and the cache; no window."""
    if shape.window is not None:
        return "has no sliding window"
    allowed = ("float32", "bfloat16", "float16")
    if shape.q_dtype not in allowed or shape.kv_dtype != shape.q_dtype:
        return f"scaled_dot_product_attention needs q and K/V in one of {', '.join(allowed)}"
    return ""


def visible_keys(spec: AttentionSpec, context_lens: list[int], q_len: int, device: torch.device) -> Tensor:
    """Which keys each new token sees, bool ``[batch_size, q_len, longest kv_len]``."""
    width = max(context_lens) + q_len
    place = torch.arange(width, device=device) - torch.tensor(context_lens, device=device)[:, None, None]
    if spec.tree is not None:
        sees = (spec.tree[:, :, None] >> place.clamp(0, 63)) & 1 == 1
        return (place < 0) | ((place < q_len) & sees)
    own = torch.arange(q_len, device=device)[:, None]
    return (place <= own if spec.causal else place < q_len).expand(-1, q_len, -1)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """One call for the whole batch at the longest length; query heads of one KV head are packed into rows.

    No mask is made where every new token sees every key.
    """
    batch_size, q_len, num_qo_heads, head_dim = q.shape
    lens, num_kv_heads = cache.context_lens, cache.num_kv_heads
    group_size, kv_len = num_qo_heads // num_kv_heads, max(lens) + q_len
    mask = None
    if len(set(lens)) > 1 or spec.tree is not None or (spec.causal and q_len > 1):
        mask = visible_keys(spec, lens, q_len, q.device).repeat_interleave(group_size, dim=1)[:, None]
    sm_scale = spec.scale(head_dim)
    grouped = (batch_size, q_len, num_kv_heads, group_size)

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        rows = q.view(*grouped, head_dim).transpose(1, 2).reshape(batch_size, num_kv_heads, -1, head_dim)
        k, v = cache.stacked(layer, kv_len)
        result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=sm_scale)
        out.view(*grouped, head_dim).copy_(result.view(batch_size, num_kv_heads, q_len, group_size, -1).transpose(1, 2))
        if lse is not None:
            logits = torch.matmul(rows.float() * sm_scale, k.float().transpose(-1, -2))
            logits = logits if mask is None else logits.masked_fill_(~mask, float("-inf"))
            logsums = logits.logsumexp(dim=-1).view(batch_size, num_kv_heads, q_len, group_size)
            lse.view(grouped).copy_(logsums.transpose(1, 2))

    where = "read in place" if cache.stacked_is_view() else "gathered from the pages in every call"
    kernel = f"scaled_dot_product_attention on {q.device.type}, explicit mask, K/V {where}"
    return run, {"resolved_kernel": kernel, "kv_passes": 2 if spec.return_lse else 1}
