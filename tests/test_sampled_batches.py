"""Sampled acceptance in large batches: what a prompt becomes depends on its own stream and on nothing beside it."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from labkit import speculation
from labkit.accept import accept_sampling, draw
from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.model import ModelDrafter
from labkit.drafting.ngram import NgramDrafter
from labkit.drafting.tree import TreeShape
from labkit.errors import InputError
from labkit.experiments import acceptance, common, estimate
from labkit.models.target import ModelTarget
from labkit.models.weights import load_model
from labkit.shapes import model_shape
from labkit.speculation import Request, speculate
from labkit.sweep import run_sweep
from tests.test_heads import TAPS, make_head
from tests.test_speculation_model import tiny_prompts

GRID = {
    "drafter": ["ngram", "autoregressive", "block"],
    "workload": ["prose"],
    "context_len": [0],
    "num_speculative_tokens": [2, 4],
    "temperature": [0.7],
    "seed": [0, 1],
    "num_prompts": [2],
    "prompts_per_batch": [2],
    "max_new_tokens": [10],
    "verify_backend": ["sdpa_masked"],
}


@pytest.fixture(scope="module")
def decoder():
    return load_model(replace(model_shape("tiny"), vocab_size=16, max_context_len=4096), seed=4)


@pytest.fixture(scope="module")
def folders(decoder, tmp_path_factory):
    found = {}
    for layout in ("autoregressive", "block"):
        found[layout] = str(tmp_path_factory.mktemp(layout))
        make_head(decoder, layout, tmp_path_factory.getbasetemp() / found[layout], draft_vocab_size=12)
    return found


def make_drafter(name, decoder, folders, target):
    sampled = {"temperature": 0.7}
    if name == "ngram":
        return NgramDrafter(min_ngram=1)
    if name == "model":
        return ModelDrafter(decoder, max_context_len=target.max_context_len, **sampled)
    layout, _, option = name.partition("+")
    more = {"": {}, "tree": {"tree": TreeShape(3, 8)}, "confidence": {"min_confidence": 0.1}}[option]
    kind = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout]
    return kind.from_folder(folders[layout], target, backend="sdpa_masked", **sampled, **more)


def sample(decoder, folders, name, prompts, seeds, k=3):
    target = ModelTarget(decoder, batch_size=len(prompts), max_context_len=128, verify_backend="sdpa_masked", taps=TAPS)
    run = {"num_speculative_tokens": k, "max_new_tokens": 20, "stop_token_ids": [5]}
    run["generators"] = [torch.Generator().manual_seed(seed) for seed in seeds]
    rule = partial(accept_sampling, temperature=0.7, top_p=0.95)
    return speculate(target, make_drafter(name, decoder, folders, target), prompts, accept=rule, **run)


def counted(generation):
    whole = [step for step in generation.steps if not step.truncated]
    steps = [(step.context_len, step.num_drafted_tokens, step.num_accepted_tokens) for step in whole]
    return generation.output_ids, generation.finish_reason, steps, len(generation.steps)


DRAFTERS = ["ngram", "model", "autoregressive", "block", "autoregressive+tree", "block+confidence"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sampled_text_is_the_same_alone_and_in_any_batch(decoder, folders, name):
    prompts = [prompt for prompt in tiny_prompts(decoder, (5, 17, 9)) for _ in range(2)]
    seeds = [1, 2, 3, 4, 5, 6]
    together = sample(decoder, folders, name, prompts, seeds)
    turned = sample(decoder, folders, name, prompts[::-1], seeds[::-1])[::-1]
    for prompt, seed, one, other in zip(prompts, seeds, together, turned, strict=True):
        (alone,) = sample(decoder, folders, name, [prompt], [seed])
        assert counted(one) == counted(alone) == counted(other)
    assert len({tuple(one.output_ids) for one in together}) > 4, "the seeds must make a difference"
    assert sum(step.num_accepted_tokens for one in together for step in one.steps) > 0


def test_equal_prompts_are_prefilled_once_with_equal_results(decoder):
    (prompt, other) = tiny_prompts(decoder, (11, 6))
    target = ModelTarget(decoder, batch_size=3, max_context_len=64, verify_backend="sdpa", taps=TAPS)
    requests = [Request(i, list(text), len(text)) for i, text in enumerate((prompt, other, prompt))]
    logits = target.start(requests)
    assert torch.equal(logits[0], logits[2])
    assert target.cache.context_lens == [len(prompt), len(other), len(prompt)]
    first, _, third = (target.states([request], [0], len(prompt), TAPS) for request in requests)
    assert torch.equal(first, third)
    for layer in range(target.cache.num_layers):
        for held, copied in zip(
            target.cache.dense(layer, 0, len(prompt)), target.cache.dense(layer, 2, len(prompt)), strict=True
        ):
            assert torch.equal(held, copied)
            assert held.data_ptr() != copied.data_ptr()


def test_a_head_that_samples_wants_streams(decoder, folders):
    target = ModelTarget(decoder, batch_size=1, max_context_len=64, verify_backend="sdpa", taps=TAPS)
    drafter = make_drafter("block", decoder, folders, target)
    with pytest.raises(ValueError, match="generators of speculate"):
        speculate(target, drafter, tiny_prompts(decoder, (5,)), num_speculative_tokens=3, max_new_tokens=8)


def test_draws_never_fall_on_impossible_tokens():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, uniform).tolist() == [1, 1, 3, 3]
    assert draw(torch.full((1, 5), torch.nan), uniform[:1]).item() == 5  # no token: a lookup refuses it


def batches(points):
    return [list(batch) for _, batch in itertools.groupby(points, lambda point: point["group"])]


@pytest.mark.parametrize("temperature", [[0.7, 1.0], [0.0, 0.7]])
def test_all_prompts_and_seeds_of_a_cell_are_one_batch(temperature):
    """A sweep measures adjacent points of a group together."""
    grid = GRID | {"temperature": temperature, "num_prompts": [4], "workload": ["prose", "code_writing"]}
    points = acceptance.points("cpu", **grid)
    found = batches(points)
    assert (
        len(found) == len({point["group"] for point in points}) == 2 * 2 * 2
    )  # workloads, temperatures, prompt batches
    for batch in found:
        seeds = 2 if batch[0]["temperature"] else 1
        assert len(batch) == 2 * 3 * 2 * seeds  # prompts, drafters, k
        assert len({(point["workload"], point["temperature"]) for point in batch}) == 1


@pytest.fixture
def measured(decoder, folders, monkeypatch):
    """`acceptance.measure` on the tiny target, and the calls of the loop that it made."""
    calls, real, encoded = [], speculation.speculate, acceptance.prompt_tokens

    def count(*args, **options):
        calls.append(len(args[2]))
        return real(*args, **options)

    def few(point):
        ids, digest = encoded(point)
        return [token % 16 for token in ids[-40:]], digest

    monkeypatch.setattr(speculation, "speculate", count)
    monkeypatch.setattr(common, "decoder", lambda *_: decoder)
    monkeypatch.setattr(acceptance, "prompt_tokens", few)
    return lambda points: acceptance.measure([point | {"draft_dirs": folders} for point in points]), calls


def test_measured_alone_a_point_counts_as_in_its_batch(measured):
    measure, calls = measured
    (batch,) = batches(acceptance.points("cpu", **GRID))
    together = measure(batch)
    assert calls == [4] * 6  # a call per drafter and k, of 2 prompts x 2 seeds
    for point, rows in zip(batch, together, strict=True):
        (alone,) = measure([point])
        assert rows == alone
    outputs = {
        (p["prompt_id"], p["seed"]): str(r[0]["accepted_by_draft_length"]) for p, r in zip(batch, together, strict=True)
    }
    assert len(set(outputs.values())) > 1


def test_an_interrupted_sweep_keeps_finished_batches_and_goes_on(measured, tmp_path):
    measure, _ = measured
    points = acceptance.points("cpu", **GRID | {"drafter": ["ngram"], "temperature": [0.7, 1.0]})
    first, second = batches(points)
    done = []

    def stop_once(batch):
        if len(done) == 1:
            done.append(None)
            raise KeyboardInterrupt
        done.append(len(batch))
        return measure(batch)

    options = {"experiment": "acceptance", "out_dir": tmp_path, "executor": "in-process", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, stop_once, **options)
    result = run_sweep(points, stop_once, **options)
    assert done == [len(first), None, len(second)]
    assert result.counts == {"ok": len(points)}


def test_the_estimate_counts_a_batch_once():
    points = acceptance.points("cpu", **GRID)
    more_seeds = acceptance.points("cpu", **GRID | {"seed": [0, 1, 2, 3]})
    one, two = (estimate.minutes("acceptance", batch) for batch in (points, more_seeds))
    assert one < two < 1.5 * one  # the weights are read once a pass, however many requests it has
    assert estimate.memory_bytes("acceptance", more_seeds) > estimate.memory_bytes("acceptance", points)
    with pytest.raises(InputError, match="seed"):
        acceptance.points("cpu", **GRID | {"seed": [1, 1]})
