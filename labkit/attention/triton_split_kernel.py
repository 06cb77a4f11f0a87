"""Split attention: the query heads of one KV head times the draft tokens form the rows of one tile, the keys are cut
into splits so that the programs fill the device, and a second kernel merges the partial results by their lse.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from labkit.attention.triton_tile import attend_tile

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_kernel(
    q,
    k,
    v,
    page_table,
    kv_lens,
    partial,
    partial_lse,
    scale_log2,
    q_len,
    num_row_tiles,
    num_splits,
    min_chunk,
    stride_q_request,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_slot,
    NUM_QO_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (batch_size, num_kv_heads * num_row_tiles, num_splits).

    Row r of a KV head is draft token ``r // GROUP_SIZE``, query head ``r % GROUP_SIZE`` of the group. Writes `partial`
    ``[batch_size, q_len, num_qo_heads, num_splits, head_dim]`` and its natural-log `partial_lse`; a split without a
    visible key writes (0, -inf). With one split these are `out` and `lse` themselves.
    """
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // num_row_tiles
    first_row = tl.program_id(1) % num_row_tiles * BLOCK_M
    split = tl.program_id(2)
    row = first_row + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    kv_len = tl.load(kv_lens + request)
    context_len = kv_len - q_len
    draft_token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = draft_token < q_len
    q_offset = draft_token * stride_q_row + head * stride_q_head
    q_base = q + request * stride_q_request
    q_tile = tl.load(q_base + q_offset[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
    page_row = page_table + request * stride_table

    chunk = tl.maximum(tl.cdiv(kv_len, num_splits), min_chunk)
    chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
    last_visible = context_len + draft_token
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP_SIZE, q_len - 1)
    start = split * chunk
    end = tl.minimum(start + chunk, context_len + last_token + 1)
    # Below this token whole tiles are seen by every row, so only the last tiles pay for the causal test.
    open_end = tl.minimum((context_len + first_row // GROUP_SIZE + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N)
    open_end = tl.maximum(open_end, start)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head = k + kv_head * HEAD_DIM
    v_head = v + kv_head * HEAD_DIM
    for token in range(start, open_end, BLOCK_N):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, k_head, v_head, page_row, token, kv_len, last_visible,
            scale_log2, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    for token in range(open_end, end, BLOCK_N):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, k_head, v_head, page_row, token, kv_len, last_visible,
            scale_log2, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_N, True, PRECISION,
        )  # fmt: skip

    has_seen = total > 0.0
    divisor = tl.where(has_seen, total, 1.0)
    result = acc / divisor[:, None]
    log_sum = tl.where(has_seen, (top + tl.log2(divisor)) * LN2, float("-inf"))
    place = ((request * q_len + draft_token) * NUM_QO_HEADS + head) * num_splits + split
    tl.store(
        partial + place[:, None] * HEAD_DIM + dim[None, :], result.to(partial.dtype.element_ty), mask=is_row[:, None]
    )
    tl.store(partial_lse + place, log_sum, mask=is_row)


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    lse,
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Grid (batch_size * q_len * num_qo_heads,): weigh the partial results of one row by their lse.

    `SPLITS` is the next power of two of `num_splits`; the splits are read `BLOCK_S` at a time.
    """
    place = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, SPLITS)
    log_sums = tl.load(partial_lse + place * num_splits + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(log_sums, 0)
    total = tl.sum(tl.exp2((log_sums - top) * LOG2E), 0)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        some = first + tl.arange(0, BLOCK_S)
        inside = some < num_splits
        log_sum = tl.load(partial_lse + place * num_splits + some, mask=inside, other=float("-inf"))
        weight = tl.exp2((log_sum - top) * LOG2E)
        offset = (place * num_splits + some)[:, None] * HEAD_DIM + dim[None, :]
        acc += tl.sum(weight[:, None] * tl.load(partial + offset, mask=inside[:, None], other=0.0), 0)
    tl.store(out + place * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty))
    if HAS_LSE:
        tl.store(lse + place, top + tl.log2(total) * LN2)
