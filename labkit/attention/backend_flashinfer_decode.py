"""FlashInfer's decode wrapper with tensor cores: one query token per request."""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.flashinfer_plan import WrapperCall, facts, flashinfer_supports, last_page_lens, workspace
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "flashinfer_decode"
SOURCES = ("flashinfer_plan.py",)


def supports(shape: AttentionShape, device: str) -> str:
    """As `flashinfer_supports`, for q_len 1: plan() of 0.6.6 has no argument for more."""
    if shape.q_len > 1 or shape.mask != "causal":
        return "takes one query token per request"
    return flashinfer_supports(shape, device)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """``plan`` once, ``run`` per layer."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(q.device), "NHD", use_tensor_cores=True)

    def plan() -> None:
        kv_lens = [n + 1 for n in cache.context_lens]
        wrapper.plan(
            cache.kv_indptr(kv_lens).cpu(),
            cache.kv_indices(kv_lens),
            last_page_lens(cache, kv_lens),
            q.shape[2],
            cache.num_kv_heads,
            q.shape[3],
            cache.page_size,
            sm_scale=spec.scale(q.shape[3]),
            window_left=spec.window_left,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )

    return WrapperCall(wrapper, cache, plan), facts("paged decode, tensor cores")
