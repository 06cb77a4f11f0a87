"""Tokenizers of local models: text to token ids and back, and chats through the model's own template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.models.gguf import dequantised_folder, smollm2_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# A text ends at any of these, whichever of them the checkpoint names as its end-of-sequence token.
_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


class Tokenizer:
    """What a model's folder says about text.

    stop_token_ids : the end-of-sequence tokens of the checkpoint, then the usual end markers that its vocabulary holds.
    vocab_size : number of tokens, added ones included. The model's output may be wider (padded).
    """

    def __init__(self, backend: "Backend", *, settings: dict[str, Any], eos_token_ids: Sequence[int]):
        self._backend, self._settings = backend, settings
        self._template: Any = None
        self.vocab_size: int = backend.get_vocab_size()
        markers = [backend.token_to_id(marker) for marker in _END_MARKERS]
        known = [*eos_token_ids, *(marker for marker in markers if marker is not None)]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(known))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain text, with the begin-of-text token where the tokenizer adds one and it is wanted."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; a cut multi-byte character decodes to U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat up to where the assistant answers.

        messages : ``{"role": "system" | "user" | "assistant", "content": text}`` in order.

        Raises InputError: the model has no chat template, or its template refuses these messages.
        """
        return self._backend.encode(self.chat_text(messages), add_special_tokens=False).ids

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """What `encode_chat` encodes: the messages in the model's chat template.

        Raises InputError: as `encode_chat`.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        if self._template is None:  # compiled once: that takes longer than the rest
            template = self._settings.get("chat_template")
            if not isinstance(template, str):
                raise InputError("encode_chat needs a model with a chat template, this one has none: use encode")
            # It comes with the checkpoint, hence the sandbox. Trimming is what templates are written for.
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            try:
                self._template = environment.from_string(template)
            except TemplateError as error:
                raise InputError(f"the chat template cannot be read: {error}") from error
        names = {name: _content(self._settings.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, raise_exception=refuse, **names
            )
        except TemplateError as error:
            raise InputError(f"the chat template refused messages: {error}") from error


def _content(token: Any) -> str:
    """A special token is stored as its text or as a record that holds it."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError: no such file, or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"model folder {path.parent} must hold {path.name}, which is missing") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} must be readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _eos_token_ids(folder: Path) -> list[int]:
    """``generation_config.json`` wins over ``config.json``, as in generation."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            if value is not None:
                return list(value) if isinstance(value, list) else [value]
    return []


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Tokenizer of ``"smollm2-135m"`` or of a local model folder with a ``tokenizer.json``.

    Raises InputError: the folder or one of its files is missing or corrupt.
    """
    from tokenizers import Tokenizer as Backend

    folder = dequantised_folder(smollm2_gguf()) if str(model) == "smollm2-135m" else Path(model)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"tokenizer must be 'smollm2-135m' or a folder that holds tokenizer.json, got {str(model)!r}")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path} must be a tokenizer file: {error}") from error
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return Tokenizer(backend, settings=settings, eos_token_ids=_eos_token_ids(folder))
