"""The loop on captured passes, and captured drafts: the text, the states and the drafts of the eager ones.

Without a GPU the same kernels run one by one under the interpreter, with nothing captured.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from labkit.accept import accept_greedy
from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.captured import CapturedAutoregressive, CapturedBlock
from labkit.drafting.ngram import NgramDrafter
from labkit.drafting.tree import TreeShape
from labkit.errors import Unsupported
from labkit.experiments import loop
from labkit.experiments.places import by_name
from labkit.models.graph_target import GraphTarget
from labkit.models.layers import Taps
from labkit.models.static_forward import StaticForward
from labkit.models.target import ModelTarget
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import load_model
from labkit.paths import DATA
from labkit.shapes import model_shape
from labkit.speculation import Draft, Request, speculate
from labkit.workloads import load_prompts
from tests.interpreter import assert_passes_interpreted, interpreted
from tests.test_heads import TAPS, make_head
from tests.test_speculation_model import assert_same_text, tiny_prompts

PAIRS = {"autoregressive": (AutoregressiveDrafter, CapturedAutoregressive), "block": (BlockDrafter, CapturedBlock)}


def test_under_the_interpreter():
    assert_passes_interpreted(__file__)


def tiny(vocab_size=64, seed=1, **options):
    shape = replace(model_shape("tiny"), vocab_size=vocab_size, intermediate_size=192)
    return load_model(shape, seed=seed, linear_backend="torch.linear", **options)


@interpreted
def test_taps_are_those_of_the_decoder(generator):
    """Layer 2 of two is the output of the final norm."""
    layers = (0, 1, 2)
    decoder, ids = tiny(), torch.randint(64, (2, 3), generator=generator)
    cache = decoder.new_cache(2, 64)
    cache.fill_random([20, 9], generator)
    wanted, got = torch.full((2, 2, 3, len(layers) * decoder.shape.hidden_size), torch.nan)
    decoder.forward(ids, cache.clone(), backend="sdpa", taps=Taps(layers, wanted))
    forward = StaticForward(decoder, cache, q_len=3, backend="triton_split", taps=Taps(layers, got))
    forward.token_ids.copy_(ids)
    forward.run()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@interpreted
def test_passes_change_neither_text_nor_states():
    """Two requests of unequal lengths, each with its own acceptance."""
    decoder = tiny(vocab_size=5)
    prompts = tiny_prompts(decoder, (4, 7))
    room = {"batch_size": 2, "max_context_len": 64, "taps": TAPS, "verify_backend": "sdpa"}
    plain, target = ModelTarget(decoder, **room), GraphTarget(decoder, max_q_len=5, **room)
    expected = speculate(plain, None, prompts, num_speculative_tokens=0, max_new_tokens=8)
    target.verify_backend = "triton_split"
    got = speculate(target, NgramDrafter(min_ngram=1), prompts, num_speculative_tokens=2, max_new_tokens=8)
    assert any(step.num_accepted_tokens for one in got for step in one.steps)
    for row, prompt in enumerate(prompts):
        assert_same_text(decoder, prompt, expected[row].output_ids, got[row].output_ids)
        held = slice(0, len(prompt) + 7)
        torch.testing.assert_close(target._hidden[row, held], plain._hidden[row, held], rtol=1e-3, atol=1e-3)


@interpreted
def test_passes_that_cannot_be_captured():
    target = GraphTarget(tiny(), batch_size=1, max_context_len=64, max_q_len=5, verify_backend="sdpa")
    with pytest.raises(Unsupported, match="'sdpa' must be prepared again"):
        target.capture("sdpa", [1, 4])
    assert target.cache.context_lens == [0]


def drafts_of(target, drafter, prompt, k, num_tokens):
    """The text, and what was drafted, kept and added at each step."""
    steps = []

    def accept(logits, draft):
        steps.append((draft.token_ids[0, : draft.lengths[0]].tolist(), accept_greedy(logits, draft).tolist()))
        return accept_greedy(logits, draft)

    (made,) = speculate(target, drafter, [prompt], num_speculative_tokens=k, max_new_tokens=num_tokens, accept=accept)
    return made.output_ids, steps


@interpreted
@pytest.mark.parametrize("layout", PAIRS)
def test_drafts_are_those_of_the_eager_drafter(tmp_path, layout):
    """Twice in a row, since the graphs and the cache outlive a run."""
    decoder = tiny(vocab_size=5, seed=6)
    make_head(decoder, layout, tmp_path, draft_vocab_size=5)
    (prompt,) = tiny_prompts(decoder, (6,))
    target = ModelTarget(decoder, batch_size=1, max_context_len=64, verify_backend="sdpa", taps=TAPS)
    eager, ours = PAIRS[layout]
    wanted = drafts_of(target, eager.from_folder(tmp_path, target), prompt, 3, 14)
    drafter = ours.from_folder(tmp_path, target, num_speculative_tokens=3)
    assert {accepted for _, ((accepted,), _) in wanted[1]} >= {0, 3}, "none and all of the drafts are kept somewhere"
    for _ in range(2):
        assert drafts_of(target, drafter, prompt, 3, 14) == wanted


@interpreted
@pytest.mark.parametrize("layout", PAIRS)
def test_trees_are_drafted_and_kept_as_in_eager_passes(tmp_path, layout):
    decoder, shape = tiny(vocab_size=5, seed=6), TreeShape(3, 10)
    make_head(decoder, layout, tmp_path, draft_vocab_size=5)
    (prompt,) = tiny_prompts(decoder, (6,))
    room = {"batch_size": 1, "max_context_len": 64, "verify_backend": "sdpa_masked", "taps": TAPS}
    eager, graph = ModelTarget(decoder, **room), GraphTarget(decoder, max_q_len=11, **room)
    kind, ours = PAIRS[layout]
    wanted = drafts_of(eager, kind.from_folder(tmp_path, eager, tree=shape), prompt, 3, 14)
    assert any(accepted for _, ((accepted,), *_) in wanted[1])
    graph.verify_backend = "triton_split"
    drafter = ours.from_folder(tmp_path, graph, num_speculative_tokens=3, tree=shape)
    for _ in range(2):
        assert drafts_of(graph, drafter, prompt, 3, 14) == wanted


def check_tree_passes(decoder, generator, tolerance):
    """Two trees of one size through one captured pass, the second behind what was kept of the first, and eager ones.

    Logits, and the states of what is kept; keys and values of a kept path show in the next logits.
    """
    room = {"batch_size": 2, "max_context_len": 96, "taps": TAPS, "verify_backend": "sdpa_masked"}
    eager, graph = ModelTarget(decoder, **room), GraphTarget(decoder, max_q_len=10, **room)
    requests = [Request(row, list(prompt), len(prompt)) for row, prompt in enumerate(tiny_prompts(decoder, (6, 20)))]
    for target in (eager, graph):
        target.start(requests)
    graph.verify_backend = "triton_split"
    graph.capture("triton_split", [10], is_tree=True)
    for request in requests:
        request.token_ids.append(1)
    trees = torch.tensor([[-1, -1, 1, 0, 0, 2, 3, 3, 7], [-1, -1, 1, 0, 2, 4, 3, 3, 7]], device=decoder.device)
    for parents, path in ((trees, [0, 3, 7]), (trees.flip(0), [1, 2])):
        tokens = torch.randint(decoder.shape.vocab_size, (2, 9), generator=generator)
        draft = Draft(tokens.to(decoder.device), [9, 9], parents=parents, depth=4)
        wanted, got = (target.verify(requests, draft) for target in (eager, graph))
        assert (wanted - got).abs().max() <= tolerance * wanted.abs().max()
        for target in (eager, graph):
            target.keep(requests, [path, path])
        for row, request in enumerate(requests):
            request.token_ids += [*tokens[row, path].tolist(), 2]
            wanted, got = (target._hidden[row, : len(request.token_ids) - 1].float() for target in (eager, graph))
            assert (wanted - got).abs().max() <= tolerance * wanted.abs().max()
    assert len(graph._forwards) == 1


@interpreted
def test_a_tree_pass_is_the_eager_one(generator):
    check_tree_passes(tiny(), generator, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_a_captured_tree_pass_is_the_eager_one(generator, dtype, tolerance):
    check_tree_passes(tiny(dtype=dtype, device="cuda"), generator, tolerance)


def assert_near(decoder, prompt, expected, got):
    """As `assert_same_text`; in 16 bits a tie is near within 3% of the largest logit."""
    if decoder.dtype == "float32" or expected == got:
        assert_same_text(decoder, prompt, expected, got)
        return
    place = next(i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1])
    cache = decoder.new_cache(1, len(prompt) + place + 1)
    logits = decoder.prefill([*prompt, *expected[:place]], cache, 0, backend="sdpa").float()
    margin = logits[expected[place]] - logits[got[place]]
    assert margin.abs() < 0.03 * logits.abs().max(), f"differs at output token {place}, margin {margin:.2e}"
    print(f"near-tie at output token {place}, margin {margin:.2e}")


def check_graphs(decoder, folders, prompts, taps, ks, num_tokens):
    """Graph mode against plain eager decoding, every drafter on one target; returns drafts kept by drafter and k."""
    kept = {}
    for prompt in prompts:
        options = {"batch_size": 1, "max_context_len": len(prompt) + num_tokens + 24, "verify_backend": "sdpa"}
        (plain,) = speculate(
            ModelTarget(decoder, **options), None, [prompt], num_speculative_tokens=0, max_new_tokens=num_tokens
        )
        target, eager = (
            GraphTarget(decoder, max_q_len=17, taps=taps, **options),
            ModelTarget(decoder, taps=taps, **options),
        )
        target.verify_backend = target.decode_backend = "triton_split"
        target.capture("triton_split", range(1, max(ks) + 2))
        for _ in range(2):
            (again,) = speculate(target, None, [prompt], num_speculative_tokens=0, max_new_tokens=num_tokens)
            assert_near(decoder, prompt, plain.output_ids, again.output_ids)
        for k in ks:
            drafters = {"ngram": (NgramDrafter(), NgramDrafter())}
            for layout, folder in folders.items():
                first, second = PAIRS[layout]
                drafters[layout] = (
                    first.from_folder(folder, eager), second.from_folder(folder, target, num_speculative_tokens=k)
                )  # fmt: skip
                tree = {"tree": TreeShape(4, 16)}
                drafters[f"{layout}+tree"] = (
                    first.from_folder(folder, eager, **tree),
                    second.from_folder(folder, target, num_speculative_tokens=k, **tree),
                )
            for name, (one, other) in drafters.items():
                is_tree = name.endswith("+tree")
                eager.verify_backend = "sdpa_masked" if is_tree else "sdpa"
                wanted, got = (
                    drafts_of(eager, one, prompt, k, num_tokens),
                    drafts_of(target, other, prompt, k, num_tokens),
                )
                again = drafts_of(target, other, prompt, k, num_tokens)
                assert again == got, "a replay of the same is the same"
                assert_near(decoder, prompt, plain.output_ids, got[0])
                if decoder.dtype == "float32" and got[0] == wanted[0] and not is_tree:
                    assert got[1] == wanted[1], f"{name}: other drafts than the eager drafter's"
                ours, theirs = ([accepted for _, ((accepted,), *_) in steps] for _, steps in (got, wanted))
                kept.setdefault((name, k), []).append((sum(ours), sum(theirs)))
    return kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_seeded_model(tmp_path, dtype):
    decoder, folders = tiny(vocab_size=5, seed=6, dtype=dtype, device="cuda"), {}
    for layout in PAIRS:
        folders[layout] = tmp_path / layout
        make_head(tiny(vocab_size=5, seed=6), layout, folders[layout], draft_vocab_size=5)
    print(check_graphs(decoder, folders, tiny_prompts(decoder, (6, 40)), TAPS, (1, 3), 40))


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_smollm2(dtype):
    decoder, encode = load_model("smollm2-135m", dtype=dtype, device="cuda"), load_tokenizer("smollm2-135m").encode_chat
    folders = {layout: DATA / "models" / f"smollm2-135m-{layout}" for layout in PAIRS}
    prompts = [encode(list(prompt.messages)) for prompt in load_prompts("code_editing", limit=1)]
    kept = check_graphs(decoder, folders, prompts, (1, 14, 26), (3, 7), 40)
    print(kept)
    for name, pairs in kept.items():
        ours, theirs = map(sum, zip(*pairs, strict=True))
        assert abs(ours - theirs) <= 0.2 * theirs + 4, (
            f"{name}: {ours} drafts kept in graphs, {theirs} by the eager one"
        )


@pytest.mark.gpu
@pytest.mark.model
def test_the_loop_measures_real_acceptance_in_graph_mode():
    drafters = ["ngram", "autoregressive", "block", "autoregressive+tree", "block+tree"]
    axes = {"drafter": drafters, "context_len": [0], "max_new_tokens": [24]}
    backends = {"verify_backend": ["triton_split", "sdpa"], "decode_backend": ["triton_split"]}
    grid = {"acceptance": ["real"], "num_speculative_tokens": [3], "num_rounds": [2], "max_repeats": [1]}
    arms, local = by_name(loop.points("gpu", **axes, **backends, **grid), drafters=True)
    for arm, rows in zip(arms, loop.measure([arm | local for arm in arms]), strict=True):
        if arm.get("verify_backend") == "sdpa":
            assert isinstance(rows, Unsupported), arm
        else:
            assert {row["round"] for row in rows} == {0, 1}, rows
