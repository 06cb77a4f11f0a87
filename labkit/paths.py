"""Where things lie. Notebooks, tests and the command line start from different folders: nothing resolves from '.'."""

import os
from pathlib import Path

from labkit.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
REFERENCE = DATA / "reference"
RUNS = DATA / "runs"
FIGURES = ROOT / "figures"
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path


def cache_dir() -> Path:
    """Folder for files that can be made again (dequantised weights), created when missing.

    ``LABKIT_CACHE`` wins over ``XDG_CACHE_HOME``, which wins over ``~/.cache``. Raises InputError: it cannot be made.
    """
    base = os.environ.get("LABKIT_CACHE")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "labkit"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cache {folder} (LABKIT_CACHE): wanted a folder to write to, got {error.strerror}") from error
    return folder
