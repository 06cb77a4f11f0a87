"""Where a pass stands in its cache, told by a length on the device, so that a CUDA graph serves every context."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, prepare
from labkit.kv_cache import PagedKVCache


class DevicePlace:
    """The next `q_len` tokens of a cache's only request, whose pages follow each other. `Layers` take it for a cache.

    num_qo_heads : of the layers.
    backend : of the attention, which must have lengths that a replay reads; its splits are planned for a full cache.
    is_block : the new tokens see each other. They then stand as further query heads of one token that sees all keys.
    is_tree : they are nodes of a tree, which `enter` tells.

    out : ``[1, q_len, num_qo_heads, head_dim]``, what `run` writes. positions : int64 ``[q_len]``, set by `enter`.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        q_len: int,
        num_qo_heads: int,
        *,
        backend: str,
        is_block: bool = False,
        is_tree: bool = False,
    ) -> None:
        if cache.batch_size != 1 or not cache.is_view(0):
            raise ValueError(f"cache: wanted one request in pages that follow each other, got {cache.batch_size}")
        self._cache, self._q_len, self._is_block = cache, q_len, is_block
        self._steps = torch.arange(q_len, device=cache.device)
        self._tree = torch.ones(1, q_len, dtype=torch.int64, device=cache.device)
        self.out = torch.empty(1, q_len, num_qo_heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
        q, rows = (self.out.view(1, 1, -1, cache.head_dim), 1) if is_block else (self.out, q_len)
        held = cache.context_lens[0]
        cache.advance(cache.max_context_len - rows - held)
        try:
            spec = AttentionSpec(tree=self._tree if is_tree else None)
            self._attention = prepare(q, cache, backend=backend, spec=spec)
        finally:
            cache.truncate(held)
        self._kv_lens = self._attention.kv_lens

    def enter(self, context_len: Tensor, *, tree: Tensor | None = None, depths: Tensor | None = None) -> None:
        """Stand behind so many cached tokens, int64 ``[1]`` on the device.

        tree, depths : int64 ``[1, q_len]``, as `AttentionSpec` has it, and positions counted from the context's end.
        """
        self._places = context_len + self._steps
        self.positions = self._places if depths is None else context_len + depths[0]
        if tree is not None:
            self._tree.copy_(tree)
        self._kv_lens.copy_(context_len + self._q_len)

    def append(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Write ``[1, q_len, num_kv_heads, head_dim]`` behind the cached tokens."""
        for stored, new in ((self._cache.k, k_new), (self._cache.v, v_new)):
            stored[layer].flatten(0, 1).index_copy_(0, self._places, new[0])

    def advance(self, q_len: int) -> None:
        """Nothing: the host counts no lengths here."""

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        """Attention of `q` ``[1, q_len, num_qo_heads, head_dim]`` over `layer`, as `PreparedAttention.run`."""
        if not self._is_block:
            self._attention.run(q, layer, out)
            return
        heads = (self._q_len, self._cache.num_kv_heads, -1, self._cache.head_dim)
        packed, result = q.view(heads).transpose(0, 1).reshape(self._attention.q.shape), self._attention.out
        self._attention.run(packed, layer, result)
        out.view(heads).copy_(result.view(heads[1], heads[0], -1, heads[3]).transpose(0, 1))
