"""The draft/verify loop: draft k tokens, verify them in one target pass, keep what the target agrees with.

Times come from an injected clock and randomness from an injected generator; the loop itself holds neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from labkit.accept import AcceptRule, accept_greedy
from labkit.shapes import MAX_Q_LEN
from labkit.timing import Clock, NullClock


@dataclass
class Step:
    """One target pass as one request saw it. Counts are per request, times per batched pass."""

    step_index: int
    batch_size: int
    context_len: int  # tokens in the cache before the pass
    num_drafted_tokens: int
    num_accepted_tokens: int  # kept before the first rejection, bonus not counted
    truncated: bool  # a stop token cut tokens off, or the room left allowed fewer than k drafts
    times: dict[str, float | None]
    draft_depth: int | None = None  # of a tree, whose nodes are the drafted tokens; None: a chain

    @property
    def draft_length(self) -> int:
        """Drafts that could be kept: of a tree its depth, since one path is."""
        return self.num_drafted_tokens if self.draft_depth is None else self.draft_depth


class Streams:
    """Random numbers in 0..1 for each request, from a generator of its own on the host.

    Behind the same number of output tokens they are always the same, so that they depend on nothing else in the batch.
    """

    def __init__(self, generators: Sequence[torch.Generator], max_new_tokens: int):
        size = (max_new_tokens, 2, MAX_Q_LEN)
        self._table = torch.stack([torch.rand(size, generator=one, dtype=torch.float64) for one in generators])

    def of(self, requests: Sequence[Request], *, drafter: bool) -> Tensor:
        """float64 ``[batch_size, MAX_Q_LEN]`` of this step; the drafter's are others than the accept rule's."""
        indices, places = torch.tensor([(request.index, request.num_output_tokens) for request in requests]).T
        return self._table[indices, places, int(drafter)]


@dataclass
class Request:
    """A prompt on its way. Drafters read it; only the loop writes it."""

    index: int
    token_ids: list[int]  # prompt and output so far; the last one is not in the cache yet
    num_prompt_tokens: int
    finish_reason: str = ""
    streams: Streams | None = None  # of the whole batch
    steps: list[Step] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Generation:
    """What one prompt became. ``steps`` leaves the prefill out, which yields the first output token."""

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str  # "stop", "length" or, ended by max_steps, "steps"
    steps: list[Step]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of a batch.

    token_ids: int64 [batch_size, q_len - 1], padded to the longest draft. lengths: drafts of each request.
    probs: [batch_size, q_len - 1, vocab_size], what the tokens were sampled from; None = proposed with certainty.
    forced_accepted: acceptance to impose (`accept_forced`), None for a real draft.
    parents: a tree's structure, int64 [batch_size, q_len - 1]: the place of the node that each one continues, which
        stands before it; -1: the last token. Siblings differ. None: a chain. depth: the longest path of a tree.
    top_ids: [batch_size, num_top_ids], the drafter's most probable tokens right behind the last one, best first.
    uniforms: [batch_size, MAX_Q_LEN], what the accept rule draws with (`Streams`), put here by the loop.
    """

    token_ids: Tensor
    lengths: list[int]
    probs: Tensor | None = None
    forced_accepted: list[int] | None = None
    parents: Tensor | None = None
    depth: int = 0
    top_ids: Tensor | None = None
    uniforms: Tensor | None = None

    @classmethod
    def from_lists(cls, tokens: Sequence[Sequence[int]]) -> Draft:
        longest = max((len(row) for row in tokens), default=0)
        padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
        return cls(torch.tensor(padded, dtype=torch.int64).view(len(tokens), longest), [len(row) for row in tokens])


class Drafter(Protocol):
    """Proposes up to k tokens per request. Its state follows ``request.token_ids``, which only ever grows.

    One that drafts trees of depth k has an attribute ``num_draft_nodes`` beside. One with a distribution has
    ``num_top_ids``, to be set: how many ``top_ids`` its drafts carry; 0 (no cost) unless they are counted.
    """

    name: str

    def start(self, requests: Sequence[Request]) -> None:
        """Prefill of the drafter, after the target's. Its time is `draft_prefill_ms`."""

    def propose(self, requests: Sequence[Request], k: int) -> Draft: ...


class Target(Protocol):
    """Scores drafts. The cache is its own affair: it rolls back to ``len(request.token_ids) - 1`` before each pass."""

    @property
    def max_context_len(self) -> int | None:
        """Tokens that the cache holds per request; None: any number."""

    def start(self, requests: Sequence[Request]) -> Tensor:
        """Prefill; logits of each prompt's last token [batch_size, vocab_size]."""

    def verify(self, requests: Sequence[Request], draft: Draft) -> Tensor:
        """Logits [batch_size, q_len, vocab_size] of each last token and its drafts; q_len = longest draft + 1."""

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """A plain step: logits [batch_size, 1, vocab_size]."""

    def keep(self, requests: Sequence[Request], nodes: Sequence[Sequence[int]]) -> None:
        """After a tree pass, before the requests grow: the places of the nodes that each request goes on with."""


def speculate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    accept: AcceptRule | None = None,
    clock: Clock | None = None,
    stop_token_ids: Sequence[int] = (),
    max_steps: int | None = None,
    generators: Sequence[torch.Generator] = (),
) -> list[Generation]:
    """Generate from a batch of prompts; each request advances by its own acceptance, finished ones leave the batch.

    drafter : None (with ``num_speculative_tokens=0``) is plain decoding through ``target.decode``.
    num_speculative_tokens : k, drafts per step at most. Verify has q_len = longest draft of the batch + 1.
    max_new_tokens : output tokens per request, the one from the prefill counted. Drafts end where the output must, and
        where the fullest row of the target's cache does; such a step counts as truncated.
    accept : rule for drafts and for the tokens the target adds; ``accept_greedy`` by default.
    clock : of `labkit.timing`; each step's times are stored with it. The prefill is not timed.
    max_steps : target passes after which the run ends, whatever is still open; None: no limit.
    generators : one per prompt, for rules and drafters that sample (`Streams`).

    Raises ValueError: k < 0, max_new_tokens < 1, no or an empty prompt, k and drafter that contradict each other, or a
    drafter that proposes more than k tokens.
    """
    _check(drafter, prompts, num_speculative_tokens, max_new_tokens)
    accept = accept or accept_greedy
    clock = clock or NullClock()
    stops = frozenset(stop_token_ids)
    streams = Streams(generators, max_new_tokens) if generators else None
    requests = [Request(i, list(prompt), len(prompt), streams=streams) for i, prompt in enumerate(prompts)]

    logits = target.start(requests)
    first = accept(logits.unsqueeze(1), _with_uniforms(_no_draft(len(requests)), requests))
    for request, token in zip(requests, first[1].tolist(), strict=True):
        _extend(request, [token], stops, max_new_tokens)
    if drafter is not None:
        drafter.start(requests)

    step_index = 0
    while step_index != max_steps and (active := [request for request in requests if not request.finish_reason]):
        clock.start_step()
        limits = _limits(target, drafter, active, num_speculative_tokens, max_new_tokens)
        draft = _with_uniforms(_propose(drafter, active, num_speculative_tokens, limits), active)
        clock.lap("draft")
        logits = target.verify(active, draft) if drafter else target.decode(active)
        clock.lap("verify")
        accepted, added, *path = accept(logits, draft).tolist()
        drafted = draft.token_ids.tolist()
        nodes = [[level[row] for level in path[:kept]] if path else range(kept) for row, kept in enumerate(accepted)]
        if draft.parents is not None:
            target.keep(active, nodes)
        records = []
        for row, request in enumerate(active):
            context_len, kept = len(request.token_ids) - 1, accepted[row]
            kept_tokens = [drafted[row][node] for node in nodes[row]]
            cut = _extend(request, [*kept_tokens, added[row]], stops, max_new_tokens)
            cut |= limits[row] < num_speculative_tokens
            depth = None if draft.parents is None else draft.depth
            records.append(Step(step_index, len(active), context_len, draft.lengths[row], kept, cut, {}, depth))
        clock.lap("accept")
        times = clock.end_step()
        for request, record in zip(active, records, strict=True):
            record.times = times
            request.steps.append(record)
        step_index += 1
    return [
        Generation(ids[:start], ids[start:], request.finish_reason or "steps", request.steps)
        for request in requests
        for ids, start in [(request.token_ids, request.num_prompt_tokens)]
    ]


def _with_uniforms(draft: Draft, requests: Sequence[Request]) -> Draft:
    streams = requests[0].streams
    return replace(draft, uniforms=streams.of(requests, drafter=False)) if streams else draft


def _extend(request: Request, tokens: list[int], stops: frozenset[int], max_new_tokens: int) -> bool:
    """Append tokens up to a stop token or the length limit. True when something was cut off."""
    room = max_new_tokens - request.num_output_tokens
    kept = tokens[:room]
    for position, token in enumerate(kept):
        if token in stops:
            kept, request.finish_reason = kept[: position + 1], "stop"
            break
    request.token_ids.extend(kept)
    if not request.finish_reason and len(kept) == room:
        request.finish_reason = "length"
    return len(kept) < len(tokens)


def _limits(
    target: Target, drafter: Drafter | None, requests: Sequence[Request], k: int, max_new_tokens: int
) -> list[int]:
    """Drafts that each request has room for. A pass is as wide as its longest draft, so the fullest row limits all."""
    if target.max_context_len is not None:
        room = max(0, target.max_context_len - max(len(request.token_ids) for request in requests))
        k = 0 if (getattr(drafter, "num_draft_nodes", None) or 0) > room else min(k, room)
    return [min(k, max_new_tokens - request.num_output_tokens - 1) for request in requests]


def _propose(drafter: Drafter | None, requests: Sequence[Request], k: int, limits: list[int]) -> Draft:
    """What the drafter proposes, each row cut to its limit."""
    if drafter is None or max(limits) == 0:
        return _no_draft(len(requests))
    # Which nodes a tree has depends on its depth, which must not depend on the other requests.
    is_tree = bool(getattr(drafter, "num_draft_nodes", None))
    draft = drafter.propose(requests, k if is_tree else max(limits))
    if draft.parents is not None:  # a path beyond a request's limit is cut when its tokens are kept
        return draft
    if draft.token_ids.shape[1] > k:
        raise ValueError(f"drafter {drafter.name}: wanted at most {k} tokens, got {draft.token_ids.shape[1]}")
    lengths = [min(pair) for pair in zip(draft.lengths, limits, strict=True)]
    width, forced = max(lengths), draft.forced_accepted
    return replace(
        draft,
        token_ids=draft.token_ids[:, :width],
        lengths=lengths,
        probs=None if draft.probs is None else draft.probs[:, :width],
        forced_accepted=None if forced is None else [min(pair) for pair in zip(forced, lengths, strict=True)],
    )


def _no_draft(batch_size: int) -> Draft:
    return Draft(torch.empty(batch_size, 0, dtype=torch.int64), [0] * batch_size)


def _check(drafter: Drafter | None, prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int) -> None:
    if not isinstance(k, int) or k < 0:
        raise ValueError(f"num_speculative_tokens: wanted a whole number of 0 or more, got {k}")
    if (drafter is None) != (k == 0):
        raise ValueError(f"num_speculative_tokens={k} and drafter={drafter!r}: a drafter goes with k >= 1, none with 0")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: wanted a whole number of 1 or more, got {max_new_tokens}")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompts: wanted at least one prompt, each with at least one token")
