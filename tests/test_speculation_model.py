"""On real models speculation changes nothing but the speed: greedy output equals plain greedy, token for token."""

import pytest
import torch

from labkit.attention.api import available_backends
from labkit.drafting.matches import record_matches, simulate
from labkit.drafting.model import ModelDrafter
from labkit.drafting.ngram import NgramDrafter
from labkit.models.target import ModelTarget
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import load_model
from labkit.speculation import speculate
from labkit.workloads import WORKLOADS, load_prompts

NEAR_TIE = 1e-4


def generate(decoder, prompts, drafter, k, num_tokens, backend, stops=()):
    room = max(map(len, prompts)) + num_tokens + k + 1
    target = ModelTarget(
        decoder, batch_size=len(prompts), max_context_len=room, verify_backend=backend, decode_backend=backend
    )
    generations = speculate(
        target, drafter, prompts, num_speculative_tokens=k, max_new_tokens=num_tokens, stop_token_ids=stops
    )
    return [generation.output_ids for generation in generations]


def assert_same_text(decoder, prompt, expected, got):
    """Equal, or different from a position on at which the target's two best tokens tie within rounding."""
    if expected == got:
        return
    position = next(i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1])
    cache = decoder.new_cache(1, len(prompt) + position + 1)
    logits = decoder.prefill([*prompt, *expected[:position]], cache, 0, backend="sdpa")
    best, second = logits.float().topk(2).values.tolist()
    assert best - second < NEAR_TIE, f"differs at output token {position}, margin {best - second:.2e}"
    print(f"near-tie at output token {position}, margin {best - second:.2e}")


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny", dtype="float32", device="cpu", seed=1)


def tiny_prompts(decoder, lengths=(5, 17, 1, 33)):
    generator = torch.Generator().manual_seed(3)
    vocab_size = decoder.shape.vocab_size
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() * 2 for n in lengths]


# FlexAttention takes equal lengths only, and requests advance by their own acceptance.
BACKENDS = [name for name, reason in available_backends().items() if not reason and name != "flex"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 4])
def test_every_backend_on_a_seeded_model(tiny, backend, k):
    prompts = tiny_prompts(tiny)
    expected = generate(tiny, prompts, None, 0, 24, "sdpa")
    got = generate(tiny, prompts, NgramDrafter(min_ngram=1), k, 24, backend)
    for prompt, one, other in zip(prompts, expected, got, strict=True):
        assert_same_text(tiny, prompt, one, other)


@pytest.mark.parametrize("same", [True, False])
def test_model_drafter(tiny, same):
    """The target as its own drafter is always right, another seed hardly ever; the text is the same either way."""
    drafts = tiny if same else load_model("random:tiny", dtype="float32", device="cpu", seed=2)
    prompts = tiny_prompts(tiny)
    room = max(map(len, prompts)) + 40
    target = ModelTarget(tiny, batch_size=len(prompts), max_context_len=room, verify_backend="sdpa")
    drafter = ModelDrafter(drafts, max_context_len=room)
    got = speculate(target, drafter, prompts, num_speculative_tokens=3, max_new_tokens=24)
    for prompt, expected, generation in zip(prompts, generate(tiny, prompts, None, 0, 24, "sdpa"), got, strict=True):
        assert_same_text(tiny, prompt, expected, generation.output_ids)
    kept = [step.num_accepted_tokens for generation in got for step in generation.steps if not step.truncated]
    assert (sum(kept) / len(kept) > 2.9) == same


@pytest.mark.parametrize("k", [1, 4, 16, 200])
@pytest.mark.parametrize("own_drafter", [True, False])
def test_drafts_fit_a_cache_that_just_holds_the_output(tiny, k, own_drafter):
    prompts = tiny_prompts(tiny, (20, 16, 9))
    room = len(prompts[0]) + 39
    options = {"batch_size": 3, "max_context_len": room, "verify_backend": "sdpa", "page_size": 1}
    expected = speculate(ModelTarget(tiny, **options), None, prompts, num_speculative_tokens=0, max_new_tokens=40)
    drafter = ModelDrafter(tiny, max_context_len=room) if own_drafter else NgramDrafter(min_ngram=1)
    target = ModelTarget(tiny, **options)
    got = speculate(target, drafter, prompts, num_speculative_tokens=k, max_new_tokens=40)
    for prompt, one, other in zip(prompts, expected, got, strict=True):
        assert_same_text(tiny, prompt, one.output_ids, other.output_ids)
    with pytest.raises(ValueError, match="batch_size=3, got 4"):
        speculate(target, None, [*prompts, [1]], num_speculative_tokens=0, max_new_tokens=2)


def test_cache_is_reused_between_runs_of_one_target(tiny):
    (prompt,) = tiny_prompts(tiny, (40,))
    target = ModelTarget(tiny, batch_size=1, max_context_len=160, verify_backend="sdpa")
    options = {"num_speculative_tokens": 3, "max_new_tokens": 16}
    first = speculate(target, NgramDrafter(), [prompt], **options)[0]
    again = speculate(target, NgramDrafter(), [prompt], **options)[0]
    shorter = speculate(target, NgramDrafter(), [prompt[:50]], **options)[0]
    assert again.output_ids == first.output_ids
    fresh = ModelTarget(tiny, batch_size=1, max_context_len=160, verify_backend="sdpa")
    assert shorter.output_ids == speculate(fresh, NgramDrafter(), [prompt[:50]], **options)[0].output_ids


@pytest.mark.parametrize("shared", [1, 16, 37])
def test_a_target_adopts_the_prefix_of_another(tiny, shared):
    (prompt,) = tiny_prompts(tiny, (40,))
    other = [*prompt[:shared], *reversed(prompt)]
    options = {"num_speculative_tokens": 3, "max_new_tokens": 16}
    first, second, fresh = (
        ModelTarget(tiny, batch_size=1, max_context_len=room, verify_backend="sdpa") for room in (160, 144, 144)
    )
    speculate(first, NgramDrafter(), [prompt], **options)
    second.adopt(first, other)
    assert second.cache.context_lens[0] >= shared
    expected = speculate(fresh, NgramDrafter(), [other], **options)[0].output_ids
    assert_same_text(tiny, other, expected, speculate(second, NgramDrafter(), [other], **options)[0].output_ids)


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m", dtype="float32", device="cpu"), load_tokenizer("smollm2-135m")


def check_prompts(smollm2, prompts, num_tokens):
    decoder, tokenizer = smollm2
    ids = [tokenizer.encode_chat(list(prompt.messages)) for prompt in prompts]
    stops = tokenizer.stop_token_ids
    expected = generate(decoder, ids, None, 0, num_tokens, "sdpa", stops)
    for backend in ("sdpa", "per_token"):
        got = generate(decoder, ids, NgramDrafter(), 4, num_tokens, backend, stops)
        for prompt, one, other in zip(ids, expected, got, strict=True):
            assert_same_text(decoder, prompt, one, other)
    return ids, expected


@pytest.mark.model
@pytest.mark.parametrize("workload", ["code_editing", "prose", "chat"])
def test_smollm2_on_twelve_prompts(smollm2, workload):
    check_prompts(smollm2, load_prompts(workload, limit=4), 32)


@pytest.mark.model
def test_recorded_text_counts_as_the_model_does(smollm2):
    """Counts of k=2 from the recorded text of a k=4 run are those of a real k=2 run."""
    decoder, tokenizer = smollm2
    prompt = tokenizer.encode_chat(list(load_prompts("code_editing", limit=1)[0].messages))
    target = ModelTarget(decoder, batch_size=1, max_context_len=len(prompt) + 64, verify_backend="sdpa")
    run = {"max_new_tokens": 40}
    text = speculate(target, NgramDrafter(), [prompt], num_speculative_tokens=4, **run)[0]
    live = speculate(target, NgramDrafter(), [prompt], num_speculative_tokens=2, **run)[0]
    (matches,) = record_matches(NgramDrafter(), [text], 4)
    assert live.output_ids == text.output_ids
    counts = [
        [(s.num_drafted_tokens, s.num_accepted_tokens) for s in steps[:-1]]
        for steps in (live.steps, simulate(matches, 2, 40))
    ]
    assert counts[0] == counts[1]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("workload", WORKLOADS)
def test_smollm2_on_all_prompts(smollm2, workload):
    prompts = load_prompts(workload)
    for first in range(0, len(prompts), 4):
        check_prompts(smollm2, prompts[first : first + 4], 96)
