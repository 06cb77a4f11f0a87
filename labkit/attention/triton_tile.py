"""One tile of keys for one tile of query rows: the inner step of the Triton kernel."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    acc,
    top,
    total,
    q_tile,
    k,
    v,
    page_row,
    first_token,
    kv_len,
    context_len,
    last_visible,
    ancestors,
    window,
    scale_log2,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys from `first_token` on into the running softmax of `q_tile`; `top` is the maximum of the raw logits.

    `k` and `v` point at the KV head, `page_row` at the request's page table, `last_visible` holds the last key that
    each row may see. Without `MASKED` every row must see all `BLOCK_N` keys. Keys of 8 bits are widened here.
    """
    step = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    token = first_token + step
    inside = token < kv_len
    # A long cache has more than 2**31 elements.
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(page_row + first_token // PAGE_SIZE).to(tl.int64)
        offset = (page * PAGE_SIZE + first_token % PAGE_SIZE + step) * stride_slot
    else:
        if MASKED:
            page = tl.load(page_row + token // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(page_row + token // PAGE_SIZE).to(tl.int64)
        offset = (page * PAGE_SIZE + token % PAGE_SIZE) * stride_slot
    if MASKED:
        k_tile = tl.load(k + offset[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
        v_tile = tl.load(v + offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    else:
        k_tile = tl.load(k + offset[None, :] + dim[:, None])
        v_tile = tl.load(v + offset[:, None] + dim[None, :])
    logits = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)
    if MASKED:
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
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = new_top
    if MASKED:
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits * scale_log2 - (base * scale_log2)[:, None])
    shrink = tl.exp2((top - base) * scale_log2)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(q_tile.dtype)
    acc = tl.dot(weights, v_tile.to(q_tile.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total
