"""Verify as `q_len` single-token calls, as an engine does whose decode kernel takes one query.

K and V are read `q_len` times.
"""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.dense import dense_supports, prepare_dense
from labkit.kv_cache import PagedKVCache

NAME = "per_token"
SOURCES = ("dense.py",)

supports = dense_supports


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """One call per query token over the keys that it sees, without a mask. At ``q_len`` 1 it equals `sdpa`."""
    return prepare_dense(q, cache, spec, rows_per_call=1)
