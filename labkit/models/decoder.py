"""A decoder of the Llama/Qwen family on labkit's attention and paged cache. Forward passes only."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention.api import prepare
from labkit.errors import InputError, Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.models.gated_delta import DeltaLayer, delta_weights
from labkit.models.linear import Float8Linear, Linear, activation_dtype, make_linear, resolve_linear_backend
from labkit.models.norm import RMSNorm
from labkit.models.rope import RopeScaling, pairs_from_halves, rope_table
from labkit.shapes import ModelShape

# Name and shape of a tensor in the layout of Hugging Face checkpoints -> its values, on any device, in any dtype.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]


class _Layer(NamedTuple):
    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    attention_out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """RMSNorm, rotary embedding, GQA, SwiGLU; optional q/k norm (Qwen3), q/k/v bias (Qwen2), tied embeddings.

    Keys are cached with interleaved rotary pairs, so a cache belongs to this class and not to other implementations.

    name, shape, dtype, device : `dtype` is the name of the weights' dtype, which is also that of the caches it makes.
    linear_backend : how the linear layers run: one of `labkit.models.linear.LINEAR_BACKENDS`.
    float8 : store the layers' matrices as float8_e4m3fn with a scale per output; all else keeps `dtype`.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        source: TensorSource,
        *,
        dtype: str,
        device: str | torch.device,
        rope_scaling: RopeScaling | None = None,
        linear_backend: str = "auto",
        float8: bool = False,
    ):
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, torch.device(device)
        self.float8 = float8
        self._torch_dtype: torch.dtype = getattr(torch, dtype)
        self._num_qk_heads = shape.num_qo_heads + shape.num_kv_heads
        with torch.inference_mode():
            self.linear_backend = resolve_linear_backend(linear_backend, shape, dtype, self.device.type)
            self.activation_dtype = activation_dtype(self.linear_backend, dtype)
            self.rope = rope_table(shape, rope_scaling, self.device)
            table_shape = (shape.vocab_size, shape.hidden_size)
            self.embedding = self._load(source("model.embed_tokens.weight", table_shape))
            self.layers: list[_Layer | DeltaLayer] = [self._build_layer(source, i) for i in range(shape.num_layers)]
            self.final_norm = self._norm(self._load(source("model.norm.weight", (shape.hidden_size,))))
            head = self.embedding
            if not shape.tied_embeddings:
                head = self._load(source("lm_head.weight", table_shape))
            self.head = make_linear(head, None, self.linear_backend)

    @property
    def linears(self) -> list[Linear]:
        """The matrix products in the order of a forward, the output head last."""
        inside = []
        for layer in self.layers:
            first = layer.projections if isinstance(layer, DeltaLayer) else layer.qkv
            inside += [first, layer.attention_out, layer.gate_up, layer.down]
        return [*inside, self.head]

    def _load(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self._torch_dtype)

    def _norm(self, weight: Tensor) -> RMSNorm:
        return RMSNorm(weight.to(self.activation_dtype), self.shape.rms_norm_eps)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Float8Linear(weight, bias) if self.float8 else make_linear(weight, bias, self.linear_backend)

    def _build_layer(self, source: TensorSource, index: int) -> _Layer | DeltaLayer:
        shape, prefix = self.shape, f"model.layers.{index}."
        hidden, mlp = shape.hidden_size, shape.intermediate_size
        q_width, kv_width = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def get(name: str, *size: int) -> Tensor:
            return self._load(source(prefix + name, size))

        mlp_norm = self._norm(get("post_attention_layernorm.weight", hidden))
        gate_up = self._linear(torch.cat([get(f"mlp.{x}_proj.weight", mlp, hidden) for x in ("gate", "up")]), None)
        down = self._linear(get("mlp.down_proj.weight", hidden, mlp), None)
        attention_norm = self._norm(get("input_layernorm.weight", hidden))
        if (index + 1) % shape.full_attention_interval:
            special = delta_weights(shape, get, self._linear)
            return DeltaLayer(attention_norm, *special, mlp_norm, gate_up, down)

        qkv = {"q": q_width, "k": kv_width, "v": kv_width}

        def paired(kind: str, tensor: Tensor) -> Tensor:
            return tensor if kind == "v" else pairs_from_halves(tensor, shape.head_dim)

        weights = [paired(x, get(f"self_attn.{x}_proj.weight", width, hidden)) for x, width in qkv.items()]
        bias = qk_norm = None
        if shape.qkv_bias:
            bias = torch.cat([paired(x, get(f"self_attn.{x}_proj.bias", width)) for x, width in qkv.items()])
        if shape.qk_norm:
            heads = {"q": shape.num_qo_heads, "k": shape.num_kv_heads}
            norms = {x: paired(x, get(f"self_attn.{x}_norm.weight", shape.head_dim)) for x in heads}
            qk_norm = self._norm(torch.cat([norms[x].expand(count, -1) for x, count in heads.items()]))
        if shape.output_gate:
            weights.append(get("self_attn.gate_proj.weight", q_width, hidden))
        return _Layer(
            attention_norm=attention_norm,
            qkv=self._linear(torch.cat(weights), bias),
            qk_norm=qk_norm,
            attention_out=self._linear(get("self_attn.o_proj.weight", hidden, q_width), None),
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=down,
        )

    def new_cache(
        self, batch_size: int, max_context_len: int, *, kv_dtype: str | None = None, **options: Any
    ) -> PagedKVCache:
        """An empty cache of this model's shape, in its dtype or `kv_dtype`, on its device.

        options : of `PagedKVCache`, passed on.

        Raises InputError: `max_context_len` is beyond the model's.
        """
        if max_context_len > self.shape.max_context_len:
            limit = self.shape.max_context_len
            raise InputError(f"max_context_len must be at most {limit} for {self.name}, got {max_context_len}")
        return PagedKVCache(
            num_layers=self.shape.num_attention_layers,
            batch_size=batch_size,
            max_context_len=max_context_len,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self._torch_dtype if kv_dtype is None else getattr(torch, kv_dtype),
            device=self.device,
            **options,
        )

    def floor_bytes(self, context_lens: Sequence[int] = ()) -> int:
        """Bytes that one forward must read: weights, and K and V of these contexts. Not counted: activations."""
        kv_bytes = sum(context_lens) * self.shape.kv_bytes_per_token(self.dtype)
        return self.shape.weight_bytes_read(self.dtype) + kv_bytes

    def forward(
        self,
        token_ids: Tensor,
        cache: PagedKVCache,
        *,
        backend: str,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """Run the tokens behind what the cache holds and advance it by `q_len`.

        token_ids : int64 ``[batch_size, q_len]`` on the model's device; values are not checked. Request r stands at
            position ``cache.context_lens[r]``; lengths may differ.
        backend : name of the attention backend.
        logits : ``"all"`` rows or only the ``"last"`` of each request.

        Returns float32 ``[batch_size, q_len or 1, vocab_size]``.

        Raises ValueError: `token_ids` or `logits` is none of these, or the tokens do not fit the model's or cache's
        context.
        """
        if logits not in ("all", "last"):
            raise ValueError(f"logits must be 'all' or 'last', got {logits!r}")
        with torch.inference_mode():
            hidden = self._trunk(token_ids, cache, backend)
            result = self._logits(hidden if logits == "all" else hidden[:, -1:])
        return result.clone()  # an ordinary tensor: those made in inference mode refuse to be changed in place outside

    def prefill(
        self, token_ids: Sequence[int], cache: PagedKVCache, request: int, *, backend: str, chunk: int = 1024
    ) -> Tensor:
        """Run a prompt of one request in chunks behind what its cache row holds.

        Returns float32 ``[vocab_size]``: logits of the last token.

        Raises ValueError: no tokens, a token outside the vocabulary, `chunk` below 1, or too many tokens (as
        `forward`).
        """
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self.shape.vocab_size:
            wanted = f"one or more ids in 0..{self.shape.vocab_size - 1}"
            got = f"{min(token_ids)}..{max(token_ids)}" if token_ids else "none"
            raise ValueError(f"token_ids must be {wanted}, got {got}")
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        row = cache.rows([request])
        tokens = torch.tensor([list(token_ids)], device=self.device)
        with torch.inference_mode():
            for part in tokens.split(chunk, dim=1):
                hidden = self._trunk(part, row, backend)
            logits = self._logits(hidden[:, -1:])
        return logits[0, 0].clone()

    def _check(self, token_ids: Tensor, cache: PagedKVCache) -> None:
        if token_ids.dim() != 2 or token_ids.shape[0] != cache.batch_size or token_ids.shape[1] < 1:
            wanted = f"[batch_size={cache.batch_size}, q_len]"
            raise ValueError(f"token_ids must be {wanted}, got {list(token_ids.shape)}")
        last = max(cache.context_lens) + token_ids.shape[1]
        limit = min(self.shape.max_context_len, cache.max_context_len)
        if last > limit:
            raise ValueError(f"context_len + q_len must be at most {limit} for {self.name}, got {last}")

    def _rotation(self, q_len: int, cache: PagedKVCache) -> Tensor:
        """complex64 ``[batch_size * q_len, all heads * head_dim / 2]``: turns q and k, leaves v. No host sync."""
        lens = cache.context_lens
        turns = torch.cat([self.rope[start : start + q_len] for start in lens])
        still = torch.ones_like(turns)
        return torch.cat([turns] * self._num_qk_heads + [still] * self.shape.num_kv_heads, dim=1)

    def _trunk(self, token_ids: Tensor, cache: PagedKVCache, backend: str) -> Tensor:
        """Hidden states before the final norm ``[batch_size, q_len, hidden_size]``."""
        if self.shape.num_delta_layers or self.shape.output_gate:
            raise Unsupported(f"{self.name}: a hybrid runs as a captured forward only (StaticForward)")
        self._check(token_ids, cache)
        shape = self.shape
        batch_size, q_len = token_ids.shape
        rotation = self._rotation(q_len, cache)
        rotated = torch.empty_like(rotation)
        heads = torch.view_as_real(rotated).view(batch_size, q_len, -1, shape.head_dim)
        staged = heads if cache.dtype == torch.float32 else torch.empty_like(heads, dtype=cache.dtype)
        q, k, v = staged.split([shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads], dim=2)
        attention = prepare(q, cache, backend=backend)
        attended = attention.out.view(batch_size * q_len, -1)
        dtype = self.activation_dtype
        hidden = F.embedding(token_ids.flatten(), self.embedding).to(dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            qkv = layer.qkv(layer.attention_norm(hidden))
            if layer.qk_norm is not None:
                self._norm_heads(qkv, layer.qk_norm)
            torch.mul(qkv.float().view(torch.complex64), rotation, out=rotated)
            if staged is not heads:
                staged.copy_(heads)
            cache.append(index, k, v)
            attention.run(q, index, attention.out)
            hidden.add_(layer.attention_out(attended.to(dtype)))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        cache.advance(q_len)
        return hidden.view(batch_size, q_len, -1)

    def _norm_heads(self, qkv: Tensor, norm: RMSNorm) -> None:
        qk = qkv.view(qkv.shape[0], -1, self.shape.head_dim)[:, : self._num_qk_heads]
        qk.copy_(norm(qk))

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.shape.hidden_size)
        logits = self.head(self.final_norm(rows)).float()
        return logits.view(*hidden.shape[:2], -1)
