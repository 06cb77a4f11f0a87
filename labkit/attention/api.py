"""Prepare an attention call on a named backend. The only public module of this package beside `inputs`."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from labkit.errors import BackendUnavailable, InputError, Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

ENTRY_POINT_GROUP = "labkit.attention"


@dataclass(frozen=True)
class AttentionSpec:
    """What to compute beside the shapes. The mask is lower-right aligned and causal unless `tree` is given.

    Attributes
    ----------
    sm_scale
        Multiplies the logits; above 0, default ``1 / sqrt(head_dim)``.
    max_splits
        Caps the KV splits of the backends that split; the others ignore it, as they would an engine's flag.
    window
        Keys a row sees at most, its own included; None: all.
    tree
        int64 ``[batch_size, q_len]``, `q_len` at most 64: bit j of entry i is set where new token i sees new token j.
        A token may only see itself and tokens before it; one that sees no new token (padding) is fully masked. All
        others see the whole context.
    """

    sm_scale: float | None = None
    return_lse: bool = False
    max_splits: int | None = None
    window: int | None = None
    tree: Tensor | None = None

    def scale(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale


DEFAULT_SPEC = AttentionSpec()


class Run(Protocol):
    """Attention of `q` over one layer of the prepared cache, into `out` (and `lse`).

    It may have a method ``replan()``, which takes over new lengths of the cache without a new launch configuration.
    """

    def __call__(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None: ...


Supports = Callable[[AttentionShape, str], str]
Prepare = Callable[[Tensor, PagedKVCache, AttentionSpec], tuple[Run, dict[str, Any]]]


class Backend(NamedTuple):
    """`supports(shape, device)` returns "" or why not; `source` are the texts that decide its numbers."""

    name: str
    supports: Supports
    prepare: Prepare
    source: tuple[str, ...]


# Name -> module, imported on use, or a loaded or registered backend: the only mutable state of the package.
_BACKENDS: dict[str, str | Backend] = {
    name: f"labkit.attention.{module}"
    for name, module in {
        "reference": "reference",
        "sdpa": "backend_sdpa",
        "per_token": "backend_per_token",
        "triton_split": "backend_triton_split",
        "triton_nosplit": "backend_triton_ladder",
        "triton_ladder_split": "backend_triton_ladder",
        "triton_ladder_packed": "backend_triton_ladder",
        "triton_ladder_staged": "backend_triton_ladder",
        "triton_per_token": "backend_triton_ladder",
        "triton_decode8": "backend_triton_ladder",
        "triton_segmented_2d": "backend_triton_ladder",
        "triton_segmented_3d": "backend_triton_ladder",
        "flashinfer_fa2": "backend_flashinfer",
        "flashinfer_fa3": "backend_flashinfer",
        "flashinfer_auto": "backend_flashinfer",
        "flashinfer_decode": "backend_flashinfer_decode",
        "flashinfer_cascade": "backend_flashinfer_cascade",
        "fa3": "backend_fa3",
        "fa3_nosplit": "backend_fa3",
        "fa3_split": "backend_fa3",
        "fa3_packed": "backend_fa3",
        "fa3_unpacked": "backend_fa3",
        "sdpa_flash": "backend_sdpa_kernel",
        "sdpa_efficient": "backend_sdpa_kernel",
        "sdpa_cudnn": "backend_sdpa_kernel",
        "sdpa_math": "backend_sdpa_kernel",
        "flex": "backend_flex",
    }.items()
}


def _from_module(module: ModuleType, name: str | None = None) -> Backend:
    """The backend of a module, or the one of its ``VARIANTS`` (name -> options of `supports` and `prepare`)."""
    variants = getattr(module, "VARIANTS", {})
    needed = ("supports", "prepare") if name in variants else ("NAME", "supports", "prepare")
    missing = [needed_name for needed_name in needed if not hasattr(module, needed_name)]
    if missing:
        raise InputError(f"a backend module must define NAME, supports and prepare, {module.__name__} lacks {missing}")
    file = Path(str(module.__file__))
    paths = [file, *(file.parent / source for source in getattr(module, "SOURCES", ()))]
    options = variants.get(name, {})
    return Backend(
        name if name and name in variants else module.NAME,
        functools.partial(module.supports, **options) if options else module.supports,
        functools.partial(module.prepare, **options) if options else module.prepare,
        tuple(path.read_text() for path in paths),
    )


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _lookup(name: str) -> Backend:
    entry = _BACKENDS.get(name)
    if entry is None:
        points = _entry_points()
        if name not in points:
            raise InputError(f"backend must be one of {', '.join(sorted({*_BACKENDS, *points}))}, got {name!r}")
        entry = points[name].value
    if isinstance(entry, str):
        try:
            entry = _from_module(importlib.import_module(entry), name)
        except ImportError as error:
            raise BackendUnavailable(name, f"{type(error).__name__}: {error}") from error
        _BACKENDS[name] = entry
    return entry


def register_backend(name: str, prepare_fn: Prepare, *, supports: Supports, source: str | None = None) -> None:
    """Add or replace a backend for this process, as from a notebook cell.

    Parameters
    ----------
    prepare_fn
        ``(q, cache, spec) -> (run, info)``; `run(q, layer, out, lse)` writes `out`, and `info` holds at least
        ``resolved_kernel``, ``num_programs``, ``num_splits`` and ``kv_passes`` (None where not known).
    supports
        ``(shape, device) -> ""`` when it can do the shape, else the reason.
    source
        The text its digest is made of; default: the source of `prepare_fn`.

    Raises
    ------
    InputError
        The name belongs to a backend of labkit.
    ValueError
        The source of `prepare_fn` cannot be read and none was given.
    """
    known = _BACKENDS.get(name)
    if isinstance(known, str) or (known is not None and _module_of(known.prepare).startswith("labkit.attention.")):
        raise InputError(f"name must not be that of a built-in backend, got {name!r}")
    if source is None:
        try:
            source = inspect.getsource(prepare_fn)
        except (OSError, TypeError) as error:
            raise ValueError(f"source must be given when prepare_fn's own cannot be read ({error})") from error
    _BACKENDS[name] = Backend(name, supports, prepare_fn, (source,))


def _module_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "func", function).__module__)


def load_backend_file(path: str | Path) -> list[str]:
    """Run a Python file that calls `register_backend`, or that defines ``NAME``, ``supports`` and ``prepare``.

    Returns
    -------
    list of str
        The names it added or replaced.

    Raises
    ------
    InputError
        No such file, it fails to run, or it adds no backend.
    """
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"labkit_backend_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(f"backend file must be an existing Python file, got {str(path)!r}")
    before = dict(_BACKENDS)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"backend file {file.name} failed: {type(error).__name__}: {error}") from error
    if hasattr(module, "NAME"):
        if not isinstance(module.NAME, str):
            raise InputError(f"backend file {file.name}: NAME must be a text, got {module.NAME!r}")
        backend = _from_module(module)
        register_backend(backend.name, backend.prepare, supports=backend.supports, source="\n".join(backend.source))
    added = [name for name, entry in _BACKENDS.items() if before.get(name) != entry]
    if not added:
        raise InputError(f"backend file {file.name} must call register_backend or define NAME, supports and prepare")
    return added


def _unusable(backend: Backend) -> str:
    """Why a backend does no shape at all on this machine, or ""."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [AttentionShape(1, 1, 16, 1, 1, 128, q_dtype=dtype) for dtype in ("bfloat16", "float16", "float32")]
    try:
        reasons = [backend.supports(shape, device) for shape in shapes]
    except Exception as error:  # a user's code: this backend is unusable, the others are not
        return f"its supports raised {type(error).__name__}: {error}"
    return reasons[0] if all(reasons) else ""


def available_backends() -> dict[str, str]:
    """Every backend by name, with "" when it is usable on this machine, else the reason."""
    found = {}
    for name in [*_BACKENDS, *(name for name in _entry_points() if name not in _BACKENDS)]:
        try:
            found[name] = _unusable(_lookup(name))
        except BackendUnavailable as error:
            found[name] = error.reason
    return found


def backend_digest(name: str) -> str:
    """12 hex digits of the backend's source (its knobs are constants in there) and of the torch and Triton versions.

    Raises
    ------
    InputError
        Unknown backend.
    """
    backend = _lookup(name)
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "none"
    text = "\0".join([*backend.source, torch.__version__, triton_version])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class PreparedAttention:
    """Attention of one step, metadata built: call it to run layer 0 on the bound `q`, or `run` it per layer.

    Attributes
    ----------
    backend
        Its name.
    info
        What really runs: ``resolved_kernel``, ``num_programs``, ``num_splits``, ``kv_passes`` (times a call reads
        each byte of K and V) and what the backend adds (``grid``, ``workspace_bytes``). None where not known.
    q, out
        ``[batch_size, q_len, num_qo_heads, head_dim]``.
    lse
        float32 ``[batch_size, q_len, num_qo_heads]``, natural logarithm, or None.
    """

    def __init__(self, backend: str, run: Run, info: dict[str, Any], q: Tensor, out: Tensor, lse: Tensor | None):
        self.backend, self.info, self._run = backend, info, run
        self.q, self.out, self.lse = q, out, lse

    def __call__(self) -> None:
        self._run(self.q, 0, self.out, self.lse)

    def run(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of another `q` of the prepared shape and dtype over `layer`, into a contiguous `out`.

        Raises
        ------
        ValueError
            `q` has another shape than the prepared one, or `out` is not contiguous.
        """
        if q.shape != self.q.shape:
            raise ValueError(f"q must have the prepared shape {tuple(self.q.shape)}, got {tuple(q.shape)}")
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got strides {out.stride()}")
        self._run(q, layer, out, lse)

    def replan(self) -> None:
        """Take over the cache's present lengths, for a call that was captured in a graph and is replayed.

        Raises
        ------
        Unsupported
            The backend must be prepared anew for other lengths.
        """
        replan = getattr(self._run, "replan", None)
        if replan is None:
            raise Unsupported(f"backend {self.backend!r} must be prepared again for other lengths")
        replan()


def _check_tree(tree: Tensor, q: Tensor) -> None:
    batch_size, q_len = q.shape[:2]
    if tree.shape != (batch_size, q_len) or tree.dtype != torch.int64 or tree.device != q.device or q_len > 64:
        wanted = f"int64 [{batch_size}, {q_len}] on {q.device}, for at most 64 new tokens"
        raise ValueError(f"tree must be {wanted}, got {tree.dtype} {list(tree.shape)} on {tree.device}")
    later = torch.arange(q_len, device=q.device)[None, :] > torch.arange(q_len, device=q.device)[:, None]
    sees = (tree[:, :, None] >> torch.arange(q_len, device=q.device)) & 1
    if bool((sees.bool() & later).any()):
        raise ValueError("tree: a token may only see itself and tokens before it")


def shape_of(q: Tensor, cache: PagedKVCache, spec: AttentionSpec = DEFAULT_SPEC) -> AttentionShape:
    """The checked shape of a call: `q` ``[batch_size, q_len, num_qo_heads, head_dim]`` over `cache`.

    Raises
    ------
    ValueError
        `q`, `cache` and the tree do not belong together, or the cache has no room for the `q_len` new tokens.
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
        mask="causal" if spec.tree is None else "tree",
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
    q: Tensor,
    cache: PagedKVCache,
    *,
    backend: str,
    spec: AttentionSpec = DEFAULT_SPEC,
    out: Tensor | None = None,
) -> PreparedAttention:
    """Check the call, look the backend up and build its metadata once; nothing here is timed.

    The cache already holds K and V of the `q_len` new tokens behind its `context_lens` (appended, not yet advanced).
    `out` (and `lse`) are filled with NaN, so a row that a backend leaves out cannot pass for a result.

    Parameters
    ----------
    q
        ``[batch_size, q_len, num_qo_heads, head_dim]``; also stands for later `run` calls of the same shape and dtype.
    out
        Same shape and dtype as `q`; made when None.

    Raises
    ------
    InputError
        Unknown backend, or heads that do not divide.
    ValueError
        `q`, `cache` or `out` do not fit together.
    Unsupported
        The backend cannot do this shape.
    BackendUnavailable
        The backend cannot run on this machine at all.
    """
    entry = _lookup(backend)
    shape = shape_of(q, cache, spec)
    reason = entry.supports(shape, q.device.type)
    if reason:
        unusable = _unusable(entry)
        if unusable:
            raise BackendUnavailable(backend, unusable)
        raise Unsupported(f"backend {backend!r} does not support {shape}: {reason}")
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
    run, info = entry.prepare(q, cache, spec)
    return PreparedAttention(backend, run, info, q, out, lse)


def max_error(out: Tensor, ref: Tensor) -> float:
    """``max|out - ref| / max|ref|`` in float64; infinite when `out` holds a NaN or an infinity that `ref` lacks."""
    out, ref = out.double(), ref.double()
    is_same = out == ref  # the lse of a row without a visible key is -inf in both
    difference = torch.where(is_same, 0.0, out - ref).abs().max().item()
    if difference == 0.0:
        return 0.0
    error = difference / ref.nan_to_num(neginf=0.0).abs().max().clamp(min=torch.finfo(torch.float64).tiny).item()
    return error if math.isfinite(error) else math.inf
