"""Heads whose whole draft is the replay of one CUDA graph: greedy chains and trees for one request.

The layers are those of the eager drafters; only their place in the cache lies on the device. There is a graph for each
number of tokens that the last verify can have added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.head import HeadDrafter
from labkit.models.device_place import DevicePlace
from labkit.speculation import Draft, Request
from labkit.timing import captured

if TYPE_CHECKING:
    from labkit.drafting.tree import TreeShape
    from labkit.kv_cache import PagedKVCache
    from labkit.models.target import ModelTarget


class CapturedDrafter(HeadDrafter):
    """What both kinds share. On a CPU the operations run one by one, for tests.

    num_speculative_tokens : k, always drafted whole and then cut; a tree where there is no room for it is not drafted.
    """

    _is_block: ClassVar[bool]

    def __init__(self, head: Any, target: ModelTarget, *, num_speculative_tokens: int, tree: TreeShape | None = None):
        super().__init__(head, target, backend="triton_split", tree=tree)
        self._k = min(num_speculative_tokens, head.block_size - 1) if self._is_block else num_speculative_tokens
        self._counts = range(0 if self._is_block else 1, num_speculative_tokens + 2)  # of tokens that a verify added
        self._graphs: dict[int, _Graph] = {}
        self._levels: dict[int, DevicePlace] = {}  # of a tree, by the nodes so far; the graphs run one by one

    def start(self, requests: Sequence[Request]) -> None:
        """The head's own prefill. Before the first one all graphs are captured, whose first runs leave keys behind."""
        if len(requests) != 1:
            raise ValueError(f"requests: a captured draft serves one, got {len(requests)}")
        cache = self._empty_cache(1)
        for num_new in self._counts if not self._graphs else ():
            self._graphs[num_new] = graph = _Graph(self, cache, num_new)
            graph.replay = run = partial(self._run, graph)
            if graph.token_ids.is_cuda:
                run()
                torch.cuda.synchronize()
                graph.replay = captured(run)
        super().start(requests)

    def _run(self, graph: _Graph) -> None:
        with torch.inference_mode():
            graph.draft = self._draft(graph)

    @abstractmethod
    def _draft(self, graph: _Graph) -> Draft:
        """What is captured: from the inputs of a graph to its draft."""

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """k tokens ``[1, k]``, fewer where the block or the head's positions end, or a tree."""
        (request,), k = requests, min(k, self._k, self._room(requests))
        if k < (1 if self.tree is None else self._k):
            return Draft.from_lists([[]])
        end, (held,) = len(request.token_ids) - 1, self._cache.context_lens
        self._cache.advance(end - held)
        start = held if self._is_block else min(held, end - 1)
        graph = self._graphs[end - start]
        graph.token_ids.copy_(torch.tensor([request.token_ids[-graph.token_ids.shape[1] :]]), non_blocking=True)
        graph.context_len.fill_(start)
        if graph.num_new:
            graph.states.copy_(self.target.states([request], [start], graph.num_new, self.head.taps))
        graph.replay()
        draft = graph.draft
        return draft if self.tree is not None else Draft(draft.token_ids[:, :k], [k])


class _Graph:
    """A draft behind ``num_new`` verified tokens: what a replay reads, and what it wrote.

    token_ids : int64 ``[1, num_new]``, or the last one only. states : ``[1, num_new, taps * hidden_size]``.
    context_len : int64 ``[1]``, verified tokens that the head's cache holds.
    draft : in the graph's own memory, until the next replay.
    new, behind : places of the new tokens, and of the drafts behind them.
    """

    def __init__(self, drafter: CapturedDrafter, cache: PagedKVCache, num_new: int):
        decoder, head, self.num_new = drafter.target.decoder, drafter.head, num_new
        ids: dict[str, Any] = {"dtype": torch.int64, "device": decoder.device}
        self.token_ids = torch.zeros(1, max(num_new, 1), **ids)
        self.context_len = torch.zeros(1, **ids)
        width = len(head.taps) * decoder.shape.hidden_size
        self.states = torch.zeros(1, num_new, width, dtype=decoder.activation_dtype, device=decoder.device)
        attention: dict[str, Any] = {"num_qo_heads": head.shape.num_qo_heads, "backend": drafter.backend}
        self.new = DevicePlace(cache, max(num_new, 1), **attention)
        rows = head.block_size if drafter._is_block else 1
        self.behind = DevicePlace(cache, rows, is_block=drafter._is_block, **attention)
        self.replay: Any = None
        self.draft = Draft.from_lists([[]])


class CapturedAutoregressive(CapturedDrafter, AutoregressiveDrafter):
    """`AutoregressiveDrafter` as graphs: the verified tokens and the k - 1 steps behind them are one replay."""

    _is_block = False

    def _draft(self, graph: _Graph) -> Draft:
        graph.new.enter(graph.context_len)
        fused = self.head.fuse(graph.states)
        fed_back = self.head.step(graph.token_ids, fused, graph.new, backend=self.backend)[:, -1:]
        first = self.head.logits(fed_back)
        if self.tree is not None:
            run = partial(self._run_level, graph.context_len + graph.num_new)
            return self._grow(self.tree, self._k, fed_back, first[:, -1], run)
        drafts = [self._choose(first)[0]]
        for behind in range(self._k - 1):
            graph.behind.enter(graph.context_len + graph.num_new + behind)
            fed_back = self.head.step(drafts[-1], fed_back, graph.behind, backend=self.backend)
            drafts.append(self._choose(self.head.logits(fed_back))[0])
        return Draft(torch.cat(drafts, dim=1), [self._k])

    def _run_level(self, end: Tensor, tokens: Tensor, entered: Tensor, masks: Tensor, depths: Tensor) -> Tensor:
        """A pass over a tree's nodes so far; its place is made in the first run, which is not captured."""
        width = tokens.shape[1]
        if width not in self._levels:
            attention: dict[str, Any] = {"num_qo_heads": self.head.shape.num_qo_heads, "backend": self.backend}
            self._levels[width] = DevicePlace(self._cache, width, is_tree=True, **attention)
        self._levels[width].enter(end, tree=masks, depths=depths)
        return self.head.step(tokens, entered, self._levels[width], backend=self.backend)


class CapturedBlock(CapturedDrafter, BlockDrafter):
    """`BlockDrafter` as graphs: the states of the verified tokens and the block behind them are one replay."""

    _is_block = True

    def _draft(self, graph: _Graph) -> Draft:
        if graph.num_new:
            graph.new.enter(graph.context_len)
            self.head.inject(graph.states, graph.new)
        graph.behind.enter(graph.context_len + graph.num_new)
        logits = self.head.block_logits(graph.token_ids[:, -1], graph.behind, backend=self.backend)
        if self.tree is not None:
            return self._grow(self.tree, logits[:, : self._k])
        return Draft(self._choose(logits[:, : self._k])[0], [self._k])
