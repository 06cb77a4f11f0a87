"""Prompt lookup: draft what followed the last tokens the last time they were seen."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import InputError
from labkit.speculation import Draft, Request


class NgramDrafter:
    """Looks the longest suffix of up to ``max_ngram`` tokens up in the request's own text.

    The latest earlier occurrence wins; what followed it is the draft. No occurrence of at least ``min_ngram``
    tokens: an empty draft. The index is a dictionary per n, extended by the tokens of each step, so a lookup
    costs the same at any context length.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2):
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"min_ngram, max_ngram: wanted 1 <= min <= max, got {min_ngram} and {max_ngram}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._index: dict[int, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[int, int] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        self._index = {request.index: {} for request in requests}
        self._indexed = {request.index: 0 for request in requests}
        for request in requests:
            self._extend_index(request)

    def propose(self, requests: Sequence[Request], k: int) -> Draft:
        """Up to k tokens per request; a match near the end of the text continues into its own draft."""
        return Draft.from_lists([self._lookup(request, k) for request in requests])

    def _extend_index(self, request: Request) -> None:
        tokens, index = request.token_ids, self._index[request.index]
        # The n-gram that ends the text is left out: it would match itself and has no continuation yet.
        for end in range(self._indexed[request.index], len(tokens) - 1):
            for size in self.sizes:
                if end + 1 >= size:
                    index[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self._indexed[request.index] = len(tokens) - 1

    def _lookup(self, request: Request, k: int) -> list[int]:
        self._extend_index(request)
        tokens, index = request.token_ids, self._index[request.index]
        for size in self.sizes:
            found = index.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if found is not None:
                text = tokens[found : found + k]
                while len(text) < k:
                    text.append(text[len(text) - (len(tokens) - found)])
                return text
        return []
