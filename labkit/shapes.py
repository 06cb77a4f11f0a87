"""Shapes of attention calls and of models: validated, frozen, and without torch so that analysis can use them."""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from labkit.errors import InputError
from labkit.paths import REFERENCE

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MAX_Q_LEN = 64  # new tokens of a verify call; longer calls are prefill chunks


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises InputError: the name is not in ``DTYPE_BYTES``.
    """
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]


def at_least(minimum: int, **values: object) -> None:
    """Raise InputError for a value that is no integer of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(f"{name} must be an integer of at least {minimum}, got {value!r}")


_DIVIDED = ("num_qo_heads", "num_kv_heads", "intermediate_size", "num_delta_key_heads", "num_delta_value_heads")
_SIZES = ("batch_size", "q_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")


def _divides(num_qo_heads: int, num_kv_heads: int) -> None:
    if num_qo_heads % num_kv_heads:
        raise InputError(f"num_qo_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_qo_heads}")


@dataclass(frozen=True)
class AttentionShape:
    """One attention call over a paged cache.

    `context_len` counts the tokens in the cache before the step, per request: an int when all requests agree,
    else a tuple of `batch_size` ints. The call attends to ``kv_len = context_len + q_len`` keys with a
    lower-right aligned causal mask, of which a `window` keeps the last so many keys of each row. With `mask` ``"tree"``
    the new tokens see their ancestors only, with ``"none"`` each other. The first `shared_prefix_len` tokens lie in
    pages that all requests share.

    Raises InputError: A size is not an integer in range, the heads do not divide, a dtype or mask is unknown, or the
    shared prefix is longer than a context.
    """

    batch_size: int
    q_len: int
    context_len: int | tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    mask: str = "causal"
    window: int | None = None
    shared_prefix_len: int = 0

    def __post_init__(self) -> None:
        at_least(1, **{name: getattr(self, name) for name in _SIZES})
        _divides(self.num_qo_heads, self.num_kv_heads)
        if not isinstance(self.context_len, int):
            object.__setattr__(self, "context_len", tuple(self.context_len))
            if len(self.context_lens) != self.batch_size:
                wanted = f"one context_len per request (batch_size={self.batch_size})"
                raise InputError(f"context_len must hold {wanted}, got {len(self.context_lens)}")
        for context_len in self.context_lens:
            at_least(0, context_len=context_len)
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.q_dtype)
        if self.mask not in ("causal", "tree", "none"):
            raise InputError(f"mask must be causal, tree or none, got {self.mask!r}")
        if self.window is not None:
            at_least(1, window=self.window)
        at_least(0, shared_prefix_len=self.shared_prefix_len)
        if self.shared_prefix_len > min(self.context_lens):
            raise InputError(f"shared_prefix_len must be within every context, got {self.shared_prefix_len}")
        dtype_bytes(self.q_dtype)
        dtype_bytes(str(self.kv_dtype))

    def __str__(self) -> str:
        """Short enough for a message: what differs from the usual is named."""
        contexts = sorted(set(self.context_lens))
        shown = "/".join(map(str, contexts[:4])) + ("/..." if len(contexts) > 4 else "")
        parts = [f"batch {self.batch_size}, q_len {self.q_len}, context {shown}"]
        parts.append(f"heads {self.num_qo_heads}/{self.num_kv_heads} x {self.head_dim}, page {self.page_size}")
        parts.append(self.q_dtype if self.kv_dtype == self.q_dtype else f"{self.q_dtype} with {self.kv_dtype} KV")
        parts += [] if self.mask == "causal" else [f"{self.mask} mask"]
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [f"shared prefix {self.shared_prefix_len}"] if self.shared_prefix_len else []
        return ", ".join(parts)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens in the cache before the step, one per request."""
        if isinstance(self.context_len, tuple):
            return self.context_len
        return (self.context_len,) * self.batch_size

    @property
    def context_len_max(self) -> int:
        """Largest of `context_lens`, in tokens."""
        return max(self.context_lens)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys each request attends to, the `q_len` new tokens included."""
        return tuple(context_len + self.q_len for context_len in self.context_lens)


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama/Qwen family: RMSNorm, rotary embedding, GQA, SwiGLU.

    `qk_norm` adds one RMSNorm of `head_dim` weights to q and to k in every layer; `qkv_bias` a bias to the q, k and v
    projections. `source` cites where the numbers were read.

    A hybrid has full attention in every `full_attention_interval`-th layer only; the others are gated-delta layers of
    `num_delta_value_heads` states of `delta_head_dim` squared. `rotary_dim` elements of a head are rotated;
    `output_gate` doubles the q projection by a gate on the attention's output.

    Raises InputError: A size is not an integer of at least 1, or the heads do not divide.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_len: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    full_attention_interval: int = 1
    num_delta_key_heads: int = 0
    num_delta_value_heads: int = 0
    delta_head_dim: int = 0
    rotary_dim: int = 0  # 0: all of head_dim
    output_gate: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type in (int, "int")}
        may_be_zero = {name: sizes.pop(name) for name in list(sizes) if "delta" in name or name == "rotary_dim"}
        if self.full_attention_interval == 1:
            at_least(0, **may_be_zero)
        else:
            at_least(1, **may_be_zero)
            _divides(self.num_delta_value_heads, self.num_delta_key_heads)
        at_least(1, **sizes)
        _divides(self.num_qo_heads, self.num_kv_heads)

    def share_of(self, num_gpus: int) -> "ModelShape":
        """What each of `num_gpus` devices holds under tensor parallelism: its heads, MLP columns and vocabulary rows.

        Embedding and output head are padded to a whole number of rows per device.

        Raises InputError: the heads or the MLP do not divide.
        """
        sizes: dict[str, Any] = {name: getattr(self, name) for name in _DIVIDED}
        if odd := [f"{name} {size}" for name, size in sizes.items() if size % num_gpus]:
            raise InputError(f"num_gpus: wanted a divisor of {', '.join(odd)} of {self.name}, got {num_gpus}")
        sizes = {name: size // num_gpus for name, size in sizes.items()}
        return replace(self, **sizes, vocab_size=-(-self.vocab_size // num_gpus))

    @property
    def num_attention_layers(self) -> int:
        """Layers with full attention, and so with a KV cache."""
        return self.num_layers // self.full_attention_interval

    @property
    def num_delta_layers(self) -> int:
        """Gated-delta layers, whose state does not grow with the context."""
        return self.num_layers - self.num_attention_layers

    @property
    def delta_channels(self) -> int:
        """Channels of q, k and v of a gated-delta layer, which pass its convolution."""
        return (2 * self.num_delta_key_heads + self.num_delta_value_heads) * self.delta_head_dim

    @property
    def delta_state_bytes(self) -> int:
        """Bytes of the float32 states of one request over all gated-delta layers."""
        return 4 * self.num_delta_layers * self.num_delta_value_heads * self.delta_head_dim**2

    @property
    def num_linear_parameters(self) -> int:
        """Weights of the matrices inside the layers.

        Not counted: embedding, output head, norms, biases, and a gated-delta layer's two gates and convolution.
        """
        q_width = self.num_qo_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * ((2 + self.output_gate) * q_width + 2 * kv_width)
        value_width = self.num_delta_value_heads * self.delta_head_dim
        delta = self.hidden_size * (self.delta_channels + 2 * value_width)
        mlp = self.num_layers * 3 * self.hidden_size * self.intermediate_size
        return self.num_attention_layers * attention + self.num_delta_layers * delta + mlp

    @property
    def num_parameters(self) -> int:
        """All stored parameters; a tied output head is counted once, with the embedding."""
        per_attention = 2 * self.head_dim if self.qk_norm else 0
        if self.qkv_bias:
            per_attention += (self.num_qo_heads + 2 * self.num_kv_heads) * self.head_dim
        # Per delta layer: two gates of a column per value head, their rates and biases, the convolution, a norm.
        per_delta = 2 * self.num_delta_value_heads * (self.hidden_size + 1) + 4 * self.delta_channels
        per_delta += self.delta_head_dim
        num_tables = 1 if self.tied_embeddings else 2
        rest = self.num_attention_layers * per_attention + self.num_delta_layers * per_delta
        rest += (2 * self.num_layers + 1) * self.hidden_size
        return num_tables * self.vocab_size * self.hidden_size + self.num_linear_parameters + rest

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the stored weights. With float8 only the matrices inside the layers shrink, the rest is bfloat16."""
        size = dtype_bytes(dtype)
        rest = self.num_parameters - self.num_linear_parameters
        return self.num_linear_parameters * size + rest * max(size, 2)

    def weight_bytes_read(self, dtype: str) -> int:
        """Bytes of weights that one forward reads: all but an untied input embedding, of which it reads single rows."""
        skipped = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self.weight_bytes(dtype) - skipped * max(dtype_bytes(dtype), 2)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V over all layers for one token. Not counted: scales of a quantised cache."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * dtype_bytes(dtype)


def _parse(row: dict[str, str]) -> ModelShape:
    def value(name: str, kind: object) -> object:
        text = row[name]
        if kind in (bool, "bool"):
            return text == "true"
        if kind in (int, "int"):
            return int(text)
        return float(text) if kind in (float, "float") else text

    return ModelShape(**{field.name: value(field.name, field.type) for field in fields(ModelShape)})  # type: ignore[arg-type]


@functools.cache
def model_shapes() -> Mapping[str, ModelShape]:
    """Every shape of ``data/reference/model_shapes.csv`` by name."""
    with (REFERENCE / "model_shapes.csv").open(newline="") as file:
        return MappingProxyType({row["name"]: _parse(row) for row in csv.DictReader(file)})


def model_shape(name: str) -> ModelShape:
    """Look a model shape up by its name in ``data/reference/model_shapes.csv``.

    Raises InputError: no such row; the message lists the known names.
    """
    known = model_shapes()
    if name not in known:
        raise InputError(f"model must be one of {', '.join(known)}, got {name!r}")
    return known[name]
