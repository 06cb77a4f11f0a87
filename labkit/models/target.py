"""A decoder and its cache as the target of the draft/verify loop, with one attention backend per role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.accept import tree_rows
from labkit.attention.api import AttentionSpec
from labkit.errors import InputError
from labkit.models.layers import Taps
from labkit.speculation import Draft, Request

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.decoder import Decoder


class ModelTarget:
    """Row i of the cache belongs to the i-th prompt of a run; finished requests leave the batch, not the cache.

    The cache outlives a run: the next one reuses the longest common prefix of the row's tokens, so several runs
    from one prompt (other backends, other drafters) prefill it once.

    verify_backend, decode_backend : attention backend of speculative passes and of plain steps.
    taps : layers whose hidden states are kept beside the cache, for drafters that read them (`states`).
    writes_states : whether passes behind the prefill keep them; to be set between runs.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        batch_size: int,
        max_context_len: int,
        verify_backend: str,
        decode_backend: str | None = None,
        page_size: int = 16,
        taps: Sequence[int] = (),
    ):
        limit = decoder.shape.max_context_len
        if max_context_len > limit:
            raise InputError(f"max_context_len: {decoder.name} holds at most {limit} positions, got {max_context_len}")
        self.decoder = decoder
        self.verify_backend, self.decode_backend = verify_backend, decode_backend or verify_backend
        self.cache = decoder.new_cache(batch_size, max_context_len, page_size=page_size)
        self._cached: list[list[int]] = [[] for _ in range(batch_size)]
        self._row_of: dict[int, int] = {}
        self._views: dict[tuple[int, ...], PagedKVCache] = {}
        self.taps = tuple(sorted(set(taps)))
        self._width, self.writes_states = decoder.shape.hidden_size, bool(self.taps)
        states = (batch_size, self.cache.max_context_len if taps else 0, len(self.taps) * self._width)
        self._hidden = torch.empty(states, dtype=decoder.activation_dtype, device=decoder.device)

    @property
    def max_context_len(self) -> int:
        """Tokens per request that both the cache and the model's positions hold."""
        return min(self.cache.max_context_len, self.decoder.shape.max_context_len)

    def start(self, requests: Sequence[Request]) -> Tensor:
        """Prefill what the cache does not hold yet; logits of each last token [batch_size, vocab_size].

        A prompt that stands in the batch several times is prefilled once.

        Raises ValueError: more requests than the cache has rows.
        """
        if len(requests) > self.cache.batch_size:
            raise ValueError(f"prompts: wanted at most batch_size={self.cache.batch_size}, got {len(requests)}")
        self._row_of = {request.index: row for row, request in enumerate(requests)}
        firsts: dict[tuple[int, ...], int] = {}
        logits: list[Tensor] = []
        for row, request in enumerate(requests):
            ids, first = request.token_ids, firsts.setdefault(tuple(request.token_ids), row)
            logits.append(self._prefill(row, ids) if first == row else self._repeat(row, first, ids, logits[first]))
        return torch.stack(logits)

    def verify(self, requests: Sequence[Request], draft: Draft) -> Tensor:
        """Score each last token and its drafts in one pass [batch_size, q_len, vocab_size]."""
        last = torch.tensor([[request.token_ids[-1]] for request in requests])
        device = draft.token_ids.device  # one copy to the model's device where the draft was made on the host
        tokens = torch.cat([last.to(device, non_blocking=True), draft.token_ids], dim=1).to(self.decoder.device)
        if draft.parents is None:
            return self._forward(requests, tokens, self.verify_backend)
        masks, depths = tree_rows(draft.parents)
        tree = {"spec": AttentionSpec(tree=masks.to(tokens.device)), "depths": depths.to(tokens.device)}
        return self._forward(requests, tokens, self.verify_backend, **tree)

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """A plain step [batch_size, 1, vocab_size]."""
        tokens = torch.tensor([[request.token_ids[-1]] for request in requests], device=self.decoder.device)
        return self._forward(requests, tokens, self.decode_backend)

    def keep(self, requests: Sequence[Request], nodes: Sequence[Sequence[int]]) -> None:
        """Move what the cache (and the states) hold of these nodes of a tree behind the last token, in this order."""
        for request, chosen in zip(requests, nodes, strict=True):
            row, after = self._row_of[request.index], len(request.token_ids)
            sources = [after + node for node in chosen]
            self._view((row,)).move(sources, after)
            if self.writes_states and sources != list(range(after, after + len(sources))):
                self._hidden[row, after : after + len(sources)] = self._hidden[row, sources]

    def states(self, requests: Sequence[Request], start: Sequence[int], num_tokens: int, taps: Sequence[int]) -> Tensor:
        """Hidden states ``[batch_size, num_tokens, len(taps) * hidden_size]`` of each request from ``start`` on.

        Only those of tokens in the cache mean anything. Raises ValueError: a layer that is not tapped.
        """
        if missing := [tap for tap in taps if tap not in self.taps]:
            raise ValueError(f"taps: wanted some of {self.taps}, got {missing[0]}")
        if len(requests) == 1 and tuple(taps) == self.taps:  # nothing is gathered, nothing copied to the device
            return self._hidden[self._row_of[requests[0].index], start[0] : start[0] + num_tokens][None]
        rows = torch.tensor([self._row_of[request.index] for request in requests], device=self.decoder.device)
        places = torch.tensor(start, device=self.decoder.device)[:, None]
        places = places + torch.arange(num_tokens, device=self.decoder.device)
        found = self._hidden[rows[:, None], places.clamp(max=self._hidden.shape[1] - 1)]
        columns = [self.taps.index(tap) * self._width for tap in taps]
        return torch.cat([found[..., column : column + self._width] for column in columns], dim=-1)

    def adopt(self, other: ModelTarget, token_ids: Sequence[int]) -> None:
        """Copy the keys and values of the longest prefix of ``token_ids`` that ``other`` holds into this empty cache.

        Both hold one request of the same decoder in pages that follow each other. A shared prefix need not be prefilled
        twice.
        """
        held = min(len(token_ids) - 1, other.cache.context_lens[0], self.cache.max_context_len)
        known = other._cached[0]
        shared = next((i for i in range(held) if known[i] != token_ids[i]), held)
        num_pages = -(-shared // self.cache.page_size)
        self.cache.k[:, :num_pages] = other.cache.k[:, :num_pages]
        self.cache.v[:, :num_pages] = other.cache.v[:, :num_pages]
        if self.taps:
            self._hidden[0, :shared] = other._hidden[0, :shared]
        self.cache.advance(shared)
        self._cached[0] = list(token_ids[:shared])

    def _rolled_back(self, requests: Sequence[Request]) -> tuple[tuple[int, ...], PagedKVCache]:
        """The rows of these requests, and a view on them that holds all but the last token of each."""
        rows = tuple(self._row_of[request.index] for request in requests)
        active = self._view(rows)
        active.truncate([len(request.token_ids) - 1 for request in requests])
        for row, request in zip(rows, requests, strict=True):
            self._cached[row] = request.token_ids  # the same list: it grows with what the loop keeps
        return rows, active

    def _forward(self, requests: Sequence[Request], tokens: Tensor, backend: str, **tree: Any) -> Tensor:
        rows, active = self._rolled_back(requests)
        if not self.writes_states:
            return self.decoder.forward(tokens, active, backend=backend, logits="all", **tree)
        states = self._hidden.new_empty(*tokens.shape, self._hidden.shape[2])
        places = torch.tensor(active.context_lens, device=self.decoder.device)[:, None]
        places = places + torch.arange(tokens.shape[1], device=self.decoder.device)
        logits = self.decoder.forward(
            tokens, active, backend=backend, logits="all", taps=Taps(self.taps, states), **tree
        )
        self._hidden[torch.tensor(rows, device=self.decoder.device)[:, None], places] = states
        return logits

    def _view(self, rows: tuple[int, ...]) -> PagedKVCache:
        if rows not in self._views:
            self._views[rows] = self.cache.rows(rows)
        return self._views[rows]

    def _prefill(self, row: int, token_ids: list[int]) -> Tensor:
        held = min(len(self._cached[row]), self.cache.context_lens[row], len(token_ids) - 1)
        shared = next((i for i in range(held) if self._cached[row][i] != token_ids[i]), held)
        self._view((row,)).truncate([shared])
        self._cached[row] = token_ids
        taps = Taps(self.taps, self._hidden[row : row + 1, shared : len(token_ids)]) if self.taps else None
        return self.decoder.prefill(token_ids[shared:], self.cache, row, backend=self.verify_backend, taps=taps)

    def _repeat(self, row: int, first: int, token_ids: list[int], logits: Tensor) -> Tensor:
        """The prefill of a row whose prompt an earlier row has just been given: a copy."""
        self.cache.repeat(first, row)
        self._cached[row] = token_ids
        if self.taps:
            self._hidden[row, : len(token_ids)] = self._hidden[first, : len(token_ids)]
        return logits


class FilledTarget(ModelTarget):
    """Skips the prefill: the cache is filled with seeded random keys and values up to the prompt's length.

    For costs at any context at once. The weights, shapes and bytes of every later pass are the real ones; the
    tokens are not, so acceptance must be imposed (`accept_forced`).
    """

    def __init__(self, decoder: Decoder, *, generator: torch.Generator, **options: Any):
        super().__init__(decoder, **options)
        self._generator = generator

    def _prefill(self, row: int, token_ids: list[int]) -> Tensor:
        one = self._view((row,))
        if self.cache.context_lens[row] < len(token_ids):
            one.fill_random(len(token_ids), self._generator)
            # Heads read these: values of a plausible size, as the keys and values are.
            self._hidden[row].normal_(generator=self._generator)
        one.truncate([len(token_ids)])
        return torch.zeros(self.decoder.shape.vocab_size, device=self.decoder.device)

    def _repeat(self, row: int, first: int, token_ids: list[int], logits: Tensor) -> Tensor:
        return self._prefill(row, token_ids)  # every row keeps what it was filled with once
