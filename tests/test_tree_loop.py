"""Draft trees in the timed loop: the text of plain decoding, rows that say what ran, the counts of `acceptance`."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import labkit.speculation
from labkit.cli import main
from labkit.decide.reprice import reprice
from labkit.drafting.named import num_nodes
from labkit.errors import InputError
from labkit.experiments import acceptance, estimate, loop
from labkit.experiments.places import by_name
from labkit.models.weights import load_model
from labkit.results import load_runs
from tests.test_heads import make_head
from tests.test_weights import write_folder

WORDS = "abcde"
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
K, NODES = 3, 16


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Axes of a tiny seeded target of five tokens, with heads that agree with it now and then, and two prompts."""
    folder = tmp_path_factory.mktemp("world")
    target = folder / "target"
    target.mkdir()
    write_folder(target, SIZES | {"vocab_size": len(WORDS)})
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = WhitespaceSplit()
    (target / "tokenizer.json").write_text(backend.to_str())
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for layout in ("autoregressive", "block"):
        make_head(load_model(target), layout, folder / layout, draft_vocab_size=len(WORDS))
    prompts = folder / "letters.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b c d e a b c", "e d e d b")))
    axes = {"target": [str(target)], "workload": [str(prompts)], "num_prompts": [2], "context_len": [0]}
    axes |= {"max_new_tokens": [40], "num_speculative_tokens": [K], "verify_backend": ["sdpa_masked"]}
    return folder, axes


def timed(axes, drafters):
    grid = {"drafter": drafters, "acceptance": ["real"], "decode_backend": ["sdpa"], "num_rounds": [2]}
    points, local = by_name(loop.points("ci", **axes, **grid), drafters=True)
    return [point | local for point in points]


@pytest.mark.parametrize("layout", ["autoregressive", "block"])
def test_the_timed_text_is_that_of_plain_decoding(world, layout, monkeypatch):
    folder, axes = world
    texts, speculate = [], labkit.speculation.speculate

    def recorded(target, drafter, prompts, **options):
        made = speculate(target, drafter, prompts, **options)
        texts.append((tuple(prompts[0]), None if drafter is None else drafter.name, made[0].output_ids))
        return made

    monkeypatch.setattr(labkit.speculation, "speculate", recorded)
    head = str(folder / layout)
    points = timed(axes, [f"{head}+tree", head, "ngram"])
    kept = {}
    for prompt_id in {point["prompt_id"] for point in points}:
        arms = [point for point in points if point["prompt_id"] == prompt_id]
        for arm, rows in zip(arms, loop.measure(arms), strict=True):
            assert {row["round"] for row in rows} == {0, 1}, rows
            name = arm.get("drafter", "")
            for row in rows:
                is_drafted = row["q_len"] > 1
                if name.endswith("+tree"):
                    nodes, depth = (NODES, K) if is_drafted else (0, 0)
                    assert (row["q_len"], row["num_draft_nodes"]) == (nodes + 1, nodes)
                    assert (row["draft_depth"], row["num_drafted_tokens"]) == (depth, depth)
                else:
                    assert row["q_len"] == row["num_drafted_tokens"] + 1
                    assert row["draft_depth"] is row["num_draft_nodes"] is None
                parts = sum(row[part] for part in ("draft_ms", "verify_ms", "accept_ms", "gap_ms"))
                assert parts == pytest.approx(row["step_ms"], rel=1e-6)
            kept[name, prompt_id] = [row["num_accepted_tokens"] for row in rows if row["round"] == 0]
    for prompt in {prompt for prompt, _, _ in texts}:
        assert len({tuple(text) for own, _, text in texts if own == prompt}) == 1
        assert len({name for own, name, _ in texts if own == prompt}) == 3, "plain, the head (twice) and n-gram"
    tree = next(point["drafter"] for point in points if str(point.get("drafter")).endswith("+tree"))
    counted, local = by_name(acceptance.points("ci", **axes, drafter=[f"{head}+tree"]), drafters=True)
    for point, (row,) in zip(counted, acceptance.measure([point | local for point in counted]), strict=True):
        own = kept[tree, point["prompt_id"]]
        whole = [count for count in own if count is not None]
        assert (row["num_verify_steps"], row["num_truncated_steps"]) == (len(whole), len(own) - len(whole))
        assert row["num_accepted_tokens"] == sum(whole) > 0
        assert (row["draft_depth"], row["num_draft_nodes"]) == (K, NODES)


def test_a_run_from_the_command_line(world, tmp_path, capsys):
    folder, axes = world
    head, words = str(folder / "autoregressive"), {"acceptance": ["real"], "decode_backend": ["sdpa"]}
    words |= axes | {"drafter": [f"{head}+tree", head, "ngram"], "verify_backend": ["sdpa_masked", "sdpa"]}
    target = words.pop("target")[0]
    assigned = [f"{name}={','.join(map(str, values))}" for name, values in words.items()]
    command = ["run", "loop", "--preset", "ci", "--model", target, "--out", str(tmp_path), "--set", *assigned]
    assert main(command) == 0
    assert "2 x unsupported: backend 'sdpa', draft trees: has the causal mask only" in capsys.readouterr().out
    assert main(["check", str(tmp_path)]) == 0
    rows = load_runs("loop", tmp_path)
    trees = rows[rows["drafter"].fillna("").str.endswith("+tree") & (rows["status"] == "ok")]
    assert set(zip(trees["q_len"], trees["num_draft_nodes"], strict=True)) == {(1, 0), (NODES + 1, NODES)}
    with pytest.raises(InputError, match="trace: want steps with chains, got draft trees"):
        reprice(trees, rows)
    capsys.readouterr()
    assert main(["breakeven", "--cost", str(tmp_path), "--acceptance-length", "2"]) == 2
    assert "acceptance=none" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["none", "forced"])
def test_imposed_lengths_are_of_chains(world, kind):
    folder, axes = world
    with pytest.raises(InputError, match=f"wanted acceptance=real to time trees; acceptance={kind}"):
        loop.points("ci", **axes | {"context_len": [64]}, drafter=[f"{folder / 'block'}+tree"], acceptance=[kind])


def test_a_plan_counts_the_nodes(world):
    folder, axes = world
    head, grid = str(folder / "block"), axes | {"acceptance": ["real"]}
    plans = (loop.points("ci", drafter=[name], **grid) for name in (head, f"{head}+tree"))
    chain, tree = (estimate.memory_bytes("loop", plan) for plan in plans)
    assert tree - chain == 8 * len(WORDS) * (NODES - K)
    assert [num_nodes(name, k) for name in ("x", "x+tree") for k in (1, 2, 7)] == [1, 2, 7, 4, 16, 16]
