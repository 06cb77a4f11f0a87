"""The paged cache against a plain list of tokens per request."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import kv_cache
from labkit.errors import InputError
from labkit.kv_cache import PagedKVCache

HEADS, DIM = 2, 4


def make(generator, **changes):
    arguments = {
        "num_layers": 2,
        "batch_size": 3,
        "max_context_len": 20,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "page_size": 4,
        "dtype": torch.float32,
        "generator": generator,
    }
    return PagedKVCache(**arguments | changes)


def tokens(generator, batch_size, q_len):
    return torch.randn(batch_size, q_len, HEADS, DIM, generator=generator)


@pytest.mark.parametrize("page_order", ["sequential", "permuted"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_append_advance_truncate_keep_the_right_tokens(generator, page_order, page_size, batch_size):
    cache = make(generator, page_order=page_order, page_size=page_size, batch_size=batch_size)
    kept = [[torch.empty(0, HEADS, DIM)] * batch_size for _ in range(2)]
    for q_len, accepted in ((7, [7, 7, 7]), (3, [1, 3, 2]), (1, [1, 0, 1]), (5, [5, 4, 5])):
        before = cache.context_lens
        for layer in range(2):
            new = tokens(generator, batch_size, q_len)
            cache.append(layer, new, -new)
            assert cache.context_lens == before
            kept[layer] = [torch.cat([old, new[r, : accepted[r]]]) for r, old in enumerate(kept[layer])]
        cache.advance(q_len)
        cache.truncate([length + accepted[r] for r, length in enumerate(before)])
    for layer in range(2):
        for r, expected in enumerate(kept[layer]):
            k, v = cache.dense(layer, r, cache.context_lens[r])
            assert torch.equal(k, expected)
            assert torch.equal(v, -expected)


@pytest.mark.parametrize("page_order", ["sequential", "permuted"])
def test_csr_and_padded_table_agree(generator, page_order):
    cache = make(generator, page_order=page_order)
    lens = [1, 8, 9]
    indptr, indices = cache.kv_indptr(lens), cache.kv_indices(lens)
    assert indptr.tolist() == [0, 1, 3, 6]
    assert {cache.page_table.dtype, indptr.dtype, indices.dtype} == {torch.int32}
    for r in range(3):
        pages = indices[indptr[r] : indptr[r + 1]]
        assert torch.equal(pages, cache.page_table[r, : len(pages)])
    assert sorted(cache.page_table.flatten().tolist()) == list(range(15))


def test_sequential_pages_are_read_in_place(generator):
    cache = make(generator)
    cache.fill_random([5, 9, 20], generator)
    for r in range(3):
        k, _ = cache.dense(1, r, 5)
        assert cache.is_view(r)
        assert k.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()
    for view in (cache, cache.rows([1]), cache.rows([0, 2])):
        assert view.stacked_is_view()
        k, v = view.stacked(1, 5)
        assert k.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()
        for r in range(view.batch_size):
            assert torch.equal(k[r].transpose(0, 1), view.dense(1, r, 5)[0])
            assert torch.equal(v[r].transpose(0, 1), view.dense(1, r, 5)[1])


@pytest.mark.parametrize("requests", [[0, 1, 2], [2, 0], [1]])
def test_gathered_stack_equals_dense(generator, requests):
    view = make(generator, page_order="permuted").rows(requests)
    view.fill_random(9, generator)
    k, v = view.stacked(1, 9)
    for r in range(view.batch_size):
        assert torch.equal(k[r].transpose(0, 1), view.dense(1, r, 9)[0])
        assert torch.equal(v[r].transpose(0, 1), view.dense(1, r, 9)[1])


def test_rows_share_storage_and_lengths(generator):
    cache = make(generator)
    cache.fill_random([3, 4, 5], generator)
    view = cache.rows([2, 0])
    assert view.context_lens == [5, 3]
    new = tokens(generator, 2, 2)
    view.append(0, new, new)
    view.advance([2, 1])
    assert cache.context_lens == [4, 4, 7]
    assert torch.equal(cache.dense(0, 2, 7)[0][5:], new[0])
    cache.truncate([0, 4, 6])
    assert view.rows([0]).context_lens == [6]


def test_clone_is_deep(generator):
    cache = make(generator)
    cache.fill_random(6, generator)
    twin = cache.clone()
    twin.append(0, tokens(generator, 3, 1), tokens(generator, 3, 1))
    twin.advance(1)
    twin.k.zero_()
    assert cache.context_lens == [6, 6, 6]
    assert cache.k.abs().sum() > 0
    assert twin.dense(0, 0, 7)[0].abs().sum() == 0


def test_fill_random_is_seeded(generator):
    first, second = make(generator), make(generator, page_order="permuted")
    for cache in (first, second):
        cache.fill_random([4, 20, 7], torch.Generator().manual_seed(3))
    assert first.context_lens == [4, 20, 7]
    assert torch.equal(first.dense(1, 1, 20)[0], second.dense(1, 1, 20)[0])


def test_bad_arguments_are_named(generator):
    cache = make(generator)
    new = tokens(generator, 3, 2)
    cache.fill_random(19, generator)
    cases = [
        (lambda: make(generator, page_size=0), "page_size must be an integer of at least 1, got 0"),
        (
            lambda: make(generator, page_order="random"),
            "page_order must be 'sequential' or 'permuted', got 'random'",
        ),
        (lambda: make(None, page_order="permuted"), "needs a generator"),
        (lambda: cache.append(0, new, new), "stay within max_context_len=20, got 19"),
        (
            lambda: cache.append(0, new[:2], new[:2]),
            r"k_new must have shape \(3, 2, 2, 4\), got \(2, 2, 2, 4\)",
        ),
        (lambda: cache.advance(2), "context_len must be at most max_context_len=20, got 21"),
        (lambda: cache.advance([1, 1]), r"q_len must hold one value per request \(batch_size=3\), got 2"),
        (lambda: cache.advance(-1), "q_len must not be negative"),
        (lambda: cache.truncate(20), "context_lens must not exceed the cached"),
        (lambda: cache.rows([]), "requests must be distinct and within 0..2"),
        (lambda: cache.rows([0, 0]), "requests must be distinct"),
        (lambda: cache.rows([3]), "requests must be distinct"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert issubclass(InputError, ValueError)
    assert cache.context_lens == [19, 19, 19]


class Allocations(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns in storage of its own."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("page_order", ["sequential", "permuted"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_shared_prefix_is_stored_and_filled_once(generator, page_order, batch_size, monkeypatch):
    options = {"batch_size": batch_size, "max_context_len": 44, "page_order": page_order, "shared_prefix_len": 32}
    with Allocations() as made:
        cache = make(generator, **options)
    page_bytes = 2 * 4 * HEADS * DIM * 4  # of both layers
    assert cache.k.shape[1] == 8 + 3 * batch_size
    assert made.largest == cache.k.shape[1] * page_bytes
    assert torch.unique(cache.page_table).tolist() == list(range(8 + 3 * batch_size)), "every page is somebody's"
    assert all(torch.equal(cache.page_table[r, :8], cache.page_table[0, :8]) for r in range(batch_size))
    monkeypatch.setattr(kv_cache, "_FILL_ELEMENTS", 3 * 4 * HEADS * DIM)
    with Allocations() as made:
        cache.fill_random(41, generator)
    assert made.largest <= 3 * 4 * HEADS * DIM * 4, "three pages at once, whatever the cache holds"
    assert (cache.k != 0).all()
    assert (cache.v != 0).all()
    rows = [cache.dense(1, r, 41)[0] for r in range(batch_size)]
    assert all(torch.equal(row[:32], rows[0][:32]) for row in rows)
    assert len({row[32:].sum().item() for row in rows}) == batch_size
    new = tokens(generator, batch_size, 3)
    cache.append(1, new, new)
    cache.advance(3)
    for r in range(batch_size):
        k, _ = cache.dense(1, r, 44)
        assert torch.equal(k, torch.cat([rows[r], new[r]])), "new tokens lie in pages of their own"


@pytest.mark.parametrize("shared_prefix_len", [-4, 3, 24])
def test_a_shared_prefix_is_whole_pages_of_the_context(generator, shared_prefix_len):
    with pytest.raises(InputError, match=f"multiple of page_size=4 within .*=20, got {shared_prefix_len}"):
        make(generator, shared_prefix_len=shared_prefix_len)
