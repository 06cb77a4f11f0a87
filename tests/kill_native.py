"""A call that holds the interpreter's lock and never returns, as a stuck native kernel does."""

import ctypes
from typing import Any


def hang(point: dict[str, Any]) -> None:
    """Sleep in C without releasing the lock."""
    ctypes.PyDLL(None).sleep(600)
