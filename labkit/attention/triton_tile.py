"""One tile of keys for one tile of query rows: the inner step of the Triton kernel."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _page(page_row, index, last):
    return tl.load(page_row + tl.minimum(index, last))


@triton.jit
def _two_pages(page_row, index, last):
    return (_page(page_row, index, last), _page(page_row, index + 1, last))


@triton.jit
def load_pages(page_row, first_token, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of a tile as scalars, for 1, 2, 4 or 8 pages a tile; None for smaller pages, looked up key by key.

    Scalars are selected in whatever layout the keys have, and carried from tile to tile they are prefetched: a vector
    of pages would be exchanged through shared memory, and its load would put K and V a pipeline stage behind.
    """
    last = (kv_len - 1) // PAGE_SIZE
    index = first_token // PAGE_SIZE
    if BLOCK_N > 8 * PAGE_SIZE:
        return (first_token,)
    elif BLOCK_N <= PAGE_SIZE:
        return (_page(page_row, index, last),)
    elif BLOCK_N == 2 * PAGE_SIZE:
        return _two_pages(page_row, index, last)
    elif BLOCK_N == 4 * PAGE_SIZE:
        return _two_pages(page_row, index, last) + _two_pages(page_row, index + 2, last)
    else:
        left = _two_pages(page_row, index, last) + _two_pages(page_row, index + 2, last)
        return left + _two_pages(page_row, index + 4, last) + _two_pages(page_row, index + 6, last)


@triton.jit
def key_offsets(pages, page_row, first_token, kv_len, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 ``[BLOCK_N]``: where the keys of a tile lie. A long cache has more than 2**31 elements."""
    step = tl.arange(0, BLOCK_N)
    if BLOCK_N > 8 * PAGE_SIZE:
        token = tl.minimum(first_token + step, kv_len - 1)
        page = tl.load(page_row + token // PAGE_SIZE).to(tl.int64)
        offset = (page * PAGE_SIZE + token % PAGE_SIZE) * stride_slot
    else:
        page_stride = stride_slot.to(tl.int64) * PAGE_SIZE
        offset = tl.zeros([BLOCK_N], tl.int64) + pages[0] * page_stride
        for index in tl.static_range(1, BLOCK_N // PAGE_SIZE):
            offset = tl.where(step >= index * PAGE_SIZE, pages[index] * page_stride, offset)
        if BLOCK_N <= PAGE_SIZE:
            offset += (first_token % PAGE_SIZE + step) * stride_slot
        else:
            offset += step % PAGE_SIZE * stride_slot
    return offset


@triton.jit
def fold(
    acc, top, total, logits, v_tile, scale_log2, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """One tile of logits and values into the running softmax; `top` is the maximum of the raw logits."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = new_top
    if MASKED:
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits * scale_log2 - (base * scale_log2)[:, None])
    shrink = tl.exp2((top - base) * scale_log2)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DTYPE), v_tile.to(DTYPE), acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def attend_edge(
    acc, top, total, q_tile, k, v, offset, first_token, kv_len, context_len, last_visible, ancestors, window,
    scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold a tile of which some rows may not see every key.

    `k` and `v` point at the KV head, `offset` at the keys from there, `last_visible` holds the last key that each row
    may see.
    """
    dim = tl.arange(0, HEAD_DIM)
    token = first_token + tl.arange(0, BLOCK_N)
    inside = token < kv_len
    k_tile = tl.load(k + offset[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
    v_tile = tl.load(v + offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    logits = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)
    if TREE:
        # Bit j of a row's ancestors: it sees the j-th new token. Everything before the new tokens is visible.
        new = tl.minimum(tl.maximum(token - context_len, 0), 63).to(tl.int64)
        is_ancestor = ((ancestors[:, None] >> new[None, :]) & 1) != 0
        visible = (token[None, :] < context_len) | (is_ancestor & inside[None, :])
    else:
        visible = token[None, :] <= last_visible[:, None]
    if WINDOW:
        visible = visible & (token[None, :] > last_visible[:, None] - window)
    logits = tl.where(visible, logits, float("-inf"))
    return fold(acc, top, total, logits, v_tile, scale_log2, True, q_tile.dtype, PRECISION)
