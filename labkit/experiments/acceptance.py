"""Acceptance on real text: counts per prompt, drafter and k, at chosen context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import workloads
from labkit.acceptance import AcceptanceCounts
from labkit.errors import InputError, Unsupported
from labkit.experiments import common
from labkit.sweep import RunResult

if TYPE_CHECKING:
    from labkit.models.target import ModelTarget
    from labkit.speculation import AcceptRule, Drafter, Generation, Target

DRAFTERS = ("ngram",)

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
    }
}
CPU_BUDGET_S = 160.0
PRESETS["gpu"] = PRESETS["cpu"] | {
    "workload": list(workloads.WORKLOADS),
    "num_speculative_tokens": [1, 2, 3, 4, 5, 6, 7],
    "num_prompts": [24],
    "max_new_tokens": [256],
    "weight_dtype": ["bfloat16"],
    "verify_backend": ["triton_split"],
}
PRESETS["ci"] = PRESETS["cpu"] | {"context_len": [512], "num_prompts": [2], "max_new_tokens": [12]}

_ONE_VALUE = ("target", "num_prompts", "max_new_tokens", "verify_backend", "weight_dtype", "top_p")


def points(preset: str, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Points of the grid, one prompt of every cell before the next prompt, so that a cut run is still balanced.

    Raises InputError for an unknown preset, axis, workload, drafter or backend, k outside 1..16, a target that cannot
    run or a context that it does not hold, or more prompts than there are.
    """
    grid = common.axes_of(PRESETS, preset, axes)
    common.check_names("workload", grid["workload"], workloads.WORKLOADS)
    common.check_names("drafter", grid["drafter"], DRAFTERS)
    common.check_draft_lengths(grid)
    common.check_backends("verify_backend", grid["verify_backend"])
    fixed = {name: common.sole(grid, name) for name in _ONE_VALUE}
    if not 0 < fixed["top_p"] <= 1:
        raise InputError(f"axis top_p: wanted a number above 0 and up to 1, got {fixed['top_p']:g}")
    least = max(grid["num_speculative_tokens"]) + 2  # the prefill's token, then one step with k drafts
    if fixed["max_new_tokens"] < least:
        raise InputError(f"axis max_new_tokens: wanted {least} or more (k + 2), got {fixed['max_new_tokens']}")
    common.check_model_axes(grid, text=True, num_new_tokens=fixed["max_new_tokens"])
    prompts = common.prompts_of(grid)
    found = []
    for index in range(fixed["num_prompts"]):
        for context_len in sorted(grid["context_len"], reverse=True):  # shorter ones reuse the longest one's prefill
            for workload in grid["workload"]:
                if index < len(prompts[workload]):
                    prompt = prompts[workload][index]
                    # The prompt's digest makes an edited prompt another point; the row's own covers the filler too.
                    cell = {"workload": workload, "prompt_id": prompt.id, "prompt_text": prompt.digest}
                    cell["context_len"] = context_len
                    found += _arms(fixed | cell, grid)
    return found


def _arms(cell: dict[str, Any], grid: common.Axes) -> list[dict[str, Any]]:
    """Every drafter, k, temperature and seed on one prompt. Greedy arms share one generation: one group."""
    arms = []
    for drafter in grid["drafter"]:
        for temperature in grid["temperature"]:
            for seed in grid["seed"] if temperature else [0]:
                group = f"{cell['prompt_id']}/{cell['context_len']}/T{temperature:g}/{seed}"
                sampling = {"temperature": temperature, "seed": seed, "group": group}
                ks = sorted(grid["num_speculative_tokens"], reverse=True)
                arms += [cell | sampling | {"drafter": drafter, "num_speculative_tokens": k} for k in ks]
    return arms


def run(
    preset: str = "cpu", *, out_dir: Path | None = None, options: dict[str, Any] | None = None, **axes: Sequence[Any]
) -> RunResult:
    """Measure a preset with some axes replaced. ``options`` go to `labkit.sweep.run_sweep` (resume, budget, ...).

    The cpu preset measures as many of its prompts as fit into ``CPU_BUDGET_S`` in all; a ``budget_s`` replaces that.
    """
    options = ({"budget_s": CPU_BUDGET_S, "budget_is_total": True} if preset == "cpu" else {}) | (options or {})
    return common.sweep("acceptance", points(preset, **axes), out_dir=out_dir, **options)


def measure(arms: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
    """One prompt: generate, then count. Greedy text is generated once, at the largest k, and replayed."""
    from labkit.models.recorded import RecordedTarget

    first = arms[0]
    common.load_backends(first)
    prompt_ids, digest = prompt_tokens(first)
    if first["temperature"] > 0:
        return [[_row(arm, digest, _generate(arm, prompt_ids, _target(arm, prompt_ids)))] for arm in arms]
    live = _generate(first, prompt_ids, _target(first, prompt_ids))
    vocab_size = common.decoder(common.model_source(first), first["weight_dtype"], common.device()).shape.vocab_size
    recorded = RecordedTarget([*live.prompt_ids, *live.output_ids], vocab_size)
    replays = [_generate(arm, prompt_ids, recorded) for arm in arms[1:]]
    return [[_row(arm, digest, generation)] for arm, generation in zip(arms, [live, *replays], strict=True)]


def make_drafter(name: str) -> Drafter:
    """A drafter of `DRAFTERS` by name."""
    from labkit.drafting.ngram import NgramDrafter

    return {"ngram": NgramDrafter}[name]()


def prompt_tokens(point: dict[str, Any]) -> tuple[list[int], str]:
    """Token ids of a point's prompt inside a context of its ``context_len`` (0: as it is), and the text's digest."""
    encode = common.tokenizer(common.model_source(point)).encode_chat
    prompt = next(prompt for prompt in workloads.load_prompts(point["workload"]) if prompt.id == point["prompt_id"])
    if not point["context_len"]:
        return encode(list(prompt.messages)), prompt.digest
    try:
        context = workloads.build_context(prompt, point["context_len"], encode=encode, seed=0)
    except InputError as error:  # a long prompt does not fit a short context: this point, not the grid, is at fault
        raise Unsupported(f"axis context_len: {error}") from error
    return list(context.token_ids), context.digest


def _target(point: dict[str, Any], prompt_ids: list[int]) -> ModelTarget:
    """A target whose cache is kept per workload and context, since its prompts share the filler before the question.

    A new one takes over what the longest context of the workload holds already: fillers are nested.
    """
    from labkit.models.target import ModelTarget

    source = common.model_source(point)
    kept = _kept_targets(source, point["weight_dtype"], point["verify_backend"], point["workload"])
    room = -(-(len(prompt_ids) + point["max_new_tokens"]) // 512) * 512
    key = (point["context_len"], room)
    if key not in kept:
        decoder = common.decoder(source, point["weight_dtype"], common.device())
        room = min(room, decoder.shape.max_context_len)
        target = ModelTarget(decoder, batch_size=1, max_context_len=room, verify_backend=point["verify_backend"])
        if kept:
            target.adopt(kept[max(kept)], prompt_ids)
        kept[key] = target
    return kept[key]


@common.lru_cache(maxsize=2)
def _kept_targets(target: str, dtype: str, backend: str, workload: str) -> dict[tuple[int, int], ModelTarget]:
    return {}


def _generate(point: dict[str, Any], prompt_ids: list[int], target: Target) -> Generation:
    from labkit.speculation import speculate

    (generation,) = speculate(
        target,
        make_drafter(point["drafter"]),
        [prompt_ids],
        num_speculative_tokens=point["num_speculative_tokens"],
        max_new_tokens=point["max_new_tokens"],
        accept=_rule(point),
        stop_token_ids=common.tokenizer(common.model_source(point)).stop_token_ids,
    )
    return generation


def _rule(point: dict[str, Any]) -> AcceptRule:
    from functools import partial

    import torch

    from labkit.speculation import accept_greedy, accept_sampling

    if point["temperature"] == 0:
        return accept_greedy
    generator = torch.Generator(common.device()).manual_seed(point["seed"])
    return partial(accept_sampling, temperature=point["temperature"], top_p=point["top_p"], generator=generator)


def _row(point: dict[str, Any], digest: str, generation: Generation) -> dict[str, Any]:
    """The counts of one generation. A step that a stop or the length limit cut is counted apart."""
    whole = [step for step in generation.steps if not step.truncated]
    k = point["num_speculative_tokens"]
    pairs = [(step.num_drafted_tokens, step.num_accepted_tokens) for step in whole]
    counts = AcceptanceCounts.from_steps(pairs, k, num_truncated_steps=len(generation.steps) - len(whole))
    low, high = workloads.context_band(point["context_len"] or len(generation.prompt_ids))
    return {
        "origin": "measured",
        "round": 0,
        "sample": 0,
        "draft_depth": k,
        "num_draft_nodes": k,
        "context_len_low": low,
        "context_len_high": high,
        "context_len": sum(step.context_len for step in whole) / len(whole) if whole else len(generation.prompt_ids),
        "num_prompt_tokens": len(generation.prompt_ids),
        "num_output_tokens": len(generation.output_ids),
        **counts.columns(),
        "prompt_digest": digest,
        "kv_dtype": point["weight_dtype"],
        "repeated_ngram_share": workloads.repeated_ngram_share(generation.output_ids),
    }
