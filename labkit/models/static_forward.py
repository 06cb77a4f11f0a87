"""One forward with fixed buffers and no host work between its kernels, to be captured as a CUDA graph.

Same weights and cache as `Decoder.forward`, which is its reference in the tests. Lengths lie on the device, so one
graph serves every context that the attention backend can replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import PreparedAttention, prepare
from labkit.attention.spec import DEFAULT_SPEC, AttentionSpec
from labkit.attention.triton_launch import power_of_two
from labkit.errors import Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.models.decoder import Decoder
from labkit.models.few_rows import FewRows, num_splits_of
from labkit.models.gated_delta import DeltaLayer, DeltaState
from labkit.models.layers import Taps
from labkit.models.linear import Linear, PlainLinear
from labkit.timing import captured


class StaticForward:
    """A forward of `q_len` tokens per request over all of a cache's requests.

    token_ids : int64 ``[batch_size, q_len]``, the input; write into it before `run` or `replay`, which is the captured
        run once there is one.
    logits : float32 ``[batch_size, q_len, vocab_size]``, and `next_ids`, int64 ``[batch_size, q_len]``, their argmax.

    backend : of the attention, prepared for the cache's present lengths.
    delta_state : of a hybrid, with room for `q_len` tokens; forwards on one cache share it.
    taps : hidden states that each run writes into ``taps.out``, as `Decoder.forward` does.
    pdl : launch kernels while their predecessors end (programmatic dependent launch); Hopper or newer.
    is_tree : the tokens are a draft tree, another one in every run: `tree` (as in `AttentionSpec`) and `depths`, int32
        ``[batch_size, q_len]``, are inputs too.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        *,
        q_len: int,
        backend: str,
        spec: AttentionSpec = DEFAULT_SPEC,
        pdl: bool = False,
        delta_state: DeltaState | None = None,
        taps: Taps | None = None,
        is_tree: bool = False,
    ):
        self.taps = taps
        shape, self.decoder, self.cache, self.q_len, self.pdl = decoder.shape, decoder, cache, q_len, pdl
        linears = [linear for linear in decoder.linears if isinstance(linear, PlainLinear)]
        if len(linears) < len(decoder.linears):
            raise Unsupported(f"a captured forward needs linear_backend torch.linear, got {decoder.linear_backend!r}")
        self.batch_size, self.num_rows = cache.batch_size, cache.batch_size * q_len
        device, dtype = decoder.device, decoder.activation_dtype
        self.token_ids = torch.zeros(self.batch_size, q_len, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(self.batch_size, dtype=torch.int32, device=device)
        self._turns = torch.view_as_real(decoder.rope)
        self._hidden = torch.empty(self.num_rows, shape.hidden_size, dtype=dtype, device=device)
        self._normed = torch.empty_like(self._hidden)
        self._activated = torch.empty(self.num_rows, shape.intermediate_size, dtype=dtype, device=device)
        q = torch.empty(self.batch_size, q_len, shape.num_qo_heads, shape.head_dim, dtype=dtype, device=device)
        self.is_tree, self.depths = is_tree, torch.zeros_like(self.token_ids, dtype=torch.int32)
        self.tree = torch.ones_like(self.token_ids)  # each token sees the last one
        if is_tree:
            spec = replace(spec, tree=self.tree)
        self.attention: PreparedAttention = prepare(q, cache, backend=backend, spec=spec)
        self._attended = self.attention.out.view(self.num_rows, -1)
        size = max(num_splits_of(x.weight, self.num_rows) * self.num_rows * x.weight.shape[0] for x in linears)
        parts = torch.empty(size, device=device)  # of one product after the other; each is read before the next writes
        self._products = {id(linear): FewRows(linear, self.num_rows, parts, pdl) for linear in linears}
        self._set_up_delta(delta_state)
        head = self._products[id(linears[-1])].partial
        vocab = (self.batch_size, q_len, shape.vocab_size)
        # One part is the logits themselves; the few rows of a small vocabulary are split and must be added up.
        self.logits = head[0].view(vocab) if len(head) == 1 else torch.empty(vocab, device=device)
        self.next_ids = torch.zeros_like(self.token_ids)
        self.replay: Callable[[], object] = self.run  # as long as nothing is captured
        self.set_lengths()

    def _set_up_delta(self, state: DeltaState | None) -> None:
        shape = self.decoder.shape
        if not shape.num_delta_layers:
            return
        if self.is_tree:
            raise Unsupported("draft trees need attention in every layer, a gated-delta layer has one past")
        if state is None or state.max_q_len < self.q_len:
            raise ValueError(f"delta_state: {self.decoder.name} wanted one with max_q_len of at least {self.q_len}")
        self.delta = state
        device, dtype = self._hidden.device, self._hidden.dtype
        value_width = shape.num_delta_value_heads * shape.delta_head_dim
        self._mixed = torch.empty(self.num_rows, shape.delta_channels, dtype=dtype, device=device)
        self._value = torch.empty(self.num_rows, value_width, device=device)
        self._gated = torch.empty(self.num_rows, value_width, dtype=dtype, device=device)

    def set_lengths(self) -> None:
        """Take over the cache's lengths for `run`."""
        lens = torch.tensor(self.cache.context_lens, dtype=torch.int32)
        self.context_lens.copy_(lens, non_blocking=True)

    def replan(self) -> None:
        """Take over the cache's lengths for a replay. Raises Unsupported: the backend must be prepared anew."""
        self.set_lengths()
        self.attention.replan()

    def capture(self) -> None:
        """Run once, then record the kernels of a run in a CUDA graph."""
        self.run()
        torch.cuda.synchronize()
        self.replay = captured(self.run)

    def run(self) -> None:
        """Launch the kernels. The cache gets the new keys and values, but is not advanced."""
        with torch.inference_mode():
            self._launch()

    def _launch(self) -> None:
        decoder = self.decoder
        torch.index_select(decoder.embedding, 0, self.token_ids.view(-1), out=self._hidden)
        parts: Tensor | None = None
        num_attention = num_delta = 0
        for index, layer in enumerate(decoder.layers):
            self._add_norm(parts, layer.attention_norm, index - 1)
            if isinstance(layer, DeltaLayer):
                mixed = self._mix_delta(num_delta, layer)
                num_delta += 1
            else:
                mixed = self._attend(num_attention, layer)
                num_attention += 1
            self._add_norm(self._product(layer.attention_out, mixed), layer.mlp_norm)
            self._silu_mul(self._product(layer.gate_up, self._normed))
            parts = self._product(layer.down, self._activated)
        self._add_norm(parts, decoder.final_norm, len(decoder.layers) - 1)
        head = self._product(decoder.head, self._normed)
        if len(head) > 1:
            torch.sum(head, dim=0, out=self.logits.view(head.shape[1:]))
        torch.argmax(self.logits, dim=-1, out=self.next_ids)
        if self.taps is not None:
            self.taps.keep(len(decoder.layers), self._normed)

    def _attend(self, index: int, layer: Any) -> Tensor:
        parts = self._product(layer.qkv, self._normed)
        self._rope_append(index, layer, parts)
        self.attention.run(self.attention.q, index, self.attention.out)
        if self.decoder.shape.output_gate:
            self._gate(parts)
        return self._attended

    def _product(self, linear: Linear, x: Tensor) -> Tensor:
        return self._products[id(linear)](x)

    def _pdl(self) -> dict[str, Any]:
        return {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}

    def _add_norm(self, parts: Tensor | None, norm: Any, behind: int | None = None) -> None:
        """`behind` a layer the sum is its whole state, since what its MLP added is still in `parts` until here."""
        from labkit.models.triton_ops import add_norm_kernel

        width, tap, tap_stride = self._hidden.shape[1], self._hidden, 0
        if is_tapped := self.taps is not None and behind in self.taps.layers:
            tap_stride = self.taps.out.shape[-1]
            tap = self.taps.out.view(-1, tap_stride)[:, self.taps.layers.index(behind) * width :]
        add_norm_kernel[(self.num_rows,)](
            self._hidden, self._hidden if parts is None else parts, norm.weight, self._normed, tap, width,
            self.num_rows * width, tap_stride, norm.eps, BLOCK=power_of_two(width),
            NUM_SPLITS=0 if parts is None else len(parts), TAP=is_tapped, num_warps=8, **self._pdl(),
        )  # fmt: skip

    def _rope_append(self, index: int, layer: Any, parts: Tensor) -> None:
        from labkit.models.triton_ops import rope_append_kernel

        shape, cache = self.decoder.shape, self.cache
        num_heads = shape.num_qo_heads + 2 * shape.num_kv_heads
        norm, bias = layer.qk_norm, layer.qkv.bias
        rope_append_kernel[(self.num_rows, num_heads)](
            parts, parts if bias is None else bias, parts if norm is None else norm.weight, self._turns,
            self.context_lens, self.depths, cache.page_table, self.attention.q, cache.k[index], cache.v[index],
            self.num_rows * parts.shape[2], parts.shape[2], self.q_len, cache.page_table.stride(0),
            shape.rms_norm_eps, NUM_QO_HEADS=shape.num_qo_heads, NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim, PAGE_SIZE=cache.page_size, NUM_SPLITS=len(parts), HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None, TREE=self.is_tree, num_warps=1, **self._pdl(),
        )  # fmt: skip

    def _silu_mul(self, parts: Tensor) -> None:
        from labkit.models.triton_ops import silu_mul_kernel

        width = self._activated.shape[1]
        block = min(1024, power_of_two(width))
        silu_mul_kernel[(self.num_rows, -(-width // block))](
            parts, self._activated, width, self.num_rows * 2 * width, BLOCK=block, NUM_SPLITS=len(parts), num_warps=4,
            **self._pdl(),
        )  # fmt: skip

    def _gate(self, parts: Tensor) -> None:
        from labkit.models.triton_ops import gate_kernel

        width = self._attended.shape[1]
        block = min(1024, power_of_two(width))
        gate_kernel[(self.num_rows, -(-width // block))](
            self._attended, parts, width, parts.shape[2], parts.shape[2] - width, self.num_rows * parts.shape[2],
            BLOCK=block, NUM_SPLITS=len(parts), num_warps=4, **self._pdl(),
        )  # fmt: skip

    def _mix_delta(self, index: int, layer: DeltaLayer) -> Tensor:
        from labkit.models.gated_delta_kernels import conv_kernel, gated_norm_kernel, recurrence_kernel

        shape, state = self.decoder.shape, self.delta
        channels, dim, num_heads = shape.delta_channels, shape.delta_head_dim, shape.num_delta_value_heads
        parts = self._product(layer.projections, self._normed)
        row_stride, split_stride = parts.shape[2], self.num_rows * parts.shape[2]
        same: dict[str, Any] = {"NUM_SPLITS": len(parts), **self._pdl()}
        conv_kernel[(self.batch_size, -(-channels // 256))](
            parts, layer.conv_weight, state.columns[index], state.num_kept, self._mixed, row_stride, split_stride,
            self.q_len, channels, state.max_q_len, BLOCK=256, num_warps=4, **same,
        )  # fmt: skip
        block_v = min(32, dim)
        recurrence_kernel[(self.batch_size, num_heads, dim // block_v)](
            self._mixed, parts, layer.log_rate, layer.time_bias, state.states[index], state.slot, self._value,
            row_stride, split_stride, channels + num_heads * dim, self.q_len, state.max_q_len,
            NUM_K_HEADS=shape.num_delta_key_heads, NUM_V_HEADS=num_heads, DIM=dim, BLOCK_V=block_v, num_warps=4, **same,
        )  # fmt: skip
        gated_norm_kernel[(self.num_rows, num_heads)](
            self._value, parts, layer.value_norm, self._gated, row_stride, channels, split_stride,
            shape.rms_norm_eps, NUM_V_HEADS=num_heads, DIM=dim, num_warps=1, **same,
        )  # fmt: skip
        return self._gated
