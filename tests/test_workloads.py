"""The prompts keep what their workload promises; contexts have the asked length and differ in nothing else."""

import ast
import difflib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import filler
from labkit.errors import InputError
from labkit.workloads import (
    CONTEXT_TOLERANCE,
    SEPARATOR,
    WORKLOADS,
    Context,
    Message,
    Prompt,
    build_context,
    context_band,
    load_prompt_file,
    load_prompts,
    repeated_ngram_share,
)

COUNTS = {
    "code_editing": 24,
    "prose": 24,
    "chat": 24,
    "code_writing": 12,
    "json_extraction": 12,
    "math": 12,
    "multi_turn_agent": 12,
}


def encode(messages: list[Message]) -> list[str]:
    """A tokenizer with a chat template: every word is a token."""
    text = "".join(f"<{message['role']}> {message['content']} <end> " for message in messages)
    return f"{text}<assistant>".split()


def encode_bytes(messages: list[Message]) -> list[int]:
    """A tokenizer whose tokens end inside words: every byte is one."""
    return list("".join(f"<{message['role']}>{message['content']}" for message in messages).encode())


@pytest.fixture(scope="module")
def encode_smollm2():
    from labkit.models.tokenizer import load_tokenizer

    return load_tokenizer("smollm2-135m").encode_chat


def context_of(name: str, num_tokens: int, *, index: int = 0, seed: int = 0) -> Context:
    return build_context(load_prompts(name)[index], num_tokens, encode=encode, seed=seed)


def split_filler(context: Context) -> tuple[str, str]:
    """Filler and question of the first message of the user."""
    first = next(message for message in context.messages if message["role"] == "user")
    filler, separator, question = first["content"].rpartition(SEPARATOR)
    assert separator
    return filler, question


def fenced(prompt: Prompt) -> tuple[str, str]:
    """Language and code of a code-editing prompt."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", prompt.messages[-1]["content"], re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return blocks[0]


def test_the_counts_are_those_of_the_workloads():
    assert set(WORKLOADS) == set(COUNTS)
    assert {name: len(load_prompts(name)) for name in WORKLOADS} == COUNTS


def test_ids_and_texts_are_unique():
    prompts = [prompt for name in WORKLOADS for prompt in load_prompts(name)]
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 120
    assert len({prompt.digest for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_follow_the_schema(name):
    for prompt in load_prompts(name):
        assert prompt.workload == name
        assert prompt.id.startswith(f"{name}-")
        roles = [message["role"] for message in prompt.messages]
        assert all(set(message) == {"role", "content"} for message in prompt.messages)
        assert all(message["content"].strip() for message in prompt.messages)
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert (prompt.answer is not None) == (name == "math")
        assert (prompt.reference is not None) == (name in ("code_editing", "json_extraction"))
    assert load_prompts(name, limit=2) == load_prompts(name)[:2]


@pytest.mark.parametrize("prompt", load_prompts("code_editing"), ids=lambda prompt: prompt.id)
def test_an_edit_changes_5_to_60_percent_of_the_lines(prompt):
    language, original = fenced(prompt)
    before, after = original.splitlines(), prompt.reference.splitlines()
    assert 20 <= len(before) <= 60
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    changed = 1 - sum(block.size for block in blocks) / max(len(before), len(after))
    assert 0.05 <= changed <= 0.60
    if language == "python":
        ast.parse(original)
        ast.parse(prompt.reference)


def test_edits_are_mostly_python_and_not_only():
    languages = [fenced(prompt)[0] for prompt in load_prompts("code_editing")]
    assert languages.count("python") >= 16
    assert len(set(languages)) >= 3


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


def test_json_references_parse_and_have_the_fields_of_the_schema():
    for prompt in load_prompts("json_extraction"):
        schema = prompt.messages[-1]["content"].partition("Schema:")[2].partition("Text:")[0]
        assert list(json.loads(prompt.reference)) == re.findall(r"^- (\w+):", schema, re.MULTILINE)


def test_json_references_take_their_numbers_from_the_text():
    spelled = {2: "second", 3: "three", 4: "four", 8: "eight", 11: "eleven"}
    for prompt in load_prompts("json_extraction"):
        text = prompt.messages[-1]["content"].partition("Text:")[2]
        for number in json.loads(prompt.reference).values():
            if type(number) in (int, float):
                assert f"{number:g}" in text or f"{number:.2f}" in text or spelled[number] in text


def test_agent_conversations_have_4_to_8_messages():
    assert all(4 <= len(prompt.messages) <= 8 for prompt in load_prompts("multi_turn_agent"))


@pytest.mark.model
def test_every_prompt_fits_the_shortest_context_of_the_presets(encode_smollm2):
    lengths = {p.id: len(encode_smollm2(list(p.messages))) for name in WORKLOADS for p in load_prompts(name)}
    assert max(lengths.values()) <= 512 - 64, "no room for a filler"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_shorter_filler_is_a_prefix_of_a_longer_one(name):
    short, long = context_of(name, 512), context_of(name, 2048)
    (short_filler, short_question), (long_filler, long_question) = split_filler(short), split_filler(long)
    assert long_filler.startswith(short_filler)
    assert len(long_filler) > len(short_filler) > 0
    first = next(index for index, message in enumerate(short.prompt.messages) if message["role"] == "user")
    assert short_question == long_question == short.prompt.messages[first]["content"]
    # All that is not the opened message stands as it was, so the question is what the context ends with.
    for context in (short, long):
        assert context.messages[:first] == context.prompt.messages[:first]
        assert context.messages[first + 1 :] == context.prompt.messages[first + 1 :]
    question = encode(list(short.prompt.messages[first:]))[1:]
    assert list(short.token_ids[-len(question) :]) == list(long.token_ids[-len(question) :]) == question


def test_prompts_of_a_seed_share_the_filler_and_another_seed_differs():
    fillers = [split_filler(context_of("prose", 2048, index=index))[0] for index in range(3)]
    fillers.append(split_filler(context_of("chat", 2048))[0])
    shortest = min(fillers, key=len)
    assert len(shortest) > 1000
    assert all(filler.startswith(shortest) for filler in fillers)
    other = context_of("prose", 2048, seed=1)
    assert not split_filler(other)[0].startswith(fillers[0][:200])
    assert context_of("prose", 2048) == context_of("prose", 2048)


def test_code_workloads_stand_behind_code():
    code = filler.filler_text("code", order="0")
    behind_code = {name for name in WORKLOADS if split_filler(context_of(name, 1024))[0][:200] in code}
    assert behind_code == {"code_editing", "code_writing"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_contexts_share_the_tokens_before_the_question(name):
    prompt = load_prompts(name)[0]
    contexts = [build_context(prompt, n, encode=encode_bytes, seed=0) for n in (2048, 4096, 8192)]
    assert [len(context.token_ids) for context in contexts] == [2048, 4096, 8192]
    system = [message for message in prompt.messages if message["role"] == "system"]
    opening = encode_bytes([*system, {"role": "user", "content": split_filler(contexts[0])[0]}])
    assert all(list(context.token_ids[: len(opening)]) == opening for context in contexts)


@pytest.mark.model
@pytest.mark.parametrize("name", ["code_editing", "prose", "json_extraction"])
def test_a_context_is_as_long_as_asked_with_a_real_tokenizer(name, encode_smollm2):
    for prompt in load_prompts(name, limit=3):
        for num_tokens in (512, 2048):
            context = build_context(prompt, num_tokens, encode=encode_smollm2, seed=0)
            assert list(context.token_ids) == encode_smollm2(list(context.messages))
            assert num_tokens - CONTEXT_TOLERANCE <= len(context.token_ids) <= num_tokens


def test_too_little_room_for_a_filler_is_within_the_tolerance():
    prompt = load_prompts("chat")[0]
    alone = len(encode_bytes(list(prompt.messages)))
    for room in range(CONTEXT_TOLERANCE + 4):
        length = len(build_context(prompt, alone + room, encode=encode_bytes, seed=0).token_ids)
        assert alone + room - CONTEXT_TOLERANCE <= length <= alone + room


@pytest.mark.parametrize("num_tokens", [512, 1000, 2047, 8192])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_context_is_as_long_as_asked_and_never_longer(name, num_tokens):
    context = context_of(name, num_tokens)
    assert list(context.token_ids) == encode(list(context.messages))
    assert num_tokens - CONTEXT_TOLERANCE <= len(context.token_ids) <= num_tokens


def test_a_context_of_the_prompts_own_length_is_the_prompt():
    prompt = load_prompts("chat")[0]
    context = build_context(prompt, len(encode(list(prompt.messages))), encode=encode, seed=0)
    assert context.messages == prompt.messages
    assert context.digest == prompt.digest


def test_contexts_out_of_reach_and_unknown_names():
    prompt = load_prompts("prose")[0]
    with pytest.raises(InputError, match=r"num_tokens wants at least the \d+ of prose-01 alone, got 16"):
        build_context(prompt, 16, encode=encode, seed=0)
    with pytest.raises(InputError, match="the text filler ends at"):
        build_context(prompt, 5_000_000, encode=encode, seed=0)
    with pytest.raises(InputError, match=r"workload wants one of code_editing, .*, got 'poems'"):
        load_prompts("poems")
    with pytest.raises(InputError, match="limit wants at least 1 prompt, got 0"):
        load_prompts("chat", limit=0)


def test_a_missing_source_of_the_standard_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(filler.importlib.util, "find_spec", lambda name: None)
    filler._passages.cache_clear()
    with pytest.raises(InputError, match="the source of the standard module argparse, which is not installed"):
        filler.filler_text("code", order="0")


def test_a_file_of_a_user(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tides?"}]
    path.write_text(
        json.dumps({"prompt": "One line\u2028or two?"}, ensure_ascii=False)
        + "\n\n"
        + json.dumps({"id": "tides", "workload": "chat", "messages": messages, "answer": "The moon."}),
        encoding="utf-8",
    )
    first, second = load_prompt_file(path)
    assert first == Prompt("mine-01", "mine", ({"role": "user", "content": "One line\u2028or two?"},))
    assert second == Prompt("tides", "chat", tuple(messages), answer="The moon.")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "wanted a JSON object on one line"),
        ('"text"', "wanted a JSON object, got"),
        ("{}", "wanted either a field prompt or a field messages"),
        ('{"prompt": "a", "messages": []}', "wanted either a field prompt or a field messages"),
        ('{"prompt": 7}', "prompt wants a text, got 7"),
        ('{"prompt": " "}', "content wants a text that is not empty"),
        ('{"prompt": "a", "answer": 4}', "answer wants a text, got 4"),
        ('{"messages": {}}', "messages wants a list"),
        ('{"messages": []}', "messages wants a message of the user at the end"),
        ('{"messages": [{"role": "user"}]}', "messages wants objects with role and content"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role wants one of system, user, assistant, got 'tool'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "messages wants a message of the user at the end"),
        ('{"id": "first", "prompt": "b"}', "id wants to be unique, got 'first' again"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line, problem):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "first", "prompt": "a"}\n\n' + line, encoding="utf-8")
    with pytest.raises(InputError, match=rf"mine\.jsonl, line 3: {problem}"):
        load_prompt_file(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "wanted a readable UTF-8 file"),
        (b'{"prompt": "caf\xe9"}', "wanted a readable UTF-8 file"),
        (b"\n \n", "the file is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content, problem):
    path = tmp_path / "mine.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"mine\.jsonl: .*{problem}"):
        load_prompt_file(path)


def test_bands_are_half_open_and_contiguous():
    bands = [context_band(context_len) for context_len in range(70_000)]
    assert all(low <= context_len < high for context_len, (low, high) in enumerate(bands))
    assert all(left[1] == right[0] for left, right in itertools.pairwise(sorted(set(bands))))
    assert context_band(723) == context_band(512) == context_band(362) == (362, 724)
    assert context_band(724) == (724, 1448)
    assert context_band(0) == (0, 1)
    with pytest.raises(ValueError, match="context_len wants at least 0 tokens, got -1"):
        context_band(-1)


@pytest.mark.parametrize("exponent", range(2, 21))
def test_a_band_surrounds_its_power_of_two(exponent):
    low, high = context_band(2**exponent)
    assert low**2 <= 2 ** (2 * exponent - 1) < (low + 1) ** 2
    assert high**2 <= 2 ** (2 * exponent + 1) < (high + 1) ** 2


def test_repeated_ngram_share():
    assert repeated_ngram_share(range(50)) == 0
    assert repeated_ngram_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_ngram_share([7] * 103) == pytest.approx(99 / 100)
    assert repeated_ngram_share([1, 2, 3]) is None
    assert repeated_ngram_share([]) is None


def test_torch_is_not_loaded():
    code = (
        "import sys, labkit.workloads as w; "
        "w.build_context(w.load_prompts('chat')[0], 999, encode=lambda messages: str(messages).split(), seed=0); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
