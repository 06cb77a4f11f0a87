"""One set of counts as each engine would print it: same run, different figures, each with what it counts.

Every function takes the counts of the requests, one `AcceptanceCounts` per request, because some figures are means
over requests and some include the token that prefill emits. Below, S are verify steps, S1 those with a draft, A
accepted and D drafted tokens, k num_speculative_tokens. Engines also count a truncated last step; our counts leave it
out, so figures of short outputs differ by up to one step per request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.acceptance import AcceptanceCounts

Requests = Sequence[AcceptanceCounts]


def pooled(requests: Requests) -> AcceptanceCounts:
    """The counts of all requests together. Raises ValueError for none."""
    if not requests:
        raise ValueError("requests must hold at least one AcceptanceCounts, got none")
    return sum(requests[1:], start=requests[0])


def _over(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _mean_over_requests(figure: Callable[[AcceptanceCounts], float], requests: Requests) -> float:
    values = np.array([figure(counts) for counts in requests])
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else float("nan")


def mean_over_requests(requests: Requests) -> float:
    """1 + A/S of each request, averaged with equal weight; requests without a step are left out."""
    return _mean_over_requests(lambda counts: counts.mean_acceptance_length, requests)


def accepted_per_drafted_step(requests: Requests) -> float:
    """A/S1, pooled, bonus not counted."""
    counts = pooled(requests)
    return _over(counts.num_accepted_tokens, counts.num_drafted_steps)


def accepted_per_step(requests: Requests) -> float:
    """A/S, pooled, bonus not counted."""
    return pooled(requests).mean_acceptance_length - 1


def length_over_drafted_steps(requests: Requests) -> float:
    """1 + A/S1, pooled, bonus counted; steps without a draft are left out, so it exceeds our length where any are."""
    return 1 + accepted_per_drafted_step(requests)


def length_over_all_steps(requests: Requests) -> float:
    """(S + A)/S, pooled, bonus counted: our mean_acceptance_length."""
    return pooled(requests).mean_acceptance_length


def accepted_over_drafted(requests: Requests) -> float:
    """A/D, pooled."""
    return pooled(requests).draft_acceptance_rate


def length_over_verify_width(requests: Requests) -> float:
    """(1 + A/S)/(k+1): bonus in the numerator, root in the denominator; reads 1/(k+1) with nothing accepted."""
    counts = pooled(requests)
    return counts.mean_acceptance_length / (counts.num_speculative_tokens + 1)


def accepted_over_full_drafts(requests: Requests) -> float:
    """A/(k S): as if every step had drafted k tokens, so it is low where drafts are shorter."""
    counts = pooled(requests)
    return (counts.mean_acceptance_length - 1) / counts.num_speculative_tokens


def completion_over_steps(requests: Requests) -> float:
    """(S + A + 1)/S per request, averaged: the token that prefill emits is in the numerator."""
    return _mean_over_requests(
        lambda c: _over(c.num_verify_steps + c.num_accepted_tokens + 1, c.num_verify_steps), requests
    )


def output_over_iterations(requests: Requests) -> float:
    """(S + A + 1)/(S + 1) per request, averaged: the prefill token and the prefill iteration are both in."""
    return _mean_over_requests(
        lambda c: (c.num_verify_steps + c.num_accepted_tokens + 1) / (c.num_verify_steps + 1), requests
    )


def accepted_over_iteration_drafts(requests: Requests) -> float:
    """A/(k (S + 1)) per request, averaged: drafts are reconstructed from the iterations, so it is a lower bound."""
    return _mean_over_requests(
        lambda c: c.num_accepted_tokens / (c.num_speculative_tokens * (c.num_verify_steps + 1)), requests
    )


@dataclass(frozen=True)
class EngineFigure:
    """A figure as one engine names it, and the function that gives it from counts."""

    engine: str
    figure: str
    compute: Callable[[Requests], float]


ENGINE_FIGURES = (
    EngineFigure("labkit", "mean_acceptance_length", length_over_all_steps),
    EngineFigure("labkit", "draft_acceptance_rate", accepted_over_drafted),
    EngineFigure("labkit", "mean over requests", mean_over_requests),
    EngineFigure("vLLM 0.9 on", "Mean acceptance length", length_over_drafted_steps),
    EngineFigure("vLLM 0.8", "Mean acceptance length", accepted_per_drafted_step),
    EngineFigure("vLLM V1", "Draft acceptance rate", accepted_over_drafted),
    EngineFigure("SGLang", "accept len", length_over_all_steps),
    EngineFigure("SGLang before Apr 2026", "accept rate", length_over_verify_width),
    EngineFigure("SGLang from Apr 2026", "accept rate", accepted_over_full_drafts),
    EngineFigure("SGLang response", "spec_accept_length", completion_over_steps),
    EngineFigure("llama.cpp", "mean len", length_over_drafted_steps),
    EngineFigure("llama.cpp", "draft acceptance", accepted_over_drafted),
    EngineFigure("TensorRT-LLM bench", "acceptance_length", output_over_iterations),
    EngineFigure("TensorRT-LLM bench", "draft_acceptance_rate", accepted_over_iteration_drafts),
    EngineFigure("EAGLE code, gpt-fast", "accept_length / mean accepted", accepted_per_step),
    EngineFigure("EAGLE papers", "tau", length_over_all_steps),
    EngineFigure("SpecForge", "average_acceptance_length", completion_over_steps),
)


def engine_figures(requests: Requests) -> pd.DataFrame:
    """Every figure for the same requests: columns engine, figure, value, counts (what it counts).

    Raises ValueError: no requests, or requests of different num_speculative_tokens.
    """
    pooled(requests)
    return pd.DataFrame(
        [
            {
                "engine": item.engine,
                "figure": item.figure,
                "value": item.compute(requests),
                "counts": (item.compute.__doc__ or "").strip(),
            }
            for item in ENGINE_FIGURES
        ]
    )
