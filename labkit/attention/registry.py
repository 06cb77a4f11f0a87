"""The backends by name: shipped ones, those of installed packages, and those that a user registers."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.attention.spec import AttentionSpec, Run
from labkit.errors import BackendUnavailable, InputError
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

ENTRY_POINT_GROUP = "labkit.attention"

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
    for module, names in {
        "reference": "reference",
        "backend_sdpa": "sdpa per_token",
        "backend_sdpa_masked": "sdpa_masked",
        "backend_triton_split": "triton_split",
        "backend_triton_ladder": "triton_nosplit triton_ladder_split triton_ladder_packed triton_ladder_staged "
        "triton_per_token triton_decode8 triton_segmented_2d triton_segmented_3d",
        "backend_flashinfer": "flashinfer_fa2 flashinfer_fa3 flashinfer_auto",
        "backend_flashinfer_decode": "flashinfer_decode",
        "backend_flashinfer_cascade": "flashinfer_cascade",
        "backend_fa3": "fa3 fa3_nosplit fa3_split fa3_packed fa3_unpacked",
        "backend_sdpa_kernel": "sdpa_flash sdpa_efficient sdpa_cudnn sdpa_math",
        "backend_flex": "flex",
    }.items()
    for name in names.split()
}


def _from_module(module: ModuleType, name: str | None = None) -> Backend:
    """The backend of a module, or the one of its ``VARIANTS`` (name -> options of `supports` and `prepare`)."""
    variants = getattr(module, "VARIANTS", {})
    needed = ("supports", "prepare") if name in variants else ("NAME", "supports", "prepare")
    missing = [part for part in needed if not hasattr(module, part)]
    if missing:
        raise InputError(f"a backend module must define NAME, supports and prepare, {module.__name__} lacks {missing}")
    file = Path(str(module.__file__))
    paths = [file, *(file.parent / source for source in getattr(module, "SOURCES", ()))]
    options = variants.get(name, {})
    return Backend(
        name if name and name in variants else module.NAME,
        functools.partial(module.supports, **options) if options else module.supports,
        functools.partial(module.prepare, **options) if options else module.prepare,
        (*(path.read_text() for path in paths), *([repr(options)] if options else [])),
    )


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def lookup(name: str) -> Backend:
    """The backend of a name, imported on first use. Raises InputError or BackendUnavailable."""
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

    prepare_fn : ``(q, cache, spec) -> (run, info)``; `run(q, layer, out, lse)` writes `out`, and `info` holds
        ``resolved_kernel`` and, where known, ``num_programs``, ``num_splits`` and ``kv_passes``.
    supports : ``(shape, device) -> ""`` when it can do the shape, else the reason.
    source : The text its digest is made of; default: the source of `prepare_fn`.

    Raises InputError: the name belongs to a backend of labkit; ValueError: the source of `prepare_fn` cannot be read
    and none was given.
    """
    known = _BACKENDS.get(name)
    function = known.prepare if isinstance(known, Backend) else None
    module = str(getattr(getattr(function, "func", function), "__module__", ""))
    if isinstance(known, str) or module.startswith("labkit.attention."):
        raise InputError(f"name must not be that of a built-in backend, got {name!r}")
    if source is None:
        try:
            source = inspect.getsource(prepare_fn)
        except (OSError, TypeError) as error:
            raise ValueError(f"source must be given when prepare_fn's own cannot be read ({error})") from error
    _BACKENDS[name] = Backend(name, supports, prepare_fn, (source,))


def load_backend_file(path: str | Path) -> list[str]:
    """Run a Python file that calls `register_backend`, or that defines ``NAME``, ``supports`` and ``prepare``.

    Returns the names it added or replaced.

    Raises InputError: no such file, it fails to run, or it adds no backend.
    """
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"labkit_backend_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise InputError(f"backend file must be an existing Python file, got {str(path)!r}")
    before = dict(_BACKENDS)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that exits is no backend either
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


def unusable(backend: Backend) -> str:
    """Why a backend does no shape at all on this machine, or ""."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = ("bfloat16", "float16", "float32")
    shapes = [AttentionShape(1, 1, 16, 1, 1, 128, q_dtype=dtype, shared_prefix_len=16) for dtype in dtypes]
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
            found[name] = unusable(lookup(name))
        except BackendUnavailable as error:
            found[name] = error.reason
    return found


def backend_digest(name: str) -> str:
    """12 hex digits of the backend's source (its knobs are constants in there) and of the torch and Triton versions.

    Raises InputError: unknown backend.
    """
    backend = lookup(name)
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "none"
    text = "\0".join([*backend.source, torch.__version__, triton_version])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
