"""What the experiments share: grids from presets and axes, models kept in the worker, checks before timing."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import workloads
from labkit.errors import InputError
from labkit.experiments.places import by_name
from labkit.paths import RUNS
from labkit.provenance import code_digest
from labkit.shapes import MAX_Q_LEN, ModelShape, model_shape
from labkit.sweep import RunResult, run_sweep

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder
    from labkit.models.tokenizer import Tokenizer

Axes = dict[str, list[Any]]
MAX_RANDOM_CONTEXT = 1 << 18
_FROM_ZERO = (
    *("seed", "temperature", "top_p", "context_len", "num_speculative_tokens"),
    *("window", "shared_prefix_len", "energy_s", "max_interval_percent"),
)
MAX_CELLS = 1_000_000
NO_GRAPHS = "launch_mode graph needs a CUDA device"
# When a cell is measured again (`labkit.quality.Limits`).
REPEATS: Axes = {"max_repeats": [4], "max_interval_percent": [2.0]}


def axes_of(presets: Mapping[str, Axes], preset: str, given: Mapping[str, Sequence[Any]]) -> Axes:
    """A preset's axes with the given ones in their place.

    Raises InputError: unknown preset or axis, an empty axis, or a number below the axis's smallest meaning.
    """
    if preset not in presets:
        raise InputError(f"preset {preset!r}: no such preset; the presets are {', '.join(presets)}")
    axes = {name: list(values) for name, values in presets[preset].items()}
    for name, values in given.items():
        if name not in axes:
            raise InputError(f"axis {name!r}: no such axis; the axes are {', '.join(sorted(axes))}")
        axes[name] = list(values)
    for name, values in axes.items():
        if not values:
            raise InputError(f"axis {name}: wanted at least one value, got none")
        if len(set(values)) < len(values):
            raise InputError(f"axis {name}: a value stands twice in {values}")
        smallest = 0 if name in _FROM_ZERO else 1
        if bad := [value for value in values if isinstance(value, int | float) and not smallest <= value < math.inf]:
            raise InputError(f"axis {name}: wanted {smallest} or more, got {bad[0]}")
    if (num_cells := math.prod(map(len, axes.values()))) > MAX_CELLS:
        raise InputError(f"grid: wanted at most {MAX_CELLS} combinations of the axes, got {num_cells}")
    return axes


def grids(
    presets: Mapping[str, Axes], more: Mapping[str, list[Axes]], preset: str, given: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Axes]]:
    """The grids of a preset, its own and then the changed ones in ``more``, each with a mark for its groups' names."""
    yield "", axes_of(presets, preset, given)
    for index, changes in enumerate(more.get(preset, []), start=1):
        yield f"{index}:", axes_of({preset: presets[preset] | changes}, preset, given)


def check_names(axis: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raise InputError for a value that is not among the known ones."""
    for value in values:
        if value not in known:
            raise InputError(f"{axis} {value!r}: no such name; the known ones are {', '.join(known)}")


def check_backends(axis: str, values: Sequence[str]) -> None:
    """Raise InputError for an attention backend that is not registered."""
    from labkit.attention.api import available_backends

    check_names(axis, values, list(available_backends()))


def check_lengths(axes: Axes) -> None:
    """Raise InputError for a query length that no mask holds, or an empty context."""
    if bad := [q_len for q_len in axes["q_len"] if q_len > MAX_Q_LEN]:
        raise InputError(f"q_len: wanted 1 to {MAX_Q_LEN}, got {bad[0]}")
    if 0 in axes["context_len"]:
        raise InputError("context_len: wanted 1 or more, got 0")


def check_draft_lengths(axes: Axes) -> None:
    """Raise InputError for a k outside 1..16."""
    if bad := [k for k in axes["num_speculative_tokens"] if not 1 <= k <= 16]:
        raise InputError(f"num_speculative_tokens: wanted 1 to 16, got {bad[0]}")


def check_workloads(names: Sequence[str]) -> None:
    """Raise InputError for a workload that is neither a known one nor a file of prompts, or two files of one name."""
    files = [name for name in names if name.endswith(".jsonl")]
    for name in names:
        if name not in workloads.WORKLOADS and not (name in files and os.path.isfile(name)):
            what = "file" if name in files or os.sep in name else "name"
            wanted = f"one of {', '.join(workloads.WORKLOADS)} or a .jsonl file of prompts"
            raise InputError(f"workload {name!r}: no such {what}; wanted {wanted}")
    if len({Path(file).stem for file in files}) < len(files):  # they are told apart by it inside a run
        raise InputError(f"axis workload: wanted files of different names, got {', '.join(files)}")


def check_drafters(axes: Axes) -> None:
    """Raise InputError for a drafter that is none, or has no head for the target."""
    from labkit.drafting.named import drafter_folder

    for name in axes["drafter"]:
        drafter_folder(name, str(sole(axes, "target")))


def sole(axes: Axes, name: str) -> Any:
    """The value of an axis that may hold only one."""
    if len(axes[name]) != 1:
        raise InputError(f"axis {name}: wanted one value a run, got {axes[name]}")
    return axes[name][0]


def prompts_of(axes: Axes, *, asked: bool) -> dict[str, list[workloads.Prompt]]:
    """Workload -> its first ``num_prompts`` prompts, all where it has fewer.

    Raises InputError: each has fewer, and the number was ``asked`` for (it is not the preset's).
    """
    num_prompts = sole(axes, "num_prompts")
    prompts = {name: workloads.load_prompts(name, limit=num_prompts) for name in axes["workload"]}
    if asked and num_prompts > (most := max(map(len, prompts.values()))):
        raise InputError(f"axis num_prompts: {', '.join(prompts)}: at most {most} prompts; got {num_prompts}")
    return prompts


def is_random(target: str) -> bool:
    """Whether the target is a shape with seeded random weights, which have no tokenizer."""
    return target.startswith("random:")


def target_shape(target: str) -> ModelShape:
    """Shape of a target, by name or from its folder. Random weights take any context up to 256K, whatever the model's.

    Raises InputError: no such model, or a folder whose configuration, weights (their headers) or tokenizer do not fit.
    """
    if is_random(target):
        shape = model_shape(target.removeprefix("random:"))
        return replace(shape, max_context_len=max(shape.max_context_len, MAX_RANDOM_CONTEXT + MAX_Q_LEN))
    if target == "smollm2-135m":
        return model_shape(target)
    from labkit.models.tokenizer import load_tokenizer
    from labkit.models.weights import check_model

    shape = check_model(target)
    load_tokenizer(target)
    return shape


def check_model_axes(axes: Axes, *, text: bool, num_new_tokens: int) -> None:
    """Raise InputError for a target that cannot run or holds no such context, or a dtype that no weights have.

    text : whether the run must read and write text.
    num_new_tokens : what a run adds to its context.
    """
    from labkit.models.weights import DTYPES

    check_names("weight_dtype", axes["weight_dtype"], DTYPES)
    target = sole(axes, "target")
    if text and is_random(target):
        raise InputError(f"target {target}: random weights have no tokenizer; wanted smollm2-135m or a model folder")
    most = target_shape(target).max_context_len - num_new_tokens
    if bad := [context_len for context_len in axes["context_len"] if context_len > most]:
        room = f"{target} holds {most + num_new_tokens} tokens, {num_new_tokens} of them new ones"
        raise InputError(f"axis context_len: {room}; wanted at most {most}, got {bad[0]}")


def _check_prompts(points: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for a context that is too short for each of its prompts."""
    from labkit.models.tokenizer import load_tokenizer

    encode = load_tokenizer(points[0]["target"]).encode_chat
    for workload in sorted({point["workload"] for point in points}):
        here = [point for point in points if point["workload"] == workload]
        ids, shortest = {point["prompt_id"] for point in here}, min(point["context_len"] or math.inf for point in here)
        prompts = [prompt for prompt in workloads.load_prompts(workload) if prompt.id in ids]
        least = min(len(encode(list(prompt.messages))) for prompt in prompts)
        if shortest < least:
            raise InputError(f"axis context_len: the shortest {workload} prompt has {least} tokens, got {shortest}")


@lru_cache(maxsize=2)
def decoder(name: str, dtype: str, device: str) -> Decoder:
    """The model of a point; the worker keeps it from point to point."""
    from labkit.models.weights import load_model

    return load_model(target_shape(name) if is_random(name) else name, dtype=dtype, device=device)


@lru_cache(maxsize=2)
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer that goes with `decoder`."""
    from labkit.models.tokenizer import load_tokenizer

    return load_tokenizer(name)


def device() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def auto_preset() -> str:
    """``gpu`` on a CUDA machine, else ``cpu``."""
    return "gpu" if device() == "cuda" else "cpu"


# Modules whose code decides what a number means: an edit starts a new run instead of mixing with the old.
_MEASURING = (
    *("accept.py", "speculation.py", "timing.py", "quality.py", "device_state.py", "kv_cache.py", "models", "drafting"),
    *("workloads.py", "filler.py"),
)


def sweep(
    experiment: str,
    points: list[dict[str, Any]],
    *,
    out_dir: Path | None,
    backend_file: Path | None = None,
    **options: Any,
) -> RunResult:
    """`run_sweep` of an experiment of this package into ``out_dir`` (``data/runs`` when None), device calibrated first.

    A target that is a folder is stored as `labkit.models.identity.model_identity` calls it.

    backend_file : registers attention backends, here and in the worker.
    """
    target = points[0].get("target")
    if target and not is_random(target) and "workload" in points[0]:
        _check_prompts(points)
    points, local = by_name(points, drafters=experiment != "step")
    own_files = [f"experiments/{file.name}" for file in sorted(Path(__file__).parent.glob(f"{experiment}*.py"))]
    if backend_file:
        local["backend_file"] = str(backend_file.resolve())
    return run_sweep(
        points,
        f"labkit.experiments.{experiment}:measure",
        experiment=experiment,
        local=local,
        out_dir=out_dir or RUNS,
        device=device(),
        calibrate=True,
        reuse=experiment == "attention",  # the other experiments' arms are only worth something interleaved
        backend_digest=_backend_digest,
        code_digest=code_digest([*_MEASURING, *own_files]),
        **options,
    )


def runner(experiment: str, points: Callable[..., list[dict[str, Any]]]) -> Callable[..., RunResult]:
    """The function ``run`` of an experiment."""

    def run(
        preset: str = "cpu", *, out_dir: Path | None = None, options: Mapping[str, Any] = {}, **axes: Sequence[Any]
    ) -> RunResult:
        """Measure a preset with some axes replaced. ``options`` go to `run_sweep` (resume, budget, ...)."""
        return sweep(experiment, points(preset, **axes), out_dir=out_dir, **options)

    return run


def load_backends(point: Mapping[str, Any]) -> None:
    """Register the user's backends in the worker."""
    if file := point.get("backend_file"):
        from labkit.attention.api import load_backend_file

        load_backend_file(file)


def _backend_digest(point: Mapping[str, Any]) -> str:
    from labkit.attention.api import backend_digest

    names = [point[role] for role in ("backend", "verify_backend", "decode_backend") if point.get(role)]
    return "+".join(backend_digest(name) for name in names)
