"""From files to records: which format a line or document has, in one pass and bounded memory."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.engines import checks, clients, llamacpp, sglang, vllm
from labkit.engines.metrics import SAMPLE, MetricsPages
from labkit.engines.reading import MAX_DOCUMENT_BYTES, MAX_LOG_CHARACTERS, Input, load_json
from labkit.engines.record import Record
from labkit.engines.server import Server
from labkit.engines.tables import formats, labelled, match_json, number, numbers, objects
from labkit.errors import InputError

ENGINES = ("auto", "sglang", "vllm", "llamacpp", "trtllm", "aiperf", "guidellm", "llamabenchy", "specforge")
LineHandler = Callable[[Record, Mapping[str, Any], str], list[Record]]
# What a JSON object or console block needs beyond its table of fields.
_JSON: dict[tuple[str, str], Callable[[Record, Mapping[str, Any]], None]] = {
    ("sglang", "meta_info"): sglang.meta_info,
    ("sglang", "server_info"): sglang.server_info,
    ("sglang", "bench_serving"): sglang.bench,
    ("sglang", "bench_one_batch"): sglang.one_batch,
    ("sglang", "bench_one_batch_server"): sglang.bench,
    ("vllm", "per-request block"): vllm.request,
    ("vllm", "bench serve"): vllm.bench,
    ("llamacpp", "timings"): llamacpp.timings,
    ("trtllm", "trtllm-bench"): clients.trtllm_bench,
    ("trtllm", "iteration statistics"): clients.iteration,
    ("trtllm", "request metrics"): clients.trtllm_request,
    ("llamabenchy", "benchmark"): clients.llama_benchy,
    ("specforge", "benchmark"): clients.specforge,
    ("sglang", "bench_serving console"): sglang.bench,
    ("vllm", "bench serve console"): vllm.bench,
    ("vllm", "offline script"): vllm.bench,
    ("llamacpp", "speculative program"): llamacpp.program,
}
# Lines without any of these are passed over: most lines of a server's log.
_INTERESTING = re.compile(
    r"batch|etrics: |throughput: |KV cache size|eval time|acceptance|statistics |t/s|\||backend|version|build: "
    r"|server_args|args: |engine \(v|implementation|NVIDIA|RTX "
)


class Reader:
    """Everything one import session has seen: the state of each engine's lines, and facts about the server.

    Raises
    ------
    InputError
        Unknown engine.
    """

    def __init__(self, engine: str = "auto"):
        if engine not in ENGINES:
            raise InputError(f"engine: wanted one of {', '.join(ENGINES)}, got {engine!r}")
        self.engine, self.metrics, self.notes = engine, MetricsPages(), list[str]()
        self._start()

    def _start(self, server: Server | None = None) -> None:
        self.server, self.blocks = server or Server(), clients.Blocks()
        self.sglang, v, ll = sglang.SglangLog(self.server), vllm.VllmLog(), llamacpp.LlamaCppLog()
        self.handlers: dict[tuple[str, str], LineHandler] = {
            ("sglang", "decode line"): self.sglang.decode_line,
            ("sglang", "prefill line"): self.sglang.prefill_line,
            ("vllm", "V0 line"): v.v0,
            ("vllm", "V1 line"): v.v1,
            ("vllm", "throughput line"): v.throughput,
            ("vllm", "cache size line"): v.cache_size,
            ("llamacpp", "prompt time"): ll.part,
            ("llamacpp", "eval time"): ll.part,
            ("llamacpp", "slot line"): ll.slot_line,
            ("llamacpp", "statistics"): ll.statistics,
            ("llamacpp", "spec-bench row"): llamacpp.spec_bench_row,
            **{("llamacpp", kind): llamacpp.bench_row for kind in ("llama-bench tg", "llama-bench pp")},
            **{("llamacpp", kind): llamacpp.bench_row for kind in ("sweep-bench row", "batched-bench row")},
        }
        self.lines = [item for item in formats("labels", "regex") if self.engine in ("auto", item.engine)]

    def read(self, path: str | Path, server: Server | None = None) -> Iterator[Record]:
        """Records of one file. ``server``: facts that hold for several files of one server.

        Raises
        ------
        InputError
            No such file, broken JSON or gzip, a gzip bomb.
        """
        self._start(server)
        source = Input(path)
        graphs: set[bool] = set()
        try:
            for record in itertools.chain(self._records(source), self._at_end()):
                if self.engine in ("auto", record.engine):
                    yield self.finish(record, graphs)
        finally:
            source.close()
            self.notes += [f"{source.name}: {note}" for note in source.notes]

    def read_text(self, text: str, name: str) -> Iterator[Record]:
        """Records of a text that is already in memory, as `read` gives them for a file."""
        self._start()
        graphs: set[bool] = set()
        found = self._lines(enumerate(text.splitlines(), start=1), name)
        yield from (self.finish(record, graphs) for record in itertools.chain(found, self._at_end()))

    def finish(self, record: Record, graphs: set[bool] | None = None) -> Record:
        """Add what the server told, and what the checks find."""
        from labkit.engines.roles import resolve_roles

        record.engine_version = record.engine_version or self.server.version
        record.model = record.model or self.server.model
        if self.server.named or self.server.args:
            record.backend = {role: found.backend for role, found in resolve_roles(self.server).items()} or None
        return checks.check(record, imposed=self.server.imposed, graphs=graphs)

    def _records(self, source: Input) -> Iterator[Record]:
        start = source.start().lstrip()
        first, _, rest = start.partition(b"\n")
        opened = first[:1] == b"{" or (first[:1] == b"[" and not first[1:2].isdigit())
        if not opened or (first.rstrip().endswith((b"}", b"]")) and rest):
            yield from self._lines(source.lines(), source.name)
            return
        data = source.read(MAX_DOCUMENT_BYTES)
        if len(data) == MAX_DOCUMENT_BYTES and source.read(1):
            raise InputError(f"{source.name}: wanted JSON below {MAX_DOCUMENT_BYTES >> 20} MiB, or one object a line")
        text = data.decode("utf-8", "replace")
        if (content := load_json(text)) is not None:
            yield from self.json_records(content, source.name)
            return
        found = list(self._lines(enumerate(text.splitlines(), start=1), source.name))
        if not found:
            raise InputError(f"{source.name}: wanted JSON, got a file that is cut off, nested too deep or no JSON")
        yield from found

    def _lines(self, lines: Iterable[tuple[int, str]], name: str) -> Iterator[Record]:
        for line, text in lines:
            content = load_json(text.removeprefix("data: ")) if text.startswith(("{", "data: {", "[{")) else None
            if content is not None:
                yield from self.json_records(content, f"{name}:{line}")
            else:
                yield from self.line_records(text[:MAX_LOG_CHARACTERS], f"{name}:{line}")

    def _at_end(self) -> Iterator[Record]:
        yield from self.sglang.ready(at_end=True)
        yield from self._blocks(self.blocks.flush())
        yield from self.metrics.flush()

    def _blocks(self, records: list[Record]) -> list[Record]:
        for record in records:
            _JSON.get((record.engine, record.kind), _nothing)(record, {})
        return [record.derive() for record in records]

    def line_records(self, text: str, place: str) -> list[Record]:
        """Records that one line of a log, console or metrics page completes."""
        if SAMPLE.match(text):
            return self.metrics.feed(text, place) or []
        if _INTERESTING.search(text):
            for item in self.lines:
                if (match := item.pattern.search(text)) is None:
                    continue
                values = match.groupdict() if item.read == "regex" else labelled(text[match.end() :])
                record = item.record(values, place)
                handler = self.handlers.get((item.engine, item.kind))
                return handler(record, values, text) if handler else []
            if self.server.take_line(text):
                return []
        return self._blocks(self.blocks.feed(text, place))

    def json_records(self, content: Any, place: str) -> Iterator[Record]:
        """Records of every known object inside a JSON value; the outermost object that matches wins."""
        done: set[int] = set()
        for node in objects(content):
            if "attention_backend" in node or "internal_states" in node or "vllm_config" in node:
                self.server.take_args(node)
            if id(node) in done or (record := match_json(node)) is None:
                continue
            done.update(id(inner) for inner in objects(node))
            record.place = place
            _JSON.get((record.engine, record.kind), _nothing)(record, node)
            _details_of_requests(record, node)
            yield record.derive() if record.scope != "run" or record.steps else record


def _nothing(record: Record, node: Mapping[str, Any]) -> None:
    """A format whose table says all."""


def _details_of_requests(record: Record, node: Mapping[str, Any]) -> None:
    """Tokens per chunk, and the first request, where a load test kept the details of each request."""
    gaps, lengths, ttfts = node.get("itls"), numbers(node.get("output_lens")), numbers(node.get("ttfts"))
    if isinstance(gaps, list) and lengths and all(isinstance(gap, list) for gap in gaps):
        record.details["tokens_per_chunk"] = sum(lengths) / sum(len(gap) + 1 for gap in gaps)
    if (second := record.details.get("ttst_ms")) and (itl := record.details.get("itl_ms")):
        record.details["tokens_per_step"] = second / itl  # the second token comes with the first whole step
    if len(ttfts) > 2:
        rest = sorted(ttfts[1:])[(len(ttfts) - 1) // 2]
        record.details |= {"ttft_first_ms": 1000 * ttfts[0], "ttft_rest_median_ms": 1000 * rest}


def import_files(paths: Sequence[str | Path], engine: str = "auto", reader: Reader | None = None) -> Iterator[Record]:
    """Records of all files, in order. Two metrics pages also give the run between them.

    Raises
    ------
    InputError
        A file cannot be read, or holds no figure of the engine asked for.
    """
    reader = reader or Reader(engine)
    for path in paths:
        found = False
        for record in reader.read(path):
            found = True
            yield record
        if not found:
            wanted = "a known engine" if engine == "auto" else engine
            known = " (arguments and backends only)" if reader.server.args or reader.server.named else ""
            raise InputError(f"{path}: no figures of {wanted} in it{known}; docs/importing.md lists what is read")


def summary(records: Iterable[Record], limit: int = 20) -> str:
    """A table of the first records, and how often each warning came."""
    rows, warnings, count = [], Counter[str](), 0
    rows.append(["place", "kind", "scope", "length", "rate", "k", "batch", "context", "tok/s", "step_ms"])
    for count, record in enumerate(records, start=1):
        warnings.update(record.warnings)
        if count <= limit:
            rows.append(_row(record))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if count > limit:
        lines.append(f"... {count - limit} more records; --json or --out has all of them")
    return "\n".join(lines + [f"{times} x {text}" for text, times in warnings.most_common(30)])


def _row(record: Record) -> list[str]:
    names = {"mean_acceptance_length": ".2f", "draft_acceptance_rate": ".3f", "num_speculative_tokens": "d"}
    names |= {"batch_size": ".4g", "context_len": ".0f", "output_tokens_per_s": ".1f", "step_ms": ".2f"}
    values = [(getattr(record, name), form) for name, form in names.items()]
    shown = ["-" if number(value) is None else format(value, form) for value, form in values]
    return [record.place, f"{record.engine} {record.kind}", record.scope, *shown]
