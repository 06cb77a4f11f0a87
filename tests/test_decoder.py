"""The decoder against transformers on the same weights, and against itself: chunks, batches, rollbacks, layouts."""

import dataclasses

import pytest
import torch

from labkit.errors import BackendUnavailable, InputError
from labkit.models.decoder import Decoder
from labkit.models.gguf import dequantised_folder, smollm2_gguf
from labkit.models.linear import LINEAR_BACKENDS, make_linear, resolve_linear_backend
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import load_model
from labkit.shapes import ModelShape, model_shape

LAYOUTS = ("llama", "llama3_rope", "llama_untied", "qwen2", "qwen3")
PROMPTS = (
    "What is the capital of France? Answer in one paragraph.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three reasons why bridges fail, one line each.",
    "Translate to German: The weather is nice today and we walk along the river.",
    "Continue the story: The lighthouse keeper had not seen a ship for ninety days when",
)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def tiny_transformer(layout: str):
    """A 2-layer model of transformers with seeded weights; norms and biases drawn too, so a lost one shows."""
    import transformers

    common = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "tie_word_embeddings": layout != "llama_untied",
    }
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if layout == "llama3_rope":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 32}
    family = {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(layout, "Llama")
    config = getattr(transformers, f"{family}Config")(**common, rope_parameters=rope)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.3) if "norm" in name else parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(scope="module", params=LAYOUTS)
def tiny_pair(request, tmp_path_factory) -> tuple:
    model = tiny_transformer(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    # Small shards, so that the index is read too.
    model.save_pretrained(folder, max_shard_size="60KB" if request.param == "qwen3" else "1GB")
    return model, folder


def random_ids(decoder: Decoder, *size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(decoder.shape.vocab_size, size, generator=torch.Generator().manual_seed(seed))


def test_tiny_layouts_equal_transformers(tiny_pair):
    model, folder = tiny_pair
    decoder = load_model(folder)
    token_ids = random_ids(decoder, 2, 90)
    with torch.inference_mode():
        wanted = model(token_ids).logits
    got = decoder.forward(token_ids, decoder.new_cache(2, 128), backend="reference")
    assert relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_tiny_layouts_stay_near_in_16_bits(tiny_pair, dtype, tolerance):
    model, folder = tiny_pair
    token_ids = random_ids(load_model(folder), 1, 40)
    with torch.inference_mode():
        wanted = model(token_ids).logits
    decoder = load_model(folder, dtype=dtype)
    got = decoder.forward(token_ids, decoder.new_cache(1, 128), backend="sdpa")
    assert got.dtype == torch.float32
    assert relative_error(got, wanted) < tolerance


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    return load_model("random:tiny")


def full_logits(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    cache = decoder.new_cache(token_ids.shape[0], 256)
    return decoder.forward(token_ids, cache, backend="reference")


@pytest.mark.parametrize("backend", ["reference", "sdpa", "per_token"])
def test_steps_of_any_length_equal_one_pass(tiny, backend):
    token_ids = random_ids(tiny, 2, 70)
    cache = tiny.new_cache(2, 128)
    parts = [tiny.forward(part, cache, backend=backend) for part in token_ids.split([31, 1, 5, 1, 8, 24], dim=1)]
    assert cache.context_lens == [70, 70]
    assert relative_error(torch.cat(parts, dim=1), full_logits(tiny, token_ids)) < 1e-5


def test_last_logits_are_the_last_row(tiny):
    token_ids = random_ids(tiny, 2, 9)
    last = tiny.forward(token_ids, tiny.new_cache(2, 64), backend="sdpa", logits="last")
    assert last.shape == (2, 1, tiny.shape.vocab_size)
    assert relative_error(last, full_logits(tiny, token_ids)[:, -1:]) < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
def test_prefill_in_chunks_fills_one_row(tiny, chunk):
    token_ids = random_ids(tiny, 33)
    cache = tiny.new_cache(3, 64)
    logits = tiny.prefill(token_ids.tolist(), cache, 1, backend="sdpa", chunk=chunk)
    assert cache.context_lens == [0, 33, 0]
    assert relative_error(logits, full_logits(tiny, token_ids[None])[0, -1]) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_ragged_batch_on_permuted_pages_equals_single_requests(tiny, backend, generator):
    texts = [random_ids(tiny, length, seed=length) for length in (40, 3, 17)]
    cache = tiny.new_cache(3, 96, page_size=4, page_order="permuted", generator=generator)
    for request, text in enumerate(texts):
        tiny.prefill(text[:-2].tolist(), cache, request, backend=backend)
    got = tiny.forward(torch.stack([text[-2:] for text in texts]), cache, backend=backend)
    assert cache.context_lens == [40, 3, 17]
    for request, text in enumerate(texts):
        assert relative_error(got[request], full_logits(tiny, text[None])[0, -2:]) < 1e-5


def test_rollback_leaves_no_trace(tiny):
    token_ids = random_ids(tiny, 1, 30)
    cache = tiny.new_cache(1, 64)
    tiny.forward(token_ids[:, :20], cache, backend="sdpa")
    tiny.forward(random_ids(tiny, 1, 5, seed=9), cache, backend="sdpa")
    cache.truncate(20)
    got = tiny.forward(token_ids[:, 20:], cache, backend="sdpa")
    assert relative_error(got, full_logits(tiny, token_ids)[:, 20:]) < 1e-5


def test_bad_calls_name_the_argument(tiny):
    cache = tiny.new_cache(2, 32)
    with pytest.raises(ValueError, match="token_ids must be"):
        tiny.forward(random_ids(tiny, 3, 1), cache, backend="sdpa")
    with pytest.raises(ValueError, match="logits must be"):
        tiny.forward(random_ids(tiny, 2, 1), cache, backend="sdpa", logits="none")
    with pytest.raises(ValueError, match="at most 32"):
        tiny.forward(random_ids(tiny, 2, 33), cache, backend="sdpa")
    with pytest.raises(ValueError, match=r"one or more ids in 0\.\.511, got none"):
        tiny.prefill([], cache, 0, backend="sdpa")
    with pytest.raises(ValueError, match="ids in"):
        tiny.prefill([512], cache, 0, backend="sdpa")
    with pytest.raises(InputError, match="at most 4096"):
        tiny.new_cache(1, 4097)
    with pytest.raises(InputError, match="backend must be"):
        tiny.forward(random_ids(tiny, 2, 1), cache, backend="nope")
    assert cache.context_lens == [0, 0]


def test_floor_counts_a_tied_table_once_and_the_keys(tiny):
    shape = tiny.shape
    assert tiny.floor_bytes() == shape.weight_bytes_read("float32")
    assert tiny.floor_bytes([10, 5]) - tiny.floor_bytes() == 15 * shape.kv_bytes_per_token("float32")


def runnable(linear_backend: str, dtype: str) -> bool:
    try:
        return resolve_linear_backend(linear_backend, model_shape("tiny"), dtype, "cpu") == linear_backend
    except BackendUnavailable:
        return False


@pytest.mark.parametrize("linear_backend", LINEAR_BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_linear_backends_compute_the_same_product(linear_backend, dtype, tolerance, generator):
    if not runnable(linear_backend, dtype):
        pytest.skip(f"{linear_backend} cannot run {dtype} on this machine")
    torch_dtype = getattr(torch, dtype)
    weight, bias = (torch.randn(size, generator=generator).to(torch_dtype) for size in ((100, 72), (100,)))
    run = make_linear(weight, bias, linear_backend)
    for num_rows in (1, 2, 5, 8, 9, 40):
        x = torch.randn(num_rows, 72, generator=generator)
        wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        got = run(x if linear_backend.startswith("fbgemm") else x.to(torch_dtype))
        assert relative_error(got.double(), wanted) < tolerance


def test_linear_backend_names_are_checked():
    with pytest.raises(InputError, match=r"linear_backend must be 'auto' or one of torch\.linear"):
        load_model("random:tiny", linear_backend="cublas")
    with pytest.raises(BackendUnavailable, match="does not hold float32 weights"):
        load_model("random:tiny", linear_backend="fbgemm-fp16")
    if runnable("fbgemm-fp16x2", "float32"):
        with pytest.raises(InputError, match=r"needs weights within 65504"):
            make_linear(torch.full((4, 4), 1e5), None, "fbgemm-fp16x2")


def test_the_chosen_linear_backend_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    shape = dataclasses.replace(model_shape("tiny"), hidden_size=1024, intermediate_size=1024)
    first = resolve_linear_backend("auto", shape, "float32", "cpu")
    assert first in LINEAR_BACKENDS
    files = list(tmp_path.glob("linear-*.txt"))
    assert [file.read_text() for file in files] == ([first] if len(files) else [])
    for file in files:
        file.write_text("torch.linear")
        assert resolve_linear_backend("auto", shape, "float32", "cpu") == "torch.linear"


def test_seeded_weights_repeat_and_differ_by_seed():
    shape: ModelShape = model_shape("tiny")
    token_ids = torch.arange(8)[None]
    first, again, other = (full_logits(load_model(shape, seed=seed), token_ids) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert relative_error(other, first) > 0.1


@pytest.fixture(scope="module")
def transformer():
    from transformers import AutoModelForCausalLM

    folder = dequantised_folder(smollm2_gguf())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def smollm2() -> Decoder:
    return load_model("smollm2-135m")


def chat_ids(prompt: str) -> list[int]:
    return load_tokenizer("smollm2-135m").encode_chat([{"role": "user", "content": prompt}])


@pytest.mark.model
def test_smollm2_logits_equal_transformers(transformer, smollm2):
    text = " ".join(PROMPTS)
    token_ids = torch.tensor([chat_ids(text)])
    with torch.inference_mode():
        wanted = transformer(token_ids).logits
    cache = smollm2.new_cache(1, 256)
    # Prefill, verify and decode take different kernels.
    sizes = [token_ids.shape[1] - 10, 5, 1, 4]
    parts = [smollm2.forward(part, cache, backend="sdpa") for part in token_ids.split(sizes, dim=1)]
    error = relative_error(torch.cat(parts, dim=1), wanted)
    print(f"linear_backend {smollm2.linear_backend}: relative error {error:.1e}")
    assert error < 1e-4


@pytest.mark.model
@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_greedy_text_equals_transformers(transformer, smollm2, prompt):
    token_ids = chat_ids(prompt)
    generated = transformer.generate(
        torch.tensor([token_ids]),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    wanted = generated.sequences[0, len(token_ids) :].tolist()
    banned = transformer.generation_config.eos_token_id
    cache = smollm2.new_cache(1, 256)
    logits = smollm2.prefill(token_ids, cache, 0, backend="sdpa")
    num_flips = 0
    for position, token in enumerate(wanted):
        logits[banned] = -torch.inf
        if int(logits.argmax()) != token:
            top = generated.logits[position][0].index_fill(0, torch.tensor([banned]), -torch.inf).topk(2).values
            assert top[0] - top[1] < 1e-4, f"another token at position {position}, margin {top[0] - top[1]:.1e}"
            num_flips += 1
        # transformers' token goes on, so a flip of a near tie does not end the comparison.
        logits = smollm2.forward(torch.tensor([[token]]), cache, backend="sdpa")[0, -1]
    print(f"{num_flips} of {len(wanted)} tokens flipped at a top-2 margin below 1e-4")


@pytest.mark.model
def test_smollm2_bfloat16_stays_near_float32(smollm2):
    token_ids = torch.tensor([chat_ids(PROMPTS[0])])
    wanted = smollm2.forward(token_ids, smollm2.new_cache(1, 128), backend="sdpa")
    decoder = load_model("smollm2-135m", dtype="bfloat16")
    got = decoder.forward(token_ids, decoder.new_cache(1, 128), backend="sdpa")
    assert relative_error(got, wanted) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_equals_cpu(dtype, tmp_path):
    model = tiny_transformer("qwen3")
    model.save_pretrained(tmp_path)
    cpu, cuda = (load_model(tmp_path, dtype=dtype, device=device) for device in ("cpu", "cuda"))
    token_ids = random_ids(cpu, 2, 60)
    wanted = cpu.forward(token_ids, cpu.new_cache(2, 64), backend="reference")
    cache = cuda.new_cache(2, 64)
    got = [cuda.forward(part.cuda(), cache, backend="sdpa") for part in token_ids.split([50, 1, 5, 4], dim=1)]
    assert relative_error(torch.cat(got, dim=1).cpu(), wanted) < (1e-4 if dtype == "float32" else 0.1)
