"""A local OpenAI-compatible server whose answers, counts and faults are planted."""

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FaultServer:
    """Answers on 127.0.0.1. ``plan``: what to do with the next measured requests, then ``default``.

    Behaviours: ok, drop, http_429, http_500, slow, hang, trickle, cut, malformed, error_event, wrong_usage, duplicate,
    short, no_usage. ``tokens_per_event``, ``gap_s``: how the text comes. ``accepted``: drafts kept of ``k`` a step.
    """

    def __init__(self, *, default: str = "ok", **settings: Any):
        self.default, self.plan, self.bodies = default, list[str](), list[bytes]()
        self.tokens_per_event, self.gap_s, self.first_s = 1, 0.0, 0.0
        self.word, self.model, self.args, self.metrics = "word", "tiny", None, True
        self.k, self.accepted, self.cached = 0, 0, 0
        self.counts, self.lock, self.in_flight, self.most_in_flight = Counter(), threading.Lock(), 0, 0
        vars(self).update(settings)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_state": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "FaultServer":
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: FaultServer

    def log_message(self, *args: object) -> None:
        pass

    def _page(self, text: str, status: int = 200, **headers: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        state = self.server_state
        if self.path == "/v1/models":
            self._page(json.dumps({"data": [{"id": state.model, "max_model_len": 200_000}]}))
        elif self.path == "/metrics" and state.metrics:
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            lines = [f'vllm:spec_decode_{n}_total{{model_name="tiny"}} {state.counts[n]}' for n in names]
            lines += ["process_start_time_seconds 12345.5"]
            self._page("\n".join(lines) + "\n")
        elif self.path.startswith("/server_info") and state.args is not None:
            self._page(json.dumps({"vllm_config": state.args}))
        else:
            self._page("no such page", 404)

    def do_POST(self) -> None:
        state = self.server_state
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        text = request["messages"][0]["content"]
        counted = not text.startswith(("[warm-up", "[probe"))
        with state.lock:
            state.bodies.append(body)
            behaviour = state.plan.pop(0) if state.plan and counted else state.default if counted else "ok"
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            # A client that gives up on a slow answer hangs up: that is what such a plan is for.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._answer(behaviour, request)
        finally:
            with state.lock:
                state.in_flight -= 1

    def _answer(self, behaviour: str, request: dict[str, Any]) -> None:
        state = self.server_state
        if behaviour == "http_429":
            return self._page("busy", 429, Retry_After="0")
        if behaviour == "drop":
            self.close_connection = True
            return None
        if behaviour == "http_500":
            return self._page("broken inside", 500)
        if behaviour == "hang":
            time.sleep(4)
        time.sleep(state.first_s + (0.05 if behaviour == "slow" else 0.0))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        num_tokens = request["max_tokens"] - (behaviour == "short")
        digest = hashlib.sha256(request["messages"][-1]["content"].encode()).hexdigest()
        left, first = num_tokens, True
        while left:
            size = 1 if first else min(state.tokens_per_event, left)
            words = "".join(f" {state.word}{(left - i) * int(digest[:4], 16) % 97}" for i in range(size))
            if behaviour == "malformed" and left < num_tokens / 2:
                return self._raw("data: {not json\n\n")
            if behaviour == "cut" and left < num_tokens / 2:
                return None
            if behaviour == "error_event" and left < num_tokens / 2:
                return self._event({"error": {"message": "out of memory"}})
            for _ in range(2 if behaviour == "duplicate" and left < num_tokens / 2 else 1):
                self._event({"choices": [{"index": 0, "delta": {"content": words}}]})
            time.sleep(0.3 if behaviour == "trickle" else state.gap_s)
            left, first = left - size, False
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        prompt = len(json.dumps(request["messages"])) // 4
        shown = num_tokens // 2 if behaviour == "wrong_usage" else num_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": shown, "total_tokens": prompt + shown}
        if state.cached:
            usage["prompt_tokens_details"] = {"cached_tokens": state.cached}
        with state.lock:
            steps = (num_tokens - 1) // (1 + state.accepted)  # the first token is the prefill's
            drafts = {
                "num_drafts": steps,
                "num_draft_tokens": steps * state.k,
                "num_accepted_tokens": steps * state.accepted,
            }
            state.counts.update(drafts if state.k else {})
        if behaviour != "no_usage":
            self._event({"choices": [], "usage": usage})
        return self._raw("data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self._raw(f"data: {json.dumps(content)}\n\n")

    def _raw(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()
