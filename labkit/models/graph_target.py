"""A target whose passes are replays of CUDA graphs, one per query length and backend, as engines run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.errors import Unsupported
from labkit.models.decoder import Decoder
from labkit.models.gated_delta import DeltaState
from labkit.models.static_forward import StaticForward
from labkit.models.target import FilledTarget
from labkit.speculation import Request


class GraphTarget(FilledTarget):
    """For costs at any context, like `FilledTarget`; a pass is captured when it first occurs, then replayed.

    max_q_len : the widest pass, for the states of a hybrid.

    Raises Unsupported in a pass: the attention backend must be prepared anew for other lengths, so no graph serves it.
    """

    def __init__(self, decoder: Decoder, *, batch_size: int, max_q_len: int, **options: Any):
        super().__init__(decoder, batch_size=batch_size, **options)
        if self.taps:
            raise Unsupported("heads read hidden states, which no captured forward keeps: wanted launch_mode eager")
        self._captured: dict[tuple[tuple[int, ...], int, str], StaticForward] = {}
        self._states: DeltaState | None = None
        self._before: tuple[list[int], int] = ([0] * batch_size, 1)  # lengths before the last pass, and its q_len
        if decoder.shape.num_delta_layers:
            args = (decoder.shape, batch_size, max_q_len, decoder.activation_dtype, decoder.device)
            self._states = DeltaState(*args)

    def _keep_states(self, lens: list[int]) -> None:
        """Pick the state behind the kept tokens of the last pass. A run that starts anew takes any: costs count."""
        before, q_len = self._before
        if self._states is not None:
            self._states.keep([min(max(now - then, 1), q_len) for now, then in zip(lens, before, strict=True)])

    def _forward(self, requests: Sequence[Request], tokens: Tensor, backend: str, **tree: Any) -> Tensor:
        if tree:
            raise Unsupported("trees have no captured forward: each has another mask")
        rows = tuple(self._row_of[request.index] for request in requests)
        active = self._view(rows)
        lens = [len(request.token_ids) - 1 for request in requests]
        active.truncate(lens)
        self._keep_states(lens)
        self._before = (lens, tokens.shape[1])
        key = (rows, tokens.shape[1], backend)
        if key not in self._captured:
            pdl = torch.cuda.get_device_capability(self.decoder.device) >= (9, 0)
            self._captured[key] = StaticForward(
                self.decoder, active, q_len=tokens.shape[1], backend=backend, pdl=pdl, delta_state=self._states
            )
            self._captured[key].capture()
        forward = self._captured[key]
        forward.token_ids.copy_(tokens, non_blocking=True)
        forward.replan()
        forward.replay()
        active.advance(tokens.shape[1])
        return forward.logits
