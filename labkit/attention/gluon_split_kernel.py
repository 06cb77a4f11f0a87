"""The split kernel for Hopper in Gluon: a warp group copies K and V, one per 64 rows computes.

In plain Triton a warp-group matrix instruction is waited for as soon as another follows it, so the tensor cores idle
during the softmax. Here the schedule is explicit and that of FlashAttention 3 (Shah et al. 2024): the product with V of
one tile still runs while the logits of the next become weights, and warp groups that wait for nothing but their tiles
drift apart, so that the softmax of one lies beside the products of the other.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

LN2 = gl.constexpr(0.6931471805599453)
COPY_WARPS = gl.constexpr(4)
# Renamed after Triton 3.6.
_sync_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _make_ring(
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, dtype: gl.constexpr, READERS: gl.constexpr
):
    """Tiles of keys ``[STAGES, BLOCK_N, HEAD_DIM]``, and for each stage a barrier for full and one for empty."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * COPY_WARPS)
        mbarrier.init(empty.index(stage), count=READERS)
    return tiles, full, empty


@gluon.jit
def _fill(ring, tile, head, page_row, start, last, SLOT_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Start the copy of a tile, 16 bytes a thread, into its stage of the ring once that is empty.

    Keys behind the `last` one are copies of it: masked, they have a weight of 0, which a NaN would survive.
    """
    tiles, full, empty = ring
    STAGES: gl.constexpr = tiles.shape[0]
    BLOCK_N: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [COPY_WARPS, 1], [1, 0])
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, COPY))
    step = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    # Unsigned: dividing by a page size is a shift.
    token = gl.minimum((start + tile * BLOCK_N + step).to(gl.uint32), last)
    page = gl.load(page_row + token // PAGE_SIZE)
    slot = page * PAGE_SIZE + (token % PAGE_SIZE).to(gl.int32)
    mbarrier.wait(empty.index(tile % STAGES), (tile // STAGES & 1) ^ 1)
    offset = (slot.to(gl.int64) * SLOT_STRIDE)[:, None] + dim[None, :]
    async_copy.async_copy_global_to_shared(tiles.index(tile % STAGES), head + offset)
    async_copy.mbarrier_arrive(full.index(tile % STAGES), increment_count=False)


@gluon.jit
def _wait_full(ring, tile):
    STAGES: gl.constexpr = ring[0].shape[0]
    mbarrier.wait(ring[1].index(tile % STAGES), tile // STAGES & 1)
    return ring[0].index(tile % STAGES)


@gluon.jit
def _release(ring, tile):
    """All four warps are done with the tile; one thread says so."""
    _sync_warps()
    mbarrier.arrive(ring[2].index(tile % ring[0].shape[0]))


@gluon.jit
def _copy(copied, SLOT_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """All tiles, in the order of their use: K a tile before V."""
    k_ring, v_ring, k_head, v_head, page_row, start, num_tiles, kv_len = copied
    last = (kv_len - 1).to(gl.uint32)
    _fill(k_ring, 0, k_head, page_row, start, last, SLOT_STRIDE, PAGE_SIZE)
    for tile in range(1, num_tiles):
        _fill(k_ring, tile, k_head, page_row, start, last, SLOT_STRIDE, PAGE_SIZE)
        _fill(v_ring, tile - 1, v_head, page_row, start, last, SLOT_STRIDE, PAGE_SIZE)
    _fill(v_ring, num_tiles - 1, v_head, page_row, start, last, SLOT_STRIDE, PAGE_SIZE)


@gluon.jit
def _soften(logits, top, total, first_token, last_visible, scale_log2, MASKED: gl.constexpr):
    """The weights of a tile of logits, and the factor by which all before them shrinks."""
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
    first, last, weights, acc, top, total, q_tile, k_ring, v_ring, start, last_visible, scale_log2,
    LOGITS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles `first` to `last` (exclusive): the logits of each, and beside its softmax the values of the one before."""
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = k_ring[0].shape[1]
    for tile in range(first, last):
        logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
        k_tile = _wait_full(k_ring, tile)
        v_tile = _wait_full(v_ring, tile - 1)
        fence_async_shared()  # copies are seen by the threads, not yet by the tensor cores
        logits = warpgroup_mma(q_tile, k_tile.permute((1, 0)), logits, use_acc=False, is_async=True)
        acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
        logits = warpgroup_mma_wait(1, deps=(logits,))
        _release(k_ring, tile)
        new, shrink, top, total = _soften(
            logits, top, total, start + tile * BLOCK_N, last_visible, scale_log2, MASKED
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release(v_ring, tile - 1)
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
    return weights, acc, top, total


@gluon.jit
def _compute(q_tile, first_row, computed, NUM_QO_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """64 rows, by one warp group, and their part of the result."""
    (
        k_ring, v_ring, partial, partial_lse, scale_log2, v_scale, request, kv_head, split, start, num_tiles, num_open,
        context_len, q_len, num_splits,
    ) = computed  # fmt: skip
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = k_ring[0].shape[1]
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOGITS))
    last_visible = context_len + row // GROUP_SIZE
    # The first tile alone: it may have an edge, and there are no values before it.
    logits = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
    k_tile = _wait_full(k_ring, 0)
    fence_async_shared()
    logits = warpgroup_mma(q_tile, k_tile.permute((1, 0)), logits, use_acc=False)
    _release(k_ring, 0)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, LOGITS))
    weights, _, top, total = _soften(logits, top, total, start, last_visible, scale_log2, True)
    weights = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, OUT, 2))
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, OUT)
    weights, acc, top, total = _attend(
        1, num_open, weights, acc, top, total, q_tile, k_ring, v_ring, start, last_visible, scale_log2, LOGITS, False
    )
    weights, acc, top, total = _attend(
        gl.maximum(num_open, 1), num_tiles, weights, acc, top, total, q_tile, k_ring, v_ring, start, last_visible,
        scale_log2, LOGITS, True,
    )  # fmt: skip
    v_tile = _wait_full(v_ring, num_tiles - 1)
    fence_async_shared()
    acc = warpgroup_mma(weights, v_tile, acc)

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


@gluon.jit
def _load_rows(q, first_row, q_len, stride_q_row, stride_q_head, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """64 rows of q of a KV head, in shared memory; 0 beyond the last."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LOAD))
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    offset = row // GROUP_SIZE * stride_q_row + row % GROUP_SIZE * stride_q_head
    is_row = row // GROUP_SIZE < q_len
    values = gl.load(q + offset[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
    return gl.allocate_shared_memory(q.dtype.element_ty, [64, HEAD_DIM], SHARED, values)


@gluon.jit(do_not_specialize=["q_len", "num_row_tiles", "num_splits", "min_chunk", "stride_table"])
def overlapped_split_kernel(
    q, k, v, page_table, kv_lens, partial, partial_lse, scale_log2, v_scale, q_len, num_row_tiles, num_splits,
    min_chunk, stride_q_request, stride_q_row, stride_q_head, stride_table, NUM_QO_HEADS: gl.constexpr,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (batch_size, KV heads * num_row_tiles, num_splits), launched with 4 warps: the others are beside them.

    As `split_kernel` with the whole group in a tile of 64 or 128 rows, causal, K and V in the dtype of `q`; the same
    `partial` and `partial_lse`. `STAGES` tiles of K and V together are in shared memory.
    """
    if PDL:
        gdc_launch_dependents()
    SLOT_STRIDE: gl.constexpr = NUM_QO_HEADS // GROUP_SIZE * HEAD_DIM
    # Of a thread. Two warp groups and the copying one share 504, in eights; fewer than these would spill.
    COPY_REGISTERS: gl.constexpr = 56 if HEAD_DIM == 256 else 72
    COMPUTE_REGISTERS: gl.constexpr = (504 - COPY_REGISTERS) // 2 // 8 * 8
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
    # A split without a visible key takes one tile, fully masked. All rows see whole the first `num_open` tiles.
    num_tiles = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
    num_open = gl.maximum(gl.minimum(context_len + first_token + 1, end) - start, 0) // BLOCK_N

    k_ring = _make_ring(STAGES // 2, BLOCK_N, HEAD_DIM, dtype, BLOCK_M // 64)
    v_ring = _make_ring(STAGES - STAGES // 2, BLOCK_N, HEAD_DIM, dtype, BLOCK_M // 64)
    q_head = q + request * stride_q_request + kv_head * GROUP_SIZE * stride_q_head
    q_low = _load_rows(q_head, first_row, q_len, stride_q_row, stride_q_head, GROUP_SIZE, HEAD_DIM)
    page_row = page_table + request * stride_table
    copied = (k_ring, v_ring, k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM, page_row, start, num_tiles, kv_len)
    computed = (
        k_ring, v_ring, partial, partial_lse, scale_log2, v_scale, request, kv_head, split, start, num_tiles, num_open,
        context_len, q_len, num_splits,
    )  # fmt: skip
    if BLOCK_M == 64:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (q_low, first_row, computed, NUM_QO_HEADS, GROUP_SIZE)),
                (_copy, (copied, SLOT_STRIDE, PAGE_SIZE)),
            ],
            [COPY_WARPS],
            [COPY_REGISTERS],
        )
    else:
        q_high = _load_rows(q_head, first_row + 64, q_len, stride_q_row, stride_q_head, GROUP_SIZE, HEAD_DIM)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (q_low, first_row, computed, NUM_QO_HEADS, GROUP_SIZE)),
                (_compute, (q_high, first_row + 64, computed, NUM_QO_HEADS, GROUP_SIZE)),
                (_copy, (copied, SLOT_STRIDE, PAGE_SIZE)),
            ],
            [4, COPY_WARPS],
            [COMPUTE_REGISTERS, COPY_REGISTERS],
        )
