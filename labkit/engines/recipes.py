"""Short measurements that would settle a diagnosis: launch lines to run elsewhere. Nothing here starts a server."""

import shlex

from labkit.engines.roles import setting, speculative_tokens
from labkit.engines.server import Server
from labkit.errors import InputError

NAMES = ("all-reject", "k-sweep", "backend-ab")
_LAUNCH = {
    "sglang": "sglang serve --model-path {model}",
    "vllm": "vllm serve {model}",
    "llamacpp": "llama-server -m {model}",
    "trtllm": "trtllm-serve {model}",
}
_REPLAY = "labkit replay --base-url http://127.0.0.1:{port} --scene SCENE --repeats 5 --out runs"
_BACKENDS = {
    "sglang": ("--attention-backend", ("triton", "flashinfer", "fa3")),
    "vllm": ("--attention-backend", ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER")),
}
_PORTS = {"sglang": 30000, "vllm": 8000, "llamacpp": 8080, "trtllm": 8000}


def recipe(name: str, server: Server, launch: str | None) -> list[str]:
    """Lines of a recipe, from the server's own launch line or its arguments.

    Raises
    ------
    InputError
        An unknown engine, or one without the switch that the recipe needs.
    """
    if name not in NAMES:
        raise InputError(f"recipe: wanted one of {', '.join(NAMES)}, got {name!r}")
    if server.engine not in _LAUNCH:
        raise InputError("recipe: the engine is unknown; wanted a log with its arguments, or --launch")
    base = launch or _LAUNCH[server.engine].format(model=shlex.quote(server.model or "MODEL"))
    if launch is None:
        base += "".join(
            f" --{key.replace('_', '-')} {shlex.quote(value)}"
            for key, value in server.args.items()
            if value not in ("True", "False") and "." not in key
        )
    replay = _REPLAY.format(port=_PORTS[server.engine])
    arms = {"all-reject": _all_reject, "k-sweep": _k_sweep, "backend-ab": _backend_ab}[name](server, base)
    lines = [f"# {name}: start each server in turn, replay the same scene, compare step_ms of the arms"]
    for title, command in arms:
        lines += [f"# {title}", command, replay]
    return lines


def _all_reject(server: Server, base: str) -> list[tuple[str, str]]:
    row = setting(server.engine, "imposed_acceptance", server.version)
    if row is None:
        raise InputError(f"recipe: no imposed-acceptance switch known for {server.engine} {server.version}")
    plain = "plain decode: the same line without the speculative flags"
    if server.engine == "vllm":
        k = speculative_tokens(server) or "K"
        config = f'{{"method": "METHOD", "num_speculative_tokens": {k}, "rejection_sample_method": "synthetic", '
        config += '"synthetic_acceptance_length": 1}'
        return [
            ("every draft rejected; keep your other speculative settings", f"{base} --speculative-config '{config}'"),
            (plain, "vllm serve MODEL"),
        ]
    if row["flag"].startswith("--"):
        return [("every draft rejected", f"{base} {row['flag']} {row['value']}"), (plain, _without(base))]
    return [("every draft rejected", f"{row['flag']}={row['value']} {base}"), (plain, _without(base))]


def _k_sweep(server: Server, base: str) -> list[tuple[str, str]]:
    row = setting(server.engine, "num_speculative_tokens", server.version)
    if row is None:
        raise InputError(f"recipe: no flag for the draft length known for {server.engine} {server.version}")
    root = 1 if server.engine == "sglang" else 0
    if not row["flag"].startswith("--"):
        return [(f"k = {k}", f"{base}  # with {row['flag']} = {k} in the speculative settings") for k in (1, 2, 4, 8)]
    return [
        (f"k = {k}", f"{base} {row['flag']} {k + root}" + (f" --speculative-num-steps {k}" if root else ""))
        for k in (1, 2, 4, 8)
    ]


def _backend_ab(server: Server, base: str) -> list[tuple[str, str]]:
    if server.engine not in _BACKENDS:
        raise InputError(f"recipe: {server.engine} has no backend flag per role")
    flag, names = _BACKENDS[server.engine]
    arms = [(f"backend {name}", f"{base} {flag} {name}") for name in names]
    return arms + [(f"plain decode, backend {name}", f"{_without(base)} {flag} {name}") for name in names]


def _without(command: str) -> str:
    """A launch line without its speculative flags."""
    words, kept, skip = shlex.split(command), [], False
    for word in words:
        if word.startswith(("--spec", "SGLANG_SIMULATE")):
            skip = "=" not in word
        elif not (skip and not word.startswith("-")):
            kept.append(word)
            skip = False
        else:
            skip = False
    return shlex.join(kept)
