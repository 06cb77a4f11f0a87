"""One set of counts as each engine would print it: same run, different figures, each with what it counts.

Every figure takes one `AcceptanceCounts` per request, because some are means over requests and some include the token
that prefill emits. Below, S are verify steps, S1 those with a draft, A
accepted and D drafted tokens, k num_speculative_tokens. Engines also count a truncated last step; our counts leave it
out, so figures of short outputs differ by up to one step per request.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts

Requests = Sequence[AcceptanceCounts]


def pooled(requests: Requests) -> AcceptanceCounts:
    """The counts of all requests together. Raises ValueError for none."""
    if not requests:
        raise ValueError("requests must hold at least one AcceptanceCounts, got none")
    return sum(requests[1:], start=requests[0])


class Definition(NamedTuple):
    """What a figure counts, and the function that gives it."""

    counts: str
    compute: Callable[[Requests], float]


def _pooled(counts: str, figure: Callable[[AcceptanceCounts], float]) -> Definition:
    return Definition(counts, lambda requests: figure(pooled(requests)))


def _averaged(counts: str, figure: Callable[[AcceptanceCounts], float]) -> Definition:
    """Each request with equal weight; those that the figure has no number for are left out."""

    def compute(requests: Requests) -> float:
        values = np.array([figure(request) for request in requests])
        return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else float("nan")

    return Definition(counts, compute)


def _over(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _completion(c: AcceptanceCounts) -> int:
    return c.num_verify_steps + c.num_accepted_tokens + 1


_ALL_STEPS = _pooled(
    "(S + A)/S, pooled, bonus counted: our mean_acceptance_length.", lambda c: c.mean_acceptance_length
)
_RATE = _pooled("A/D, pooled.", lambda c: c.draft_acceptance_rate)
_MEAN_OF_REQUESTS = _averaged(
    "1 + A/S of each request, averaged with equal weight; requests without a step are left out.",
    lambda c: c.mean_acceptance_length,
)
_DRAFTED_STEPS = _pooled(
    "1 + A/S1, pooled, bonus counted; steps without a draft are left out, so it exceeds our length where any are.",
    lambda c: 1 + _over(c.num_accepted_tokens, c.num_drafted_steps),
)
_PER_DRAFTED_STEP = _pooled(
    "A/S1, pooled, bonus not counted.", lambda c: _over(c.num_accepted_tokens, c.num_drafted_steps)
)
_PER_STEP = _pooled("A/S, pooled, bonus not counted.", lambda c: c.mean_acceptance_length - 1)
_OVER_WIDTH = _pooled(
    "(1 + A/S)/(k+1): bonus in the numerator, root in the denominator; reads 1/(k+1) with nothing accepted.",
    lambda c: c.mean_acceptance_length / (c.num_speculative_tokens + 1),
)
_OVER_FULL_DRAFTS = _pooled(
    "A/(k S): as if every step had drafted k tokens, so it is low where drafts are shorter.",
    lambda c: (c.mean_acceptance_length - 1) / c.num_speculative_tokens,
)
_COMPLETION_OVER_STEPS = _averaged(
    "(S + A + 1)/S per request, averaged: the token that prefill emits is in the numerator.",
    lambda c: _over(_completion(c), c.num_verify_steps),
)
_OUTPUT_OVER_ITERATIONS = _averaged(
    "(S + A + 1)/(S + 1) per request, averaged: the prefill token and the prefill iteration are both in.",
    lambda c: _completion(c) / (c.num_verify_steps + 1),
)
_OVER_ITERATION_DRAFTS = _averaged(
    "A/(k (S + 1)) per request, averaged: drafts are reconstructed from the iterations, so it is a lower bound.",
    lambda c: c.num_accepted_tokens / (c.num_speculative_tokens * (c.num_verify_steps + 1)),
)

ENGINE_FIGURES = (
    ("labkit", "mean_acceptance_length", _ALL_STEPS),
    ("labkit", "draft_acceptance_rate", _RATE),
    ("labkit", "mean over requests", _MEAN_OF_REQUESTS),
    ("vLLM 0.9 on", "Mean acceptance length", _DRAFTED_STEPS),
    ("vLLM 0.8", "Mean acceptance length", _PER_DRAFTED_STEP),
    ("vLLM V1", "Draft acceptance rate", _RATE),
    ("SGLang", "accept len", _ALL_STEPS),
    ("SGLang before Apr 2026", "accept rate", _OVER_WIDTH),
    ("SGLang from Apr 2026", "accept rate", _OVER_FULL_DRAFTS),
    ("SGLang response", "spec_accept_length", _COMPLETION_OVER_STEPS),
    ("llama.cpp", "mean len", _DRAFTED_STEPS),
    ("llama.cpp", "draft acceptance", _RATE),
    ("TensorRT-LLM bench", "acceptance_length", _OUTPUT_OVER_ITERATIONS),
    ("TensorRT-LLM bench", "draft_acceptance_rate", _OVER_ITERATION_DRAFTS),
    ("EAGLE code, gpt-fast", "accept_length / mean accepted", _PER_STEP),
    ("EAGLE papers", "tau", _ALL_STEPS),
    ("SpecForge", "average_acceptance_length", _COMPLETION_OVER_STEPS),
)


def engine_figures(requests: Requests) -> pd.DataFrame:
    """Every figure for the same requests: columns engine, figure, value, counts (what it counts).

    Raises ValueError: no requests, or requests of different num_speculative_tokens.
    """
    pooled(requests)
    rows = [(engine, figure, how.compute(requests), how.counts) for engine, figure, how in ENGINE_FIGURES]
    return pd.DataFrame(rows, columns=["engine", "figure", "value", "counts"])
