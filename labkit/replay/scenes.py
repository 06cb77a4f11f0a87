"""Scenes of ``data/reference/replay_scenes.csv`` as requests: bytes that are the same for every endpoint.

The text is made from the prompts and the filler of this project, in characters per token as the first endpoint counts
them; how many tokens a request has is what each engine then reports. A mark of seed, repeat and load opens the first
message, so that none finds another's prefix in the cache; turns of a conversation and shared prefixes do.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import InputError
from labkit.filler import filler_text
from labkit.paths import REFERENCE
from labkit.workloads import CODE_WORKLOADS, SEPARATOR, Message, Prompt, load_prompt_file, load_prompts

KINDS = ("single", "conversation", "load")


@dataclass(frozen=True)
class Scene:
    """One row of the table. ``prompt_tokens``: lengths to fill prompts up to; empty: the prompts as they are.

    exact : answers must have ``max_tokens`` tokens (end-of-text is ignored). depths : tokens before the prompt.
    num_requests : of each stream of a load scene. turns : of a conversation, growing geometrically.
    """

    name: str
    kind: str
    workloads: tuple[str, ...]
    num_prompts: int
    depths: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    exact: bool
    concurrency: tuple[int, ...]
    num_requests: int
    turns: int
    path: Path | None = None


@dataclass(frozen=True)
class Request:
    """Bytes to send, and what they are. ``answer``: the final number of a math prompt. ``max_tokens``: exact length."""

    prompt_id: str
    workload: str
    body: bytes
    turn: int | None = None
    answer: str | None = None
    exact_tokens: int | None = None

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the bytes."""
        return hashlib.sha256(self.body).hexdigest()[:16]


def scene(name: str) -> Scene:
    """A scene by name, or the prompts of a JSON lines file as one. InputError: neither."""
    with (REFERENCE / "replay_scenes.csv").open(newline="") as file:
        rows = {row["scene"]: row for row in csv.DictReader(file)}
    if name in rows:
        return _parse(rows[name])
    path = Path(name)
    if not path.is_file():
        raise InputError(f"scene: wanted one of {', '.join(rows)}, or a file of prompts, got {name!r}")
    return Scene(path.stem, "single", (), len(load_prompt_file(path)), (0,), (), 256, False, (1,), 1, 1, path)


def _parse(row: Mapping[str, str]) -> Scene:
    def whole(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in row[name].split())

    return Scene(
        name=row["scene"],
        kind=row["kind"],
        workloads=tuple(row["workloads"].split()),
        num_prompts=int(row["num_prompts"]),
        depths=whole("depths") or (0,),
        prompt_tokens=whole("prompt_tokens"),
        max_tokens=int(row["max_tokens"]),
        exact=row["exact"] == "yes",
        concurrency=whole("concurrency"),
        num_requests=int(row["num_requests"] or 1),
        turns=int(row["turns"] or 1),
    )


@dataclass(frozen=True)
class Maker:
    """Makes the requests of a scene. ``extra``: more fields of every body; ``max_context``: of the servers, tokens."""

    model: str
    characters_per_token: float = 4.0
    seed: int = 0
    max_context: int | None = None
    extra: Mapping[str, Any] | None = None

    def request(self, messages: list[Message], scene: Scene, mark: str, **about: Any) -> Request:
        """One request; the mark opens the first message."""
        first = {**messages[0], "content": f"[{mark}] {messages[0]['content']}"}
        body: dict[str, Any] = {
            **{"model": self.model, "messages": [first, *messages[1:]], "max_tokens": scene.max_tokens},
            **{"temperature": 0, "seed": 0, "stream": True, "stream_options": {"include_usage": True}},
            **({"ignore_eos": True} if scene.exact else {}),
            **(self.extra or {}),
        }
        exact = scene.max_tokens if scene.exact else None
        return Request(body=json.dumps(body, ensure_ascii=False).encode(), exact_tokens=exact, **about)

    def mark(self, repeat: int, concurrency: int) -> str:
        """Opens the prompts of one repeat at one load."""
        return hashlib.sha256(f"{self.seed}:{repeat}:{concurrency}".encode()).hexdigest()[:8]

    def warm_up(self, scene: Scene) -> Request:
        """A short request that shares no prefix with the measured ones."""
        messages = [{"role": "user", "content": "Count from one to twenty in words."}]
        short = replace(scene, max_tokens=min(scene.max_tokens, 16))
        return self.request(messages, short, f"warm-up {self.seed}", prompt_id="warm-up", workload="warm-up")

    def probe(self, scene: Scene, num_characters: int) -> Request:
        """Filler of a known number of characters, to learn how many the endpoint puts into a token."""
        messages = [{"role": "user", "content": self._filler("prose", num_characters)}]
        return self.request(messages, scene, "probe", prompt_id="probe", workload="warm-up")

    def requests(self, scene: Scene, repeat: int, concurrency: int = 1) -> list[Request]:
        """The requests of one repeat at one load, in the order of sending.

        Raises InputError: a length above ``max_context`` for every prompt of the scene.
        """
        make = {"single": self._single, "conversation": self._conversation, "load": self._load}[scene.kind]
        found = list(make(scene, self.mark(repeat, concurrency), concurrency))
        if not found:
            raise InputError(f"scene {scene.name}: no prompt fits into {self.max_context} tokens of context")
        return found

    def _filler(self, workload: str, num_characters: int) -> str:
        text = filler_text("code" if workload in CODE_WORKLOADS else "text", order=str(self.seed))
        while len(text) < num_characters:  # the text filler ends at about 110,000 tokens
            text += "\n\n" + text
        return text[:num_characters]

    def _fits(self, num_tokens: int, scene: Scene) -> bool:
        return self.max_context is None or num_tokens + scene.max_tokens <= self.max_context

    def _filled(self, prompt: Prompt, num_tokens: int) -> list[Message]:
        """The prompt behind as much filler as makes it about ``num_tokens`` long."""
        own = sum(len(message["content"]) for message in prompt.messages)
        room = round(num_tokens * self.characters_per_token) - own
        first, *rest = prompt.messages
        opened = self._filler(prompt.workload, room) + SEPARATOR if room > 0 else ""
        return [{**first, "content": opened + first["content"]}, *rest]

    def _single(self, scene: Scene, mark: str, _: int) -> Iterator[Request]:
        lengths = scene.prompt_tokens or (0,)
        for prompt in _prompts(scene):
            for depth in scene.depths:
                for length in lengths:
                    if self._fits(depth + length, scene):
                        name = prompt.id + (f"@{depth + length}" if depth + length else "")
                        messages = self._filled(prompt, depth + length)
                        told: dict[str, Any] = {"workload": prompt.workload, "answer": prompt.answer}
                        yield self.request(messages, scene, mark, prompt_id=name, **told)

    def _conversation(self, scene: Scene, mark: str, _: int) -> Iterator[Request]:
        """Scripted turns: the assistant's side is text of the filler too, the same whatever an engine answered."""
        low, high = scene.prompt_tokens
        ends = [round(end * self.characters_per_token) for end in np.geomspace(low, high, scene.turns)]
        text, start, messages = self._filler("code_editing", ends[-1]), 0, list[Message]()
        for turn, end in enumerate(ends):
            question = {"role": "user", "content": text[start:end] + "\n\nSay in two sentences what this code does."}
            if self._fits(round(end / self.characters_per_token), scene):
                name = f"{scene.name}-turn-{turn:02d}"
                whole = [*messages, question]
                yield self.request(whole, scene, mark, prompt_id=name, workload=scene.name, turn=turn)
            messages += [question, {"role": "assistant", "content": "It prepares values and passes them on."}]
            start = end

    def _load(self, scene: Scene, mark: str, concurrency: int) -> Iterator[Request]:
        """So many requests per stream. Without a shared prefix each has its own mark."""
        (length,) = scene.prompt_tokens
        prompts = list(_prompts(scene))
        shared = len(prompts) > 1
        for index in range(concurrency * scene.num_requests):
            prompt = prompts[index % len(prompts)]
            if self._fits(length, scene):
                own, name = mark if shared else f"{mark} {index:03d}", f"{prompt.id}#{index:03d}"
                yield self.request(self._filled(prompt, length), scene, own, prompt_id=name, workload=prompt.workload)


def _prompts(scene: Scene) -> Iterator[Prompt]:
    if scene.path is not None:
        yield from load_prompt_file(scene.path)
    for workload in scene.workloads:
        yield from load_prompts(workload, scene.num_prompts)
