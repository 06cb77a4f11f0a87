"""Progress that reads well in a notebook, on a terminal and in a log."""

import io
import os
import sys
from typing import Any

from tqdm import tqdm

from labkit.provenance import redact

_BAR = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed} eta {remaining}"
_LINE = "{desc} {n_fmt}/{total_fmt} {elapsed} eta {remaining}"


class _PlainLines(tqdm):
    """One line now and then: bars leave a log full of control characters."""

    monitor_interval = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print the state as a line, but none before the first point."""
        if self.n > self.initial or self.n == self.total:
            say(str(self))


def in_notebook() -> bool:
    """Whether a live notebook shows this process's output (papermill with LABKIT_BATCH=1 does not count)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell" and not os.environ.get("LABKIT_BATCH")


def say(text: str) -> None:
    """One line for the user, redacted, beside any bar. Standard output stays free for results, except in a notebook."""
    tqdm.write(redact(text), file=sys.stdout if in_notebook() else sys.stderr)


def progress(total: int | None, label: str = "sweep", *, initial: int = 0) -> tqdm:
    """A counter of ``total`` points (None: unknown), ``initial`` done: ``update()`` after each, ``close()`` at last.

    In a notebook a widget bar, on a terminal a text bar, else one line per 10 seconds
    (``sweep 40/400 00:12 eta 01:50``) and one at the end.
    """
    if in_notebook():
        from tqdm.notebook import tqdm as notebook_bar

        return notebook_bar(total=total, desc=label, initial=initial)
    if sys.stderr.isatty():
        return tqdm(total=total, desc=label, initial=initial, bar_format=_BAR)
    when: dict[str, Any] = {"mininterval": 10.0, "miniters": 1, "smoothing": 0}
    # tqdm's own line feeds go nowhere: `say` ends the lines.
    return _PlainLines(total=total, desc=label, initial=initial, bar_format=_LINE, file=io.StringIO(), **when)
