"""The draft/verify loop against plain decoding, on a toy target whose text is known."""

from functools import partial

import pytest
import torch

from labkit.accept import accept_forced, accept_greedy
from labkit.drafting.forced import (
    ForcedDrafter,
    fixed_acceptance,
    pattern_acceptance,
    rate_acceptance,
    rates_of_length,
)
from labkit.drafting.matches import record_matches, simulate
from labkit.drafting.ngram import NgramDrafter
from labkit.errors import InputError
from labkit.speculation import Draft, Request, speculate
from tests.toys import OracleDrafter, ToyTarget

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1, 2]]


def plain(target, prompts, num_tokens, **options):
    return speculate(target, None, prompts, num_speculative_tokens=0, max_new_tokens=num_tokens, **options)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("make", [lambda t: NgramDrafter(min_ngram=1), lambda t: OracleDrafter(t, (True, False) * 3)])
def test_speculative_greedy_equals_plain_greedy(k, make):
    target = ToyTarget()
    expected = plain(target, PROMPTS, 40)
    got = speculate(target, make(target), PROMPTS, num_speculative_tokens=k, max_new_tokens=40)
    assert [g.output_ids for g in got] == [g.output_ids for g in expected]
    assert all(len(g.output_ids) == 40 and g.finish_reason == "length" for g in got)


def test_each_request_advances_by_its_own_acceptance_and_leaves():
    target = ToyTarget()
    right, wrong = OracleDrafter(target, (True,) * 4), OracleDrafter(target, (False,) * 4)

    class Mixed:
        name = "mixed"

        def start(self, requests):
            pass

        def propose(self, requests, k):
            rows = [(right if r.index == 0 else wrong).propose([r], k).token_ids[0].tolist() for r in requests]
            return Draft.from_lists(rows)

    fast, slow = speculate(target, Mixed(), PROMPTS[:2], num_speculative_tokens=4, max_new_tokens=21)
    assert [step.num_accepted_tokens for step in fast.steps] == [4] * 4  # 1 + 4 x 5 tokens
    assert [step.num_accepted_tokens for step in slow.steps] == [0] * 20
    assert [step.batch_size for step in slow.steps] == [2] * 4 + [1] * 16
    assert fast.steps[1].context_len == len(PROMPTS[0]) + 1 + 5 - 1


@pytest.mark.parametrize("position", range(1, 9))
def test_stop_token_inside_an_accepted_block_ends_the_text_there(position):
    target = ToyTarget(seed=3)
    text = plain(target, [[1, 2]], 12)[0].output_ids
    stop = text[position]
    first = text.index(stop)
    (got,) = speculate(
        target,
        OracleDrafter(target, (True,) * 4),
        [[1, 2]],
        num_speculative_tokens=4,
        max_new_tokens=12,
        stop_token_ids=[stop],
    )
    assert got.output_ids == text[: first + 1]
    assert got.finish_reason == "stop"
    emitted = 1 + sum(step.num_accepted_tokens + 1 for step in got.steps)
    assert [step.truncated for step in got.steps[:-1]] == [False] * (len(got.steps) - 1)
    assert not got.steps or got.steps[-1].truncated == (emitted > first + 1)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7])
def test_length_limit_cuts_inside_a_block_and_is_counted_apart(max_new_tokens):
    target = ToyTarget()
    drafter = OracleDrafter(target, (True,) * 4)
    (got,) = speculate(target, drafter, [[1, 2]], num_speculative_tokens=4, max_new_tokens=max_new_tokens)
    assert got.output_ids == plain(target, [[1, 2]], max_new_tokens)[0].output_ids
    assert sum(step.truncated for step in got.steps) == (max_new_tokens not in (1, 6))
    assert all(1 + step.num_drafted_tokens <= max_new_tokens - 1 for step in got.steps)


@pytest.mark.parametrize("k", [1, 4, 200])
def test_drafts_end_where_the_output_must(k):
    target = ToyTarget()
    expected = plain(target, PROMPTS, 9)
    drafter = OracleDrafter(target, (True, False) * 100)
    got = speculate(target, drafter, PROMPTS, num_speculative_tokens=k, max_new_tokens=9)
    assert [g.output_ids for g in got] == [g.output_ids for g in expected]
    for generation in got:
        left = 8
        for step in generation.steps:
            assert step.num_drafted_tokens == min(k, left - 1)
            assert step.truncated == (left - 1 < k)
            left -= 1 + step.num_accepted_tokens
        assert left == 0


def test_a_run_can_end_after_some_steps():
    target = ToyTarget()
    drafter = ForcedDrafter(NgramDrafter(), accepted=fixed_acceptance(0), length=3)
    options = {"num_speculative_tokens": 3, "max_new_tokens": 6, "max_steps": 2, "accept": accept_forced}
    (got,) = speculate(target, drafter, [[1, 2]], **options)
    assert [(step.num_drafted_tokens, step.truncated) for step in got.steps] == [(3, False)] * 2
    assert got.finish_reason == "steps"


def test_ngram_takes_the_latest_longest_match_and_continues_into_its_own_draft():
    drafter = NgramDrafter(max_ngram=3, min_ngram=2)
    request = Request(0, [7, 8, 1, 9, 7, 8, 2, 5, 7, 8], 10)
    drafter.start([request])
    assert drafter.propose([request], 3).token_ids.tolist() == [[2, 5, 7]]
    request.token_ids.append(1)  # now 7 8 1 is known from the start of the text
    assert drafter.propose([request], 2).token_ids.tolist() == [[9, 7]]
    loop = Request(1, [3, 4, 3, 4], 4)
    drafter.start([loop])
    assert drafter.propose([loop], 5).token_ids.tolist() == [[3, 4, 3, 4, 3]]


def test_ngram_with_nothing_to_copy_drafts_nothing():
    drafter = NgramDrafter(max_ngram=4, min_ngram=3)
    requests = [Request(0, [1, 2], 2), Request(1, [1, 2, 3, 4, 5, 6], 6), Request(2, [5], 1)]
    drafter.start(requests)
    draft = drafter.propose(requests, 4)
    assert draft.lengths == [0, 0, 0]
    assert draft.token_ids.shape == (3, 0)


def test_ngram_index_extended_step_by_step_equals_one_built_at_once():
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 4, (200,), generator=generator).tolist()
    stepwise, request = NgramDrafter(), Request(0, text[:5], 5)
    stepwise.start([request])
    for end in range(5, 200, 7):
        request.token_ids[:] = text[:end]
        fresh = NgramDrafter()
        fresh.start([request])
        assert stepwise.propose([request], 6).token_ids.tolist() == fresh.propose([request], 6).token_ids.tolist()


def test_forced_drafter_imposes_length_and_acceptance():
    target = ToyTarget()
    drafter = ForcedDrafter(NgramDrafter(), accepted=fixed_acceptance(2), length=3)
    (got,) = speculate(target, drafter, [[1, 2]], num_speculative_tokens=4, max_new_tokens=31, accept=accept_forced)
    assert {(step.num_drafted_tokens, step.num_accepted_tokens) for step in got.steps if not step.truncated} == {(3, 2)}
    assert len(got.steps) == 10


def test_recorded_text_gives_the_counts_of_the_live_loop():
    target = ToyTarget(seed=5)
    text = plain(target, [[1, 2, 3]], 60)[0]
    for k in (1, 2, 4):
        live = speculate(target, NgramDrafter(), [[1, 2, 3]], num_speculative_tokens=k, max_new_tokens=60)[0]
        (matches,) = record_matches(NgramDrafter(), [text], 4)
        counts = [(s.context_len, s.num_drafted_tokens, s.num_accepted_tokens, s.truncated) for s in live.steps]
        simulated = simulate(matches, k, 60)
        assert [(s.context_len, s.num_drafted_tokens, s.num_accepted_tokens, s.truncated) for s in simulated] == counts


def test_accept_greedy_never_counts_padding():
    logits = torch.zeros(2, 3, 5)  # argmax 0 everywhere, and padding is 0
    accepted, added = accept_greedy(logits, Draft.from_lists([[0], [0, 0]])).tolist()
    assert accepted == [1, 2]
    assert added == [0, 0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"drafter": OracleDrafter(ToyTarget(), (True,) * 9), "num_speculative_tokens": 3}, "drafter oracle"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [[1], []]}, "prompts"),
    ],
)
def test_bad_arguments_are_named(options, name):
    arguments = {"prompts": [[1]], "num_speculative_tokens": 2, "max_new_tokens": 3} | options
    prompts, drafter = arguments.pop("prompts"), arguments.pop("drafter", NgramDrafter())
    if isinstance(drafter, OracleDrafter):  # one that does not care how many were asked for
        drafter.propose = partial(lambda propose, requests, k: propose(requests, 9), drafter.propose)
    with pytest.raises(ValueError, match=name):
        speculate(ToyTarget(), drafter, prompts, **arguments)


@pytest.mark.parametrize(
    "make",
    [
        partial(NgramDrafter, max_ngram=1, min_ngram=2),
        partial(fixed_acceptance, -1),
    ],
)
def test_drafters_refuse_bad_settings(make):
    with pytest.raises(InputError, match="wanted"):
        make()


def test_imposed_patterns_and_rates():
    pattern = pattern_acceptance([0, 3, 1])
    assert [pattern(2) for _ in range(4)] == [0, 2, 1, 0]
    draw = rate_acceptance([0.8, 0.6, 0.4, 0.2], torch.Generator().manual_seed(1))
    kept = torch.tensor([draw(4) for _ in range(20_000)])
    shares = [(kept >= place).float().mean().item() for place in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.012)


@pytest.mark.parametrize(("length", "k"), [(1.0, 4), (2.5, 4), (3.0, 3), (5.0, 4)])
def test_rates_of_a_mean_length_sum_to_it(length, k):
    rates = rates_of_length(length, k)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    assert rates == pytest.approx([rates[0] ** i for i in range(1, k + 1)])


def test_llama_cpp_prints_the_same_rates():
    """Its log for a length of 2.5 with 4 drafts: 0.644, 0.415, 0.268, 0.173."""
    assert rates_of_length(2.5, 4) == pytest.approx([0.644, 0.415, 0.268, 0.173], abs=6e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pattern_acceptance([]),
        lambda: pattern_acceptance([1, -1]),
        lambda: rate_acceptance([0.5, 0.6], torch.Generator()),
        lambda: rate_acceptance([1.2], torch.Generator()),
        lambda: rates_of_length(5.5, 4),
    ],
)
def test_imposed_acceptance_that_cannot_be(make):
    with pytest.raises(InputError, match="wanted"):
        make()
