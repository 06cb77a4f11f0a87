"""What to do after a diagnosis: the flag that moves a role, and short measurements, by ``engine_recipes.csv``.

Nothing here starts a server.
"""

import json
import re
import shlex
from typing import Any

from labkit.engines.roles import Role, fits, flag_texts, kernel, known_flags, ranges, rows_of
from labkit.engines.server import Server, parse_launch
from labkit.engines.tables import read_table
from labkit.errors import InputError

_DRAFT_FLAGS = ("--spec", "--draft", "--model-draft", "-md", "-hfd", "-devd", "-ngld", "-ctkd", "-ctvd")
_YAML_FLAGS = ("--extra_llm_api_options", "--config")
_IMPOSED = ("SGLANG_SIMULATE", "TLLM_SPEC_DECODE")
_SPEC_FLAGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def backend_flag(found: Any, verify: Role) -> str:
    """The flag that moves the verify role to a backend with a KV split, if the table has both for this version."""
    own = (found.trace or {}).get("phases", {}).get("verify", {}).get("kernels", [])
    if split := next((k["name"] for k in own if re.search(r"split_?kv|reduce_segments", k["name"], re.I)), None):
        return f"compare backends (--recipe backend-ab): {split[:60]} is a kernel with a KV split, see its grid"
    if (runs := kernel(found, verify.backend)) and runs["kv_split"] == "yes":
        return f"compare backends (--recipe backend-ab): {verify.backend} verifies with a KV split, see a trace for why"
    if not found.engine_version:
        return "set a verify backend with a KV split; the version is unknown, so the flag is not named"
    usual = [row for row in rows_of(found.engine, "default", found.engine_version) if not row["inherits"]]
    others = {"sglang": ("flashinfer", "fa3"), "vllm": ("FLASH_ATTN", "FLASHINFER")}.get(found.engine, ())
    # The flag that moved it moves it again; SGLang's two flags win over the one for all roles.
    given, side = re.search(r"given by (--[\w.-]+)", verify.how), "decode" if "from decode" in verify.how else "prefill"
    apart = found.engine == "sglang" and found.roles.get("decode", verify).backend != verify.backend
    apart = apart or found.roles.get("prefill", verify).backend != verify.backend
    flag = given[1] if given else f"--{side}-attention-backend" if apart else "--attention-backend"
    moved = f"{side} and verify" if f"--{side}" in flag else "all roles without a flag of their own"
    for name in (*(row["value"] for row in usual if fits(row, found.gpu)), *others):
        row = kernel(found, name)
        if row and row["kv_split"] == "yes" and name != verify.backend:
            return f"{flag} {name} (moves {moved}; compare on equal text)"
    return "unknown for this version: no backend with a KV split for verify is in the table"


def recipe(name: str, server: Server | None, launch: str | None) -> list[str]:
    """Lines of a recipe, from the server's own launch line or its arguments.

    Raises InputError: an unknown recipe or engine, or one that has no such switch.
    """
    server = server or Server()
    rows = [row for row in read_table("engine_recipes.csv") if (row["recipe"], row["engine"]) == (name, server.engine)]
    if not rows:
        wanted = "all-reject, k-sweep or backend-ab and an engine that has its switch"
        raise InputError(f"recipe: wanted {wanted}, got {name!r}, {server.engine!r}")
    notes = _check_version(server, rows)
    # The engine's own tool sends the requests: the same ones whenever the seed is the same.
    (program,) = (row for row in read_table("engine_programs.csv") if row["engine"] == server.engine)
    model, port = shlex.quote(server.model or "MODEL"), server.number("port") or int(program["port"])
    start, bench = (program[name].format(model) for name in ("launch", "requests"))
    bench = re.sub(rf"(:|--port ){program['port']}\b", rf"\g<1>{port}", bench)
    given = launch or " ".join([start, *_flags(server)])
    if plain(given) == shlex.join(shlex.split(given)) and not server.settings:
        missing = "the YAML file with speculative_config" if server.engine == "trtllm" else "a drafter or an algorithm"
        raise InputError(f"recipe: both servers would be the same, no speculation in {given[:200]!r}; add {missing}")
    lines = [f"# {name}: start each server in turn and send the same requests twice; compare the second ones"]
    lines += ["# random tokens: step times hold, lengths do not"] * ("random" in bench and name != "all-reject")
    for row in rows:
        for value in row["values"].split() or [""]:
            own = tuple(word for word in row["command"].split() if word.startswith("--"))  # set anew by the recipe
            line, base = plain(given, own), plain(given, _DRAFT_FLAGS + own)
            line = f"{base} --speculative-config {_settings(server, row, value)}" if row["settings"] else line
            rows_verified = int(value) + 1 if value.isdecimal() else ""
            yaml, file = _yaml(line), f"k{value}" if value.isdecimal() else value.lower()
            if yaml and value:
                line, base = line.replace(yaml, f"{file}.yaml"), base.replace("plain.yaml", f"plain-{file}.yaml")
            words = {"value": value, "launch": line, "plain": base, "rows": rows_verified, "yaml": yaml}
            lines += [f"# {row['title'].format(**words)}", row["command"].format(**words), bench]
            notes += [text for texts in flag_texts(*parse_launch(lines[-2], server.version)) for text in texts]
    yaml = f", {_yaml(given)} without speculative_config is plain.yaml" if _yaml(given) else ""
    lines += [] if name == "backend-ab" else [f"# plain decode, the baseline{yaml}", plain(given), bench]
    urls = " ".join(f"http://127.0.0.1:{port + i}" for i in range(2))
    side = "# or two of them side by side, on two ports: byte-identical requests in turns, at each context length"
    lines = [*(f"# {text}" for text in dict.fromkeys(notes)), *lines]
    return [*lines, side, f"labkit replay --base-url {urls} --scene depth content --out runs"]


def _check_version(server: Server, rows: list[dict[str, str]]) -> list[str]:
    """What is unknown of the flags that a recipe sets. InputError: the table does not have one for this version."""
    notes = list[str]()
    keys = (key for row in rows for key in re.findall(r'"(\w+)":', row["settings"]))
    words = (word.partition("=")[0] for row in rows for word in row["command"].split())
    for flag in (*words, *(f"speculative_config.{key}" for key in keys)):
        known = [row for row in read_table("engine_flags.csv") if flag in row["flag"].split("|")]
        known = [row for row in known if row["engine"] == server.engine]
        if known and not any(row in rows_of(server.engine, row["kind"], server.version) for row in known):
            text = f"{flag}: unknown for this version, {server.engine} {server.version}; known for {ranges(known)}"
            raise InputError(f"recipe: {text}")
        if known and not server.version and known[0]["version_to"]:
            notes.append(f"{flag}: the server's version is unknown (--engine-version); known for {ranges(known)}")
    return notes


def _yaml(line: str) -> str:
    """The file of settings that a trtllm-serve line names."""
    found = re.search(rf"(?:{'|'.join(_YAML_FLAGS)})[ =](\S+)", line) if "trtllm" in line else None
    return found[1] if found else ""


def _flags(server: Server) -> list[str]:
    """The arguments that are flags of the table, as a launch line has them."""
    known, found = known_flags(server.engine), list[str]()
    for key, text in server.args.items():
        flag = next((flag for flag in (f"--{key.replace('_', '-')}", f"--{key}") if flag in known), "")
        if flag and text.lower() != "false" and " " not in text:
            found.append(flag if text.lower() == "true" else f"{flag} {shlex.quote(text.removeprefix('torch.'))}")
    return found


def _settings(server: Server, row: dict[str, str], value: str) -> str:
    """The speculative settings of a vLLM server with the changes of a recipe, quoted."""
    args = {_SPEC_FLAGS[key]: text for key, text in server.args.items() if key in _SPEC_FLAGS}
    given = {key: int(text) if text.isdecimal() else text for key, text in args.items()} | server.settings
    kept = {key: item for key, item in given.items() if not key.startswith(("synthetic", "rejection"))}
    named = {} if {"method", "model"} & kept.keys() else {"method": "METHOD", "model": "DRAFTER"}
    changed = json.loads(row["settings"].replace("{value}", value))
    return shlex.quote(json.dumps(named | kept | changed))


def plain(launch: str, flags: tuple[str, ...] = _DRAFT_FLAGS) -> str:
    """A launch line without its speculative flags, or without those that begin so, and their values."""
    yaml, kept, skip = _yaml(launch) if _DRAFT_FLAGS[0] in flags else "", list[str](), False
    for word in shlex.split(launch):
        flag = word.startswith("-")
        skip = word.startswith(flags) if flag else skip
        word = word.replace(yaml, "plain.yaml") if yaml else word  # the speculative settings are in that file
        if not skip and not word.startswith(_IMPOSED):
            kept.append(word)
        skip = skip and flag and "=" not in word
    return shlex.join(kept)
