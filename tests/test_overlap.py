"""Overlap of the best tokens of drafter and target: planted ones, a model that drafts for itself, heads."""

from dataclasses import replace

import pytest
import torch

from labkit.accept import accept_greedy
from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.matches import Matches, record_matches
from labkit.drafting.model import ModelDrafter
from labkit.drafting.ngram import NgramDrafter
from labkit.drafting.overlap import TOP_K, TopTokens, overlap_columns
from labkit.drafting.tree import TreeShape
from labkit.models.target import ModelTarget
from labkit.models.weights import load_model
from labkit.speculation import Draft, Generation, Request, speculate
from tests.test_heads import TAPS, make_head
from tests.test_speculation_model import tiny_prompts
from tests.toys import OracleDrafter, ToyTarget

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9]]


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny", dtype="float32", device="cpu", seed=1)


class Branching(OracleDrafter):
    """Trees: a wrong token, the right one, and behind it the right one of the next place."""

    num_draft_nodes = 3

    def propose(self, requests, k):
        rows = []
        for request in requests:
            first = int(self.target._next(request.token_ids).argmax())
            second = int(self.target._next([*request.token_ids, first]).argmax())
            rows.append([(first + 1) % self.target.vocab_size, first, second])
        return replace(Draft.from_lists(rows), parents=torch.tensor([[-1, -1, 1]] * len(rows)), depth=2)


class Listing(NgramDrafter):
    """Its best tokens are those of the target, moved up by ``shift`` ids."""

    num_top_ids = 0

    def __init__(self, target, shift):
        super().__init__()
        self.target, self.shift = target, shift

    def propose(self, requests, k):
        logits = torch.stack([self.target._next(request.token_ids) for request in requests])
        best = (logits.topk(TOP_K).indices + self.shift) % self.target.vocab_size
        return replace(super().propose(requests, k), top_ids=best)


def best_by_hand(target, text):
    """Of every output token, from logits of the text before it."""
    whole = text.prompt_ids + text.output_ids
    ends = range(len(text.prompt_ids), len(whole))
    return [target._next(whole[:end]).topk(TOP_K).indices.tolist() for end in ends]


def drafters(target):
    right = (True, True, False, True)
    return {"chain": OracleDrafter(target, right), "tree": Branching(target, right), "ngram": NgramDrafter(min_ngram=1)}


@pytest.mark.parametrize("name", ["chain", "tree", "ngram", "plain"])
def test_the_targets_best_tokens_of_ragged_texts(name):
    """Requests that accept different numbers, stop inside a draft or at the first token, and leave the batch."""
    target, rule = ToyTarget(seed=2), TopTokens(accept_greedy)
    drafter = drafters(target).get(name)
    first = int(target._next(PROMPTS[2]).argmax())
    run = {"max_new_tokens": 30, "stop_token_ids": [first], "accept": rule}
    texts = speculate(target, drafter, PROMPTS, num_speculative_tokens=4 if drafter else 0, **run)
    assert len({len(text.output_ids) for text in texts}) > 1
    assert len(texts[2].output_ids) == 1
    assert rule.of(texts) == [best_by_hand(target, text) for text in texts]


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_planted_overlap(shift):
    target, rule = ToyTarget(vocab_size=23, seed=2), TopTokens(accept_greedy)
    run = {"num_speculative_tokens": 3, "max_new_tokens": 40, "stop_token_ids": [4]}
    texts = speculate(target, NgramDrafter(), PROMPTS, accept=rule, **run)
    matches = record_matches(Listing(target, shift), texts, 3)
    for match, text, best in zip(matches, texts, rule.of(texts), strict=True):
        got = overlap_columns(match, text, best)
        drafted = [{(token + shift) % 23 for token in tokens} for tokens in best_by_hand(target, text)[1:]]
        shared = [len(mine & set(other)) / 5 for mine, other in zip(drafted, best[1:], strict=True)]
        hits = [token in mine for mine, token in zip(drafted, text.output_ids[1:], strict=True)]
        assert got["top_k_overlap"] == pytest.approx(sum(shared) / len(shared))
        assert got["top_k_hit"] == pytest.approx(sum(hits) / len(hits))
        assert (got["top_k_overlap"] == 1) == (shift == 0)


def test_columns_of_a_text_counted_by_hand():
    text = Generation([9], [1, 2, 3, 4], "length", [])
    best = [[0] * 5, [2, 10, 11, 12, 13], [3, 10, 11, 12, 13], [4, 10, 11, 12, 13]]
    top = [[20, 2, 10, 21, 22], [20, 21, 22, 23, 24], []]  # no room to draft behind the last
    assert overlap_columns(Matches(1, 4, [1] * 3, [0] * 3, top), text, best) == {
        "top_k_overlap": (2 + 0) / 10,
        "top_k_hit": 0.5,
    }
    none = {"top_k_overlap": None, "top_k_hit": None}
    assert overlap_columns(Matches(1, 4, [1] * 3, [0] * 3, [[]] * 3), text, best) == none
    assert overlap_columns(Matches(1, 1, [], []), replace(text, output_ids=[1]), best[:1]) == none


def test_a_model_that_drafts_for_itself_overlaps_wholly(tiny):
    prompts = tiny_prompts(tiny)
    room, rule = max(map(len, prompts)) + 40, TopTokens(accept_greedy)
    target = ModelTarget(tiny, batch_size=len(prompts), max_context_len=room, verify_backend="sdpa")
    run = {"num_speculative_tokens": 3, "max_new_tokens": 12}
    texts = speculate(target, NgramDrafter(min_ngram=1), prompts, accept=rule, **run)
    other = load_model("random:tiny", dtype="float32", device="cpu", seed=2)
    for decoder, least, most in ((tiny, 0.99, 1.0), (other, 0.0, 0.2)):  # two near-equal tokens may change places
        drafter = ModelDrafter(decoder, max_context_len=room)
        drafter.num_top_ids = TOP_K
        matches = record_matches(drafter, texts, 1)
        found = [overlap_columns(*each) for each in zip(matches, texts, rule.of(texts), strict=True)]
        assert all(least <= got["top_k_overlap"] <= most for got in found)
        assert all(least <= got["top_k_hit"] <= most for got in found)
        assert all(
            len(match.top_ids) == len(match.matched) == len(text.output_ids) - 1
            for match, text in zip(matches, texts, strict=True)
        )


@pytest.mark.parametrize("kind", [AutoregressiveDrafter, BlockDrafter])
@pytest.mark.parametrize("options", [{}, {"tree": TreeShape(2, 4)}, {"min_confidence": 1.0}])
def test_heads_name_their_best_tokens_in_the_targets_vocabulary(tiny, tmp_path, kind, options):
    """Whatever the shape of the draft; a tree of depth 1 drafts the same tokens. None unless asked."""
    layout = "block" if kind is BlockDrafter else "autoregressive"
    _, _, vocabulary = make_head(tiny, layout, tmp_path)
    texts = tiny_prompts(tiny, (9, 14))
    target = ModelTarget(tiny, batch_size=2, max_context_len=80, verify_backend="sdpa_masked", taps=TAPS)
    requests = [Request(i, list(text), len(text)) for i, text in enumerate(texts)]
    target.start(requests)

    def propose(k, count, **shape):
        drafter = kind.from_folder(tmp_path, target, **shape)
        drafter.num_top_ids = count
        drafter.start(requests)
        return drafter.propose(requests, k)

    assert propose(3, 0, **options).top_ids is None
    got = propose(3, TOP_K, **options).top_ids
    flat = propose(1, 0, tree=TreeShape(TOP_K, TOP_K)).token_ids
    assert got.sort().values.tolist() == flat.sort().values.tolist()
    assert torch.equal(got[:, 0], propose(1, 0).token_ids[:, 0])
    assert set(got.flatten().tolist()) <= set(vocabulary.tolist())
    assert not set(got.flatten().tolist()) <= set(range(len(vocabulary)))
