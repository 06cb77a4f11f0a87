"""A target whose passes are replays of CUDA graphs, one per query length and backend, as engines run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.models.decoder import Decoder
from labkit.models.gated_delta import DeltaState
from labkit.models.layers import Taps
from labkit.models.static_forward import StaticForward
from labkit.models.target import FilledTarget, ModelTarget
from labkit.speculation import Request


class GraphTarget(ModelTarget):
    """Prefills as `ModelTarget` does; a later pass is captured when it first occurs (or by `capture`), then replayed.

    A graph is planned for a full cache: the attention's splits stay what they are, and too many only find nothing to
    do. The logits of a pass lie in the graph's buffer and last until its next replay. On a CPU the interpreted kernels
    run one by one, for tests.

    max_q_len : the widest pass, for the states of a hybrid.

    Raises Unsupported in a pass: a draft tree of a hybrid, or an attention backend that must be prepared anew for other
    lengths, so that no graph serves it.
    """

    def __init__(self, decoder: Decoder, *, batch_size: int, max_q_len: int, **options: Any):
        super().__init__(decoder, batch_size=batch_size, **options)
        self._forwards: dict[tuple[tuple[int, ...], int, str, bool, bool], tuple[StaticForward, Tensor]] = {}
        self._delta: DeltaState | None = None
        self._before: tuple[list[int], int] = ([0] * batch_size, 1)  # lengths before the last pass, and its q_len
        if decoder.shape.num_delta_layers:
            args = (decoder.shape, batch_size, max_q_len, decoder.activation_dtype, decoder.device)
            self._delta = DeltaState(*args)

    def capture(self, backend: str, q_lens: Iterable[int], *, is_tree: bool = False) -> None:
        """Capture passes of all rows ahead, so that none of them is captured while it is timed."""
        for q_len in q_lens:
            self._captured(tuple(range(self.cache.batch_size)), q_len, backend, is_tree)

    def _captured(self, rows: tuple[int, ...], q_len: int, backend: str, is_tree: bool) -> tuple[StaticForward, Tensor]:
        """The forward of such passes, and where each token's states go: its row, and its place behind the context."""
        key = (rows, q_len, backend, self.writes_states, is_tree)
        if key not in self._forwards:
            device, active = self.decoder.device, self._view(rows)
            states = self._hidden.new_empty(len(rows), q_len, self._hidden.shape[2])
            lens = active.context_lens
            active.advance([self.max_context_len - q_len - held for held in lens])
            try:
                forward = StaticForward(
                    self.decoder, active, q_len=q_len, backend=backend, delta_state=self._delta,
                    pdl=active.k.is_cuda and torch.cuda.get_device_capability(device) >= (9, 0),
                    taps=Taps(self.taps, states) if self.writes_states else None, is_tree=is_tree,
                )  # fmt: skip
            finally:
                active.truncate(lens)
            forward.replan()
            if active.k.is_cuda:
                forward.capture()
            places = torch.tensor(rows, device=device)[:, None], torch.arange(q_len, device=device)
            self._forwards[key] = forward, torch.stack(torch.broadcast_tensors(*places))
        return self._forwards[key]

    def _keep_delta(self, lens: list[int]) -> None:
        """Pick the state behind the kept tokens of the last pass. A run that starts anew takes any: costs count."""
        before, q_len = self._before
        if self._delta is not None:
            self._delta.keep([min(max(now - then, 1), q_len) for now, then in zip(lens, before, strict=True)])

    def _forward(self, requests: Sequence[Request], tokens: Tensor, backend: str, **tree: Any) -> Tensor:
        rows, active = self._rolled_back(requests)
        lens = active.context_lens
        self._keep_delta(lens)
        self._before = (lens, tokens.shape[1])
        forward, places = self._captured(rows, tokens.shape[1], backend, bool(tree))
        forward.token_ids.copy_(tokens, non_blocking=True)
        if tree:
            forward.tree.copy_(tree["spec"].tree, non_blocking=True)
            forward.depths.copy_(tree["depths"], non_blocking=True)
        forward.replan()
        forward.replay()
        if forward.taps is not None:  # on the device, behind the replay: the host does not wait
            self._hidden[places[0], places[1] + forward.context_lens[:, None]] = forward.taps.out
        active.advance(tokens.shape[1])
        return forward.logits


class FilledGraphTarget(FilledTarget, GraphTarget):
    """A `GraphTarget` for costs at any context, filled like `FilledTarget`."""
