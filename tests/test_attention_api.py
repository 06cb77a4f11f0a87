"""Looking backends up, registering them, and messages that name the argument."""

import math
import subprocess
import sys

import pytest
import torch

from labkit.attention import registry
from labkit.attention.api import (
    AttentionSpec,
    available_backends,
    backend_digest,
    load_backend_file,
    max_error,
    prepare,
    register_backend,
)
from labkit.errors import BackendUnavailable, InputError, Unsupported
from labkit.kv_cache import PagedKVCache
from labkit.paths import ROOT

PLUGIN = """
NAME = "zeros"

def supports(shape, device):
    return "" if shape.q_len < 4 else "needs q_len below 4"

def prepare(q, cache, spec):
    def run(q, layer, out, lse):
        out.zero_()
    return run, {"resolved_kernel": "zeros", "num_programs": None, "num_splits": None, "kv_passes": 0}
"""


@pytest.fixture(autouse=True)
def _same_backends_afterwards(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))


def make(q_len=2, batch_size=1, **changes):
    arguments = {"num_layers": 1, "batch_size": batch_size, "max_context_len": 32, "num_kv_heads": 3, "head_dim": 64}
    cache = PagedKVCache(**arguments | {"dtype": torch.float32} | changes)
    return torch.randn(batch_size, q_len, 9, 64), cache


def test_unknown_backend_lists_the_names():
    q, cache = make()
    known = "fa3, .*flashinfer_fa2, .*per_token, reference, sdpa, .*triton_split"
    with pytest.raises(InputError, match=f"backend must be one of {known}, got 'fa9'"):
        prepare(q, cache, backend="fa9")


def test_output_is_poisoned_and_lse_only_on_request():
    q, cache = make()
    call = prepare(q, cache, backend="sdpa", spec=AttentionSpec(return_lse=True))
    assert call.out.isnan().all()
    assert call.lse.isnan().all()
    assert call.lse.shape == (1, 2, 9)
    out = torch.zeros_like(q)
    call = prepare(q, cache, backend="sdpa", out=out)
    assert call.lse is None
    assert call.out is out
    assert out.isnan().all()
    call()
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, c: prepare(q[0], c, backend="sdpa"), r"q must be \[batch_size, q_len, num_qo_heads, head_dim\]"),
        (lambda q, c: prepare(q[..., :32], c, backend="sdpa"), "head_dim of q must equal the cache's 64, got 32"),
        (lambda q, c: prepare(q.expand(2, -1, -1, -1), c, backend="sdpa"), "batch_size of q must equal"),
        (
            lambda q, c: prepare(q[:, :, :8], c, backend="sdpa"),
            "num_qo_heads must be a multiple of num_kv_heads=3, got 8",
        ),
        (lambda q, c: prepare(q[:, :0], c, backend="sdpa"), "q_len must be an integer of at least 1, got 0"),
        (lambda q, c: prepare(q.repeat(1, 20, 1, 1), c, backend="sdpa"), "stay within max_context_len=32, got 0 .* 40"),
        (lambda q, c: prepare(q, c, backend="sdpa", out=q.double()), "out must be contiguous torch.float32"),
        (lambda q, c: prepare(q, c, backend="sdpa", spec=AttentionSpec(max_splits=0)), "max_splits must be at least 1"),
        (lambda q, c: prepare(q.bfloat16(), c, backend="sdpa"), "'sdpa' cannot do this: .*q and K/V in one of"),
        (lambda q, c: prepare(q, c, backend="sdpa").run(q[:, :1], 0, q), "q must have the prepared shape"),
        (lambda q, c: prepare(q, c, backend="sdpa").run(q, 0, q.mT.contiguous().mT), "out must be contiguous"),
    ],
)
def test_bad_calls_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(*make())


def test_register_from_a_notebook_cell():
    def run_nothing(q, cache, spec):
        return lambda q, layer, out, lse: out.zero_(), {"kv_passes": 0}

    register_backend("mine", run_nothing, supports=lambda shape, device: "")
    q, cache = make()
    call = prepare(q, cache, backend="mine")
    call()
    assert call.out.abs().max() == 0
    assert available_backends()["mine"] == ""
    first = backend_digest("mine")
    register_backend("mine", run_nothing, supports=lambda shape, device: "", source="another text")
    assert backend_digest("mine") != first
    with pytest.raises(InputError, match="must not be that of a built-in backend, got 'sdpa'"):
        register_backend("sdpa", run_nothing, supports=lambda shape, device: "")
    with pytest.raises(ValueError, match="source must be given"):
        register_backend("opaque", max, supports=lambda shape, device: "")


def test_backend_file_with_a_module_or_a_call(tmp_path):
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    assert load_backend_file(file) == ["zeros"]
    q, cache = make(q_len=4)
    with pytest.raises(Unsupported, match=r"'zeros' cannot do this: needs q_len below 4 .asked: batch 1"):
        prepare(q, cache, backend="zeros")
    first = backend_digest("zeros")
    file.write_text(PLUGIN.replace("zero_()", "fill_(1)"))
    load_backend_file(file)
    assert backend_digest("zeros") != first

    call = PLUGIN.replace('NAME = "zeros"', "from labkit.attention.api import register_backend")
    file.write_text(call + 'register_backend("called", prepare, supports=supports)\n')
    assert load_backend_file(file) == ["called"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must call register_backend or define NAME, supports and prepare"),
        ("NAME = 'half'", "lacks"),
        ("1 / 0", "plugin.py failed: ZeroDivisionError"),
        (None, "must be an existing Python file"),
    ],
)
def test_bad_backend_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "plugin.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_backend_file(file)


def test_entry_points_are_found(tmp_path, monkeypatch):
    (tmp_path / "zeros_plugin.py").write_text(PLUGIN)
    info = tmp_path / "zeros_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zeros-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[labkit.attention]\nzeros = zeros_plugin\nlost = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = available_backends()
    assert found["zeros"] == ""
    assert "no_such_module" in found["lost"]
    q, cache = make()
    prepare(q, cache, backend="zeros")()
    with pytest.raises(BackendUnavailable, match="backend 'lost' is unavailable: ModuleNotFoundError"):
        prepare(q, cache, backend="lost")


def test_digest_is_short_stable_and_differs_by_backend():
    digests = {name: backend_digest(name) for name in ("sdpa", "per_token", "reference", "triton_split")}
    assert digests == {name: backend_digest(name) for name in digests}
    assert len(set(digests.values())) == 4
    assert all(len(digest) == 12 for digest in digests.values())


def test_triton_without_device_or_interpreter_is_listed_with_the_reason():
    code = (
        "from labkit.attention.api import *; import torch; from labkit.kv_cache import PagedKVCache\n"
        "print(available_backends()['triton_split'])\n"
        "cache = PagedKVCache(num_layers=1, batch_size=1, max_context_len=8, num_kv_heads=1, head_dim=64,"
        " dtype=torch.float32)\n"
        "prepare(torch.zeros(1, 1, 1, 64), cache, backend='triton_split')"
    )
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "needs a CUDA device" in done.stdout or "needs triton" in done.stdout
    assert "BackendUnavailable: backend 'triton_split' is unavailable: needs" in done.stderr


def test_max_error_of_a_poisoned_output_is_infinite():
    ref = torch.tensor([1.0, -2.0])
    assert max_error(torch.tensor([1.0, -1.0]), ref) == 0.5
    assert max_error(torch.tensor([1.0, math.nan]), ref) == math.inf
