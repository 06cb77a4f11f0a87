"""The tokenizer from the GGUF's metadata against transformers' reading of it, and tokenizers of folders."""

import json
import re
from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.models.gguf import dequantised_folder, smollm2_gguf
from labkit.models.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\nthree",
    "It's we've I'm they'll you'd don't IT'S",
    "def f(x):\n    return x ** 2 + 3.14159e-10  # comment\n",
    "price: $1,234.56 (12%) and 2024-01-31T23:59:59Z",
    "1234567890 007 3.0.1 x1y2z3",
    "naïve café Zürich señor Ærøskøbing",
    "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。こんにちは 안녕하세요",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🤖!",
    "math ∑∫√π ≤ ≥ ½ ² Ⅷ ٣٤",
    '{"key": [1, 2, {"a": null}], "text": "a\\"b"}',
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "zero\u200bwidth \u00a0nbsp\u3000ideographic",
    "ALLCAPS CamelCase snake_case kebab-case x" * 3,
    "!!!???...---===***   ///",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def transformer():
    from transformers import AutoTokenizer

    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def many_texts() -> list[str]:
    """The list, this file, and paragraphs of the language reference that Python carries."""
    import pydoc_data.topics

    prose = [part for text in pydoc_data.topics.topics.values() for part in text.split("\n\n")][::2]
    return [*TEXTS, Path(__file__).read_text(encoding="utf-8"), *prose]


def test_encodes_as_transformers_does(smollm2, transformer):
    from tokenizers import pre_tokenizers

    texts = many_texts()
    assert len(texts) > 1000
    # transformers leaves out the model's first split, which makes every digit a piece of its own. That shows only where
    # blanks precede a digit or it is no ASCII one, so such texts agree once it has the split.
    backend = transformer.backend_tokenizer
    plain = [text for text in texts if text.isascii() and not re.search(r"\s\s\d", text)]
    assert 0 < len(texts) - len(plain) < len(texts) / 4
    for text in plain:
        assert smollm2.encode(text) == transformer.encode(text), text
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    for text in texts:
        assert smollm2.encode(text) == transformer.encode(text), text


def test_decoding_gives_the_text_back(smollm2):
    for text in many_texts():
        assert smollm2.decode(smollm2.encode(text)) == text


def test_special_tokens_can_be_left_out(smollm2):
    assert smollm2.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
    assert smollm2.decode([1, 19556, 2]) == "<|im_start|>Hello<|im_end|>"


def test_chat_equals_transformers(smollm2, transformer):
    user = {"role": "user", "content": "What is 2 + 2?"}
    answer = {"role": "assistant", "content": "4."}
    system = {"role": "system", "content": "Be brief."}
    for messages in ([user], [system, user], [user, answer, user], [system, user, answer, user]):
        wanted = transformer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert smollm2.chat_text(messages) == wanted
        assert smollm2.decode(smollm2.encode_chat(messages)) == wanted


def test_chat_without_a_system_message_gets_the_models_own(smollm2):
    wanted = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert smollm2.chat_text([{"role": "user", "content": "hi"}]).startswith(wanted)


def test_stops_at_the_end_of_a_turn_and_of_a_text(smollm2):
    assert smollm2.stop_token_ids == (2, 0)
    assert [smollm2.decode([token]) for token in smollm2.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert smollm2.vocab_size == 49152


def copied(folder: Path, **settings: object) -> Path:
    """A folder with SmolLM2's tokenizer.json and these settings."""
    (folder / "tokenizer.json").write_bytes((dequantised_folder(smollm2_gguf()) / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_brings_its_template_and_stop_tokens(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    copied(tmp_path, chat_template=template, bos_token={"content": "<|im_start|>"})
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "<|im_start|>[user]hi"
    assert tokenizer.stop_token_ids == (5, 2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_text([]) == "0"
    assert tokenizer.stop_token_ids == (7, 2, 0)


def test_a_template_that_refuses_or_reaches_out_is_bad_input(tmp_path):
    folder = copied(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="the chat template refused messages: roles must alternate"):
        load_tokenizer(folder).encode_chat([])
    folder = copied(tmp_path, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="refused"):
        load_tokenizer(folder).encode_chat([])
    with pytest.raises(InputError, match="needs a model with a chat template"):
        load_tokenizer(copied(tmp_path)).encode_chat([])


def test_a_missing_or_corrupt_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"a folder that holds tokenizer\.json, got"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="must be a tokenizer file"):
        load_tokenizer(tmp_path)
    copied(tmp_path).joinpath("tokenizer_config.json").write_text("[")
    with pytest.raises(InputError, match="must be readable JSON"):
        load_tokenizer(tmp_path)
