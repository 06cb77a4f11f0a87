"""A decoder of the Llama/Qwen family on labkit's attention and paged cache. Forward passes only."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention.api import DEFAULT_SPEC, AttentionSpec
from labkit.errors import InputError, Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.models.gated_delta import DeltaLayer, DeltaState
from labkit.models.layers import Layers, Taps, TensorSource
from labkit.models.linear import Linear, make_linear
from labkit.shapes import ModelShape


class Decoder:
    """`Layers` between an embedding and an output head, which may be tied.

    name, shape, dtype, device : `dtype` is the name of the weights' dtype, which is also that of the caches it makes.
    options : of `Layers`.
    head_weight, final_norm_weight : ``[vocab_size, hidden_size]`` and ``[hidden_size]``, for heads that borrow them.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        source: TensorSource,
        *,
        dtype: str,
        device: str | torch.device,
        **options: Any,
    ):
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, torch.device(device)
        with torch.inference_mode():
            table_shape = (shape.vocab_size, shape.hidden_size)
            prefixes = [f"model.layers.{i}." for i in range(shape.num_layers)]
            self._stack = stack = Layers(shape, source, prefixes, dtype=dtype, device=self.device, **options)
            self.layers, self.rope = stack.layers, stack.rope
            self.linear_backend, self.activation_dtype = stack.linear_backend, stack.activation_dtype
            self.embedding = stack.load(source("model.embed_tokens.weight", table_shape))
            self.final_norm_weight = stack.load(source("model.norm.weight", (shape.hidden_size,)))
            self.final_norm = stack.norm(self.final_norm_weight)
            self.head_weight = self.embedding
            if not shape.tied_embeddings:
                self.head_weight = stack.load(source("lm_head.weight", table_shape))
            self.head = make_linear(self.head_weight, None, self.linear_backend)

    @property
    def linears(self) -> list[Linear]:
        """The matrix products in the order of a forward, the output head last."""
        inside = []
        for layer in self.layers:
            first = layer.projections if isinstance(layer, DeltaLayer) else layer.qkv
            inside += [first, layer.attention_out, layer.gate_up, layer.down]
        return [*inside, self.head]

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
        return self._stack.new_cache(batch_size, max_context_len, kv_dtype=kv_dtype, **options)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens of any shape, ``[..., hidden_size]`` in the dtype of the activations."""
        return F.embedding(token_ids, self.embedding).to(self.activation_dtype)

    def unembed(self, states: Tensor) -> Tensor:
        """float32 logits of normed states ``[..., hidden_size]``."""
        logits = self.head(states.reshape(-1, states.shape[-1])).float()
        return logits.view(*states.shape[:-1], -1)

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
        spec: AttentionSpec = DEFAULT_SPEC,
        depths: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the tokens behind what the cache holds and advance it by `q_len`.

        token_ids : int64 ``[batch_size, q_len]`` on the model's device; values are not checked. Request r stands at
            position ``cache.context_lens[r]``; lengths may differ.
        backend : name of the attention backend.
        logits : ``"all"`` rows or only the ``"last"`` of each request.
        spec, depths : mask and positions of a draft tree's tokens (`labkit.models.layers.Layers.run`).
        taps : hidden states to keep.

        Returns float32 ``[batch_size, q_len or 1, vocab_size]``.

        Raises ValueError: `token_ids` or `logits` is none of these, or the tokens do not fit the model's or cache's
        context.
        """
        if logits not in ("all", "last"):
            raise ValueError(f"logits must be 'all' or 'last', got {logits!r}")
        with torch.inference_mode():
            hidden = self._trunk(token_ids, cache, backend=backend, spec=spec, depths=depths, taps=taps)
            result = self._logits(hidden if logits == "all" else hidden[:, -1:])
        return result.clone()  # an ordinary tensor: those made in inference mode refuse to be changed in place outside

    def prefill(
        self,
        token_ids: Sequence[int],
        cache: PagedKVCache,
        request: int,
        *,
        backend: str,
        chunk: int = 1024,
        taps: Taps | None = None,
        delta_state: DeltaState | None = None,
    ) -> Tensor:
        """Run a prompt of one request in chunks behind what its cache row holds.

        taps : hidden states to keep, ``[1, len(token_ids), ..]``.
        delta_state : of a hybrid; what it holds of this request moves behind the prompt, from zeros in an empty row.

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
        delta = None
        if delta_state is not None:
            delta_state.start_prompt(request, is_new=row.context_lens == [0])
            delta = (delta_state, request)
        tokens = torch.tensor([list(token_ids)], device=self.device)
        with torch.inference_mode():
            for start, part in enumerate(tokens.split(chunk, dim=1)):
                here = taps and Taps(taps.layers, taps.out[:, start * chunk : start * chunk + part.shape[1]])
                hidden = self._trunk(part, row, backend=backend, taps=here, delta=delta)
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

    def _trunk(self, token_ids: Tensor, cache: PagedKVCache, *, taps: Taps | None, **options: Any) -> Tensor:
        """Hidden states before the final norm ``[batch_size, q_len, hidden_size]``."""
        if self.shape.num_delta_layers and options.get("delta") is None:
            raise Unsupported(f"{self.name}: a hybrid runs as a captured forward only, or prefills a delta_state")
        self._check(token_ids, cache)
        hidden = self.embed(token_ids)
        self._stack.run(hidden, cache, taps=taps, **options)
        if taps is not None and self.shape.num_layers in taps.layers:
            taps.keep(self.shape.num_layers, self.final_norm(hidden.flatten(0, 1)))
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.unembed(self.final_norm(hidden.flatten(0, 1)).view(hidden.shape))
