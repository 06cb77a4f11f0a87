"""Triton attention with a KV split and packed rows: K and V are read once per tile of rows, by enough programs.

The constants are those that were fastest on an H200; `max_splits` of the spec caps the splits as an engine's flag does.
"""

from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.triton_common import PRECISION, triton_supports
from labkit.kv_cache import PagedKVCache

NAME = "triton_split"
SOURCES = ("triton_split_kernel.py", "triton_tile.py", "triton_common.py")
MAX_BLOCK_M = 64
MIN_CHUNK = 128  # keys per split: below it the merge costs more than the split gains
NUM_WARPS = 4
INTERPRETER_NUM_SMS = 16

supports = triton_supports


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _keys_per_tile(q: Tensor) -> int:
    if q.element_size() == 4:
        return 32
    return 128 if q.shape[1] == 1 and q.shape[3] <= 128 else 64


def choose_num_splits(num_tiles: int, max_kv_len: int, head_dim: int, num_sms: int, max_splits: int | None) -> int:
    """Splits that give `num_tiles` (requests x KV heads x row tiles) one program per SM, two for small heads.

    Fewer when a split would get less than `MIN_CHUNK` keys, or more than `max_splits` would be needed.
    """
    programs = num_sms * (2 if head_dim <= 128 else 1)
    num_splits = min(programs // num_tiles, -(-max_kv_len // MIN_CHUNK))
    return max(1, num_splits if max_splits is None else min(num_splits, max_splits))


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """One launch, grid (batch_size, num_kv_heads x row tiles, splits), and a merge if there is more than one split."""
    from labkit.attention.triton_split_kernel import merge_kernel, split_kernel

    batch_size, q_len, num_qo_heads, head_dim = q.shape
    group_size = num_qo_heads // cache.num_kv_heads
    kv_lens = [n + q_len for n in cache.context_lens]
    block_m = min(MAX_BLOCK_M, max(16, _power_of_two(q_len * group_size)))
    num_row_tiles = -(-q_len * group_size // block_m)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else INTERPRETER_NUM_SMS
    num_tiles = batch_size * cache.num_kv_heads * num_row_tiles
    num_splits = choose_num_splits(num_tiles, max(kv_lens), head_dim, num_sms, spec.max_splits)
    grid = (batch_size, cache.num_kv_heads * num_row_tiles, num_splits)
    num_rows = batch_size * q_len * num_qo_heads
    kv_lens_tensor = torch.tensor(kv_lens, dtype=torch.int32).to(q.device)
    is_split = num_splits > 1
    partial = torch.empty((num_rows, num_splits, head_dim) if is_split else 0, device=q.device)
    partial_lse = torch.empty((num_rows, num_splits), device=q.device)
    scale_log2 = spec.scale(head_dim) * 1.4426950408889634

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        split_kernel[grid](
            q,
            cache.k[layer],
            cache.v[layer],
            cache.page_table,
            kv_lens_tensor,
            partial if is_split else out,
            partial_lse if is_split or lse is None else lse,
            scale_log2,
            q_len,
            num_row_tiles,
            num_splits,
            MIN_CHUNK,
            *q.stride()[:3],
            cache.page_table.stride(0),
            cache.num_kv_heads * head_dim,
            NUM_QO_HEADS=num_qo_heads,
            GROUP_SIZE=group_size,
            HEAD_DIM=head_dim,
            PAGE_SIZE=cache.page_size,
            BLOCK_M=block_m,
            BLOCK_N=_keys_per_tile(q),
            PRECISION=PRECISION[str(q.dtype).removeprefix("torch.")],
            num_warps=NUM_WARPS,
            num_stages=1 if q.element_size() == 4 else 2,
        )
        if is_split:
            merge_kernel[(num_rows,)](
                partial,
                partial_lse,
                out,
                out if lse is None else lse,
                num_splits,
                HEAD_DIM=head_dim,
                SPLITS=_power_of_two(num_splits),
                BLOCK_S=min(16, _power_of_two(num_splits)),
                HAS_LSE=lse is not None,
            )

    info = {
        "resolved_kernel": "triton split_kernel" + (" + merge_kernel" if is_split else ""),
        "grid": grid,
        "num_programs": num_tiles * num_splits,
        "num_splits": num_splits,
        "kv_passes": num_row_tiles,
        "workspace_bytes": 4 * (partial.numel() + partial_lse.numel()),
    }
    return run, info
