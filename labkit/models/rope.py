"""Rotary position embedding as a product of complex numbers: one operation for all heads of q and k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.shapes import ModelShape


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow rotary frequencies (``rope_type`` "llama3" in a checkpoint's config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: Tensor) -> Tensor:
        """Radians per token, divided by `factor` where a turn takes longer than the original context allows."""
        turns = self.original_max_position_embeddings * frequencies / (2 * torch.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


def rope_table(shape: ModelShape, scaling: RopeScaling | None, device: str | torch.device = "cpu") -> Tensor:
    """complex64 ``[max_context_len, head_dim / 2]``; from float64: float32 angles are coarse at long contexts.

    Pairs beyond `rotary_dim` do not turn.
    """
    rotary_dim = shape.rotary_dim or shape.head_dim
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    frequencies = shape.rope_theta ** (-steps / rotary_dim)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    frequencies = torch.nn.functional.pad(frequencies, (0, (shape.head_dim - rotary_dim) // 2))
    angles = torch.outer(torch.arange(shape.max_context_len, dtype=torch.float64, device=device), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def pairs_from_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder rows so that the rotary pair (i, i + head_dim / 2) of each head becomes (2i, 2i + 1): one complex number.

    q and k take the same order, so their products stay what they were.
    """
    rows = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
