"""Published drafter checkpoints: which layout a folder holds, its taps in one numbering, its tensors under one name.

Layouts (names and shapes as SGLang, vLLM, SpecForge and speculators write them): ``eagle3``: one decoder layer on the
fused states of three target layers; ``mtp``: a multi-token prediction layer inside the target's checkpoint, named as by
DeepSeek or by Qwen; ``dflash``: a block head. Taps are counted as SGLang's nested ids are: n = the residual stream
after layer n of the target, from 0; vLLM's ids (also those of speculators) are one higher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.errors import InputError
from labkit.models.rope import RopeScaling
from labkit.models.tokenizer import read_json
from labkit.models.weights import open_safetensors, parse_config, weight_files
from labkit.shapes import ModelShape

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder

# What other names of a tensor become, first match first. The draft layers are layers.0, layers.1, ...
_RENAMES = (
    (r"^model\.layers\.\d+\.(eh_proj)\.", "fc."),
    (r"^model\.layers\.\d+\.(enorm|hnorm)\.", r"\1."),
    (r"^model\.layers\.\d+\.shared_head\.(norm)\.", "norm."),
    (r"^mtp\.pre_fc_norm_embedding\.", "enorm."),
    (r"^mtp\.pre_fc_norm_hidden\.", "hnorm."),
    (r"^mtp\.", ""),
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
)
# Copies of the target's own tables, and what only training reads.
_UNUSED = r"^(t2d|verifier_norm\.weight|verifier_lm_head\.weight|.*rotary_emb\.inv_freq)$"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read against a target.

    layout : eagle3, mtp or dflash.
    config : its ``config.json``, nested parts merged into the top.
    taps : layers of the target that it reads; the number of the target's layers means its final norm's output.
    """

    name: str
    folder: Path
    layout: str
    config: dict[str, Any]
    shape: ModelShape
    rope_scaling: RopeScaling | None
    taps: tuple[int, ...]
    tensors: dict[str, tuple[Any, str]]  # name -> an open file, and the name in there
    target: Decoder

    def __call__(self, name: str, size: tuple[int, ...]) -> Tensor:
        """A tensor. Raises InputError: it is missing, or its shape is not what this target asks for."""
        if name not in self.tensors:
            raise InputError(f"draft model {self.name}: must hold the tensor {name}, which is missing")
        handle, stored = self.tensors[name]
        size_found = tuple(handle.get_slice(stored).get_shape())
        if size_found != size:
            target = f"target {self.target.name} (hidden size {self.target.shape.hidden_size}, taps {self.taps})"
            wanted = f"its config.json (hidden size {self.shape.hidden_size}) and {target} want {size}"
            raise InputError(f"draft model {self.name}: tensor {name} has shape {size_found}, {wanted}")
        return handle.get_tensor(stored)

    def optional(self, name: str, size: tuple[int, ...]) -> Tensor | None:
        """As a call, but None where the checkpoint has no such tensor."""
        return self(name, size) if name in self.tensors else None

    def vocabulary(self) -> Tensor | None:
        """int64 ``[draft vocabulary]``: the target's id of each draft id; None: they are the same.

        A checkpoint stores the difference of the two (d2t). Raises InputError: an id outside the target's vocabulary.
        """
        size = self.config.get("draft_vocab_size")
        if size is None or "d2t" not in self.tensors:
            return None
        ids = self("d2t", (size,)).long() + torch.arange(size)
        limit = self.target.shape.vocab_size
        if ids.min() < 0 or ids.max() >= limit:
            got = f"{int(ids.min())}..{int(ids.max())}"
            raise InputError(
                f"draft model {self.name}: d2t maps to {got}, target {self.target.name} has {limit} tokens"
            )
        return ids


def read_checkpoint(folder: str | Path, target: Decoder) -> Checkpoint:
    """Read the configuration and the headers of a drafter's folder, and hold them against the target.

    A folder of a target with a multi-token prediction layer is read for that layer.

    Raises InputError: no such folder, no known layout, or a hidden size, tapped layer or vocabulary that is not the
    target's; the message names both sides.
    """
    return Checkpoint(**_parts(Path(folder), target.name, target.shape), target=target)


def check_checkpoint(folder: Path, name: str, shape: ModelShape) -> None:
    """Hold a drafter's folder against the shape of a target; raises as `read_checkpoint`."""
    _parts(folder, name, shape)


def _parts(folder: Path, target_name: str, target: ModelShape) -> dict[str, Any]:
    """All fields of a `Checkpoint` but its target."""
    if not folder.is_dir():
        raise InputError(f"draft model must be a folder with config.json and safetensors, got {str(folder)!r}")
    name, path = folder.resolve().name, folder / "config.json"
    config = _flat(read_json(path))
    handles = [open_safetensors(file) for file in weight_files(folder)]
    stored = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118
    layout = _layout(config, stored, path)
    if layout == "mtp":
        stored = {key: handle for key, handle in stored.items() if _is_mtp(key, config)}
    tensors = {_renamed(key, layout): (handle, key) for key, handle in stored.items() if not re.match(_UNUSED, key)}
    shape, scaling = parse_config({"model_type": "llama"} | config, path, name)
    if layout == "mtp":
        tensors = {key: handle for key, handle in tensors.items() if not re.search("embed_tokens|head", key)}
    facts = (target, target_name, name)
    _check(config, shape, *facts, own_embedding="embed_tokens.weight" in tensors)
    taps = _taps(config, layout, shape, *facts)
    found = {"name": name, "folder": folder, "layout": layout, "config": config, "shape": shape}
    return found | {"rope_scaling": scaling, "taps": taps, "tensors": tensors}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Nested parts merged into the top. Ids at the top are in vLLM's numbering where nothing nested states them."""
    nested = [config.get(key) or {} for key in ("transformer_layer_config", "eagle_config", "dflash_config")]
    flat = {key: value for part in nested for key, value in part.items()} | config
    ids = [part["eagle_aux_hidden_state_layer_ids"] for part in nested if "eagle_aux_hidden_state_layer_ids" in part]
    vllm_ids = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    if ids or vllm_ids:
        flat["taps"] = ids[0] if ids else [n - 1 for n in vllm_ids or []]
    elif flat.get("target_layer_ids"):
        flat["taps"] = flat["target_layer_ids"]
    return flat


def _layout(config: dict[str, Any], stored: dict[str, Any], path: Path) -> str:
    kind = f"{config.get('speculators_model_type', '')} {config.get('architectures', '')}".lower()
    if "dflash2" in kind or "domino" in kind or "dspark" in kind or "peagle" in kind:
        raise InputError(f"{path}: wanted an EAGLE-3, MTP or DFlash head, got {kind.strip()}")
    if "dflash" in kind:
        return "dflash"
    if "eagle3" in kind or "midlayer.hidden_norm.weight" in stored or "layers.0.hidden_norm.weight" in stored:
        return "eagle3"
    if any(_is_mtp(name, config) for name in stored):
        return "mtp"
    raise InputError(f"{path}: wanted an EAGLE-3, MTP or DFlash head, got architectures {config.get('architectures')}")


def _is_mtp(name: str, config: dict[str, Any]) -> bool:
    return name.startswith("mtp.") or name.startswith(f"model.layers.{config.get('num_hidden_layers')}.")


def _renamed(name: str, layout: str) -> str:
    if layout == "mtp":
        for pattern, replacement in _RENAMES[:6]:
            if re.match(pattern, name):
                return re.sub(pattern, replacement, name)
        return re.sub(r"^model\.layers\.\d+\.", "layers.0.", name)
    for pattern, replacement in _RENAMES[6:]:
        name = re.sub(pattern, replacement, name)
    return name


def _check(
    config: dict[str, Any], shape: ModelShape, target: ModelShape, target_name: str, name: str, *, own_embedding: bool
) -> None:
    hidden = config.get("target_hidden_size") or (target.hidden_size if own_embedding else shape.hidden_size)
    sides = {"vocabulary": (shape.vocab_size, target.vocab_size), "target hidden size": (hidden, target.hidden_size)}
    for what, (draft, own) in sides.items():
        if draft != own:
            raise InputError(f"draft model {name}: its {what} is {draft}, target {target_name} has {own}")
    layers = config.get("num_target_layers")
    if layers is not None and layers != target.num_layers:
        raise InputError(
            f"draft model {name}: made for {layers} target layers, target {target_name} has {target.num_layers}"
        )


def _taps(
    config: dict[str, Any], layout: str, shape: ModelShape, target: ModelShape, target_name: str, name: str
) -> tuple[int, ...]:
    count = target.num_layers
    if layout == "mtp":
        return (count,)
    taps = config.get("taps")
    if taps is None and layout == "eagle3":
        taps = [1, count // 2 - 1, count - 4]
    elif taps is None:
        n = shape.num_layers
        taps = [count // 2] if n == 1 else [round(1 + (count - 4) * i / (n - 1)) for i in range(n)]
    if not isinstance(taps, list) or not all(isinstance(tap, int) and 0 <= tap < count for tap in taps):
        vllm = [tap + 1 if isinstance(tap, int) else tap for tap in taps]
        own = f"target {target_name} has {count}: 0 to {count - 1}"
        raise InputError(f"draft model {name}: taps layers {taps} (vLLM numbering {vllm}), {own}")
    return tuple(taps)
