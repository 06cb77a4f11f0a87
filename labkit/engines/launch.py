"""A pasted launch line: its engine and arguments."""

import json
import re
import shlex
from typing import Any

from labkit.engines.server import Server
from labkit.errors import InputError

_PROGRAMS = {
    "sglang": "sglang",
    "vllm": "vllm",
    "llama-server": "llamacpp",
    "llama-speculative": "llamacpp",
    "trtllm": "trtllm",
}
_ENVIRONMENT = re.compile(r"([A-Z][A-Z0-9_]+)=(.*)")


def parse(line: str, version: str | None) -> tuple[Server, list[str]]:
    """Engine and arguments of a launch line, and the flags it gives. Raises InputError as `launch_findings` says."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"launch: wanted a shell command, got {error}") from error
    engine = next((name for mark, name in _PROGRAMS.items() for word in words if mark in word), "")
    if not engine:
        raise InputError(f"launch: wanted a command of {', '.join(sorted(set(_PROGRAMS.values())))}, got {line[:60]!r}")
    server, flags = Server(engine=engine, version=version), []
    values: dict[str, Any] = {match[1]: match[2] for word in words if (match := _ENVIRONMENT.fullmatch(word))}
    for i, word in enumerate(words):
        if word.startswith("--") or re.fullmatch(r"-[a-z]{1,4}", word):
            name, _, value = word.partition("=")
            follows = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else "true"
            flags.append(name)
            values[name.strip("-").replace("-", "_")] = value or follows
    for name, text in values.items():
        if name.endswith("_config") and text.startswith("{"):
            try:
                values[name] = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InputError(f"launch: --{name.replace('_', '-')}: wanted JSON, got {error}") from error
    server.take_args(values)
    flags += [name for name in values if name.isupper()]
    return server, flags
