"""Imposed acceptance: an instrument for costs. The drafts are real in cost and arbitrary in content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from labkit.errors import InputError
from labkit.speculation import Draft, Drafter, Request


class ForcedDrafter:
    """Proposes exactly ``length`` tokens (k when None) and says how many of them `accept_forced` is to keep.

    inner : its ``propose`` runs at full cost and its tokens are used first; None drafts for free.
    accepted : called once per request and step with the draft length; returns how many to keep.
    """

    def __init__(self, inner: Drafter | None, *, accepted: Callable[[int], int], length: int | None = None):
        self.name = inner.name if inner else "forced"
        self.inner, self.accepted, self.length = inner, accepted, length

    def start(self, requests: Sequence[Request]) -> None:
        """Prefill of the inner drafter."""
        if self.inner:
            self.inner.start(requests)

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """The inner draft, cut or padded to the wanted length."""
        length = k if self.length is None else self.length
        draft = self.inner.propose(requests, k) if self.inner else Draft.from_lists([[] for _ in requests])
        tokens = torch.zeros(len(requests), length, dtype=torch.int64)
        shared = min(length, draft.token_ids.shape[1])
        tokens[:, :shared] = draft.token_ids[:, :shared]
        kept = [self.accepted(length) for _ in requests]
        lengths = [length] * len(requests)
        return replace(
            draft, token_ids=tokens, lengths=lengths, probs=None, forced_accepted=kept, parents=None, depth=0
        )


def fixed_acceptance(num_accepted: int) -> Callable[[int], int]:
    """Keep the same number each step (at most the draft): 0 is the all-reject measurement."""
    if num_accepted < 0:
        raise InputError(f"accepted: wanted 0 or more, got {num_accepted}")
    return lambda length: min(num_accepted, length)


def pattern_acceptance(pattern: Sequence[int]) -> Callable[[int], int]:
    """Keep these numbers of drafts in turn, over and over, each at most the draft.

    Raises InputError: no number, or one below 0.
    """
    if not pattern or min(pattern) < 0:
        raise InputError(f"accepted: wanted numbers of 0 or more, got {list(pattern)}")
    turns = itertools.cycle(pattern)
    return lambda length: min(next(turns), length)


def rate_acceptance(rates: Sequence[float], generator: torch.Generator) -> Callable[[int], int]:
    """Keep draft i with the unconditional rate ``rates[i - 1]``: as many as rates exceed one draw of 0..1.

    Raises InputError: a rate outside 0..1, or one above the rate before.
    """
    if any(not 0 <= rate <= 1 for rate in rates) or any(b > a for a, b in itertools.pairwise(rates)):
        raise InputError(f"rates: wanted numbers in 0..1 that do not rise, got {list(rates)}")

    def accepted(length: int) -> int:
        draw = torch.rand((), generator=generator).item()
        return sum(draw < rate for rate in rates[:length])

    return accepted


def rates_of_length(mean_acceptance_length: float, k: int) -> list[float]:
    """Unconditional rates p, p^2, .., p^k whose sum is the length less the bonus token (llama.cpp's synthetic length).

    Raises InputError: a length outside 1..k+1.
    """
    if not 1 <= mean_acceptance_length <= k + 1:
        raise InputError(f"mean_acceptance_length: wanted 1 to {k + 1} with k = {k}, got {mean_acceptance_length:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(1, k + 1)) < mean_acceptance_length - 1 else (low, p)
    return [high**i for i in range(1, k + 1)]
