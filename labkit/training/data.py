"""Text to train heads on: prompts from installed sources and from the target itself, answered by the target.

None of the committed prompts is used, so all of them are held out. The kinds of prompts are those of the workloads.
"""

from __future__ import annotations

import ast
import io
import json
import random
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from labkit.accept import sampling_probs
from labkit.errors import InputError
from labkit.filler import filler_text
from labkit.paths import REFERENCE, write_whole
from labkit.workloads import SEPARATOR

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.decoder import Decoder
    from labkit.models.tokenizer import Tokenizer

_AGENT = "You work in a terminal. Say what you will do next, then one command."
_CACHE_TOKENS, _MAX_ROWS = 1_200_000, 4096  # of the cache of a batch, at most
_PREFILL_TOKENS = 32_768  # of a pass
_MIN_TOKENS, _MAX_REPEATED = 16, 0.2  # of an answer that is learnt from
# How often each kind is drawn. "self": the target writes the user's message too.
_KINDS = {"self": 10, "write": 4, "edit": 5, "text": 3, "json": 2, "math": 2, "agent": 1, "long": 1}


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target made of it, in token ids."""

    prompt_ids: list[int]
    output_ids: list[int]


def make_prompts(
    decoder: Decoder, tokenizer: Tokenizer, count: int, *, seed: int, max_prompt_len: int, backend: str
) -> list[list[int]]:
    """Token ids of `count` chats of at most `max_prompt_len` tokens, apart from long ones, which have up to 4096."""
    draw = random.Random(seed)
    kinds = draw.choices(list(_KINDS), list(_KINDS.values()), k=count)
    openers = [draw.choice(_templates()["openers"]) for kind in kinds if kind == "self"]
    own = iter(_self_prompts(decoder, tokenizer, openers, seed=seed, backend=backend))
    fillers = [filler_text("text", order=f"train{seed}"), filler_text("code", order=f"train{seed}")]
    prompts = []
    for kind in kinds:
        text = next(own) if kind == "self" else _WRITERS[kind](draw) if kind != "long" else _WRITERS["write"](draw)
        if kind == "long":
            size, filler = draw.choice((3000, 6000, 12000)), draw.choice(fillers)
            start = draw.randrange(max(1, len(filler) - size))
            text = filler[start : start + size] + SEPARATOR + text
        messages = [{"role": "user", "content": text or "Hello"}]
        if kind == "agent":
            messages.insert(0, {"role": "system", "content": _AGENT})
        ids = tokenizer.encode_chat(messages)
        limit = min(4096 if kind == "long" else max_prompt_len, decoder.shape.max_context_len // 2)
        if len(ids) <= limit:
            prompts.append(ids)
    return prompts


def _self_prompts(
    decoder: Decoder, tokenizer: Tokenizer, openers: Sequence[str], *, seed: int, backend: str
) -> list[str]:
    """User messages that the target writes itself, sampled after the chat template's opening of one."""
    marker = "\x00"
    opening = tokenizer.chat_text([{"role": "user", "content": marker}]).split(marker)[0]
    prompts = [tokenizer.encode(opening + opener, add_special_tokens=False) for opener in openers]
    options: dict[str, Any] = {"temperature": 0.8, "sampled_share": 1.0, "seed": seed, "backend": backend}
    answers = generate(decoder, prompts, max_new_tokens=64, stop_token_ids=tokenizer.stop_token_ids, **options)
    written = {tuple(a.prompt_ids): [] for a in answers}  # type: dict[tuple[int, ...], list[Answer]]
    for answer in answers:
        written[tuple(answer.prompt_ids)].append(answer)
    texts = []
    for opener, prompt in zip(openers, prompts, strict=True):
        left = written.get(tuple(prompt))
        ids = left.pop().output_ids if left else []
        texts.append(opener + tokenizer.decode(ids, skip_special_tokens=True))
    return texts


@lru_cache
def _templates() -> dict[str, Any]:
    return json.loads((REFERENCE / "training_templates.json").read_text(encoding="utf-8"))


def _fill(draw: random.Random, kind: str, **values: str) -> str:
    """A template of a kind with drawn words and numbers in its places."""
    templates = _templates()
    thing, other = draw.sample(templates["things"], 2)
    words = {"thing": thing, "other": other, "Thing": thing.title(), "city": draw.choice(templates["cities"])}
    words["name"] = draw.choice(templates["names"])
    limits = {"day": 29, "a": 90, "b": 90, "c": 90, "price": 400, "number": 9999}
    numbers = {name: str(draw.randrange(2, limit)) for name, limit in limits.items()}
    return draw.choice(templates[kind]).format(**words, **numbers, **values)


def _write(draw: random.Random) -> str:
    node = draw.choice(_functions()).node
    about = (ast.get_docstring(node) or "does what its name says").strip().split("\n")[0].rstrip(".")
    return f"Write a Python function `{node.name.strip('_')}({', '.join(_arguments(node))})`: {about}."


def _edit(draw: random.Random) -> str:
    functions = _functions()
    start, count = draw.randrange(len(functions) - 3), draw.randrange(1, 4)
    code = "\n\n\n".join(other.source for other in functions[start : start + count])[:2600]
    node = functions[start].node
    variables = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)] or ["x"]
    edit = _fill(draw, "edit", variable=draw.choice(variables), argument=draw.choice(_arguments(node) or ["x"]))
    return f"```python\n{code}\n```\n\nRewrite the whole file above with this change: {edit} Output only the code."


def _text(draw: random.Random) -> str:
    filler = filler_text("text", order="passages")
    start, size = draw.randrange(len(filler)), draw.randrange(300, 1500)
    return f"{_fill(draw, 'text')}\n\n{filler[start : start + size].strip()}"


def _json(draw: random.Random) -> str:
    fields = _templates()["fields"]
    schema = "\n".join(f"- {field}: {fields[field]}" for field in draw.sample(sorted(fields), draw.randrange(3, 7)))
    task = "Read the text and write one JSON object with the fields of the schema."
    return f"{task}\n\nSchema:\n{schema}\n\nText:\n{_fill(draw, 'json')}"


def _math(draw: random.Random) -> str:
    return f'{_fill(draw, "math")} Show the steps and end with a line that says "Answer:" and the number.'


def _agent(draw: random.Random) -> str:
    return _fill(draw, "agent")


_WRITERS = {"write": _write, "edit": _edit, "text": _text, "json": _json, "math": _math, "agent": _agent}


def _arguments(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in node.args.args if argument.arg != "self"]


class _Function(NamedTuple):
    node: ast.FunctionDef
    source: str


@lru_cache
def _functions() -> list[_Function]:
    """Functions of 200 to 1800 characters from the installed standard library."""
    found = []
    folder = Path(ast.__file__).parent
    paths = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    random.Random("files").shuffle(paths)
    for path in paths:
        if "test" in str(path.relative_to(folder)) or "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue  # templates and sources of other versions
        lines = text.split("\n")
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if 200 <= len(source) <= 1800:
                found.append(_Function(node, source))
        if len(found) > 4000:
            break
    return found


def generate(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    backend: str,
    seed: int,
    sampled_share: float = 0.0,
    temperature: float = 1.0,
    deadline: float = float("inf"),
) -> list[Answer]:
    """Answers of the target in large batches, greedy but for a share of sampled ones. Prompts of like length share one.

    deadline : `time.monotonic` at which no further batch is begun; the rest is left out.
    """
    order = sorted((ids for ids in prompts if ids), key=len)
    random.Random(seed).shuffle(blocks := list(_blocks(order, max_new_tokens)))
    generator = torch.Generator(decoder.device).manual_seed(seed)
    answers: list[Answer] = []
    for block in blocks:
        if time.monotonic() > deadline:
            break
        options = (max_new_tokens, stop_token_ids, backend, sampled_share, temperature, generator)
        answers += _generate_batch(decoder, block, *options)
        print(f"  {len(answers)} answers", file=sys.stderr)
    return answers


def _blocks(order: list[list[int]], max_new_tokens: int) -> Iterator[list[list[int]]]:
    """Prompts that the cache holds together."""
    block: list[list[int]] = []
    for ids in order:
        if block and (len(block) == _MAX_ROWS or (len(block) + 1) * (len(ids) + max_new_tokens) > _CACHE_TOKENS):
            yield block
            block = []
        block.append(ids)
    if block:
        yield block


def _generate_batch(
    decoder: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    backend: str,
    sampled_share: float,
    temperature: float,
    generator: torch.Generator,
) -> list[Answer]:
    device, count = decoder.device, len(prompts)
    room = min(max(map(len, prompts)) + max_new_tokens, decoder.shape.max_context_len)
    cache = decoder.new_cache(count, room)
    last = _prefill(decoder, cache, prompts)
    output = torch.zeros(count, max_new_tokens, dtype=torch.int64, device=device)
    stops = torch.tensor(stop_token_ids, device=device)
    sampled = torch.rand(count, generator=generator, device=device) < sampled_share
    done = torch.zeros(count, dtype=torch.bool, device=device)
    rows, view = torch.arange(count, device=device), cache
    num_steps = min(max_new_tokens, room - max(map(len, prompts)))
    for step in range(num_steps):
        logits = decoder.forward(last, view, backend=backend, logits="last")[:, 0]
        token = logits.argmax(dim=-1)
        if sampled_share:
            probs = sampling_probs(logits, temperature=temperature, top_p=1.0)
            drawn = torch.multinomial(probs, 1, generator=generator)[:, 0]
            token = torch.where(sampled[rows], drawn, token)
        output[rows, step] = token
        done[rows] |= torch.isin(token, stops)
        last = token[:, None]
        if step % 32 == 31:  # finished rows leave now and then: each look waits for the device
            kept = ~done[rows]
            if not bool(kept.any()):
                break
            rows, last = rows[kept], last[kept]
            view = cache.rows(rows.tolist())
    rows_out = output[:, :num_steps].tolist()
    return [Answer(ids, _cut(row, stop_token_ids)) for ids, row in zip(prompts, rows_out, strict=True)]


def _prefill(decoder: Decoder, cache: PagedKVCache, prompts: list[list[int]]) -> Tensor:
    """All but the last token of every prompt into the cache, padded in parts; the last tokens ``[batch_size, 1]``."""
    longest = max(map(len, prompts)) - 1
    part = max(1, _PREFILL_TOKENS // max(longest, 1))
    for start in range(0, len(prompts) if longest else 0, part):
        some = prompts[start : start + part]
        width = max(max(map(len, some)) - 1, 1)
        padded = [ids[:-1] + [0] * (width - len(ids) + 1) for ids in some]
        view = cache.rows(range(start, start + len(some)))
        decoder.forward(torch.tensor(padded, device=decoder.device), view, backend="sdpa", logits="last")
        view.truncate([len(ids) - 1 for ids in some])
    return torch.tensor([[ids[-1]] for ids in prompts], device=decoder.device)


def _cut(row: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Up to the first stop token, which stays. Zeros behind a row that left early come after its stop token."""
    end = next((place for place, token in enumerate(row) if token in stop_token_ids), len(row) - 1)
    return row[: end + 1]


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Answers in one compressed file of token ids and lengths, whole or not at all."""
    rows = [ids for answer in answers for ids in (answer.prompt_ids, answer.output_ids)]
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    tokens = np.fromiter((token for ids in rows for token in ids), dtype=np.int32)
    np.savez_compressed(buffer, tokens=tokens, lens=np.array([len(ids) for ids in rows]))
    write_whole(path, buffer.getvalue())


def read_answers(path: Path) -> list[Answer]:
    """What `write_answers` wrote. Raises InputError: the file is no such file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            rows = np.split(stored["tokens"], stored["lens"].cumsum()[:-1])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: wanted answers as `labkit.training` writes them, got {error}") from error
    lists = [ids.tolist() for ids in rows]
    return [Answer(*pair) for pair in zip(lists[::2], lists[1::2], strict=True)]


def usable(answers: Sequence[Answer]) -> list[Answer]:
    """Answers cut before over 20% of their 4-grams occurred in them before, those that still have 16 tokens."""
    kept = []
    for answer in answers:
        seen: set[tuple[int, ...]] = set()
        end = repeated = 0
        for last in range(4, len(answer.output_ids) + 1):
            gram = tuple(answer.output_ids[last - 4 : last])
            repeated += gram in seen
            seen.add(gram)
            if repeated <= _MAX_REPEATED * (last - 3):
                end = last
        if end >= _MIN_TOKENS:
            kept.append(Answer(answer.prompt_ids, answer.output_ids[:end]))
    return kept
