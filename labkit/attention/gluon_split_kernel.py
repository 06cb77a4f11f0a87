"""The split kernel for Hopper in Gluon: tiles of 64 or 128 rows whose softmax runs while the tensor cores do.

In plain Triton a warp-group matrix instruction is waited for before its result's next use, and so are all others: the
tensor cores idle during the softmax. Here the schedule is explicit, that of FlashAttention 3 (Shah et al. 2024,
"intra-warpgroup overlap"): the product with V of one tile is still running while the next tile's logits become weights.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _load_pages(page_row, token, kv_len, PAGE_SIZE: gl.constexpr):
    return gl.load(page_row + gl.minimum(token, (kv_len - 1).to(gl.uint32)) // PAGE_SIZE)


@gluon.jit
def _copy_tile(
    tile,
    token,
    pages,
    k_head,
    v_head,
    k_ring,
    v_ring,
    page_row,
    stop,
    kv_len,
    SLOT_STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    COPY: gl.constexpr,
):
    """Start the copies of K and V of a tile, a commit group each; beyond `stop` they are zeros and read nothing.

    `token` and `pages` are those of the tile; returns those of the next one.
    """
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, COPY))
    slot = (pages * PAGE_SIZE + (token % PAGE_SIZE).to(gl.int32)).to(gl.int64)
    offset = (slot * SLOT_STRIDE)[:, None] + dim[None, :]
    inside, _ = gl.broadcast((token.to(gl.int32) < stop)[:, None], offset)
    async_copy.async_copy_global_to_shared(k_ring.index(tile % STAGES), k_head + offset, inside)
    async_copy.commit_group()
    async_copy.async_copy_global_to_shared(v_ring.index(tile % (STAGES + 1)), v_head + offset, inside)
    async_copy.commit_group()
    token += BLOCK_N
    return token, _load_pages(page_row, token, kv_len, PAGE_SIZE)


@gluon.jit
def _soften(logits, top, total, first_token, last_visible, scale_log2, MASKED: gl.constexpr):
    """The weights of a tile of logits, and how much what was summed before them shrinks."""
    LAYOUT: gl.constexpr = logits.type.layout
    if MASKED:
        token = first_token + gl.arange(0, logits.shape[1], gl.SliceLayout(0, LAYOUT))
        logits = gl.where(token[None, :] <= last_visible[:, None], logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    base = new_top
    if MASKED:
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(logits * scale_log2 - (base * scale_log2)[:, None])
    shrink = gl.exp2((top - base) * scale_log2)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend(
    first,
    last,
    token,
    pages,
    weights,
    acc,
    top,
    total,
    q_tile,
    k_head,
    v_head,
    k_ring,
    v_ring,
    page_row,
    start,
    stop,
    kv_len,
    last_visible,
    scale_log2,
    SLOT_STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    COPY: gl.constexpr,
    LOGITS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Tiles `first` to `last` (exclusive), each with the V of the tile before it."""
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    for tile in range(first, last):
        # K of this tile and V of the last one are here, and every warp is done with the stages to be overwritten.
        async_copy.wait_group(2 * STAGES - 3)
        fence_async_shared()
        logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
        k_tile = k_ring.index(tile % STAGES).permute((1, 0))
        logits = warpgroup_mma(q_tile, k_tile, logits, use_acc=False, is_async=True)
        acc = warpgroup_mma(weights, v_ring.index((tile - 1) % (STAGES + 1)), acc, is_async=True)
        token, pages = _copy_tile(
            tile - 1 + STAGES, token, pages, k_head, v_head, k_ring, v_ring, page_row, stop, kv_len,
            SLOT_STRIDE, PAGE_SIZE, STAGES, COPY,
        )  # fmt: skip
        logits = warpgroup_mma_wait(1, deps=(logits,))
        new, shrink, top, total = _soften(
            logits, top, total, start + tile * BLOCK_N, last_visible, scale_log2, MASKED
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
    return token, pages, weights, acc, top, total


@gluon.jit(do_not_specialize=["q_len", "num_row_tiles", "num_splits", "min_chunk", "stride_table"])
def overlapped_split_kernel(
    q,
    k,
    v,
    page_table,
    kv_lens,
    partial,
    partial_lse,
    scale_log2,
    v_scale,
    q_len,
    num_row_tiles,
    num_splits,
    min_chunk,
    stride_q_request,
    stride_q_row,
    stride_q_head,
    stride_table,
    NUM_QO_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (batch_size, KV heads * num_row_tiles, num_splits), one warp to 16 of the `BLOCK_M` rows.

    As `split_kernel` with the whole group in a tile, causal, K and V in the dtype of `q`; the same `partial` and
    `partial_lse`. K is `STAGES` tiles ahead in shared memory, and V, which is used a tile later, has one stage more.
    """
    if PDL:
        gdc_launch_dependents()
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, HEAD_DIM, 16])
    # A warp copies whole rows, 16 bytes a thread.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [BLOCK_M // 16, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SLOT_STRIDE: gl.constexpr = NUM_QO_HEADS // GROUP_SIZE * HEAD_DIM
    dtype: gl.constexpr = q.dtype.element_ty
    request = gl.program_id(0).to(gl.int64)
    kv_head = gl.program_id(1) // num_row_tiles
    first_row = gl.program_id(1) % num_row_tiles * BLOCK_M
    split = gl.program_id(2)
    kv_len = gl.load(kv_lens + request)
    context_len = kv_len - q_len
    first_token = first_row // GROUP_SIZE
    last_token = gl.minimum((first_row + BLOCK_M - 1) // GROUP_SIZE, q_len - 1)
    chunk = gl.maximum(gl.cdiv(kv_len, num_splits), min_chunk)
    chunk = gl.cdiv(chunk, BLOCK_N) * BLOCK_N
    start = split * chunk
    end = gl.minimum(start + chunk, context_len + last_token + 1)
    # A split without a visible key takes one tile, fully masked.
    num_tiles = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
    num_open = gl.maximum(gl.minimum(context_len + first_token + 1, end) - start, 0) // BLOCK_N

    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], SHARED)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES + 1, BLOCK_N, HEAD_DIM], SHARED)
    k_head = k + kv_head * HEAD_DIM
    v_head = v + kv_head * HEAD_DIM
    page_row = page_table + request * stride_table
    # Unsigned: division by a page size is a shift.
    token = (start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))).to(gl.uint32)
    pages = _load_pages(page_row, token, kv_len, PAGE_SIZE)
    for tile in gl.static_range(STAGES):
        token, pages = _copy_tile(
            tile, token, pages, k_head, v_head, k_ring, v_ring, page_row, end, kv_len,
            SLOT_STRIDE, PAGE_SIZE, STAGES, COPY,
        )  # fmt: skip

    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, COPY))
    q_offset = row // GROUP_SIZE * stride_q_row + (kv_head * GROUP_SIZE + row % GROUP_SIZE) * stride_q_head
    q_base = q + request * stride_q_request
    is_row = row // GROUP_SIZE < q_len
    q_values = gl.load(q_base + q_offset[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], SHARED, q_values)

    # The first tile alone: it may have an edge, and there is no V before it.
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOGITS))
    last_visible = context_len + row // GROUP_SIZE
    async_copy.wait_group(2 * STAGES - 1)
    fence_async_shared()
    logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
    logits = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), logits, use_acc=False)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, LOGITS))
    weights, _, top, total = _soften(logits, top, total, start, last_visible, scale_log2, True)
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, OUT)
    token, pages, weights, acc, top, total = _attend(
        1, num_open, token, pages, weights, acc, top, total, q_tile, k_head, v_head, k_ring, v_ring, page_row, start,
        end, kv_len, last_visible, scale_log2, SLOT_STRIDE, PAGE_SIZE, STAGES, COPY, LOGITS, False,
    )  # fmt: skip
    token, pages, weights, acc, top, total = _attend(
        gl.maximum(num_open, 1), num_tiles, token, pages, weights, acc, top, total, q_tile, k_head, v_head, k_ring,
        v_ring, page_row, start, end, kv_len, last_visible, scale_log2, SLOT_STRIDE, PAGE_SIZE, STAGES, COPY, LOGITS,
        True,
    )  # fmt: skip
    async_copy.wait_group(0)
    fence_async_shared()
    acc = warpgroup_mma(weights, v_ring.index((num_tiles - 1) % (STAGES + 1)), acc)

    has_seen = total > 0.0
    divisor = gl.where(has_seen, total, 1.0)
    log_sum = gl.where(has_seen, (top * scale_log2 + gl.log2(divisor)) * LN2, float("-inf"))
    place = (request * q_len + row // GROUP_SIZE) * NUM_QO_HEADS + kv_head * GROUP_SIZE + row % GROUP_SIZE
    gl.store(partial_lse + place * num_splits + split, log_sum, mask=row // GROUP_SIZE < q_len)
    factor = gl.convert_layout(v_scale / divisor, gl.SliceLayout(1, OUT))
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))
    place = (request * q_len + row // GROUP_SIZE) * NUM_QO_HEADS + kv_head * GROUP_SIZE + row % GROUP_SIZE
    offset = (place * num_splits + split)[:, None] * HEAD_DIM + dim[None, :]
    result = (acc * factor[:, None]).to(partial.dtype.element_ty)
    gl.store(partial + offset, result, mask=(row // GROUP_SIZE < q_len)[:, None])
