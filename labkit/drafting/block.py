"""A block head (DFlash, 2026): all k tokens in one pass over the target's states, seeing each other.

The target's states of every verified token become keys and values of the head's layers. The block is the last token
and k masks through the target's embedding, and the rows of the masks go through the target's output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec
from labkit.drafting.checkpoint import Checkpoint
from labkit.drafting.head import Head, HeadDrafter, draft_uniforms
from labkit.drafting.tree import TreeShape, grow_tree
from labkit.errors import InputError
from labkit.speculation import Draft, Request

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.device_place import DevicePlace

_WITHIN_BLOCK = AttentionSpec(causal=False)


class BlockHead(Head):
    """The weights of a block head beside its target.

    block_size : rows of a block, the last verified token included: it drafts up to ``block_size - 1`` tokens.

    Raises InputError: as `read_checkpoint`; a mask token outside the vocabulary; a causal or sliding layer.
    """

    def __init__(self, checkpoint: Checkpoint):
        config, width, vocab_size = checkpoint.config, checkpoint.shape.hidden_size, checkpoint.target.shape.vocab_size
        self.block_size = int(config.get("block_size", 16))
        mask = config.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < vocab_size:
            wanted = f"a mask_token_id of target {checkpoint.target.name}, 0..{vocab_size - 1}"
            raise InputError(f"draft model {checkpoint.name}: wanted {wanted}, got {mask!r}")
        self.mask_token_id = mask
        if config.get("is_causal") or config.get("causal") or "sliding_attention" in (config.get("layer_types") or []):
            wanted = "only blocks with full attention can be run, got a causal or sliding one"
            raise InputError(f"draft model {checkpoint.name}: {wanted}")
        with torch.inference_mode():
            super().__init__(checkpoint, [f"layers.{i}." for i in range(checkpoint.shape.num_layers)])
            states = len(self.taps) * self.target.shape.hidden_size
            self._fc = self._linear(checkpoint("fc.weight", (width, states)))
            self._hidden_norm = self.layers.norm(checkpoint("hidden_norm.weight", (width,)))
            self._norm = self.layers.norm(checkpoint("norm.weight", (width,)))
            self._head = None if self.token_ids is None else self._output(checkpoint)

    def inject(self, states: Tensor, cache: PagedKVCache | DevicePlace) -> None:
        """Cache what the layers make of the target's states ``[batch_size, q_len, taps * target hidden]``."""
        context = self._hidden_norm(self._fc(states.flatten(0, 1)))
        self.layers.inject(context.view(*states.shape[:2], -1), cache)

    def block_logits(self, last_token_ids: Tensor, cache: PagedKVCache | DevicePlace, *, backend: str) -> Tensor:
        """float32 logits ``[batch_size, block_size - 1, draft vocabulary]`` of the masks behind the last tokens.

        The cache keeps the block's entries; its caller drops them.
        """
        masks = last_token_ids.new_full((len(last_token_ids), self.block_size - 1), self.mask_token_id)
        hidden = self.target.embed(torch.cat([last_token_ids[:, None], masks], dim=1))
        self.layers.run(hidden, cache, backend=backend, spec=_WITHIN_BLOCK)
        rows = self._norm(hidden[:, 1:].flatten(0, 1))
        logits = self.target.unembed(rows) if self._head is None else self._head(rows).float()
        return logits.view(len(last_token_ids), self.block_size - 1, -1)


class BlockDrafter(HeadDrafter):
    """Drafts up to ``block_size - 1`` tokens per request in one pass, each from its own distribution.

    A draft ends before the first token that is not confident; a tree is made of the best tokens of each place.
    """

    _kind, _backend = BlockHead, "sdpa_masked"

    def _prefill(self, request: Request, cache: PagedKVCache, start: int, num_tokens: int) -> None:
        self.head.inject(self.target.states([request], [start], num_tokens, self.head.taps), cache)

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """k tokens per request [batch_size, k], fewer where the block or the head's positions end.

        The whole block is run whatever k is, so the drafts for a smaller k are those for a larger one, cut.
        """
        k = min(k, self.head.block_size - 1, self._room(requests))
        if k < 1:
            return Draft.from_lists([[] for _ in requests])
        with torch.inference_mode():
            logits = self._logits(requests)[:, :k]
            top = self._top(logits[:, 0])
            if self.tree is not None:
                return replace(self._grow(self.tree, logits), top_ids=top)
            lengths = [k] * len(requests)
            if self.min_confidence:
                confident = logits.softmax(dim=-1).amax(dim=-1) >= self.min_confidence
                lengths = confident.long().cumprod(dim=1).sum(dim=1).tolist()
            tokens, probs = self._choose(logits, draft_uniforms(requests, k, self.temperature, logits.device))
            return Draft(tokens.clone(), lengths, None if probs is None else probs.clone(), top_ids=top)

    def _grow(self, shape: TreeShape, logits: Tensor) -> Draft:
        """A tree of the best tokens at each place of ``[batch_size, depth, draft vocabulary]``."""
        first, *behind = logits.log_softmax(dim=-1).split(1, dim=1)
        places = iter(behind)
        expand = lambda level, _: next(places).expand(-1, level.shape[1], -1)  # noqa: E731
        return grow_tree(shape, logits.shape[1], first[:, 0], expand, self.head.token_ids)

    def _logits(self, requests: Sequence[Request]) -> Tensor:
        """Cache the states of the tokens that were verified since, then run the block."""
        cache = self._cache.rows([self._rows[request.index] for request in requests])
        ends = [len(request.token_ids) - 1 for request in requests]
        if missing := max(end - held for held, end in zip(cache.context_lens, ends, strict=True)):
            self.head.inject(self.target.states(requests, cache.context_lens, missing, self.head.taps), cache)
            cache.truncate(ends)
        last = torch.tensor([request.token_ids[-1] for request in requests], device=self.head.target.device)
        logits = self.head.block_logits(last, cache, backend=self.backend)
        cache.truncate(ends)
        return logits
