"""Differentiable forward passes of the two heads, on parameters under their published names.

The autoregressive head is trained on its own outputs as it will be used (training-time test of EAGLE-3): step j of
a draft at every position of the answer in one pass. A position's query sees the keys of true states up to the
draft's root and those of the j drafted tokens behind it. The block head is trained on many blocks of each answer.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.shapes import ModelShape

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right, and the target's view of them.

    token_ids : int64 ``[batch_size, num_tokens]``.
    first : int64 ``[batch_size]``, position of each prompt's last token; the answer stands behind it.
    lens : int64 ``[batch_size]``, tokens of prompt and answer.
    embedded : ``[batch_size, num_tokens, hidden_size]``, the target's embeddings.
    states : ``[batch_size, num_tokens, taps * hidden_size]``, each dimension divided by its usual size.
    mean_row : ``[batch_size, window, hidden_size]``, the rows of the output head weighted with the target's
        probabilities; entry w is what it says about the token at ``first + w + 2``.
    best : int64 ``[batch_size, window]``, the place in the draft vocabulary of the target's most probable token.
    """

    token_ids: Tensor
    first: Tensor
    lens: Tensor
    embedded: Tensor
    states: Tensor
    mean_row: Tensor
    best: Tensor

    @property
    def window(self) -> Tensor:
        """Positions of the answer that a draft token is entered from, ``[batch_size, window]``."""
        return self.first[:, None] + torch.arange(self.best.shape[1], device=self.first.device)


def _random(generator: torch.Generator, *size: int, gain: float = 1.0) -> Tensor:
    return torch.randn(size, generator=generator) * gain * size[-1] ** -0.5


def _layer(prefix: str, shape: ModelShape, qkv_width: int, generator: torch.Generator) -> Parameters:
    hidden, mlp = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        f"self_attn.{x}_proj": (width, qkv_width) for x, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
    }
    sizes |= {"self_attn.o_proj": (hidden, q_width), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}
    sizes |= {"mlp.down_proj": (hidden, mlp)}
    gains = {"self_attn.o_proj": 0.5, "mlp.down_proj": 0.5}
    parameters = {
        f"{prefix}{name}.weight": _random(generator, *size, gain=gains.get(name, 1.0)) for name, size in sizes.items()
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {f"self_attn.{x}_norm": shape.head_dim for x in "qk"} if shape.qk_norm else {}
    return parameters | {f"{prefix}{name}.weight": torch.ones(width) for name, width in norms.items()}


def _ends(shape: ModelShape, num_taps: int, final_norm: Tensor, generator: torch.Generator, prefix: str) -> Parameters:
    """The fusion of the taps and the norms outside the layers; `final_norm` is the weight of the target's."""
    hidden = shape.hidden_size
    norms = {f"{prefix}hidden_norm.weight": torch.ones(hidden), "norm.weight": 0.25 * final_norm.clone().float()}
    return norms | {"fc.weight": _random(generator, hidden, num_taps * hidden)}


def init_autoregressive(shape: ModelShape, num_taps: int, final_norm: Tensor, generator: torch.Generator) -> Parameters:
    """Seeded parameters in the EAGLE-3 layout."""
    layer = _layer("midlayer.", shape, 2 * shape.hidden_size, generator)
    return layer | _ends(shape, num_taps, final_norm, generator, "midlayer.")


def init_block(shape: ModelShape, num_taps: int, final_norm: Tensor, generator: torch.Generator) -> Parameters:
    """Seeded parameters in the DFlash layout."""
    parameters: Parameters = {}
    for index in range(shape.num_layers):
        parameters |= _layer(f"layers.{index}.", shape, shape.hidden_size, generator)
    return parameters | _ends(shape, num_taps, final_norm, generator, "")


class _Net:
    """What both heads are computed with."""

    def __init__(self, parameters: Parameters, shape: ModelShape):
        self.p, self.shape = parameters, shape

    def norm(self, name: str, x: Tensor) -> Tensor:
        # One kernel where all has one dtype; it sums in float32.
        return F.rms_norm(x, (x.shape[-1],), self.p[f"{name}.weight"].to(x.dtype), self.shape.rms_norm_eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.p[f"{name}.weight"])

    def heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """A projection split into heads ``[.., num_heads, head_dim]``, turned by `positions` ``[..]``."""
        y = self.linear(name, x)
        y = y.view(*y.shape[:-1], -1, self.shape.head_dim)
        norm = name.replace("_proj", "_norm")
        if f"{norm}.weight" in self.p:
            y = self.norm(norm, y)
        return y if positions is None else rotate(y, positions, self.shape.rope_theta)

    def qkv(self, prefix: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (self.heads(f"{prefix}self_attn.{name}_proj", x, positions) for name in "qk")
        v = self.heads(f"{prefix}self_attn.v_proj", x, None)
        grouped = q.view(*q.shape[:-2], self.shape.num_kv_heads, -1, self.shape.head_dim)
        return grouped / math.sqrt(self.shape.head_dim), k, v

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{prefix}post_attention_layernorm", x)
        gate, up = (self.linear(f"{prefix}mlp.{name}_proj", normed) for name in ("gate", "up"))
        return x + self.linear(f"{prefix}mlp.down_proj", F.silu(gate) * up)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of ``[.., num_heads, head_dim]`` at `positions` ``[..]``, halves paired as Hugging Face does."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = (positions[..., None].double() * frequencies)[..., None, :]
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x.float().split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _behind(x: Tensor, steps: int) -> Tensor:
    """Entry w - steps in place of entry w along the window; entries before its start are zero."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (steps, 0))[:, : x.shape[1]]


class AutoregressiveNet(_Net):
    """Drafts of every position at once, as `labkit.drafting.autoregressive` would make them one by one."""

    def states(self, batch: Batch, num_steps: int) -> list[Tensor]:
        """What the head feeds back at each step of a draft, ``num_steps`` of ``[batch_size, window, hidden_size]``.

        Entry w of step j says something about the token at ``first + w + 2``; the first j entries mean nothing.
        """
        window = batch.window
        num_tokens = batch.token_ids.shape[1]
        places = window.clamp(max=num_tokens - 2)
        rows = torch.arange(len(window), device=window.device)[:, None]
        fused = self.linear("fc", batch.states)
        next_embedded = torch.cat([batch.embedded[:, 1:], batch.embedded[:, -1:]], dim=1)
        token_part = self.norm("midlayer.input_layernorm", next_embedded)
        positions = torch.arange(num_tokens, device=window.device).expand(len(window), -1)
        entered = torch.cat([token_part, self.norm("midlayer.hidden_norm", fused)], dim=-1)
        k_true = self.heads("midlayer.self_attn.k_proj", entered, positions)
        v_true = self.heads("midlayer.self_attn.v_proj", entered, None)
        tokens_here, state = token_part[rows, places], fused[rows, places]
        found: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(num_steps):
            if step:
                state = _behind(found[-1], 1)
            here = torch.cat([tokens_here, self.norm("midlayer.hidden_norm", state)], dim=-1)
            q, k, v = self.qkv("midlayer.", here, window)
            visible = positions[:, None] <= (window - step)[..., None]
            if step:
                keys, values = [*keys, k], [*values, v]
            attended = self._attend(q, k_true, v_true, visible, keys, values)
            out = state + self.linear("midlayer.self_attn.o_proj", attended)
            found.append(self.mlp("midlayer.", out))
        return found

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention over the true keys that are visible and, for each later step of the draft, one key on its path."""
        # Scores stay in the dtype of the queries, which the matrix product gives them, and in its layout.
        scores = torch.einsum("bwhgd,bthd->bhwgt", q, k)
        scores = scores.masked_fill(~visible[:, None, :, None], -math.inf)
        shifts = range(len(keys) - 1, -1, -1)
        own = [
            (q * _behind(key, n)[..., None, :]).sum(-1).permute(0, 2, 1, 3) for key, n in zip(keys, shifts, strict=True)
        ]
        probs = torch.cat([scores, *(score[..., None] for score in own)], dim=-1).softmax(dim=-1, dtype=v.dtype)
        true, *rest = probs.split([k.shape[1], *(1 for _ in own)], dim=-1)
        out = torch.einsum("bhwgt,bthd->bwhgd", true, v)
        for weight, value, n in zip(rest, values, shifts, strict=True):
            out = out + weight.transpose(1, 2) * _behind(value, n)[..., None, :]
        return out.flatten(2)


class BlockNet(_Net):
    """Blocks behind chosen tokens of each answer, as `labkit.drafting.block` would run them."""

    def states(self, batch: Batch, anchors: Tensor, mask_embedding: Tensor, block_size: int) -> Tensor:
        """Normed states of the masks ``[batch_size, blocks, block_size - 1, hidden_size]``.

        anchors : int64 ``[batch_size, blocks]``, positions of the last verified token of each block.
        """
        batch_size, num_blocks = anchors.shape
        rows = torch.arange(batch_size, device=anchors.device)[:, None]
        context = self.norm("hidden_norm", self.linear("fc", batch.states))
        num_tokens = batch.token_ids.shape[1]
        positions = torch.arange(num_tokens, device=anchors.device).expand(batch_size, -1)
        visible = (positions[:, None] < anchors[..., None])[:, :, None].expand(-1, -1, block_size, -1)
        hidden = mask_embedding.expand(batch_size, num_blocks, block_size, -1).clone()
        hidden[:, :, 0] = batch.embedded[rows, anchors.clamp(max=num_tokens - 1)]
        places = anchors[..., None] + torch.arange(block_size, device=anchors.device)
        for index in range(self.shape.num_layers):
            prefix = f"layers.{index}."
            k_context = self.heads(f"{prefix}self_attn.k_proj", context, positions)
            v_context = self.heads(f"{prefix}self_attn.v_proj", context, None)
            q, k, v = self.qkv(prefix, self.norm(f"{prefix}input_layernorm", hidden), places)
            scores = torch.einsum("bnrhgd,bthd->bhnrgt", q, k_context)
            scores = scores.masked_fill(~visible[:, None, :, :, None], -math.inf)
            own = torch.einsum("bnrhgd,bnshd->bhnrgs", q, k)
            probs = torch.cat([scores, own], dim=-1).softmax(dim=-1, dtype=v.dtype)
            behind, within = probs.split([num_tokens, block_size], dim=-1)
            out = torch.einsum("bhnrgt,bthd->bnrhgd", behind, v_context)
            out = out + torch.einsum("bhnrgs,bnshd->bnrhgd", within, v)
            hidden = self.mlp(prefix, hidden + self.linear(f"{prefix}self_attn.o_proj", out.flatten(3)))
        return self.norm("norm", hidden[:, :, 1:])


Net = AutoregressiveNet | BlockNet
# By layout: seeded parameters, and the forward pass over them.
INIT = {"autoregressive": init_autoregressive, "block": init_block}
NETS: dict[str, type[Net]] = {"autoregressive": AutoregressiveNet, "block": BlockNet}
