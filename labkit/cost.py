"""What a call must read at least, in bytes, and the floor that sets.

These are counts from shapes, not measurements; a cell priced with them has origin "modelled".
"""

from typing import Any

from labkit.errors import InputError
from labkit.shapes import AttentionShape, ModelShape, dtype_bytes


def kv_bytes_read(shape: AttentionShape) -> int:
    """Bytes of K and V in one layer, each counted once for all query tokens and all query heads that share it.

    A kernel that walks the cache once per query token reads q_len times this, one that walks it per query head
    group_size times. Not counted: the page table, scales of a quantised cache, padding of the last page.
    """
    per_token = 2 * shape.num_kv_heads * shape.head_dim * dtype_bytes(str(shape.kv_dtype))
    return per_token * sum(shape.kv_lens)


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


def forward_bytes(model: ModelShape, *, weight_dtype: str, **call: Any) -> int:
    """Bytes that one forward reads at least: the weights once for the whole batch, and `attention_bytes` per layer.

    call : as `attention_shape` takes it.

    Not counted: activations between operations (they stay in cache), logits, the single embedding rows looked up.
    """
    shape = attention_shape(model, weight_dtype=weight_dtype, **call)
    return model.weight_bytes_read(weight_dtype) + model.num_layers * attention_bytes(shape)


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
