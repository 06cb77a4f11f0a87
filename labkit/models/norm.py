"""RMSNorm. On the CPU PyTorch composes its own of eight small operations, which add up at one token per step."""

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    weight : in the dtype of the activations; its last dimension is the normalised one, earlier ones broadcast against
        `x`.
    """

    def __init__(self, weight: Tensor, eps: float):
        width = weight.shape[-1]
        self.weight, self.eps, self._width = weight, eps, width
        self._is_fused = weight.is_cuda or weight.dtype != torch.float32
        # sqrt(mean(x ** 2) + eps) = hypot(norm(x), sqrt(width * eps)) / sqrt(width)
        self._scaled_weight = weight * width**0.5
        self._offset = torch.tensor((width * eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_fused:
            return F.rms_norm(x, (self._width,), None, self.eps).mul_(self.weight)
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._offset)
        return x.div(length).mul_(self._scaled_weight)
