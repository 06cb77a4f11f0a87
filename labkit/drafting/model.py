"""A smaller model as drafter, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.drafting.head import choose, draft_uniforms, top_ids
from labkit.speculation import Draft, Request

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder


class ModelDrafter:
    """Drafts k tokens one by one with any decoder; after a full acceptance the missed token is caught up first.

    temperature : 0 drafts greedily; above 0 it samples (with `Streams`), and the draft carries the distribution.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_context_len: int,
        backend: str = "sdpa",
        temperature: float = 0.0,
    ):
        self.name = decoder.name
        self.decoder, self.backend, self.max_context_len = decoder, backend, max_context_len
        self.temperature, self.num_top_ids = temperature, 0

    def start(self, requests: Sequence[Request]) -> None:
        """Prefill all but the last token of each request."""
        self._cache = self.decoder.new_cache(len(requests), self.max_context_len)
        self._rows = {request.index: row for row, request in enumerate(requests)}
        self._cached: list[list[int]] = [[] for _ in requests]
        for request in requests:
            self._catch_up(request, len(request.token_ids) - 1)

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """k tokens for every request [batch_size, k], fewer where the fullest row of the cache holds no more."""
        k = min(k, self._cache.max_context_len + 1 - max(len(request.token_ids) for request in requests))
        if k < 1:
            return Draft.from_lists([[] for _ in requests])
        for request in requests:
            self._catch_up(request, len(request.token_ids) - 1)
        rows = [self._rows[request.index] for request in requests]
        cache = self._cache.rows(rows)
        tokens = torch.tensor([[request.token_ids[-1]] for request in requests], device=self.decoder.device)
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        top: Tensor | None = None
        uniforms = draft_uniforms(requests, k, self.temperature, self.decoder.device)
        for place in range(k):
            logits = self.decoder.forward(tokens, cache, backend=self.backend, logits="last")[:, -1]
            top = top_ids(logits, self.num_top_ids) if place == 0 else top
            token, prob = choose(logits, self.temperature, None if uniforms is None else uniforms[:, place])
            tokens = token[:, None]
            drafts.append(tokens)
            probs += [] if prob is None else [prob]
        token_ids = torch.cat(drafts, dim=1)
        for row, request, drafted in zip(rows, requests, token_ids.tolist(), strict=True):
            self._cached[row] = [*request.token_ids, *drafted[:-1]]
        return Draft(token_ids, [k] * len(requests), torch.stack(probs, dim=1) if probs else None, top_ids=top)

    def _catch_up(self, request: Request, num_tokens: int) -> None:
        """Roll the cache back to what the request kept, then feed what it lacks up to ``num_tokens``."""
        row = self._rows[request.index]
        cached, wanted = self._cached[row], request.token_ids[:num_tokens]
        shared = min(len(cached), num_tokens)
        # Text only grows, so a wrong draft can only sit in the last k tokens: look from the back.
        start = max(0, request.num_prompt_tokens - 1)
        same = next((i for i in range(min(start, shared), shared) if cached[i] != wanted[i]), shared)
        one = self._cache.rows([row])
        one.truncate([same])
        if wanted[same:]:
            self.decoder.prefill(wanted[same:], self._cache, row, backend=self.backend)
        self._cached[row] = list(wanted)
