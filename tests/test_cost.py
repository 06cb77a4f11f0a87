import pytest

from labkit.cost import (
    attention_bytes,
    attention_flops,
    attention_shape,
    floor_ms,
    floor_relative_cost,
    forward_bytes,
    forward_flops,
    kv_bytes_read,
)
from labkit.errors import InputError
from labkit.shapes import AttentionShape, model_shape


def test_attention_counts_by_hand() -> None:
    # Two requests, 3 query tokens over 10 and 20 cached tokens: pairs 3*10 + 6 and 3*20 + 6.
    shape = AttentionShape(2, 3, (10, 20), num_qo_heads=4, num_kv_heads=2, head_dim=8, q_dtype="bfloat16")
    assert attention_flops(shape) == 4 * 4 * 8 * (36 + 66)
    assert kv_bytes_read(shape) == 2 * 2 * 8 * 2 * (13 + 23)
    assert attention_bytes(shape) == kv_bytes_read(shape) + 2 * (2 * 3 * 4 * 8) * 2


def test_kv_dtype_halves_only_the_cache() -> None:
    wide, narrow = (
        AttentionShape(1, 1, 99, 4, 2, 8, q_dtype="bfloat16", kv_dtype=dtype) for dtype in ("bfloat16", "float8_e4m3fn")
    )
    assert kv_bytes_read(narrow) * 2 == kv_bytes_read(wide)
    assert attention_bytes(wide) - attention_bytes(narrow) == kv_bytes_read(narrow)


def test_forward_of_llama_3_8b() -> None:
    model = model_shape("llama-3-8b")
    options = {"batch_size": 1, "q_len": 1, "context_len": 131071}
    # 131,072 bytes of KV per token, as published for this model in 16 bits.
    kv = 131072 * 131072
    q_and_out = 32 * 2 * 4096 * 2
    total = forward_bytes(model, weight_dtype="bfloat16", **options)
    assert total - model.weight_bytes_read("bfloat16") == kv + q_and_out
    flops = forward_flops(model, batch_size=1, q_len=1, context_len=0)
    assert flops == pytest.approx(2 * (model.num_linear_parameters + 128256 * 4096), rel=1e-4)


def test_float8_weights_keep_16_bit_queries() -> None:
    model = model_shape("llama-3-8b")
    shape = attention_shape(model, batch_size=1, q_len=4, context_len=64, weight_dtype="float8_e4m3fn")
    assert (shape.q_dtype, shape.kv_dtype) == ("bfloat16", "bfloat16")


def test_windows_and_shared_prefixes_are_read_once() -> None:
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "q_dtype": "bfloat16"}
    per_token = 2 * 2 * 8 * 2
    assert kv_bytes_read(AttentionShape(2, 3, (10, 20), window=5, **heads)) == per_token * (7 + 7)
    assert kv_bytes_read(AttentionShape(3, 1, 20, shared_prefix_len=16, **heads)) == per_token * (16 + 3 * 5)


def test_floor_is_the_longer_of_reading_and_computing() -> None:
    assert floor_ms(4.8e9, 4800) == pytest.approx(1.0)
    assert floor_ms(4.8e9, 4800, flops=2e12, tflops_per_s=1000) == pytest.approx(2.0)
    for rates in ({"read_gb_per_s": 0.0}, {"read_gb_per_s": 1.0, "tflops_per_s": -1.0}):
        with pytest.raises(InputError, match="must be above 0"):
            floor_ms(1, **rates)


def test_floor_relative_cost_of_reading_once_is_near_one() -> None:
    model = model_shape("llama-3-8b")
    options = {"batch_size": 1, "num_speculative_tokens": 7, "weight_dtype": "bfloat16"}
    costs = [floor_relative_cost(model, context_len=length, **options) for length in (1024, 131072)]
    assert all(1 < cost < 1.001 for cost in costs)


def test_a_draft_model_adds_k_of_its_own_forwards() -> None:
    model, draft = model_shape("llama-3.3-70b"), model_shape("llama-3-8b")
    options = {"context_len": 1024, "batch_size": 1, "num_speculative_tokens": 4, "weight_dtype": "bfloat16"}
    with_draft = floor_relative_cost(model, draft_model=draft, **options)
    share = draft.weight_bytes_read("bfloat16") / model.weight_bytes_read("bfloat16")
    assert with_draft - floor_relative_cost(model, **options) == pytest.approx(4 * share, rel=0.02)
    with pytest.raises(InputError, match="at least 1, got 0"):
        floor_relative_cost(model, **options | {"num_speculative_tokens": 0})
