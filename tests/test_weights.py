"""Loading weights: the GGUF's dequantisation, every way a folder can be bad, and what is refused before it is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.errors import InputError
from labkit.experiments import common
from labkit.models import identity
from labkit.models.gguf import dequantised_folder, smollm2_gguf
from labkit.models.weights import expected_tensors, load_model, read_config
from labkit.shapes import model_shape

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_folder(folder: Path, config: dict | None = None, sharded: bool = False) -> dict[str, torch.Tensor]:
    """A whole checkpoint of seeded weights."""
    config = {**CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps(config))
    shape, _ = read_config(folder, "t")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) for name, size in expected_tensors(shape).items()}
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    half = len(tensors) // 2
    weight_map = {}
    for file, names in zip(SHARDS, (list(tensors)[:half], list(tensors)[half:]), strict=True):
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def logits_of(folder: Path) -> torch.Tensor:
    decoder = load_model(folder)
    return decoder.forward(torch.arange(6)[None], decoder.new_cache(1, 16), backend="reference")


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace (or drop, when None) tensors; dots of a name are written as two underscores."""
    held = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path) -> Path:
    write_folder(tmp_path)
    return tmp_path


def test_a_sharded_folder_holds_the_same_model(folder, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    write_folder(sharded, sharded=True)
    assert torch.equal(logits_of(folder), logits_of(sharded))


def test_names_and_shape_come_from_the_folder(folder):
    decoder = load_model(folder, dtype="bfloat16")
    assert (decoder.name, decoder.dtype, decoder.device.type) == (folder.name, "bfloat16", "cpu")
    assert decoder.shape.head_dim == 8
    assert not decoder.shape.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, qwen2, qwen3, got 'gpt2'"),
        ({"model_type": None}, "got None"),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu", got "gelu"'),
        ({"attention_bias": True}, "attention_bias must be false, got true"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"quantization_config": {"bits": 4}}, "only unquantised weights"),
        ({"hidden_size": None}, "hidden_size must be an integer of at least 1, got None"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_qo_heads must be a multiple"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be an integer of at least 1, got 'two'"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be an integer of at least 1, got '4'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be 'default' or 'llama3', got 'yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "lacks the numbers low_freq_factor, high_freq_factor"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(InputError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "config.json must be readable JSON"), ("[]", "must hold a JSON object, got list")]
)
def test_a_corrupt_config_is_refused(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_model(folder)


def test_a_missing_tensor_is_named(folder):
    change(folder, model__norm__weight=None)
    with pytest.raises(InputError, match=r"must hold the tensor model\.norm\.weight, missing in 1 file"):
        load_model(folder)


def test_a_tensor_of_another_shape_is_named(folder):
    change(folder, model__layers__0__mlp__up_proj__weight=torch.zeros(24, 15))
    with pytest.raises(
        InputError, match=r"model\.safetensors: tensor .*up_proj\.weight must have shape \(24, 16\), got"
    ):
        load_model(folder)


def test_a_tensor_of_another_dtype_is_named(folder):
    change(folder, model__norm__weight=torch.zeros(16, dtype=torch.int8))
    with pytest.raises(InputError, match=r"model\.norm\.weight must be one of F32, BF16, F16, got I8"):
        load_model(folder)


def test_a_tensor_without_use_is_refused(folder):
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(16))
    with pytest.raises(InputError, match=r"q_proj\.bias, which this decoder has no use for"):
        load_model(folder)


def test_a_copy_of_the_tied_table_is_no_mistake(tmp_path):
    write_folder(tmp_path, {"tie_word_embeddings": True})
    change(tmp_path, lm_head__weight=torch.zeros(11, 16))
    assert load_model(tmp_path).shape.tied_embeddings


@pytest.mark.parametrize("keep", [0, 6, 200, -10])
def test_a_cut_file_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors must be a whole safetensors file"):
        load_model(folder)


def test_a_header_that_claims_terabytes_allocates_nothing(folder):
    header = {"model.norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(InputError, match="must be a whole safetensors file"):
        load_model(folder)


def test_pickles_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="only safetensors are read"):
        load_model(folder)


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, sharded=True)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(InputError, match=f"must hold the shard {SHARDS[1]}"):
        load_model(tmp_path)


def test_a_shard_outside_the_folder_is_refused(tmp_path):
    write_folder(tmp_path, sharded=True)
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"a shard must be a \.safetensors file of the folder"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/folder", "model must be 'smollm2-135m', 'random:<shape>' or a folder"),
        ("random:none", "model must be one of .*tiny-hybrid, got 'none'"),
    ],
)
def test_an_unknown_model_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        load_model(model)


def test_a_shape_without_weights_says_how_to_run_it():
    with pytest.raises(InputError, match=r"got 'tiny'; that is a shape only, random:tiny runs it"):
        load_model("tiny")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        load_model("random:tiny", dtype="int8")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"must hold config\.json, which is missing"):
        load_model(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    for content in (b"", b"GGUF", b"no GGUF file" * 100):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(InputError, match=r"x\.gguf must be a whole GGUF file"):
            dequantised_folder(tmp_path / "x.gguf")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(InputError, match="GGUF file must exist"):
        dequantised_folder(tmp_path / "y.gguf")


@pytest.mark.model
def test_smollm2_has_the_shape_of_the_table():
    shape, scaling = read_config(dequantised_folder(smollm2_gguf()), "smollm2-135m")
    table = model_shape("smollm2-135m")
    assert scaling is None
    assert {**vars(shape), "source": ""} == {**vars(table), "source": ""}


@pytest.mark.model
def test_smollm2_query_rows_are_in_the_order_of_halves():
    from gguf import GGUFReader
    from gguf.quants import dequantize

    (stored,) = [tensor for tensor in GGUFReader(smollm2_gguf()).tensors if tensor.name == "blk.7.attn_q.weight"]
    pairs = dequantize(stored.data, stored.tensor_type)
    halves = load_file(dequantised_folder(smollm2_gguf()) / "model.safetensors")[
        "model.layers.7.self_attn.q_proj.weight"
    ]
    for head, dimension in ((0, 0), (2, 5), (8, 31)):
        for half in (0, 1):
            row = pairs[head * 64 + 2 * dimension + half]
            assert np.array_equal(halves[head * 64 + 32 * half + dimension].numpy(), row)


@pytest.mark.model
def test_processes_that_dequantise_at_once_agree(tmp_path):
    code = "from labkit.models.gguf import *; print(dequantised_folder(smollm2_gguf()))"
    environment = {**os.environ, "LABKIT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert answers == {str(folder)}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("whole_bytes", [0, 64 << 20])
def test_a_folder_is_known_by_its_name_and_content(tmp_path, monkeypatch, whole_bytes):
    monkeypatch.setattr(identity, "_WHOLE_BYTES", whole_bytes)
    monkeypatch.chdir(tmp_path)
    for place in ("a/good", "b/good", "c/good"):
        (tmp_path / place).mkdir(parents=True)
        write_folder(tmp_path / place)
    one = identity.model_identity("a/good")
    assert one.startswith("good@")
    assert len(one) == 13
    assert identity.model_identity(str(tmp_path / "b/good")) == one
    change(tmp_path / "c/good", model__norm__weight=torch.zeros(16))
    assert identity.model_identity("c/good") != one
    assert [identity.model_identity(name) for name in ("smollm2-135m", "random:tiny")] == [
        "smollm2-135m",
        "random:tiny",
    ]


def test_points_of_a_folder_hold_its_identity_and_no_path(folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(common, "run_sweep", lambda points, measure, **options: seen.update(options, points=points))
    monkeypatch.setattr(common, "_check_prompts", lambda points: None)
    common.sweep("loop", [{"target": str(folder)}], out_dir=None)
    assert seen["points"] == [{"target": identity.model_identity(str(folder))}]
    assert seen["local"] == {"model_dir": str(folder)}
