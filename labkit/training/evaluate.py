"""Acceptance of trained heads on the committed prompts, in the real loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.acceptance import MAX_REPEATED, AcceptanceCounts
from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.named import taps_of
from labkit.drafting.ngram import NgramDrafter
from labkit.models.decoder import Decoder
from labkit.models.target import ModelTarget
from labkit.models.tokenizer import Tokenizer
from labkit.speculation import Drafter, Generation, speculate
from labkit.workloads import WORKLOADS, load_prompts, repeated_ngram_share

DRAFT_LENGTHS = {"ngram": 5, "autoregressive": 5, "block": 7}


def evaluate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    folders: dict[str, Path],
    *,
    limit: int | None,
    max_new_tokens: int,
    backend: str,
    with_ngram: bool,
) -> dict[str, Any]:
    """mean_acceptance_length by drafter and workload, greedy, all prompts of a drafter in one batch.

    folders : layout -> folder of a head. limit : prompts of each workload; None: all. with_ngram : try n-gram lookup
        on the same prompts too.
    """
    named = [(name, prompt) for name in WORKLOADS for prompt in load_prompts(name, limit)]
    prompts = [tokenizer.encode_chat(list(prompt.messages)) for _, prompt in named]
    room = max(map(len, prompts)) + max_new_tokens + max(DRAFT_LENGTHS.values()) + 2
    taps = taps_of(list(folders.values()), decoder)
    target = ModelTarget(decoder, batch_size=len(prompts), max_context_len=room, verify_backend=backend, taps=taps)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()} if with_ngram else {}
    if folder := folders.get("autoregressive"):
        drafters["autoregressive"] = AutoregressiveDrafter.from_folder(folder, target, backend=backend)
    if folder := folders.get("block"):
        drafters["block"] = BlockDrafter.from_folder(folder, target)
    found = {}
    for name, drafter in drafters.items():
        k = DRAFT_LENGTHS[name]
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_token_ids": tokenizer.stop_token_ids}
        generations = speculate(target, drafter, prompts, num_speculative_tokens=k, **options)
        found[name] = {"num_speculative_tokens": k} | _summary([workload for workload, _ in named], generations, k)
    return found


def _summary(names: Sequence[str], generations: Sequence[Generation], k: int) -> dict[str, Any]:
    """Lengths of varied and of repeating continuations, pooled over steps, by workload and in all."""
    groups: dict[str, list[Generation]] = {}
    for name, generation in zip(names, generations, strict=True):
        repeating = (repeated_ngram_share(generation.output_ids) or 0.0) > MAX_REPEATED
        for key in ("repeating",) if repeating else (name, "all", *(["code"] if name.startswith("code") else [])):
            groups.setdefault(key, []).append(generation)
    return {
        key: {
            "mean_acceptance_length": _length(group, k),
            "num_prompts": len(group),
            "num_output_tokens": sum(len(generation.output_ids) for generation in group),
        }
        for key, group in sorted(groups.items())
    }


def _length(generations: Sequence[Generation], k: int) -> float | None:
    steps = [step for generation in generations for step in generation.steps if not step.truncated]
    counts = AcceptanceCounts.from_steps([(s.num_drafted_tokens, s.num_accepted_tokens) for s in steps], k)
    return round(counts.mean_acceptance_length, 4) if steps else None
