"""What a trained head is written as: configuration and bf16 tensors in the published layouts, and a card."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.errors import InputError
from labkit.paths import write_whole
from labkit.shapes import ModelShape
from labkit.training.heads import Parameters

LAYOUTS = ("autoregressive", "block")
BLOCK_SIZE = 8
BLOCK_LAYERS = 2


def head_shape(
    target: ModelShape, layout: str, num_taps: int, draft_vocab_size: int, max_mb: float | None
) -> ModelShape:
    """The target's shape with one or two layers, whose MLP is as wide as the file may be large.

    Raises InputError: nothing fits in `max_mb` (1e6 bytes).
    """
    num_layers = 1 if layout == "autoregressive" else BLOCK_LAYERS
    shape = replace(target, num_layers=num_layers, qk_norm=layout == "block", qkv_bias=False, source="labkit.training")
    if max_mb is None:
        return shape
    hidden, width = target.hidden_size, target.head_dim
    q_width, kv_width = target.num_qo_heads * width, target.num_kv_heads * width
    inputs = 2 * hidden if layout == "autoregressive" else hidden
    attention = (q_width + 2 * kv_width) * inputs + q_width * hidden
    fixed = (
        2 * (num_taps * hidden * hidden + num_layers * attention) + 8 * draft_vocab_size + target.vocab_size + 30_000
    )
    mlp = int((max_mb * 1e6 - fixed) / (2 * 3 * hidden * num_layers)) // 16 * 16
    if mlp < 16:
        raise InputError(f"--max-mb: a head for {target.name} takes more than {fixed / 1e6:.1f} MB, got {max_mb:g}")
    return replace(shape, intermediate_size=min(mlp, target.intermediate_size))


def head_config(
    shape: ModelShape, layout: str, target: ModelShape, taps: tuple[int, ...], **facts: Any
) -> dict[str, Any]:
    """``config.json`` of a head. facts: ``draft_vocab_size``, ``mask_token_id``."""
    common = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_qo_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_context_len,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": facts["draft_vocab_size"],
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if layout == "autoregressive":
        eagle = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
        own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "eagle_config": eagle}
        return own | common | {"norm_output": False, "norm_before_residual": False}
    dflash = {"target_layer_ids": list(taps), "mask_token_id": facts["mask_token_id"]}
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": dflash}
    return own | common | {"block_size": BLOCK_SIZE}


def write_head(
    folder: Path,
    parameters: Parameters,
    config: dict[str, Any],
    vocabulary: Tensor,
    card: dict[str, Any],
    state_sizes: Tensor | None = None,
) -> None:
    """A folder that ``--draft-model`` takes: config.json, model.safetensors (bf16), card.json.

    state_sizes : what each dimension of the states was divided by in training; it goes into the fusion's weights.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    if state_sizes is not None:
        parameters = parameters | {"fc.weight": parameters["fc.weight"] / state_sizes}
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in parameters.items()}
    ids = vocabulary.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    write_whole(folder / "config.json", json.dumps(config, indent=1).encode())
    write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_whole(folder / "card.json", json.dumps(card, indent=1).encode())
