"""One kernel of ``scaled_dot_product_attention`` each: flash, mem-efficient, cuDNN, math.

They take no page table, so the pages of a request must follow each other (page_order sequential).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.dense import dense_supports, prepare_dense
from labkit.errors import Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

SOURCES = ("dense.py",)
VARIANTS = {
    "sdpa_flash": {"kernel": SDPBackend.FLASH_ATTENTION},
    "sdpa_efficient": {"kernel": SDPBackend.EFFICIENT_ATTENTION},
    "sdpa_cudnn": {"kernel": SDPBackend.CUDNN_ATTENTION},
    "sdpa_math": {"kernel": SDPBackend.MATH},
}


def supports(shape: AttentionShape, device: str, kernel: SDPBackend) -> str:
    """As `dense_supports`; all but math on CUDA only."""
    if device != "cuda" and kernel is not SDPBackend.MATH:
        return "needs a CUDA device"
    return dense_supports(shape, device)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec, *, kernel: SDPBackend) -> tuple[Run, dict[str, Any]]:
    """Query heads packed into rows with an explicit mask; flash, which takes no mask, its own lower-right causal one.

    Raises Unsupported: the pages do not follow each other; when run: the kernel refuses the call.
    """
    is_ragged = len(set(cache.context_lens)) > 1
    consecutive = all(map(cache.is_view, range(cache.batch_size))) if is_ragged else cache.stacked_is_view()
    if not consecutive:
        raise Unsupported("scaled_dot_product_attention takes no page table: needs consecutive pages")
    if kernel is SDPBackend.FLASH_ATTENTION:
        if is_ragged:
            raise Unsupported("the causal mask of the flash kernel needs equal lengths")
        if spec.return_lse:
            raise Unsupported("scaled_dot_product_attention returns no lse")
        plain, info = _flash(q, cache, spec), dict[str, Any]()
    else:
        plain, info = prepare_dense(q, cache, spec, rows_per_call=q.shape[1])
    info["resolved_kernel"] = f"scaled_dot_product_attention {kernel.name.lower()}, torch {torch.__version__}"

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        try:
            with sdpa_kernel(kernel):
                plain(q, layer, out, lse)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Unsupported(f"{kernel.name.lower()} refuses this call") from error
            raise

    return run, info


def _flash(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> Run:
    q_len, kv_len = q.shape[1], cache.context_lens[0] + q.shape[1]
    bias = None if q_len == 1 else causal_lower_right(q_len, kv_len)

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        k, v = cache.stacked(layer, kv_len)
        result = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=bias, scale=spec.scale(q.shape[-1]), enable_gqa=True
        )
        out.copy_(result.transpose(1, 2))

    return run
