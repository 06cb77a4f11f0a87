"""One tile of keys for one tile of query rows: the inner step of both Triton kernels."""

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
    last_visible,
    scale_log2,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys from `first_token` on into the running softmax (base 2) of `q_tile`.

    `k` and `v` point at the KV head, `page_row` at the request's page table, `last_visible` holds the last key that
    each row may see. Without `MASKED` every row must see all `BLOCK_N` keys.
    """
    token = first_token + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    if MASKED:
        inside = token < kv_len
        page = tl.load(page_row + token // PAGE_SIZE, mask=inside, other=0)
    else:
        page = tl.load(page_row + token // PAGE_SIZE)
    # A long cache has more than 2**31 elements.
    offset = (page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE) * stride_slot
    if MASKED:
        k_tile = tl.load(k + offset[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
        v_tile = tl.load(v + offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    else:
        k_tile = tl.load(k + offset[None, :] + dim[:, None])
        v_tile = tl.load(v + offset[:, None] + dim[None, :])
    logits = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale_log2
    if MASKED:
        logits = tl.where(token[None, :] <= last_visible[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = new_top
    if MASKED:
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    return acc, new_top, total
