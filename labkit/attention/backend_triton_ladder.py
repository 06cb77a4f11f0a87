"""The verify kernels of engines, and the steps from the slowest to ours: one kernel, tiled as each of them does it.

The ladder changes one factor a rung: ``triton_nosplit`` (every query head walks all keys alone, 64 padded rows, no
pipelining), ``triton_ladder_split`` (+ KV split), ``triton_ladder_packed`` (+ the query heads of a KV head share a
tile), ``triton_ladder_staged`` (+ a software pipeline of two stages), ``triton_split`` (+ tile sizes and split count
chosen by rule). Beside it stand the shapes of engines' kernels:

``triton_per_token``
    Each draft token is a decode of its own, with a KV split.
``triton_decode8``
    The same with at most 8 splits, SGLang's default for its Triton decode.
``triton_segmented_2d``, ``triton_segmented_3d``
    vLLM's Triton attention: ``16 // group`` draft tokens share a tile of 16 rows, unsplit or in 16 segments.
"""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run, shape_of
from labkit.attention.triton_launch import Tiling, TritonCall, num_sms, triton_supports, visible_keys
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

SOURCES = ("triton_launch.py", "triton_split_kernel.py", "triton_tile.py")
EXTEND_ROWS, DECODE_ROWS = 64, 16  # padded rows of a prefill-shaped and of a decode-shaped tile
# packed: the heads of a group share a tile; splits: at most so many, None: as many as fill the SMs twice.
VARIANTS: dict[str, dict[str, Any]] = {
    "triton_nosplit": {"rows": EXTEND_ROWS, "packed": False, "splits": 1, "stages": 1},
    "triton_ladder_split": {"rows": EXTEND_ROWS, "packed": False, "splits": None, "stages": 1},
    "triton_ladder_packed": {"rows": EXTEND_ROWS, "packed": True, "splits": None, "stages": 1},
    "triton_ladder_staged": {"rows": EXTEND_ROWS, "packed": True, "splits": None, "stages": 2},
    "triton_per_token": {"rows": DECODE_ROWS, "packed": True, "splits": None, "stages": 2, "tokens": 1, "keys": 32},
    "triton_decode8": {"rows": DECODE_ROWS, "packed": True, "splits": 8, "stages": 2, "tokens": 1, "keys": 32},
    "triton_segmented_2d": {"rows": DECODE_ROWS, "packed": True, "splits": 1, "stages": 2, "tokens": None, "keys": 32},
    "triton_segmented_3d": {"rows": DECODE_ROWS, "packed": True, "splits": 16, "stages": 2, "tokens": None, "keys": 16},
}
MIN_CHUNK = 64


def supports(shape: AttentionShape, device: str, **tiling: Any) -> str:
    """As `triton_supports`; a decode-shaped tile holds a group of at most 16 query heads."""
    if tiling["rows"] == DECODE_ROWS and shape.group_size > DECODE_ROWS:
        return f"its tile holds at most {DECODE_ROWS} query heads of a KV head"
    return triton_supports(shape, device)


def prepare(
    q: Tensor,
    cache: PagedKVCache,
    spec: AttentionSpec,
    *,
    rows: int,
    packed: bool,
    splits: int | None,
    stages: int,
    tokens: int | None = 0,
    keys: int = 64,
) -> tuple[Run, dict[str, Any]]:
    """A tile of `rows` padded rows by `keys` keys.

    `tokens` draft tokens share a tile: as many as fill it (0), as many whole ones as fit (None), or that many.
    """
    shape = shape_of(q, cache, spec)
    tile_heads = shape.group_size if packed else 1
    tile_rows = rows if tokens == 0 else (rows // tile_heads if tokens is None else tokens) * tile_heads
    num_row_tiles = -(-shape.q_len * tile_heads // tile_rows)
    num_tiles = shape.batch_size * shape.num_qo_heads // tile_heads * num_row_tiles
    num_splits = 2 * num_sms(q.device) // num_tiles if splits is None else splits
    num_splits = max(1, min(num_splits, -(-visible_keys(shape) // MIN_CHUNK), spec.max_splits or num_splits))
    if q.element_size() == 4:
        keys, stages = min(keys, 32), 1  # float32 tiles must fit in shared memory
    num_warps = 8 if rows == EXTEND_ROWS and shape.head_dim > 64 else 4
    tiling = Tiling(tile_heads, tile_rows, rows, keys, num_splits, MIN_CHUNK, num_warps, stages)
    call = TritonCall(q, cache, spec, tiling)
    return call, call.info()
