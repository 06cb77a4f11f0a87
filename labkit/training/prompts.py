"""Prompts to train heads on, from installed sources, templates and the target itself.

None of the committed prompts is used, so all of them are held out. The kinds of prompts are those of the workloads.
"""

import ast
import json
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from labkit.filler import filler_text
from labkit.models.decoder import Decoder
from labkit.models.tokenizer import Tokenizer
from labkit.paths import REFERENCE
from labkit.training.data import generate
from labkit.workloads import SEPARATOR

_AGENT = "You work in a terminal. Say what you will do next, then one command."
# How often each kind is drawn. "self": the target writes the user's message too.
_KINDS = {"self": 10, "write": 4, "edit": 5, "text": 3, "json": 2, "math": 2, "agent": 1, "long": 1}


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
    written: dict[tuple[int, ...], list[list[int]]] = {}
    for answer in answers:
        written.setdefault(tuple(answer.prompt_ids), []).append(answer.output_ids)
    texts = []
    for opener, prompt in zip(openers, prompts, strict=True):
        left = written.get(tuple(prompt), [])
        ids = left.pop() if left else []
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


_WRITERS: dict[str, Callable[[random.Random], str]] = {
    **{"write": _write, "edit": _edit, "text": _text, "json": _json, "math": _math},
    "agent": lambda draw: _fill(draw, "agent"),
}


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
