"""Prepare an attention call on a named backend. The only public module of this package beside `inputs`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.attention.registry import (
    available_backends,
    backend_digest,
    load_backend_file,
    lookup,
    register_backend,
    unusable,
)
from labkit.attention.spec import DEFAULT_SPEC, AttentionSpec, Run
from labkit.errors import BackendUnavailable, InputError, Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.shapes import MAX_Q_LEN, AttentionShape

__all__ = [
    "DEFAULT_SPEC",
    "AttentionSpec",
    "PreparedAttention",
    "Run",
    "available_backends",
    "backend_digest",
    "load_backend_file",
    "max_error",
    "prepare",
    "register_backend",
    "shape_of",
]


class PreparedAttention:
    """Attention of one step, metadata built: call it to run layer 0 on the bound `q`, or `run` it per layer.

    backend : Its name.
    info : What really runs: ``resolved_kernel``, ``num_programs``, ``num_splits``, ``kv_passes`` (times a call reads
        each byte of K and V) and what the backend adds (``grid``, ``workspace_bytes``). None where not known.
    q, out : ``[batch_size, q_len, num_qo_heads, head_dim]``.
    lse : float32 ``[batch_size, q_len, num_qo_heads]``, natural logarithm, or None.
    """

    def __init__(
        self,
        backend: str,
        run: Run,
        info: dict[str, Any],
        q: Tensor,
        out: Tensor,
        lse: Tensor | None,
        prepare_again: Callable[[], object],
    ):
        self.backend, self.info, self._run, self._prepare_again = backend, info, run, prepare_again
        self.q, self.out, self.lse = q, out, lse

    def __call__(self) -> None:
        self._run(self.q, 0, self.out, self.lse)

    def run(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of another `q` of the prepared shape and dtype over `layer`, into a contiguous `out`.

        Raises ValueError: `q` has another shape than the prepared one, or `out` is not contiguous.
        """
        if q.shape != self.q.shape:
            raise ValueError(f"q must have the prepared shape {tuple(self.q.shape)}, got {tuple(q.shape)}")
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got strides {out.stride()}")
        self._run(q, layer, out, lse)

    @property
    def kv_lens(self) -> Tensor:
        """int32 ``[batch_size]``: what a replay reads, for graphs that write it. Raises Unsupported: as `replan`."""
        self.replan()
        kv_lens: Tensor = vars(self._run)["kv_lens"]
        return kv_lens

    def replan(self) -> None:
        """Take over the cache's present lengths, for a call that was captured in a graph and is replayed.

        Raises Unsupported: the backend must be prepared anew for other lengths.
        """
        replan = getattr(self._run, "replan", None)
        if replan is None:
            raise Unsupported(f"backend {self.backend!r} must be prepared again for other lengths")
        replan()

    def plan(self) -> None:
        """Make the metadata of this step again, to be timed: all that must happen once per step and not per layer."""
        again = getattr(self._run, "plan", None) or getattr(self._run, "replan", None) or self._prepare_again
        again()


def _check_tree(tree: Tensor, q: Tensor) -> None:
    batch_size, q_len = q.shape[:2]
    if tree.shape != (batch_size, q_len) or tree.dtype != torch.int64 or tree.device != q.device or q_len > MAX_Q_LEN:
        wanted = f"int64 [{batch_size}, {q_len}] on {q.device}, for at most 64 new tokens"
        raise ValueError(f"tree must be {wanted}, got {tree.dtype} {list(tree.shape)} on {tree.device}")
    later = torch.arange(q_len, device=q.device)[None, :] > torch.arange(q_len, device=q.device)[:, None]
    sees = (tree[:, :, None] >> torch.arange(q_len, device=q.device)) & 1
    if bool((sees.bool() & later).any()):
        raise ValueError("tree: a token may only see itself and tokens before it")


def shape_of(q: Tensor, cache: PagedKVCache, spec: AttentionSpec = DEFAULT_SPEC) -> AttentionShape:
    """The checked shape of a call: `q` ``[batch_size, q_len, num_qo_heads, head_dim]`` over `cache`.

    Raises ValueError: `q`, `cache` and the tree do not belong together, or the cache has no room for the `q_len` new
    tokens.
    """
    if q.dim() != 4:
        raise ValueError(f"q must be [batch_size, q_len, num_qo_heads, head_dim], got {tuple(q.shape)}")
    batch_size, q_len, num_qo_heads, head_dim = q.shape
    for name, got, size in (("batch_size", batch_size, cache.batch_size), ("head_dim", head_dim, cache.head_dim)):
        if got != size:
            raise ValueError(f"{name} of q must equal the cache's {size}, got {got}")
    if q.device.type != cache.device.type:
        raise ValueError(f"q must be on the cache's device {cache.device}, got {q.device}")
    shape = AttentionShape(
        batch_size=batch_size,
        q_len=q_len,
        context_len=tuple(cache.context_lens),
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        q_dtype=str(q.dtype).removeprefix("torch."),
        kv_dtype=str(cache.dtype).removeprefix("torch."),
        mask="tree" if spec.tree is not None else "causal" if spec.causal else "none",
        window=spec.window,
        shared_prefix_len=cache.shared_prefix_len,
    )
    if spec.tree is not None:
        _check_tree(spec.tree, q)
    if max(shape.kv_lens) > cache.max_context_len:
        wanted = f"context_len + q_len must stay within max_context_len={cache.max_context_len}"
        raise ValueError(f"{wanted}, got {shape.context_len_max} + {q_len}")
    return shape


def prepare(
    q: Tensor, cache: PagedKVCache, *, backend: str, spec: AttentionSpec = DEFAULT_SPEC, out: Tensor | None = None
) -> PreparedAttention:
    """Check the call, look the backend up and build its metadata once; nothing here is timed.

    The cache already holds K and V of the `q_len` new tokens behind its `context_lens` (appended, not yet advanced).
    `out` (and `lse`) are filled with NaN, so a row that a backend leaves out cannot pass for a result.

    q : ``[batch_size, q_len, num_qo_heads, head_dim]``; also stands for later `run` calls of the same shape and dtype.
    out : Same shape and dtype as `q`; made when None.

    Raises InputError: unknown backend, or heads that do not divide; ValueError: `q`, `cache` or `out` do not fit
    together; Unsupported: the backend cannot do this shape; BackendUnavailable: the backend cannot run on this machine
    at all.
    """
    entry = lookup(backend)
    shape = shape_of(q, cache, spec)
    reason = entry.supports(shape, q.device.type)
    if reason:
        if why := unusable(entry):
            raise BackendUnavailable(backend, why)
        raise Unsupported(f"backend {backend!r} cannot do this: {reason} (asked: {shape})")
    if spec.max_splits is not None and spec.max_splits < 1:
        raise InputError(f"max_splits must be at least 1, got {spec.max_splits}")
    if spec.sm_scale is not None and not spec.sm_scale > 0:
        raise InputError(f"sm_scale must be above 0, got {spec.sm_scale}")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        wanted = f"contiguous {q.dtype} {tuple(q.shape)} like q"
        raise ValueError(f"out must be {wanted}, got {out.dtype} {tuple(out.shape)}")
    out.fill_(math.nan)
    lse = torch.full(q.shape[:3], math.nan, device=q.device) if spec.return_lse else None
    made = entry.prepare(q, cache, spec)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], dict)):
        raise InputError(f"backend {backend!r}: prepare must return (run, info), a callable and a dict; got {made!r}")
    run, info = made
    info = {"num_programs": None, "num_splits": None, "kv_passes": None} | info
    return PreparedAttention(backend, run, info, q, out, lse, lambda: entry.prepare(q, cache, spec))


def max_error(out: Tensor, ref: Tensor) -> float:
    """``max|out - ref| / max|ref|`` in float64; infinite when `out` holds a NaN or an infinity that `ref` lacks."""
    out, ref = out.double(), ref.double()
    is_same = out == ref  # the lse of a row without a visible key is -inf in both
    difference = torch.where(is_same, 0.0, out - ref).abs().max().item()
    if difference == 0.0:
        return 0.0
    error = difference / ref.nan_to_num(neginf=0.0).abs().max().clamp(min=torch.finfo(torch.float64).tiny).item()
    return error if math.isfinite(error) else math.inf
