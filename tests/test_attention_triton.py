"""The Triton kernels under the interpreter, which must be switched on before Triton is imported: in a child process."""

import pytest

pytest.importorskip("triton")

import torch

from labkit.attention.api import AttentionSpec, available_backends, max_error, prepare
from labkit.attention.backend_triton_ladder import VARIANTS
from labkit.attention.backend_triton_split import (
    can_overlap,
    choose_num_splits,
    choose_overlapped_tile,
    choose_tile,
    choose_tiling,
    has_gluon,
)
from labkit.attention.inputs import check, expect, make_inputs, random_tree
from labkit.shapes import AttentionShape
from tests.interpreter import IS_CHILD, assert_passes_interpreted, interpreted

BACKENDS = ["triton_nosplit", "triton_split"]
ALL = ["triton_split", *VARIANTS]


def test_under_the_interpreter():
    assert_passes_interpreted(__file__)


def check_backends(
    generator, q_len, context_len, heads, head_dim, page_size, dtype="float32", backends=BACKENDS, kv_dtype=None, **spec
):
    """Raises WrongResult where a backend is off; what each launches."""
    batch_size = 1 if isinstance(context_len, int) else len(context_len)
    shape = AttentionShape(
        batch_size, q_len, context_len, *heads, head_dim, page_size=page_size, q_dtype=dtype, kv_dtype=kv_dtype
    )
    if spec.get("tree") == "random":
        spec["tree"] = random_tree(shape, generator)
    spec = AttentionSpec(return_lse=True, **spec)
    q, cache = make_inputs(shape, generator=generator)
    expected = expect(q, cache, spec)
    infos = []
    for backend in backends:
        call = prepare(q, cache, backend=backend, spec=spec)
        check(call, cache, spec, expected)
        infos.append(call.info)
    return infos


@interpreted
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_len", [1, 127, 128])
@pytest.mark.parametrize("q_len", [1, 2, 5, 17])
def test_odd_sizes(generator, q_len, kv_len, page_size):
    check_backends(generator, q_len, max(kv_len - q_len, 0), (2, 1), 64, page_size)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_long_context(generator, page_size, dtype):
    check_backends(generator, 5, 4092, (2, 1), 16, page_size, dtype)


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 32), ((6, 2), 64), ((4, 1), 128), ((6, 1), 64), ((2, 1), 256), ((24, 1), 16)]
)
def test_groups_head_dims_and_several_row_tiles(generator, heads, head_dim):
    infos = check_backends(generator, 4, 150, heads, head_dim, 16, "float16")
    group_size = heads[0] // heads[1]
    assert infos[0]["grid"] == (1, heads[0], 1)
    assert infos[0]["kv_passes"] == group_size
    assert infos[1]["grid"][:2] == (1, heads[1])
    assert infos[1]["kv_passes"] == 1


@interpreted
@pytest.mark.parametrize("q_len", [1, 3])
def test_ragged_batch_with_empty_splits(generator, q_len):
    """The long request sets the splits, the short ones leave most of theirs empty."""
    info = check_backends(generator, q_len, (1000, 0, 130), (2, 1), 32, 16)[1]
    assert info["num_splits"] > 3


@interpreted
@pytest.mark.parametrize("max_splits", [1, 2, 3])
def test_max_splits_caps(generator, max_splits):
    info = check_backends(generator, 2, 700, (2, 1), 32, 16, max_splits=max_splits, backends=["triton_split"])[0]
    assert info["num_splits"] == max_splits
    assert info["num_programs"] == max_splits
    # Per row: partial results, and one lse each. With one split the output is written directly.
    assert info["workspace_bytes"] == (4 * 4 * max_splits * 33 if max_splits > 1 else 4 * 4)


@interpreted
def test_prefill_chunk(generator):
    check_backends(generator, 70, 90, (3, 1), 16, 16)


@interpreted
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_every_rung_and_engine_shape(generator, kv_dtype):
    """One kernel, tiled nine ways: each must count its passes over K and V as it runs them."""
    infos = check_backends(generator, 5, (150, 0), (6, 2), 64, 16, "float16", backends=ALL, kv_dtype=kv_dtype)
    found = {name: (info["num_splits"] > 1, info["kv_passes"]) for name, info in zip(ALL, infos, strict=True)}
    assert found == {
        "triton_split": (True, 1),
        "triton_nosplit": (False, 3),
        "triton_ladder_split": (True, 3),
        "triton_ladder_packed": (True, 1),
        "triton_ladder_staged": (True, 1),
        "triton_per_token": (False, 5),  # 20 tiles are already more than the programs of the made-up device
        "triton_decode8": (True, 5),
        "triton_segmented_2d": (False, 1),
        "triton_segmented_3d": (True, 1),
    }


@interpreted
@pytest.mark.parametrize("q_len", [1, 2, 7, 33, 64])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_random_trees(generator, q_len, page_size):
    check_backends(generator, q_len, (150, 0), (2, 1), 32, page_size, "float16", tree="random")


@interpreted
def test_fully_masked_rows_give_zero_and_minus_infinity(generator):
    """The second request has no context, and padding nodes that see nothing."""
    shape = AttentionShape(2, 4, (40, 0), 2, 1, 32, q_dtype="float32")
    q, cache = make_inputs(shape, generator=generator)
    spec = AttentionSpec(return_lse=True, tree=torch.tensor([[1, 3, 5, 0], [1, 3, 0, 0]]))
    for backend in ALL:
        call = prepare(q, cache, backend=backend, spec=spec)
        check(call, cache, spec)
        assert (call.out[1, 2:] == 0).all()
        assert (call.lse[1, 2:] == -torch.inf).all()


@interpreted
@pytest.mark.parametrize("window", [1, 5, 64, 130, 10_000])
def test_windows(generator, window):
    check_backends(generator, 5, (300, 20, 0), (4, 2), 32, 16, "float16", window=window)


@interpreted
def test_flat_logits_at_many_keys(generator):
    """All weights alike: a kernel that rounds small weights away shrinks the output."""
    for kv_dtype in (None, "float8_e4m3fn"):
        shape = AttentionShape(1, 2, 20_000, 2, 1, 16, q_dtype="float16", kv_dtype=kv_dtype)
        q, cache = make_inputs(shape, generator=generator)
        q.zero_()
        spec = AttentionSpec(return_lse=True)
        check(prepare(q, cache, backend="triton_split", spec=spec), cache, spec)


@interpreted
def test_replan_takes_over_new_lengths(generator):
    """As a captured graph is replayed: the launch stays, the lengths change."""
    shape = AttentionShape(2, 3, (700, 300), 2, 1, 32, q_dtype="float32")
    q, cache = make_inputs(shape, generator=generator)
    cache.truncate([200, 10])
    call = prepare(q, cache, backend="triton_split", spec=AttentionSpec(return_lse=True))
    call()
    cache.advance([500, 290])
    call.replan()
    call()
    expected = expect(q, cache)
    assert max_error(call.out, expected.out) < 1e-5
    assert max_error(call.lse, expected.lse) < 1e-5


@interpreted
def test_shared_prefix(generator):
    shape = AttentionShape(3, 2, (100, 64, 70), 2, 1, 32, q_dtype="float32", shared_prefix_len=64)
    q, cache = make_inputs(shape, generator=generator)
    assert (cache.page_table[:, :4] == cache.page_table[0, :4]).all()
    spec = AttentionSpec(return_lse=True)
    check(prepare(q, cache, backend="triton_split", spec=spec), cache, spec)


@interpreted
def test_the_read_kernel_reads_everything():
    from labkit.triton_read import BLOCK, read_kernel

    words, sums = torch.arange(3 * BLOCK, dtype=torch.float32) % 7, torch.empty(3)
    read_kernel[(3,)](words, sums, BLOCK=BLOCK)
    assert torch.equal(sums, words.view(3, -1).sum(1))


@interpreted
def test_available_and_bfloat16_refused():
    assert [available_backends()[name] for name in ALL] == [""] * len(ALL)
    from labkit.attention.triton_launch import triton_supports

    assert "bfloat16" in triton_supports(AttentionShape(1, 1, 4, 1, 1, 64), "cpu")
    assert triton_supports(AttentionShape(1, 1, 4, 1, 1, 64), "cuda") == ""
    assert "head_dim" in triton_supports(AttentionShape(1, 1, 4, 1, 1, 96), "cuda")
    assert "float8" in triton_supports(AttentionShape(1, 1, 4, 1, 1, 64, kv_dtype="float16"), "cuda")
    assert "window" in triton_supports(AttentionShape(1, 2, 4, 1, 1, 64, mask="tree", window=3), "cuda")


@pytest.mark.parametrize(
    ("num_rows", "head_dim", "shared_kb", "expected"),
    [
        (8, 128, 227, (16, 64, 4, 3)),
        (32, 128, 227, (64, 64, 4, 3)),
        (128, 128, 227, (128, 64, 8, 3)),
        (500, 128, 227, (128, 64, 8, 3)),
        (6, 256, 227, (16, 32, 4, 3)),
        (96, 256, 227, (128, 32, 8, 3)),
        (128, 128, 99, (128, 64, 8, 2)),  # a consumer card: fewer stages
        (96, 256, 64, (64, 32, 8, 1)),  # and smaller tiles
    ],
)
def test_tiles_fit_the_device(num_rows, head_dim, shared_kb, expected):
    assert choose_tile(num_rows, head_dim, 2, shared_kb << 10) == expected


@pytest.mark.parametrize(
    ("num_tiles", "num_keys", "block_m", "head_dim", "expected"),
    [
        (8, 131073, 16, 128, 33),  # two programs per SM of 132
        (8, 131080, 64, 128, 24),
        (8, 131088, 128, 128, 16),
        (4, 131073, 64, 256, 33),
        (8, 1000, 16, 128, 8),  # 128 keys at least
        (8, 1, 16, 128, 1),
        (128, 2056, 128, 128, 1),
        (128, 131088, 128, 128, 2),
        (1000, 131072, 16, 128, 2),
        (1000, 8000, 16, 128, 1),
    ],
)
def test_number_of_splits(num_tiles, num_keys, block_m, head_dim, expected):
    assert choose_num_splits(num_tiles, num_keys, 132, block_m, head_dim) == expected


HOPPER = (9, 0)


def rule(capability=HOPPER, has_gluon=True, q_len=16, heads=(24, 4), head_dim=256, **shape):
    shape = {"q_dtype": "bfloat16"} | shape
    return can_overlap(AttentionShape(1, q_len, 4096, *heads, head_dim, **shape), capability, has_gluon)


@pytest.mark.parametrize("change", [{}, {"head_dim": 128}, {"q_dtype": "float16"}])
def test_hopper_can_overlap_the_softmax(change):
    assert rule(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"capability": (8, 9)},
        {"capability": (10, 0)},
        {"has_gluon": False},
        {"kv_dtype": "float8_e4m3fn"},
        {"q_dtype": "float32"},
        {"mask": "tree"},
        {"window": 100},
        {"head_dim": 64},
    ],
)
def test_all_else_takes_the_plain_kernel(change):
    assert not rule(**change)


@pytest.mark.parametrize(
    ("q_len", "context_len", "batch_size", "heads", "head_dim", "expected"),
    [
        (16, 131072, 1, (24, 4), 256, ("overlapped", 128, 64, 5, 33)),
        (16, 131072, 16, (24, 4), 256, ("overlapped", 128, 64, 5, 2)),
        (16, 131072, 16, (64, 8), 128, ("overlapped", 128, 128, 6, 1)),  # one round of programs is enough
        (16, 16384, 4, (64, 8), 128, ("overlapped", 128, 64, 12, 4)),  # short splits: tiles of 64 keys
        (64, 16384, 1, (64, 8), 128, ("overlapped", 128, 64, 12, 4)),
        (8, 131072, 16, (24, 4), 256, ("overlapped", 64, 64, 6, 2)),
        (8, 131072, 1, (24, 4), 256, ("plain", 64, 32, 4, 33)),
        (2, 131072, 16, (24, 4), 256, ("plain", 16, 32, 3, 4)),
        (8, 131072, 16, (64, 8), 128, ("plain", 64, 64, 3, 2)),
    ],
)
def test_the_kernel_tile_and_splits_of_a_call(q_len, context_len, batch_size, heads, head_dim, expected):
    shape = AttentionShape(batch_size, q_len, context_len, *heads, head_dim, q_dtype="bfloat16")
    tiling = choose_tiling(shape, 2, 132, 227 << 10, overlaps=True)
    name = "overlapped" if tiling.is_overlapped else "plain"
    assert (name, tiling.block_m, tiling.block_n, tiling.num_stages, tiling.num_splits) == expected
    assert not choose_tiling(shape, 2, 132, 227 << 10, overlaps=False).is_overlapped


@pytest.mark.skipif(IS_CHILD, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_rows", "keys_per_split"),
    [((64, 8), 128, 128, 1000), ((64, 8), 128, 128, 10_000), ((24, 4), 256, 96, 1000), ((24, 4), 256, 48, 10_000)],
)
def test_the_overlapped_kernel_compiles_for_hopper(heads, head_dim, num_rows, keys_per_split):
    """Without a GPU: the softmax lies between the two waits for the tensor cores, and the tiles fit."""
    if not has_gluon():
        pytest.skip("this Triton has no such Gluon")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from labkit.attention.gluon_split_kernel import overlapped_split_kernel as kernel

    tile = choose_overlapped_tile(num_rows, head_dim, keys_per_split)
    constants = {
        "NUM_QO_HEADS": heads[0],
        "GROUP_SIZE": heads[0] // heads[1],
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "BLOCK_M": tile[0],
        "BLOCK_N": tile[1],
        "STAGES": tile[3],
        "PDL": True,
    }
    types = dict.fromkeys(("q", "k", "v"), "*bf16") | dict.fromkeys(("partial", "partial_lse"), "*fp32")
    types |= {"page_table": "*i32", "kv_lens": "*i32", "scale_log2": "fp32", "v_scale": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name].startswith("*")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = " ".join(compiled.asm["ptx"].split())
    after_logits = ptx[ptx.index("wgmma.wait_group.sync.aligned 1;") :]
    assert after_logits.index("ex2.approx") < after_logits.index("wgmma.wait_group.sync.aligned 0;")
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    assert compiled.metadata.shared <= 227 << 10
