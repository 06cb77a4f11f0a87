"""Tiny seeded models with known behaviour: no weights, no cache, any vocabulary."""

import torch
from torch import Tensor

from labkit.speculation import Draft, Request


class ToyTarget:
    """Next-token logits that depend on the last two tokens through a seeded table; text falls into loops."""

    def __init__(self, vocab_size: int = 11, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)
        self.vocab_size = vocab_size
        self.num_passes = 0

    max_context_len = None

    def start(self, requests: list[Request]) -> Tensor:
        return torch.stack([self._next(request.token_ids) for request in requests])

    def verify(self, requests: list[Request], draft: Draft) -> Tensor:
        self.num_passes += 1
        rows = []
        for place, (request, drafted) in enumerate(zip(requests, draft.token_ids.tolist(), strict=True)):
            if draft.parents is not None:
                rows.append(self._tree(request.token_ids, drafted, draft.parents[place].tolist()))
                continue
            text = request.token_ids + drafted
            ends = range(len(request.token_ids), len(text) + 1)
            rows.append(torch.stack([self._next(text[:end]) for end in ends]))
        return torch.stack(rows)

    def _tree(self, text: list[int], drafted: list[int], parents: list[int]) -> Tensor:
        texts = [text]
        for token, parent in zip(drafted, parents, strict=True):
            texts.append([*texts[parent + 1], token])
        return torch.stack([self._next(path) for path in texts])

    def keep(self, requests: list[Request], nodes: list[list[int]]) -> None:
        self.kept = [list(chosen) for chosen in nodes]

    def decode(self, requests: list[Request]) -> Tensor:
        self.num_passes += 1
        return self.start(requests).unsqueeze(1)

    def _next(self, text: list[int]) -> Tensor:
        return self.table[text[-2] if len(text) > 1 else 0, text[-1]]


class OracleDrafter:
    """Proposes what a table says follows, right in the positions of ``right`` and wrong elsewhere."""

    name = "oracle"

    def __init__(self, target: ToyTarget, right: tuple[bool, ...]):
        self.target, self.right = target, right

    def start(self, requests: list[Request]) -> None:
        self.num_started = len(requests)

    def propose(self, requests: list[Request], k: int) -> Draft:
        rows = []
        for request in requests:
            text = list(request.token_ids)
            for position in range(k):
                best = int(self.target._next(text).argmax())
                text.append(best if self.right[position] else (best + 1) % self.target.vocab_size)
            rows.append(text[len(request.token_ids) :])
        return Draft.from_lists(rows)
