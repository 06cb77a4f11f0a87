"""FlashAttention 3 over the paged cache: its own package, or the copy in vLLM, through the operator both register.

``fa3`` leaves splits and packing to its heuristics, ``fa3_nosplit`` pins one split (as some callers do),
``fa3_split`` asks for as many as fill the SMs, ``fa3_packed`` and ``fa3_unpacked`` pin the packing of query heads.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from labkit.attention.api import AttentionSpec, Run
from labkit.kv_cache import PagedKVCache
from labkit.shapes import AttentionShape

# module that registers the operator -> (namespace of torch.ops, package)
_SOURCES = {
    "flash_attn_interface": ("flash_attn_3", "flash_attn_3"),
    "vllm.vllm_flash_attn.flash_attn_interface": ("_vllm_fa3_C", "vllm"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fa3": {},
    "fa3_nosplit": {"splits": "one"},
    "fa3_split": {"splits": "fill"},
    "fa3_packed": {"pack_gqa": True},
    "fa3_unpacked": {"pack_gqa": False},
}
MAX_SPLITS = 128


@functools.cache
def _operators() -> tuple[Any, Any, str] | str:
    """``fwd``, ``get_scheduler_metadata`` and the version that they come from, or why there are none."""
    reasons = []
    for module, (namespace, package) in _SOURCES.items():
        try:
            importlib.import_module(module)
            operators = getattr(torch.ops, namespace)
            version = f"{package} {importlib.metadata.version(package)}"
            return operators.fwd.default, operators.get_scheduler_metadata.default, version
        except (ImportError, AttributeError, OSError, importlib.metadata.PackageNotFoundError) as error:
            reasons.append(f"{module}: {error}")
    return "needs FlashAttention 3 (" + "; ".join(reasons) + ")"


def supports(shape: AttentionShape, device: str, **_: Any) -> str:
    """Compute capability 9.x; q and K/V in one 16-bit dtype; head_dim up to 256; causal, with or without a window."""
    if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return "needs a CUDA device of compute capability 9.x"
    operators = _operators()
    if isinstance(operators, str):
        return operators
    if shape.q_dtype not in ("bfloat16", "float16") or shape.kv_dtype != shape.q_dtype:
        return "needs q and K/V in bfloat16 or float16"
    if shape.head_dim not in (64, 128, 256):
        return "needs a head_dim of 64, 128 or 256"
    return "" if shape.mask == "causal" else "has no tree masks"


def _bind(operator: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operator by name: the two packages differ in a few, which take their neutral value."""
    neutral = {"is_rotary_interleaved": True, "attention_chunk": 0, "softcap": 0.0, "has_softcap": False}
    neutral |= {"sm_margin": 0, "max_seqlen_k_new": 0, "cp_world_size": 1, "cp_rank": 0}
    names = [argument.name for argument in operator._schema.arguments]
    return {name: values.get(name, neutral.get(name)) for name in names}


def prepare(
    q: Tensor, cache: PagedKVCache, spec: AttentionSpec, *, splits: str = "auto", pack_gqa: bool | None = None
) -> tuple[Run, dict[str, Any]]:
    """The scheduler's metadata once per step (as vLLM does), the kernel per layer."""
    operators = _operators()
    assert not isinstance(operators, str)
    forward, schedule, version = operators
    batch_size, q_len, num_qo_heads, head_dim = q.shape
    kv_lens = [n + q_len for n in cache.context_lens]
    num_tiles = batch_size * cache.num_kv_heads
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    num_splits = {"auto": 0, "one": 1, "fill": min(MAX_SPLITS, max(1, num_sms // num_tiles))}[splits]
    seqused_k = torch.tensor(kv_lens, dtype=torch.int32).to(q.device)
    cu_seqlens_q = torch.arange(batch_size + 1, dtype=torch.int32).to(q.device) * q_len
    shared = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": seqused_k,
        "max_seqlen_q": q_len,
        "max_seqlen_k": max(kv_lens),
        "is_causal": True,
        "window_size_left": spec.window_left,
        "window_size_right": -1 if spec.window is None else 0,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
    }
    sizes = {
        "batch_size": batch_size,
        "num_heads": num_qo_heads,
        "num_heads_k": cache.num_kv_heads,
        "headdim": head_dim,
        "headdim_v": head_dim,
        "qkv_dtype": q.dtype,
        "page_size": cache.page_size,
    }
    shared["scheduler_metadata"] = schedule(**_bind(schedule, shared | sizes))
    arguments = _bind(forward, shared | {"page_table": cache.page_table, "softmax_scale": spec.scale(head_dim)})

    def run(q: Tensor, layer: int, out: Tensor, lse: Tensor | None) -> None:
        tensors = {"q": q.flatten(0, 1), "k": cache.k[layer], "v": cache.v[layer], "out": out.view(-1, *out.shape[2:])}
        _, result_lse, *_ = forward(**arguments | tensors)
        if lse is not None:
            lse.view(-1, num_qo_heads).copy_(result_lse.T)

    return run, {"resolved_kernel": f"FlashAttention 3 of {version}", "num_splits": num_splits or None}
