"""What a step costs in the draft/verify loop: speculative steps and plain decode steps, interleaved.

Kinds of run share the rows. ``acceptance="none"`` is the cost run: the cache is filled to the context length and
every draft length 0..k is timed with all drafts rejected, so the context stays where it is. ``acceptance="forced"``
adds generations in the same rounds that keep none or all of k drafts (`labkit.decide.forcing` compares them).
``acceptance="real"`` generates from prompts, both arms in turn: the speed-up that a user would see. Draft trees are
timed there only, since a draft of imposed length is a chain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cost import attention_shape
from labkit.device_state import monitor
from labkit.drafting.named import num_nodes, split_name
from labkit.errors import InputError, Unsupported
from labkit.experiments import common, places
from labkit.experiments.acceptance import draft_with, prompt_tokens
from labkit.quality import Limits
from labkit.shapes import model_shape

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder
    from labkit.models.target import ModelTarget
    from labkit.speculation import Drafter, Generation

PRESETS: dict[str, common.Axes] = {
    "cpu": {
        "target": ["smollm2-135m"],
        "drafter": ["ngram"],
        "acceptance": ["none"],
        "workload": ["code_editing"],
        "num_prompts": [1],
        "max_new_tokens": [64],
        "context_len": [512, 2048, 6144],
        "batch_size": [1],
        "num_speculative_tokens": [2, 4],
        "verify_backend": ["sdpa", "per_token"],
        "decode_backend": ["sdpa", "per_token"],
        "weight_dtype": ["float32"],
        "launch_mode": ["eager"],
        "num_rounds": [6],
        "steps_per_round": [2],
        "max_repeats": [2],
        "max_interval_percent": [5.0],
        "seed": [0],
    }
}
PRESETS["gpu"] = PRESETS["cpu"] | {
    "num_speculative_tokens": [3, 7],
    "verify_backend": ["triton_split", "triton_nosplit"],
    "decode_backend": ["triton_split", "triton_decode8"],
    "weight_dtype": ["bfloat16"],
    "launch_mode": ["graph"],
    "num_rounds": [16],
    "steps_per_round": [4],
    **common.REPEATS,
}
PRESETS["ci"] = PRESETS["cpu"] | {"context_len": [512], "num_speculative_tokens": [2], "num_rounds": [2]}
PRESETS["ci"]["max_repeats"] = [1]

_ONE_VALUE = (
    *("target", "acceptance", "weight_dtype", "launch_mode", "num_rounds", "steps_per_round", "seed", "num_prompts"),
    *common.REPEATS,
)
_ALIKE = ("num_drafted_tokens", "imposed_acceptance")  # the samples of an arm that one time is made of
# The first step of an arm's turn is not kept on a GPU; on a CPU it takes no longer than the others (each step reads
# all weights, far beyond the caches).
_WARM_UP_STEPS = {"cpu": 0, "cuda": 1}


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Arms of the grid; those that share a ``group`` are interleaved. Short contexts first.

    Raises InputError for an unknown preset, axis, drafter, backend or kind of acceptance, or k outside 1..16.
    """
    grid = common.axes_of(PRESETS, preset, axes)
    common.check_drafters(grid)
    common.check_draft_lengths(grid)
    common.check_names("acceptance", grid["acceptance"], ("none", "forced", "real"))
    trees = [name for name in grid["drafter"] if split_name(name)[1] == "tree"]
    if trees and grid["acceptance"] != ["real"]:
        imposed = f"acceptance={grid['acceptance'][0]} imposes lengths of chains"
        raise InputError(f"drafter {trees[0]}: wanted acceptance=real to time trees; {imposed}")
    common.check_workloads(grid["workload"])
    for role in ("verify_backend", "decode_backend"):
        common.check_backends(role, grid[role])
    if grid["acceptance"] != ["real"] and 0 in grid["context_len"]:
        raise InputError(f"context_len: acceptance={grid['acceptance'][0]} wanted 1 or more, got 0")
    if grid["acceptance"] == ["real"] and grid["batch_size"] != [1]:
        raise InputError(f"batch_size: acceptance=real generates for one request at a time, got {grid['batch_size']}")
    fixed = {name: common.sole(grid, name) for name in _ONE_VALUE if name != "num_prompts"}
    fixed["max_new_tokens"] = common.sole(grid, "max_new_tokens")
    common.check_names("launch_mode", grid["launch_mode"], ("graph", "eager"))
    real = fixed["acceptance"] == "real"
    if real and fixed["max_new_tokens"] < 2:
        raise InputError("axis max_new_tokens: wanted 2 or more (the prefill yields the first), got 1")
    new_tokens = _num_new_tokens(fixed | {"num_speculative_tokens": max(grid["num_speculative_tokens"])})
    common.check_model_axes(grid, text=real, num_new_tokens=new_tokens)
    found = []
    for place in _places(grid):
        group = "/".join(str(value) for value in (place | {"workload": Path(place["workload"]).stem}).values())
        cell = fixed | place | {"group": group}
        found += [cell | {"arm": "plain", "decode_backend": name} for name in grid["decode_backend"]]
        found += [
            cell | {"arm": "speculative", "verify_backend": name, "drafter": drafter, "num_speculative_tokens": k}
            for name in grid["verify_backend"]
            for drafter in grid["drafter"]
            for k in grid["num_speculative_tokens"]
        ]
    return found


def _num_new_tokens(point: dict[str, Any]) -> int:
    """Tokens that a turn adds to the context at most, with the drafts of its last step."""
    if point["acceptance"] == "real":
        return int(point["max_new_tokens"])
    steps, k = point["steps_per_round"] + 2, point.get("num_speculative_tokens", 0)
    return int(steps * (k + 1) if point["acceptance"] == "forced" else steps + k)


def _places(grid: common.Axes) -> Iterator[dict[str, Any]]:
    """Where a group is measured: a context and batch, with the prompt whose text the drafter reads."""
    prompts = common.prompts_of(grid, asked=True)
    for context_len in sorted(grid["context_len"]):
        for batch_size in grid["batch_size"]:
            for workload in grid["workload"]:
                for prompt in prompts[workload]:
                    place = {"context_len": context_len, "batch_size": batch_size, "workload": workload}
                    yield place | {"prompt_id": prompt.id}


run = common.runner("loop", points)


@dataclass
class _Arm:
    """One arm with its drafter, and where its rows go."""

    index: int  # of its point
    point: dict[str, Any]
    drafter: Drafter | None
    imposed: float | None = None  # share of the drafts that a forced generation keeps


def measure(arms: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """All arms of one group, in shuffled order in each round; every step is a row."""
    import random

    common.load_backends(arms[0])
    if arms[0]["launch_mode"] == "graph" and common.device() == "cpu":
        return [Unsupported(common.NO_GRAPHS) for _ in arms]
    rows: list[list[dict[str, Any]]] = [[] for _ in arms]
    errors: dict[int, Exception] = {}
    first, runs = arms[0], list[_Arm]()
    prompt_ids = _prompt_ids(first)
    target = _target(arms, prompt_ids)
    for index, arm in enumerate(arms):
        try:
            _check_attention(arm)
            runs += _runs(index, arm, target)
        except Exception as error:  # handed to the sweep, which stores it as this arm's status
            errors[index] = error
    shuffle = random.Random(first["seed"])
    watch, limits = monitor(common.device()), Limits(first)
    for round_index in chain([-1], limits.rounds(rows, "step_ms", _ALIKE)):  # round -1 warms up and is not kept
        shuffle.shuffle(runs)
        for arm_run in runs:
            found, kept = _rows(arm_run, target, [prompt_ids] * first["batch_size"], round_index), rows[arm_run.index]
            if round_index >= 0:
                more = {"state": watch()}
                kept.extend(row | more | {"sample": sample} for sample, row in enumerate(found, start=len(kept)))
    for kept in rows:
        limits.mark(kept, "step_ms", _ALIKE)
    return [errors.get(index, kept) for index, kept in enumerate(rows)]


def _prompt_ids(point: dict[str, Any]) -> list[int]:
    """The text in front of the drafter. A model of random weights has no tokenizer: seeded tokens stand for a text."""
    import random

    target = point["target"]
    if common.is_random(target):
        draw, vocab_size = random.Random(point["seed"]), model_shape(target.removeprefix("random:")).vocab_size
        return [draw.randrange(vocab_size) for _ in range(point["context_len"])]
    return prompt_tokens(point)[0]


def _runs(index: int, point: dict[str, Any], target: ModelTarget) -> list[_Arm]:
    """The plain arm as it is; the speculative arm once, or at every draft length when acceptance is imposed."""
    from labkit.drafting.forced import ForcedDrafter, fixed_acceptance
    from labkit.models.graph_target import GraphTarget

    real, target.writes_states = point["acceptance"] == "real", _reads_states(point)
    captures_ahead = target.capture if real and isinstance(target, GraphTarget) else lambda *passes, **options: None
    if point["arm"] == "plain":
        captures_ahead(point["decode_backend"], [1])
        return [_Arm(index, point, None)]
    k = point["num_speculative_tokens"]
    if real:
        is_tree = _is_tree(point)
        captures_ahead(point["verify_backend"], [1] if is_tree else range(1, k + 2))
        if is_tree:
            captures_ahead(point["verify_backend"], [num_nodes(point["drafter"], k) + 1], is_tree=True)
        return [_Arm(index, point, draft_with(point, target))]
    wanted: list[tuple[int, int, float | None]] = [(j, 0, None) for j in range(k + 1)]
    wanted += [(k, 0, 0.0), (k, k, 1.0)] if point["acceptance"] == "forced" else []
    return [
        _Arm(index, point, ForcedDrafter(draft_with(point, target), accepted=fixed_acceptance(kept), length=j), rate)
        for j, kept, rate in wanted
    ]


def _is_tree(point: dict[str, Any]) -> bool:
    return point["arm"] == "speculative" and split_name(point["drafter"])[1] == "tree"


def _reads_states(point: dict[str, Any]) -> bool:
    return point["arm"] == "speculative" and places.draft_folder(point, point["drafter"]) is not None


def _decoder(point: dict[str, Any]) -> Decoder:
    return common.decoder(places.model_source(point), point["weight_dtype"], common.device())


def _target(arms: list[dict[str, Any]], prompt_ids: list[int]) -> ModelTarget:
    """The target of one group, with room for the arm that adds most."""
    import torch

    from labkit.models.graph_target import FilledGraphTarget, GraphTarget
    from labkit.models.target import FilledTarget, ModelTarget

    point = arms[0]
    decoder = _decoder(point)
    new_tokens = max(_num_new_tokens(arm) for arm in arms)
    room = min(len(prompt_ids) + new_tokens + 24, decoder.shape.max_context_len)
    options: dict[str, Any] = {"batch_size": point["batch_size"], "max_context_len": room, "verify_backend": "sdpa"}
    options["taps"] = places.taps(point, decoder)
    is_graph = point["launch_mode"] == "graph"
    options |= {"max_q_len": 17} if is_graph else {}
    if point["acceptance"] == "real":
        return (GraphTarget if is_graph else ModelTarget)(decoder, **options)
    generator = torch.Generator(common.device()).manual_seed(point["seed"])
    return (FilledGraphTarget if is_graph else FilledTarget)(decoder, generator=generator, **options)


def _check_attention(point: dict[str, Any]) -> None:
    """The arm's backend against the oracle at the shape that is about to be timed; raises what is wrong."""
    import torch

    from labkit.attention.inputs import WITH_LSE, random_tree, verify_backend
    from labkit.attention.registry import lookup

    shape, device = _decoder(point).shape, common.device()
    speculative = point["arm"] == "speculative"
    checked = attention_shape(
        shape,
        batch_size=point["batch_size"],
        q_len=num_nodes(point["drafter"], point["num_speculative_tokens"]) + 1 if speculative else 1,
        context_len=point["context_len"] or 256,
        weight_dtype=point["weight_dtype"],
    )
    name = point["verify_backend"] if speculative else point["decode_backend"]
    generator, spec = torch.Generator().manual_seed(point["seed"]), WITH_LSE
    if _is_tree(point):
        checked = replace(checked, mask="tree")
        if reason := lookup(name).supports(checked, device):
            raise Unsupported(f"backend {name!r}, draft trees: {reason}")
        spec = replace(spec, tree=random_tree(checked, generator).to(device))
    verify_backend(name, checked, generator=generator, device=device, page_order="sequential", spec=spec)


def _rows(arm: _Arm, target: ModelTarget, prompts: list[list[int]], round_index: int) -> list[dict[str, Any]]:
    """One turn of an arm: a short run of the loop, its steps as rows."""
    from labkit.accept import accept_forced, accept_greedy
    from labkit.drafting.forced import ForcedDrafter
    from labkit.speculation import speculate
    from labkit.timing import EventClock, HostClock

    point, real = arm.point, arm.point["acceptance"] == "real"
    target.writes_states = _reads_states(point)
    target.verify_backend = point.get("verify_backend") or target.verify_backend
    target.decode_backend = point.get("decode_backend") or target.decode_backend
    warm_up = 0 if real else _WARM_UP_STEPS[common.device()]
    num_steps, k = warm_up + point["steps_per_round"], point["num_speculative_tokens"] if arm.drafter else 0
    started = _TimedStart(arm.drafter) if arm.drafter else None
    generations = speculate(
        target,
        started,
        prompts,
        num_speculative_tokens=k,
        # No draft of an imposed run is cut short.
        max_new_tokens=point["max_new_tokens"] if real else 1 + num_steps * (k + 1),
        max_steps=None if real else num_steps,
        accept=accept_forced if isinstance(arm.drafter, ForcedDrafter) else accept_greedy,
        clock=EventClock() if common.device() == "cuda" else HostClock(),
        stop_token_ids=common.tokenizer(places.model_source(point)).stop_token_ids if real else (),
    )
    return [
        _step_row(arm, generations, position, round_index) | {"draft_prefill_ms": started.start_ms if started else None}
        for position in range(warm_up, len(generations[0].steps))
    ]


def _step_row(arm: _Arm, generations: Sequence[Generation], position: int, round_index: int) -> dict[str, Any]:
    """One pass as a row. Of imposed acceptance all requests of a batch do the same; a real run has one request."""
    steps = [generation.steps[position] for generation in generations if position < len(generation.steps)]
    q_len, is_tree = max(step.num_drafted_tokens for step in steps) + 1, _is_tree(arm.point)
    return {
        "origin": "measured" if arm.point["acceptance"] == "real" else "forced",
        "round": round_index,
        "step_index": position,
        "context_len": steps[0].context_len if arm.point["acceptance"] == "real" else arm.point["context_len"],
        "q_len": q_len,
        "num_drafted_tokens": steps[0].draft_length,
        "draft_depth": steps[0].draft_length if is_tree else None,
        "num_draft_nodes": q_len - 1 if is_tree else None,
        "num_accepted_tokens": None if steps[0].truncated else steps[0].num_accepted_tokens,
        "imposed_acceptance": arm.imposed,
        "linear_backend": _decoder(arm.point).linear_backend,
        "draft_backend": getattr(getattr(arm.drafter, "inner", arm.drafter), "backend", None),
        "kv_dtype": arm.point["weight_dtype"],
        **steps[0].times,
    }


class _TimedStart:
    """A drafter whose prefill is timed on the host; the rest passes through."""

    def __init__(self, inner: Drafter):
        self._inner, self.name, self.start_ms = inner, inner.name, 0.0
        self.propose, self.num_draft_nodes = inner.propose, getattr(inner, "num_draft_nodes", None)

    def start(self, requests: Any) -> None:
        begin = time.perf_counter()
        self._inner.start(requests)
        self.start_ms = (time.perf_counter() - begin) * 1e3
