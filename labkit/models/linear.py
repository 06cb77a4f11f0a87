"""Linear layers behind one seam: a callable from ``[rows, in]`` to ``[rows, out]``."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """``x @ weight.T + bias`` with `weight` ``[out, in]`` as PyTorch stores it."""
    return partial(F.linear, weight=weight, bias=bias)
