"""The JSON files of a model directory that concern text, checked as they are read: a wrong value ends the start with
code 3 and the key's name, not a request later on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....errors import MODEL, FatalError
from ... import untrusted_files
from ...checkpoint_files import is_gguf
from ...sampling_fields import MinP, RepetitionPenalty, Temperature, TopK, TopP
from ..decoding import explain
from ..fields import Positive
from . import gguf

Id = Annotated[int, Meta(ge=0)]
Ids = Id | list[Id] | None


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Ends(msgspec.Struct):
    eos_token_id: Ids = None


class _Config(_Ends):
    model_type: str | None = None
    text_config: _Ends | None = None


class _TokenizerConfig(msgspec.Struct):
    tokenizer_class: str | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Token | bool | None = None
    eos_token: str | _Token | bool | None = None
    pad_token: str | _Token | bool | None = None
    unk_token: str | _Token | bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    added_tokens_decoder: dict[Id, _Token] | None = None


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] | None = None


class _TemplateFile(msgspec.Struct):
    chat_template: str


# The fields read of each file, by its name.
SHAPES: dict[str, Any] = {
    "config.json": _Config,
    "generation_config.json": _Ends,
    "tokenizer_config.json": _TokenizerConfig,
    "tokenizer.json": _Tokenizer,
    "added_tokens.json": dict[str, Id],
    "chat_template.json": _TemplateFile,
}


class _Sampling(msgspec.Struct):
    """The defaults of sampling in generation_config.json."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Positive | None = None


SAMPLING = _Sampling.__struct_fields__


def read_json(model: Path, name: str) -> dict[str, Any]:
    """A file of a model directory, or a GGUF file's in its place; empty where there is none. Raises FatalError
    where it is damaged, or has a value that cannot be one."""
    if is_gguf(model):
        found = gguf.documents(model).get(name)
        return _checked(found, SHAPES.get(name), model) if found else {}
    file = model / name
    if not file.is_file():
        return {}
    try:
        raw = untrusted_files.read_json(model, name)
    except OSError as error:
        raise FatalError(f"{file} cannot be read: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{file} {error}", MODEL) from None
    return _checked(raw, SHAPES.get(name), file)


def sampling_defaults(model: Path) -> dict[str, Any]:
    """The defaults of sampling in generation_config.json. Raises FatalError as read_json does."""
    raw = {name: value for name, value in read_json(model, "generation_config.json").items() if name in SAMPLING}
    return _checked(raw, _Sampling, model / "generation_config.json")


def _checked(raw: dict[str, Any], shape: Any, file: Path) -> dict[str, Any]:
    try:
        msgspec.convert(raw, shape or dict[str, Any], str_keys=True)
    except msgspec.ValidationError as error:
        raise FatalError(f"{file}: {explain(str(error), raw).message}", MODEL) from None
    return raw
