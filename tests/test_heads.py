"""Draft heads: published layouts, what they refuse, and that what is trained is what is run."""

import pytest
import torch

from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.tree import TreeShape
from labkit.models.layers import Taps
from labkit.models.target import ModelTarget
from labkit.models.weights import load_model
from labkit.speculation import Request, speculate
from labkit.training import heads
from labkit.training.checkpoints import BLOCK_SIZE, head_config, head_shape, write_head
from tests.test_speculation_model import assert_same_text, generate, tiny_prompts

TAPS = (0, 1)


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny", dtype="float32", device="cpu", seed=1)


def loud(parameters, generator):
    """Weights large enough that a wrong one shows."""
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in parameters.items()}


def make_head(decoder, layout, folder, draft_vocab_size=100):
    generator = torch.Generator().manual_seed(5)
    target = decoder.shape
    shape = head_shape(target, layout, len(TAPS), draft_vocab_size, None)
    init = heads.init_autoregressive if layout == "autoregressive" else heads.init_block
    parameters = loud(init(shape, len(TAPS), decoder.final_norm_weight, generator), generator)
    parameters = {name: value.bfloat16().float() for name, value in parameters.items()}
    vocabulary = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    config = head_config(shape, layout, target, TAPS, draft_vocab_size=draft_vocab_size, mask_token_id=3)
    write_head(folder, parameters, config, vocabulary, {})
    return parameters, shape, vocabulary


def make_batch(decoder, texts, firsts):
    """What the trainer makes of texts that start their answers behind ``firsts``."""
    width = max(map(len, texts))
    token_ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    out = torch.empty(len(texts), width, len(TAPS) * decoder.shape.hidden_size)
    decoder.forward(token_ids, decoder.new_cache(len(texts), width), backend="reference", taps=Taps(TAPS, out))
    lens, first = torch.tensor([len(text) for text in texts]), torch.tensor(firsts)
    window = int((lens - first).max()) - 2
    return heads.Batch(
        token_ids, first, lens, decoder.embed(token_ids).clone(), out, torch.zeros(len(texts), window, 1)
    )


def test_training_makes_the_drafts_that_the_drafter_makes_autoregressive(tiny, tmp_path):
    parameters, shape, vocabulary = make_head(tiny, "autoregressive", tmp_path)
    texts = tiny_prompts(tiny, (9, 14))
    target = ModelTarget(tiny, batch_size=2, max_context_len=80, verify_backend="reference", taps=TAPS)
    drafter = AutoregressiveDrafter.from_folder(tmp_path, target, backend="reference")
    requests = [Request(i, list(text), 4) for i, text in enumerate(texts)]
    target.start([Request(i, list(text), 4) for i, text in enumerate(texts)])
    drafter.start(requests)
    drafted = drafter.propose(requests, 4).token_ids
    # Drafts feed on one another: the trainer sees them as the text.
    whole = [text + row for text, row in zip(texts, drafted.tolist(), strict=True)]
    batch = make_batch(tiny, whole, [5, 5])
    net = heads.AutoregressiveNet(parameters, shape)
    for step, states in enumerate(net.states(batch, 4)):
        logits = net.norm("norm", states) @ tiny.head_weight[vocabulary].T
        for row, text in enumerate(texts):
            best = vocabulary[logits[row, len(text) - 2 - 5 + step].argmax()]
            assert best == drafted[row, step]


def test_training_makes_the_drafts_that_the_drafter_makes_block(tiny, tmp_path):
    parameters, shape, vocabulary = make_head(tiny, "block", tmp_path)
    texts = tiny_prompts(tiny, (9, 14))
    target = ModelTarget(tiny, batch_size=2, max_context_len=80, verify_backend="reference", taps=TAPS)
    drafter = BlockDrafter.from_folder(tmp_path, target, backend="reference")
    requests = [Request(i, list(text), 4) for i, text in enumerate(texts)]
    target.start(requests)
    drafter.start(requests)
    drafted = drafter.propose(requests, 7).token_ids
    net = heads.BlockNet(parameters, shape)
    anchors = torch.tensor([[len(text) - 1] for text in texts])
    states = net.states(make_batch(tiny, texts, [5, 5]), anchors, tiny.embed(torch.tensor(3)), BLOCK_SIZE)
    logits = states[:, 0] @ tiny.head_weight[vocabulary].T
    assert torch.equal(vocabulary[logits.argmax(dim=-1)], drafted)


def run_tiny(decoder, folder, layout, *, k, backend="sdpa_masked", temperature=0.0, prompts=None, **options):
    prompts = prompts or tiny_prompts(decoder)
    room = max(map(len, prompts)) + 90
    target = ModelTarget(decoder, batch_size=len(prompts), max_context_len=room, verify_backend=backend, taps=TAPS)
    drafter = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout].from_folder(
        folder, target, **options
    )
    return prompts, speculate(target, drafter, prompts, num_speculative_tokens=k, max_new_tokens=24)


@pytest.mark.parametrize("layout", ["autoregressive", "block"])
@pytest.mark.parametrize("options", [{}, {"tree": TreeShape(3, 10)}, {"min_confidence": 0.05}])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_greedy_text_is_that_of_plain_decoding(tiny, tmp_path, layout, options, k):
    make_head(tiny, layout, tmp_path)
    prompts, got = run_tiny(tiny, tmp_path, layout, k=k, **options)
    for prompt, expected, generation in zip(prompts, generate(tiny, prompts, None, 0, 24, "sdpa"), got, strict=True):
        assert_same_text(tiny, prompt, expected, generation.output_ids)
