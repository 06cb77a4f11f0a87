"""What both heads learn from a batch: the target's probabilities at each step of a draft."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.training import heads
from labkit.training.checkpoints import BLOCK_SIZE

DRAFT_STEPS = 5
_STEP_WEIGHT, _BLOCK_DECAY = 0.9, 4.0
_ENTRIES_PER_BLOCK = 6  # of an answer, for one block that the block head learns from
_PART_ROWS = 8192  # whose logits are there at the same time


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted mean of ``-sum(p * log softmax(states @ head_rows.T))``, and the share of right best tokens.

    The output head learns nothing, so the gradient of the states is made on the way and no logits are kept. All that it
    takes of the target's probabilities p is ``p @ head_rows``, which is as wide as a state.
    states, mean_row : ``[rows, hidden_size]``, the second ``p @ head_rows``. best : int64 ``[rows]``, the place of the
        largest p. weight : float32 ``[rows]``.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head_rows: Tensor, mean_row: Tensor, best: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        share = weight / weight.sum().clamp(min=1.0)
        loss, right = torch.zeros((), device=states.device), torch.zeros((), device=states.device)
        gradient = torch.empty_like(states)
        for part in (slice(start, start + _PART_ROWS) for start in range(0, len(states), _PART_ROWS)):
            logits = F.linear(states[part], head_rows)
            probs = logits.softmax(dim=-1, dtype=logits.dtype)  # summed in float32 within
            top, place = logits.max(dim=-1, keepdim=True)
            log_sum = (top.float() - probs.gather(-1, place).float().log())[:, 0]
            mean_logit = (states[part].float() * mean_row[part].float()).sum(dim=-1)
            loss += ((log_sum - mean_logit) * share[part]).sum()
            right += ((place[:, 0] == best[part]) * share[part]).sum()
            gradient[part] = ((probs @ head_rows).float() - mean_row[part]) * share[part, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, loss: Tensor, right: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * loss).to(gradient.dtype), None, None, None, None


class Losses:
    """The loss of a head on a batch, and the share of entries at which its best token is the target's, by step.

    head_rows : ``[draft vocabulary, hidden_size]``, rows of the target's output head.
    in_vocabulary : bool ``[vocabulary]``. mask_embedding : ``[hidden_size]``, of the block head's masks.
    """

    def __init__(self, head_rows: Tensor, in_vocabulary: Tensor, mask_embedding: Tensor):
        self.head_rows, self.in_vocabulary, self.mask_embedding = head_rows, in_vocabulary, mask_embedding
        self.device = head_rows.device

    def __call__(self, net: heads.Net, batch: heads.Batch, shares: Tensor) -> tuple[Tensor, Tensor]:
        """shares : float32 ``[batch_size, blocks]`` in [0, 1), where in the answers blocks begin (`num_blocks`)."""
        if isinstance(net, heads.AutoregressiveNet):
            return self._autoregressive_loss(net, batch)
        return self._block_loss(net, batch, shares)

    def _predictable(self, batch: heads.Batch, places: Tensor) -> Tensor:
        """Whether a token at these positions exists and is in the draft vocabulary, float32."""
        tokens = batch.token_ids.gather(1, places.flatten(1).clamp(max=batch.token_ids.shape[1] - 1)).view(places.shape)
        lens = batch.lens.view(-1, *[1] * (places.dim() - 1))
        return ((places < lens) & self.in_vocabulary[tokens]).float()

    def _step_loss(self, states: Tensor, taught: tuple[Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        mean_row, best = taught
        rows = (states.flatten(0, -2), self.head_rows, mean_row.flatten(0, -2), best.flatten(), weight.flatten())
        return SoftCrossEntropy.apply(*rows)

    def _autoregressive_loss(self, net: heads.AutoregressiveNet, batch: heads.Batch) -> tuple[Tensor, Tensor]:
        predictable = self._predictable(batch, batch.window + 2)
        total, right = torch.zeros((), device=self.device), []
        for step, states in enumerate(net.states(batch, DRAFT_STEPS)):
            weight = F.pad(predictable[:, step:], (step, 0))  # the first entries have no draft so long behind them
            loss, agrees = self._step_loss(net.norm("norm", states), (batch.mean_row, batch.best), weight)
            total = total + _STEP_WEIGHT**step * loss
            right.append(agrees)
        return total / sum(_STEP_WEIGHT**step for step in range(DRAFT_STEPS)), torch.stack(right)

    def _block_loss(self, net: heads.BlockNet, batch: heads.Batch, shares: Tensor) -> tuple[Tensor, Tensor]:
        window = batch.best.shape[1]
        places = (shares * (batch.lens - batch.first - 2)[:, None].clamp(min=1)).long()
        anchors = batch.first[:, None] + 1 + places
        states = net.states(batch, anchors, self.mask_embedding, BLOCK_SIZE)
        rows = torch.arange(len(anchors), device=self.device)[:, None]
        total, norm, right = torch.zeros((), device=self.device), 0.0, []
        for step in range(1, BLOCK_SIZE):
            entry = (places + step - 1).clamp(max=window - 1)
            taught = batch.mean_row[rows, entry], batch.best[rows, entry]
            decay = math.exp(-(step - 1) / _BLOCK_DECAY)
            loss, agrees = self._step_loss(states[:, :, step - 1], taught, self._predictable(batch, anchors + step))
            total, norm = total + decay * loss, norm + decay
            right.append(agrees)
        return total / norm, torch.stack(right)


def num_blocks(window: int) -> int:
    """Blocks of an answer that one batch learns from."""
    return max(1, window // _ENTRIES_PER_BLOCK)
