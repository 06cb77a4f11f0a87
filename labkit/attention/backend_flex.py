"""FlexAttention with a lower-right causal mask, compiled on CUDA (FlexDecoding for short q where it has one).

It takes no page table, so the pages of the batch must follow each other (page_order sequential, equal lengths).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.dense import dense_supports
from labkit.errors import Unsupported
from labkit.kv_cache import PagedKVCache

NAME = "flex"
SOURCES = ("dense.py",)

supports = dense_supports  # on the CPU uncompiled, for tests


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """The block mask once per step; compiling for a new shape takes tens of seconds and is not timed.

    Raises Unsupported: the pages do not follow each other.
    """
    if not cache.stacked_is_view() or len(set(cache.context_lens)) > 1:
        raise Unsupported("flex_attention takes no page table: needs equal lengths and consecutive pages")
    q_len, context_len = q.shape[1], cache.context_lens[0]
    kv_len = context_len + q_len
    offset = torch.tensor(context_len, device=q.device)

    def causal(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return kv_index <= q_index + offset

    mask = create_block_mask(causal, None, None, q_len, kv_len, device=str(q.device))
    attend: Any = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        k, v = cache.stacked(layer, kv_len)
        result, aux = attend(
            *(q.transpose(1, 2), k, v),
            block_mask=mask,
            scale=spec.scale(q.shape[-1]),
            enable_gqa=True,
            return_aux=AuxRequest(lse=lse is not None),
        )
        out.copy_(result.transpose(1, 2))
        if lse is not None:
            lse.copy_(aux.lse.transpose(1, 2))

    return run, {"resolved_kernel": f"flex_attention, torch {torch.__version__}"}
