"""Text to token ids and back, from a checkpoint's `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from kvlens.engine.model.config import ModelConfig, ModelError, read_json

# For checkpoints without a template of their own, the bundled one among them: plain paragraphs.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class Tokenizer:
    """The tokenizer of one checkpoint directory. Raises ModelError when it cannot be read."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing: kvlens reads tokenizers in the format of the tokenizers library")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from None
        # Left over from training in some files: a prompt is served whole, and nothing is put around it.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_ids = ModelConfig.load(directory).eos_ids
        settings = directory / "tokenizer_config.json"
        self._settings = read_json(settings) if settings.is_file() else {}
        self._template = self._compile(directory)

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """With the special tokens the checkpoint puts around a text."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens; bytes that are no character yet become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation that the assistant continues. Raises ValueError when the template refuses it."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True,
                bos_token=self._special("bos_token"), eos_token=self._special("eos_token"),
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:  # the template's, on these messages
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _special(self, name: str) -> str:
        token = self._settings.get(name) or ""
        return str(token["content"] if isinstance(token, dict) else token)

    def _compile(self, directory: Path) -> jinja2.Template:
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else self._settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        # What published templates count on: these settings, `break`, two functions, and JSON that is not made for HTML.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(source or PLAIN_TEMPLATE)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {directory} cannot be read: {error}") from None


def _raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """What templates call to tell the model the date."""
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
