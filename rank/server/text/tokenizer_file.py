"""The file of a model directory that holds its tokenizer, in whichever format, read into one of `tokenizers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from . import sentencepiece, tekken

NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model")  # in this order, where there are several


def find(directory: Path) -> Path:
    """Raises FileNotFoundError where the directory has none."""
    found = next((directory / name for name in NAMES if (directory / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{directory} has no {', '.join(NAMES[:-1])} or {NAMES[-1]}: bring the model's tokenizer, or convert it to "
            "a tokenizer.json, for example with transformers' AutoTokenizer(…).save_pretrained()"
        )
    return found


def load(path: Path, alphabet: dict[str, int]) -> tokenizers.Tokenizer:
    """alphabet: the byte of each character of byte-level BPE. Raises ValueError where the file cannot be read so."""
    if path.name == "tekken.json":
        return tekken.build(path, alphabet)
    if path.suffix != ".model":
        return tokenizers.Tokenizer.from_file(str(path))
    config = _json(path.with_name("tokenizer_config.json"))
    made = sentencepiece.build(sentencepiece.read(path), config)
    for id, token in sorted(_added(path.parent, config).items()):
        made.add_tokens([token])
        if made.token_to_id(token.content) != id:
            raise ValueError(
                f"{path.parent}: its added tokens say that {token.content!r} is token {id}, but with {path.name} it is "
                f"{made.token_to_id(token.content)}: convert the tokenizer to a tokenizer.json"
            )
    sentencepiece.add_ends(made, config)
    return made


def _added(directory: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Tokens that transformers' files have beside the model's own, by id."""
    plain = _json(directory / "added_tokens.json")
    found = {int(id): AddedToken(text, special=True, normalized=False) for text, id in plain.items()}
    for id, one in (config.get("added_tokens_decoder") or {}).items():
        ways = {key: bool(one.get(key)) for key in ("special", "lstrip", "rstrip", "normalized", "single_word")}
        found[int(id)] = AddedToken(one["content"], **ways)
    return found


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
