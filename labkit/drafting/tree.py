"""Draft trees: grown level by level from a head's best tokens, kept within a budget of nodes.

As EAGLE-2 does: of each level's candidates the most probable paths are grown on, and of all candidates the most
probable ones are drafted. A path is never more probable than its beginning, so what is kept is a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import InputError
from labkit.shapes import MAX_Q_LEN
from labkit.speculation import Draft

# Nodes [batch_size, frontier] of a level (their tokens; their parents' places in the frontier before, of no meaning at
# the first) -> log-probabilities [batch_size, frontier, vocabulary] of what follows each.
Expand = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TreeShape:
    """How a drafter branches.

    top_k : candidates per node, and nodes per level that are grown on.
    num_draft_nodes : nodes that are drafted, the root not counted.

    Raises InputError: below 1, or more nodes than a tree mask holds.
    """

    top_k: int
    num_draft_nodes: int

    def __post_init__(self) -> None:
        if self.top_k < 1 or not 1 <= self.num_draft_nodes < MAX_Q_LEN:
            wanted = f"top_k of 1 or more and 1 to {MAX_Q_LEN - 1} nodes"
            raise InputError(f"draft tree: wanted {wanted}, got top_k={self.top_k}, nodes={self.num_draft_nodes}")


def grow_tree(shape: TreeShape, depth: int, first: Tensor, expand: Expand, token_ids: Tensor | None) -> Draft:
    """A draft of the most probable paths of up to `depth` tokens.

    first : log-probabilities ``[batch_size, vocabulary]`` of what follows the root.
    token_ids : the target's id of each entry of that vocabulary; None: the same.
    """
    batch_size, top_k = len(first), min(shape.top_k, first.shape[-1])
    scores, ids = first.topk(top_k, dim=-1)
    tokens, parents, values = [ids], [torch.full_like(ids, -1)], [scores]
    frontier = torch.arange(top_k, device=first.device).expand(batch_size, -1)  # places in the level before
    offset = 0
    for _ in range(1, depth):
        level = tokens[-1].gather(1, frontier)
        grown = expand(level if token_ids is None else token_ids[level], frontier // top_k)
        best, ids = grown.topk(top_k, dim=-1)
        total = (values[-1].gather(1, frontier)[..., None] + best).flatten(1)
        parents.append((frontier + offset)[..., None].expand(-1, -1, top_k).flatten(1))
        offset += tokens[-1].shape[1]
        tokens.append(ids.flatten(1))
        values.append(total)
        frontier = total.topk(min(top_k, total.shape[1]), dim=-1).indices
    pool = (torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1))
    return _keep_best(shape.num_draft_nodes, depth, *pool, token_ids)


def _keep_best(
    budget: int, depth: int, tokens: Tensor, parents: Tensor, values: Tensor, token_ids: Tensor | None
) -> Draft:
    """The most probable nodes, parents before children, with their parents' new places."""
    count = min(budget, tokens.shape[1])
    # Stable: of equally probable nodes the earlier is kept, and a parent stands before its children.
    kept = values.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(dim=-1).values
    place = torch.full_like(tokens, -1).scatter_(1, kept, torch.arange(count, device=kept.device).expand_as(kept))
    above = parents.gather(1, kept)
    new_parents = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
    ids = tokens.gather(1, kept)
    ids = ids if token_ids is None else token_ids[ids]
    return Draft(ids.clone(), [count] * len(ids), parents=new_parents.clone(), depth=depth)
