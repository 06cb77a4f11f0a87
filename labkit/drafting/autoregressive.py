"""An autoregressive head: one layer on the target's hidden states, which drafts its k tokens one after the other.

EAGLE-3 (Li et al. 2025) and multi-token prediction layers differ in how a token and a state enter the layer and in
what is fed back; the drafting is the same. The entry of the head's cache at position i comes from the token at i + 1
and the target's states at i, so it holds one entry per token that the target has verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec
from labkit.drafting.checkpoint import Checkpoint
from labkit.drafting.head import Head, HeadDrafter, draft_uniforms
from labkit.drafting.tree import TreeShape, grow_tree
from labkit.errors import InputError
from labkit.shapes import MAX_Q_LEN
from labkit.speculation import Draft, Request

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.device_place import DevicePlace


_TREE_BACKEND = "sdpa_masked"
# Tokens, states, masks (`AttentionSpec.tree`) and depths of a tree's nodes so far -> `AutoregressiveHead.step` of them.
_RunLevels = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AutoregressiveHead(Head):
    """The weights of a head with one layer (or a few) that drafts token by token."""

    def __init__(self, checkpoint: Checkpoint):
        config, width = checkpoint.config, checkpoint.shape.hidden_size
        self._is_mtp = checkpoint.layout == "mtp"
        self._norm_output = self._is_mtp or bool(config.get("norm_output", False))
        self._norm_before_residual = bool(config.get("norm_before_residual", False))
        prefixes = ["layers.0."] if self._is_mtp else [f"layers.{i}." for i in range(checkpoint.shape.num_layers)]
        with torch.inference_mode():
            super().__init__(checkpoint, prefixes, qkv_width=None if self._is_mtp else 2 * width)
            layers, target_width = self.layers, self.target.shape.hidden_size
            states = 2 * width if self._is_mtp else len(self.taps) * target_width
            self._fc = self._linear(checkpoint("fc.weight", (width, states)))
            norm = {name: layers.norm(checkpoint(f"{name}.weight", (width,))) for name in self._norms()}
            self._norm = layers.norm(checkpoint("norm.weight", (width,)))
            self._token_norm, self._state_norm = (norm.get("enorm") or layers.first_norm), norm[self._norms()[-1]]
            self._head = self._output(checkpoint)
            table = checkpoint.optional("embed_tokens.weight", (self.target.shape.vocab_size, width))
            self._embedding = None if table is None else layers.load(table).to(layers.activation_dtype)
            self._load_tap_norms(checkpoint)

    def _norms(self) -> tuple[str, ...]:
        return ("enorm", "hnorm") if self._is_mtp else ("layers.0.hidden_norm",)

    def _load_tap_norms(self, checkpoint: Checkpoint) -> None:
        """Norms before the fusion: one per tap (fc_norm), or one over all of them (norm_before_fc)."""
        width, names = self.target.shape.hidden_size, ("low", "mid", "high")
        stored = [f"fc_norm.{i}.weight" for i in range(len(self.taps))]
        if f"aux_norm_{names[0]}.weight" in checkpoint.tensors:
            stored = [f"aux_norm_{name}.weight" for name in names]
        per_tap = stored if stored[0] in checkpoint.tensors else []
        self._tap_norms = [self.layers.norm(checkpoint(name, (width,))) for name in per_tap]
        whole = checkpoint.optional("input_norm.weight", (len(self.taps) * width,))
        self._input_norm = None if whole is None else self.layers.norm(whole)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states ``[batch_size, q_len, taps * hidden]`` as the head's input ``[.., hidden_size]``."""
        if self._is_mtp:
            return states
        if self._tap_norms:
            parts = states.chunk(len(self.taps), dim=-1)
            states = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self._tap_norms, parts, strict=True)], dim=-1
            )
        if self._input_norm is not None:
            states = self._input_norm(states)
        return self._fc(states.flatten(0, 1)).view(*states.shape[:2], -1)

    def step(
        self, token_ids: Tensor, states: Tensor, cache: PagedKVCache | DevicePlace, *, backend: str, **tree: Any
    ) -> Tensor:
        """One pass over ``[batch_size, q_len]`` tokens, each with its state; returns what is fed back in their place.

        tree : ``spec`` and ``depths`` of `labkit.models.layers.Layers.run`.
        """
        embedded = self.target.embed(token_ids) if self._embedding is None else self._embedding[token_ids]
        token_part, state_part = self._token_norm(embedded), self._state_norm(states)
        both = torch.cat([token_part, state_part], dim=-1)
        if self._is_mtp:
            hidden = self._fc(both.flatten(0, 1)).view(states.shape)
            self.layers.run(hidden, cache, backend=backend, **tree)
        else:
            hidden = (state_part if self._norm_before_residual else states).clone(memory_format=torch.contiguous_format)
            self.layers.run(hidden, cache, backend=backend, qkv_input=both, **tree)
        return self._norm(hidden) if self._norm_output else hidden

    def logits(self, fed_back: Tensor) -> Tensor:
        """float32 logits over the draft vocabulary ``[..., draft vocabulary]`` of what `step` returned."""
        normed = fed_back if self._norm_output else self._norm(fed_back)
        if self._head is None:
            return self.target.unembed(normed)
        return self._head(normed.reshape(-1, normed.shape[-1])).float().view(*normed.shape[:-1], -1)


class AutoregressiveDrafter(HeadDrafter):
    """Drafts k tokens one by one; those that the last verify kept are fed first (draft extend)."""

    _kind = AutoregressiveHead

    def start(self, requests: Sequence[Request]) -> None:
        """The head's own prefill over the prompts."""
        self._verified = {request.index: len(request.token_ids) - 1 for request in requests}
        super().start(requests)

    def _prefill(self, request: Request, cache: PagedKVCache, start: int, num_tokens: int) -> None:
        self._feed([request], cache, [start], num_tokens)

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """Up to k tokens per request [batch_size, k]."""
        k = min(k, self._room(requests))
        if k < 1:
            return Draft.from_lists([[] for _ in requests])
        with torch.inference_mode():
            cache, states = self._extend(requests)
            if self.tree is not None:
                first = self.head.logits(states[:, -1])
                draft = self._grow(self.tree, k, states, first, self._eager_levels(cache))
                return replace(draft, top_ids=self._top(first))
            drafts: list[Tensor] = []
            probs: list[Tensor] = []
            top: Tensor | None = None
            uniforms = draft_uniforms(requests, k, self.temperature, states.device)
            confident = torch.ones(len(requests), dtype=torch.int64, device=states.device)
            lengths = torch.zeros_like(confident)
            for place in range(k):
                logits = self.head.logits(states[:, -1])
                top = self._top(logits) if place == 0 else top
                if self.min_confidence:
                    confident = confident * (logits.softmax(dim=-1).amax(dim=-1) >= self.min_confidence)
                    if not confident.any():
                        break
                    lengths += confident
                token, prob = self._choose(logits, None if uniforms is None else uniforms[:, place])
                drafts.append(token[:, None])
                probs += [] if prob is None else [prob]
                if place + 1 < k:
                    states = self.head.step(drafts[-1], states[:, -1:], cache, backend=self.backend)
            if not drafts:
                return replace(Draft.from_lists([[] for _ in requests]), top_ids=top)
            distribution = torch.stack(probs, dim=1) if probs else None
            counts = lengths.tolist() if self.min_confidence else [k] * len(requests)
            return Draft(torch.cat(drafts, dim=1).clone(), counts, distribution, top_ids=top)

    def _grow(self, shape: TreeShape, depth: int, root: Tensor, first: Tensor, run: _RunLevels) -> Draft:
        """A tree behind the last token, of its state ``[batch_size, 1, hidden]`` and logits.

        Each level is one pass over all nodes that were grown on, since a mask spans the new tokens only. Nothing waits
        for the device.
        """
        if shape.top_k * (depth - 1) > MAX_Q_LEN:
            wanted = f"top_k * (k - 1) of at most {MAX_Q_LEN}"
            raise InputError(f"draft tree of {self.name}: wanted {wanted}, got {shape.top_k} * {depth - 1}")
        none = torch.empty(len(root), 0, dtype=torch.int64, device=root.device)
        tokens, masks, depths, entered, outputs = none, none, none, root[:, :0], root[:, :0]

        def expand(level: Tensor, above: Tensor) -> Tensor:
            nonlocal tokens, masks, depths, entered, outputs
            held, width = tokens.shape[1], level.shape[1]
            seen = torch.ones_like(level) << torch.arange(held, held + width, device=level.device)
            if held:
                states = outputs.gather(1, above[..., None].expand(-1, -1, root.shape[-1]))
                seen = seen | masks[:, -outputs.shape[1] :].gather(1, above)
            else:
                states = root.expand(-1, width, -1)
            tokens, masks = torch.cat([tokens, level], 1), torch.cat([masks, seen], 1)
            depths = torch.cat([depths, torch.full_like(level, held // width)], 1)  # levels are of one width
            entered = torch.cat([entered, states], 1)
            outputs = run(tokens, entered, masks, depths)[:, -width:]
            return self.head.logits(outputs).log_softmax(dim=-1)

        return grow_tree(shape, depth, first.log_softmax(dim=-1), expand, self.head.token_ids)

    def _eager_levels(self, cache: PagedKVCache) -> _RunLevels:
        ends = cache.context_lens

        def run(tokens: Tensor, entered: Tensor, masks: Tensor, depths: Tensor) -> Tensor:
            tree = {"spec": AttentionSpec(tree=masks), "depths": depths}
            passed = self.head.step(tokens, entered, cache, backend=_TREE_BACKEND, **tree)
            cache.truncate(ends)
            return passed

        return run

    def _extend(self, requests: Sequence[Request]) -> tuple[PagedKVCache, Tensor]:
        """Feed the tokens verified since; the cache's view and the last entries' states ``[.., 1, hidden]``."""
        cache = self._cache.rows([self._rows[request.index] for request in requests])
        ends = [len(request.token_ids) - 1 for request in requests]
        starts = [min(self._verified[request.index], end - 1) for request, end in zip(requests, ends, strict=True)]
        cache.truncate(starts)  # entries of drafted tokens go, kept or not: they came from the head's own states
        self._verified |= {request.index: end for request, end in zip(requests, ends, strict=True)}
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        return cache, self._feed(requests, cache, starts, longest)

    def _feed(self, requests: Sequence[Request], cache: PagedKVCache, starts: list[int], num_tokens: int) -> Tensor:
        """Entries from ``starts`` on, padded to ``num_tokens`` for all, which the cache forgets again."""
        tokens = [
            request.token_ids[start + 1 : start + 1 + num_tokens]
            for request, start in zip(requests, starts, strict=True)
        ]
        counts = [len(row) for row in tokens]
        padded = torch.tensor([row + [0] * (num_tokens - len(row)) for row in tokens], device=self.head.target.device)
        fused = self.head.fuse(self.target.states(requests, starts, num_tokens, self.head.taps))
        states = self.head.step(padded, fused, cache, backend=self.backend)
        cache.truncate([start + count for start, count in zip(starts, counts, strict=True)])
        last = torch.tensor(counts, device=states.device) - 1
        return states[torch.arange(len(requests), device=states.device), last][:, None]
