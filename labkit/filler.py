"""Filler for long contexts: the text and the code that every Python installation carries, read on demand."""

import functools
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from labkit.errors import InputError

FillerKind = Literal["text", "code"]
# Sources that CPython ships as plain files on every platform since 3.11; none of them is frozen.
_CODE_MODULES = (
    *("argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "fractions", "inspect", "ipaddress"),
    *("mailbox", "pickle", "shutil", "smtplib", "statistics", "subprocess", "tarfile", "threading", "traceback"),
    *("typing", "uuid"),
)
_PASSAGE_CHARS = 4000


def filler_text(kind: FillerKind, *, order: str) -> str:
    """Return all passages of one kind, shuffled by `order`.

    Text is the language reference behind ``help()``, about 110,000 tokens; code is the standard library, about 350,000.

    Raises InputError: `kind` is unknown, or this installation lacks the sources.
    """
    passages = list(_passages(kind))
    random.Random(f"{kind}:{order}").shuffle(passages)
    return "\n\n".join(passages)


@functools.lru_cache
def _passages(kind: FillerKind) -> tuple[str, ...]:
    """Documents cut at blank lines into passages of at most about 4,000 characters."""
    if kind not in get_args(FillerKind):
        raise InputError(f"kind wants one of {', '.join(get_args(FillerKind))}, got {kind!r}")
    passages = []
    for document in _text_documents() if kind == "text" else _code_documents():
        passage = ""
        for paragraph in document.strip().split("\n\n"):
            if passage and len(passage) + len(paragraph) > _PASSAGE_CHARS:
                passages.append(passage)
                passage = ""
            passage = f"{passage}\n\n{paragraph}" if passage else paragraph
        passages.append(passage)
    return tuple(passages)


def _text_documents() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(f"the text filler needs the pydoc_data package of the standard library: {error}") from error
    return (topics[name] for name in sorted(topics))


def _code_documents() -> Iterator[str]:
    for name in _CODE_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise InputError(f"the code filler needs the source of the standard module {name}, which is not installed")
        yield Path(spec.origin).read_text(encoding="utf-8")
