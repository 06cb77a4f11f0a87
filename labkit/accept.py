"""Accept rules: which drafts a target keeps, and which token it adds; pure functions on tensors.

A rule maps (logits ``[batch_size, q_len, vocab_size]``, draft) to int64 ``[2, batch_size]``: the number of accepted
drafts, and the token that the target adds after them. For a tree, a further row per level: the node accepted there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from labkit.speculation import Draft

AcceptRule = Callable[[Tensor, "Draft"], Tensor]


def accept_greedy(logits: Tensor, draft: Draft) -> Tensor:
    """Keep drafts as long as each is the target's argmax; then add the target's own token. int64 [2, batch_size]."""
    best = _best(logits)
    if draft.parents is not None:
        return _follow_tree(best, draft)
    return _accept(best, _agreeing(best, draft))


def accept_forced(logits: Tensor, draft: Draft) -> Tensor:
    """Keep as many drafts as the draft says, whatever they are: costs without a text, with the work of a real step."""
    best = _best(logits)
    _agreeing(best, draft)  # what a real step finds out, and pays for
    forced = draft.forced_accepted if draft.forced_accepted is not None else [0] * len(draft.lengths)
    return _accept(best, torch.tensor(forced, dtype=torch.int64))


def _best(logits: Tensor) -> Tensor:
    """The argmax, on the host: what follows is less work than launching kernels for it."""
    return logits.argmax(dim=-1).cpu()


def _agreeing(best: Tensor, draft: Draft) -> Tensor:
    return _leading_true(best[:, :-1] == draft.token_ids.cpu(), torch.tensor(draft.lengths))


def _accept(best: Tensor, accepted: Tensor) -> Tensor:
    return torch.stack([accepted, best.gather(1, accepted[:, None])[:, 0]])


def accept_sampling(
    logits: Tensor, draft: Draft, *, temperature: float = 1.0, top_p: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Speculative sampling (Leviathan et al. 2023): the output is distributed as the target's own samples.

    Draft x at a position is kept with probability min(1, p(x) / q(x)); at the first rejection the token is drawn
    from the positive part of p - q, after a fully kept draft from p. ``temperature`` and ``top_p`` shape p only:
    q (``draft.probs``) is what the drafter really sampled from; a draft without probs has q(x) = 1. In a tree, whose
    nodes are chosen and not drawn, that comes to drawing from p at every node and following the draws.
    The random numbers are ``draft.uniforms``, each request's own, or come from ``generator`` where a draft has none.

    Returns int64 [2, batch_size]. Raises ValueError for a temperature that is not positive or top_p outside (0, 1].
    """
    target_probs = sampling_probs(logits, temperature=temperature, top_p=top_p)
    if draft.uniforms is None:
        uniform = torch.rand(logits.shape[:2], generator=generator, device=logits.device, dtype=torch.float64)
    else:
        uniform = draft.uniforms[:, : logits.shape[1]].to(logits.device)
    if draft.parents is not None:
        return _follow_tree(draw(target_probs, uniform), draft)
    tokens = draft.token_ids.to(logits.device)
    num_drafts = tokens.shape[1]
    p_draft = target_probs[:, :num_drafts].gather(2, tokens[..., None])[..., 0]
    q_draft = None if draft.probs is None else draft.probs.gather(2, tokens[..., None])[..., 0]
    threshold = uniform[:, 1:] if q_draft is None else uniform[:, 1:] * q_draft
    lengths = torch.tensor(draft.lengths, device=logits.device)
    accepted = _leading_true(threshold < p_draft, lengths)

    rows = torch.arange(len(tokens), device=logits.device)
    final = target_probs[rows, accepted]
    if num_drafts:
        rejected, place = (accepted < lengths)[:, None], accepted.clamp(max=num_drafts - 1)
        if draft.probs is None:
            residual = final.scatter(1, tokens[rows, place][:, None], 0.0)
        else:
            residual = (final - draft.probs[rows, place]).clamp(min=0)
        # p = q to the last bit leaves no residual; then p itself is the right distribution.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, final)
        final = torch.where(rejected, residual, final)
    return torch.stack([accepted, draw(final, uniform[:, 0])])


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens ``[...]`` of distributions ``[..., vocab_size]``: where their cumulative sums pass ``uniform`` (float64).

    The sums are float64, so that a token of any float32 probability can come out. A draw depends on its own row alone,
    and the host does not wait for it. A row that is no distribution (NaN) draws ``vocab_size``, which no lookup takes.
    """
    below = probs.double().cumsum(dim=-1)
    return torch.searchsorted(below, uniform[..., None] * below[..., -1:], right=True)[..., 0]


def sampling_probs(logits: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Softmax at a temperature, cut to the smallest set of tokens that holds ``top_p``. fp32, shape of ``logits``."""
    if not temperature > 0:
        raise ValueError(f"temperature: wanted a number above 0, got {temperature!r}; greedy is accept_greedy")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: wanted a number in (0, 1], got {top_p!r}")
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p == 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p  # the token that crosses top_p stays in
    kept = probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def tree_rows(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Masks (`AttentionSpec.tree`) and depths of the last token and a tree's nodes, both int64 [batch_size, nodes + 1].

    Made on the host: a level of a tree is too little work for a device.
    """
    masks, depths = [], []
    for row in parents.tolist():
        seen, depth = [1], [0]
        for place, parent in enumerate(row):
            seen.append(seen[parent + 1] | 1 << place + 1)
            depth.append(depth[parent + 1] + 1)
        masks.append([mask - (1 << 64) if mask >> 63 else mask for mask in seen])  # bit 63 is the sign
        depths.append(depth)
    return torch.tensor(masks, device=parents.device), torch.tensor(depths, device=parents.device)


def _follow_tree(chosen: Tensor, draft: Draft) -> Tensor:
    """From the root on to the child that the target chose, as long as there is one. int64 [2 + depth, batch_size].

    chosen : [batch_size, nodes + 1], the target's token after the last token and after each node.
    """
    assert draft.parents is not None
    parents, tokens = draft.parents.to(chosen.device), draft.token_ids.to(chosen.device)
    here = torch.full_like(chosen[:, 0], -1)
    accepted, path = torch.zeros_like(here), []
    going = torch.ones_like(here, dtype=torch.bool)
    for _ in range(draft.depth):
        wanted = chosen.gather(1, here[:, None] + 1)
        child = (parents == here[:, None]) & (tokens == wanted)
        going = going & child.any(dim=1)
        here = torch.where(going, child.long().argmax(dim=1), here)
        accepted = accepted + going
        path.append(here)
    return torch.stack([accepted, chosen.gather(1, here[:, None] + 1)[:, 0], *path])


def _leading_true(agrees: Tensor, lengths: Tensor) -> Tensor:
    """Length of the leading run of agreement [batch_size], padding never counted."""
    inside = torch.arange(agrees.shape[1], device=agrees.device)[None, :] < lengths[:, None]
    return (agrees & inside).long().cumprod(dim=1).sum(dim=1)
