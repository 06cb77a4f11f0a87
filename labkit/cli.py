"""The command line: arguments in, one call each, text or JSON out. Exit 0 ok, 1 a finding, 2 bad input."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit import __version__
from labkit.errors import BackendUnavailable, InputError, Unsupported

FINDING, BAD_INPUT, INTERRUPTED = 1, 2, 130
EXPERIMENTS = ("attention", "step", "acceptance", "loop")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit 2, instead of the usage text."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except (InputError, Unsupported, BackendUnavailable, FileNotFoundError, PermissionError) as error:
        print(f"labkit {arguments.name}: {_one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"labkit {arguments.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0


def _one_line(error: Exception) -> str:
    from labkit.provenance import redact

    if isinstance(error, OSError) and error.filename:
        return redact(f"{error.filename}: {error.strerror}")
    return redact(" ".join(str(error).split()))


_Add = Callable[[str, Callable[[argparse.Namespace], int | None], str], argparse.ArgumentParser]


def _build_parser() -> _Parser:
    parser = _Parser(prog="labkit", description="Does speculative decoding pay here, and why?")
    parser.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="name")

    def add(name: str, command: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    _add_measuring(add)
    _add_reading(add)
    _add_publishing(add)
    return parser


def _add_measuring(add: _Add) -> None:
    doctor = add("doctor", _doctor, "device, versions, and each backend: usable or why not")
    doctor.add_argument(
        "--calibrate", action="store_true", help="measure read bandwidth, matrix rate and noise (seconds)"
    )
    _json_flag(doctor)

    run = add("run", _run, "measure a grid; resumes where an equal run stopped")
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.add_argument(
        "--preset",
        default="auto",
        help="cpu, gpu, ci or auto (gpu where there is one); attention and step also full, step also shared-prefix",
    )
    run.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="AXIS=V,..", dest="assignments", help="replace an axis"
    )
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

    trial = add("try", _try, "one attention backend in under 30 s: right? how fast, against the floor and another?")
    trial.add_argument("backend", metavar="BACKEND")
    trial.add_argument("--against", metavar="B", help="time this backend in the same rounds")
    trial.add_argument("--backend-file", type=Path, metavar="F.py", help="a file that registers an attention backend")
    trial.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="AXIS=V,..", dest="assignments", help="replace an axis"
    )
    trial.add_argument("--full", action="store_true", help="the full correctness matrix (minutes), with progress")
    _json_flag(trial)

    replay = add("replay", _replay, "identical requests to live engines, interleaved; arms side by side")
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
    check = add("check", _check, "validate stored runs")
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    _json_flag(check)

    breakeven = add("breakeven", _breakeven, "does it pay: cost and acceptance joined, with an interval")
    breakeven.add_argument("--cost", nargs="+", type=Path, metavar="PATH", required=True, help="loop or step runs")
    lengths = breakeven.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--acceptance", nargs="+", type=Path, metavar="PATH", help="acceptance runs")
    lengths.add_argument("--acceptance-length", metavar="X[,LOW,HIGH]", help="imposed mean acceptance length")
    breakeven.add_argument("--acceptance-from", metavar="MODEL", help="borrow another target's acceptance")
    breakeven.add_argument("--out", type=Path, metavar="F", help="also write the table: .tex, .html, .csv or .parquet")
    breakeven.add_argument("--baseline", default="fastest", help="fastest, same, or a decode backend")
    _json_flag(breakeven)

    best_k = add("best-k", _best_k, "how many tokens to draft, 0 included, per context and batch, and one for all")
    best_k.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="loop or step runs, and acceptance runs")
    best_k.add_argument("--acceptance-length", metavar="X[,LOW,HIGH]", help="imposed mean acceptance length")
    best_k.add_argument("--acceptance-from", metavar="MODEL", help="borrow another target's acceptance")
    best_k.add_argument("--baseline", default="fastest", help="fastest, same, or a decode backend")
    best_k.add_argument("--where", nargs="+", default=[], metavar="COLUMN=VALUE", help="keep these cells only")
    best_k.add_argument("--emit", metavar="ENGINE", help="print the flags of sglang, vllm or trtllm instead")
    _json_flag(best_k)

    capacity = add(
        "capacity", _capacity, "what fits on a GPU: context, batch, cells of a planned grid, the drafter's price"
    )
    capacity.add_argument("--model", required=True, metavar="NAME|DIR")
    capacity.add_argument("--draft-model", metavar="NAME|DIR")
    capacity.add_argument("--gpu", required=True, metavar="NAME", help="a row of data/reference/gpu_peaks.csv")
    capacity.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="AXIS=V,..", dest="assignments", help="replace an axis"
    )
    _json_flag(capacity)

    compare = add("compare", _compare, "two runs: every difference named, and the ratio if only one was asked for")
    compare.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    compare.add_argument("--varying", metavar="FIELD", help="the one difference that is meant")
    compare.add_argument("--allow", nargs="+", default=[], metavar="FIELD", help="further differences to accept")
    _json_flag(compare)

    importer = add("import", _import, "read logs, metrics pages, load-test results and traces of engines")
    diagnoser = add("diagnose", _diagnose, "acceptance or verify cost? which role, which flag")
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
    diagnoser.add_argument("--launch", metavar="LINE", help="check a launch line instead of a log")
    diagnoser.add_argument("--recipe", metavar="NAME", help="print (never run) all-reject, k-sweep or backend-ab")
    for name in ("gpu", "model", "kv-dtype", "engine-version"):
        diagnoser.add_argument(f"--{name}", help="where the log or launch line does not tell it")
    _json_flag(diagnoser)


def _add_publishing(add: _Add) -> None:
    add("tour", _tour, "headline figure and table from the committed data, without torch")

    batch = add("batch", _batch, "run the notebooks unattended: executed copies, HTML, figures")
    batch.add_argument("--preset", default="committed", help="committed, cpu, gpu or auto")
    batch.add_argument("--out", type=Path, default=Path("build/batch"), metavar="DIR")
    batch.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="names or numbers (default: all)")
    _json_flag(batch)

    demo = add("demo", _demo, "measure on this machine: the notebooks in batch, figures, break-even table")
    demo.add_argument("--preset", default="auto", help="cpu, gpu, ci or auto")
    demo.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")

    figure = add(
        "figure", _figure, "one figure of any runs: breakeven, speedup, attention, over_floor, ladder, acceptance, step"
    )
    figure.add_argument("figure", metavar="NAME", help="which figure")
    figure.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs or folders (default: data/runs)")
    figure.add_argument("--out", type=Path, required=True, metavar="F", help=".svg, .pdf, .png; .html: a page to send")
    figure.add_argument("--width", default="text", help="column (3.4 in), text (7 in) or inches")
    figure.add_argument("--label", nargs="+", action="extend", default=[], metavar="NAME=TEXT", help="display names")
    figure.add_argument("--where", nargs="+", action="extend", default=[], metavar="COLUMN=V,..", help="rows to draw")
    figure.add_argument("--acceptance-length", metavar="X[,LOW,HIGH]", help="imposed, instead of stored acceptance")

    figures = add("figures", _figures, "draw the committed figures from the committed data")
    figures.add_argument("--stale", action="store_true", help="only list figures whose data or code changed")

    bundle = add("bundle", _bundle, "a zip with rows, requests, versions and the claim that they carry")
    bundle.add_argument("names", nargs="+", metavar="RUN|FIGURE", help="run files, folders of runs, or figures by name")
    bundle.add_argument("--out", type=Path, required=True, metavar="B.zip")
    bundle.add_argument("--anonymous", action="store_true", help="without commits, times, commands and launch lines")
    reproduce = add("reproduce", _reproduce, "compare a bundle's claims with rows of your own")
    reproduce.add_argument("bundle", type=Path, metavar="B.zip")
    reproduce.add_argument("--rows", nargs="+", type=Path, default=[], metavar="PATH", help="your runs")


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _show(arguments: argparse.Namespace, content: Any, text: str) -> None:
    print(json.dumps(content, indent=2, allow_nan=False, default=str) if arguments.json else text)


def _doctor(arguments: argparse.Namespace) -> None:
    from labkit import doctor

    report = doctor.report(calibrate=arguments.calibrate)
    _show(arguments, report, doctor.render(report))


def _run(arguments: argparse.Namespace) -> int:
    from labkit.experiments import launch

    return launch.run_from_arguments(arguments)


def _try(arguments: argparse.Namespace) -> int:
    from labkit.experiments import trial

    return trial.run_from_arguments(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from labkit.replay.command import run_from_arguments

    return run_from_arguments(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from labkit.check import check_run

    findings = [finding for path in arguments.paths for finding in check_run(path)]
    text = "\n".join(map(str, findings)) or "no findings"
    _show(arguments, [vars(finding) for finding in findings], text)
    return FINDING if findings else 0


def _breakeven(arguments: argparse.Namespace) -> None:
    from labkit.decide.verdict import render, verdict_from_files

    result = verdict_from_files(
        arguments.cost,
        acceptance_paths=arguments.acceptance,
        acceptance_length=arguments.acceptance_length,
        acceptance_from=arguments.acceptance_from,
        baseline=arguments.baseline,
    )
    print(result.to_json() if arguments.json else render(result))
    if arguments.out:
        from labkit.publish.tables import write_table

        write_table(result, arguments.out)


def _best_k(arguments: argparse.Namespace) -> None:
    from labkit.decide.recommend import recommend

    found = recommend(
        arguments.paths,
        acceptance_length=arguments.acceptance_length,
        acceptance_from=arguments.acceptance_from,
        baseline=arguments.baseline,
        where=arguments.where,
    )
    if arguments.emit:
        print(found.flags(arguments.emit))
    else:
        _show(arguments, found.to_dict(), found.to_text())


def _capacity(arguments: argparse.Namespace) -> None:
    from labkit.decide.capacity import capacity, render

    options = {"draft_model": arguments.draft_model, "assignments": arguments.assignments}
    found = capacity(arguments.model, arguments.gpu, **options)
    _show(arguments, found, render(found))


def _compare(arguments: argparse.Namespace) -> int:
    from labkit.decide.compare import compare_files

    comparison = compare_files(*arguments.runs, varying=arguments.varying, allow=arguments.allow)
    _show(arguments, comparison.to_dict(), comparison.to_text())
    return 0 if comparison.comparable else FINDING


def _import(arguments: argparse.Namespace) -> None:
    from labkit.engines.commands import run_import

    run_import(arguments)


def _diagnose(arguments: argparse.Namespace) -> int:
    from labkit.engines.commands import run_diagnose

    return run_diagnose(arguments)


def _tour(arguments: argparse.Namespace) -> None:
    from labkit.publish.tour import tour

    tour()


def _batch(arguments: argparse.Namespace) -> int:
    from labkit.publish.batch import failed
    from labkit.publish.tour import batch

    verdicts = batch(arguments.notebooks, preset=arguments.preset, out_dir=arguments.out, quiet=arguments.json)
    if arguments.json:
        print(json.dumps([vars(verdict) for verdict in verdicts], indent=2))
    return FINDING if failed(verdicts) else 0


def _demo(arguments: argparse.Namespace) -> int:
    from labkit.publish.tour import demo

    return demo(arguments.out, preset=arguments.preset)


def _figure(arguments: argparse.Namespace) -> None:
    from labkit.publish.named_figures import run_from_arguments

    run_from_arguments(arguments)


def _bundle(arguments: argparse.Namespace) -> None:
    from labkit.publish.bundle import bundle

    print(bundle(arguments.names, arguments.out, anonymous=arguments.anonymous))


def _reproduce(arguments: argparse.Namespace) -> int:
    from labkit.publish.bundle import reproduce

    text, met = reproduce(arguments.bundle, arguments.rows)
    print(text)
    return 0 if met else FINDING


def _figures(arguments: argparse.Namespace) -> int:
    from labkit.publish.tour import committed_figures

    return committed_figures(stale_only=arguments.stale)
