"""Losses and gradients of the heads on batches of one padded size; on a GPU one CUDA graph for each size."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.timing import captured
from labkit.training import heads
from labkit.training.losses import Losses, num_blocks
from labkit.training.states import BatchSize, StateStore

Results = dict[str, tuple[Tensor, Tensor]]  # layout -> loss, share of right tokens by step


class Trained(Protocol):
    """What a step needs of a head in training."""

    layout: str
    parameters: heads.Parameters

    @property
    def net(self) -> heads.Net:
        """The head on its present parameters."""


class GradientSteps:
    """Gradients of all heads, left in the parameters' `grad`, for batches of a store.

    A step is some thousand small kernels: the host, not the device, would decide how long it takes.
    """

    def __init__(self, store: StateStore, trained: Sequence[Trained], losses: Losses, *, half: bool):
        self.store, self._trained, self._losses, self._half = store, trained, losses, half
        self._device = losses.device
        self._graphs: dict[BatchSize, tuple[Tensor, Tensor, Results, Callable[[], object]]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for head in trained:
            for parameter in head.parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # where graphs write

    def __call__(self, rows: Sequence[int], size: BatchSize, generator: torch.Generator) -> Results:
        """Run the batch; the results are overwritten by the next one.

        generator : of the host, so that blocks begin at the same places on every device.
        """
        shares = torch.rand(size.num_rows, num_blocks(size.window), generator=generator)
        if size not in self._graphs:
            self._graphs[size] = self._prepare(torch.tensor(rows).to(self._device), shares.to(self._device), size)
        row_input, share_input, results, run = self._graphs[size]
        row_input.copy_(torch.tensor(rows))
        share_input.copy_(shares)
        run()
        return results

    def losses_of(self, rows: Sequence[int], size: BatchSize, generator: torch.Generator) -> Results:
        """The same without gradients."""
        shares = torch.rand(size.num_rows, num_blocks(size.window), generator=generator).to(self._device)
        batch = self.store.batch(torch.tensor(rows).to(self._device), size)
        with torch.no_grad(), self._autocast():
            return {head.layout: self._losses(head.net, batch, shares) for head in self._trained}

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._half else contextlib.nullcontext()

    def _prepare(
        self, rows: Tensor, shares: Tensor, size: BatchSize
    ) -> tuple[Tensor, Tensor, Results, Callable[[], object]]:
        results: Results = {}

        def run() -> None:
            batch = self.store.batch(rows, size)
            for head in self._trained:
                for parameter in head.parameters.values():
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                with self._autocast():
                    loss, right = self._losses(head.net, batch, shares)
                loss.backward()
                results[head.layout] = (loss.detach(), right)

        if self._pool is None:
            return rows, shares, results, run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # libraries set themselves up outside a capture
        torch.cuda.current_stream().wait_stream(side)
        return rows, shares, results, captured(run, pool=self._pool)
