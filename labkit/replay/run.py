"""Scenes against endpoints, interleaved; every attempt at a request becomes a row before the next one starts."""

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from labkit.device_state import energy_j
from labkit.engines.record import COUNTS
from labkit.errors import InputError
from labkit.journal import Journal, compact, create_journal
from labkit.paths import make_folder, write_whole
from labkit.progress import progress, say
from labkit.provenance import collect, digest, environment_digest, slug, utc_now
from labkit.replay.client import RETRIED, Reply, fields_of, send
from labkit.replay.endpoints import Endpoint, connect, counted_between, public, scrape
from labkit.replay.scenes import Maker, Request, Scene
from labkit.results import new_run_id, run_folder

if TYPE_CHECKING:
    import httpx

MAX_WAIT_S = 30.0
_PROBE_CHARACTERS = 4000
_STATUS = {"timeout": "timeout", "wrong_usage": "wrong", "duplicate_event": "wrong", "wrong_length": "wrong"}


@dataclass(frozen=True)
class Options:
    """How to replay. ``timeout_s`` per attempt; ``num_attempts`` on 429, 5xx and refused connections."""

    repeats: int = 5
    timeout_s: float = 600.0
    num_attempts: int = 3
    seed: int = 0
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    launches: tuple[str, ...] = ()
    gpu: str | None = None
    sleep: Callable[[float], None] = time.sleep


class Session:
    """An open replay: the endpoints, the journal, and where in the scene it is."""

    def __init__(self, client: "httpx.Client", endpoints: list[Endpoint], journal: Journal, options: Options):
        self.client, self.endpoints, self.journal, self.options = client, endpoints, journal, options
        self.keys = itertools.count()
        self.bodies: dict[str, bytes] = {}
        shortest = min((e.max_context for e in endpoints if e.max_context), default=None)
        self.maker = Maker(endpoints[0].models[0], 4.0, options.seed, shortest, options.extra)

    def keep(self, requests: Iterable[Request]) -> None:
        """Store the bytes beside the rows: ``<run_id>.requests.parquet``, by digest."""
        self.bodies |= {request.digest: request.body for request in requests}
        table = pa.table({"request_digest": list(self.bodies), "body": list(self.bodies.values())})
        sink = pa.BufferOutputStream()
        # One page, so that what requests share (a growing conversation) is stored about once.
        pq.write_table(table, sink, compression="zstd", use_dictionary=False, data_page_size=1 << 28)
        write_whole(self.journal.path.with_suffix(".requests.parquet"), sink.getvalue().to_pybytes())

    def learn_token_size(self, scene: Scene) -> None:
        """Characters per token of the filler, as the first endpoint counts them; only where lengths are asked for."""
        if not scene.prompt_tokens:
            return
        request = self.maker.probe(replace(scene, max_tokens=1), _PROBE_CHARACTERS)
        reply = self._attempts(self.endpoints[0], request, scene, stage="warm_up")
        if tokens := reply.count("prompt_tokens"):
            self.maker = replace(self.maker, characters_per_token=_PROBE_CHARACTERS / tokens)

    def warm_up(self, scene: Scene, concurrency: int) -> None:
        """One request per stream and endpoint, kept apart."""
        for endpoint in self.endpoints:
            requests = [self.maker.warm_up(scene)] * concurrency
            self._in_flight(endpoint, requests, scene, concurrency=concurrency, stage="warm_up")

    def pass_through(self, endpoint: Endpoint, requests: list[Request], scene: Scene, **about: Any) -> None:
        """Send the requests, so many in flight, between two scrapes; what the counters say becomes a row."""
        before = scrape(self.client, endpoint) if endpoint.has_metrics else ""
        joules = energy_j() if is_local(endpoint.url) else None  # another machine's is not known
        begin = time.perf_counter()
        replies = self._in_flight(endpoint, requests, scene, **about)
        seconds = time.perf_counter() - begin
        after_joules = None if joules is None else energy_j()
        record = counted_between(before, scrape(self.client, endpoint)) if before else None
        row = {name: getattr(record, name) for name in COUNTS} if record else {}
        if record and (rates := record.acceptance_rate_per_pos) and record.num_drafted_steps:
            row["accepted_per_pos"] = [float(round(rate * record.num_drafted_steps)) for rate in rates]
        # A pass with a reply that failed, or that did not tell, has no rate of tokens.
        tokens = [None if reply.fault else reply.count("completion_tokens") for reply in replies]
        total = None if None in tokens else sum(filter(None, tokens))
        row |= {"duration_ms": 1e3 * seconds, "num_output_tokens": total}
        if total and row.get("num_accepted_tokens") is not None and row["num_verify_steps"] is None:
            # Of a request one token is the prefill's, the others are one a step and the accepted drafts.
            row["num_verify_steps"] = max(
                total - row["num_accepted_tokens"] - len(requests), row["num_drafted_steps"] or 0
            )
        if joules is not None and after_joules is not None and seconds >= 2:
            row["energy_j"] = after_joules - joules
        single = requests[0] if len(requests) == 1 else None
        named = {"prompt_id": single.prompt_id, "workload": single.workload, "turn": single.turn} if single else {}
        self._store(endpoint, scene, {"record": "counters", **named, **about}, row)

    def _in_flight(
        self, endpoint: Endpoint, requests: list[Request], scene: Scene, *, concurrency: int = 1, **about: Any
    ) -> list[Reply]:
        """A closed loop: a stream sends its next request when its last one has ended."""
        if concurrency == 1:
            return [self._attempts(endpoint, request, scene, concurrency=1, **about) for request in requests]
        with ThreadPoolExecutor(concurrency) as pool:
            sent = [
                pool.submit(send, self.client, _url(endpoint), request, timeout_s=self.options.timeout_s)
                for request in requests
            ]
            replies = []
            for request, future in zip(requests, sent, strict=True):
                reply = future.result()
                replies.append(self._attempts(endpoint, request, scene, first=reply, concurrency=concurrency, **about))
        return replies

    def _attempts(
        self, endpoint: Endpoint, request: Request, scene: Scene, *, first: Reply | None = None, **about: Any
    ) -> Reply:
        """Send until an attempt brings an answer or a fault that another one would not mend; each is a row."""
        for attempt in range(1, self.options.num_attempts + 1):
            reply = first or send(self.client, _url(endpoint), request, timeout_s=self.options.timeout_s)
            first = None
            named = {"prompt_id": request.prompt_id, "workload": request.workload, "turn": request.turn}
            point = {"record": "request", "concurrency": 1, "request_digest": request.digest, **named, **about}
            values = {**fields_of(reply, request), "num_attempts": attempt}
            self._store(endpoint, scene, point, values, fault=reply.fault, detail=reply.detail)
            if reply.fault not in RETRIED or attempt == self.options.num_attempts:
                break
            self.options.sleep(
                min(reply.retry_after_s if reply.retry_after_s is not None else 2.0**attempt, MAX_WAIT_S)
            )
        return reply

    def _store(
        self,
        endpoint: Endpoint,
        scene: Scene,
        point: dict[str, Any],
        values: dict[str, Any],
        *,
        fault: str | None = None,
        detail: str = "",
    ) -> None:
        point = {**endpoint.columns(), "scene": scene.name, **point}
        repeat = point.pop("round", 0)
        # The arms of one prompt and repeat were sent one after the other: they are the pairs.
        group = digest([scene.name, point.get("prompt_id"), point.get("concurrency"), point.get("stage")])
        line = {"kind": "point", "point_key": f"{next(self.keys)}", "point": {**point, "group": group}, "seconds": 0.0}
        line |= {"status": _STATUS.get(fault, "error") if fault else "ok", "samples": [{**values, "round": repeat}]}
        if fault:
            line["reason"] = public(f"{fault}: {detail}")[:300]
        self.journal.append(line)


def _url(endpoint: Endpoint) -> str:
    return f"{endpoint.url}/v1/chat/completions"


def is_local(url: str) -> bool:
    """Whether the server runs on this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _passes(session: Session, scene: Scene, repeats: int) -> Iterator[tuple[int, int, list[Request]]]:
    """Repeat, concurrency and the requests of one pass: a whole load, or one request of the other kinds."""
    for repeat, concurrency in itertools.product(range(repeats), scene.concurrency):
        requests = session.maker.requests(scene, repeat, concurrency)
        for part in [requests] if scene.kind == "load" else [[request] for request in requests]:
            yield repeat, concurrency, part


def replay(urls: Sequence[str], scenes: Sequence[Scene], *, out_dir: Path, options: Options) -> Path:
    """Replay scenes and store the run; what was measured is kept whatever interrupts it.

    Within a repeat every request goes to each endpoint before the next one does, the order of endpoints turning by one
    each time. Returns the run's Parquet file.

    Raises InputError: no endpoint, one that does not answer, or a scene that fits into no endpoint's context.
    """
    import httpx

    if options.repeats < 1:
        raise InputError(f"repeats: wanted at least 1, got {options.repeats}")
    make_folder(out_dir, "--out")
    run_id = new_run_id()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    with httpx.Client(limits=limits, follow_redirects=False, trust_env=False) as client:
        endpoints = connect(client, urls, launches=options.launches, model=options.model, run_id=run_id)
        with _journal(run_id, urls, scenes, endpoints, out_dir, options) as journal:
            session = Session(client, endpoints, journal, options)
            try:
                for scene in scenes:
                    _replay_scene(session, scene, options.repeats)
                journal.header["num_points"] = len(journal.attempts)  # not known before: attempts are rows
            finally:
                if journal.attempts:
                    compact(journal)
                else:
                    journal.path.unlink()
    return journal.path.with_suffix(".parquet")


def _replay_scene(session: Session, scene: Scene, repeats: int) -> None:
    session.learn_token_size(scene)
    passes = list(_passes(session, scene, repeats))
    session.keep(request for *_, requests in passes for request in requests)
    warmed = set[int]()
    with contextlib.closing(progress(len(passes), scene.name)) as bar:
        for index, (repeat, concurrency, requests) in enumerate(passes):
            if concurrency not in warmed:
                session.warm_up(scene, concurrency)
                warmed.add(concurrency)
            turned = session.endpoints[index % len(session.endpoints) :] + session.endpoints
            for endpoint in turned[: len(session.endpoints)]:
                stage = "first" if index == 0 and scene.kind != "load" else "measured"
                session.pass_through(endpoint, requests, scene, concurrency=concurrency, stage=stage, round=repeat)
            bar.update()


def _journal(
    run_id: str,
    urls: Sequence[str],
    scenes: Sequence[Scene],
    endpoints: list[Endpoint],
    out_dir: Path,
    options: Options,
) -> Journal:
    local = all(map(is_local, urls))
    provenance = collect("cuda" if local and shutil.which("nvidia-smi") else "cpu")
    provenance["command"] = public(provenance["command"])
    if options.gpu or not local:  # the device of the servers is not this one's, or not known
        name = slug(options.gpu) if options.gpu else "unknown"
        provenance["device"] = {"kind": "remote", "slug": name, "name": options.gpu}
    grid = {"scene": [scene.name for scene in scenes], "repeats": options.repeats, "extra": options.extra}
    folder = run_folder(out_dir, "replay", provenance["device"]["slug"])
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        **{"run_id": run_id, "experiment": "replay", "gpu": provenance["device"]["slug"], "num_points": 0},
        **{"grid": grid, "measure": "labkit.replay", "seed": options.seed, "command": provenance["command"]},
        **{"provenance": provenance, "environment_digest": environment_digest(provenance)},
        "endpoints": {endpoint.name: endpoint.settings() for endpoint in endpoints},
    }
    journal = create_journal(folder, header)
    journal.append({"kind": "session", "started": utc_now(), "command": provenance["command"]})
    say(f"replay {run_id}: " + ", ".join(f"{e.name} = {e.server.engine or 'unknown engine'}" for e in endpoints))
    return journal
