"""Lines of a log, however it was captured: gzip, stdin, CRLF, ANSI colour, docker and journald envelopes.

Memory is bounded whatever comes: a longer line is dropped and named, gzip is expanded chunk by chunk.
"""

import codecs
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.errors import InputError
from labkit.progress import progress

MAX_LINE_BYTES = 32 << 20  # one JSON line with the details of every request may be long
MAX_LOG_CHARACTERS = 1 << 15  # no engine prints a longer log line; patterns never see more
MAX_DOCUMENT_BYTES = 32 << 20
BLOCK_BYTES, HEAD_MIB, TAIL_MIB = 1 << 20, 6, 12
MAX_EXPANSION, FREE_EXPANSION_BYTES, _PROGRESS_BYTES = 200, 1 << 28, 64 << 20
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)")
_SYSLOG = r"(?:\w{3} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT\S+) (\S+ [^\s\[:]+)(?:\[\d+\])?: "
# Docker compose; kubectl logs --prefix; journald and syslog; a process of vLLM.
_SOURCE = re.compile(rf"([\w.-]+) +\| |\[(pod/[^\]]+)\] |{_SYSLOG}|\((\w+ pid=\d+)\)")
_ENVELOPES = ("log", "MESSAGE")  # docker's json-file driver; journalctl -o json
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


class Input:
    """A file, ``-`` for stdin, read as decompressed bytes. Raises InputError where there is no such file."""

    def __init__(self, path: str | Path):
        self.name, self.notes, self.size = str(path), list[str](), 0
        self._raw: Any
        if self.name == "-":
            if sys.stdin is None or sys.stdin.closed:
                raise InputError("stdin: wanted an open standard input, and - only once; it is closed")
            self.name, self._raw = "stdin", sys.stdin.buffer
        elif Path(path).is_dir() or not Path(path).exists():  # a pipe is fine
            problem = "a folder" if Path(path).is_dir() else "no such file"
            raise InputError(f"{path}: {problem}; wanted a log, metrics page, result file or trace (- is stdin)")
        else:
            self.size, self._raw = Path(path).stat().st_size, Path(path).open("rb", 1 << 20)  # noqa: SIM115
        self._decoder: Any = None
        self._gzip = self._raw.peek(2)[:2] == b"\x1f\x8b"
        self.file: Any = gzip.GzipFile(fileobj=self._raw) if self._gzip else self._raw
        wide = self.start(2) in (b"\xff\xfe", b"\xfe\xff")  # as PowerShell writes what is redirected
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace") if wide else None
        self._expanded, self._shown, self._part = 0, 0, (-1, 0)
        self._bar = progress(self.size >> 20, f"read {Path(path).name} MiB") if self.size > _PROGRESS_BYTES else None

    def start(self, size: int = 1 << 16) -> bytes:
        """The first bytes, without taking them."""
        try:
            data = self.file.peek(size)[:size]
        except _DAMAGED as error:
            raise InputError(f"{self.name}: wanted a gzip file, got {error}") from error
        return data.decode("utf-16", "replace").encode("utf-8", "replace") if self._decoder else data

    def read(self, size: int) -> bytes:
        """Some bytes, at most ``size``; b"" at the end or where a gzip file is cut off.

        Raises InputError for a gzip file that expands beyond reason.
        """
        try:
            data = self.file.read1(size)
        except _DAMAGED as error:
            self.notes.append(f"the gzip file is damaged or cut off ({error}); what came before it was read")
            return b""
        self._expanded += len(data)
        if self._gzip and self.size and self._expanded > max(FREE_EXPANSION_BYTES, MAX_EXPANSION * self.size):
            raise InputError(f"{self.name}: expands more than {MAX_EXPANSION} times; wanted a log, not a gzip bomb")
        if self._bar is None and not self.size and self._expanded > _PROGRESS_BYTES:
            self._bar = progress(None, f"read {self.name} MiB")
        if self._bar is not None and (done := (self._raw.tell() if self.size else self._expanded) >> 20) > self._shown:
            self._bar.update(done - self._shown)
            self._shown = done
        if self._decoder and data:
            return self._decoder.decode(data).encode("utf-8", "replace") or self.read(size)  # half of a character
        return data

    def close(self) -> None:
        """Close the file and its progress bar."""
        if self._bar is not None:
            self._bar.close()
        self._raw.close()

    def lines(
        self, enter: Callable[[str], re.Pattern[str] | None], sampled: bool = False
    ) -> Iterator[tuple[int, str] | None]:
        """Line number from 1, and text without colour and envelope; None where lines were passed over.

        A carriage return inside a line (progress bars) ends a part of it. Lines above ``MAX_LINE_BYTES`` are dropped
        and named in `notes`. ``enter`` sees the text of the lines to come and says what a line must hold to be of use,
        None for all of them. ``sampled``: long inputs are read in part
        (`_due`), which `notes` tells.
        """
        number, rest, passing, passed, data = 1, b"", False, 0, b"\n"
        while data:
            place = self._expanded
            block = data = self.read(BLOCK_BYTES)
            if sampled and data and not self._due(place):
                yield None
                rest, passing, passed, number = b"", True, passed + len(data), number + data.count(b"\n")
                continue
            if passing:  # to the end of a line that began in what was left out
                _, end, block = data.partition(b"\n")
                passing, number = not end, number + len(end)
            rest += block
            cut = rest.rfind(b"\n") + 1 if data else len(rest)
            whole, rest = rest[:cut].decode("utf-8", "replace"), rest[cut:]
            wanted = enter(whole := _ANSI.sub("", whole))
            for line_number, line in _wanted_lines(whole, wanted, number):
                for part in line.rstrip("\r").split("\r") if "\r" in line else (line,):
                    yield line_number, clean(part)
            number += whole.count("\n")
            if len(rest) > MAX_LINE_BYTES:
                self.notes.append(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB and was left out")
                rest, passing = b"", True
        if passed:
            read, share = (self._expanded - passed) >> 20, 1 - passed / self._expanded
            rest_of = f"the first {HEAD_MIB} and {'evenly spread' if self.size else 'ever fewer'} ones of the rest"
            text = f"{read} of {self._expanded >> 20} MiB were read ({share:.0%}): {rest_of}"
            self.notes.append(f"{text}; labkit import reads all")

    def _due(self, place: int) -> bool:
        """Whether what starts at this byte is read where a long input is read in part.

        The first `HEAD_MIB`; then of a file the first MiB of each of `TAIL_MIB` equal parts, of standard input, whose
        length nobody knows, ever fewer.
        """
        index = place >> 20
        if index < HEAD_MIB or (not self._gzip and 0 < self.size <= (HEAD_MIB + TAIL_MIB) << 20):
            return True
        if not self.size:
            return index % (1 << (index // HEAD_MIB).bit_length()) == 0
        part = self._raw.tell() * TAIL_MIB // self.size
        if part != self._part[0]:
            self._part = part, index
        return index == self._part[1]


def _wanted_lines(text: str, wanted: re.Pattern[str] | None, number: int) -> Iterator[tuple[int, str]]:
    """Lines that hold what is wanted, with their numbers from ``number``; the others are passed over at once."""
    if wanted is None:
        yield from enumerate(text.removesuffix("\n").split("\n") if text else (), start=number)
        return
    counted, end = 0, -1
    for match in wanted.finditer(text):
        if match.start() > end:
            start = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            end = len(text) if end < 0 else end
            number, counted = number + text.count("\n", counted, start), start
            yield number, text[start:end]


def clean(text: str) -> str:
    """A line without the JSON that docker or journald put around it, and without colour inside of that."""
    if text[:1] == "{" and any(f'"{name}"' in text[:4096] for name in _ENVELOPES):
        content = load_json(text)
        found = content if isinstance(content, dict) else {}
        inner = [found[name] for name in _ENVELOPES if isinstance(found.get(name), str)]
        return _ANSI.sub("", inner[0]).strip() if inner else text
    return text


def printed_by(text: str) -> str:
    """Who printed a line, by the prefix that a collector of several logs puts before it; "" where there is none."""
    return match[match.lastindex or 0] if (match := _SOURCE.match(text)) else ""


def load_json(text: str) -> Any:
    """Parse JSON; None where it is not JSON or nested too deeply to be a result."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
