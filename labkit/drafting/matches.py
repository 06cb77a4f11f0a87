"""What a drafter would have had accepted at every position of a greedy text, and every smaller k from that.

At temperature 0 the text depends neither on the drafter nor on k, and none of our drafters remembers where its earlier
drafts ended. So one pass that drafts at each output position is enough: a run with k drafts jumps through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.speculation import Drafter, Generation, Request, Step


@dataclass(frozen=True)
class Matches:
    """Drafts behind each output token but the last, for one prompt.

    drafted, matched : tokens proposed there (of a tree: its depth), and how many the text goes on with.
    top_ids : the drafter's most probable tokens there, where its drafts carry them.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    drafted: list[int]
    matched: list[int]
    top_ids: list[list[int]] = field(default_factory=list)


def record_matches(drafter: Drafter, texts: Sequence[Generation], k: int) -> list[Matches]:
    """Draft k tokens behind every output token of greedy texts, all texts together.

    A drafter that reads hidden states must belong to the target that has just made these texts.
    """
    requests = [
        Request(i, [*text.prompt_ids, *text.output_ids[:1]], len(text.prompt_ids)) for i, text in enumerate(texts)
    ]
    found = [Matches(len(text.prompt_ids), len(text.output_ids), [], []) for text in texts]
    drafter.start(requests)
    place = 1
    while active := [request for request in requests if len(texts[request.index].output_ids) > place]:
        draft = drafter.propose(active, k)
        parents = None if draft.parents is None else draft.parents.tolist()
        top_ids = [[]] * len(active) if draft.top_ids is None else draft.top_ids.tolist()
        for row, (request, tokens) in enumerate(zip(active, draft.token_ids.tolist(), strict=True)):
            rest = texts[request.index].output_ids[place:]
            if parents is None:
                length = draft.lengths[row]
                kept = next((i for i in range(length) if i >= len(rest) or tokens[i] != rest[i]), length)
            else:
                length, kept = draft.depth, _longest_path(tokens, parents[row], rest)
            found[request.index].drafted.append(length)
            found[request.index].matched.append(kept)
            found[request.index].top_ids.append(top_ids[row])
            request.token_ids.append(rest[0])
        place += 1
    return found


def _longest_path(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    depth, here = 0, -1
    while depth < len(text):
        child = next((i for i, p in enumerate(parents) if p == here and tokens[i] == text[depth]), None)
        if child is None:
            break
        depth, here = depth + 1, child
    return depth


def simulate(matches: Matches, k: int, max_new_tokens: int) -> list[Step]:
    """The steps of the loop with up to k drafts on this text, exactly as it would count them."""
    steps: list[Step] = []
    place = 1  # output tokens so far; the prefill yields the first
    while place < matches.num_output_tokens:
        limit = min(k, max_new_tokens - place - 1)
        drafted = min(matches.drafted[place - 1], limit)
        accepted = min(matches.matched[place - 1], drafted)
        cut = limit < k or place + accepted + 1 > matches.num_output_tokens
        context_len = matches.num_prompt_tokens + place - 1
        steps.append(Step(len(steps), 1, context_len, drafted, accepted, cut, {}))
        place += accepted + 1
    return steps
