"""Which flag moves which role, by ``data/reference/engine_flags.csv``; roles of a server, and how each was resolved."""

import difflib
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.engines.server import Server, is_setting
from labkit.engines.tables import read_table

_OWN = ("-", "SGLANG_", "VLLM_", "TLLM_", "TRTLLM_")  # flags and environment variables of the engines
_BLOCKS = ("NGRAM", "DFLASH", "DSPARK")  # their drafts are one block, whatever the number of steps
_WHOLE = {f"speculative_{name}" for name in ("num_steps", "eagle_topk", "num_draft_tokens")} | {
    *("num_speculative_tokens", "spec_tokens", "spec_draft_n_max", "max_draft_len", "max_num_seqs", "page_size"),
    *("max_running_requests", "cuda_graph_max_bs", "max_cudagraph_capture_size", "tp_size", "tensor_parallel_size"),
}
_DRAFTS = ["speculative_dspark_block_size", "num_speculative_tokens", "spec_draft_n_max", "max_draft_len"]
_DRAFTS += ["num_spec_tokens", "spec_tokens"]
_CHOICES = {"speculative_algorithm": "algorithm", "method": "algorithm", "spec_method": "algorithm"}
_CHOICES |= {"spec_type": "algorithm", "rejection_sample_method": "rejection"}
PLACEHOLDERS = ("ALGORITHM", "TYPE", "METHOD")  # for what neither log nor arguments tell, in recipes
_NO_MODEL = ("NGRAM", "ngram", "suffix")  # drafts without a model, so without attention
_MLA = re.compile(r"deepseek-?(v[23]|r1(?!-distill))|kimi-k", re.I)  # one latent KV head: other backends
_BOARDS = {"pcie", "nvl", "40gb"}
SGLANG_LIMIT = 48  # of running requests, by any speculative algorithm where none is given
_CONFIG_KEYS = ("method", "model", "num_speculative_tokens", "quantization", "max_model_len", "revision")
ROLES = ("verify", "decode", "draft", "draft_extend", "prefill", "linear_decode", "linear_verify")


@dataclass(frozen=True)
class Role:
    """The backend of a role, "unknown" where it cannot be told, and how it was resolved, in words."""

    backend: str
    how: str


def version_key(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version, three of them: ``0.5.15.post1`` -> (0, 5, 15). Empty where there is none."""
    parts = [int(part) for part in re.findall(r"\d+", (text or "").split("+")[0])[:3]]
    return tuple(parts + [0] * (3 - len(parts))) if parts else ()


def holds_for(version: str | None, low: str, high: str) -> bool:
    """Whether a range of versions holds one. Without a version, or without an end of the range, it does.

    A last version of two parts holds for its patch releases.
    """
    key, last = version_key(version), version_key(high)
    last = (*last[:2], 999) if high.count(".") == 1 else last
    return not key or not high or version_key(low) <= key <= last


def rows_of(engine: str, kind: str, version: str | None, **wanted: str) -> list[dict[str, str]]:
    """Rows of a kind whose version range holds the version; all of them where the version is unknown."""
    of_kind = (row for row in read_table("engine_flags.csv") if (row["engine"], row["kind"]) == (engine, kind))
    rows = (row for row in of_kind if wanted.items() <= row.items())
    return [row for row in rows if holds_for(version, row["version_from"], row["version_to"])]


def known_flags(engine: str) -> set[str]:
    """Every flag of an engine in the table, of any version."""
    rows = (row for row in read_table("engine_flags.csv") if row["engine"] == engine)
    return {flag for row in rows for flag in row["flag"].split("|") if flag}


def gpu_row(gpu: str | None) -> dict[str, str] | None:
    """The row of ``gpu_peaks.csv`` for a product name such as ``NVIDIA H200`` or a slug such as ``h200-sxm``.

    None for another board of that chip (PCIe, NVL, 40 GB): it has another memory.
    """
    row, words = _nearest(gpu), _words(gpu)
    return row if row and not (words & _BOARDS) - _words(row["gpu"]) else None


def _words(text: str | None) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", (text or "").lower()))


def _nearest(gpu: str | None) -> dict[str, str] | None:
    words = _words(gpu)
    parts = [(row["gpu"].split("-"), row) for row in read_table("gpu_peaks.csv")]
    close = [(len(words & set(p)), row) for p, row in parts if set(p[: 2 if p[0] in ("rtx", "rx") else 1]) <= words]
    return max(close, key=lambda item: item[0])[1] if close else None


def _arch(gpu: str | None) -> str:
    return (_nearest(gpu) or {"arch": ""})["arch"]


def resolve_roles(server: Server, gpu: str | None = None) -> dict[str, Role]:
    """Backend of every role of a server whose arguments or log lines are known.

    What the log names wins over arguments, arguments over inheritance, that over the default of the GPU.
    """
    found: dict[str, Role] = {}
    for role in ("prefill", "decode", *ROLES):
        rows = rows_of(server.engine, "role", server.version, role=role)
        if not rows and server.named:  # not read for this version: a rule that is the same in all that were read
            every = rows_of(server.engine, "role", None, role=role)
            rows = every if {row["inherits"] for row in every} == {"default"} else []
        used = not role.startswith("linear") or any("linear" in name for name in (*server.args, *server.named))
        without = {"draft": _NO_MODEL, "draft_extend": _BLOCKS + _NO_MODEL}.get(role, ())
        used = used and _algorithm(server) not in without
        if role in server.named:
            found[role] = Role(server.named[role], "named by the log")
        elif used and rows:
            row = max(rows, key=lambda row: version_key(row["version_to"]))
            resolved = _resolve(row, server, found, gpu or server.gpu)
            unsure = f"; version unknown, rule of {row['version_to']}"
            surely = server.version or not row["version_to"] or "version unknown" in resolved.how
            found[role] = resolved if surely else Role(resolved.backend, resolved.how + unsure)
    return {role: found[role] for role in ROLES if role in found}


def _algorithm(server: Server) -> str:
    return server.args.get("speculative_algorithm") or server.args.get("method") or server.args.get("spec_method", "")


def _resolve(row: dict[str, str], server: Server, found: dict[str, Role], gpu: str | None) -> Role:
    for flag in filter(None, row["flag"].split("|")):
        if given := server.args.get(flag.strip("-").replace("-", "_")):
            return Role(given, f"given by {flag}")
    source, *exceptions = row["inherits"].split("|")
    for condition, _, other in (text.partition(":") for text in exceptions):
        name, _, value = condition.partition("=")
        source = other if server.args.get(name) == value else source
    if source == "automatic" and "default" in server.named:
        return Role(server.named["default"], "picked by itself: another than the target's would be in the log")
    if source in found:
        return Role(found[source].backend, f"inherited from {source}, {found[source].how}")
    for name, how in (("given", "named by the log"), ("default", "default, named by the log")):
        if source == "default" and name in server.named:
            return Role(server.named[name], how)
    if source == "default":
        tree = any((server.number(name) or 1) > 1 for name in ("speculative_eagle_topk", "page_size"))
        if _arch(gpu).startswith("10.") and _algorithm(server) not in ("", *_BLOCKS):  # there an unset topk is no chain
            tree = tree or "speculative_eagle_topk" not in server.args
        rows = rows_of(server.engine, "default", server.version)
        kinds = ("mla",) if _MLA.search(server.model or "") else ("", "tree" if tree else "chain")
        rows = [row for row in rows if fits(row, gpu) and row["inherits"] in kinds]
        if len({row["value"] for row in rows}) == 1:
            note = f": {rows[0]['note']}" if rows[0]["note"] else ""
            return Role(rows[0]["value"], f"default of the table for {gpu or 'every GPU'}{note}")
        return Role("unknown", "default: not in the log, and unknown for this version and GPU")
    return Role("unknown", "picked automatically, not printed" if source == "automatic" else "unknown for this version")


def fits(row: dict[str, str], gpu: str | None) -> bool:
    """Whether a row has a value and is for this GPU."""
    return bool(row["value"]) and (not row["gpu"] or _arch(gpu) in row["gpu"].split("|"))


def kernel(server: Any, backend: str, role: str = "verify") -> dict[str, str] | None:
    """What a backend runs in a role on a server with engine, engine_version, model and gpu; the table has no MLA."""
    if _MLA.search(server.model or ""):
        return None
    rows = rows_of(server.engine, "kernel", server.engine_version, role=role, value=backend)
    rows = [row for row in rows if fits(row, server.gpu)]
    return rows[0] if len({row["kv_split"] for row in rows}) == 1 else None


def speculative_tokens(server: Server, rows: bool = False) -> int | None:
    """Drafts that a step can keep, k; for a tree that is its depth. ``rows``: what a step verifies without the root."""
    # SGLang's num-draft-tokens counts the root, the others do not.
    given = server.number("speculative_num_draft_tokens", "speculative_dflash_block_size")
    drafts = given - 1 if given else None
    if (depth := server.number("speculative_num_steps")) and server.args.get("speculative_algorithm") not in _BLOCKS:
        chain = server.number("speculative_eagle_topk") in (None, 1)
        return (depth if chain else drafts) if rows else min(depth, drafts or depth)
    return server.number(*_DRAFTS) if drafts is None else drafts


def launch_findings(server: Server, flags: list[str]) -> Iterator[str]:
    """What is inconsistent in the arguments of a launch line, in plain words."""
    args = server.args
    yield from flag_texts(server, flags)[0]
    for name in sorted(_WHOLE & args.keys()):
        if not (args[name].isdecimal() and len(args[name]) < 19 and int(args[name])):
            yield f"{name}: wanted a whole number of at least 1, got {args[name]!r}"
    for name in {"disable_cuda_graph", "enforce_eager"} & args.keys():
        if args[name].lower() == "true":
            yield f"--{name.replace('_', '-')}: every step runs without a CUDA graph and pays its launches"
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    steps, topk, rows_given = (server.number(f"speculative_{name}") for name in names)
    chain = topk in (None, 1) and args.get("speculative_algorithm") not in _BLOCKS
    # Each level of a tree keeps topk nodes and tries topk children of each.
    tree = 1 + topk + (steps - 1) * topk**2 if steps and topk else None
    most = steps + 1 if steps and chain else tree
    if most and rows_given and (rows_given > most or (chain and rows_given != most)):
        text = f"{steps} steps with topk {topk or 1} hold {most} rows, root counted"
        yield f"--speculative-num-draft-tokens {rows_given}: {text}"
    batch, graph = server.number("max_running_requests", "max_num_seqs"), server.number
    q_len = (speculative_tokens(server, rows=True) or 0) + 1
    size = graph("max_cudagraph_capture_size") or _largest(args.get("cudagraph_capture_sizes", ""))
    if size and batch and size < batch * q_len:
        yield f"largest CUDA graph {size}: below batch x q_len = {batch} x {q_len}; those steps run eager"
    batch = batch or (SGLANG_LIMIT if server.engine == "sglang" and "speculative_algorithm" in args else None)
    if (size := graph("cuda_graph_max_bs") or _largest(args.get("cuda_graph_bs", ""))) and batch and size < batch:
        yield f"--cuda-graph-max-bs {size}: below {batch} running requests; larger batches run eager"
    verify = resolve_roles(server).get("verify", Role("", "")).backend
    if (topk or 1) > 1 and rows_of(server.engine, "kernel", None, value=verify, note="topk 1 only"):
        yield f"--speculative-eagle-topk {topk}: {verify} verifies chains only, topk 1"
    for name, root in (("dflash", 0), ("dspark", 1)):  # whether the root is added to the block
        block = server.number(f"speculative_{name}_block_size")
        if block and rows_given not in (None, block + root):
            yield f"--speculative-{name}-block-size {block}: num-draft-tokens must be {block + root}, not {rows_given}"
    if {"attention_backend", "attention_config.backend"} <= args.keys() and server.engine == "vllm":
        yield "--attention-backend and --attention-config.backend: both are set, which is an error"


def _largest(sizes: str) -> int | None:
    return max((int(text) for text in sizes.split() if text.isdecimal()), default=None)


def flag_texts(server: Server, flags: list[str]) -> tuple[list[str], list[str]]:
    """Flags and choices that this version does not have; those of which it is unknown."""
    engine, every = server.engine, [row for row in read_table("engine_flags.csv") if row["engine"] == server.engine]
    read = {version_key(v) for row in every if row["role"] == "read" for v in row["value"].split("|")}
    is_read, known, sources = version_key(server.version) in read, known_flags(engine), dict[str, list[str]]()
    wrong, unknown = _choice_texts(server, is_read)
    here = [row for kind in ("role", "setting") for row in rows_of(engine, kind, server.version)]
    for flag in flags:
        rows = [row for row in every if flag in row["flag"].split("|")]
        head, _, key = flag.partition(".")
        if not rows and head == "speculative_config":
            if is_setting(key):
                continue
            near = difflib.get_close_matches(key, _CONFIG_KEYS, 1, 0.8)
            text = f"did you mean {near[0]}?" if near else "it was not checked"
            (wrong if near else unknown).append(f"{flag}: unknown for this version; {text}")
        elif not rows:
            if flag.startswith(_OWN) and not key and f"--{flag.removeprefix('--no-')}" not in known:
                close = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(flag, known, 1, 0.8))
                text = "unknown for this version, not in the table of flags; it was not checked"
                unknown.append(f"{flag}: {text}{close}")
        elif (gone := rows[0]["role"] == "removed") or not any(row in here for row in rows):
            text = rows[0]["note"] if gone else f"known for {ranges(rows)}"
            lack = f"not a flag of {engine} {server.version}" if is_read else "unknown for this version"
            (wrong if is_read else unknown).append(f"{flag}: {lack}; {text}")
        elif server.version and not any(row["version_to"] or row["role"] == "ordinary" for row in rows):
            sources.setdefault(rows[0]["source"], []).append(flag)
    text = "unknown for this version; read without a version range"
    return wrong, unknown + [f"{', '.join(names)}: {text} ({source})" for source, names in sources.items()]


def ranges(rows: list[dict[str, str]]) -> str:
    """The versions of some rows, in words."""
    return ", ".join(sorted({f"{row['version_from']} to {row['version_to']}" for row in rows}))


def _choice_texts(server: Server, is_read: bool) -> tuple[list[str], list[str]]:
    """Methods and backends that no version has, or this one has not; the same where the version was not read."""
    wrong, unknown = list[str](), list[str]()
    for name, text in server.args.items():
        backend = name.lower().endswith("attention_backend") and name[:3] != "mm_"
        role = "backends" if backend else _CHOICES.get(name, "")
        rows = rows_of(server.engine, "setting", None, role=role)
        for given in text.split(",") if rows and text not in PLACEHOLDERS else ():
            having = [row for row in rows if _has(row, given.lower())]
            values = [value for row in rows for value in row["value"].split("|")]
            near = difflib.get_close_matches(given, values, 1, 0.8)
            if any(row in rows_of(server.engine, "setting", server.version, role=role) for row in having):
                continue
            if not having and role == "backends":
                wrong.append(f"{name} {given}: no backend of the versions read; they have {', '.join(values)}")
            elif not having:
                text = f"did you mean {near[0]}?" if near else "not in the table; it was not checked"
                (wrong if near else unknown).append(f"{name} {given}: unknown for this version; {text}")
            else:
                lack = f"not in {server.engine} {server.version}" if is_read else "unknown for this version"
                (wrong if is_read else unknown).append(f"{name} {given}: {lack}; known for {ranges(having)}")
    return wrong, unknown


def _has(row: dict[str, str], value: str) -> bool:
    return any(fnmatch.fnmatch(value, pattern) for pattern in row["value"].lower().split("|"))


def launch_notes(server: Server, flags: list[str]) -> Iterator[str]:
    """What follows from the arguments and is no mistake."""
    yield from flag_texts(server, flags)[1]
    drafts = server.engine == "sglang" and "speculative_algorithm" in server.args
    if server.imposed:
        yield "acceptance is imposed by a switch: the length is an input, only times are real"
    if drafts and not speculative_tokens(server):
        yield "draft tokens are unset: the server picks them by algorithm and model, so the ceiling is unknown"
    if k := speculative_tokens(server):
        yield f"acceptance length is at most {k + 1}: {k} drafts on a path and the bonus token"
    if drafts and not server.number("max_running_requests"):
        text = f"any speculative algorithm sets it to {SGLANG_LIMIT}, a ceiling on throughput"
        yield f"--max-running-requests is unset: {text}"
