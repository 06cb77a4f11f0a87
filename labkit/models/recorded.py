"""A recorded greedy text as target: the draft/verify loop over it costs no forward pass.

At temperature 0 the output does not depend on the drafter or on k, so one generation per prompt is enough: every
further drafter and k runs the same loop against the recording and gets the counts it would have got live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.speculation import Draft, Request, tree_rows


class RecordedTarget:
    """Says at each position what the recorded text says there. One prompt; logits are one-hot.

    token_ids : prompt and output of a greedy generation. The loop must not run past its end: give the
        ``max_new_tokens`` and stop tokens of that generation.
    """

    max_context_len = None

    def __init__(self, token_ids: Sequence[int], vocab_size: int):
        self._token_ids, self._vocab_size = list(token_ids), vocab_size

    def start(self, requests: Sequence[Request]) -> Tensor:
        return self._one_hot(len(requests[0].token_ids), 1)[0]

    def verify(self, requests: Sequence[Request], draft: Draft) -> Tensor:
        said = self._one_hot(len(requests[0].token_ids), draft.token_ids.shape[1] + 1)
        return said if draft.parents is None else said[:, tree_rows(draft.parents)[1][0]]

    def keep(self, requests: Sequence[Request], nodes: Sequence[Sequence[int]]) -> None:
        """There is no cache."""

    def decode(self, requests: Sequence[Request]) -> Tensor:
        return self._one_hot(len(requests[0].token_ids), 1)

    def _one_hot(self, position: int, q_len: int) -> Tensor:
        """Logits [1, q_len, vocab_size] for the tokens from ``position`` on; token 0 behind the end of the text."""
        said = (self._token_ids[position : position + q_len] + [0] * q_len)[:q_len]
        return torch.nn.functional.one_hot(torch.tensor([said]), self._vocab_size).float()
