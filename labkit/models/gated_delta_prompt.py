"""Gated-delta layers over the tokens of a prompt: the recurrence in chunks, as batched matrix products.

Inside a chunk, what the tokens add to the state solves a triangular system (the WY form); from chunk to chunk the state
passes through one affine map each. Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
"""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.models.gated_delta import CONV_WIDTH, DeltaLayer, DeltaState
from labkit.shapes import ModelShape

CHUNK = 64  # tokens
Rule = Callable[..., tuple[Tensor, Tensor]]


def prompt_rule(dtype: torch.dtype, device: torch.device) -> tuple[str, Rule]:
    """What runs the recurrence of a prompt, named. flash-linear-attention where installed, for 16 bits on a GPU."""
    if device.type == "cuda" and dtype != torch.float32 and find_spec("fla"):
        return f"fla-core {version('fla-core')} chunk_gated_delta_rule", fla_rule
    return "torch chunks", chunk_rule


def mix_prompt(layer: DeltaLayer, x: Tensor, states: DeltaState, request: int, index: int, shape: ModelShape) -> Tensor:
    """Normed input ``[tokens, hidden_size]`` of a request to mixed values ``[tokens, value heads * delta_head_dim]``.

    index : of the layer among the gated-delta layers. Its state and columns, which stand at the front of `states`
        (`DeltaState.start_prompt`), move behind the last token.
    """
    heads, key_heads, dim = shape.num_delta_value_heads, shape.num_delta_key_heads, shape.delta_head_dim
    product = layer.projections(x)
    sizes = [shape.delta_channels, heads * dim, heads, heads]
    qkv, z, beta, step, _ = product.split([*sizes, product.shape[1] - sum(sizes)], dim=1)
    columns, state = states.columns[index, request, : CONV_WIDTH - 1], states.states[index, request, 0]
    window = torch.cat([columns, qkv])
    columns.copy_(window[1 - CONV_WIDTH :])
    mixed = torch.zeros((), device=x.device)
    for place, weight in enumerate(layer.conv_weight):
        mixed = torch.addcmul(mixed, window[place : place + len(x)].float(), weight.float())
    qkv = F.silu(mixed).to(x.dtype).view(len(x), -1, dim)
    log_decay = -layer.log_rate.exp() * F.softplus(step.float() + layer.time_bias)
    _, rule = prompt_rule(x.dtype, x.device)
    value, after = rule(*qkv.split([key_heads, key_heads, heads], dim=1), log_decay, beta.float().sigmoid(), state)
    state.copy_(after)
    value = F.rms_norm(value.float(), (dim,), layer.value_norm.float(), shape.rms_norm_eps)
    return value.flatten(1).mul_(F.silu(z.float())).to(x.dtype)


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in float32.

    q, k : ``[tokens, key heads, dim]``, not yet of unit length. v : ``[tokens, heads, dim]``. log_decay, beta :
        ``[tokens, heads]``. state : ``[heads, dim (key), dim (value)]`` before the first token.

    Returns values ``[tokens, heads, dim]``, and the state behind the last token.
    """
    num_tokens, heads, dim = v.shape
    group = heads // k.shape[1]

    def chunked(x: Tensor) -> Tensor:
        """``[chunks, heads, CHUNK, ..]``; tokens of zeros at the end neither shrink the state nor add to it."""
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -num_tokens % CHUNK))
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    def unit(x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (dim,), eps=1e-6 / dim) * dim**-0.5
        return chunked(normed).repeat_interleave(group, 1)

    q, k, v = unit(q), unit(k), chunked(v.float())
    beta, total = chunked(beta)[..., None], chunked(log_decay).cumsum(-1)[..., None]
    # What is left, after token i, of what token j added; nothing of what comes later.
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (total - total.mT).masked_fill_(future, -torch.inf).exp_()
    # A token adds its key times `added - erased @ state`, where the state is the one before the chunk.
    sides = torch.cat([beta * v, beta * total.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(beta * between * (k @ k.mT), sides, upper=False, unitriangular=True)
    added, erased = solved.split(dim, dim=-1)
    left = ((total[:, :, -1:] - total).exp() * k).mT
    shift, turn = left @ added, -(left @ erased)
    turn.diagonal(dim1=-2, dim2=-1).add_(total[:, :, -1].exp())
    before = torch.empty(len(v) + 1, *state.shape, device=v.device)
    before[0] = state
    for chunk in range(len(v)):
        torch.baddbmm(shift[chunk], turn[chunk], before[chunk], out=before[chunk + 1])
    added = added - erased @ before[:-1]
    value = (total.exp() * q) @ before[:-1] + (between * (q @ k.mT)) @ added
    return value.transpose(1, 2).flatten(0, 1)[:num_tokens] * dim**-0.5, before[-1]


def fla_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `chunk_rule`, by flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    value, after = chunk_gated_delta_rule(
        *(x[None].contiguous() for x in (q, k, v, log_decay, beta)),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return value[0], after[0]
