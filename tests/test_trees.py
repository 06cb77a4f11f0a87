"""Draft trees: one pass over all nodes changes nothing but the speed, and sampling keeps the target's distribution."""

from collections import Counter
from functools import partial

import pytest
import torch

from labkit.accept import accept_sampling, sampling_probs, tree_rows
from labkit.attention.api import AttentionSpec, max_error, prepare
from labkit.attention.inputs import make_inputs, random_tree
from labkit.attention.reference import oracle
from labkit.drafting.tree import TreeShape, grow_tree
from labkit.errors import InputError
from labkit.models.target import ModelTarget
from labkit.models.weights import load_model
from labkit.shapes import AttentionShape
from labkit.speculation import Draft, speculate
from tests.test_accept_sampling import chi_square_p
from tests.test_speculation_model import assert_same_text, generate, tiny_prompts
from tests.toys import ToyTarget

VOCAB, DRAWS = 8, 100_000


class OracleTree:
    """Two children per node, of which one is what the target will say, on the left and on the right in turn."""

    name, num_draft_nodes = "oracle tree", 6

    def __init__(self, texts):
        self.texts = texts

    def start(self, requests):
        pass

    def propose(self, requests, k):
        tokens = []
        for request in requests:
            said = [*self.texts[request.index][len(request.token_ids) :], 0, 0, 0][:3]
            tokens.append(
                [
                    t
                    for i, x in enumerate(said)
                    for t in ((x, x + 1) if (len(request.token_ids) + i) % 2 else (x + 1, x))
                ]
            )
        parents = []
        for request in requests:
            right = [0 if (len(request.token_ids) + i) % 2 else 1 for i in range(3)]
            parents.append([-1, -1, right[0], right[0], 2 + right[1], 2 + right[1]])
        return Draft(torch.tensor(tokens), [6] * len(tokens), parents=torch.tensor(parents), depth=min(k, 3))


@pytest.mark.parametrize("backend", ["reference", "sdpa_masked"])
def test_accepted_paths_leave_the_cache_as_plain_decoding_does(backend):
    tiny = load_model("random:tiny", dtype="float32", device="cpu", seed=1)
    prompts = tiny_prompts(tiny)
    expected = generate(tiny, prompts, None, 0, 24, "sdpa")
    room = max(map(len, prompts)) + 40
    options = {"batch_size": len(prompts), "max_context_len": room, "page_size": 4, "taps": (0, 1)}
    target = ModelTarget(tiny, verify_backend=backend, **options)
    drafter = OracleTree([prompt + text for prompt, text in zip(prompts, expected, strict=True)])
    got = speculate(target, drafter, prompts, num_speculative_tokens=3, max_new_tokens=24)
    for prompt, one, other in zip(prompts, expected, got, strict=True):
        assert_same_text(tiny, prompt, one, other.output_ids)
    kept = [step.num_accepted_tokens for generation in got for step in generation.steps if not step.truncated]
    assert kept
    assert set(kept) == {3}
    plain = ModelTarget(tiny, verify_backend="sdpa", **options)
    plain_got = speculate(plain, None, prompts, num_speculative_tokens=0, max_new_tokens=24)
    for row, generation in enumerate(plain_got):
        end = len(generation.prompt_ids) + 20  # what both have verified
        torch.testing.assert_close(target._hidden[row, :end], plain._hidden[row, :end], atol=1e-4, rtol=1e-4)


def test_sdpa_masked_equals_the_oracle(generator):
    for lens in ((70, 70), (33, 5)):
        shape = AttentionShape(2, 9, lens, 6, 2, 64, q_dtype="float32")
        q, cache = make_inputs(
            shape, generator=generator, page_order="permuted" if lens[0] == lens[1] else "sequential"
        )
        for spec in (AttentionSpec(causal=False), AttentionSpec(tree=random_tree(shape, generator)), AttentionSpec()):
            call = prepare(q, cache, backend="sdpa_masked", spec=spec)
            call()
            wanted, _ = oracle(q, cache, 0, spec)
            assert max_error(call.out, wanted) < 1e-5


def test_masks_and_depths():
    masks, depths = tree_rows(torch.tensor([[-1, -1, 0, 2, 1]]))
    assert depths.tolist() == [[0, 1, 1, 2, 3, 2]]
    assert masks.tolist() == [[0b1, 0b11, 0b101, 0b1011, 0b11011, 0b100101]]
    deep, _ = tree_rows(torch.arange(-1, 62)[None])
    assert deep[0, 63].item() == -1  # all 64 bits


@pytest.mark.parametrize("token_ids", [None, torch.arange(VOCAB) * 2])
def test_the_most_probable_paths_are_drafted(token_ids):
    """Against all paths, enumerated; parents stand before their children."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, VOCAB, generator=generator).log_softmax(-1)
    first = torch.randn(1, VOCAB, generator=generator).log_softmax(-1)
    back = (lambda t: t) if token_ids is None else (lambda t: t // 2)
    draft = grow_tree(TreeShape(VOCAB, 12), 3, first, lambda tokens, _: table[back(tokens)], token_ids)
    paths = {(i,): first[0, i].item() for i in range(VOCAB)}
    for _ in range(2):
        paths |= {(*p, i): v + table[p[-1], i].item() for p, v in paths.items() for i in range(VOCAB)}
    best = sorted(paths, key=paths.get, reverse=True)[:12]
    found, tokens = [], [back(t) for t in draft.token_ids[0].tolist()]
    for token, parent in zip(tokens, draft.parents[0].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert sorted(found) == sorted(best)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_sampling_over_a_tree_keeps_the_distribution(temperature, top_p):
    generator = torch.Generator().manual_seed(3)
    start, table = torch.randn(VOCAB, generator=generator), torch.randn(VOCAB, VOCAB, generator=generator)
    tokens = torch.tensor([[1, 4, 6, 2, 5]])  # 1 and 4 below the root, 6 and 2 below 1, 5 below 4
    draft = Draft(
        tokens.expand(DRAWS, -1), [5] * DRAWS, parents=torch.tensor([[-1, -1, 0, 0, 1]]).expand(DRAWS, -1), depth=2
    )
    logits = torch.stack([start, *(table[token] for token in tokens[0])]).expand(DRAWS, -1, -1)
    accepted, added, *path = accept_sampling(logits, draft, temperature=temperature, top_p=top_p, generator=generator)
    first = torch.where(accepted > 0, tokens[0][path[0].clamp(min=0)], added)
    target = sampling_probs(start, temperature=temperature, top_p=top_p)
    assert chi_square_p(torch.bincount(first, minlength=VOCAB), target) > 1e-3
    for token in (1, 4):
        here = (accepted > 0) & (first == token)
        second = torch.where(accepted > 1, tokens[0][path[1].clamp(min=0)], added)[here]
        target = sampling_probs(table[token], temperature=temperature, top_p=top_p)
        assert not here.any() or chi_square_p(torch.bincount(second, minlength=VOCAB), target) > 1e-3


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_the_loop_samples_whole_texts_as_the_target_does(drafts, streams):
    """Pairs of tokens that come out of the loop, against the product of the target's probabilities."""
    target = ToyTarget(vocab_size=3, seed=5)

    class Drafter:
        name, num_draft_nodes = "fixed", None

        def start(self, requests):
            pass

        def propose(self, requests, k):
            count = len(requests)
            if drafts == "chain":
                return Draft.from_lists([[1, 2]] * count)
            parents = torch.tensor([[-1, -1, 0]]).expand(count, -1)
            return Draft(torch.tensor([[1, 0, 2]]).expand(count, -1), [3] * count, parents=parents, depth=2)

    rule = partial(accept_sampling, temperature=0.7, generator=None if streams else torch.Generator().manual_seed(1))
    run = {"num_speculative_tokens": 2, "max_new_tokens": 3, "accept": rule}
    run["generators"] = [torch.Generator().manual_seed(seed) for seed in range(6_000)] if streams else ()
    runs = speculate(target, Drafter(), [[0, 1]] * 6_000, **run)
    found = Counter(tuple(generation.output_ids) for generation in runs)
    probs = {}
    for a in range(3):
        for b in range(3):
            for c in range(3):
                tables = target.table[0, 1], target.table[1, a], target.table[a, b]
                p = [sampling_probs(t, temperature=0.7, top_p=1.0) for t in tables]
                probs[a, b, c] = (p[0][a] * p[1][b] * p[2][c]).item()
    order = sorted(probs)
    counts = torch.tensor([found[key] for key in order])
    assert chi_square_p(counts, torch.tensor([probs[key] for key in order])) > 1e-3


@pytest.mark.parametrize("position", range(1, 7))
def test_a_stop_inside_a_path_ends_the_text_there(position):
    target = ToyTarget(vocab_size=30, seed=3)
    plain = speculate(target, None, [[1, 2]], num_speculative_tokens=0, max_new_tokens=12)[0].output_ids
    stop = plain[position]
    drafter = OracleTree([[1, 2, *plain]])
    (got,) = speculate(target, drafter, [[1, 2]], num_speculative_tokens=3, max_new_tokens=12, stop_token_ids=[stop])
    assert got.output_ids == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize("size", [(0, 4), (2, 0), (2, 64)])
def test_tree_shapes_that_cannot_be(size):
    with pytest.raises(InputError, match="draft tree"):
        TreeShape(*size)
