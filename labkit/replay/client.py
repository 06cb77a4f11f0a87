"""One request: bytes out, what came back and when, and what was wrong with it. Nothing is retried here."""

import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.engines.clients import finish
from labkit.engines.record import COUNTS, Record
from labkit.engines.tables import at, match_json, number, objects
from labkit.replay.scenes import Request

if TYPE_CHECKING:
    import httpx

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
RETRIED = ("http_429", "http_5xx", "connection")


@dataclass
class Reply:
    """What one attempt brought. Times in ms from sending; None where unknown. ``detail``: the fault in one line."""

    fault: str | None = None
    detail: str = ""
    http_status: int | None = None
    retry_after_s: float | None = None
    chunk_ms: list[float] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    duration_ms: float = 0.0
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    record: Record | None = None
    done: bool = False
    num_repeated_events: int = 0

    @property
    def text(self) -> str:
        """The answer, reasoning included."""
        return "".join(self.chunks)

    def count(self, name: str) -> int | None:
        """A number of the usage block, None where it is absent or no count."""
        value = at(self.usage or {}, name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class _Broken(Exception):
    """A fault that ends the reading of a stream."""

    def __init__(self, fault: str, detail: str):
        super().__init__(detail)
        self.fault = fault


def send(client: "httpx.Client", url: str, request: Request, *, timeout_s: float) -> Reply:
    """Send once and read the stream to its end. A fault is in the reply, never raised.

    timeout_s : of the whole request; a server that neither answers nor closes costs no more.
    """
    import httpx

    reply, begin = Reply(), time.perf_counter()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    try:
        limits = httpx.Timeout(timeout_s)
        with client.stream("POST", url, content=request.body, headers=headers, timeout=limits) as response:
            reply.http_status = response.status_code
            if response.status_code != 200:
                _refused(reply, response)
            else:
                _read_stream(reply, response, begin, timeout_s)
    except httpx.TimeoutException:
        reply.fault, reply.detail = "timeout", f"no answer within {timeout_s:g} s"
    except _Broken as error:
        reply.fault, reply.detail = error.fault, str(error)
    except httpx.HTTPError as error:
        reply.fault = "connection" if reply.http_status is None else "cut_stream"
        reply.detail = str(error) or type(error).__name__
    reply.duration_ms = 1e3 * (time.perf_counter() - begin)
    if reply.fault is None:
        reply.fault, reply.detail = _judged(reply, request)
    return reply


def _refused(reply: Reply, response: "httpx.Response") -> None:
    status = response.status_code
    reply.fault = "http_429" if status == 429 else "http_5xx" if status >= 500 else "http_4xx"
    text = response.read()[:300].decode("utf-8", "replace")
    reply.detail = f"HTTP {status}: {' '.join(text.split())}"
    wait = response.headers.get("retry-after", "")
    reply.retry_after_s = float(wait) if wait.isdecimal() else None


def _read_stream(reply: Reply, response: "httpx.Response", begin: float, timeout_s: float) -> None:
    before = None
    for line in response.iter_lines():
        now_ms = 1e3 * (time.perf_counter() - begin)
        if now_ms > 1e3 * timeout_s:  # a trickle resets the client's own limit
            raise _Broken("timeout", f"no end within {timeout_s:g} s")
        name, _, data = line.partition(":")
        if name != "data" or not data.strip():
            continue
        if data.strip() == "[DONE]":
            reply.done = True
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise _Broken("malformed_event", f"event {data.strip()[:80]!r}: {error}") from error
        if not isinstance(event, dict):
            raise _Broken("malformed_event", f"event {data.strip()[:80]!r}: wanted an object")
        text = _take_event(reply, event)
        if text:
            reply.chunk_ms.append(now_ms)
            reply.chunks.append(text)
            reply.num_repeated_events += data == before
        before = data
    raise _Broken("cut_stream", f"the stream ended after {len(reply.chunks)} events with text, without [DONE]")


def _take_event(reply: Reply, event: dict[str, Any]) -> str:
    """Keep usage, counts and the reason to end; the event's text."""
    if event.get("error"):
        raise _Broken("error_event", json.dumps(event["error"])[:300])
    if isinstance(event.get("usage"), dict):
        reply.usage = event["usage"]
    for node in objects(event):
        if (found := match_json(node)) is not None:
            reply.record = finish(*found, node)
            reply.record.details["decode_ms_total"] = number(node.get("predicted_ms"))
    choice = next((c for c in event.get("choices") or [] if isinstance(c, dict)), {})
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    delta = choice.get("delta") or {}
    parts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text"))
    return "".join(part for part in parts if isinstance(part, str))


def _judged(reply: Reply, request: Request) -> tuple[str | None, str]:
    """What is wrong with a complete answer: its counts among one another, and against what was asked for."""
    tokens, prompt, total = map(reply.count, ("completion_tokens", "prompt_tokens", "total_tokens"))
    if tokens is None:  # nothing reported: the tokens stay unknown
        return None, ""
    chunks = len(reply.chunks)
    if chunks > tokens:  # an event with text holds at least one token
        if reply.num_repeated_events >= chunks - tokens:
            return "duplicate_event", f"{chunks} events with text for {tokens} tokens, equal ones in a row"
        return "wrong_usage", f"{chunks} events with text, usage says {tokens} tokens"
    if prompt is not None and total is not None and prompt + tokens != total:
        return "wrong_usage", f"usage says {prompt} + {tokens} = {total} tokens"
    if request.exact_tokens and tokens != request.exact_tokens:
        return "wrong_length", f"{tokens} tokens, wanted {request.exact_tokens}"
    return None, ""


def fields_of(reply: Reply, request: Request) -> dict[str, Any]:
    """Columns of a reply; counts of the engine only where they belong to this request."""
    record = reply.record or Record("", "", "", "")
    text = reply.text
    details = record.details
    return {
        **{"fault": reply.fault, "http_status": reply.http_status, "duration_ms": reply.duration_ms},
        **{"num_prompt_tokens": reply.count("prompt_tokens"), "num_output_tokens": reply.count("completion_tokens")},
        "num_cached_tokens": reply.count("prompt_tokens_details.cached_tokens"),
        "context_len": None if (prompt := reply.count("prompt_tokens")) is None else float(prompt),
        **{"num_chunks": len(reply.chunks), "chunk_ms": reply.chunk_ms or None},
        "chunk_sizes": [float(len(chunk)) for chunk in reply.chunks] or None,
        "ttft_ms": reply.chunk_ms[0] if reply.chunk_ms else None,
        **{"engine_prefill_ms": details.get("prompt_ms"), "engine_decode_ms": details.get("decode_ms_total")},
        **{name: getattr(record, name) for name in COUNTS},
        **{"finish_reason": reply.finish_reason, "answer": _checked_answer(text, request.answer)},
        **{
            "output_digest": hashlib.sha256(text.encode()).hexdigest()[:16] if text else None,
            "output_text": text or None,
        },
    }


def _checked_answer(text: str, answer: str | None) -> str | None:
    """Whether the last number of the text is the known answer; null where none is known."""
    if answer is None:
        return None
    found = _NUMBER.findall(text)
    if not found:
        return "none"
    return "right" if float(found[-1].replace(",", "")) == float(answer.replace(",", "")) else "wrong"
