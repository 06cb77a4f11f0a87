"""The flag that moves the verify role, for the next step of a diagnosis."""

import re
from typing import Any

from labkit.engines.roles import Role, fits, kernel, rows_of


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
