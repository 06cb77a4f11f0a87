"""FlashInfer's fa2 prefill in two levels: the prefix that all requests share is read once for the whole batch."""

from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.flashinfer_plan import LN2, facts, flashinfer_supports, last_page_lens, prefill_plan, workspace
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "flashinfer_cascade"
SOURCES = ("flashinfer_plan.py",)


def supports(shape: AttentionShape, device: str) -> str:
    """As `flashinfer_supports`, for a causal batch that shares a prefix."""
    if reason := flashinfer_supports(shape, device):
        return reason
    if shape.shared_prefix_len == 0:
        return "needs a prefix that all requests share"
    if shape.mask != "causal" or shape.window is not None or shape.kv_dtype != shape.q_dtype:
        return "has the causal mask only, without a window, and K/V like q"
    return ""


class CascadeCall:
    """All rows over the shared prefix as one request, each request's rows over its own keys, merged by lse."""

    def __init__(self, shared: Any, own: Any, cache: PagedKVCache, num_rows: int, num_qo_heads: int):
        self.shared, self.own, self.cache = shared, own, cache
        self.own_lse = torch.empty(num_rows, num_qo_heads, device=cache.device)

    def __call__(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        import flashinfer

        pages, rows = (self.cache.k[layer], self.cache.v[layer]), q.flatten(0, 1)
        rows_out = out.view(-1, *out.shape[2:])
        rows_lse = self.own_lse if lse is None else lse.view(-1, lse.shape[-1])
        self.own.run(rows, pages, out=rows_out, lse=rows_lse, return_lse=True)
        prefix_out, prefix_lse = self.shared.run(rows, pages, return_lse=True)
        flashinfer.merge_state_in_place(rows_out, rows_lse, prefix_out, prefix_lse)
        if lse is not None:
            rows_lse.mul_(LN2)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """Two plans: the prefix without a mask, the rest causal."""
    import flashinfer

    batch_size, q_len, num_qo_heads, _ = q.shape
    prefix, num_rows = cache.shared_prefix_len, batch_size * q_len
    shared, own = (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD", backend="fa2") for _ in range(2)
    )
    plan = prefill_plan(q, cache, spec)
    shared.plan(
        **plan
        | {
            "qo_indptr": torch.tensor([0, num_rows], dtype=torch.int32),
            "paged_kv_indptr": torch.tensor([0, prefix // cache.page_size], dtype=torch.int32),
            "paged_kv_indices": cache.page_table[0, : prefix // cache.page_size].contiguous(),
            "paged_kv_last_page_len": torch.tensor([cache.page_size], dtype=torch.int32),
            "causal": False,
        }
    )
    tails = [n + q_len - prefix for n in cache.context_lens]
    num_pages = [-(-tail // cache.page_size) for tail in tails]
    first = prefix // cache.page_size
    own.plan(
        **plan
        | {
            "paged_kv_indptr": torch.tensor([0, *num_pages]).cumsum(0).to(torch.int32),
            "paged_kv_indices": torch.cat([cache.page_table[r, first : first + n] for r, n in enumerate(num_pages)]),
            "paged_kv_last_page_len": last_page_lens(cache, tails),
        }
    )
    call = CascadeCall(shared, own, cache, num_rows, num_qo_heads)
    return call, facts("paged prefill fa2, cascade of two levels", num_workspaces=2)
