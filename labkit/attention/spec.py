"""What an attention call computes beside its shapes, and the form of what a backend makes of it."""

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What to compute beside the shapes. The mask is lower-right aligned and causal unless `tree` or `causal` say else.

    sm_scale : Multiplies the logits; above 0, default ``1 / sqrt(head_dim)``.
    max_splits : Caps the KV splits of the backends that split; the others ignore it, as they would an engine's flag.
    window : Keys a row sees at most, its own included; None: all.
    tree : int64 ``[batch_size, q_len]``, `q_len` at most 64: bit j of entry i is set where new token i sees new token
        j. A token may only see itself and tokens before it; one that sees no new token (padding) is fully masked. All
        others see the whole context.
    causal : False: every new token sees all new tokens, as in the block of a block drafter. A `tree` goes first.
    """

    sm_scale: float | None = None
    return_lse: bool = False
    max_splits: int | None = None
    window: int | None = None
    tree: Tensor | None = None
    causal: bool = True

    @property
    def window_left(self) -> int:
        """Keys before its own that a row sees at most, as libraries count them; -1: all."""
        return -1 if self.window is None else self.window - 1

    def scale(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale


DEFAULT_SPEC = AttentionSpec()


class Run(Protocol):
    """Attention of `q` over one layer of the prepared cache, into `out` (and `lse`).

    It may have a method ``replan()``, which takes over new lengths of the cache without a new launch configuration (the
    spec's tree is then read where it lies, since another may stand there), and one ``plan()``, which makes the metadata
    of a step again, as an engine does in every step.
    """

    def __call__(self, q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None: ...
