"""Prompts by workload, long contexts built from them, and the bands that join acceptance and cost."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import InputError
from labkit.filler import FillerKind, filler_text
from labkit.paths import REFERENCE

WORKLOADS = ("code_editing", "prose", "chat", "code_writing", "json_extraction", "math", "multi_turn_agent")
ROLES = ("system", "user", "assistant")
Message = dict[str, str]
Encode = Callable[[list[Message]], Sequence[int]]

CONTEXT_TOLERANCE = 8
SEPARATOR = "\n\n---\n\n"
_TEXT_FIELDS = ("id", "workload", "prompt", "answer", "reference")
CODE_WORKLOADS = ("code_editing", "code_writing")


@dataclass(frozen=True)
class Prompt:
    """One request; its last message is the user's.

    answer : final number of a math prompt.
    reference : a correct output: the edited file, the extracted JSON object.

    Raises ValueError: a message is not a role and a text, or the last one is not the user's.
    """

    id: str
    workload: str
    messages: tuple[Message, ...]
    answer: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        for message in self.messages:
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                raise ValueError(f"messages wants objects with role and content, got {message!r:.80}")
            if message["role"] not in ROLES:
                raise ValueError(f"role wants one of {', '.join(ROLES)}, got {message['role']!r}")
            if not isinstance(message["content"], str) or not message["content"].strip():
                raise ValueError(f"content wants a text that is not empty, got {message['content']!r:.80}")
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ValueError("messages wants a message of the user at the end")

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of roles and contents."""
        return _digest_messages(self.messages)


@dataclass(frozen=True)
class Context:
    """A prompt, unchanged, behind a filler that opens the first message of the user; ``encode`` of both as tokens."""

    prompt: Prompt
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of roles and contents, filler included."""
        return _digest_messages(self.messages)


def load_prompts(workload: str, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of one of `WORKLOADS`, or the first `limit` of them.

    workload : a name, or a file of JSON lines (`load_prompt_file`).

    Raises InputError: the workload is unknown or `limit` is below 1.
    """
    if workload not in WORKLOADS and workload.endswith(".jsonl"):
        return load_prompt_file(workload)[:limit]
    if workload not in WORKLOADS:
        raise InputError(f"workload wants one of {', '.join(WORKLOADS)}, got {workload!r}")
    if limit is not None and limit < 1:
        raise InputError(f"limit wants at least 1 prompt, got {limit}")
    return load_prompt_file(REFERENCE / "prompts" / f"{workload}.jsonl")[:limit]


def load_prompt_file(path: str | Path) -> list[Prompt]:
    """Read prompts from JSON lines: objects with ``prompt`` (a text) or ``messages``. Empty lines are skipped.

    ``id``, ``workload``, ``answer`` and ``reference`` are optional texts; other fields are ignored. The workload
    defaults to the file's name without its suffix, the id to the workload and the line number.

    Raises InputError: the file cannot be read or holds no prompt, a line is not a prompt, or an id occurs twice. The
    message names the file and the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: wanted a readable UTF-8 file of JSON lines: {error}") from error
    prompts: dict[str, Prompt] = {}
    # Not splitlines(): a JSON text may hold the other characters that it breaks at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, workload=path.stem, number=number)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if prompt.id in prompts:
            raise InputError(f"{path}, line {number}: id wants to be unique, got {prompt.id!r} again")
        prompts[prompt.id] = prompt
    if not prompts:
        raise InputError(f"{path}: wanted at least one prompt, the file is empty")
    return list(prompts.values())


def _parse_line(line: str, *, workload: str, number: int) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"wanted a JSON object on one line: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"wanted a JSON object, got {line.strip()!r:.60}")
    fields = _recognised(fields)
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("wanted either a field prompt or a field messages")
    for name in _TEXT_FIELDS:
        if name in fields and not isinstance(fields[name], str):
            raise ValueError(f"{name} wants a text, got {fields[name]!r:.60}")
    messages = fields["messages"] if "messages" in fields else [{"role": "user", "content": fields["prompt"]}]
    if not isinstance(messages, list):
        raise ValueError(f"messages wants a list, got {messages!r:.60}")
    workload = fields.get("workload", workload)
    return Prompt(
        fields.get("id", f"{workload}-{number:02d}"),
        workload,
        tuple(messages),
        answer=fields.get("answer"),
        reference=fields.get("reference"),
    )


def _recognised(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a known benchmark under our names; others as they are.

    Spec-Bench and MT-Bench (``question_id, category, turns``; the first turn), HumanEval (``task_id, prompt,
    entry_point``), GSM8K (``question``, an ``answer`` that ends in ``#### number``), and recorded conversations
    (``messages`` or ``conversations`` that go on to the assistant's reply, which is left out).
    """
    if isinstance(fields.get("turns"), list) and fields["turns"]:
        own = {
            "id": str(fields.get("question_id", "")),
            "workload": str(fields.get("category", "")),
            "prompt": fields["turns"][0],
        }
        return {name: value for name, value in own.items() if value}
    if {"task_id", "prompt", "entry_point"} <= set(fields):
        return {"id": str(fields["task_id"]), "prompt": fields["prompt"]}
    if {"question", "answer"} <= set(fields) and "prompt" not in fields:
        answer = str(fields["answer"]).rpartition("####")[2].strip().replace(",", "")
        return {"prompt": fields["question"], "answer": answer}
    messages = fields.get("messages", fields.get("conversations"))
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        speakers = {"human": "user", "gpt": "assistant"}
        if "conversations" in fields:
            messages = [
                {"role": speakers.get(m.get("from"), m.get("from")), "content": m.get("value")} for m in messages
            ]
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        kept = {name: value for name, value in fields.items() if name not in ("messages", "conversations")}
        return kept | {"messages": messages}
    return fields


def final_number(text: str) -> str | None:
    """The number behind the last ``Answer:``, or the last one of the text; None: there is none."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.rpartition("Answer:")[2].replace(",", ""))
    if not numbers:
        return None
    found = numbers[0] if "Answer:" in text else numbers[-1]
    return found.removesuffix(".0")


def build_context(prompt: Prompt, num_tokens: int, *, encode: Encode, seed: int) -> Context:
    """Put a filler before a prompt so that the whole has `num_tokens` tokens, chat template included.

    Code stands before code workloads, text before others. Never more tokens than that, and at most
    `CONTEXT_TOLERANCE` fewer where the tokenizer cannot reach that. The filler of a shorter
    context is a prefix of the filler of a longer one, and the prompt stands unchanged at the end of both: only the
    length differs. All prompts of a seed share one filler, so that a target's cache holds it once for all of them;
    another seed orders the passages anew.

    encode : messages to token ids, such as ``Tokenizer.encode_chat``.

    Raises InputError: the prompt alone is longer, or the filler is too short.
    """
    kind: FillerKind = "code" if prompt.workload in CODE_WORKLOADS else "text"
    filler = filler_text(kind, order=str(seed))
    num_prompt_tokens = len(encode(list(prompt.messages)))
    if num_prompt_tokens > num_tokens:
        raise InputError(f"num_tokens wants at least the {num_prompt_tokens} of {prompt.id} alone, got {num_tokens}")

    def encode_cut(cut: int) -> Sequence[int]:
        return encode(_with_filler(prompt.messages, filler[:cut]))

    cut = _longest_fit(lambda cut: len(encode_cut(cut)), num_tokens, len(filler))
    token_ids = tuple(encode_cut(cut))
    if len(token_ids) < num_tokens - CONTEXT_TOLERANCE:
        raise InputError(f"num_tokens is out of reach: the {kind} filler ends at {len(token_ids)}, got {num_tokens}")
    return Context(prompt, tuple(_with_filler(prompt.messages, filler[:cut])), token_ids)


def _with_filler(messages: Sequence[Message], filler: str) -> list[Message]:
    """The same messages with the filler at the start of the first one that is the user's."""
    if not filler:
        return list(messages)
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    opened = {"role": "user", "content": filler + SEPARATOR + messages[first]["content"]}
    return [*messages[:first], opened, *messages[first + 1 :]]


def _longest_fit(count: Callable[[int], int], limit: int, length: int) -> int:
    """Return a cut in 0..length whose count is `limit`, else one that comes close from below.

    A tokenizer's count nearly grows with the cut, so a bracket stays valid. Interpolation and halving take
    turns, since interpolation alone would creep through a run of blanks (one token).
    """
    low, low_count = 0, count(0)
    if low_count == limit:
        return low
    high = min(length, 4 * (limit - low_count))  # four characters a token: only a first guess
    while (high_count := count(high)) <= limit:
        low, low_count = high, high_count
        if low == length:
            return low
        high = min(length, 2 * high)
    interpolate = True
    while low_count < limit and high - low > 1:
        share = (limit - low_count) / (high_count - low_count) if interpolate else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        middle_count = count(middle)
        if middle_count <= limit:
            low, low_count = middle, middle_count
        else:
            high, high_count = middle, middle_count
        interpolate = not interpolate
    if low_count == limit:
        return low
    # A word that is cut elsewhere can be one token more.
    return next((cut for cut in range(low, max(low - 32, 0), -1) if count(cut) == limit), low)


def context_band(context_len: int) -> tuple[int, int]:
    """The band ``low <= context_len < high`` that acceptance and cost are joined on, tokens before the step.

    Bands surround the powers of two from 4 on. Their edges are the geometric means of neighbouring powers, rounded
    down: 512 lies in (362, 724), 2048 in (1448, 2896). An empty context has its own.

    Raises ValueError: `context_len` is negative.
    """
    if context_len < 0:
        raise ValueError(f"context_len wants at least 0 tokens, got {context_len}")
    if context_len == 0:
        return 0, 1
    exponent = context_len.bit_length() - 1
    # Geometric means of 2**n and its double, in exact integers.
    below, middle, above = (math.isqrt(2 * 4**n // 4) for n in range(exponent, exponent + 3))
    return (below, middle) if context_len < middle else (middle, above)


def repeated_ngram_share(token_ids: Sequence[Hashable]) -> float | None:
    """Share (0..1) of an output's 4-grams that occurred in it before: near 1 when it goes in circles.

    Nearly every draft for such text is accepted, so its acceptance says nothing about the workload. None when the
    output is shorter. The prompt is not counted.
    """
    ngrams = [tuple(token_ids[start : start + 4]) for start in range(len(token_ids) - 3)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None


def _digest_messages(messages: Sequence[Message]) -> str:
    text = json.dumps([[message["role"], message["content"]] for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
