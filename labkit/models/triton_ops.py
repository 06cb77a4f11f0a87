"""The small operations between attention calls as fused Triton kernels, and a matrix product for few rows.

A matrix product leaves partial sums ``[num_splits, rows, N]`` in float32; the kernel that reads them adds them up.
Where `PDL` (programmatic dependent launch, from Hopper on) a kernel is launched while its predecessor still runs, and
waits when it has done what does not depend on it.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_turn(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before has written what this one reads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def sum_splits(partial, offset, mask, split_stride, NUM_SPLITS: tl.constexpr):
    """Float32 sums of the parts of a matrix product at `offset`."""
    total = tl.load(partial + offset, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(partial + split * split_stride + offset, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x, weight, scale, partial, num_rows, n_size, k_size, k_per_split, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_SCALE: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_N, num_splits): `x` ``[num_rows, K]`` times `weight` ``[N, K]`` transposed, into `partial`.

    The weights are the left operand, so that the few rows are the short side of the matrix instruction. `EVEN`: blocks
    divide N and the part of K of a split. `EARLY`: the first weights are loaded before the wait. `scale` ``[N]``
    belongs to float8 weights.
    """
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = tl.program_id(1) * k_per_split
    end_k = tl.minimum(first_k + k_per_split, k_size)
    row = tl.arange(0, ROWS)
    step = tl.arange(0, BLOCK_K)
    w_base = weight + col.to(tl.int64)[:, None] * k_size
    x_base = x + row[None, :] * k_size
    is_row = row[None, :] < num_rows
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if EARLY:
        w_tile = tl.load(w_base + (first_k + step)[None, :])
    if PDL:
        gdc_wait()
    if EARLY:
        x_tile = tl.load(x_base + (first_k + step)[:, None], mask=is_row, other=0.0)
        acc = tl.dot(w_tile.to(x_tile.dtype), x_tile, acc, input_precision=PRECISION)
        first_k += BLOCK_K
    for k in range(first_k, end_k, BLOCK_K):
        place = k + step
        if EVEN:
            w_tile = tl.load(w_base + place[None, :])
            x_tile = tl.load(x_base + place[:, None], mask=is_row, other=0.0)
        else:
            inside = place < end_k
            w_tile = tl.load(w_base + place[None, :], mask=(col[:, None] < n_size) & inside[None, :], other=0.0)
            x_tile = tl.load(x_base + place[:, None], mask=is_row & inside[:, None], other=0.0)
        acc = tl.dot(w_tile.to(x_tile.dtype), x_tile, acc, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()
    if HAS_SCALE:
        acc *= tl.load(scale + col, mask=col < n_size, other=0.0)[:, None]
    offset = (tl.program_id(1) * num_rows + row[None, :]) * n_size + col[:, None]
    tl.store(partial + offset, acc, mask=(row[None, :] < num_rows) & (col[:, None] < n_size))


@triton.jit
def add_norm_kernel(
    hidden, partial, weight, out, tap, width, split_stride, tap_stride, eps, BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): add the sums of `partial` to `hidden` ``[rows, width]`` (not if NUM_SPLITS is 0), then RMSNorm.

    `TAP`: the sum also goes to `tap`, whose rows lie `tap_stride` apart.
    """
    if PDL:
        gdc_launch_dependents()
    offset = tl.arange(0, BLOCK)
    mask = offset < width
    scale = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0) * width
    value = tl.load(hidden + row + offset, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 0:
        value += sum_splits(partial, row + offset, mask, split_stride, NUM_SPLITS)
        tl.store(hidden + row + offset, value.to(hidden.dtype.element_ty), mask=mask)
    if TAP:
        tl.store(tap + tl.program_id(0) * tap_stride + offset, value.to(tap.dtype.element_ty), mask=mask)
    mean = tl.sum(value * value, 0) / width
    tl.store(out + row + offset, (value * tl.rsqrt(mean + eps) * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_len", "table_stride"])
def rope_append_kernel(
    partial, bias, norm_weight, turns, context_lens, depths, page_table, q_out, k_cache, v_cache, split_stride,
    row_stride, q_len, table_stride, eps, NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of q, k and v): add up, bias, RMSNorm of q and k heads, rotate pairs, store q, append k and v.

    Pairs are (2i, 2i + 1). `turns` is float32 ``[positions, head_dim / 2, 2]``: cosine and sine. The K and V of request
    r go behind its ``context_lens[r]`` cached tokens. `depths` is int32 ``[rows]``, read where `TREE`: positions that
    are not the places behind them.
    """
    take_turn(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    half = tl.arange(0, HEAD_DIM // 2)
    everything = half < HEAD_DIM // 2
    base = row * row_stride + head * HEAD_DIM + 2 * half
    even = sum_splits(partial, base, everything, split_stride, NUM_SPLITS)
    odd = sum_splits(partial, base + 1, everything, split_stride, NUM_SPLITS)
    if HAS_BIAS:
        even += tl.load(bias + head * HEAD_DIM + 2 * half).to(tl.float32)
        odd += tl.load(bias + head * HEAD_DIM + 2 * half + 1).to(tl.float32)
    request = row // q_len
    context_len = tl.load(context_lens + request)
    place_behind = row % q_len
    position = context_len + (tl.load(depths + row) if TREE else place_behind)
    if head < NUM_QO_HEADS + NUM_KV_HEADS:
        if HAS_NORM:
            inverse = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / HEAD_DIM + eps)
            even *= inverse * tl.load(norm_weight + head * HEAD_DIM + 2 * half).to(tl.float32)
            odd *= inverse * tl.load(norm_weight + head * HEAD_DIM + 2 * half + 1).to(tl.float32)
        angle = turns + position * HEAD_DIM + 2 * half
        cosine, sine = tl.load(angle), tl.load(angle + 1)
        even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    if head < NUM_QO_HEADS:
        place = (row.to(tl.int64) * NUM_QO_HEADS + head) * HEAD_DIM + 2 * half
        tl.store(q_out + place, even.to(q_out.dtype.element_ty))
        tl.store(q_out + place + 1, odd.to(q_out.dtype.element_ty))
    else:
        token = context_len + place_behind
        page = tl.load(page_table + request * table_stride + token // PAGE_SIZE).to(tl.int64)
        slot = (page * PAGE_SIZE + token % PAGE_SIZE) * NUM_KV_HEADS
        if head < NUM_QO_HEADS + NUM_KV_HEADS:
            place = (slot + head - NUM_QO_HEADS) * HEAD_DIM + 2 * half
            tl.store(k_cache + place, even.to(k_cache.dtype.element_ty))
            tl.store(k_cache + place + 1, odd.to(k_cache.dtype.element_ty))
        else:
            place = (slot + head - NUM_QO_HEADS - NUM_KV_HEADS) * HEAD_DIM + 2 * half
            tl.store(v_cache + place, even.to(v_cache.dtype.element_ty))
            tl.store(v_cache + place + 1, odd.to(v_cache.dtype.element_ty))


@triton.jit
def silu_mul_kernel(
    partial, out, width, split_stride, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """Grid (rows, width / BLOCK): silu(gate) * up of `partial` ``[num_splits, rows, 2 * width]``, gate first."""
    take_turn(PDL)
    row = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < width
    gate = sum_splits(partial, row * 2 * width + offset, mask, split_stride, NUM_SPLITS)
    up = sum_splits(partial, row * 2 * width + width + offset, mask, split_stride, NUM_SPLITS)
    tl.store(out + row * width + offset, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    value, partial, width, row_stride, gate_offset, split_stride, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, width / BLOCK): `value` ``[rows, width]`` times sigmoid of the gate columns of `partial`."""
    take_turn(PDL)
    row = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < width
    gate = sum_splits(partial, row * row_stride + gate_offset + offset, mask, split_stride, NUM_SPLITS)
    old = tl.load(value + row * width + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(value + row * width + offset, (old * tl.sigmoid(gate)).to(value.dtype.element_ty), mask=mask)
