"""Imposed acceptance: an instrument for costs. The drafts are real in cost and arbitrary in content."""

from __future__ import annotations

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
