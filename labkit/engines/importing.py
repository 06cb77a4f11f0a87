"""From files to records: which format a line or document has, in one pass and bounded memory."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.engines import checks, clients, llamacpp, sglang, vllm
from labkit.engines.metrics import SAMPLE, MetricsPages
from labkit.engines.reading import MAX_DOCUMENT_BYTES, MAX_LOG_CHARACTERS, Input, load_json, printed_by
from labkit.engines.record import Record
from labkit.engines.roles import resolve_roles
from labkit.engines.server import Server, begins_server, server_marks
from labkit.engines.tables import formats, json_marks, match_json, numbers, objects, pairs
from labkit.errors import InputError

ENGINES = ("auto", "sglang", "vllm", "llamacpp", "trtllm", "aiperf", "guidellm", "llamabenchy", "specforge", "mlx-vlm")
_SAMPLES = ("sglang:", "vllm:", "llamacpp:", "trtllm_")
_SERVER_KEYS = {"attention_backend", "internal_states", "vllm_config", "env_vars"}
_JSON = ("{", "[{", "data: {")


class Reader:
    """One import session: the state of each engine's lines, and facts about the server. InputError: unknown engine."""

    def __init__(self, engine: str = "auto"):
        if engine not in ENGINES:
            raise InputError(f"engine: wanted one of {', '.join(ENGINES)}, got {engine!r}")
        self.engine, self.metrics, self.notes = engine, MetricsPages(), list[str]()
        self.sizes = Counter[int]()  # of the drafts per step
        self._lines = [item for item in formats("labels", "regex") if engine in ("auto", item.engine)]
        self._block_marks = frozenset(item.has for item in formats("block"))
        marks = (*server_marks(), *json_marks(), *_SAMPLES, *(item.has for item in self._lines), *self._block_marks)
        self._marks = dict.fromkeys(marks)
        self._start(Server())

    def _start(self, server: Server) -> None:
        self._blocks, self._source = clients.Blocks(), ""
        self._sources = dict[str, bool]()  # who printed figures; whether it came back after another, so ran beside it
        self._launch(server)

    def _launch(self, server: Server) -> None:
        self.server, self._graphs, self._logs = server, set[bool](), dict[str, Any]()
        self._logs |= {"sglang": sglang.Log(server), "vllm": vllm.Log(server), "llamacpp": llamacpp.Log(server)}

    def read(self, path: str | Path, server: Server | None = None, sampled: bool = False) -> Iterator[Record]:
        """Records of one file. ``server``: facts that hold for several files of one server; ``sampled``: of a long log
        a stated part (`Input.lines`).

        Raises InputError: no such file, broken JSON, a gzip bomb; ``sampled``: lines of several servers in turns.
        """
        source = Input(path)
        try:
            yield from self._checked(self._records(source, sampled), server)
        finally:
            source.close()
            self.notes += [f"{source.name}: {note}" for note in source.notes]
        if any(self._sources.values()):
            names = ", ".join([*self._sources][:4])
            text = f"{source.name}: lines of {len(self._sources)} servers alternate ({names}); wanted those of one"
            if sampled:  # windows, arguments and baseline of one would be taken for those of another
                raise InputError(text)
            self.notes.append(text)

    def read_text(self, text: str, name: str, server: Server | None = None) -> Iterator[Record]:
        """Records of a text that is already in memory, as `read` gives them for a file."""
        yield from self._checked(self._of_text(text, name), server)

    def _checked(self, records: Iterator[Record], server: Server | None) -> Iterator[Record]:
        self._start(server or Server())
        backend, changes, imposed = None, -1, False
        for record in itertools.chain(records, self._at_end()):
            if self.engine in ("auto", record.engine) and record.has_figures:
                facts = self.server
                record.engine_version = record.engine_version or facts.version
                record.model = record.model or facts.model
                if facts.changes != changes:
                    roles = resolve_roles(facts).items()
                    backend = {n: None if role.backend == "unknown" else role.backend for n, role in roles} or None
                    changes, imposed = facts.changes, facts.imposed
                record.backend = backend
                self.sizes.update([k] if (k := record.num_speculative_tokens) else [])
                yield checks.check(record, imposed=imposed, graphs=self._graphs)

    def _records(self, source: Input, sampled: bool) -> Iterator[Record]:
        start = source.start().lstrip()
        first, _, rest = start.partition(b"\n")
        opened = first[:1] == b"{" or (first[:1] == b"[" and first[1:2] in b'[{"')
        if not opened or (first.rstrip().endswith((b"}", b"]")) and rest):
            yield from self._of_lines(source.lines(self._enter, sampled), source.name)
            return
        data = b""
        while (chunk := source.read(1 << 20)) and len(data) <= MAX_DOCUMENT_BYTES:
            data += chunk
        if len(data) > MAX_DOCUMENT_BYTES:
            raise InputError(f"{source.name}: wanted JSON below {MAX_DOCUMENT_BYTES >> 20} MiB, or one object a line")
        text = data.decode("utf-8", "replace")
        if (content := load_json(text)) is not None:
            yield from self._of_json(content, source.name)
        else:
            self.notes.append(f"{source.name}: no whole JSON value (cut off or nested too deep); read line by line")
            yield from self._of_text(text, source.name)

    def _enter(self, block: str) -> re.Pattern[str] | None:
        """What a line of these many must hold that is one of ours; None: any line may be, a block of labels is here."""
        marks = [mark for mark in self._marks if mark in block]
        if self._blocks.start or not self._block_marks.isdisjoint(marks):
            return None
        return re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def _of_text(self, text: str, name: str) -> Iterator[Record]:
        yield from self._of_lines(enumerate(text.splitlines(), start=1), name)

    def _of_lines(self, lines: Iterable[tuple[int, str] | None], name: str) -> Iterator[Record]:
        for numbered in lines:
            if numbered is None:  # what follows does not join what came before
                for log in self._logs.values():
                    log.forget()
                yield from self._blocks.flush()
                continue
            line, text = numbered
            if self.server.served and begins_server(text):  # a restart in the same log
                yield from self._logs_end()
                self.server.restart()
                self._launch(self.server)
            known = text.startswith(_JSON) and any(mark in text for mark in json_marks())  # a look before it is parsed
            content = load_json(text.removeprefix("data: ")) if known else None
            if content is not None:
                yield from self._of_json(content, f"{name}:{line}")
            elif records := self._of_line(text[:MAX_LOG_CHARACTERS], name, line):
                yield from records

    def _logs_end(self) -> Iterator[Record]:
        yield from self._logs["sglang"].ready(at_end=True)
        yield from self._logs["vllm"].ready()
        yield from self._logs["llamacpp"].ready()

    def _at_end(self) -> Iterator[Record]:
        yield from self._logs_end()
        yield from self._blocks.flush()
        yield from self.metrics.flush()

    def _of_line(self, text: str, name: str, line: int) -> list[Record]:
        for item in self._lines:
            if item.has in text and (match := item.pattern.search(text)):
                if item.scope in ("window", "request"):
                    self.server.served, source = True, printed_by(text)
                    if source and source != self._source:
                        self._sources[source], self._source = source in self._sources, source
                values = match.groupdict() if item.read == "regex" else pairs(text[match.end() :])
                return getattr(self._logs[item.engine], item.then)(item.record(values, f"{name}:{line}"), values, text)
        if text.startswith(_SAMPLES) and SAMPLE.match(text):
            return self.metrics.feed(text, f"{name}:{line}")
        if self.server.take_line(text):
            return []
        if self._blocks.start or any(mark in text for mark in self._block_marks):
            return self._blocks.feed(text, f"{name}:{line}")
        return []

    def _of_json(self, content: Any, place: str) -> Iterator[Record]:
        """Records of every known object inside a JSON value; the outermost object that matches wins."""
        done: set[int] = set()
        for node in objects(content):
            if not _SERVER_KEYS.isdisjoint(node):
                self.server.take_args(node)
            if id(node) not in done and (found := match_json(node)) is not None:
                done.update(id(inner) for inner in objects(node))
                item, record = found
                record.place = place
                _details_of_requests(record, node)
                yield clients.finish(item, record, node)


def _details_of_requests(record: Record, node: Mapping[str, Any]) -> None:
    """Tokens per chunk, and the first request, where a load test kept the details of each request."""
    gaps, lengths, ttfts = node.get("itls"), numbers(node.get("output_lens")), numbers(node.get("ttfts"))
    if isinstance(gaps, list) and lengths and all(isinstance(gap, list) for gap in gaps):
        record.details["tokens_per_chunk"] = sum(lengths) / max(sum(len(gap) + 1 for gap in gaps), 1)
    if (second := record.details.get("ttst_ms")) and (itl := record.details.get("itl_ms")):
        record.details["tokens_per_step"] = second / itl  # the second token comes with the first whole step
    if len(ttfts) > 2:
        rest = sorted(ttfts[1:])[(len(ttfts) - 1) // 2]
        record.details |= {"ttft_first_ms": 1000 * ttfts[0], "ttft_rest_median_ms": 1000 * rest}


def import_files(paths: Sequence[str | Path], engine: str = "auto", reader: Reader | None = None) -> Iterator[Record]:
    """Records of all files, in order. Two metrics pages also give the run between them.

    Raises InputError: a file cannot be read, or holds no figure of the engine asked for.
    """
    reader, plain = reader or Reader(engine), dict[Any, Record]()
    for path in paths:
        found = False
        for record in reader.read(path):
            found, load = True, (record.scope, record.model, record.details.get("max_concurrency"), record.batch_size)
            if record.mean_acceptance_length is None and record.output_tokens_per_s:
                plain[load] = record  # a load test without a draft: what a later one of the same load is compared with
            elif load in plain and (text := checks.compare_arms(plain[load], record)["warning"]):
                record.warn(str(text))
            yield record
        if not found:
            wanted = "a known engine" if reader.engine == "auto" else reader.engine
            known = " (arguments and backends only)" if reader.server.args or reader.server.named else ""
            notes = "".join(f"; {note.partition(': ')[2]}" for note in reader.notes)
            raise InputError(f"{path}: no figures of {wanted}{known}{notes}; docs/importing.md lists what is read")
