"""Speculative sampling leaves the target's distribution as it is: chi-square on 100,000 draws of a toy vocabulary."""

import pytest
import torch
from scipy import stats

from labkit.accept import accept_sampling, sampling_probs
from labkit.speculation import Draft

VOCAB, DRAWS = 8, 100_000


def first_token_counts(logits: torch.Tensor, draft: Draft, result: torch.Tensor) -> torch.Tensor:
    """Counts of the first emitted token of each request: its first draft when kept, else the added token."""
    accepted, added = result
    if draft.token_ids.shape[1] == 0:
        return torch.bincount(added, minlength=VOCAB)
    return torch.bincount(torch.where(accepted > 0, draft.token_ids[:, 0], added), minlength=VOCAB)


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    possible = probs > 0
    assert counts[~possible].sum() == 0, "a token outside top-p came out"
    expected = probs[possible].double() / probs[possible].double().sum() * counts.sum()
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
@pytest.mark.parametrize("kind", ["certain", "sampled", "none"])
def test_first_and_second_token_follow_the_target(temperature, top_p, kind):
    generator = torch.Generator().manual_seed(17)
    table = torch.randn(VOCAB, VOCAB, generator=generator)  # logits after token i
    start = torch.randn(VOCAB, generator=generator)
    draft_probs = torch.softmax(torch.randn(VOCAB, generator=generator), 0)
    if kind == "certain":
        tokens, probs = torch.full((DRAWS, 2), 3), None
    elif kind == "sampled":
        tokens = torch.multinomial(draft_probs, 2 * DRAWS, replacement=True, generator=generator).view(DRAWS, 2)
        probs = draft_probs.expand(DRAWS, 2, VOCAB)
    else:
        tokens, probs = torch.empty(DRAWS, 0, dtype=torch.int64), None
    k = tokens.shape[1]
    logits = torch.stack([start.expand(DRAWS, VOCAB), *[table[tokens[:, i]] for i in range(k)]], dim=1)
    draft = Draft(tokens, [k] * DRAWS, probs)
    result = accept_sampling(logits, draft, temperature=temperature, top_p=top_p, generator=generator)

    target = sampling_probs(start, temperature=temperature, top_p=top_p)
    assert chi_square_p(first_token_counts(logits, draft, result), target) > 1e-3

    accepted, added = result
    for first in range(VOCAB if k else 0):  # given an accepted first draft, the second token follows table[first]
        chosen = (accepted >= 1) & (tokens[:, 0] == first)
        if chosen.sum() > 500:
            second = torch.where(accepted >= 2, tokens[:, 1], added)[chosen]
            target = sampling_probs(table[first], temperature=temperature, top_p=top_p)
            assert chi_square_p(torch.bincount(second, minlength=VOCAB), target) > 1e-4


def test_a_perfect_drafter_is_never_rejected():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, VOCAB, generator=generator).expand(1000, 3, VOCAB)
    probs = sampling_probs(logits[:, :2], temperature=0.7, top_p=1.0)
    tokens = torch.multinomial(probs[0, 0], 2000, replacement=True, generator=generator).view(1000, 2)
    draft = Draft(tokens, [2] * 1000, probs)
    accepted, _ = accept_sampling(logits, draft, temperature=0.7, generator=generator)
    assert (accepted == 2).all()


def test_draft_lengths_differ_within_a_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(3, 3, VOCAB)
    logits[..., 0] = 50.0
    draft = Draft.from_lists([[], [0], [0, 0]])
    accepted, added = accept_sampling(logits, draft, generator=generator).tolist()
    assert accepted == [0, 1, 2]
    assert added == [0, 0, 0]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling_settings_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sampling_probs(torch.zeros(4), **({"temperature": 1.0, "top_p": 1.0} | options))
