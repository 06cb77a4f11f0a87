"""Where things lie. Notebooks, tests and the command line start from different folders: nothing resolves from '.'."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from labkit.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
REFERENCE = DATA / "reference"
RUNS = DATA / "runs"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"


def check_out(path: Path, endings: Sequence[str] = ()) -> Path:
    """``path`` if a file can be written there; asked before the work whose result it will hold.

    Raises InputError: an ending other than these, or a folder that is missing or cannot be written to.
    """
    if endings and path.suffix.lstrip(".") not in endings:
        raise InputError(f"--out {path}: want a file ending in .{', .'.join(endings)}")
    if path.is_dir():
        raise InputError(f"--out {path}: want a file, this is a folder")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: no such folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--out {path}: cannot write to {path.parent}")
    return path


def make_folder(folder: Path, name: str) -> Path:
    """``folder``, created when missing. Raises InputError with ``name``: it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{name}: wanted a folder to write to, got {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{name}: wanted a folder to write to, got {folder}: Permission denied")
    return folder


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], None]) -> Path:
    """Write a file, or have it written, so that a reader sees the old one or the new one, also after a power cut.

    Raises InputError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path


def cache_dir() -> Path:
    """Folder for files that can be made again (dequantised weights), created when missing.

    ``LABKIT_CACHE`` wins over ``XDG_CACHE_HOME``, which wins over ``~/.cache``. Raises InputError: it cannot be made.
    """
    base = os.environ.get("LABKIT_CACHE")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "labkit"
    return make_folder(folder, "cache (LABKIT_CACHE)")
