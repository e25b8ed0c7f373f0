"""Mistral's tekken.json as a tokenizer of `tokenizers`: byte-level BPE by ranks, as tiktoken has it.

The format: https://github.com/mistralai/mistral-common, src/mistral_common/tokens/tokenizers/tekken.py.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ... import untrusted_files
from .tiktoken import from_ranks

NAME = "tekken.json"
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}  # as tokenizer_config.json, which is not beside it, would say
# Control tokens of files that do not list theirs: version 3's, in the order of their ids.
CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def control(path: Path) -> set[str]:
    """A file's control tokens. Raises ValueError where it is not as expected."""
    try:
        return set(_control(untrusted_files.read_json(path.parent, path.name)).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a tekken tokenizer, or it is damaged: {type(error).__name__}: {error}")


def _control(data: dict[str, Any]) -> dict[int, str]:
    """Control tokens by their ids."""
    return {int(one["rank"]): one["token_str"] for one in data.get("special_tokens") or []} or dict(enumerate(CONTROL))


def build(path: Path, alphabet: dict[str, int]) -> tokenizers.Tokenizer:
    """alphabet: the character of each byte in byte-level BPE. Raises ValueError where the file is not as expected."""
    try:
        data = untrusted_files.read_json(path.parent, path.name)
        config = data["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        pattern = config["pattern"]
        named = _control(data)
        listed = sorted((int(one["rank"]), base64.b64decode(one["token_bytes"])) for one in data["vocab"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from None
    names = [named.get(i, f"<SPECIAL_{i}>") for i in range(count)]
    ids = {token: count + rank for rank, token in listed[: size - count]}
    made = from_ranks(ids, pattern, alphabet, {name: i for i, name in enumerate(names)})
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made
