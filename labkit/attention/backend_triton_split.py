"""labkit's own verify kernel: K and V are read once, by as many programs as the device runs at a time.

The rule for tiles and splits was chosen from measurements on an H200; `max_splits` of the spec caps the splits as an
engine's flag does.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run, shape_of
from labkit.attention.triton_launch import Tiling, TritonCall, num_sms, power_of_two, triton_supports, visible_keys
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

NAME = "triton_split"
SOURCES = ("triton_launch.py", "triton_split_kernel.py", "triton_tile.py", "gluon_split_kernel.py")
MIN_CHUNK = 128  # keys per split: below it the merge costs more than the split gains
MAX_WIDE_SPLITS = 24  # of tiles of 64 rows: their partial results must stay small beside the keys they stand for
LONG_CHUNK = 8192  # keys: above it programs that all run at once end too far apart, and two rounds of them are better
OVERLAP_ABOVE_ROWS = 64  # rows of a tile: below, the softmax is too short to stand in the way
# Of the device where there is none to ask (tests): Hopper.
DEFAULT_SHARED_BYTES = 227 << 10

supports = triton_supports


def choose_tile(num_rows: int, head_dim: int, element_size: int, shared_bytes: int) -> tuple[int, int, int, int]:
    """block_m, block_n, num_warps and num_stages for so many rows (draft token x head of a KV head).

    Up to 16 rows one tensor-core instruction is as high as the rows. More are padded to 64 or 128, which Hopper's
    warp-group instruction needs; heads of 256 leave no room for its wide tiles below that.
    """
    if element_size == 4:
        block_m, block_n, num_warps, num_stages = min(64, max(16, power_of_two(num_rows))), 32, 4, 1
    elif num_rows <= 16:
        block_m, block_n, num_warps, num_stages = 16, 64 if head_dim <= 128 else 32, 4, 3
    elif head_dim <= 128:
        block_m, block_n, num_warps, num_stages = (64, 64, 4, 3) if num_rows <= 64 else (128, 64, 8, 3)
    elif num_rows <= 32:
        block_m, block_n, num_warps, num_stages = 32, 64, 4, 3
    else:
        block_m, block_n, num_warps, num_stages = (64, 32, 4, 4) if num_rows <= 64 else (128, 32, 8, 3)
    # Smaller devices: fewer stages first, then smaller tiles.
    while num_stages > 1 and _shared_bytes(block_m, block_n, num_stages, head_dim, element_size) > shared_bytes:
        num_stages -= 1
    while block_m > 16 and _shared_bytes(block_m, block_n, num_stages, head_dim, element_size) > shared_bytes:
        block_m //= 2
    return block_m, block_n, num_warps, num_stages


def choose_overlapped_tile(num_rows: int, head_dim: int) -> tuple[int, int, int, int]:
    """As `choose_tile`, of the kernel whose softmax runs beside the tensor cores."""
    return (128, 64, 8, 2) if head_dim == 256 else (128, 128, 8, 2)


def _shared_bytes(block_m: int, block_n: int, num_stages: int, head_dim: int, element_size: int) -> int:
    return element_size * head_dim * (block_m + 2 * block_n * num_stages)


def choose_num_splits(num_tiles: int, num_keys: int, num_sms: int, block_m: int, head_dim: int) -> int:
    """Splits so that `num_tiles` (requests x KV heads x row tiles) give the device one or two programs per SM."""
    is_small = block_m == 16 or (block_m <= 64 and head_dim <= 128)
    num_splits = num_sms * (2 if is_small else 1) // num_tiles
    if block_m == 64 and head_dim <= 128:
        num_splits = min(num_splits, MAX_WIDE_SPLITS)
    if num_splits <= 1 and num_keys > LONG_CHUNK:
        num_splits = 2
    return max(1, min(num_splits, -(-num_keys // MIN_CHUNK)))


def can_overlap(shape: AttentionShape, capability: tuple[int, int], has_gluon: bool) -> bool:
    """Whether the kernel of `gluon_split_kernel` is to be used: Hopper, plain causal, 16 bits, more than 64 rows."""
    return (
        has_gluon
        and capability == (9, 0)
        and shape.mask == "causal"
        and shape.window is None
        and shape.kv_dtype == shape.q_dtype
        and shape.q_dtype in ("bfloat16", "float16")
        and shape.head_dim in (64, 128, 256)
        and shape.q_len * shape.group_size > OVERLAP_ABOVE_ROWS
    )


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton's Gluon, whose interface still changes, has what the kernel uses."""
    try:
        importlib.import_module("labkit.attention.gluon_split_kernel")
    except (ImportError, AttributeError):
        return False
    return True


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """All query heads of a KV head times the draft tokens in one tile where they fit, splits to fill the device."""
    shape = shape_of(q, cache, spec)
    num_rows = shape.q_len * shape.group_size
    shared_bytes, capability = DEFAULT_SHARED_BYTES, (0, 0)
    if q.is_cuda:
        properties = torch.cuda.get_device_properties(q.device)
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        capability = (properties.major, properties.minor)
    is_overlapped = can_overlap(shape, capability, q.is_cuda and has_gluon())
    if is_overlapped:
        block_m, block_n, num_warps, num_stages = choose_overlapped_tile(num_rows, shape.head_dim)
    else:
        block_m, block_n, num_warps, num_stages = choose_tile(num_rows, shape.head_dim, q.element_size(), shared_bytes)
    num_tiles = shape.batch_size * shape.num_kv_heads * -(-num_rows // block_m)
    num_splits = choose_num_splits(num_tiles, visible_keys(shape), num_sms(q.device), block_m, shape.head_dim)
    num_splits = min(num_splits, spec.max_splits or num_splits)
    tiling = Tiling(
        shape.group_size, block_m, block_m, block_n, num_splits, MIN_CHUNK, num_warps, num_stages, is_overlapped
    )
    call = TritonCall(q, cache, spec, tiling)
    return call, call.info()
