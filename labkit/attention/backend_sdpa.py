"""PyTorch's ``scaled_dot_product_attention`` with an explicit lower-right mask (its own ``is_causal`` is top-left).

``per_token`` verifies as `q_len` single-token calls, as an engine does whose decode kernel takes one query: K and V are
read `q_len` times, each call over the keys that its token sees.
"""

from typing import Any

from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.attention.dense import dense_supports, prepare_dense
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

SOURCES = ("dense.py",)
# Prefill chunks go through in blocks: the mask stays small, and a block skips the keys behind its last row.
VARIANTS = {"sdpa": {"rows_per_call": 128}, "per_token": {"rows_per_call": 1}}


def supports(shape: AttentionShape, device: str, rows_per_call: int) -> str:
    """As `dense_supports`."""
    return dense_supports(shape, device)


def prepare(q: Tensor, cache: PagedKVCache, spec: AttentionSpec, *, rows_per_call: int) -> tuple[Run, dict[str, Any]]:
    """All rows in one call up to `rows_per_call`; no mask where that is one row."""
    return prepare_dense(q, cache, spec, rows_per_call=rows_per_call)
