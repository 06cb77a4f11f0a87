"""What a log, an info page or a launch line says about the server: engine, version, arguments, backends as named."""

import functools
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.engines.reading import load_json
from labkit.engines.tables import formats
from labkit.errors import InputError

_ARGUMENT = re.compile(
    r"""(?:['"]?(\w++)['"]?\s*[=:]\s*)?(?:(\w*+[({\[<])|([)}\]>])|('[^']*'|"[^"]*"|[\w.+/-]++))""", re.ASCII
)
_ARGUMENT_LINES = {"server_args=": "sglang", "non-default args:": "vllm", "with config:": "vllm"}
_GPU = re.compile(
    r"NVIDIA ([A-Z]{1,4}\d{2,4}[\w-]*(?: (?:\d+GB|PCIe|NVL|HBM\w+|SXM\w*))*)|(RTX [\w ]{4,40}?)(?=[,;)]|$)"
)
# Arguments that say nothing about cost may hold secrets and are not kept.
_KEPT = re.compile(
    r"attention|speculative|spec_|num_spec|method|backend|page_size|block_size|kv_cache_dtype|^dtype|cuda_?graph|enforce_eager"
    r"|tp_size|tensor_parallel|^port$|max_running|max_num_seqs|context_length|max_model_len|quantization|synthetic|rejection|(?i:simulate_acc|force_num_accepted)|VLLM_ATTENTION"
)
_SETTING = re.compile(
    r"method|model|num_speculative_tokens|parallel_drafting|quantization|kv_cache_dtype|disable_padded_drafter_batch"
    r"|(?:prompt_lookup|suffix|synthetic|draft|rejection|attention|moe)_\w+"
)
_IMPOSED = re.compile("synth|(?i:simulate_acc_len|force_num_accepted)")
_PROGRAMS = {"sglang": "sglang", "vllm": "vllm", "llama-": "llamacpp", "trtllm": "trtllm"}
_MODULES = {("-m", "sglan"), ("-m", "vllm.")}  # the program, where an image before it has the same name
_ENVIRONMENT = re.compile(r"([A-Z][A-Z0-9_]+)=(.*)")


@dataclass
class Server:
    """Collected facts: ``named`` backends by role as printed, ``args`` as text; ``changes`` counts what was learnt."""

    engine: str = ""
    version: str | None = None
    model: str | None = None
    gpu: str | None = None
    args: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # vLLM's speculative_config, to print it again
    changes: int = 0
    served: bool = False  # a figure was printed since the launch
    past: list["Server"] = field(default_factory=list)  # those before a restart in the same log

    def restart(self) -> None:
        """Another launch begins: what the one before was told no longer holds, but for GPU and version."""
        self.past.append(replace(self, past=[]))
        self.engine, self.model, self.served, self.changes = "", None, False, self.changes + 1
        self.args, self.named, self.settings = {}, {}, {}

    def take_line(self, text: str) -> bool:
        """Look at one log line; whether it told something."""
        if ("NVIDIA " in text or "RTX " in text) and (gpu := _GPU.search(text)):
            self.gpu = (gpu[1] or gpu[2]).strip()
        for mark, engine in _ARGUMENT_LINES.items():
            if mark in text:
                self.engine = engine
                self.take_args(arguments(text.partition(mark)[2]))
        for item in formats("server"):
            if item.has in text and (match := item.pattern.search(text)):
                self.engine, self.changes = item.engine, self.changes + 1
                for name, value in match.groupdict().items():
                    if name == "version":
                        self.version = value
                    else:  # vLLM prints a second automatic pick only when it differs: the drafter's
                        second = item.engine == "vllm" and self.named.get(name, value) != value
                        shown = value.replace(" ", "_").upper() if " " in value else value
                        self.named["draft" if second else name] = shown
                return True
        return False

    def take_args(self, args: Mapping[str, Any]) -> None:
        """Keep the arguments that bear on cost; texts "None" and "" count as unset."""
        self.changes += 1
        for name, value in args.items():
            text = str(value).strip("'\"")
            if isinstance(value, dict):  # the drafter's backend and model are not the target's
                own = ("model", "backend", "attention_backend", "quantization", "kv_cache_dtype", "max_model_len")
                if name == "speculative_config":
                    self._take_settings(value)
                self.take_args({f"{name}.{inner}" if inner in own else inner: text for inner, text in value.items()})
            elif isinstance(value, list) and name == "cudagraph_capture_sizes":
                self.args[name] = " ".join(map(str, value[:1000]))
            elif text in ("None", "", "null") or isinstance(value, list):
                continue
            elif name in ("model_path", "model"):
                self.model = self.model or text
            elif name == "version":
                self.version = text[:60]
            elif _KEPT.search(name):
                self.args[name] = text[:200]

    def _take_settings(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            key = "num_speculative_tokens" if name == "num_spec_tokens" else name
            text = value.strip("'\"") if isinstance(value, str) else value
            if _SETTING.fullmatch(key) and text not in ("None", None) and not isinstance(value, dict):
                plain = isinstance(text, str) and text == value  # not quoted: a number or a truth value, if it is one
                known = load_json(text.lower()) if plain else None
                self.settings[key] = text if known is None else known

    def take_drafts(self, sizes: Counter[int]) -> None:
        """Drafts per step as the windows tell them, where no argument does; what a launch line lacks is in capitals."""
        rows, others = "speculative_num_draft_tokens", {"speculative_num_steps", "spec_tokens", "spec_draft_n_max"}
        if not sizes or {rows, "num_speculative_tokens", "num_spec_tokens", *others} & self.args.keys():
            return
        ((k, _),) = sizes.most_common(1)
        if self.engine == "sglang":
            self.args = {"speculative_algorithm": "ALGORITHM"} | self.args | {rows: str(k + 1)}
        elif self.engine == "llamacpp":
            self.args = {"spec_type": self.named.get("drafter", "TYPE")} | self.args | {"spec_draft_n_max": str(k)}
        elif self.engine == "vllm":
            self.settings |= {"num_speculative_tokens": k}

    def number(self, *names: str) -> int | None:
        """The first of these arguments that is a whole number."""
        return next((int(self.args[name]) for name in names if self.args.get(name, "").isdecimal()), None)

    @property
    def imposed(self) -> bool:
        """Whether the server was told which acceptance to have."""
        switches = [text for name, text in self.args.items() if _IMPOSED.search(name)]
        given = any(not re.fullmatch(r"-.*|[0.]+", text) for text in switches)  # off at 0 and below
        return given or self.args.get("rejection_sample_method") == "synthetic"


def is_setting(name: str) -> bool:
    """Whether it is a speculative setting of vLLM that is kept."""
    return name == "num_spec_tokens" or _SETTING.fullmatch(name) is not None


@functools.cache
def server_marks() -> tuple[str, ...]:
    """Texts, one of which every line holds that `Server.take_line` understands."""
    return ("NVIDIA ", "RTX ", *_ARGUMENT_LINES, *(item.has for item in formats("server")))


def begins_server(text: str) -> bool:
    """Whether a server prints this line only while it starts."""
    starts = (item.pattern.search(text) for item in formats("server") if item.has in text)
    return any(mark in text for mark in _ARGUMENT_LINES) or any(starts)


def arguments(text: str) -> dict[str, Any]:
    """Arguments of a printed object or dict; those of a named inner one in a dict of its own."""
    found: dict[str, Any] = {}
    open_groups = [found]
    for name, opened, closed, value in _ARGUMENT.findall(text):
        if opened:
            open_groups.append(open_groups[-1].setdefault(name, {}) if name else open_groups[-1])
            if not isinstance(open_groups[-1], dict):  # the name came before with a plain value
                open_groups[-1] = {}
        elif closed and len(open_groups) > 1:
            open_groups.pop()
        elif name and value:
            open_groups[-1][name] = value
    return found


def parse_launch(line: str, version: str | None) -> tuple[Server, list[str]]:
    """Engine and arguments of a launch line, and the flags and environment variables that it sets.

    Raises InputError: not a launch line of SGLang, vLLM, llama.cpp or TensorRT-LLM, an open quote, or broken JSON.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"launch: wanted a shell command, got {error}") from error
    module = next((i + 1 for i, word in enumerate(words[:-1]) if (word, words[i + 1][:5]) in _MODULES), 0)
    places = ((name, i) for mark, name in _PROGRAMS.items() for i, word in enumerate(words) if mark in word)
    engine, program = next(places, ("", 0))
    if not engine:
        raise InputError(f"launch: wanted a command of {', '.join(_PROGRAMS.values())}, got {line[:60]!r}")
    program = max(program, module)
    values: dict[str, Any] = {match[1]: match[2] for word in words if (match := _ENVIRONMENT.fullmatch(word))}
    flags = list(values)
    for i, (word, after) in enumerate(itertools.pairwise([*words[program:], ""]), start=program):
        if word.startswith("--") or re.fullmatch(r"-[a-z]{1,4}|-O", word):
            name, mark, value = word.partition("=")
            head, dot, inner = name.partition(".")
            if engine == "vllm" and head.startswith("--"):  # its parser takes either form
                head = f"--{head.strip('-').replace('_', '-')}"
            flags.append(f"{head}{dot}{inner}")
            text = value if mark else ("true" if after.startswith("--") or not after else after)
            several = itertools.takewhile(str.isdecimal, words[i + 1 :]) if not mark else ()
            text = " ".join(several) or text  # graph sizes
            key = "compilation_config" if head == "-O" else head.strip("-").replace("-", "_")
            if dot:
                known = load_json(text)
                nested = values.get(key)
                values[key] = (nested if isinstance(nested, dict) else {}) | {inner: text if known is None else known}
                continue
            try:
                values[key] = json.loads(text) if key.endswith("_config") and text.startswith(("{", "[")) else text
            except (ValueError, RecursionError) as error:
                raise InputError(f"launch: {name}: wanted JSON, got {error}") from error
            if key == "speculative_config" and not isinstance(values[key], dict):
                raise InputError(f"launch: {name}: wanted a JSON object, got {value if mark else after!r}")
    flags += [f"speculative_config.{name}" for name in values.get("speculative_config", ())]
    if after := next((words[i + 1] for i, word in enumerate(words[:-1]) if i >= program and word[-5:] == "serve"), ""):
        values |= {} if "model" in values or after.startswith("-") else {"model": after}
    server = Server(engine=engine, version=version)
    server.take_args(values)
    return server, flags
