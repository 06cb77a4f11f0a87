"""The Triton kernels under the interpreter, which must be switched on before Triton is imported: in a child process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from labkit.attention.api import AttentionSpec, available_backends, prepare
from labkit.attention.backend_triton_split import choose_num_splits
from labkit.attention.inputs import check, make_inputs
from labkit.paths import ROOT
from labkit.shapes import AttentionShape

IS_CHILD = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton_nosplit", "triton_split"]
interpreted = pytest.mark.skipif(not IS_CHILD, reason="runs in the child process of test_under_the_interpreter")


@pytest.mark.skipif(IS_CHILD, reason="is the child")
def test_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(generator, q_len, context_len, heads, head_dim, page_size, dtype="float32", backends=BACKENDS, **spec_fields):
    batch_size = 1 if isinstance(context_len, int) else len(context_len)
    shape = AttentionShape(batch_size, q_len, context_len, *heads, head_dim, page_size=page_size, q_dtype=dtype)
    spec = AttentionSpec(return_lse=True, **spec_fields)
    q, cache = make_inputs(shape, generator=generator)
    infos = []
    for backend in backends:
        call = prepare(q, cache, backend=backend, spec=spec)
        check(call, cache, spec)
        infos.append(call.info)
    return infos


@interpreted
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_len", [1, 127, 128])
@pytest.mark.parametrize("q_len", [1, 2, 5, 17])
def test_odd_sizes(generator, q_len, kv_len, page_size):
    run(generator, q_len, max(kv_len - q_len, 0), (2, 1), 64, page_size)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_long_context(generator, page_size, dtype):
    run(generator, 5, 4092, (2, 1), 16, page_size, dtype)


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 32), ((6, 2), 64), ((4, 1), 128), ((6, 1), 64), ((2, 1), 256), ((24, 1), 16)]
)
def test_groups_head_dims_and_several_row_tiles(generator, heads, head_dim):
    infos = run(generator, 4, 150, heads, head_dim, 16, "float16")
    group_size = heads[0] // heads[1]
    assert infos[0]["grid"] == (1, heads[0], 1)
    assert infos[0]["kv_passes"] == group_size
    assert infos[1]["grid"] == (1, heads[1] * -(-4 * group_size // 64), 2)


@interpreted
@pytest.mark.parametrize("q_len", [1, 3])
def test_ragged_batch_with_empty_splits(generator, q_len):
    """The long request sets the splits, the short ones leave most of theirs empty."""
    info = run(generator, q_len, (1000, 0, 130), (2, 1), 32, 16)[1]
    assert info["num_splits"] > 3


@interpreted
@pytest.mark.parametrize("max_splits", [1, 2, 3])
def test_max_splits_caps(generator, max_splits):
    info = run(generator, 2, 700, (2, 1), 32, 16, max_splits=max_splits, backends=["triton_split"])[0]
    assert info["num_splits"] == max_splits
    assert info["num_programs"] == max_splits
    # Per row: partial results, and one lse each. With one split the output is written directly.
    assert info["workspace_bytes"] == (4 * 4 * max_splits * 33 if max_splits > 1 else 4 * 4)


@interpreted
def test_prefill_chunk(generator):
    run(generator, 70, 90, (3, 1), 16, 16)


@interpreted
def test_available_and_bfloat16_refused():
    assert [available_backends()[name] for name in BACKENDS] == ["", ""]
    shape = AttentionShape(1, 1, 4, 1, 1, 64)
    for name in BACKENDS:
        module = __import__(f"labkit.attention.backend_{name}", fromlist=["supports"])
        assert "bfloat16" in module.supports(shape, "cpu")
        assert module.supports(shape, "cuda") == ""
        assert "head_dim" in module.supports(AttentionShape(1, 1, 4, 1, 1, 96), "cuda")


@pytest.mark.parametrize(
    ("num_tiles", "max_kv_len", "head_dim", "max_splits", "expected"),
    [
        (8, 131072, 128, None, 33),
        (4, 131072, 256, None, 33),
        (4, 131072, 256, 8, 8),
        (8, 1000, 128, None, 8),
        (8, 1, 128, None, 1),
        (1000, 131072, 128, None, 1),
    ],
)
def test_number_of_splits(num_tiles, max_kv_len, head_dim, max_splits, expected):
    assert choose_num_splits(num_tiles, max_kv_len, head_dim, 132, max_splits) == expected
