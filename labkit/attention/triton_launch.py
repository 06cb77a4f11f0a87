"""How the Triton kernel is launched: the tiling of a backend, the number of splits, and the prepared call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

PRECISION = {"float32": "ieee", "bfloat16": "tf32", "float16": "tf32"}  # only matters for float32 inputs
INTERPRETER_NUM_SMS = 16
# One warp a row: a merge has many short rows, and warps that wait for each other only add to it.
MERGE_BLOCK_S, MERGE_NUM_WARPS = 8, 1
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """What one program does, and how many programs share a request.

    tile_heads : Query heads of a KV head in one tile: 1, or the group size.
    tile_rows, block_m : Rows (draft token x head) of a tile, and their padded number.
    block_n : Keys per tile.
    num_splits : Parts of the keys of a request.
    min_chunk : Keys a split gets at least; splits beyond the last key find nothing to do.
    is_overlapped : Run `gluon_split_kernel`, which takes whole groups in tiles of 64 or 128 rows; its stages are the
        tiles of K and of V together.
    """

    tile_heads: int
    tile_rows: int
    block_m: int
    block_n: int
    num_splits: int
    min_chunk: int
    num_warps: int
    num_stages: int
    is_overlapped: bool = False


def triton_supports(shape: AttentionShape, device: str) -> str:
    """CUDA, or the interpreter on the CPU; powers of two from 16 to 256 as head_dim; K/V like q or float8_e4m3fn."""
    try:
        from triton.knobs import runtime
    except ImportError as error:
        return f"needs triton ({error})"
    if device != "cuda" and not runtime.interpret:
        return "needs a CUDA device (or TRITON_INTERPRET=1 set before Python starts, for tests)"
    if device != "cuda" and "bfloat16" in (shape.q_dtype, shape.kv_dtype):
        return "the interpreter multiplies the bit patterns of bfloat16: use float32 or float16 there"
    if shape.q_dtype not in PRECISION or shape.kv_dtype not in (shape.q_dtype, "float8_e4m3fn"):
        return f"needs q in one of {', '.join(PRECISION)}, and K/V like q or float8_e4m3fn"
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return "needs a head_dim of 16, 32, 64, 128 or 256"
    if shape.mask == "none" or (shape.mask == "tree" and shape.window is not None):
        return "has no tree mask within a sliding window, and a mask always"
    return ""


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def num_sms(device: torch.device) -> int:
    """SMs of a CUDA device; a small made-up number under the interpreter."""
    if device.type != "cuda":
        return INTERPRETER_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def visible_keys(shape: AttentionShape) -> int:
    """Keys that the rows of the longest request see together."""
    longest = max(shape.kv_lens)
    return longest if shape.window is None else min(longest, shape.window + shape.q_len - 1)


class TritonCall:
    """A launch of grid (batch_size, num_qo_heads / tile_heads x row tiles, splits), and a merge after several splits.

    Captured in a CUDA graph it can be replayed for other lengths of the same cache: `replan` writes them where the
    kernel reads them, and the number of splits stays.
    """

    def __init__(self, q: Tensor, cache: PagedKVCache, spec: AttentionSpec, tiling: Tiling):
        self.batch_size, self.q_len, self.num_qo_heads, self.head_dim = q.shape
        self.cache, self.tiling = cache, tiling
        self.num_row_tiles = -(-self.q_len * tiling.tile_heads // tiling.tile_rows)
        self.grid = (self.batch_size, self.num_qo_heads // tiling.tile_heads * self.num_row_tiles, tiling.num_splits)
        self.num_rows = self.batch_size * self.q_len * self.num_qo_heads
        self.kv_lens = torch.empty(self.batch_size, dtype=torch.int32, device=q.device)
        self.replan()
        is_split = tiling.num_splits > 1
        size = (self.num_rows, tiling.num_splits)
        self.partial = torch.empty((*size, self.head_dim) if is_split else 0, device=q.device)
        self.partial_lse = torch.empty(size, device=q.device)
        self.scale_log2 = spec.scale(self.head_dim) * cache.k_scale * LOG2E
        self.window = spec.window or 0
        self.ancestors = self.kv_lens if spec.tree is None else spec.tree
        self.is_tree = spec.tree is not None
        self.pdl = is_split and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)

    def replan(self) -> None:
        """Take over the cache's lengths."""
        self.kv_lens.copy_(torch.tensor([n + self.q_len for n in self.cache.context_lens], dtype=torch.int32))

    def info(self) -> dict[str, Any]:
        """What is launched; K and V pass through the SMs once per row tile and per group of heads without a tile."""
        tiling, cache = self.tiling, self.cache
        split = "split" if tiling.num_splits > 1 else "unsplit"
        heads = "group packed" if tiling.tile_heads > 1 else "one head"
        language = "gluon, softmax overlapped," if tiling.is_overlapped else "triton"
        kernel = f"{language} {split}, {heads}, {tiling.tile_rows} rows x {tiling.block_n} keys"
        return {
            "resolved_kernel": f"{kernel}, {tiling.num_warps} warps, {tiling.num_stages} stages",
            "grid": self.grid,
            "num_programs": self.grid[0] * self.grid[1] * self.grid[2],
            "num_splits": tiling.num_splits,
            "kv_passes": self.num_row_tiles * self.num_qo_heads // cache.num_kv_heads // tiling.tile_heads,
            "workspace_bytes": 4 * (self.partial.numel() + self.partial_lse.numel()),
        }

    def __call__(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        is_split = self.tiling.num_splits > 1
        partial = self.partial if is_split else out
        partial_lse = self.partial_lse if is_split or lse is None else lse
        launch = self._launch_overlapped if self.tiling.is_overlapped else self._launch_plain
        launch(q, layer, partial, partial_lse)
        if is_split:
            self._merge(out, lse)

    def _launch_plain(self, q: Tensor, layer: int, partial: Tensor, partial_lse: Tensor) -> None:
        from labkit.attention.triton_split_kernel import split_kernel

        tiling, cache = self.tiling, self.cache
        split_kernel[self.grid](
            q, cache.k[layer], cache.v[layer], cache.page_table, self.kv_lens, self.ancestors, partial, partial_lse,
            self.scale_log2, cache.v_scale, self.q_len, self.window, self.num_row_tiles, tiling.num_splits,
            tiling.min_chunk, *q.stride()[:3], cache.page_table.stride(0), cache.num_kv_heads * self.head_dim,
            NUM_QO_HEADS=self.num_qo_heads, GROUP_SIZE=self.num_qo_heads // cache.num_kv_heads,
            TILE_HEADS=tiling.tile_heads, TILE_ROWS=tiling.tile_rows, HEAD_DIM=self.head_dim, PAGE_SIZE=cache.page_size,
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, TREE=self.is_tree, WINDOW=self.window > 0,
            PRECISION=PRECISION[str(q.dtype).removeprefix("torch.")], PDL=self.pdl, num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )  # fmt: skip

    def _launch_overlapped(self, q: Tensor, layer: int, partial: Tensor, partial_lse: Tensor) -> None:
        from labkit.attention.gluon_split_kernel import overlapped_split_kernel

        tiling, cache = self.tiling, self.cache
        overlapped_split_kernel[self.grid](
            q, cache.k[layer], cache.v[layer], cache.page_table, self.kv_lens, partial, partial_lse, self.scale_log2,
            cache.v_scale, self.q_len, self.num_row_tiles, tiling.num_splits, tiling.min_chunk, *q.stride()[:3],
            cache.page_table.stride(0), NUM_QO_HEADS=self.num_qo_heads,
            GROUP_SIZE=self.num_qo_heads // cache.num_kv_heads, HEAD_DIM=self.head_dim, PAGE_SIZE=cache.page_size,
            BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, STAGES=tiling.num_stages, PDL=self.pdl, num_warps=4,
        )  # fmt: skip

    def _merge(self, out: Tensor, lse: Tensor | None) -> None:
        from labkit.attention.triton_split_kernel import merge_kernel

        splits = power_of_two(self.tiling.num_splits)
        merge_kernel[(self.num_rows,)](
            self.partial, self.partial_lse, out, self.partial_lse if lse is None else lse, self.tiling.num_splits,
            HEAD_DIM=self.head_dim, SPLITS=splits, BLOCK_S=min(MERGE_BLOCK_S, splits), HAS_LSE=lse is not None,
            PDL=self.pdl, num_warps=MERGE_NUM_WARPS, **({"launch_pdl": True} if self.pdl else {}),
        )  # fmt: skip
