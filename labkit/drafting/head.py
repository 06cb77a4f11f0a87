"""What heads that read a target's hidden states share, and how every drafter with a model picks its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from labkit.accept import draw, sampling_probs
from labkit.drafting.checkpoint import Checkpoint, read_checkpoint
from labkit.models.layers import Layers
from labkit.shapes import MAX_Q_LEN
from labkit.speculation import Request

if TYPE_CHECKING:
    from pathlib import Path

    from labkit.drafting.tree import TreeShape
    from labkit.kv_cache import PagedKVCache
    from labkit.models.target import ModelTarget

_CHUNK = 1024


class Head:
    """The layers of a head beside its target, whose embedding and output head it borrows where it has none.

    taps : layers of the target that it reads.
    token_ids : int64 ``[draft vocabulary]``, the target's ids; None: the target's vocabulary.
    """

    def __init__(self, checkpoint: Checkpoint, prefixes: Sequence[str], *, qkv_width: int | None = None):
        target = checkpoint.target
        self.name, self.taps, self.target, self.shape = checkpoint.name, checkpoint.taps, target, checkpoint.shape
        options: dict[str, Any] = {"rope_scaling": checkpoint.rope_scaling, "linear_backend": target.linear_backend}
        options |= {"dtype": target.dtype, "device": target.device, "qkv_width": qkv_width}
        self.layers = Layers(self.shape, checkpoint, prefixes, **options)
        ids = checkpoint.vocabulary()
        self.token_ids = None if ids is None else ids.to(target.device)

    def _linear(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return self.layers.linear(self.layers.load(weight))

    def _output(self, checkpoint: Checkpoint) -> Callable[[Tensor], Tensor] | None:
        """The checkpoint's own output head, else the target's over the draft vocabulary; None: all of the target's."""
        count = self.target.shape.vocab_size if self.token_ids is None else len(self.token_ids)
        head = checkpoint.optional("lm_head.weight", (count, self.shape.hidden_size))
        if head is None and self.token_ids is not None:
            head = self.target.head_weight[self.token_ids]
        return None if head is None else self._linear(head)


class HeadDrafter(ABC):
    """Drafts with a head.

    temperature : 0 drafts greedily; above 0 it samples (with `Streams`), and the draft carries the distribution.
    min_confidence : stop before a token whose distribution has no probability of at least this; 0 drafts all k. What
        decides is the distribution and not the token drawn from it, so sampling stays exact.
    tree : draft trees of depth k instead of chains, always by probability.
    """

    _kind: ClassVar[type[Any]]
    _backend: ClassVar[str] = "sdpa"
    _cache: PagedKVCache

    def __init__(
        self,
        head: Any,
        target: ModelTarget,
        *,
        backend: str | None = None,
        temperature: float = 0.0,
        min_confidence: float = 0.0,
        tree: TreeShape | None = None,
    ):
        self.name, self.head, self.target, self.backend = head.name, head, target, backend or self._backend
        self.temperature, self.min_confidence = temperature, min_confidence
        self.tree, self.num_draft_nodes = tree, tree and tree.num_draft_nodes
        self.num_top_ids = 0

    @classmethod
    def from_folder(cls, folder: str | Path, target: ModelTarget, **options: Any) -> Self:
        """From a checkpoint of this kind. Raises InputError: as `read_checkpoint`."""
        return cls(cls._kind(read_checkpoint(folder, target.decoder)), target, **options)

    def start(self, requests: Sequence[Request]) -> None:
        """The head's own prefill over the prompts."""
        cache = self._empty_cache(len(requests))
        self._rows = {request.index: row for row, request in enumerate(requests)}
        with torch.inference_mode():
            for row, request in enumerate(requests):
                for start in range(0, len(request.token_ids) - 1, _CHUNK):
                    stop = min(start + _CHUNK, len(request.token_ids) - 1)
                    self._prefill(request, cache.rows([row]), start, stop - start)

    def _empty_cache(self, batch_size: int) -> PagedKVCache:
        """The head's own cache, the same one as long as the batch is."""
        if not hasattr(self, "_cache") or self._cache.batch_size != batch_size:
            room = min(self.target.cache.max_context_len, self.head.shape.max_context_len)
            self._cache = self.head.layers.new_cache(batch_size, room + MAX_Q_LEN)
        self._cache.truncate(0)
        return self._cache

    @abstractmethod
    def _prefill(self, request: Request, cache: PagedKVCache, start: int, num_tokens: int) -> None:
        """Enter ``num_tokens`` tokens of a prompt from ``start`` on into the head's cache."""

    def _room(self, requests: Sequence[Request]) -> int:
        """Drafts that the head's positions leave room for."""
        return self.head.shape.max_context_len - max(len(request.token_ids) for request in requests)

    def _choose(self, logits: Tensor, uniform: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As `choose`, in the target's vocabulary."""
        ids, vocab_size = self.head.token_ids, self.head.target.shape.vocab_size
        return choose(logits, self.temperature, uniform, token_ids=ids, vocab_size=vocab_size)

    def _top(self, logits: Tensor) -> Tensor | None:
        """As `top_ids`, in the target's vocabulary."""
        return top_ids(logits, self.num_top_ids, self.head.token_ids)


def draft_uniforms(requests: Sequence[Request], k: int, temperature: float, device: torch.device) -> Tensor | None:
    """What k drafts of each request are drawn with, float64 ``[batch_size, k]``; None at temperature 0.

    Raises ValueError: the requests have no streams.
    """
    if temperature == 0:
        return None
    if (streams := requests[0].streams) is None:
        raise ValueError(f"temperature {temperature:g}: wanted requests with streams (generators of speculate)")
    return streams.of(requests, drafter=True)[:, :k].to(device)


def choose(
    logits: Tensor,
    temperature: float,
    uniform: Tensor | None,
    *,
    token_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Tokens ``[...]`` of logits ``[..., draft vocabulary]``: the best ones, or drawn, with what they were drawn from.

    uniform : ``[...]``, of `draft_uniforms`; None at temperature 0.
    token_ids : the target's id of each draft token, of ``vocab_size``; None: the same.

    Returns also the probabilities ``[..., vocabulary]``; None at temperature 0.
    """
    if uniform is None:
        best = logits.argmax(dim=-1)
        return (best if token_ids is None else token_ids[best]), None
    probs = sampling_probs(logits, temperature=temperature, top_p=1.0)
    if token_ids is not None:
        probs = probs.new_zeros(*probs.shape[:-1], vocab_size).index_copy_(-1, token_ids, probs)
    return draw(probs, uniform), probs


def top_ids(logits: Tensor, count: int, token_ids: Tensor | None = None) -> Tensor | None:
    """The ``count`` best tokens ``[batch_size, count]`` of ``[batch_size, draft vocabulary]``; None for 0 of them."""
    if not count:
        return None
    best = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return best if token_ids is None else token_ids[best]
