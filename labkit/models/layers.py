"""Transformer layers on labkit's attention and paged cache: what the decoder and the heads that read it are made of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention.api import DEFAULT_SPEC, AttentionSpec, prepare
from labkit.kv_cache import PagedKVCache
from labkit.models.device_place import DevicePlace
from labkit.models.gated_delta import DeltaLayer, DeltaState, delta_weights
from labkit.models.gated_delta_prompt import mix_prompt
from labkit.models.linear import Float8Linear, Linear, activation_dtype, make_linear, resolve_linear_backend
from labkit.models.norm import RMSNorm
from labkit.models.rope import RopeScaling, pairs_from_halves, rope_table
from labkit.shapes import MAX_Q_LEN, ModelShape

# Name and shape of a tensor in the layout of Hugging Face checkpoints -> its values, on any device, in any dtype.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]
# Rotary angles of so many requests are sliced one by one; of more they are gathered, which costs a copy of positions.
_MAX_SLICES = 16


class Taps(NamedTuple):
    """Hidden states to keep from a pass.

    layers : n = the residual stream after layer n, counted from 0 (``hidden_states[n + 1]`` of transformers); the
        number of layers = the output of the final norm.
    out : ``[batch_size, q_len, len(layers) * hidden_size]``, filled by the pass in the order of `layers`.
    """

    layers: Sequence[int]
    out: Tensor

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Copy ``[batch_size * q_len, hidden_size]`` if `layer` is tapped."""
        if layer in self.layers:
            width, place = hidden.shape[-1], self.layers.index(layer)
            self.out[..., place * width : (place + 1) * width] = hidden.view(*self.out.shape[:2], width)


class AttentionLayer(NamedTuple):
    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    attention_out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Layers:
    """RMSNorm, rotary embedding, GQA, SwiGLU; optional q/k norm (Qwen3), q/k/v bias (Qwen2).

    Keys are cached with interleaved rotary pairs, so a cache belongs to this class and not to other implementations.

    prefixes : where the tensors of each layer stand in `source`.
    linear_backend : how the linear layers run: one of `labkit.models.linear.LINEAR_BACKENDS`.
    qkv_width : input of the first layer's q, k and v; the hidden size when None.
    float8 : store the layers' matrices as float8_e4m3fn with a scale per output; all else keeps `dtype`.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: TensorSource,
        prefixes: Sequence[str],
        *,
        dtype: str,
        device: torch.device,
        rope_scaling: RopeScaling | None = None,
        linear_backend: str = "auto",
        qkv_width: int | None = None,
        float8: bool = False,
    ):
        self.shape, self.device, self._float8 = shape, device, float8
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._num_qk_heads = shape.num_qo_heads + shape.num_kv_heads
        self.linear_backend = resolve_linear_backend(linear_backend, shape, dtype, device.type)
        self.activation_dtype = activation_dtype(self.linear_backend, dtype)
        # Rows that pad a batch may stand behind the last position.
        padded = replace(shape, max_context_len=shape.max_context_len + MAX_Q_LEN)
        self.rope = rope_table(padded, rope_scaling, device)
        widths = [qkv_width or shape.hidden_size, *[shape.hidden_size] * (len(prefixes) - 1)]
        places = enumerate(zip(prefixes, widths, strict=True), start=1)
        self.layers = [self._build(source, prefix, width, place) for place, (prefix, width) in places]

    def load(self, tensor: Tensor) -> Tensor:
        """A weight in the stack's dtype, on its device."""
        return tensor.to(self.device, self.dtype)

    def norm(self, weight: Tensor) -> RMSNorm:
        """A norm of the activations."""
        return RMSNorm(self.load(weight).to(self.activation_dtype), self.shape.rms_norm_eps)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear layer as the stack's own run."""
        return Float8Linear(weight, bias) if self._float8 else make_linear(weight, bias, self.linear_backend)

    def _build(self, source: TensorSource, prefix: str, qkv_width: int, place: int) -> AttentionLayer | DeltaLayer:
        shape = self.shape
        hidden, mlp = shape.hidden_size, shape.intermediate_size
        q_width, kv_width = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def get(name: str, *size: int) -> Tensor:
            return self.load(source(prefix + name, size))

        mlp_norm = self.norm(get("post_attention_layernorm.weight", hidden))
        gate_up = self.linear(torch.cat([get(f"mlp.{x}_proj.weight", mlp, hidden) for x in ("gate", "up")]))
        down = self.linear(get("mlp.down_proj.weight", hidden, mlp))
        attention_norm = self.norm(get("input_layernorm.weight", hidden))
        if place % shape.full_attention_interval:
            special = delta_weights(shape, get, self.linear)
            return DeltaLayer(attention_norm, *special, mlp_norm, gate_up, down)

        qkv = {"q": q_width, "k": kv_width, "v": kv_width}

        def paired(kind: str, tensor: Tensor) -> Tensor:
            return tensor if kind == "v" else pairs_from_halves(tensor, shape.head_dim)

        weights = [paired(x, get(f"self_attn.{x}_proj.weight", width, qkv_width)) for x, width in qkv.items()]
        bias = qk_norm = None
        if shape.qkv_bias:
            bias = torch.cat([paired(x, get(f"self_attn.{x}_proj.bias", width)) for x, width in qkv.items()])
        if shape.qk_norm:
            heads = {"q": shape.num_qo_heads, "k": shape.num_kv_heads}
            norms = {x: paired(x, get(f"self_attn.{x}_norm.weight", shape.head_dim)) for x in heads}
            qk_norm = self.norm(torch.cat([norms[x].expand(count, -1) for x, count in heads.items()]))
        if shape.output_gate:
            weights.append(get("self_attn.gate_proj.weight", q_width, hidden))
        attention_out = self.linear(get("self_attn.o_proj.weight", hidden, q_width))
        product = self.linear(torch.cat(weights), bias)
        return AttentionLayer(attention_norm, product, qk_norm, attention_out, mlp_norm, gate_up, down)

    def new_cache(
        self, batch_size: int, max_context_len: int, *, kv_dtype: str | None = None, **options: Any
    ) -> PagedKVCache:
        """An empty cache of these layers' shape, in their dtype or `kv_dtype`; options go to `PagedKVCache`."""
        return PagedKVCache(
            num_layers=sum(isinstance(layer, AttentionLayer) for layer in self.layers),
            batch_size=batch_size,
            max_context_len=max_context_len,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.dtype if kv_dtype is None else getattr(torch, kv_dtype),
            device=self.device,
            **options,
        )

    def first_norm(self, x: Tensor) -> Tensor:
        """The first layer's input norm of ``[rows, hidden_size]``."""
        return self.layers[0].attention_norm(x)

    def run(
        self,
        hidden: Tensor,
        cache: PagedKVCache | DevicePlace,
        *,
        backend: str,
        spec: AttentionSpec = DEFAULT_SPEC,
        depths: Tensor | None = None,
        qkv_input: Tensor | None = None,
        taps: Taps | None = None,
        delta: tuple[DeltaState, int] | None = None,
    ) -> Tensor:
        """Run ``[batch_size, q_len, hidden_size]`` behind what the cache holds; advances it by `q_len`.

        hidden : changed in place, and returned.
        cache : a place on the device brings its own attention, whatever `backend` and `spec` are.
        depths : int64 ``[batch_size, q_len]``, positions counted from the context's end; 0, 1, 2, .. when None.
        qkv_input : ``[batch_size, q_len, qkv_width]`` in place of the first layer's normed input.
        delta : of a hybrid: its states, and the request among them whose prompt this is.
        """
        batch_size, q_len, width = hidden.shape
        dtype = self.activation_dtype
        flat = hidden.view(-1, width)
        rotation, rotated, staged = self._staged(batch_size, q_len, cache, depths)
        q, k, v = self._split(staged)
        attention = cache if isinstance(cache, DevicePlace) else prepare(q, cache, backend=backend, spec=spec)
        attended = attention.out.view(batch_size * q_len, -1)
        num_attention = num_delta = 0
        for index, layer in enumerate(self.layers):
            first = qkv_input is not None and index == 0
            entered = qkv_input.flatten(0, 1) if first else layer.attention_norm(flat)  # type: ignore[union-attr]
            if isinstance(layer, DeltaLayer):
                assert delta is not None
                mixed = mix_prompt(layer, entered, *delta, num_delta, self.shape)
                num_delta += 1
            else:
                gate = self._rotate(layer, entered, rotation, rotated, staged)
                cache.append(num_attention, k, v)
                attention.run(q, num_attention, attention.out)
                mixed = attended.to(dtype)
                if self.shape.output_gate:
                    mixed = mixed * gate.sigmoid()
                num_attention += 1
            flat.add_(layer.attention_out(mixed))
            gate, up = layer.gate_up(layer.mlp_norm(flat)).chunk(2, dim=1)
            flat.add_(layer.down(F.silu(gate).mul_(up)))
            if taps is not None:
                taps.keep(index, flat)
        cache.advance(q_len)
        return hidden

    def inject(self, states: Tensor, cache: PagedKVCache | DevicePlace) -> None:
        """Append K and V that each layer makes of ``[batch_size, q_len, hidden_size]``, without attention or MLP.

        The fused product makes q too, which is dropped.
        """
        batch_size, q_len, _ = states.shape
        rotation, rotated, staged = self._staged(batch_size, q_len, cache, None)
        _, k, v = self._split(staged)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, AttentionLayer)
            self._rotate(layer, states.flatten(0, 1), rotation, rotated, staged)
            cache.append(index, k, v)
        cache.advance(q_len)

    def _staged(
        self, batch_size: int, q_len: int, cache: PagedKVCache | DevicePlace, depths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What turns q, k and v, where they are turned, and where they stand in the cache's dtype.

        The last is ``[batch_size, q_len, all heads, head_dim]``.
        """
        rotation = self._rotation(q_len, cache, depths)
        rotated = torch.empty_like(rotation)
        heads = torch.view_as_real(rotated).view(batch_size, q_len, -1, self.shape.head_dim)
        staged = heads if self.dtype == torch.float32 else torch.empty_like(heads, dtype=self.dtype)
        return rotation, rotated, staged

    def _split(self, staged: Tensor) -> tuple[Tensor, ...]:
        return staged.split([self.shape.num_qo_heads, self.shape.num_kv_heads, self.shape.num_kv_heads], dim=2)

    def _rotate(self, layer: AttentionLayer, x: Tensor, rotation: Tensor, rotated: Tensor, staged: Tensor) -> Tensor:
        """q, k and v of ``[rows, qkv_width]``, normed and turned, into `staged`. Returns the output gate's columns."""
        product, width = layer.qkv(x), 2 * rotation.shape[1]
        qkv = product[:, :width]
        if layer.qk_norm is not None:
            qk = qkv.view(qkv.shape[0], -1, self.shape.head_dim)[:, : self._num_qk_heads]
            qk.copy_(layer.qk_norm(qk))
        torch.mul(qkv.float().view(torch.complex64), rotation, out=rotated)
        if self.dtype != torch.float32:
            staged.copy_(torch.view_as_real(rotated).view_as(staged))
        return product[:, width:]

    def _rotation(self, q_len: int, cache: PagedKVCache | DevicePlace, depths: Tensor | None) -> Tensor:
        """complex64 ``[batch_size * q_len, all heads * head_dim / 2]``: turns q and k, leaves v. No host sync."""
        if isinstance(cache, DevicePlace):
            turns = self.rope[cache.positions]
        elif depths is None and len(lens := cache.context_lens) <= _MAX_SLICES:
            turns = torch.cat([self.rope[start : start + q_len] for start in lens])
        else:
            starts = torch.tensor(cache.context_lens).to(self.device, non_blocking=True)[:, None]
            steps = torch.arange(q_len, device=self.device) if depths is None else depths
            turns = self.rope[(starts + steps).flatten()]
        still = torch.ones_like(turns)
        return torch.cat([turns] * self._num_qk_heads + [still] * self.shape.num_kv_heads, dim=1)
