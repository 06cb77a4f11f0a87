"""Draft heads: published layouts, what they refuse, and that what is trained is what is run."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.accept import accept_sampling, sampling_probs
from labkit.drafting.autoregressive import AutoregressiveDrafter
from labkit.drafting.block import BlockDrafter
from labkit.drafting.checkpoint import read_checkpoint
from labkit.drafting.matches import record_matches, simulate
from labkit.drafting.ngram import NgramDrafter
from labkit.drafting.tree import TreeShape
from labkit.errors import InputError
from labkit.models.layers import Taps
from labkit.models.target import ModelTarget
from labkit.models.weights import RandomWeights, expected_tensors, load_model
from labkit.shapes import model_shape
from labkit.speculation import Request, speculate
from labkit.training import data, heads
from labkit.training.checkpoints import BLOCK_SIZE, head_config, head_shape, write_head
from tests.test_accept_sampling import chi_square_p
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
    taught = torch.zeros(len(texts), window, 1), torch.zeros(len(texts), window, dtype=torch.int64)
    return heads.Batch(token_ids, first, lens, decoder.embed(token_ids).clone(), out, *taught)


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


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory):
    """Layout -> a tiny target with few tokens and a head that happens to agree with it now and then."""
    found = {}
    for layout, seed in (("autoregressive", 4), ("block", 6)):
        decoder = load_model(replace(model_shape("tiny"), vocab_size=5), seed=seed)
        folder = tmp_path_factory.mktemp(layout)
        make_head(decoder, layout, folder, draft_vocab_size=5)
        found[layout] = (decoder, folder)
    return found | {"ngram": found["autoregressive"]}


@pytest.mark.parametrize("layout", ["autoregressive", "block", "ngram"])
@pytest.mark.parametrize("options", [{}, {"tree": TreeShape(3, 9)}, {"min_confidence": 0.2}])
def test_every_k_from_one_pass_counts_as_the_loop_does(agreeing, layout, options):
    decoder, folder = agreeing[layout]
    prompts = tiny_prompts(decoder, (5, 9, 7))
    run = {"max_new_tokens": 30, "stop_token_ids": [4]}
    target = ModelTarget(decoder, batch_size=3, max_context_len=120, verify_backend="sdpa_masked", taps=TAPS)
    if layout == "ngram":
        drafter = NgramDrafter(min_ngram=1)
    else:
        kind = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout]
        drafter = kind.from_folder(folder, target, **options)
    texts = speculate(target, None, prompts, num_speculative_tokens=0, **run)
    largest = record_matches(drafter, texts, 6)
    total = 0
    for k in (6, 3, 1):
        matches = record_matches(drafter, texts, k) if options.get("tree") and layout != "ngram" else largest
        live = speculate(target, drafter, prompts, num_speculative_tokens=k, **run)
        assert [one.output_ids for one in live] == [one.output_ids for one in texts]
        for match, generation in zip(matches, live, strict=True):
            nodes = getattr(drafter, "num_draft_nodes", None)
            simulated = [step for step in simulate(match, k, 30) if not step.truncated]
            real = [step for step in generation.steps if not step.truncated]
            assert [(s.context_len, s.num_accepted_tokens) for s in simulated] == [
                (s.context_len, s.num_accepted_tokens) for s in real
            ]
            if not nodes:
                assert [s.num_drafted_tokens for s in simulated] == [s.num_drafted_tokens for s in real]
            total += sum(step.num_accepted_tokens for step in real)
    assert total > 0


def streams(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("layout", ["autoregressive", "block"])
def test_sampled_drafts_leave_the_targets_distribution(agreeing, layout):
    """The second and third token of a text, out of the loop with a head that samples, against the target's own."""
    decoder, folder = agreeing[layout]
    prompt, draws = [3, 1, 2], 500
    target = ModelTarget(decoder, batch_size=draws, max_context_len=16, verify_backend="sdpa_masked", taps=TAPS)
    kind = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout]
    options = {} if layout == "block" else {"backend": "sdpa_masked"}
    drafter = kind.from_folder(folder, target, temperature=0.7, **options)
    rule = partial(accept_sampling, temperature=0.7, top_p=0.9)
    run = {"num_speculative_tokens": 2, "max_new_tokens": 3, "accept": rule, "generators": streams(range(draws))}
    runs = speculate(target, drafter, [prompt] * draws, **run)
    cache = decoder.new_cache(1, 16)
    probs = lambda text: sampling_probs(  # noqa: E731
        decoder.forward(torch.tensor([text]), cache.clone(), backend="reference", logits="last")[0, 0],
        temperature=0.7,
        top_p=0.9,
    )
    first = probs(prompt)
    second = sum(first[a] * probs([*prompt, a]) for a in range(5) if first[a] > 0)
    found = torch.bincount(torch.tensor([run.output_ids[1] for run in runs]), minlength=5)
    assert chi_square_p(found, second) > 1e-3


@pytest.mark.parametrize("layout", ["autoregressive", "block"])
def test_a_head_drafts_alike_after_a_run_whose_passes_kept_no_states(agreeing, layout):
    decoder, folder = agreeing[layout]
    prompts, run = tiny_prompts(decoder, (5, 9)), {"num_speculative_tokens": 3, "max_new_tokens": 30}
    steps = []
    for earlier in (False, True):
        target = ModelTarget(decoder, batch_size=2, max_context_len=120, verify_backend="sdpa_masked", taps=TAPS)
        if earlier:
            target._hidden.zero_()
            target.writes_states = False
            speculate(target, NgramDrafter(), prompts, **run)
            assert not any(target._hidden[row, len(prompts[row]) :].any() for row in range(2))
            target.writes_states = True
        kind = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout]
        made = speculate(target, kind.from_folder(folder, target), prompts, **run)
        steps.append([[step.num_accepted_tokens for step in text.steps] for text in made])
    assert steps[0] == steps[1]
    assert any(map(any, steps[0]))


def rename(tensors, **pairs):
    return {re.sub(old, new, name): value for name, value in tensors.items() for old, new in [pairs["pair"]]}


def first_drafts(decoder, folder, kind=AutoregressiveDrafter, k=3, **options):
    prompts = tiny_prompts(decoder, (9, 14))
    target = ModelTarget(
        decoder, batch_size=2, max_context_len=80, verify_backend="sdpa", taps=options.pop("taps", TAPS)
    )
    drafter = kind.from_folder(folder, target, **options)
    requests = [Request(i, list(text), 4) for i, text in enumerate(prompts)]
    target.start(requests)
    drafter.start(requests)
    return drafter.propose(requests, k).token_ids


def test_names_and_nesting_of_other_exporters(tiny, tmp_path):
    """midlayer or layers.0; ids nested (out(n)) or at the top in vLLM's numbering; a nested layer config."""
    make_head(tiny, "autoregressive", tmp_path / "a")
    expected = first_drafts(tiny, tmp_path / "a")
    tensors, config = load_file(tmp_path / "a/model.safetensors"), json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "b").mkdir()
    save_file(rename(tensors, pair=("^midlayer", "layers.0")), tmp_path / "b/model.safetensors")
    layer_keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    nested = {
        key: config.pop(key) for key in (*layer_keys, "rms_norm_eps", "rope_theta", "num_hidden_layers", "hidden_act")
    }
    nested |= {"vocab_size": config.pop("vocab_size"), "max_position_embeddings": config.pop("max_position_embeddings")}
    config.pop("eagle_config")
    config |= {
        "transformer_layer_config": nested,
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
    }
    config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in TAPS]
    (tmp_path / "b/config.json").write_text(json.dumps(config))
    assert torch.equal(first_drafts(tiny, tmp_path / "b"), expected)


def test_an_own_head_and_embedding_are_used(tiny, tmp_path):
    _, _, vocabulary = make_head(tiny, "autoregressive", tmp_path)
    expected = first_drafts(tiny, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {"lm_head.weight": tiny.head_weight[vocabulary].clone(), "embed_tokens.weight": tiny.embedding.clone()}
    save_file(tensors | own, tmp_path / "model.safetensors")
    assert torch.equal(first_drafts(tiny, tmp_path), expected)
    save_file(
        tensors | own | {"lm_head.weight": own["lm_head.weight"].flip(0).contiguous()}, tmp_path / "model.safetensors"
    )
    assert not torch.equal(first_drafts(tiny, tmp_path), expected)


def test_norms_before_the_fusion_and_residuals(tiny, tmp_path):
    """fc_norm of ones divides each tap by its length; norm_before_residual and norm_output change the drafts too."""
    make_head(tiny, "autoregressive", tmp_path)
    plain = first_drafts(tiny, tmp_path, k=6)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    hidden, found = tiny.shape.hidden_size, [plain]
    norms = {f"fc_norm.{i}.weight": torch.ones(hidden) for i in range(2)}
    whole = {"input_norm.weight": torch.ones(2 * hidden)}
    for more, keys in ((norms, {}), (whole, {}), ({}, {"norm_before_residual": True}), ({}, {"norm_output": True})):
        save_file(tensors | more, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | keys))
        found.append(first_drafts(tiny, tmp_path, k=6))
    assert len({tuple(drafts.flatten().tolist()) for drafts in found}) == 5


def mtp_folder(folder, style):
    """A one-layer target with a multi-token prediction layer behind it, in DeepSeek's or in Qwen's names."""
    folder.mkdir()
    shape = replace(model_shape("tiny"), name="tiny", num_layers=1)
    weights = RandomWeights(3, "cpu")
    tensors = {name: weights(name, size).clone() for name, size in expected_tensors(shape).items()}
    layer = {
        name[15:]: weights("m" + name, value.shape).clone()
        for name, value in tensors.items()
        if name.startswith("model.layers.0.")
    }
    hidden = shape.hidden_size
    parts = {
        "enorm": 1.1 * torch.ones(hidden),
        "hnorm": 0.9 * torch.ones(hidden),
        "fc": weights("fc", (hidden, 2 * hidden)).clone(),
    }
    parts["norm"] = torch.ones(hidden)
    names = {
        "deepseek": (
            "model.layers.1.",
            {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"},
            "",
        ),
        "qwen": (
            "mtp.",
            {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"},
            "layers.0.",
        ),
    }
    prefix, renamed, inner = names[style]
    tensors |= {f"{prefix}{renamed[name]}.weight": value for name, value in parts.items()}
    tensors |= {f"{prefix}{inner}{name}": value for name, value in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_qo_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_context_len,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return parts, layer, shape


def test_prediction_layers_inside_the_targets_checkpoint(tmp_path):
    """Both namings draft alike, and the first draft is that of the formula."""
    parts, layer, shape = mtp_folder(tmp_path / "deepseek", "deepseek")
    mtp_folder(tmp_path / "qwen", "qwen")
    drafts = {}
    for style in ("deepseek", "qwen"):
        decoder = load_model(tmp_path / style)
        drafts[style] = first_drafts(decoder, tmp_path / style, taps=(1,))
    assert torch.equal(drafts["deepseek"], drafts["qwen"])

    net = heads._Net(
        {name: value.float() for name, value in layer.items()} | {f"{k}.weight": v for k, v in parts.items()}, shape
    )
    for row, text in enumerate(tiny_prompts(decoder, (9, 14))):
        out = torch.empty(1, len(text), shape.hidden_size)
        decoder.forward(torch.tensor([text]), decoder.new_cache(1, 64), backend="reference", taps=Taps((1,), out))
        token, state = decoder.embed(torch.tensor([text[1:]])), out[:, :-1]
        x = net.linear("fc", torch.cat([net.norm("enorm", token), net.norm("hnorm", state)], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        q, k, v = net.qkv("", net.norm("input_layernorm", x), positions)
        visible = positions[:, None] <= positions[..., None]
        attended = heads.AutoregressiveNet._attend(q, k, v, visible, [], [])
        y = net.norm("norm", net.mlp("", x + net.linear("self_attn.o_proj", attended)))
        assert (y[0, -1] @ decoder.head_weight.T).argmax() == drafts["qwen"][row, 0]


def edited(folder, config=None, tensors=None):
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    if tensors:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("layout", "config", "tensors", "message"),
    [
        ("autoregressive", {"target_hidden_size": 64}, None, "target hidden size is 64, target random:tiny has 128"),
        ("autoregressive", {"vocab_size": 999}, None, "vocabulary is 999, target random:tiny has 512"),
        ("autoregressive", {"num_target_layers": 30}, None, "made for 30 target layers, target random:tiny has 2"),
        ("block", {"dflash_config": {"target_layer_ids": [0, 9], "mask_token_id": 3}}, None, r"taps layers \[0, 9\]"),
        (
            "block",
            {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 512}},
            None,
            "mask_token_id of target",
        ),
        ("block", {"is_causal": True}, None, "causal"),
        (
            "autoregressive",
            None,
            {"fc.weight": torch.zeros(128, 384)},
            r"fc.weight has shape \(128, 384\), its config.json \(hidden size 128\) and target .* want \(128, 256\)",
        ),
        ("autoregressive", None, {"d2t": torch.full((100,), 500)}, "d2t maps to 500..599, target random:tiny has 512"),
        ("block", {"architectures": ["DominoDraftModel"]}, None, "wanted an EAGLE-3, MTP or DFlash head"),
    ],
)
def test_a_head_that_does_not_fit_names_both_sides(tiny, tmp_path, layout, config, tensors, message):
    make_head(tiny, layout, tmp_path)
    edited(tmp_path, config, tensors)
    target = ModelTarget(tiny, batch_size=1, max_context_len=40, verify_backend="sdpa", taps=TAPS)
    kind = {"autoregressive": AutoregressiveDrafter, "block": BlockDrafter}[layout]
    with pytest.raises(InputError, match=message) as error:
        kind.from_folder(tmp_path, target)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_and_folder(tiny, tmp_path):
    make_head(tiny, "block", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name != "hidden_norm.weight"}, tmp_path / "model.safetensors"
    )
    target = ModelTarget(tiny, batch_size=1, max_context_len=40, verify_backend="sdpa", taps=TAPS)
    with pytest.raises(InputError, match=r"must hold the tensor hidden_norm.weight, which is missing"):
        BlockDrafter.from_folder(tmp_path, target)
    with pytest.raises(InputError, match="draft model must be a folder"):
        read_checkpoint(tmp_path / "none", tiny)


def test_taps_of_a_chunked_prefill_are_those_of_one_pass(tiny):
    (text,) = tiny_prompts(tiny, (30,))
    whole, parts = torch.empty(1, 60, 256), torch.empty(1, 60, 256)
    tiny.forward(torch.tensor([text]), tiny.new_cache(1, 64), backend="reference", taps=Taps(TAPS, whole))
    tiny.prefill(text, tiny.new_cache(1, 64), 0, backend="sdpa", chunk=7, taps=Taps(TAPS, parts))
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=1e-4)


def test_stored_answers_come_back(tmp_path):
    answers = [data.Answer([1, 2, 3], [4]), data.Answer([5], list(range(40)))]
    data.write_answers(tmp_path / "text.npz", answers)
    assert data.read_answers(tmp_path / "text.npz") == answers
    (tmp_path / "text.npz").write_bytes(b"PK torn")
    with pytest.raises(InputError, match="wanted answers"):
        data.read_answers(tmp_path / "text.npz")
