"""The prompts keep what their workload promises; contexts have the asked length and differ in nothing else."""

import difflib
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from labkit import workloads
from labkit.errors import InputError
from labkit.workloads import (
    CONTEXT_TOLERANCE,
    SEPARATOR,
    WORKLOADS,
    Message,
    Prompt,
    build_context,
    context_band,
    load_prompt_file,
    load_prompts,
    repeated_ngram_share,
)

COUNTS = {name: 24 if name in ("code_editing", "prose", "chat") else 12 for name in WORKLOADS}
# SmolLM2's longest prompt, so that each of them fits the shortest context of the demo with a filler before it.
MAX_PROMPT_TOKENS = 448


def chat_text(messages: list[Message]) -> str:
    return "".join(f"<{message['role']}> {message['content']} </s> " for message in messages) + "<assistant>"


def encode_bytes(messages: list[Message]) -> list[int]:
    return list(chat_text(messages).encode())


def encode_words(messages: list[Message]) -> list[str]:
    return chat_text(messages).split()


def all_prompts() -> list[Prompt]:
    return [prompt for name in WORKLOADS for prompt in load_prompts(name)]


def fenced(prompt: Prompt) -> tuple[str, str]:
    """Language and code of a code-editing prompt."""
    match = re.search(r"```(\w+)\n(.*?)```", prompt.messages[-1]["content"], re.DOTALL)
    assert match
    return match[1], match[2]


@pytest.mark.parametrize("name", WORKLOADS)
def test_counts_and_order(name):
    prompts = load_prompts(name)
    assert [prompt.id for prompt in prompts] == [f"{name}-{number:02d}" for number in range(1, COUNTS[name] + 1)]
    assert {prompt.workload for prompt in prompts} == {name}
    assert load_prompts(name, limit=3) == prompts[:3]


def test_prompts_differ():
    prompts = all_prompts()
    assert len({prompt.digest for prompt in prompts}) == len(prompts) == 120
    openings = Counter(prompt.messages[-1]["content"] for prompt in prompts)
    assert max(openings.values()) == 1


@pytest.mark.parametrize("prompt", load_prompts("code_editing"), ids=lambda prompt: prompt.id)
def test_code_edits_touch_5_to_60_percent_of_the_lines(prompt):
    language, original = fenced(prompt)
    before, after = original.splitlines(), prompt.reference.splitlines()
    assert 20 <= len(before) <= 60
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    assert 0.05 <= 1 - sum(block.size for block in blocks) / max(len(before), len(after)) <= 0.60
    if language == "python":
        compile(original, f"{prompt.id} original", "exec")
        compile(prompt.reference, f"{prompt.id} reference", "exec")


def test_code_editing_covers_other_languages():
    languages = Counter(fenced(prompt)[0] for prompt in load_prompts("code_editing"))
    assert set(languages) == {"python", "javascript", "c", "go", "bash", "sql"}
    assert languages["python"] == 19


def test_math_answers():
    computed = [
        12 * 18 - 175,
        180 - 24 - 2 * 24,
        80 * 3 + 60 * 2,
        (85 + 40) / 5,
        240 - 240 / 3,
        36 * (1 - 0.25),
        2 * (15 + 8) - 2,
        3 * 20 + 7 - 4 * 9,
        45 / 3 * 2 * 60,
        (270 - 60) / 15,
        96 / 6 * 2,
        28 - 28 / 2 - 8,
    ]
    assert [float(prompt.answer) for prompt in load_prompts("math")] == computed


def test_json_references_have_the_fields_of_the_schema():
    for prompt in load_prompts("json_extraction"):
        schema, text = re.search(r"Schema:\n(.*)\n\nText:\n(.*)", prompt.messages[-1]["content"], re.DOTALL).groups()
        reference = json.loads(prompt.reference)
        assert re.findall(r"^- (\w+):", schema, re.MULTILINE) == list(reference)
        numbers = [value for value in reference.values() if type(value) in (int, float)]
        words = text.replace(",", "").lower()
        spelled = {2: "second", 3: "three", 4: "four", 8: "eight", 11: "eleven"}
        for number in numbers:
            assert f"{number:g}" in words or f"{number:.2f}" in words or spelled.get(number, "?") in words


def test_agent_prompts_are_conversations():
    for prompt in load_prompts("multi_turn_agent"):
        roles = [message["role"] for message in prompt.messages]
        assert 4 <= len(roles) <= 8
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)][: len(roles)]


@pytest.mark.model
def test_every_prompt_fits_the_shortest_context(smollm2_encode):
    longest = {prompt.id: len(smollm2_encode(list(prompt.messages))) for prompt in all_prompts()}
    assert {name: count for name, count in longest.items() if count > MAX_PROMPT_TOKENS} == {}


@pytest.mark.model
@pytest.mark.parametrize("name", ["code_editing", "prose", "json_extraction"])
def test_context_length_with_a_real_tokenizer(name, smollm2_encode):
    for prompt in load_prompts(name, limit=3):
        for num_tokens in (512, 2048):
            context = build_context(prompt, num_tokens, encode=smollm2_encode, seed=0)
            assert list(context.token_ids) == smollm2_encode(list(context.messages))
            assert num_tokens - CONTEXT_TOLERANCE <= len(context.token_ids) <= num_tokens


@pytest.fixture(scope="module")
def smollm2_encode():
    from labkit.models.tokenizer import load_tokenizer

    return load_tokenizer("smollm2-135m").encode_chat


@pytest.mark.parametrize("encode", [encode_words, encode_bytes])
@pytest.mark.parametrize("num_tokens", [2048, 2049, 8192])
def test_context_has_the_length_asked_for(encode, num_tokens):
    for name in WORKLOADS:
        (prompt,) = load_prompts(name, limit=1)
        context = build_context(prompt, num_tokens, encode=encode, seed=0)
        assert list(context.token_ids) == list(encode(list(context.messages)))
        assert len(context.token_ids) == num_tokens


@pytest.mark.parametrize("encode", [encode_words, encode_bytes])
@pytest.mark.parametrize("kind", ["text", "code"])
@pytest.mark.parametrize("name", ["prose", "multi_turn_agent"])
def test_shorter_filler_is_a_prefix_of_the_longer_one(encode, kind, name):
    (prompt,) = load_prompts(name, limit=1)
    first = next(index for index, message in enumerate(prompt.messages) if message["role"] == "user")
    question = SEPARATOR + prompt.messages[first]["content"]
    fillers, token_ids = [], []
    for num_tokens in (2048, 4096, 8192):
        context = build_context(prompt, num_tokens, encode=encode, seed=0, kind=kind)
        opened = context.messages[first]["content"]
        assert opened.endswith(question)
        assert context.messages[:first] == prompt.messages[:first]
        assert context.messages[first + 1 :] == prompt.messages[first + 1 :]
        fillers.append(opened.removesuffix(question))
        token_ids.append(context.token_ids)
    assert fillers[2].startswith(fillers[1])
    assert fillers[1].startswith(fillers[0])
    rest = len(encode([{"role": "user", "content": question}, *prompt.messages[first + 1 :]]))
    shared = len(token_ids[0]) - rest
    assert token_ids[0][:shared] == token_ids[1][:shared] == token_ids[2][:shared]


def test_context_is_deterministic_and_the_seed_orders_the_filler():
    (prompt,) = load_prompts("prose", limit=1)
    same = [build_context(prompt, 4096, encode=encode_words, seed=1) for _ in range(2)]
    other = build_context(prompt, 4096, encode=encode_words, seed=2)
    assert same[0] == same[1]
    assert same[0].digest != other.digest != prompt.digest
    assert same[0].filler_digest == other.filler_digest


def test_code_workloads_get_code():
    kinds = {name: build_context(load_prompts(name)[0], 1024, encode=encode_words, seed=0).kind for name in WORKLOADS}
    assert {name for name, kind in kinds.items() if kind == "code"} == {"code_editing", "code_writing"}


def test_context_without_room_for_a_filler_is_the_prompt():
    (prompt,) = load_prompts("chat", limit=1)
    num_tokens = len(encode_bytes(list(prompt.messages)))
    for spare in range(CONTEXT_TOLERANCE + 4):
        context = build_context(prompt, num_tokens + spare, encode=encode_bytes, seed=0)
        assert spare - CONTEXT_TOLERANCE <= len(context.token_ids) - num_tokens <= spare
    assert build_context(prompt, num_tokens, encode=encode_bytes, seed=0).messages == prompt.messages


def test_context_out_of_reach():
    (prompt,) = load_prompts("prose", limit=1)
    with pytest.raises(InputError, match=r"num_tokens wants at least the \d+ of prose-01 alone, got 8"):
        build_context(prompt, 8, encode=encode_words, seed=0)
    with pytest.raises(InputError, match="the text filler ends at"):
        build_context(prompt, 10_000_000, encode=encode_words, seed=0)
    with pytest.raises(InputError, match="kind wants one of text, code, got 'poem'"):
        build_context(prompt, 512, encode=encode_words, seed=0, kind="poem")


def test_context_bands_tile_the_axis():
    bands = [context_band(context_len) for context_len in range(20_000)]
    for context_len, (low, high) in enumerate(bands):
        assert low <= context_len < high
    edges = sorted(set(bands))
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert [context_band(c) for c in (512, 2048, 6144, 8192)] == [
        (362, 724),
        (1448, 2896),
        (5792, 11585),
        (5792, 11585),
    ]
    with pytest.raises(ValueError, match="context_len wants at least 0 tokens, got -1"):
        context_band(-1)


@pytest.mark.parametrize("exponent", range(2, 21))
def test_a_power_of_two_lies_inside_its_band(exponent):
    low, high = context_band(2**exponent)
    assert low == pytest.approx(2 ** (exponent - 0.5), abs=1)
    assert high == pytest.approx(2 ** (exponent + 0.5), abs=1)


def test_repeated_ngram_share():
    assert repeated_ngram_share(list(range(100))) == 0
    assert repeated_ngram_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_ngram_share([7] * 103) == pytest.approx(99 / 100)
    assert repeated_ngram_share([1, 1, 1], n=1) == pytest.approx(2 / 3)
    assert repeated_ngram_share([1, 2, 3]) is None
    with pytest.raises(ValueError, match="n wants at least 1 token, got 0"):
        repeated_ngram_share([1], n=0)


def test_prompt_file_of_a_user(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "Tell me about tides.\u2028Briefly.", "source": "ignored"},
        {"id": "a", "workload": "chat", "messages": [{"role": "user", "content": "Hello"}], "answer": "Hi"},
    ]
    path.write_text("\n" + "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    first, second = load_prompt_file(path)
    assert (first.id, first.workload, first.answer) == ("mine-02", "mine", None)
    assert first.messages == ({"role": "user", "content": "Tell me about tides.\u2028Briefly."},)
    assert (second.id, second.workload, second.answer) == ("a", "chat", "Hi")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{", "wanted a JSON object on one line"),
        ("[1]", r"wanted a JSON object, got '\[1\]'"),
        ('{"text": "a"}', "wanted either a field prompt or a field messages"),
        ('{"prompt": "a", "messages": []}', "wanted either a field prompt or a field messages"),
        ('{"prompt": " "}', "content wants a text that is not empty"),
        ('{"prompt": "a", "answer": 4}', "answer wants a text, got 4"),
        ('{"messages": "a"}', "messages wants a list, got 'a'"),
        ('{"messages": []}', "messages wants a message of the user at the end"),
        ('{"messages": ["a"]}', "messages wants objects with role and content, got 'a'"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role wants one of system, user, assistant, got 'tool'"),
        ('{"messages": [{"role": "user", "content": null}]}', "content wants a text that is not empty, got None"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "messages wants a message of the user at the end"),
        ('{"id": "good", "prompt": "a"}', "id wants to be unique, got 'good' again"),
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line, wanted):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "good", "prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"mine\.jsonl, line 2: {wanted}"):
        load_prompt_file(path)


def test_bad_files(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.jsonl: wanted a readable UTF-8 file"):
        load_prompt_file(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InputError, match=r"latin\.jsonl: wanted a readable UTF-8 file"):
        load_prompt_file(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(InputError, match="wanted at least one prompt, the file is empty"):
        load_prompt_file(tmp_path / "empty.jsonl")


def test_bad_workload():
    with pytest.raises(InputError, match=r"workload wants one of code_editing, prose, .*, got 'poems'"):
        load_prompts("poems")
    with pytest.raises(InputError, match="limit wants at least 1 prompt, got 0"):
        load_prompts("chat", limit=0)


def test_missing_standard_library_source_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workloads.filler_text.__globals__["importlib"].util, "find_spec", lambda name: None)
    workloads.filler_text.__globals__["_passages"].cache_clear()
    with pytest.raises(InputError, match="the source of the standard module argparse, which is not installed"):
        workloads.filler_text("code", order="0")


def test_no_torch():
    code = (
        "import sys; from labkit.workloads import *; "
        "build_context(load_prompts('prose')[0], 999, encode=lambda messages: str(messages).split(), seed=0); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
