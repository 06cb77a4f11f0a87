"""Roles of servers and how each backend was resolved; the tables of flags and kernels."""

import csv

import pytest

from labkit.engines.importing import Reader
from labkit.engines.roles import (
    gpu_row,
    kernel,
    resolve_roles,
    rows_of,
    version_key,
)
from labkit.engines.tables import read_table
from labkit.paths import REFERENCE
from labkit.provenance import redact
from tests.engine_logs import CONFIG, NON_DEFAULT, server


@pytest.mark.parametrize(
    ("made", "role", "backend", "how"),
    [
        (server(attention_backend="triton"), "verify", "triton", "inherited from prefill"),
        (
            server(prefill_attention_backend="flashinfer", decode_attention_backend="fa3"),
            "verify",
            "flashinfer",
            "prefill",
        ),
        (
            server(prefill_attention_backend="a", decode_attention_backend="b", speculative_attention_mode="decode"),
            "verify",
            "b",
            "inherited from decode",
        ),
        (server(attention_backend="triton", speculative_draft_attention_backend="fa3"), "draft", "fa3", "given"),
        (server(prefill_attention_backend="a", decode_attention_backend="b"), "draft", "b", "inherited from decode"),
        (
            server(prefill_attention_backend="a", decode_attention_backend="b", speculative_algorithm="DFLASH"),
            "draft",
            "a",
            "inherited from prefill",
        ),
        (server(gpu="NVIDIA H200"), "decode", "fa3", "default of the table for NVIDIA H200"),
        (server(gpu="h200-sxm", speculative_eagle_topk=8), "verify", "flashinfer", "topk above 1"),
        (server(gpu="b200-hgx", speculative_eagle_topk=1), "verify", "trtllm_mha", "default of the table"),
        # On SM100 an unset topk of a drafter is "not stated", which is no chain.
        (server(gpu="b200-hgx", speculative_algorithm="EAGLE3"), "verify", "flashinfer", "default of the table"),
        (server(gpu="b200-hgx"), "verify", "trtllm_mha", "default of the table"),
        (server(gpu="NVIDIA H200", version="0.5.6"), "decode", "unknown", "unknown for this version and GPU"),
        (server(named={"default": "fa3"}), "verify", "fa3", "named by the log"),
        (server(named={"decode": "fa3", "prefill": "flashinfer"}), "verify", "flashinfer", "named by the log"),
        (server("vllm", "0.33.0", attention_backend="TRITON_ATTN"), "verify", "TRITON_ATTN", "given"),
        (server("vllm", "0.33.0", attention_backend="TRITON_ATTN"), "draft", "unknown", "picked automatically"),
        (server("vllm", "0.33.0", speculative_config={"attention_backend": "X"}), "draft", "X", "given"),
        (server("vllm", "0.33.0", gpu="NVIDIA B200"), "verify", "FLASHINFER", "default of the table"),
        (server("vllm", "0.15.1", named={"default": "FLASH_ATTN"}), "verify", "FLASH_ATTN", "named by the log"),
        (server("llamacpp", None), "verify", "unknown", "picked automatically"),
        (server("trtllm", "1.2"), "verify", "TRTLLM", "default"),
        (server("trtllm", "1.2"), "draft", "unknown", "unknown for this version"),
    ],
)
def test_roles(made, role, backend, how):
    found = resolve_roles(made)[role]
    assert found.backend == backend
    assert how in found.how


def test_drafts_without_a_model_have_no_draft_role():
    for made in (server(speculative_algorithm="NGRAM"), server("vllm", "0.33.0", method="ngram")):
        assert not [role for role in resolve_roles(made) if role.startswith("draft")]
    assert "draft_extend" not in resolve_roles(server(speculative_algorithm="DFLASH"))


@pytest.mark.parametrize(
    ("engine", "version", "gpu", "backend"),
    [
        ("sglang", "0.5.21", "NVIDIA H200", "fa3"),
        ("sglang", "0.5.21", "NVIDIA A100-SXM4-80GB", "triton"),
        ("sglang", "0.5.21", "NVIDIA B200", "unknown"),  # by model class
        ("vllm", "0.33.0", "NVIDIA H100 PCIe", "FLASH_ATTN_MLA"),
        ("vllm", "0.33.0", "NVIDIA B200", "FLASHINFER_MLA"),
    ],
)
def test_models_with_latent_attention_have_other_defaults(engine, version, gpu, backend):
    made = server(engine, version, gpu)
    made.model = "deepseek-ai/DeepSeek-V3"
    assert resolve_roles(made)["verify"].backend == backend
    made.model = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert resolve_roles(made)["verify"].backend in ("fa3", "flashinfer", "trtllm_mha", "FLASH_ATTN", "FLASHINFER")


def test_how_of_a_role_is_readable():
    roles = resolve_roles(server("vllm", None, attention_backend="X")) | resolve_roles(server(version=None))
    for role in roles.values():
        assert "(" not in role.how
        assert role.how.count("version unknown") == 1


def test_log_lines_name_backends():
    reader = Reader()
    text = (
        "INFO Attention backend not specified. Use fa3 backend by default.\n"
        "WARN Using hybrid attention backend for decode and prefill: decode_backend=fa3, prefill_backend=flashinfer.\n"
        "INFO Overriding draft attention backend to triton.\n"
    )
    list(reader.read_text(text, "log"))
    assert reader.server.named == {"default": "fa3", "decode": "fa3", "prefill": "flashinfer", "draft": "triton"}
    text = (
        "Initializing a V1 LLM engine (v0.33.0) with config: model='m', speculative_config="
        "SpeculativeConfig(method='mtp')\n"
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    )
    list(reader.read_text(text, "log"))
    assert (reader.server.version, reader.server.model) == ("0.33.0", "m")
    assert resolve_roles(reader.server)["verify"].backend == "FLASH_ATTN"


@pytest.mark.parametrize("text", [NON_DEFAULT, CONFIG])
def test_the_drafter_is_not_the_target(text):
    reader = Reader()
    list(reader.read_text(text, "log"))
    assert reader.server.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert reader.server.args["method"] == "eagle3"


def test_table_of_flags_is_sound():
    with (REFERENCE / "engine_flags.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] for row in rows)
    assert {row["kind"] for row in rows} == {"role", "default", "kernel", "setting"}
    assert {row["kv_split"] for row in rows if row["kind"] == "kernel"} <= {"yes", "no", "partly"}
    for engine in ("sglang", "vllm", "llamacpp", "trtllm"):
        assert rows_of(engine, "setting", None, role="imposed_acceptance")
    assert version_key("0.5.15.post1") == (0, 5, 15)
    assert version_key(None) == ()
    assert gpu_row("NVIDIA A100-SXM4-80GB")["gpu"] == "a100-80gb-sxm"
    assert gpu_row("NVIDIA GeForce RTX 5090")["gpu"] == "rtx-5090"
    assert gpu_row("unheard of") is None
    for board in ("NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):  # other memories
        assert gpu_row(board) is None
    texts = [
        text
        for name in ("engine_flags.csv", "diagnosis_rules.csv")
        for row in read_table(name)
        for text in row.values()
    ]
    assert all(redact(text) == text for text in texts)


class Where:
    engine, engine_version, gpu, model = "vllm", "0.24.0", "NVIDIA H200", None


def test_kernels_by_version():
    assert kernel(Where, "TRITON_ATTN")["kv_split"] == "no"
    newer = type("Newer", (Where,), {"engine_version": "0.33.0"})
    assert kernel(newer, "TRITON_ATTN")["kv_split"] == "partly"
    assert kernel(Where, "NOSUCH") is None
