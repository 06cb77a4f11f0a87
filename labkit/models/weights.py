"""Load a decoder: SmolLM2 from its package, a local safetensors folder, or seeded random weights at a shape."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.errors import InputError
from labkit.models.decoder import Decoder
from labkit.models.gguf import dequantised_folder, smollm2_gguf
from labkit.models.rope import RopeScaling
from labkit.models.tokenizer import read_json
from labkit.shapes import ModelShape, model_shape, model_shapes

DTYPES = ("float32", "bfloat16", "float16")
FAMILY = ("llama", "qwen2", "qwen3")
_STORED_DTYPES = ("F32", "BF16", "F16")


def load_model(
    model: str | Path | ModelShape,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    linear_backend: str = "auto",
    float8: bool = False,
) -> Decoder:
    """Load weights and build the decoder.

    model : ``"smollm2-135m"`` (the pip package's GGUF, dequantised once to a cached folder); a folder with
        ``config.json`` and safetensors of the Llama, Qwen2 or Qwen3 family; or ``"random:<shape name>"`` or a
        ModelShape for weights drawn from `seed` on `device` (devices draw different numbers).
    dtype : ``"float32"``, ``"bfloat16"`` or ``"float16"``, whatever the file holds.
    linear_backend : ``"auto"`` times the candidates on the CPU; a name of `labkit.models.linear.LINEAR_BACKENDS` fixes
        it.
    float8 : store the layers' matrices as float8_e4m3fn.

    Raises InputError: unknown model or dtype; or the folder is missing, corrupt, of another family, lacks a tensor, or
    holds one of another shape or one that the decoder has no use for; BackendUnavailable: the named linear backend
    cannot run this dtype on this device.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    options: dict[str, Any] = {"dtype": dtype, "device": device, "linear_backend": linear_backend, "float8": float8}
    if isinstance(model, ModelShape):
        return Decoder(f"random:{model.name}", model, RandomWeights(seed, device), **options)
    if str(model).startswith("random:"):
        shape = model_shape(str(model).removeprefix("random:"))
        return Decoder(str(model), shape, RandomWeights(seed, device), **options)
    folder = model_folder(model)
    name = str(model) if str(model) == "smollm2-135m" else folder.resolve().name
    shape, rope_scaling = read_config(folder, name)
    weights = SafetensorsFolder(folder, expected_tensors(shape))
    return Decoder(name, shape, weights, rope_scaling=rope_scaling, **options)


def model_folder(model: str | Path) -> Path:
    """Folder of a local model; of ``"smollm2-135m"`` the cached one. Raises InputError: there is none."""
    if str(model) == "smollm2-135m":
        return dequantised_folder(smollm2_gguf())
    if str(model) and Path(model).is_dir():
        return Path(model)
    hint = f"; that is a shape only, random:{model} runs it on random weights" if str(model) in model_shapes() else ""
    wanted = "'smollm2-135m', 'random:<shape>' or a folder with config.json and safetensors"
    raise InputError(f"model must be {wanted}, got {str(model)!r}{hint}")


def check_model(model: str) -> ModelShape:
    """Shape of the model of a folder, from its config and the headers of its weights, which are not read.

    Raises InputError: as `load_model`.
    """
    folder = model_folder(model)
    shape, _ = read_config(folder, folder.resolve().name)
    SafetensorsFolder(folder, expected_tensors(shape))
    return shape


class RandomWeights:
    """Seeded normals of deviation ``fan_in ** -0.5``; norms are 1. Values depend on the seed and the tensor's name."""

    def __init__(self, seed: int, device: str):
        self._seed, self._generator = seed, torch.Generator(device)

    def __call__(self, name: str, size: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(size)
        if name.endswith(("A_log", "dt_bias")):
            return torch.zeros(size)  # the decay of a state per token is then about one half
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        values = torch.randn(size, generator=self._generator, device=self._generator.device)
        return values * size[-1] ** -0.5


def read_config(folder: Path, name: str) -> tuple[ModelShape, RopeScaling | None]:
    """Shape of the checkpoint in `folder` from its ``config.json``.

    Raises InputError: no such file, another family, a field that is missing, or a feature the decoder lacks.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), path, name)


def parse_config(config: dict[str, Any], path: Path, name: str) -> tuple[ModelShape, RopeScaling | None]:
    """As `read_config`, from what the file at `path` holds."""
    family = config.get("model_type")
    if family not in FAMILY:
        raise InputError(f"{path}: model_type must be one of {', '.join(FAMILY)}, got {family!r}")
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise InputError(f"{path}: {key} must be {json.dumps(value)}, got {json.dumps(config[key])}")
    if config.get("quantization_config"):
        raise InputError(f"{path}: only unquantised weights can be read, got a quantization_config")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{path}: {key} must be an integer of at least 1, got {value!r}")
        return value

    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float):
        raise InputError(f"{path}: rms_norm_eps must be a number, got {eps!r}")
    num_heads = size("num_attention_heads")
    theta, scaling = _rope(config, path)
    shape = ModelShape(
        name=name,
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_qo_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", size("hidden_size") // num_heads),
        vocab_size=size("vocab_size"),
        max_context_len=size("max_position_embeddings"),
        rope_theta=theta,
        rms_norm_eps=eps,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        source=str(path),
    )
    if shape.head_dim % 2:
        raise InputError(f"{path}: head_dim must be even, got {shape.head_dim}")
    return shape, scaling


def _rope(config: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from ``rope_parameters`` (new) or ``rope_theta`` and ``rope_scaling`` (old)."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    if not isinstance(theta, int | float):
        raise InputError(f"{path}: rope_theta must be a number, got {theta!r}")
    theta = float(theta)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise InputError(f"{path}: rope_type must be 'default' or 'llama3', got {kind!r}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if not isinstance(parameters.get(name), int | float)]
    if missing:
        raise InputError(f"{path}: rope scaling 'llama3' lacks the numbers {', '.join(missing)}")
    return theta, RopeScaling(*(parameters[name] for name in names))


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this shape, by its Hugging Face name."""
    hidden, mlp, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_width, kv_width = shape.num_qo_heads * head, shape.num_kv_heads * head
    matrices = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": size for x, size in matrices.items()}
    layer |= {f"mlp.{x}_proj.weight": (mlp, hidden) for x in ("gate", "up")} | {"mlp.down_proj.weight": (hidden, mlp)}
    layer |= {f"{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
    if shape.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (w,) for x, w in (("q", q_width), ("k", kv_width), ("v", kv_width))}
    if shape.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (head,) for x in "qk"}
    names = {f"model.layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()}
    names |= {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return names if shape.tied_embeddings else names | {"lm_head.weight": (shape.vocab_size, hidden)}


def is_mtp(name: str, expected: dict[str, tuple[int, ...]]) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer, which `labkit.drafting.autoregressive` reads."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith("mtp.") or bool(match and f"model.layers.{match[1]}.input_layernorm.weight" not in expected)


class SafetensorsFolder:
    """The tensors of a checkpoint folder, one file or shards with an index. All headers are checked before any is read.

    Raises InputError: names the file and tensor, what was wanted and what is there.
    """

    def __init__(self, folder: Path, expected: dict[str, tuple[int, ...]]):
        files = weight_files(folder)
        self._handles: dict[str, Any] = {}
        for path in files:
            handle = open_safetensors(path)
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                self._handles[name] = handle
                self._check(name, handle.get_slice(name), path, expected)
        missing = [name for name in expected if name not in self._handles]
        if missing:
            count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(f"{folder} must hold the tensor {missing[0]}{count}, missing in {len(files)} file(s)")

    @staticmethod
    def _check(name: str, header: Any, path: Path, expected: dict[str, tuple[int, ...]]) -> None:
        if name not in expected:
            # Harmless leftovers: a copy of the tied table, rotary frequencies of old checkpoints.
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") or is_mtp(name, expected):
                return
            raise InputError(f"{path} holds the tensor {name}, which this decoder has no use for")
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != expected[name]:
            raise InputError(f"{path}: tensor {name} must have shape {expected[name]}, got {shape}")
        if dtype not in _STORED_DTYPES:
            raise InputError(f"{path}: tensor {name} must be one of {', '.join(_STORED_DTYPES)}, got {dtype}")

    def __call__(self, name: str, size: tuple[int, ...]) -> Tensor:
        assert name in self._handles, name
        return self._handles[name].get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or the shards that its index names. Raises InputError: neither."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            wanted = "model.safetensors or model.safetensors.index.json (only safetensors are read)"
            raise InputError(f"model folder {folder} must hold {wanted}, got neither")
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} must hold a weight_map of tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        # A shard is a file of this folder, never a path out of it.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index}: a shard must be a .safetensors file of the folder, got {name!r}")
        if not (folder / name).is_file():
            raise InputError(f"model folder {folder} must hold the shard {name} that its index names")
    return [folder / name for name in names]


def open_safetensors(path: Path) -> Any:
    """A handle on a file. Raises InputError: it is not a whole safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} must be a whole safetensors file: {error}") from error
