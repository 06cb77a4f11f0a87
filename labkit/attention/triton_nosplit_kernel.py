"""Unsplit attention: one program per request, query head and block of query rows walks all keys.

The shape of the kernels that engines reuse from prefill for verify: at batch 1 only `num_qo_heads` programs exist, and
its time grows with the context at the speed of one of them.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from labkit.attention.triton_tile import attend_tile

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def nosplit_kernel(
    q,
    k,
    v,
    page_table,
    kv_lens,
    out,
    lse,
    scale_log2,
    q_len,
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
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (batch_size, num_qo_heads, ceil(q_len / BLOCK_M)). `out` and `lse` are contiguous."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    kv_len = tl.load(kv_lens + request)
    context_len = kv_len - q_len
    q_base = q + request * stride_q_request + head * stride_q_head
    q_tile = tl.load(q_base + row[:, None] * stride_q_row + dim[None, :], mask=row[:, None] < q_len, other=0.0)
    kv_head = head // GROUP_SIZE * HEAD_DIM
    page_row = page_table + request * stride_table

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last_visible = context_len + row
    # Below this token whole tiles are seen by every row.
    open_end = (context_len + first_row + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(kv_len, context_len + first_row + BLOCK_M)
    for token in range(0, open_end, BLOCK_N):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, k + kv_head, v + kv_head, page_row, token, kv_len, last_visible,
            scale_log2, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    for token in range(open_end, end, BLOCK_N):
        acc, top, total = attend_tile(
            acc, top, total, q_tile, k + kv_head, v + kv_head, page_row, token, kv_len, last_visible,
            scale_log2, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_N, True, PRECISION,
        )  # fmt: skip

    place = (request * q_len + row) * NUM_QO_HEADS + head
    is_row = row < q_len
    result = acc / total[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None])
    if HAS_LSE:
        tl.store(lse + place, (top + tl.log2(total)) * LN2, mask=is_row)
