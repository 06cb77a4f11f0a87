"""Triton attention without a KV split: the verify kernel of slow engines, kept as they have it.

Every program pads its `q_len` rows to `BLOCK_M`, and each query head of a group reads K and V again.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.triton_common import PRECISION, triton_supports
from labkit.kv_cache import PagedKVCache

NAME = "triton_nosplit"
SOURCES = ("triton_nosplit_kernel.py", "triton_tile.py", "triton_common.py")
BLOCK_M = 64
BLOCK_N = {2: 64, 4: 32}  # by bytes of an element: float32 tiles must fit in shared memory
NUM_STAGES = 1  # nothing overlaps, as in the kernels this stands for

supports = triton_supports


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """One launch of grid (batch_size, num_qo_heads, ceil(q_len / BLOCK_M))."""
    from labkit.attention.triton_nosplit_kernel import nosplit_kernel

    batch_size, q_len, num_qo_heads, head_dim = q.shape
    group_size = num_qo_heads // cache.num_kv_heads
    kv_lens = torch.tensor([n + q_len for n in cache.context_lens], dtype=torch.int32).to(q.device)
    num_row_blocks = -(-q_len // BLOCK_M)
    grid = (batch_size, num_qo_heads, num_row_blocks)
    scale_log2 = spec.scale(head_dim) * 1.4426950408889634

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        nosplit_kernel[grid](
            q,
            cache.k[layer],
            cache.v[layer],
            cache.page_table,
            kv_lens,
            out,
            out if lse is None else lse,
            scale_log2,
            q_len,
            *q.stride()[:3],
            cache.page_table.stride(0),
            cache.num_kv_heads * head_dim,
            NUM_QO_HEADS=num_qo_heads,
            GROUP_SIZE=group_size,
            HEAD_DIM=head_dim,
            PAGE_SIZE=cache.page_size,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N[q.element_size()],
            HAS_LSE=lse is not None,
            PRECISION=PRECISION[str(q.dtype).removeprefix("torch.")],
            num_warps=4 if head_dim <= 64 else 8,
            num_stages=NUM_STAGES,
        )

    info = {
        "resolved_kernel": "triton nosplit_kernel",
        "grid": grid,
        "num_programs": batch_size * num_qo_heads * num_row_blocks,
        "num_splits": 1,
        "kv_passes": group_size * num_row_blocks,
        "workspace_bytes": 0,
    }
    return run, info
