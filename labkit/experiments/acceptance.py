"""Acceptance on real text: counts per prompt, drafter and k, at chosen context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import workloads
from labkit.acceptance import AcceptanceCounts
from labkit.drafting.named import num_nodes
from labkit.errors import InputError, Unsupported
from labkit.experiments import common, places
from labkit.sweep import RunResult

if TYPE_CHECKING:
    from labkit.accept import AcceptRule
    from labkit.models.target import ModelTarget
    from labkit.speculation import Drafter, Generation, Step

# context_len 0 = the prompt as it is; else it stands at the end of a context of that many tokens.
PRESETS: dict[str, common.Axes] = {
    "cpu": {
        "target": ["smollm2-135m"],
        "drafter": ["ngram"],
        "workload": ["code_editing", "prose"],
        "context_len": [512, 2048, 6144],
        "num_speculative_tokens": [2, 4],
        "num_prompts": [24],
        "max_new_tokens": [40],
        "verify_backend": ["sdpa"],
        "weight_dtype": ["float32"],
        "temperature": [0.0],
        "top_p": [1.0],
        "seed": [0],
        "prompts_per_batch": [1],
    }
}
BUDGET_S = 150.0  # of the presets that the demo takes
PRESETS["gpu"] = PRESETS["cpu"] | {
    "workload": list(workloads.WORKLOADS),
    "context_len": [512, 1024, 2048, 4096, 7680],
    "num_speculative_tokens": [1, 2, 3, 4, 5, 6, 7],
    "num_prompts": [24],
    "prompts_per_batch": [24],
    "max_new_tokens": [256],
    "weight_dtype": ["bfloat16"],
    "verify_backend": ["triton_split"],
}
PRESETS["ci"] = PRESETS["cpu"] | {"context_len": [512], "num_prompts": [2], "max_new_tokens": [12]}

_ONE_VALUE = ("target", "num_prompts", "prompts_per_batch", "max_new_tokens", "verify_backend", "weight_dtype", "top_p")


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Points of the grid, one batch of prompts of every cell before the next one, so that a cut run is still balanced.

    Raises InputError for an unknown preset, axis, workload, drafter or backend, k outside 1..16, a target that cannot
    run or a context that it does not hold, or more prompts than there are.
    """
    grid = common.axes_of(PRESETS, preset, axes)
    common.check_workloads(grid["workload"])
    common.check_drafters(grid)
    common.check_draft_lengths(grid)
    common.check_backends("verify_backend", grid["verify_backend"])
    fixed = {name: common.sole(grid, name) for name in _ONE_VALUE}
    if not 0 < fixed["top_p"] <= 1:
        raise InputError(f"axis top_p: wanted a number above 0 and up to 1, got {fixed['top_p']:g}")
    least = max(grid["num_speculative_tokens"]) + 2  # the prefill's token, then one step with k drafts
    if fixed["max_new_tokens"] < least:
        raise InputError(f"axis max_new_tokens: wanted {least} or more (k + 2), got {fixed['max_new_tokens']}")
    common.check_model_axes(grid, text=True, num_new_tokens=fixed["max_new_tokens"])
    prompts = common.prompts_of(grid, asked="num_prompts" in axes)
    found, together = [], fixed.pop("prompts_per_batch")
    for start in range(0, fixed["num_prompts"], together):
        for context_len in sorted(grid["context_len"], reverse=True):  # shorter ones reuse the longest one's prefill
            for workload in grid["workload"]:
                arms: list[dict[str, Any]] = []
                for prompt in prompts[workload][start : start + together]:
                    # The prompt's digest makes an edited prompt another point; the row's own covers the filler too.
                    cell = {"workload": workload, "prompt_id": prompt.id, "prompt_text": prompt.digest}
                    cell["context_len"] = context_len
                    batch = prompt.id if together == 1 else f"{Path(workload).stem}/{start}"
                    arms += _arms(fixed | cell, grid, batch)
                found += sorted(arms, key=lambda arm: arm["temperature"])  # a sweep wants a group's points adjacent
    return found


def _arms(cell: dict[str, Any], grid: common.Axes, batch: str) -> list[dict[str, Any]]:
    """Every drafter, k, temperature and seed on one prompt; a temperature is a group.

    Greedy arms share one generation; of the others each drafter and k is one, with all seeds as requests of a batch.
    """
    arms = []
    for drafter in grid["drafter"]:
        for temperature in grid["temperature"]:
            for seed in grid["seed"] if temperature else [0]:
                group = f"{batch}/{cell['context_len']}/T{temperature:g}" + ("" if temperature else "/0")
                sampling = {"temperature": temperature, "seed": seed, "group": group}
                ks = sorted(grid["num_speculative_tokens"], reverse=True)
                arms += [cell | sampling | {"drafter": drafter, "num_speculative_tokens": k} for k in ks]
    return arms


def run(
    preset: str = "cpu", *, out_dir: Path | None = None, options: dict[str, Any] | None = None, **axes: Sequence[Any]
) -> RunResult:
    """Measure a preset with some axes replaced. ``options`` go to `labkit.sweep.run_sweep` (resume, budget, ...).

    The cpu and gpu presets measure as many of their prompts as fit into ``BUDGET_S`` in all; a ``budget_s`` replaces
    that.
    """
    budget = {"budget_s": BUDGET_S, "budget_is_total": True} if preset in ("cpu", "gpu") else {}
    options = budget | (options or {})
    return common.sweep("acceptance", points(preset, **axes), out_dir=out_dir, **options)


def measure(arms: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """Prompts of one cell together: generate, then count.

    Greedy text is generated once; every drafter and k is counted on it (`labkit.drafting.matches`). Sampled text is
    generated for each, all prompts and seeds together.
    """
    first = arms[0]
    common.load_backends(first)
    texts: dict[str, tuple[list[int], str]] = {}
    errors: dict[str, Exception] = {}
    for arm in arms:
        if arm["prompt_id"] not in texts and arm["prompt_id"] not in errors:
            try:
                texts[arm["prompt_id"]] = prompt_tokens(arm)
            except Unsupported as error:
                errors[arm["prompt_id"]] = error
    found: dict[_Sample, dict[_Arm, dict[str, Any]]] = {}
    if samples := list(dict.fromkeys(_sample(arm) for arm in arms if arm["prompt_id"] in texts)):
        target = _target(first, [texts[prompt_id][0] for prompt_id, _ in samples])
        count = _count_sampled if first["temperature"] > 0 else _count_greedy
        for arm_key, rows in count(arms, target, {sample: texts[sample[0]][0] for sample in samples}).items():
            for (prompt_id, seed), row in zip(samples, rows, strict=True):
                correct = _correct(first, prompt_id, row.pop("output_ids"))
                row |= {"prompt_digest": texts[prompt_id][1], "answer_correct": correct}
                found.setdefault((prompt_id, seed), {})[arm_key] = row
    return [
        errors.get(arm["prompt_id"])
        or [found[_sample(arm)][arm["drafter"], arm["num_speculative_tokens"]] | _place(arm, texts)]
        for arm in arms
    ]


_Sample = tuple[str, int]  # prompt_id, seed: a request of a batch
_Prompts = dict[_Sample, list[int]]
_Arm = tuple[str, int]  # drafter, k
_Counted = dict[_Arm, list[dict[str, Any]]]  # -> a row per request


def _sample(arm: dict[str, Any]) -> _Sample:
    return arm["prompt_id"], arm["seed"]


def _count_greedy(arms: list[dict[str, Any]], target: ModelTarget, prompts: _Prompts) -> _Counted:
    from labkit.drafting.matches import record_matches, simulate
    from labkit.drafting.overlap import TOP_K, TopTokens, overlap_columns

    first, found = arms[0], {}
    target_top = TopTokens(_rule(first))
    largest = max(arm["num_speculative_tokens"] for arm in arms)
    made = _generate(first | {"num_speculative_tokens": largest}, target, prompts, target_top)
    best = target_top.of(made)
    for name in dict.fromkeys(arm["drafter"] for arm in arms):
        here = next(arm for arm in arms if arm["drafter"] == name)
        ks = sorted({arm["num_speculative_tokens"] for arm in arms if arm["drafter"] == name}, reverse=True)
        drafter = draft_with(here, target)
        if hasattr(drafter, "num_top_ids"):
            drafter.num_top_ids = TOP_K
        is_tree = bool(getattr(drafter, "num_draft_nodes", None))
        for k in ks:
            if k == ks[0] or is_tree:  # a tree spreads its nodes over its depth: each k is another one
                matches = record_matches(drafter, made, k)
            rows = [
                _row(here, k, generation, simulate(match, k, here["max_new_tokens"]))
                for generation, match in zip(made, matches, strict=True)
            ]
            if k == ks[0]:
                rows = [
                    row | {"match_lengths": match.matched} | overlap_columns(match, text, top)
                    for row, match, text, top in zip(rows, matches, made, best, strict=True)
                ]
            found[name, k] = rows
    return found


def _count_sampled(arms: list[dict[str, Any]], target: ModelTarget, prompts: _Prompts) -> _Counted:
    found: _Counted = {}
    for arm in arms:
        key = (arm["drafter"], arm["num_speculative_tokens"])
        if key not in found:
            made = _generate(arm, target, prompts, _rule(arm))
            found[key] = [_row(arm, key[1], generation, generation.steps) for generation in made]
    return found


def draft_with(point: dict[str, Any], target: ModelTarget) -> Drafter:
    """The drafter of a point beside its target; above temperature 0 it samples as the target does, top-p apart."""
    from labkit.drafting.named import make_drafter

    folder = places.draft_folder(point, point["drafter"])
    options = {"temperature": point.get("temperature", 0.0)}
    if point.get("launch_mode") == "graph" and point["batch_size"] == 1:
        options["captured_k"] = point["num_speculative_tokens"]
    return make_drafter(point["drafter"], folder, target, **options)


def prompt_tokens(point: dict[str, Any]) -> tuple[list[int], str]:
    """Token ids of a point's prompt inside a context of its ``context_len`` (0: as it is), and the text's digest."""
    encode = common.tokenizer(places.model_source(point)).encode_chat
    prompt = _prompt(point, point["prompt_id"])
    if not point["context_len"]:
        return encode(list(prompt.messages)), prompt.digest
    try:
        context = workloads.build_context(prompt, point["context_len"], encode=encode, seed=0)
    except InputError as error:  # a long prompt does not fit a short context: this point, not the grid, is at fault
        raise Unsupported(f"axis context_len: {error}") from error
    return list(context.token_ids), context.digest


def _target(point: dict[str, Any], prompts: list[list[int]]) -> ModelTarget:
    """A target for these prompts. One for a single prompt is kept per workload and context: fillers are shared.

    A new one takes over what the longest context of the workload holds already, since fillers are nested.
    """
    from labkit.models.target import ModelTarget

    source = places.model_source(point)
    decoder = common.decoder(source, point["weight_dtype"], common.device())
    room = -(-(max(map(len, prompts)) + point["max_new_tokens"]) // 512) * 512
    options: dict[str, Any] = {"max_context_len": min(room, decoder.shape.max_context_len)}
    options |= {"verify_backend": point["verify_backend"], "taps": places.taps(point, decoder)}
    if len(prompts) > 1:
        return ModelTarget(decoder, batch_size=len(prompts), **options)
    kept = _kept_targets(source, point["weight_dtype"], point["verify_backend"], point["workload"])
    key = (point["context_len"], room)
    if key not in kept:
        target = ModelTarget(decoder, batch_size=1, **options)
        if kept:
            target.adopt(kept[max(kept)], prompts[0])
        kept[key] = target
    return kept[key]


@common.lru_cache(maxsize=2)
def _kept_targets(target: str, dtype: str, backend: str, workload: str) -> dict[tuple[int, int], ModelTarget]:
    return {}


def _generate(point: dict[str, Any], target: ModelTarget, prompts: _Prompts, accept: AcceptRule) -> list[Generation]:
    """A text per request; what is sampled of one depends on its own random stream and on no other request."""
    import torch

    from labkit.speculation import speculate

    stops = common.tokenizer(places.model_source(point)).stop_token_ids
    limits = {name: point[name] for name in ("num_speculative_tokens", "max_new_tokens")}
    options = limits | {"accept": accept, "stop_token_ids": stops}
    if point["temperature"] > 0:
        seeds = [int(sha256(repr(sample).encode()).hexdigest()[:8], 16) for sample in prompts]
        options["generators"] = [torch.Generator().manual_seed(seed) for seed in seeds]
    return speculate(target, draft_with(point, target), list(prompts.values()), **options)


def _rule(point: dict[str, Any]) -> AcceptRule:
    from functools import partial

    from labkit.accept import accept_greedy, accept_sampling

    if point["temperature"] == 0:
        return accept_greedy
    return partial(accept_sampling, temperature=point["temperature"], top_p=point["top_p"])


def _place(point: dict[str, Any], texts: dict[str, tuple[list[int], str]]) -> dict[str, int]:
    """The context band of a prompt as it was sent."""
    low, high = workloads.context_band(point["context_len"] or len(texts[point["prompt_id"]][0]))
    return {"context_len_low": low, "context_len_high": high}


def _row(point: dict[str, Any], k: int, generation: Generation, steps: Sequence[Step]) -> dict[str, Any]:
    """The counts of one generation. A step that a stop or the length limit cut is counted apart."""
    whole = [step for step in steps if not step.truncated]
    pairs = [(step.draft_length, step.num_accepted_tokens) for step in whole]
    counts = AcceptanceCounts.from_steps(pairs, k, num_truncated_steps=len(steps) - len(whole))
    return {
        "origin": "measured",
        "round": 0,
        "sample": 0,
        "draft_depth": k,
        "num_draft_nodes": num_nodes(point["drafter"], k),
        "context_len": sum(step.context_len for step in whole) / len(whole) if whole else len(generation.prompt_ids),
        "num_prompt_tokens": len(generation.prompt_ids),
        "num_output_tokens": len(generation.output_ids),
        **counts.columns(),
        "kv_dtype": point["weight_dtype"],
        "repeated_ngram_share": workloads.repeated_ngram_share(generation.output_ids),
        "match_lengths": None,
        "top_k_overlap": None,
        "top_k_hit": None,
        "output_ids": generation.output_ids,
    }


def _correct(point: dict[str, Any], prompt_id: str, output_ids: list[int]) -> int | None:
    """1 when the output ends in the prompt's answer, 0 when not; None for a prompt without one."""
    wanted = _prompt(point, prompt_id).answer
    if wanted is None:
        return None
    text = common.tokenizer(places.model_source(point)).decode(output_ids, skip_special_tokens=True)
    return int(workloads.final_number(text) == wanted)


def _prompt(point: dict[str, Any], prompt_id: str) -> workloads.Prompt:
    return next(prompt for prompt in workloads.load_prompts(places.prompt_source(point)) if prompt.id == prompt_id)
