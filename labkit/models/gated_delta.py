"""Gated-delta layers of hybrid decoders: weights, and the states that a rejection needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.models.linear import Linear
from labkit.models.norm import RMSNorm
from labkit.shapes import ModelShape

CONV_WIDTH = 4


class DeltaLayer(NamedTuple):
    """Weights of one layer. The projections' rows: q, k and v channels, gate z, beta, input of the decay, padding."""

    attention_norm: RMSNorm
    projections: Linear
    conv_weight: Tensor  # [CONV_WIDTH, channels], the oldest token first
    log_rate: Tensor  # float32 [value heads]
    time_bias: Tensor  # float32 [value heads]
    value_norm: Tensor  # [delta_head_dim]
    attention_out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


def delta_weights(
    shape: ModelShape, get: Callable[..., Tensor], linear: Callable[[Tensor, Tensor | None], Linear]
) -> tuple[Linear, Tensor, Tensor, Tensor, Tensor, Linear]:
    """What is special in the layer; ``get(name, *size)`` yields a tensor by its checkpoint name, `linear` a product."""
    hidden, channels, num_heads = shape.hidden_size, shape.delta_channels, shape.num_delta_value_heads
    value_width = num_heads * shape.delta_head_dim
    sizes = {"qkv": channels, "z": value_width, "b": num_heads, "a": num_heads}
    rows = [get(f"linear_attn.in_proj_{name}.weight", size, hidden) for name, size in sizes.items()]
    padding = -sum(sizes.values()) % 64  # whole tiles for the matrix product
    rows.append(torch.zeros(padding, hidden, dtype=rows[0].dtype, device=rows[0].device))
    conv = get("linear_attn.conv1d.weight", channels, 1, CONV_WIDTH)[:, 0].T.contiguous()
    return (
        linear(torch.cat(rows), None),
        conv,
        get("linear_attn.A_log", num_heads).float(),
        get("linear_attn.dt_bias", num_heads).float(),
        get("linear_attn.norm.weight", shape.delta_head_dim),
        linear(get("linear_attn.out_proj.weight", hidden, value_width), None),
    )


class DeltaState:
    """States of all gated-delta layers after each token of the last step, so that a rejection only picks another one.

    states : float32 ``[layers, batch_size, max_q_len, value heads, delta_head_dim (key), delta_head_dim (value)]``.
    columns : ``[layers, batch_size, 3 + max_q_len, channels]``, raw inputs of the convolution: the three before the
        last step, then its tokens.
    slot, num_kept : int32 ``[batch_size]``: the valid state, and the tokens of the last step that were kept.
    """

    def __init__(
        self, shape: ModelShape, batch_size: int, max_q_len: int, dtype: torch.dtype, device: str | torch.device
    ):
        heads, dim = shape.num_delta_value_heads, shape.delta_head_dim
        self.max_q_len = max_q_len
        size = (shape.num_delta_layers, batch_size, max_q_len, heads, dim, dim)
        self.states = torch.zeros(size, device=device)
        columns = (shape.num_delta_layers, batch_size, CONV_WIDTH - 1 + max_q_len, shape.delta_channels)
        self.columns = torch.zeros(columns, dtype=dtype, device=device)
        self.slot = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.num_kept = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def start_prompt(self, request: int, *, is_new: bool) -> None:
        """Put the valid state and columns of a request to the front, or zeros, for a prompt to go on from there."""
        slot, kept = int(self.slot[request]), int(self.num_kept[request])
        states, columns = self.states[:, request], self.columns[:, request]
        states[:, 0] = 0 if is_new else states[:, slot]
        columns[:, : CONV_WIDTH - 1] = 0 if is_new else columns[:, kept : kept + CONV_WIDTH - 1].clone()
        self.slot[request] = self.num_kept[request] = 0

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Go on after the first `num_tokens` (1 or more) of the last step of each request."""
        kept = torch.tensor(num_tokens, dtype=torch.int32)
        self.num_kept.copy_(kept)
        self.slot.copy_(kept - 1)
