"""What the FlashInfer backends share: the page table in FlashInfer's form, tree masks, and a call of its wrappers."""

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

WORKSPACE_BYTES = 512 << 20  # long contexts with wide tiles need more than the documented 128 MB
LN2 = math.log(2.0)


def flashinfer_supports(shape: AttentionShape, device: str) -> str:
    """CUDA; q in 16 bits, K/V like q or float8_e4m3fn; head_dim 64, 128 or 256."""
    if importlib.util.find_spec("flashinfer") is None:
        return "needs the package flashinfer-python"
    if device != "cuda":
        return "needs a CUDA device"
    if shape.q_dtype not in ("bfloat16", "float16") or shape.kv_dtype not in (shape.q_dtype, "float8_e4m3fn"):
        return "needs q in bfloat16 or float16, and K/V like q or float8_e4m3fn"
    if shape.head_dim not in (64, 128, 256):
        return "needs a head_dim of 64, 128 or 256"
    if shape.mask == "none" or (shape.mask == "tree" and shape.window is not None):
        return "has no tree mask within a sliding window, and a mask always"
    return ""


def facts(kernel: str, num_workspaces: int = 1) -> dict[str, Any]:
    """What a backend tells of itself (`labkit.attention.api.PreparedAttention.info`)."""
    version = importlib.metadata.version("flashinfer-python")
    return {"resolved_kernel": f"flashinfer {version} {kernel}", "workspace_bytes": num_workspaces * WORKSPACE_BYTES}


def workspace(device: torch.device) -> Tensor:
    """Scratch memory of a wrapper."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def last_page_lens(cache: PagedKVCache, kv_lens: list[int]) -> Tensor:
    """int32 ``[batch_size]``: tokens in the last page of each request, 1 to page_size."""
    return torch.tensor([(n - 1) % cache.page_size + 1 for n in kv_lens], dtype=torch.int32)


def prefill_plan(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> dict[str, Any]:
    """Arguments of ``plan`` for `q_len` tokens per request over the whole cache."""
    batch_size, q_len, num_qo_heads, head_dim = q.shape
    kv_lens = [n + q_len for n in cache.context_lens]
    # plan() wants the lengths on the host, but packs a mask on the device and then wants them there.
    where = "cpu" if spec.tree is None else q.device
    return {
        "qo_indptr": (torch.arange(batch_size + 1, dtype=torch.int32) * q_len).to(where),
        "paged_kv_indptr": cache.kv_indptr(kv_lens).to(where),
        "paged_kv_indices": cache.kv_indices(kv_lens),
        "paged_kv_last_page_len": last_page_lens(cache, kv_lens).to(where),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim_qk": head_dim,
        "page_size": cache.page_size,
        "causal": spec.tree is None,
        "custom_mask": None if spec.tree is None else _tree_mask(spec.tree, cache.context_lens),
        "sm_scale": spec.scale(head_dim),
        "window_left": spec.window_left,
        "q_data_type": q.dtype,
        "kv_data_type": cache.dtype,
    }


def _tree_mask(tree: Tensor, context_lens: list[int]) -> Tensor:
    """Bool mask of all requests in a row, each ``[q_len, kv_len]``: the layout of ``custom_mask``."""
    q_len = tree.shape[1]
    sees = ((tree[:, :, None] >> torch.arange(q_len, device=tree.device)) & 1).bool()
    context = [torch.ones(q_len, n, dtype=torch.bool, device=tree.device) for n in context_lens]
    return torch.cat([torch.cat([left, right], dim=1).flatten() for left, right in zip(context, sees, strict=True)])


class WrapperCall:
    """One run of a wrapper, planned by `plan`; FlashInfer's base-2 lse is converted."""

    def __init__(self, wrapper: Any, cache: PagedKVCache, plan: Callable[[], None]):
        self.wrapper, self.cache, self.plan = wrapper, cache, plan
        plan()
        quantised = cache.k_scale != 1.0 or cache.v_scale != 1.0
        self.scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale} if quantised else {}

    def __call__(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        pages = (self.cache.k[layer], self.cache.v[layer])
        rows, rows_out = q.flatten(0, 1), out.view(-1, *out.shape[2:])
        if lse is None:
            self.wrapper.run(rows, pages, out=rows_out, **self.scales)
        else:
            rows_lse = lse.view(-1, lse.shape[-1])
            self.wrapper.run(rows, pages, out=rows_out, lse=rows_lse, return_lse=True, **self.scales)
            rows_lse.mul_(LN2)
