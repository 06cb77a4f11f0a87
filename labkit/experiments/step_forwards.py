"""The forwards of a cell of the step experiment: their models, kept in the worker, one filled cache, and the checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from labkit.cost import attention_shape
from labkit.errors import WrongResult
from labkit.experiments import common, places
from labkit.shapes import MAX_Q_LEN, AttentionShape, ModelShape

if TYPE_CHECKING:
    from labkit.kv_cache import PagedKVCache
    from labkit.models.decoder import Decoder

_MAX_ERROR = 0.1  # of the logits between attention backends, after tens of layers in 16 bits
_PAGE_SIZE = 16
PREFILL_CHUNK = 8192  # tokens of a prompt in one pass
_CHECKED_ROWS = 1024  # query tokens of a prefill that are compared with the oracle, which holds float64 logits
_WORKSPACE_BYTES = 6 << 30  # scratch of the backends, the oracle, a prefill's chunk, drawing the weights


def shape_of(point: dict[str, Any]) -> ModelShape:
    """One device's share of a forward's model: the target, or one full-attention layer and the target's output head."""
    shape = common.target_shape(places.model_source(point)).share_of(point["num_gpus"])
    if point["drafter"] != "none":
        shape = replace(shape, name=f"{shape.name}, one layer", num_layers=1, full_attention_interval=1)
    return shape


def memory_bytes(point: dict[str, Any]) -> float:
    """Weights, cache, states and logits of a forward of this point; what a backend needs for itself is not counted."""
    shape, kv_dtype = shape_of(point), kv_dtype_of(point)
    own = point["context_len"] - point["shared_prefix_len"]
    tokens = point["shared_prefix_len"] + point["batch_size"] * (own + max(point["q_len"], MAX_Q_LEN))
    cache = tokens * shape.kv_bytes_per_token(kv_dtype)
    rows = point["batch_size"] * (1 if point["phase"] == "prefill" else point["q_len"])  # with logits and states
    states = rows * shape.delta_state_bytes
    return shape.weight_bytes(point["weight_dtype"]) + cache + states + 8 * rows * shape.vocab_size


def activation_dtype(point: dict[str, Any]) -> str:
    return "bfloat16" if point["weight_dtype"] == "float8_e4m3fn" else point["weight_dtype"]


def kv_dtype_of(point: dict[str, Any]) -> str:
    return activation_dtype(point) if point["kv_dtype"] == "as activations" else point["kv_dtype"]


def check_memory(points: list[dict[str, Any]], device: str) -> None:
    """Raise MemoryError (status oom) where the largest of these forwards cannot fit: computed, not tried."""
    if device == "cpu":
        return
    import gc

    import torch

    _models(*_model_key(points[0]))  # drops the models of another target
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    needed = max(memory_bytes(point) for point in points) + _WORKSPACE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    if needed > total:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB, the device has {total / 1e9:.1f} GB; computed, not tried")


def _model_key(point: dict[str, Any]) -> tuple[str, str, int]:
    return places.model_source(point), point["weight_dtype"], point["num_gpus"]


@lru_cache(maxsize=1)
def _models(source: str, weight_dtype: str, num_gpus: int) -> dict[str, Decoder]:
    """Decoders of the present target by drafter, filled by `_decoder`; the worker keeps them from cell to cell."""
    return {}


def _decoder(point: dict[str, Any], device: str) -> Decoder:
    held = _models(*_model_key(point))
    if point["drafter"] not in held:
        from labkit.models.weights import load_model

        source: Any = shape_of(point) if common.is_random(point["target"]) else places.model_source(point)
        options = {"linear_backend": "torch.linear"} if point["launch_mode"] == "graph" else {}
        held[point["drafter"]] = load_model(
            source, dtype=activation_dtype(point), device=device, seed=point["seed"],
            float8=point["weight_dtype"] == "float8_e4m3fn", **options,
        )  # fmt: skip
    return held[point["drafter"]]


class Forwards:
    """The forwards of one model over one filled cache, each compared with the first before it may be timed."""

    def __init__(self, points: list[dict[str, Any]], device: str):
        import torch

        from labkit.models.gated_delta import DeltaState

        first, self._device = points[0], device
        self.decoder = _decoder(first, device)
        shape, is_prefill = self.decoder.shape, first["phase"] == "prefill"
        generator = torch.Generator(device).manual_seed(first["seed"])
        longest = max(point["q_len"] for point in points)
        self._cache: PagedKVCache = self.decoder.new_cache(
            first["batch_size"], first["context_len"] + longest, kv_dtype=kv_dtype_of(first), page_size=_PAGE_SIZE,
            page_order=_page_order(device, is_prefill), generator=generator,
            shared_prefix_len=first["shared_prefix_len"],
        )  # fmt: skip
        self._cache.fill_random(first["context_len"], generator)
        self._tokens = torch.randint(
            self.decoder.shape.vocab_size, (first["batch_size"], longest), generator=generator, device=device
        )
        self._states = None
        self._moves_on = bool(shape.num_delta_layers) and not is_prefill  # a prompt starts anew each time
        if shape.num_delta_layers:
            room = 1 if is_prefill else longest
            self._states = DeltaState(shape, first["batch_size"], room, self.decoder.activation_dtype, device)
        self._first_logits: Any = None

    def make(self, point: dict[str, Any]) -> Callable[[], object]:
        """A call that runs the forward; the cache's lengths stay as they are."""
        _check_attention(point, self.decoder.shape, self._device)
        return self._eager(point) if point["launch_mode"] == "eager" else self._captured(point)

    def _eager(self, point: dict[str, Any]) -> Callable[[], object]:
        """Launched kernel by kernel. Prompts are prefilled one after the other, in chunks: last token's logits only."""
        import torch

        tokens, context_len = self._tokens[:, : point["q_len"]], point["context_len"]
        prompts = tokens.tolist() if point["phase"] == "prefill" else []
        how: dict[str, Any] = {"backend": point["backend"], "chunk": PREFILL_CHUNK, "delta_state": self._states}

        def call() -> Any:
            self._cache.truncate(context_len)  # another backend may have failed half-way
            if prompts:
                last = [self.decoder.prefill(ids, self._cache, r, **how) for r, ids in enumerate(prompts)]
                logits = torch.stack(last)[:, None]
            else:
                logits = self.decoder.forward(tokens, self._cache, backend=point["backend"])
            self._cache.truncate(context_len)
            return logits.argmax(-1), logits

        self._compare(point, call()[1])
        return call

    def _captured(self, point: dict[str, Any]) -> Callable[[], object]:
        import torch

        from labkit.models.static_forward import StaticForward

        forward = StaticForward(
            self.decoder, self._cache, q_len=point["q_len"], backend=point["backend"], delta_state=self._states,
            pdl=torch.cuda.get_device_capability() >= (9, 0),
        )  # fmt: skip
        forward.token_ids.copy_(self._tokens[:, : point["q_len"]])
        forward.run()
        self._compare(point, forward.logits)
        forward.capture()
        return lambda: forward.replay()  # and keep its buffers, which the graph alone does not

    def _compare(self, point: dict[str, Any], logits: Any) -> None:
        """The first token's logits depend neither on what follows nor on the backend; but a hybrid's states move on."""
        root = logits[:, 0]
        error = 0.0 if root.isfinite().all() else math.inf
        if self._first_logits is None:
            self._first_logits = root.clone()
        elif not self._moves_on:
            error = max(error, float((root - self._first_logits).abs().max() / self._first_logits.abs().max()))
        if error > _MAX_ERROR:
            what = "are not finite" if math.isinf(error) else f"differ from the first forward's by {error:.2g}"
            raise WrongResult(f"backend {point['backend']!r}: logits of the first token {what}")


def _check_attention(point: dict[str, Any], shape: ModelShape, device: str) -> None:
    """The backend against the oracle at the shape about to be timed; raises what is wrong.

    One request, or the two that it takes to share a prefix.
    """
    call, is_prefill = call_shape(point, shape, 2 if point["shared_prefix_len"] else 1), point["phase"] == "prefill"
    if is_prefill:  # the last tokens of the prompt
        q_len = min(call.q_len, _CHECKED_ROWS)
        call = replace(call, q_len=q_len, context_len=call.q_len - q_len)
    _check_once(point["backend"], call, device, is_prefill)


def call_shape(point: dict[str, Any], model: ModelShape, batch_size: int) -> AttentionShape:
    """The attention call of one layer of a forward, with the point's shared prefix."""
    lengths = {"q_len": point["q_len"], "context_len": point["context_len"]}
    dtypes = {"weight_dtype": point["weight_dtype"], "kv_dtype": kv_dtype_of(point)}
    call = attention_shape(model, batch_size=batch_size, **lengths, **dtypes)
    return replace(call, shared_prefix_len=point["shared_prefix_len"])


def _page_order(device: str, is_prefill: bool) -> str:
    """Pages of a long-lived cache lie anywhere; those of the empty one that a prompt fills follow each other."""
    return "sequential" if device == "cpu" or is_prefill else "permuted"


@cache
def _check_once(backend: str, shape: AttentionShape, device: str, is_prefill: bool) -> None:
    import torch

    from labkit.attention.api import AttentionSpec
    from labkit.attention.inputs import verify_backend

    # Splits and cascades need the lse, which the flash kernel of PyTorch does not return.
    how: dict[str, Any] = {
        "page_order": _page_order(device, is_prefill),
        "spec": AttentionSpec(return_lse=not is_prefill),
    }
    verify_backend(backend, shape, generator=torch.Generator(device).manual_seed(0), device=device, **how)
