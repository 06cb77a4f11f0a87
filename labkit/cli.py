"""The command line: arguments in, one call each, text or JSON out. Exit 0 ok, 1 a finding, 2 bad input."""

import argparse
import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit import __version__
from labkit.errors import BackendUnavailable, InputError, Unsupported

FINDING, BAD_INPUT, INTERRUPTED = 1, 2, 130
EXPERIMENTS = ("attention", "step", "acceptance", "loop")


class _Parser(argparse.ArgumentParser):
    names: str | None = None  # ``module:function`` of what only --help tells: it loads what other commands do not need

    def format_help(self) -> str:
        """The usual text, with what ``names`` tells at its end."""
        if self.names:
            module, _, function = self.names.partition(":")
            self.epilog = getattr(importlib.import_module(f"labkit.{module}"), function)()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """One line and exit 2, instead of the usage text."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    module, _, function = arguments.command.partition(":")
    try:
        found = getattr(importlib.import_module(f"labkit.{module}"), function)(arguments)
        if not isinstance(found, tuple):
            sys.stdout.flush()  # a full disk shows here, not at the exit of the interpreter
            return int(found or 0)
        content, text, code = found
        print(json.dumps(content, indent=2, allow_nan=False, default=str) if arguments.json else text)
        sys.stdout.flush()
        return int(code)
    except (InputError, Unsupported, BackendUnavailable, FileNotFoundError, PermissionError) as error:
        told = _one_line(error).removeprefix(f"{arguments.name}: ")
        print(f"labkit {arguments.name}: {told}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"labkit {arguments.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"labkit {arguments.name}: output: {error.strerror}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 what is left in the old one can go nowhere
        return BAD_INPUT


def _one_line(error: Exception) -> str:
    from labkit.provenance import redact

    if isinstance(error, OSError) and error.filename:
        return redact(f"{error.filename}: {error.strerror}")
    return redact(" ".join(str(error).split()))


_Add = Callable[[str, str, str], _Parser]


def _build_parser() -> _Parser:
    parser = _Parser(prog="labkit", description="Does speculative decoding pay here, and why?")
    parser.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="name")

    def add(name: str, command: str, text: str) -> _Parser:
        """``module:function`` takes the arguments; it returns an exit code, or (JSON content, text, exit code)."""
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    _add_measuring(add)
    _add_reading(add)
    _add_publishing(add)
    return parser


def _add_measuring(add: _Add) -> None:
    doctor = add("doctor", "doctor:run_from_arguments", "device, versions, and each backend: usable or why not")
    doctor.add_argument(
        "--calibrate", action="store_true", help="measure read bandwidth, matrix rate and noise (seconds)"
    )
    _json_flag(doctor)

    run = add("run", "experiments.launch:run_from_arguments", "measure a grid; resumes where an equal run stopped")
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.names = "experiments.launch:presets_text"
    run.add_argument("--preset", default="auto", help="auto: gpu where there is one, else cpu; the others stand below")
    _set_option(run)
    run.add_argument("--model", metavar="DIR|NAME", help="target: a preset name or a folder of safetensors")
    run.add_argument("--draft-model", metavar="DIR", help="drafter: a folder with an EAGLE-3, MTP or DFlash head")
    run.add_argument("--backend-file", type=Path, metavar="F.py", help="a file that registers an attention backend")
    run.add_argument("--out", type=Path, metavar="DIR", help="where runs are stored (default data/runs)")
    run.add_argument("--no-resume", action="store_true", help="measure everything anew")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--budget", metavar="TIME", help="stop before this is spent, e.g. 20m; the rest can be resumed")
    run.add_argument("--timeout", metavar="TIME", default="10m", help="per point (default 10m)")
    run.add_argument("--executor", choices=("local", "dask"), default="local", help="dask: one worker per visible GPU")
    run.add_argument("--scheduler", metavar="ADDRESS|FILE", help="of a running Dask cluster (docs/scale-out.md)")
    run.add_argument("--dry-run", action="store_true", help="cells, minutes and memory, without measuring")
    _json_flag(run)

    trial = add(
        "try",
        "experiments.trial:run_from_arguments",
        "one attention backend in under 30 s: right? how fast, against the floor and another?",
    )
    trial.add_argument("backend", metavar="BACKEND")
    trial.add_argument("--against", metavar="B", help="time this backend in the same rounds")
    trial.add_argument("--backend-file", type=Path, metavar="F.py", help="a file that registers an attention backend")
    _set_option(trial)
    trial.add_argument("--full", action="store_true", help="the full correctness matrix (minutes), with progress")
    _json_flag(trial)

    replay = add(
        "replay",
        "replay.command:run_from_arguments",
        "identical requests to live engines, interleaved; arms side by side",
    )
    replay.add_argument("--base-url", nargs="+", default=[], metavar="URL", help="OpenAI-compatible servers")
    replay.add_argument(
        "--scene", nargs="+", default=[], metavar="NAME|FILE", help="see data/reference/replay_scenes.csv"
    )
    replay.add_argument("--repeats", type=int, default=5)
    replay.add_argument("--out", type=Path, metavar="DIR", help="where runs are stored (default data/runs)")
    replay.add_argument("--launch", nargs="+", default=[], metavar="LINE", help="launch line of each server")
    replay.add_argument("--model", metavar="NAME", help="model name to ask for (default: the one all servers serve)")
    replay.add_argument("--extra", default="{}", metavar="JSON", help="further fields of every request")
    replay.add_argument("--gpu", metavar="NAME", help="device of the servers, where it is not this machine's")
    replay.add_argument("--timeout", metavar="TIME", default="10m", help="per attempt (default 10m)")
    replay.add_argument("--seed", type=int, default=0)
    replay.add_argument("--varying", metavar="FIELD", help="the one setting in which the servers are meant to differ")
    replay.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="further differences to accept")
    replay.add_argument("--dry-run", action="store_true", help="how many requests of which length, without sending")
    replay.add_argument("--rows", nargs="+", type=Path, metavar="PATH", help="only report on stored runs")
    _json_flag(replay)


def _add_reading(add: _Add) -> None:
    check = add("check", "unmeasured:check_command", "validate stored runs")
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    _json_flag(check)

    breakeven = add(
        "breakeven", "decide.verdict:run_from_arguments", "does it pay: cost and acceptance joined, with an interval"
    )
    breakeven.add_argument("--cost", nargs="+", type=Path, metavar="PATH", required=True, help="loop or step runs")
    lengths = breakeven.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--acceptance", nargs="+", type=Path, metavar="PATH", help="acceptance runs")
    _judging_options(breakeven, lengths)
    breakeven.add_argument("--all", action="store_true", help="print every cell, also of more than 40")
    breakeven.add_argument("--out", type=Path, metavar="F", help="also write the table: .tex, .html, .csv or .parquet")
    _json_flag(breakeven)

    best_k = add(
        "best-k",
        "decide.recommend:run_from_arguments",
        "how many tokens to draft, 0 included, per context and batch, and one for all",
    )
    best_k.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="loop or step runs, and acceptance runs")
    _judging_options(best_k, best_k)
    best_k.add_argument("--emit", metavar="ENGINE", help="print the flags of sglang, vllm or trtllm instead")
    _json_flag(best_k)

    capacity = add(
        "capacity",
        "decide.capacity:run_from_arguments",
        "what fits on a GPU: context, batch, cells of a planned grid, the drafter's price",
    )
    capacity.add_argument("--model", required=True, metavar="NAME|DIR")
    capacity.add_argument("--draft-model", metavar="NAME|DIR")
    capacity.add_argument("--gpu", required=True, metavar="NAME", help="a row of data/reference/gpu_peaks.csv")
    _set_option(capacity, "context_len, batch_size, k, num_gpus, memory_share, weight_dtype, kv_dtype, ..")
    _json_flag(capacity)

    compare = add(
        "compare",
        "decide.compare:run_from_arguments",
        "two runs: every difference named, and the ratio if only one was asked for",
    )
    compare.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    compare.add_argument("--varying", metavar="FIELD", help="the one difference that is meant")
    compare.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="further differences to accept")
    _json_flag(compare)

    importer = add(
        "import", "engines.commands:run_import", "read logs, metrics pages, load-test results and traces of engines"
    )
    diagnoser = add("diagnose", "engines.commands:run_diagnose", "acceptance or verify cost? which role, which flag")
    importer.add_argument(
        "files", nargs="+", metavar="FILE", help="logs, metrics pages, result files, traces; - is stdin"
    )
    importer.add_argument("--engine", default="auto", help="auto, sglang, vllm, llamacpp, trtllm, or a load tool")
    importer.add_argument(
        "--out", type=Path, metavar="DIR", help="also write DIR/import.parquet, of traces DIR/steps.parquet"
    )
    _json_flag(importer)
    diagnoser.add_argument(
        "file", nargs="?", metavar="LOG|TRACE|RUN", help="a server's log, a trace, attention runs; - is stdin"
    )
    diagnoser.add_argument("--base-url", metavar="URL", help="also read the running server's info and metrics pages")
    diagnoser.add_argument("--launch", metavar="LINE", action="append", help="check a launch line instead of a log")
    diagnoser.add_argument("--recipe", metavar="NAME", help="print (never run) all-reject, k-sweep or backend-ab")
    for name in ("gpu", "model", "kv-dtype", "engine-version"):
        diagnoser.add_argument(f"--{name}", help="where the log or launch line does not tell it")
    _json_flag(diagnoser)


def _add_publishing(add: _Add) -> None:
    add("tour", "publish.tour:run_tour", "headline figure and table from the committed data, without torch")

    batch = add(
        "batch", "publish.tour:run_batch_command", "run the notebooks unattended: executed copies, HTML, figures"
    )
    batch.add_argument("--preset", default="committed", help="committed, cpu, gpu, ci or auto (gpu where there is one)")
    batch.add_argument("--out", type=Path, default=Path("build/batch"), metavar="DIR")
    batch.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="names or numbers (default: all)")
    _json_flag(batch)

    demo = add(
        "demo", "publish.tour:run_demo", "measure on this machine: the notebooks in batch, figures, break-even table"
    )
    demo.add_argument("--preset", default="auto", help="cpu, gpu, ci or auto")
    demo.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")

    figure = add(
        "figure",
        "publish.named_figures:run_from_arguments",
        "one figure of any runs: breakeven, speedup, attention, over_floor, ladder, acceptance, step; "
        "of several settings the fullest, at temperature 0, where --where names none (the subtitle says which)",
    )
    figure.add_argument("figure", metavar="NAME", help="which figure")
    figure.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs or folders (default: data/runs)")
    figure.add_argument("--out", type=Path, required=True, metavar="F", help=".svg, .pdf, .png; .html: a page to send")
    figure.add_argument("--width", default="text", help="column (3.4 in), text (7 in) or inches")
    figure.add_argument("--label", nargs="+", action="extend", default=[], metavar="NAME=TEXT", help="display names")
    figure.add_argument("--where", nargs="+", action="extend", default=[], metavar="COLUMN=V,..", help="rows to draw")
    figure.add_argument("--acceptance-length", metavar="X[,LOW,HIGH]", help="imposed, instead of stored acceptance")

    figures = add("figures", "publish.tour:run_figures", "draw the committed figures from the committed data")
    figures.add_argument("--stale", action="store_true", help="only list figures whose data or code changed")

    bundle = add(
        "bundle", "publish.bundle:run_bundle", "a zip with rows, requests, versions and the claim that they carry"
    )
    bundle.add_argument("names", nargs="+", metavar="RUN|FIGURE", help="run files, folders of runs, or figures by name")
    bundle.add_argument("--out", type=Path, required=True, metavar="B.zip")
    bundle.add_argument("--anonymous", action="store_true", help="without commits, times, commands and launch lines")
    reproduce = add("reproduce", "publish.bundle:run_reproduce", "compare a bundle's claims with rows of your own")
    reproduce.add_argument("bundle", type=Path, metavar="B.zip")
    reproduce.add_argument("--rows", nargs="+", type=Path, default=[], metavar="PATH", help="your runs")


def _judging_options(parser: argparse.ArgumentParser, lengths: Any) -> None:
    """What `labkit.decide.verdict.judging_options` reads; ``lengths``: the group of the imposed length."""
    lengths.add_argument("--acceptance-length", metavar="X[,LOW,HIGH]", help="imposed mean acceptance length")
    parser.add_argument("--acceptance-from", metavar="MODEL", help="borrow another target's acceptance")
    parser.add_argument("--baseline", default="fastest", help="fastest, same, or a decode backend")
    parser.add_argument("--where", nargs="+", default=[], metavar="COLUMN=V,..", help="keep these cells only")


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _set_option(parser: argparse.ArgumentParser, text: str = "replace an axis") -> None:
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="AXIS=V,..", dest="assignments", help=text
    )
