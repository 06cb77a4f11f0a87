"""The paged KV cache: storage, page table and the lengths that every backend and the decoder agree on."""

import copy
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from labkit.errors import InputError
from labkit.shapes import at_least

_FILL_ELEMENTS = 1 << 26  # drawn at once, in float32


def _per_request(name: str, value: int | Sequence[int], batch_size: int) -> list[int]:
    values = [value] * batch_size if isinstance(value, int) else [int(item) for item in value]
    if len(values) != batch_size:
        raise ValueError(f"{name} must hold one value per request (batch_size={batch_size}), got {len(values)}")
    if min(values) < 0:
        raise ValueError(f"{name} must not be negative, got {values}")
    return values


class PagedKVCache:
    """K and V of every layer in pages of `page_size` tokens.

    max_context_len : tokens a request can hold; rounded up to whole pages.
    dtype : a torch floating dtype.
    page_order : ``"sequential"``: the pages of one request follow each other, so `dense` and `stacked` copy nothing.
        ``"permuted"``: the pages of all requests are shuffled over the pool with `generator`.

    k, v : ``[num_layers, num_pages, page_size, num_kv_heads, head_dim]``. Slots without a token hold anything.
    page_table : int32 ``[batch_size, max_pages]`` on `device`: page of each block of `page_size` tokens.
    k_scale, v_scale : what the stored keys and values are multiplied with (1 unless the cache is quantised).
    shared_prefix_len : tokens at the start that lie in the same pages for all requests: whole pages, stored once.

    `rows` gives a view on some of the requests. Storage **and lengths** are shared: what a view appends, advances or
    truncates is seen by the cache it came from, and the other way round.

    Raises InputError: a size is below 1, `page_order` is unknown, ``"permuted"`` came without a generator, or the
    shared prefix is not a whole number of pages of the context.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        max_context_len: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        page_order: str = "sequential",
        generator: torch.Generator | None = None,
        shared_prefix_len: int = 0,
    ):
        at_least(1, num_layers=num_layers, batch_size=batch_size, max_context_len=max_context_len)
        at_least(1, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size)
        if page_order not in ("sequential", "permuted"):
            raise InputError(f"page_order must be 'sequential' or 'permuted', got {page_order!r}")
        if page_order == "permuted" and generator is None:
            raise InputError("page_order 'permuted' needs a generator, got None")
        self.page_size, self.page_order = page_size, page_order
        self.k_scale = self.v_scale = 1.0
        self.shared_prefix_len = shared_prefix_len
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        max_pages, num_shared = -(-max_context_len // page_size), shared_prefix_len // page_size
        if shared_prefix_len % page_size or not 0 <= num_shared <= max_pages:
            wanted = f"a multiple of page_size={page_size} within max_context_len={max_context_len}"
            raise InputError(f"shared_prefix_len must be {wanted}, got {shared_prefix_len}")
        num_pages = num_shared + batch_size * (max_pages - num_shared)
        storage_shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.k = torch.zeros(storage_shape, dtype=dtype, device=device)
        self.v = torch.zeros(storage_shape, dtype=dtype, device=device)
        order = torch.arange(num_pages)
        if page_order == "permuted":
            assert generator is not None
            order = torch.randperm(num_pages, generator=generator, device=generator.device).cpu()
        self._lens = [0] * batch_size
        self._flatten()
        own = order[num_shared:].view(batch_size, max_pages - num_shared)
        host_table = torch.cat([order[:num_shared].expand(batch_size, -1), own], dim=1)
        self._bind(host_table, list(range(batch_size)))

    def _flatten(self) -> None:
        """Views ``[num_pages * page_size, num_kv_heads, head_dim]`` per layer, made once for the hot path."""
        shape = (-1, self.num_kv_heads, self.head_dim)
        self._k_slots = [layer.view(shape) for layer in self.k]
        self._v_slots = [layer.view(shape) for layer in self.v]

    def _bind(self, host_table: Tensor, requests: list[int]) -> None:
        """Point this object at `requests` (indices into the shared lengths) and derive what the hot path needs."""
        self._host_table, self._requests = host_table, requests
        self.batch_size, max_pages = host_table.shape
        self.max_context_len = max_pages * self.page_size
        self.page_table = host_table.to(self.device, torch.int32)
        steps = torch.arange(max_pages)
        starts = host_table[:, 0]
        self._consecutive = (host_table - starts[:, None] == steps).all(dim=1).tolist()
        self._starts = starts.tolist()
        gaps = {b - a for a, b in zip(self._starts, self._starts[1:], strict=False)} or {0}
        # One strided view serves the whole batch only when the requests lie evenly spaced.
        self._stride_pages = gaps.pop() if len(gaps) == 1 and all(self._consecutive) else -1
        self._append_key: tuple[int, list[int]] | None = None

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def context_lens(self) -> list[int]:
        """Tokens in the cache per request. A copy: change lengths with `advance`, `truncate` or `fill_random`."""
        return [self._lens[request] for request in self._requests]

    def append(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Write ``[batch_size, q_len, num_kv_heads, head_dim]`` behind the cached tokens; lengths stay as they are.

        Raises ValueError: the shape does not fit the cache, or the tokens do not fit in it.
        """
        q_len = k_new.shape[1]
        key = (q_len, self.context_lens)
        if key != self._append_key:
            self._plan_append(k_new, key)
        if self._append_start >= 0:
            self._k_slots[layer].narrow(0, self._append_start, q_len).copy_(k_new[0])
            self._v_slots[layer].narrow(0, self._append_start, q_len).copy_(v_new[0])
        else:
            self._k_slots[layer].index_copy_(0, self._append_slots, k_new.flatten(0, 1))
            self._v_slots[layer].index_copy_(0, self._append_slots, v_new.flatten(0, 1))

    def _plan_append(self, k_new: Tensor, key: tuple[int, list[int]]) -> None:
        """Once per step: where the next `q_len` tokens of every request go, for all layers."""
        q_len, lens = key
        wanted = (self.batch_size, q_len, self.num_kv_heads, self.head_dim)
        if tuple(k_new.shape) != wanted:
            raise ValueError(f"k_new must have shape {wanted}, got {tuple(k_new.shape)}")
        if max(lens) + q_len > self.max_context_len:
            limit = f"must stay within max_context_len={self.max_context_len}"
            raise ValueError(f"context_len + q_len {limit}, got {max(lens)} + {q_len}")
        if self.batch_size == 1 and self._consecutive[0]:
            self._append_start = self._starts[0] * self.page_size + lens[0]
        else:
            self._append_start = -1
            positions = torch.tensor(lens)[:, None] + torch.arange(q_len)
            pages = self._host_table.gather(1, positions // self.page_size)
            slots = pages * self.page_size + positions % self.page_size
            self._append_slots = slots.flatten().to(self.device)
        self._append_key = key

    def advance(self, q_len: int | Sequence[int]) -> None:
        """Count `q_len` appended tokens (per request when a sequence) as cached.

        Raises ValueError: negative, one entry too many or too few, or beyond `max_context_len`.
        """
        steps = _per_request("q_len", q_len, self.batch_size)
        self._set_lens([old + step for old, step in zip(self.context_lens, steps, strict=True)])

    def truncate(self, context_lens: int | Sequence[int]) -> None:
        """Drop the tokens behind `context_lens`, as after a rejection. Raises ValueError: a request would grow."""
        wanted = _per_request("context_lens", context_lens, self.batch_size)
        if any(new > old for new, old in zip(wanted, self.context_lens, strict=True)):
            raise ValueError(f"context_lens must not exceed the cached {self.context_lens}, got {wanted}")
        self._set_lens(wanted)

    def move(self, sources: Sequence[int], to: int) -> None:
        """Copy K and V at the places `sources` of the first request to `to`, `to` + 1, ..; lengths stay.

        For the accepted path of a tree, whose nodes stand apart. Raises ValueError: a place beyond `max_context_len`.
        """
        if not sources or list(sources) == list(range(to, to + len(sources))):
            return
        if max(*sources, to + len(sources) - 1) >= self.max_context_len:
            wanted = f"sources and to must stay within max_context_len={self.max_context_len}"
            raise ValueError(f"{wanted}, got {sources}, {to}")
        places = torch.tensor([*sources, *range(to, to + len(sources))])
        slots = self._host_table[0][places // self.page_size] * self.page_size + places % self.page_size
        read, write = slots.to(self.device).chunk(2)
        for storage in (self.k, self.v):
            flat = storage.flatten(1, 2)
            flat[:, write] = flat[:, read]

    def repeat(self, source: int, request: int) -> None:
        """Make a request hold what another one does: a copy of its K and V, in pages of its own."""
        length = self.context_lens[source]
        read, write = self._host_table[[source, request], : self._num_pages(length)].to(self.device)
        for storage in (self.k, self.v):
            storage[:, write] = storage[:, read]
        self._lens[self._requests[request]] = length

    def _set_lens(self, lens: list[int]) -> None:
        if max(lens) > self.max_context_len:
            raise ValueError(f"context_len must be at most max_context_len={self.max_context_len}, got {max(lens)}")
        for request, value in zip(self._requests, lens, strict=True):
            self._lens[request] = value

    def fill_random(self, context_len: int | Sequence[int], generator: torch.Generator) -> None:
        """Set the lengths and fill K and V with seeded standard normals, to time any context without a prefill.

        Every page is filled once, whoever shares it, and in parts: little is needed beside the cache itself.
        """
        lens = _per_request("context_len", context_len, self.batch_size)
        self._set_lens(lens)
        pages = torch.tensor(list(dict.fromkeys(self.kv_indices(lens).tolist())), dtype=torch.int64, device=self.device)
        parts = pages.split(max(_FILL_ELEMENTS // self.k[0, 0].numel(), 1))
        for layer, part in product((*self.k, *self.v), parts):
            values = torch.randn((len(part), *layer.shape[1:]), generator=generator, device=generator.device)
            layer[part] = values.to(self.device, self.dtype)

    def clone(self) -> "PagedKVCache":
        """A deep copy with its own storage and lengths; of a view too (the whole pool is copied)."""
        twin = copy.copy(self)
        twin.k, twin.v, twin._lens = self.k.clone(), self.v.clone(), list(self._lens)
        twin._flatten()
        twin._bind(self._host_table, self._requests)
        return twin

    def rows(self, requests: Sequence[int]) -> "PagedKVCache":
        """A view on these requests, in this order; it shares storage and lengths with this cache.

        Raises ValueError: no request, one twice, or one out of range.
        """
        chosen = list(requests)
        if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= r < self.batch_size for r in chosen):
            raise ValueError(f"requests must be distinct and within 0..{self.batch_size - 1}, got {chosen}")
        view = copy.copy(self)
        view._bind(self._host_table[chosen], [self._requests[request] for request in chosen])
        return view

    def _num_pages(self, kv_len: int) -> int:
        return -(-kv_len // self.page_size)

    def kv_indptr(self, kv_lens: Sequence[int]) -> Tensor:
        """int32 ``[batch_size + 1]``: where each request's pages start in `kv_indices`, for these lengths."""
        counts = torch.tensor([0, *map(self._num_pages, kv_lens)])
        return counts.cumsum(0).to(self.device, torch.int32)

    def kv_indices(self, kv_lens: Sequence[int]) -> Tensor:
        """int32 ``[sum of pages]``: the pages of all requests, one request after the other."""
        rows = [self._host_table[r, : self._num_pages(kv_len)] for r, kv_len in enumerate(kv_lens)]
        return torch.cat(rows).to(self.device, torch.int32)

    def is_view(self, request: int) -> bool:
        """Whether `dense` of this request is a view (its pages are consecutive) and not a gathered copy."""
        return self._consecutive[request]

    def dense(self, layer: int, request: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """K and V of one request, ``[kv_len, num_kv_heads, head_dim]``: a view when its pages are consecutive."""
        if self._consecutive[request]:
            start = self._starts[request] * self.page_size
            return self._k_slots[layer][start : start + kv_len], self._v_slots[layer][start : start + kv_len]
        pages = self.page_table[request, : self._num_pages(kv_len)]
        k, v = (storage[layer].index_select(0, pages).flatten(0, 1)[:kv_len] for storage in (self.k, self.v))
        return k, v

    def stacked_is_view(self) -> bool:
        """Whether `stacked` copies nothing: all pages consecutive and the requests evenly spaced."""
        return self._stride_pages >= 0

    def stacked(self, layer: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """K and V of the whole batch at one length, ``[batch_size, num_kv_heads, kv_len, head_dim]``.

        Heads come first as ``scaled_dot_product_attention`` wants them. A strided view where `stacked_is_view`,
        else gathered.
        """
        if self._stride_pages >= 0:
            k, v = self._k_slots[layer], self._v_slots[layer]
            token, head, element = k.stride()
            size = (self.batch_size, self.num_kv_heads, kv_len, self.head_dim)
            stride = (self._stride_pages * self.page_size * token, head, token, element)
            # The offset counts from the storage, which starts at layer 0.
            offset = k.storage_offset() + self._starts[0] * self.page_size * token
            return k.as_strided(size, stride, offset), v.as_strided(size, stride, offset)
        pages = self.page_table[:, : self._num_pages(kv_len)].flatten()
        shape = (self.batch_size, -1, self.num_kv_heads, self.head_dim)
        k, v = (
            storage[layer].index_select(0, pages).view(shape)[:, :kv_len].transpose(1, 2)
            for storage in (self.k, self.v)
        )
        return k, v
