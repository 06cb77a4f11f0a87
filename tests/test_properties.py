"""Properties of every input, by hypothesis: pages, trees, keys, counts (acceptance identities: test_acceptance.py)."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.acceptance import AcceptanceCounts
from labkit.attention.api import AttentionSpec, prepare
from labkit.check import _axes_of_key
from labkit.engines.importing import Reader
from labkit.kv_cache import PagedKVCache
from labkit.plan import keyed_points, point_key
from labkit.provenance import redact

HEADS, DIM = 1, 4
FEW = settings(max_examples=60, deadline=None, derandomize=True)


# ---- cache: append, advance, truncate, page tables


@st.composite
def histories(draw):
    """Batch size, page size, order, and steps of (tokens appended, tokens kept per request)."""
    batch_size = draw(st.integers(1, 3))
    step = st.integers(1, 6).flatmap(
        lambda q_len: st.tuples(
            st.just(q_len), st.lists(st.integers(0, q_len), min_size=batch_size, max_size=batch_size)
        )
    )
    order = draw(st.sampled_from(["sequential", "permuted"]))
    return batch_size, draw(st.sampled_from([1, 2, 4, 16])), order, draw(st.lists(step, max_size=6))


def cache_of(batch_size: int, page_size: int, page_order: str, max_context_len: int = 48) -> PagedKVCache:
    return PagedKVCache(
        num_layers=1, batch_size=batch_size, max_context_len=max_context_len, num_kv_heads=HEADS, head_dim=DIM,
        page_size=page_size, dtype=torch.float32, page_order=page_order, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


@FEW
@given(histories())
def test_a_cache_is_a_list_of_tokens(history):
    batch_size, page_size, order, steps = history
    cache, number = cache_of(batch_size, page_size, order), itertools.count(1)
    model: list[list[int]] = [[] for _ in range(batch_size)]
    for q_len, kept in steps:
        new = [[next(number) for _ in range(q_len)] for _ in range(batch_size)]
        values = torch.tensor(new, dtype=torch.float32)[:, :, None, None].expand(-1, -1, HEADS, DIM)
        before = cache.context_lens
        cache.append(0, values, -values)
        cache.advance(q_len)
        cache.truncate([length + keep for length, keep in zip(before, kept, strict=True)])
        for tokens, more, keep in zip(model, new, kept, strict=True):
            tokens += more[:keep]
    assert cache.context_lens == [len(tokens) for tokens in model]
    for request, tokens in enumerate(model):
        k, v = cache.dense(0, request, len(tokens))
        assert k[:, 0, 0].tolist() == tokens
        assert torch.equal(v, -k)


@FEW
@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, 48), min_size=n, max_size=n)),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["sequential", "permuted"]),
)
def test_page_tables_agree_and_give_each_page_to_one_request(lens, page_size, order):
    cache = cache_of(len(lens), page_size, order)
    indptr, indices = cache.kv_indptr(lens).tolist(), cache.kv_indices(lens).tolist()
    assert indptr == [0, *itertools.accumulate(-(-n // page_size) for n in lens)]
    assert len(indices) == indptr[-1] == len(set(indices))
    for request, (begin, end) in enumerate(itertools.pairwise(indptr)):
        assert indices[begin:end] == cache.page_table[request, : end - begin].tolist()
    assert all(0 <= page < cache.k.shape[1] for page in indices)


# ---- tree masks: each token attends to the context and to its own branch


@FEW
@given(st.integers(0, 20), st.lists(st.integers(0, 10**6), max_size=12), st.integers(0, 10**6))
def test_a_tree_is_its_branches(context_len, choices, seed):
    parents = [choice % (token + 1) for token, choice in enumerate(choices)]
    q_len = len(parents) + 1
    branches = [[0]]
    for token, parent in enumerate(parents, start=1):
        branches.append([*branches[parent], token])
    generator = torch.Generator().manual_seed(seed)
    cache = cache_of(1, 4, "permuted")
    draw = torch.randn(2, 1, context_len + q_len, HEADS, DIM, generator=generator)
    q = torch.randn(1, q_len, HEADS, DIM, generator=generator)
    cache.append(0, *draw)
    cache.advance(context_len)
    tree = torch.tensor([[sum(1 << node for node in branch) for branch in branches]])
    call = prepare(q, cache, backend="reference", spec=AttentionSpec(tree=tree))
    call()
    for token, branch in enumerate(branches):
        seen = [*range(context_len), *(context_len + node for node in branch)]
        k, v = draw[0, 0, seen, 0].double(), draw[1, 0, seen, 0].double()
        weights = torch.softmax(k @ q[0, token, 0].double() * DIM**-0.5, 0)
        assert torch.allclose(call.out[0, token, 0].double(), weights @ v, atol=1e-5)


# ---- keys of a sweep

SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
VALUES = SCALARS | st.text(max_size=12) | st.lists(SCALARS, max_size=3)
POINTS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=6)


@FEW
@given(POINTS, st.randoms(use_true_random=False))
def test_a_key_is_the_point_in_any_order_and_gives_it_back(point, shuffle):
    names = list(point)
    shuffle.shuffle(names)
    key = point_key(point, "abc123")
    assert point_key({name: point[name] for name in names}, "abc123") == key
    assert json.dumps(_axes_of_key(key), sort_keys=True) == json.dumps(point, sort_keys=True)


@FEW
@given(POINTS, POINTS)
def test_different_points_have_different_keys(a, b):
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (point_key(a) == point_key(b)) == same


@FEW
@given(st.lists(POINTS, min_size=1, max_size=5, unique_by=lambda point: point_key({"seed": 0, **point})))
def test_planned_points_survive_json(points):
    clean = [point for point in points if redact(point) == point]
    if clean:
        keyed = keyed_points(clean, 0, "")
        assert len(keyed) == len(clean)
        for key, point in keyed.items():
            assert point_key(json.loads(json.dumps(point))) == key


@FEW
@given(st.text(max_size=200))
def test_redaction_is_final(text):
    assert redact(redact(text)) == redact(text)


# ---- counts of the importer: what an engine prints of known steps comes back


@st.composite
def windows(draw):
    k = draw(st.integers(1, 8))
    size = draw(st.integers(1, 400))
    accepted = draw(st.lists(st.integers(0, k), min_size=size, max_size=size))
    return k, accepted


@settings(max_examples=200, deadline=None, derandomize=True)
@given(windows())
def test_a_vllm_line_gives_its_counts_back(window):
    k, accepted = window
    counts = AcceptanceCounts.from_steps([(k, kept) for kept in accepted], k)
    rates = [sum(kept > position for kept in accepted) / len(accepted) for position in range(k)]
    line = (
        "INFO 05-08 10:00:00 [metrics.py:101] SpecDecoding metrics: "
        f"Mean acceptance length: {counts.mean_acceptance_length:.2f}, Accepted throughput: 36.00 tokens/s, "
        f"Drafted throughput: 60.00 tokens/s, Accepted: {counts.num_accepted_tokens} tokens, "
        f"Drafted: {counts.num_drafted_tokens} tokens, Per-position acceptance rate: "
        f"{', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * counts.draft_acceptance_rate:.1f}%"
    )
    (record,) = Reader().read_text(line, "x")
    assert (record.num_accepted_tokens, record.num_drafted_tokens) == (sum(accepted), k * len(accepted))
    assert record.num_speculative_tokens == k
    if record.num_drafted_steps is not None:  # else a warning says why not
        assert record.num_drafted_steps == len(accepted)
        assert record.mean_acceptance_length == pytest.approx(counts.mean_acceptance_length)
    else:
        assert record.warnings


@FEW
@given(windows())
def test_a_meta_info_gives_its_counts_back(window):
    k, accepted = window
    counts = AcceptanceCounts.from_steps([(k, kept) for kept in accepted], k)
    histogram = [accepted.count(kept) for kept in range(k + 1)]
    meta = {
        "spec_num_correct_drafts": sum(accepted), "spec_num_proposed_drafts": k * len(accepted),
        "spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram,
        "completion_tokens": sum(accepted) + len(accepted) + 1,
    }  # fmt: skip
    (record,) = Reader().read_text(json.dumps({"meta_info": meta}), "x")
    assert record.num_verify_steps == len(accepted)
    assert record.mean_acceptance_length == pytest.approx(counts.mean_acceptance_length)
    assert record.draft_acceptance_rate == pytest.approx(counts.draft_acceptance_rate)
    assert record.acceptance_rate_per_pos == pytest.approx(counts.acceptance_rate_per_pos.tolist())
    assert not any("contradiction" in warning for warning in record.warnings)
