"""The gated-delta layer of hybrid decoders in Triton: causal convolution, recurrence with snapshots, gated norm."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from labkit.models.triton_ops import sum_splits, take_turn


@triton.jit(do_not_specialize=["q_len"])
def conv_kernel(
    partial, weight, columns, num_kept, out, row_stride, split_stride, q_len, num_channels, max_q_len,
    BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (batch_size, channels / BLOCK): depthwise convolution of width 4, then SiLU.

    `columns` ``[batch_size, 3 + max_q_len, channels]`` holds the raw inputs of the last step; its tokens
    ``num_kept .. num_kept + 3`` are the three before this step, so a rejection only moves `num_kept` ``[batch_size]``.
    They are moved to the front, and the new ones stored behind them. `out` is ``[batch_size * q_len, channels]``.
    """
    take_turn(PDL)
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < num_channels
    kept = tl.load(num_kept + request)
    base = columns + request * (3 + max_q_len) * num_channels + channel
    w0 = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(weight + num_channels + channel, mask=mask, other=0.0).to(tl.float32)
    w2 = tl.load(weight + 2 * num_channels + channel, mask=mask, other=0.0).to(tl.float32)
    w3 = tl.load(weight + 3 * num_channels + channel, mask=mask, other=0.0).to(tl.float32)
    x0 = tl.load(base + kept * num_channels, mask=mask, other=0.0)
    x1 = tl.load(base + (kept + 1) * num_channels, mask=mask, other=0.0)
    x2 = tl.load(base + (kept + 2) * num_channels, mask=mask, other=0.0)
    tl.store(base, x0, mask=mask)
    tl.store(base + num_channels, x1, mask=mask)
    tl.store(base + 2 * num_channels, x2, mask=mask)
    for token in range(q_len):
        row = request * q_len + token
        x3 = sum_splits(partial, row * row_stride + channel, mask, split_stride, NUM_SPLITS).to(x0.dtype)
        mixed = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
        tl.store(base + (3 + token) * num_channels, x3, mask=mask)
        tl.store(out + row * num_channels + channel, (mixed * tl.sigmoid(mixed)).to(out.dtype.element_ty), mask=mask)
        x0, x1, x2 = x1, x2, x3


@triton.jit(do_not_specialize=["q_len"])
def recurrence_kernel(
    mixed, partial, log_rate, time_bias, states, slot, out, row_stride, split_stride, beta_offset, q_len, num_slots,
    NUM_K_HEADS: tl.constexpr, NUM_V_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (batch_size, value heads, DIM / BLOCK_V): q tokens through the recurrence, each state kept.

    `states` is float32 ``[batch_size, num_slots, value heads, DIM (key), DIM (value)]``: the state is read from
    ``slot[request]`` and that after token t stored in slot t, so that a rejection only picks another slot. `mixed`
    holds q, k and v after the convolution ``[rows, (2 * NUM_K_HEADS + NUM_V_HEADS) * DIM]``; beta and the decay's input
    lie in `partial` from `beta_offset`. `log_rate` and `time_bias` are float32 ``[value heads]``.
    """
    take_turn(PDL)
    request = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (NUM_V_HEADS // NUM_K_HEADS)
    dim = tl.arange(0, DIM)
    col = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rate = tl.exp(tl.load(log_rate + head))
    bias = tl.load(time_bias + head)
    first = request.to(tl.int64) * num_slots
    place = dim[:, None] * DIM + col[None, :]
    state = tl.load(states + ((first + tl.load(slot + request)) * NUM_V_HEADS + head) * DIM * DIM + place)
    width = (2 * NUM_K_HEADS + NUM_V_HEADS) * DIM
    for token in range(q_len):
        row = request * q_len + token
        x = mixed + row * width
        q = tl.load(x + key_head * DIM + dim).to(tl.float32)
        k = tl.load(x + (NUM_K_HEADS + key_head) * DIM + dim).to(tl.float32)
        v = tl.load(x + (2 * NUM_K_HEADS + head) * DIM + col).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(float(DIM))
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        at = row * row_stride + beta_offset + head
        beta = tl.sigmoid(sum_splits(partial, at, head >= 0, split_stride, NUM_SPLITS))
        step = sum_splits(partial, at + NUM_V_HEADS, head >= 0, split_stride, NUM_SPLITS) + bias
        softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        state *= tl.exp(-rate * softplus)
        surprise = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * surprise[None, :]
        tl.store(states + ((first + token) * NUM_V_HEADS + head) * DIM * DIM + place, state)
        result = tl.sum(state * q[:, None], 0)
        tl.store(out + (row * NUM_V_HEADS + head) * DIM + col, result)


@triton.jit
def gated_norm_kernel(
    value, partial, weight, out, row_stride, gate_offset, split_stride, eps, NUM_V_HEADS: tl.constexpr,
    DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, value heads): RMSNorm of each head of `value` (float32), times SiLU of its gate columns."""
    take_turn(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    place = (row * NUM_V_HEADS + head) * DIM + dim
    x = tl.load(value + place)
    gate = sum_splits(partial, row * row_stride + gate_offset + head * DIM + dim, dim >= 0, split_stride, NUM_SPLITS)
    x *= tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * tl.load(weight + dim).to(tl.float32)
    tl.store(out + place, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty))
