"""A pasted launch line: its engine and arguments."""

import json
import re
import shlex
from typing import Any

from labkit.engines.server import Server
from labkit.errors import InputError

_PROGRAMS = {"sglang": "sglang", "vllm": "vllm", "llama-": "llamacpp", "trtllm": "trtllm"}
_ENVIRONMENT = re.compile(r"([A-Z][A-Z0-9_]+)=(.*)")


def parse_launch(line: str, version: str | None) -> tuple[Server, list[str]]:
    """Engine and arguments of a launch line, and the flags and environment variables that it sets.

    Raises InputError: not a launch line of SGLang, vLLM, llama.cpp or TensorRT-LLM, an open quote, or broken JSON.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"launch: wanted a shell command, got {error}") from error
    engine = next((name for mark, name in _PROGRAMS.items() for word in words if mark in word), "")
    if not engine:
        raise InputError(f"launch: wanted a command of {', '.join(_PROGRAMS.values())}, got {line[:60]!r}")
    values: dict[str, Any] = {match[1]: match[2] for word in words if (match := _ENVIRONMENT.fullmatch(word))}
    flags = list(values)
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--") or re.fullmatch(r"-[a-z]{1,4}", word):
            name, _, value = word.partition("=")
            flags.append(name)
            text = value or ("true" if after.startswith("--") or not after else after)
            key = name.strip("-").replace("-", "_")
            try:
                values[key] = json.loads(text) if key.endswith("_config") and text.startswith("{") else text
            except (ValueError, RecursionError) as error:
                raise InputError(f"launch: {name}: wanted JSON, got {error}") from error
    server = Server(engine=engine, version=version)
    server.take_args(values)
    return server, flags
