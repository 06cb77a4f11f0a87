"""PyTorch's ``scaled_dot_product_attention`` with an explicit lower-right mask (its own ``is_causal`` is top-left)."""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.dense import dense_supports, prepare_dense
from labkit.kv_cache import PagedKVCache

NAME = "sdpa"
SOURCES = ("dense.py",)
# Prefill chunks go through in blocks: the mask stays small, and a block skips the keys behind its last row.
ROWS_PER_CALL = 128

supports = dense_supports


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec) -> tuple[Run, dict[str, Any]]:
    """All rows in one call up to `ROWS_PER_CALL`: K and V are read once. No mask at ``q_len`` 1."""
    return prepare_dense(q, cache, spec, rows_per_call=ROWS_PER_CALL)
