"""labkit's own verify kernel: K and V are read once, by as many programs as the device runs at a time.

The rules below were chosen from measurements on an H200 (data/runs/attention); `max_splits` of the spec caps the
splits as an engine's flag does.
"""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run, shape_of
from labkit.attention.triton_launch import (
    Tiling,
    TritonCall,
    num_sms,
    power_of_two,
    triton_supports,
    visible_keys,
)
from labkit.kv_cache import PagedKVCache

NAME = "triton_split"
SOURCES = ("triton_launch.py", "triton_split_kernel.py", "triton_tile.py")
MAX_BLOCK_M = 128
MIN_CHUNK = 128  # keys per split: below it the merge costs more than the split gains

supports = triton_supports


def choose_tile(num_rows: int, head_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """block_m, block_n, num_warps, num_stages for so many rows (draft token x head of a KV head)."""
    block_m = min(MAX_BLOCK_M, max(16, power_of_two(num_rows)))
    if element_size == 4:
        return min(block_m, 64), 32, 4, 1  # float32 tiles must fit in shared memory
    if block_m == 128:
        return block_m, 64, 8, 2
    return block_m, 128 if block_m == 16 and head_dim <= 128 else 64, 4, 2


def choose_num_splits(num_tiles: int, num_keys: int, programs: int, max_splits: int | None) -> int:
    """Splits that give `num_tiles` (requests x KV heads x row tiles) `programs` programs in all.

    Fewer when a split would get less than `MIN_CHUNK` keys, or when `max_splits` says so.
    """
    num_splits = min(programs // num_tiles, -(-num_keys // MIN_CHUNK))
    return max(1, num_splits if max_splits is None else min(num_splits, max_splits))


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """All query heads of a KV head times the draft tokens in one tile where they fit, splits to fill the device."""
    shape = shape_of(q, cache, spec)
    num_rows = shape.q_len * shape.group_size
    block_m, block_n, num_warps, num_stages = choose_tile(num_rows, shape.head_dim, q.element_size())
    num_tiles = shape.batch_size * shape.num_kv_heads * -(-num_rows // block_m)
    programs_per_sm = 1 if shape.head_dim > 128 or block_m == 128 else 2
    num_splits = choose_num_splits(num_tiles, visible_keys(shape), programs_per_sm * num_sms(q.device), spec.max_splits)
    tiling = Tiling(shape.group_size, block_m, block_m, block_n, num_splits, MIN_CHUNK, num_warps, num_stages)
    call = TritonCall(q, cache, spec, tiling)
    return call, call.info()
