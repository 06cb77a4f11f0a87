"""Which flag moves which role, by ``data/reference/engine_flags.csv``; roles of a server, and how each was resolved."""

import csv
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.engines.server import Server
from labkit.paths import REFERENCE

ROLES = ("verify", "decode", "draft", "draft_extend", "prefill", "linear_decode", "linear_verify")


@dataclass(frozen=True)
class Role:
    """The backend of a role, "unknown" where it cannot be told, and how it was resolved, in words."""

    backend: str
    how: str


@functools.cache
def flag_rows() -> tuple[dict[str, str], ...]:
    """Every row of the table of flags."""
    with (REFERENCE / "engine_flags.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def version_key(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version, three of them: ``0.5.15.post1`` -> (0, 5, 15). Empty where there is none."""
    parts = [int(part) for part in re.findall(r"\d+", (text or "").split("+")[0])[:3]]
    return tuple(parts + [0] * (3 - len(parts))) if parts else ()


def rows_of(engine: str, kind: str, version: str | None, **wanted: str) -> list[dict[str, str]]:
    """Rows of a kind whose version range holds the version; all of them where the version is unknown.

    A row without a range holds for every version; a last version of two parts holds for its patch releases.
    """
    found = []
    for row in flag_rows():
        if row["engine"] == engine and row["kind"] == kind and all(row[name] == text for name, text in wanted.items()):
            low, high = row["version_from"], row["version_to"]
            key = version_key(version)
            last = (*version_key(high)[:2], 999) if high.count(".") == 1 else version_key(high)
            if not key or not low or version_key(low) <= key <= last:
                found.append(row)
    return found


def gpu_arch(gpu: str | None) -> str:
    """Compute capability of a GPU by a name that is in the table of peaks or holds such a name; "" where unknown."""
    row = gpu_row(gpu)
    return row["arch"] if row else ""


def gpu_row(gpu: str | None) -> dict[str, str] | None:
    """The row of ``gpu_peaks.csv`` for a product name such as ``NVIDIA H200`` or a slug such as ``h200-sxm``."""
    if not gpu:
        return None
    words = set(re.findall(r"[a-z0-9]+", gpu.lower()))
    with (REFERENCE / "gpu_peaks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    exact = [row for row in rows if row["gpu"] == gpu.lower()]
    close = [row for row in rows if set(row["gpu"].split("-")[: 2 if row["gpu"][:3] in ("rtx", "rx-") else 1]) <= words]
    return max(exact or close, key=lambda row: len(set(row["gpu"].split("-")) & words), default=None)


def resolve_roles(server: Server, gpu: str | None = None) -> dict[str, Role]:
    """Backend of every role of a server whose arguments or log lines are known.

    What the log names wins over arguments, arguments over inheritance, that over the default of the GPU.
    """
    found: dict[str, Role] = {}
    for role in ("prefill", "decode", "verify", *ROLES):
        rows = rows_of(server.engine, "role", server.version, role=role)
        used = not role.startswith("linear") or any("linear" in name for name in (*server.args, *server.named))
        if role not in found and used and (rows or role in server.named):
            found[role] = _resolve(role, rows[-1] if rows else None, server, found, gpu or server.gpu)
    return {role: found[role] for role in ROLES if role in found}


def _resolve(role: str, row: dict[str, str] | None, server: Server, found: dict[str, Role], gpu: str | None) -> Role:
    if role in server.named:
        return Role(server.named[role], "named by the log")
    if row is None:
        return Role("unknown", "unknown for this version")
    for flag in filter(None, row["flag"].split("|")):
        if given := server.args.get(flag.strip("-").replace("-", "_")):
            return Role(given, f"given ({flag})")
    source, *exceptions = row["inherits"].split("|")
    for condition, _, other in (text.partition(":") for text in exceptions):
        name, _, value = condition.partition("=")
        source = other if server.args.get(name) == value else source
    if source in found:
        backend = found[source].backend
        return Role(backend, f"inherited from {source} ({found[source].how})")
    if source == "default":
        return _default(server, gpu)
    return Role("unknown", "picked automatically, not printed" if source == "automatic" else "unknown for this version")


def _default(server: Server, gpu: str | None) -> Role:
    for name, how in (("given", "named by the log"), ("default", "default, named by the log")):
        if name in server.named:
            return Role(server.named[name], how)
    arch = gpu_arch(gpu)
    rows = [
        row
        for row in rows_of(server.engine, "default", server.version)
        if row["value"] and (not row["gpu"] or arch in row["gpu"].split("|"))
    ]
    if len({row["value"] for row in rows}) == 1:
        return Role(
            rows[0]["value"], f"default for {gpu or 'every GPU'}, from the table: {rows[0]['note'] or 'no note'}"
        )
    return Role("unknown", "default: not in the log, and unknown for this version and GPU")


def kernel(
    engine: str, backend: str, version: str | None, role: str = "verify", arch: str = ""
) -> dict[str, str] | None:
    """What a backend runs in a role: the row with labkit_backend, kv_split and note; None where it is not known."""
    rows = [row for row in rows_of(engine, "kernel", version, role=role) if row["value"].lower() == backend.lower()]
    rows = [row for row in rows if not row["gpu"] or arch in row["gpu"].split("|")]
    return rows[0] if len({row["kv_split"] for row in rows}) == 1 else None


def setting(engine: str, role: str, version: str | None) -> dict[str, str] | None:
    """The flag of a setting (imposed_acceptance, num_speculative_tokens, ...) for a version."""
    return next(iter(rows_of(engine, "setting", version, role=role)), None)


def launch_findings(line: str, version: str | None, gpu: str | None = None) -> tuple[Server, list[str]]:
    """Read a pasted launch line; what is inconsistent in it, in plain words.

    Returns
    -------
    Server
        With the line's arguments.
    list of str
        Findings; empty when nothing is wrong.

    Raises
    ------
    InputError
        Not a launch line of SGLang, vLLM, llama.cpp or TensorRT-LLM, or with an open quote.
    """
    from labkit.engines.launch import parse

    server, flags = parse(line, version)
    return server, list(_findings(server, flags))


def _findings(server: Server, flags: list[str]) -> Iterator[str]:
    engine, version = server.engine, server.version
    for flag in flags:
        rows = [row for row in flag_rows() if row["engine"] == engine and flag in row["flag"].split("|")]
        if rows and not any(row in rows_of(engine, row["kind"], version) for row in rows):
            ranges = ", ".join(sorted({f"{row['version_from']} to {row['version_to']}" for row in rows}))
            text = rows[0]["note"] if rows[0]["role"] == "removed" else f"known for {ranges}"
            yield f"{flag}: not a flag of {engine} {version}; {text}"
    steps, topk = server.number("speculative_num_steps"), server.number("speculative_eagle_topk")
    rows_given = server.number("speculative_num_draft_tokens")
    if engine == "sglang" and steps and rows_given:
        most = steps + 1 if topk in (None, 1) else None
        if (
            most
            and rows_given != most
            and server.args.get("speculative_algorithm") not in ("NGRAM", "DFLASH", "DSPARK")
        ):
            yield (
                f"--speculative-num-draft-tokens {rows_given}: topk 1 with {steps} steps holds {most} rows, root counted; "
                f"the acceptance length cannot exceed {most}"
            )
        if topk and topk > 1 and rows_given > sum(topk**i for i in range(steps + 1)):
            yield f"--speculative-num-draft-tokens {rows_given}: above what {steps} steps and topk {topk} hold"
    k = speculative_tokens(server)
    batch, size = server.number("max_running_requests", "max_num_seqs"), server.number("max_cudagraph_capture_size")
    if engine == "vllm" and size and batch and k and size < batch * (k + 1):
        yield f"--max-cudagraph-capture-size {size}: below batch x q_len = {batch} x {k + 1}; those steps run eager"
    if engine == "sglang":
        graph = server.number("cuda_graph_max_bs")
        if graph and batch and graph < batch:
            yield f"--cuda-graph-max-bs {graph}: below {batch} running requests; larger batches run eager"


def launch_notes(server: Server) -> Iterator[str]:
    """What follows from the arguments and is no mistake."""
    if k := speculative_tokens(server):
        yield f"acceptance length is at most {k + 1}: {k} drafts per step and the bonus token"
    if server.args.get("speculative_algorithm") and not server.number("max_running_requests"):
        yield "--max-running-requests is unset: any speculative algorithm sets it to 48, a ceiling on throughput"


def speculative_tokens(server: Server) -> int | None:
    """k of a server's arguments: SGLang's num-draft-tokens counts the root, the others do not."""
    rows = server.number("speculative_num_draft_tokens", "speculative_dflash_block_size")
    if rows:
        return rows - 1
    return server.number("num_speculative_tokens", "spec_draft_n_max", "max_draft_len", "num_spec_tokens")
