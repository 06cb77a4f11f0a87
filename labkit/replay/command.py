"""`labkit replay`: from typed words to a run and its report."""

import argparse
import json
from typing import Any

from labkit.decide.engine_truth import engine_cells
from labkit.errors import InputError
from labkit.paths import RUNS
from labkit.replay.report import comparisons, render, retention, summary
from labkit.replay.run import Options, replay
from labkit.replay.scenes import Maker, Scene, scene
from labkit.results import load_runs, load_sidecars
from labkit.rows import json_value


def run_from_arguments(arguments: argparse.Namespace) -> int:
    """Replay, or only report on stored rows. 1 where a request failed."""
    paths = arguments.rows
    if not paths:
        if not arguments.base_url or not arguments.scene:
            raise InputError("wanted --base-url and --scene, or --rows")
        scenes = [scene(name) for name in arguments.scene]
        if arguments.dry_run:
            print(*(_plan(found, arguments) for found in scenes), sep="\n")
            return 0
        paths = [replay(arguments.base_url, scenes, out_dir=arguments.out or RUNS, options=_options(arguments))]
    rows, sidecars = load_runs("replay", *paths), load_sidecars("replay", *paths)
    if arguments.json:
        tables = {"summary": summary(rows), "retention": retention(rows)}
        if (rows["record"] == "steps").any():
            tables["engine_steps"] = engine_cells(rows)
        content: dict[str, Any] = {"runs": sorted(sidecars), "comparisons": comparisons(rows)}
        content |= {name: table.to_dict("records") for name, table in tables.items()}
        print(json.dumps(json_value(content), indent=1, allow_nan=False))
    else:
        print(render(rows, sidecars, varying=arguments.varying, allow=arguments.allow), *map(str, paths), sep="\n")
    return 1 if rows["fault"].notna().any() else 0


def _options(arguments: argparse.Namespace) -> Options:
    from labkit.experiments.launch import parse_duration

    try:
        extra = json.loads(arguments.extra)
    except ValueError as error:
        raise InputError(f"extra: wanted a JSON object, got {arguments.extra!r}: {error}") from error
    if not isinstance(extra, dict) or extra.keys() & {"stream", "messages", "stream_options"}:
        raise InputError(f"extra: wanted a JSON object without messages and stream, got {arguments.extra!r}")
    return Options(
        repeats=arguments.repeats,
        timeout_s=parse_duration(arguments.timeout, "--timeout"),
        seed=arguments.seed,
        model=arguments.model,
        extra=extra,
        launches=tuple(arguments.launch),
        gpu=arguments.gpu,
    )


def _plan(found: Scene, arguments: argparse.Namespace) -> str:
    requests = [Maker("?").requests(found, 0, load) for load in found.concurrency]
    count = len(arguments.base_url) * arguments.repeats * sum(map(len, requests))
    tokens = max(len(request.body) for part in requests for request in part) // 4
    return f"{found.name}: {count} requests, prompts to about {tokens} tokens, answers to {found.max_tokens} tokens"
