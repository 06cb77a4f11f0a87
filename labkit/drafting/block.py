"""A block head (DFlash, 2026): all k tokens in one pass over the target's states, seeing each other.

The target's states of every verified token become keys and values of the head's layers. The block is the last token
and k masks through the target's embedding, and the rows of the masks go through the target's output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec
from labkit.drafting.checkpoint import Checkpoint, read_checkpoint
from labkit.drafting.tree import TreeShape, grow_tree
from labkit.errors import InputError
from labkit.models.layers import Layers
from labkit.speculation import Draft, Request, sampling_probs

if TYPE_CHECKING:
    from pathlib import Path

    from labkit.kv_cache import PagedKVCache
    from labkit.models.target import ModelTarget

_CHUNK = 1024
_WITHIN_BLOCK = AttentionSpec(causal=False)


class BlockHead:
    """The weights of a block head beside its target.

    block_size : rows of a block, the last verified token included: it drafts up to ``block_size - 1`` tokens.

    Raises InputError: as `read_checkpoint`; a mask token outside the vocabulary; a causal or sliding layer.
    """

    def __init__(self, checkpoint: Checkpoint):
        target, config, shape = checkpoint.target, checkpoint.config, checkpoint.shape
        self.name, self.taps, self.target, self.shape = checkpoint.name, checkpoint.taps, target, shape
        self.block_size = int(config.get("block_size", 16))
        mask = config.get("mask_token_id")
        vocab_size = target.shape.vocab_size
        if not isinstance(mask, int) or not 0 <= mask < vocab_size:
            wanted = f"a mask_token_id of target {target.name}, 0..{vocab_size - 1}"
            raise InputError(f"draft model {self.name}: wanted {wanted}, got {mask!r}")
        self.mask_token_id = mask
        if config.get("is_causal") or config.get("causal") or "sliding_attention" in (config.get("layer_types") or []):
            raise InputError(
                f"draft model {self.name}: only blocks with full attention can be run, got a causal or sliding one"
            )
        width = shape.hidden_size
        with torch.inference_mode():
            self.layers = layers = Layers(
                shape,
                checkpoint,
                [f"layers.{i}." for i in range(shape.num_layers)],
                dtype=target.dtype,
                device=target.device,
                rope_scaling=checkpoint.rope_scaling,
                linear_backend=target.linear_backend,
            )
            self._fc = layers.linear(
                layers.load(checkpoint("fc.weight", (width, len(self.taps) * target.shape.hidden_size)))
            )
            self._hidden_norm = layers.norm(checkpoint("hidden_norm.weight", (width,)))
            self._norm = layers.norm(checkpoint("norm.weight", (width,)))
            self.token_ids = checkpoint.vocabulary()
            head = None
            if self.token_ids is not None:
                self.token_ids = self.token_ids.to(target.device)
                head = checkpoint.optional("lm_head.weight", (len(self.token_ids), width))
                head = target.head_weight[self.token_ids] if head is None else layers.load(head)
            self._head = None if head is None else layers.linear(head)

    def inject(self, states: Tensor, cache: PagedKVCache) -> None:
        """Cache what the layers make of the target's states ``[batch_size, q_len, taps * target hidden]``."""
        context = self._hidden_norm(self._fc(states.flatten(0, 1)))
        self.layers.inject(context.view(*states.shape[:2], -1), cache)

    def block_logits(self, last_token_ids: Tensor, cache: PagedKVCache, *, backend: str) -> Tensor:
        """float32 logits ``[batch_size, block_size - 1, draft vocabulary]`` of the masks behind the last tokens.

        The cache keeps the block's entries; its caller drops them.
        """
        masks = last_token_ids.new_full((len(last_token_ids), self.block_size - 1), self.mask_token_id)
        hidden = self.target.embed(torch.cat([last_token_ids[:, None], masks], dim=1))
        self.layers.run(hidden, cache, backend=backend, spec=_WITHIN_BLOCK)
        rows = self._norm(hidden[:, 1:].flatten(0, 1))
        logits = self.target.unembed(rows) if self._head is None else self._head(rows).float()
        return logits.view(len(last_token_ids), self.block_size - 1, -1)


class BlockDrafter:
    """Drafts up to ``block_size - 1`` tokens per request in one pass, each from its own distribution.

    temperature, generator : as `AutoregressiveDrafter`.
    min_confidence : cut the draft before the first token whose distribution has no probability of at least this.
    tree : draft trees of depth k, of the best tokens of each place.
    """

    def __init__(
        self,
        head: BlockHead,
        target: ModelTarget,
        *,
        backend: str = "sdpa_masked",
        temperature: float = 0.0,
        min_confidence: float = 0.0,
        tree: TreeShape | None = None,
        generator: torch.Generator | None = None,
    ):
        self.name, self.head, self.target, self.backend = head.name, head, target, backend
        self.temperature, self.min_confidence, self.generator = temperature, min_confidence, generator
        self.tree, self.num_draft_nodes = tree, tree and tree.num_draft_nodes

    @classmethod
    def from_folder(cls, folder: str | Path, target: ModelTarget, **options: object) -> BlockDrafter:
        """From a checkpoint in the DFlash layout. Raises InputError: as `BlockHead`."""
        return cls(BlockHead(read_checkpoint(folder, target.decoder)), target, **options)  # type: ignore[arg-type]

    def start(self, requests: Sequence[Request]) -> None:
        """Cache the prompts' states."""
        room = min(self.target.cache.max_context_len, self.head.shape.max_context_len)
        self._cache = self.head.layers.new_cache(len(requests), room + 64)
        self._rows = {request.index: row for row, request in enumerate(requests)}
        with torch.inference_mode():
            for row, request in enumerate(requests):
                for start in range(0, len(request.token_ids) - 1, _CHUNK):
                    stop = min(start + _CHUNK, len(request.token_ids) - 1)
                    states = self.target.states([request], [start], stop - start, self.head.taps)
                    self.head.inject(states, self._cache.rows([row]))

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """k tokens per request [batch_size, k], fewer where the block or the head's positions end.

        The whole block is run whatever k is, so the drafts for a smaller k are those for a larger one, cut.
        """
        k = min(k, self.head.block_size - 1)
        k = min(k, self.head.shape.max_context_len - max(len(request.token_ids) for request in requests))
        if k < 1:
            return Draft.from_lists([[] for _ in requests])
        with torch.inference_mode():
            logits = self._logits(requests)[:, :k]
            if self.tree is not None:
                places = iter(logits[:, 1:].log_softmax(dim=-1).split(1, dim=1))
                first = logits[:, 0].log_softmax(dim=-1)
                expand = lambda level, _: next(places).expand(-1, level.shape[1], -1)  # noqa: E731
                return grow_tree(self.tree, k, first, expand, self.head.token_ids)
            confidence = logits.softmax(dim=-1).amax(dim=-1)
            lengths = (confidence >= self.min_confidence).long().cumprod(dim=1).sum(dim=1)
            ids, vocab_size = self.head.token_ids, self.head.target.shape.vocab_size
            if self.temperature == 0:
                best = logits.argmax(dim=-1)
                return Draft((best if ids is None else ids[best]).clone(), lengths.tolist())
            probs = sampling_probs(logits, temperature=self.temperature, top_p=1.0)
            if ids is not None:
                probs = probs.new_zeros(*probs.shape[:2], vocab_size).index_copy_(2, ids, probs)
            drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=self.generator)
            return Draft(drawn.view(probs.shape[:2]).clone(), lengths.tolist(), probs.clone())

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
