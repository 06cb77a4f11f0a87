"""FlashInfer's paged prefill wrapper with its fa2 or fa3 kernels, or the one that ``auto`` picks (recorded)."""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.flashinfer_plan import WrapperCall, facts, flashinfer_supports, prefill_plan, workspace
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

SOURCES = ("flashinfer_plan.py",)
VARIANTS = {f"flashinfer_{kernel}": {"kernel": kernel} for kernel in ("fa2", "fa3", "auto")}


def supports(shape: AttentionShape, device: str, kernel: str) -> str:
    """As `flashinfer_supports`; fa3 on compute capability 9.0 only, without tree masks and with K/V like q."""
    reason = flashinfer_supports(shape, device)
    if reason or kernel != "fa3":
        return reason
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        return "fa3 needs a device of compute capability 9.0"
    if shape.mask != "causal" or shape.kv_dtype != shape.q_dtype:
        return "fa3 has no tree masks, and no float8 K/V with q in 16 bits"
    return ""


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec, *, kernel: str) -> tuple[Run, dict[str, Any]]:
    """``plan`` once (its time is the plan's), ``run`` per layer; its splits are those of the planned lengths."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD", backend=kernel)
    call = WrapperCall(wrapper, cache, lambda: wrapper.plan(**prefill_plan(q, cache, spec)))
    # `auto` is resolved by plan; there is no public name for its choice.
    return call, facts(f"paged prefill {wrapper._backend}")
