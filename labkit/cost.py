"""What a call must compute and read at least, and the floor that reading sets.

These are counts from shapes, not measurements; a cell priced with them has origin "modelled".
"""

from typing import Any

from labkit.errors import InputError
from labkit.shapes import AttentionShape, ModelShape, dtype_bytes


def attention_flops(shape: AttentionShape) -> int:
    """Floating point operations of one attention call over one layer, a multiply-add being two.

    Counted: q @ K and p @ V over the (query, key) pairs that the lower-right causal mask keeps, once per query head.
    Not counted: masked pairs and padding rows that a kernel computes anyway, softmax, scaling, merging of KV splits.
    """
    new_pairs = shape.q_len * (shape.q_len + 1) // 2
    pairs = sum(shape.q_len * context_len + new_pairs for context_len in shape.context_lens)
    return 4 * shape.num_qo_heads * shape.head_dim * pairs


def kv_bytes_read(shape: AttentionShape) -> int:
    """Bytes of K and V in one layer, each counted once for all query tokens, query heads and requests that share it.

    With a window only the keys that some row sees count.

    A kernel that walks the cache once per query token reads q_len times this, one that walks it per query head
    group_size times. Not counted: the page table, scales of a quantised cache, padding of the last page.
    """
    per_token = 2 * shape.num_kv_heads * shape.head_dim * dtype_bytes(str(shape.kv_dtype))
    visible = shape.kv_lens
    if shape.window is not None:
        visible = tuple(min(kv_len, shape.window + shape.q_len - 1) for kv_len in visible)
    shared_again = shape.shared_prefix_len * (shape.batch_size - 1)
    return per_token * (sum(visible) - shared_again)


def attention_bytes(shape: AttentionShape) -> int:
    """Bytes that one attention call over one layer moves at least: K and V once, q read once, the output written once.

    Not counted: writing the new keys and values (that is the append before the call), lse, split workspaces and their
    merge, page table.
    """
    rows = shape.batch_size * shape.q_len * shape.num_qo_heads * shape.head_dim
    return kv_bytes_read(shape) + 2 * rows * dtype_bytes(shape.q_dtype)


def attention_shape(
    model: ModelShape, *, batch_size: int, q_len: int, context_len: int, weight_dtype: str, kv_dtype: str | None = None
) -> AttentionShape:
    """The attention call of one layer of `model`; q has the dtype of the weights, or bfloat16 when those are float8."""
    return AttentionShape(
        batch_size=batch_size,
        q_len=q_len,
        context_len=context_len,
        num_qo_heads=model.num_qo_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        q_dtype="bfloat16" if dtype_bytes(weight_dtype) == 1 else weight_dtype,
        kv_dtype=kv_dtype,
    )


def forward_flops(model: ModelShape, *, batch_size: int, q_len: int, context_len: int, num_logits: int = 0) -> int:
    """Floating point operations of one forward that returns logits for every token, or `num_logits` per request.

    Counted: matrices of the layers, output head, attention. Not counted: norms, rotary embedding, activation, sampling,
    the convolution and recurrence of gated-delta layers.
    """
    shape = attention_shape(model, batch_size=batch_size, q_len=q_len, context_len=context_len, weight_dtype="bfloat16")
    head = model.vocab_size * model.hidden_size * (num_logits or q_len)
    return 2 * batch_size * (model.num_linear_parameters * q_len + head) + model.num_attention_layers * attention_flops(
        shape
    )


def forward_bytes(model: ModelShape, *, weight_dtype: str, **call: Any) -> int:
    """Bytes that one forward reads at least: the weights once for the whole batch, and `attention_bytes` per layer.

    call : as `attention_shape` takes it.

    Not counted: activations between operations (they stay in cache), logits, the single embedding rows looked up.
    """
    shape = attention_shape(model, weight_dtype=weight_dtype, **call)
    return model.weight_bytes_read(weight_dtype) + model.num_attention_layers * attention_bytes(shape)


def floor_ms(num_bytes: float, read_gb_per_s: float, *, flops: float = 0.0, tflops_per_s: float | None = None) -> float:
    """Least time in ms: bytes over bandwidth (1e9 bytes per second), or FLOPs over the matrix rate if that is longer.

    Raises
    ------
    InputError
        A rate that is not above 0.
    """
    for name, rate in (("read_gb_per_s", read_gb_per_s), ("tflops_per_s", tflops_per_s)):
        if rate is not None and not rate > 0:
            raise InputError(f"{name} must be above 0, got {rate}")
    compute_ms = flops / tflops_per_s / 1e9 if tflops_per_s else 0.0
    return max(num_bytes / read_gb_per_s / 1e6, compute_ms)


def floor_relative_cost(
    model: ModelShape,
    *,
    context_len: int,
    num_speculative_tokens: int,
    draft_model: ModelShape | None = None,
    **call: Any,
) -> float:
    """Break-even acceptance length if only reading counted: one chain-verify step over one plain decode step.

    Bytes of whole forwards (`forward_bytes`); the bandwidth cancels. `draft_model` adds k one-token forwards over the
    same context, in the same dtypes; without it drafting is free, as for an n-gram lookup. Not counted: launches, host
    time, computing, accepting, and the drafter's pass over tokens it did not draft itself.

    call : batch_size, weight_dtype and kv_dtype.

    Raises InputError: num_speculative_tokens below 1.
    """
    if num_speculative_tokens < 1:
        raise InputError(f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}")
    step = forward_bytes(model, q_len=num_speculative_tokens + 1, context_len=context_len, **call)
    if draft_model is not None:
        contexts = range(context_len, context_len + num_speculative_tokens)
        step += sum(forward_bytes(draft_model, q_len=1, context_len=context, **call) for context in contexts)
    return step / forward_bytes(model, q_len=1, context_len=context_len, **call)
