"""Progress that reads well in a notebook, on a terminal and in a log."""

import os
import sys
import time
from typing import Any, Protocol

from tqdm import tqdm

_BAR = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed} eta {remaining}"


class Progress(Protocol):
    """What `progress` returns."""

    def update(self, n: int = 1) -> Any: ...

    def close(self) -> None: ...


class _PlainLines:
    """One line now and then: bars leave a log full of control characters."""

    def __init__(self, label: str, total: int, initial: int, every_s: float):
        self.label, self.total, self.done, self.initial, self.every_s = (label, total, initial, initial, every_s)
        self.started = self.printed = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.printed >= self.every_s:
            self.printed = now
            self._print(now)

    def _print(self, now: float) -> None:
        elapsed = now - self.started
        fresh = self.done - self.initial
        eta = f" eta {elapsed / fresh * (self.total - self.done):.0f}s" if fresh and self.done < self.total else ""
        say(f"{self.label} {self.done}/{self.total} {elapsed:.0f}s{eta}")

    def close(self) -> None:
        self._print(time.monotonic())


def in_notebook() -> bool:
    """Whether a live notebook shows this process's output (papermill with LABKIT_BATCH=1 does not count)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell" and not os.environ.get("LABKIT_BATCH")


def say(text: str) -> None:
    """One line for the user, beside any bar. Standard output stays free for results, except in a notebook."""
    tqdm.write(text, file=sys.stdout if in_notebook() else sys.stderr)


def progress(total: int, label: str = "sweep", *, initial: int = 0, every_s: float = 10.0) -> Progress:
    """A counter of ``total`` points, ``initial`` of them done: ``update()`` after each, ``close()`` at last.

    In a notebook a widget bar, on a terminal a text bar, else one line per ``every_s`` seconds
    (``sweep 40/400 12s eta 110s``) and one at the end.
    """
    if in_notebook():
        from tqdm.notebook import tqdm as notebook_bar

        return notebook_bar(total=total, desc=label, initial=initial)
    if sys.stderr.isatty():
        return tqdm(total=total, desc=label, initial=initial, bar_format=_BAR)
    return _PlainLines(label, total, initial, every_s)
