"""Attention in Triton: tiles of (draft token, query head) rows over splits of the keys, and the merge of the splits.

One kernel stands for the verify kernels of several engines: how many query heads share a tile, how many rows a tile
holds and how many splits there are is up to the launch (`triton_launch`).
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from labkit.attention.triton_tile import attend_edge, fold, key_offsets, load_pages

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


# Lengths and counts change from step to step: one compiled kernel serves them all.
@triton.jit(do_not_specialize=["q_len", "window", "num_row_tiles", "num_splits", "min_chunk", "stride_table"])
def split_kernel(
    q, k, v, page_table, kv_lens, ancestors, partial, partial_lse, scale_log2, v_scale, q_len, window, num_row_tiles,
    num_splits, min_chunk, stride_q_request, stride_q_row, stride_q_head, stride_table, stride_slot,
    NUM_QO_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (batch_size, num_qo_heads / TILE_HEADS * num_row_tiles, num_splits).

    `TILE_HEADS` query heads of one KV head (1, or the whole group) share a tile: its row r is draft token
    ``r // TILE_HEADS``, head ``r % TILE_HEADS``. A tile has `TILE_ROWS` rows, padded to `BLOCK_M`. Writes `partial`
    ``[batch_size, q_len, num_qo_heads, num_splits, head_dim]`` and its natural-log `partial_lse`; a split without a
    visible key writes (0, -inf). With one split these are `out` and `lse` themselves. `ancestors` is int64
    ``[batch_size, q_len]``, read where `TREE`; `window` counts the keys a row sees, itself included, where `WINDOW`.
    """
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) // num_row_tiles * TILE_HEADS
    first_row = tl.program_id(1) % num_row_tiles * TILE_ROWS
    split = tl.program_id(2)
    place_in_tile = tl.arange(0, BLOCK_M)
    row = first_row + place_in_tile
    dim = tl.arange(0, HEAD_DIM)
    kv_len = tl.load(kv_lens + request)
    context_len = kv_len - q_len
    draft_token = row // TILE_HEADS
    head = first_head + row % TILE_HEADS
    is_row = (place_in_tile < TILE_ROWS) & (draft_token < q_len)
    q_offset = draft_token * stride_q_row + head * stride_q_head
    q_base = q + request * stride_q_request
    q_tile = tl.load(q_base + q_offset[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
    page_row = page_table + request * stride_table
    tree = draft_token
    if TREE:
        tree = tl.load(ancestors + request * q_len + draft_token, mask=is_row, other=0)

    first_token = first_row // TILE_HEADS
    last_token = tl.minimum((first_row + TILE_ROWS - 1) // TILE_HEADS, q_len - 1)
    last_visible = context_len + draft_token
    begin = 0
    if WINDOW:
        begin = tl.maximum(context_len + first_token - window + 1, 0) // BLOCK_N * BLOCK_N
    chunk = tl.maximum(tl.cdiv(kv_len - begin, num_splits), min_chunk)
    chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
    start = begin + split * chunk
    end = tl.minimum(start + chunk, context_len + last_token + 1)
    # Below `open_end` (and from `open_start` on) every row sees whole tiles: only the edges pay for a mask. They are a
    # tile or two, too short for a pipeline of their own.
    open_end = context_len if TREE else context_len + first_token + 1
    open_end = tl.maximum(tl.minimum(open_end, end) // BLOCK_N * BLOCK_N, start)
    open_start = start
    if WINDOW:
        open_start = tl.cdiv(tl.maximum(context_len + last_token - window + 1, 0), BLOCK_N) * BLOCK_N
        open_start = tl.minimum(tl.maximum(open_start, start), open_end)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head = k + first_head // GROUP_SIZE * HEAD_DIM
    v_head = v + first_head // GROUP_SIZE * HEAD_DIM
    pages = load_pages(page_row, start, kv_len, PAGE_SIZE, BLOCK_N)
    if WINDOW:
        for token in tl.range(start, open_start, BLOCK_N, num_stages=1):
            offset = key_offsets(pages, page_row, token, kv_len, stride_slot, PAGE_SIZE, BLOCK_N)
            pages = load_pages(page_row, token + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
            acc, top, total = attend_edge(
                acc, top, total, q_tile, k_head, v_head, offset, token, kv_len, context_len, last_visible, tree,
                window, scale_log2, HEAD_DIM, BLOCK_N, TREE, WINDOW, PRECISION,
            )  # fmt: skip
    for token in tl.range(open_start, open_end, BLOCK_N):
        offset = key_offsets(pages, page_row, token, kv_len, stride_slot, PAGE_SIZE, BLOCK_N)
        pages = load_pages(page_row, token + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
        k_tile = tl.load(k_head + offset[None, :] + dim[:, None])
        v_tile = tl.load(v_head + offset[:, None] + dim[None, :])
        logits = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)
        acc, top, total = fold(acc, top, total, logits, v_tile, scale_log2, False, q_tile.dtype, PRECISION)
    for token in tl.range(open_end, end, BLOCK_N, num_stages=1):
        offset = key_offsets(pages, page_row, token, kv_len, stride_slot, PAGE_SIZE, BLOCK_N)
        pages = load_pages(page_row, token + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
        acc, top, total = attend_edge(
            acc, top, total, q_tile, k_head, v_head, offset, token, kv_len, context_len, last_visible, tree,
            window, scale_log2, HEAD_DIM, BLOCK_N, TREE, WINDOW, PRECISION,
        )  # fmt: skip

    has_seen = total > 0.0
    divisor = tl.where(has_seen, total, 1.0)
    result = acc * (v_scale / divisor)[:, None]
    log_sum = tl.where(has_seen, (top * scale_log2 + tl.log2(divisor)) * LN2, float("-inf"))
    place = ((request * q_len + draft_token) * NUM_QO_HEADS + head) * num_splits + split
    tl.store(
        partial + place[:, None] * HEAD_DIM + dim[None, :], result.to(partial.dtype.element_ty), mask=is_row[:, None]
    )
    tl.store(partial_lse + place, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial, partial_lse, out, lse, num_splits, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (batch_size * q_len * num_qo_heads,): weigh the partial results of one row by their lse.

    `SPLITS` is the next power of two of `num_splits`; the splits are read `BLOCK_S` at a time. A row without a visible
    key gives 0 and an lse of -inf.
    """
    place = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, SPLITS)
    if PDL:
        gdc_wait()  # launched while the splits still run
    log_sums = tl.load(partial_lse + place * num_splits + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(log_sums, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((log_sums - base) * LOG2E), 0)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        some = first + tl.arange(0, BLOCK_S)
        inside = some < num_splits
        log_sum = tl.load(partial_lse + place * num_splits + some, mask=inside, other=float("-inf"))
        weight = tl.exp2((log_sum - base) * LOG2E)
        offset = (place * num_splits + some)[:, None] * HEAD_DIM + dim[None, :]
        acc += tl.sum(weight[:, None] * tl.load(partial + offset, mask=inside[:, None], other=0.0), 0)
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(out + place * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty))
    if HAS_LSE:
        tl.store(lse + place, tl.where(top == float("-inf"), top, base + tl.log2(total) * LN2))
