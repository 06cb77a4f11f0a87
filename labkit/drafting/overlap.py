"""How much the few best tokens of a drafter and of its target have in common behind each token of a greedy text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.accept import AcceptRule
from labkit.drafting.matches import Matches
from labkit.speculation import Draft, Generation

# The report that judges pairs by their overlap names no k. A chain uses the best token, our trees the best 4 of a node:
# 5 holds both, and one token more or less moves the overlap at a place by 0.2.
TOP_K = 5


class TopTokens:
    """An accept rule that also keeps which ``TOP_K`` tokens the target held most probable behind every token."""

    def __init__(self, rule: AcceptRule):
        self._rule = rule
        self._passes: list[Tensor] = []  # of each pass [batch_size, q_len or depth + 1, TOP_K]

    def __call__(self, logits: Tensor, draft: Draft) -> Tensor:
        result = self._rule(logits, draft)
        best = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1).indices
        if draft.parents is not None:  # rows of the nodes that were followed, behind the last token's
            rows = torch.cat([torch.zeros_like(result[:1]), result[2:] + 1]).T
            best = best.gather(1, rows[..., None].to(best.device).expand(-1, -1, best.shape[-1]))
        self._passes.append(best)
        return result

    def of(self, texts: Sequence[Generation]) -> list[list[list[int]]]:
        """Text -> output token -> the target's best tokens there, best first. ``texts``: what the rule accepted."""
        prefill, *passes = (best.tolist() for best in self._passes)
        found = [list(row) for row in prefill]
        for index, best in enumerate(passes):  # a request is in every pass until it ends
            active = [number for number, text in enumerate(texts) if index < len(text.steps)]
            for number, row in zip(active, best, strict=True):
                found[number] += row[: texts[number].steps[index].num_accepted_tokens + 1]
        return [tokens[: len(text.output_ids)] for tokens, text in zip(found, texts, strict=True)]


def overlap_columns(match: Matches, text: Generation, best: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """The columns of one text, over the output tokens but the first; None for a drafter without a distribution.

    best : of `TopTokens.of`. Places at which the drafter had no room to draft are left out.
    """
    places = [
        (set(drafted), set(wanted), token)
        for drafted, wanted, token in zip(match.top_ids, best[1:], text.output_ids[1:], strict=True)
        if drafted
    ]
    if not places:
        return {"top_k_overlap": None, "top_k_hit": None}
    shared = sum(len(drafted & wanted) for drafted, wanted, _ in places)
    hits = sum(token in drafted for drafted, _, token in places)
    return {"top_k_overlap": shared / (TOP_K * len(places)), "top_k_hit": hits / len(places)}
