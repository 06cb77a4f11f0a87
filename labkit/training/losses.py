"""What both heads learn from a batch: the target's probabilities at each step of a draft."""

import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.training import heads
from labkit.training.checkpoints import BLOCK_SIZE

DRAFT_STEPS = 5
_STEP_WEIGHT, _BLOCK_DECAY = 0.9, 4.0
_MAX_ROWS = 24_576  # of a batch that the loss of one draft step is taken over


class Losses:
    """The loss of a head on a batch, and the share of positions at which its best token is the target's, by step.

    head_rows : ``[draft vocabulary, hidden_size]``, rows of the target's output head.
    in_vocabulary : bool ``[vocabulary]``. mask_embedding : ``[hidden_size]``, of the block head's masks.
    """

    def __init__(self, head_rows: Tensor, in_vocabulary: Tensor, mask_embedding: Tensor, rng: random.Random):
        self.head_rows, self.in_vocabulary, self.mask_embedding = head_rows, in_vocabulary, mask_embedding
        self.device, self.rng = head_rows.device, rng

    def __call__(self, net: heads.Net, batch: heads.Batch) -> tuple[Tensor, list[Tensor]]:
        if isinstance(net, heads.AutoregressiveNet):
            return self._autoregressive_loss(net, batch)
        return self._block_loss(net, batch)

    def _predictable(self, batch: heads.Batch, places: Tensor) -> Tensor:
        """Whether a token at these positions exists and is in the draft vocabulary, float32."""
        tokens = batch.token_ids.gather(1, places.flatten(1).clamp(max=batch.token_ids.shape[1] - 1)).view(places.shape)
        lens = batch.lens.view(-1, *[1] * (places.dim() - 1))
        return ((places < lens) & self.in_vocabulary[tokens]).float()

    def _rows(self, states: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Loss over the rows that count, at most `_MAX_ROWS` of them, and whether the best token is the target's."""
        rows = weight.flatten().nonzero()[:, 0]
        if len(rows) > _MAX_ROWS:
            rows = rows[:: -(-len(rows) // _MAX_ROWS)]
        taught = teacher.flatten(0, -2)[rows]
        logits = F.linear(states.flatten(0, -2)[rows], self.head_rows)
        kept = weight.flatten()[rows]
        return heads.soft_cross_entropy(logits, taught, kept), logits.detach().argmax(dim=-1) == taught.argmax(dim=-1)

    def _autoregressive_loss(self, net: heads.AutoregressiveNet, batch: heads.Batch) -> tuple[Tensor, list[Tensor]]:
        predictable = self._predictable(batch, batch.window + 2)
        total, right = torch.zeros((), device=self.device), []
        for step, states in enumerate(net.states(batch, DRAFT_STEPS)):
            weight = F.pad(predictable[:, step:], (step, 0))  # the first entries have no draft so long behind them
            loss, agrees = self._rows(net.norm("norm", states), batch.teacher, weight)
            total = total + _STEP_WEIGHT**step * loss
            right.append(agrees.float().mean())
        return total / sum(_STEP_WEIGHT**step for step in range(DRAFT_STEPS)), right

    def _block_loss(self, net: heads.BlockNet, batch: heads.Batch) -> tuple[Tensor, list[Tensor]]:
        window = batch.teacher.shape[1]
        num_blocks = max(1, window // 6)
        # Anchors are drawn on the host: the same on every device.
        shares = torch.tensor([[self.rng.random() for _ in range(num_blocks)] for _ in range(len(batch.first))])
        places = (shares.to(self.device) * (batch.lens - batch.first - 2)[:, None].clamp(min=1)).long()
        anchors = batch.first[:, None] + 1 + places
        states = net.states(batch, anchors, self.mask_embedding, BLOCK_SIZE)
        rows = torch.arange(len(anchors), device=self.device)[:, None]
        total, norm, right = torch.zeros((), device=self.device), 0.0, []
        for step in range(1, BLOCK_SIZE):
            teacher = batch.teacher[rows, (places + step - 1).clamp(max=window - 1)]
            decay = math.exp(-(step - 1) / _BLOCK_DECAY)
            loss, agrees = self._rows(states[:, :, step - 1], teacher, self._predictable(batch, anchors + step))
            total, norm = total + decay * loss, norm + decay
            right.append(agrees.float().mean())
        return total / norm, right
