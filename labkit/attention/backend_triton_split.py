"""labkit's own verify kernel: K and V are read once, by as many programs as the device runs at a time.

The rule for tiles and splits was chosen from measurements on an H200; `max_splits` of the spec caps the splits as an
engine's flag does. On Hopper the kernel of `gluon_split_kernel` runs where softmax beside the tensor cores pays;
`resolved_kernel` tells which ran.
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
BARRIER_BYTES = 1 << 10  # what the overlapped kernel needs beside its tiles, at most
# Of the device where there is none to ask (tests): Hopper.
DEFAULT_SHARED_BYTES = 227 << 10


def supports(shape: AttentionShape, device: str) -> str:
    """As `triton_supports`."""
    return triton_supports(shape, device)


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


def choose_overlapped_tile(num_rows: int, head_dim: int, keys_per_split: int) -> tuple[int, int, int, int] | None:
    """As `choose_tile`, of the kernel whose softmax runs beside the tensor cores; None: the plain one is as fast.

    Above 64 rows the softmax is long enough to stand in the way. Heads of 256 gain at half of that, where a split is so
    long that its start, a copy that nothing runs beside, does not count. Only then do wider tiles of keys pay either.
    """
    is_long = keys_per_split > LONG_CHUNK
    if num_rows > 64:
        block_m, block_n = 128, 128 if is_long and head_dim == 128 else 64
    elif is_long and head_dim == 256 and num_rows > 16:
        block_m, block_n = 64, 64
    else:
        return None
    room = DEFAULT_SHARED_BYTES - BARRIER_BYTES - _shared_bytes(block_m, 0, 0, head_dim, 2)
    return block_m, block_n, 4 + block_m // 16, room // (2 * block_n * head_dim)


def _shared_bytes(block_m: int, block_n: int, num_stages: int, head_dim: int, element_size: int) -> int:
    return element_size * head_dim * (block_m + 2 * block_n * num_stages)


def choose_num_splits(
    num_tiles: int, num_keys: int, num_sms: int, block_m: int, head_dim: int, is_overlapped: bool = False
) -> int:
    """Splits so that `num_tiles` (requests x KV heads x row tiles) give the device one or two programs per SM."""
    is_small = not is_overlapped and (block_m == 16 or (block_m <= 64 and head_dim <= 128))
    num_splits = num_sms * (2 if is_small else 1) // num_tiles
    if block_m == 64 and head_dim <= 128:
        num_splits = min(num_splits, MAX_WIDE_SPLITS)
    if num_splits <= 1 and num_keys > LONG_CHUNK and not is_overlapped:
        num_splits = 2
    return max(1, min(num_splits, -(-num_keys // MIN_CHUNK)))


def can_overlap(shape: AttentionShape, capability: tuple[int, int], has_gluon: bool) -> bool:
    """Whether the kernel of `gluon_split_kernel` does the shape: Hopper, plain causal, 16 bits, head_dim 128 or 256."""
    return (
        has_gluon
        and capability == (9, 0)
        and shape.mask == "causal"
        and shape.window is None
        and shape.kv_dtype == shape.q_dtype
        and shape.q_dtype in ("bfloat16", "float16")
        and shape.head_dim in (128, 256)
    )


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton's Gluon, whose interface still changes, has what the kernel uses."""
    try:
        importlib.import_module("labkit.attention.gluon_split_kernel")
    except (ImportError, AttributeError):
        return False
    return True


def choose_tiling(
    shape: AttentionShape,
    element_size: int,
    num_sms: int,
    shared_bytes: int,
    overlaps: bool,
    max_splits: int | None = None,
) -> Tiling:
    """The kernel, its tile and the splits of a call; `overlaps`: the overlapped kernel may be used."""
    num_rows, num_keys = shape.q_len * shape.group_size, visible_keys(shape)

    def num_splits_of(block_m: int, is_overlapped: bool) -> int:
        num_tiles = shape.batch_size * shape.num_kv_heads * -(-num_rows // block_m)
        num_splits = choose_num_splits(num_tiles, num_keys, num_sms, block_m, shape.head_dim, is_overlapped)
        return min(num_splits, max_splits or num_splits)

    tile = None
    if overlaps:
        num_splits = num_splits_of(64 if num_rows <= 64 else 128, True)
        tile = choose_overlapped_tile(num_rows, shape.head_dim, -(-num_keys // num_splits))
    if tile is None:
        overlaps, tile = False, choose_tile(num_rows, shape.head_dim, element_size, shared_bytes)
        num_splits = num_splits_of(tile[0], False)
    block_m, block_n, num_warps, num_stages = tile
    group_size = shape.group_size
    return Tiling(group_size, block_m, block_m, block_n, num_splits, MIN_CHUNK, num_warps, num_stages, overlaps)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """All query heads of a KV head times the draft tokens in one tile where they fit, splits to fill the device."""
    shape = shape_of(q, cache, spec)
    shared_bytes, overlaps = DEFAULT_SHARED_BYTES, False
    if q.is_cuda:
        properties = torch.cuda.get_device_properties(q.device)
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        overlaps = can_overlap(shape, torch.cuda.get_device_capability(q.device), has_gluon())
    tiling = choose_tiling(shape, q.element_size(), num_sms(q.device), shared_bytes, overlaps, spec.max_splits)
    call = TritonCall(q, cache, spec, tiling)
    return call, call.info()
