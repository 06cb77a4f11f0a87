"""Short measurements that would settle a diagnosis: launch lines to run elsewhere, by ``engine_recipes.csv``.

Nothing here starts a server.
"""

import shlex

from labkit.engines.server import Server
from labkit.engines.tables import read_table
from labkit.errors import InputError

_LAUNCH = {
    "sglang": ("sglang serve --model-path {}", 30000),
    "vllm": ("vllm serve {}", 8000),
    "llamacpp": ("llama-server -m {}", 8080),
    "trtllm": ("trtllm-serve {}", 8000),
}


def recipe(name: str, server: Server | None, launch: str | None) -> list[str]:
    """Lines of a recipe, from the server's own launch line or its arguments.

    Raises InputError: an unknown recipe or engine, or one that has no such switch.
    """
    server = server or Server()
    rows = [row for row in read_table("engine_recipes.csv") if (row["recipe"], row["engine"]) == (name, server.engine)]
    if not rows:
        wanted = "all-reject, k-sweep or backend-ab and an engine that has its switch"
        raise InputError(f"recipe: wanted {wanted}, got {name!r}, {server.engine!r}")
    start, port = _LAUNCH[server.engine]
    given = [f"--{key.replace('_', '-')} {shlex.quote(text)}" for key, text in server.args.items() if text != "False"]
    line = launch or " ".join([start.format(shlex.quote(server.model or "MODEL")), *given])
    lines = [f"# {name}: start each server in turn, replay the same scene, compare step_ms of the arms"]
    for row in rows:
        for value in row["values"].split() or [""]:
            rows_verified = int(value) + 1 if value.isdecimal() else ""
            words = {"value": value, "launch": line, "plain": plain(line), "rows": rows_verified}
            lines += [f"# {row['title'].format(**words)}", row["command"].format(**words)]
            lines.append(f"labkit replay --base-url http://127.0.0.1:{port} --scene SCENE --repeats 5 --out runs")
    return lines if name == "backend-ab" else [*lines, "# plain decode, the baseline", plain(line), lines[-1]]


def plain(launch: str) -> str:
    """A launch line without its speculative flags and their values."""
    kept, skip = list[str](), False
    for word in shlex.split(launch):
        flag = word.startswith("-")
        skip = word.startswith("--spec") if flag else skip and kept is not None
        if not skip and not word.startswith("SGLANG_SIMULATE"):
            kept.append(word)
        skip = skip and flag and "=" not in word
    return shlex.join(kept)
