"""A vocabulary in tiktoken's format as a tokenizer of `tokenizers`: GLM-4 9B's tokenizer.model.

Each line has a token's bytes in base64 and its rank, which is its id. The format: load_tiktoken_bpe of
https://github.com/openai/tiktoken, tiktoken/load.py. The file holds neither how texts are split into words nor which
special tokens there are: those of GLM-4 are as its code has them
(https://huggingface.co/zai-org/glm-4-9b-chat, tokenization_chatglm.py).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ... import untrusted_files
from .sentencepiece import merges_of

LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
# How words end, by tokenizer_config.json's tokenizer_class.
PATTERNS = {
    "ChatGLM4Tokenizer": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}


def is_one(path: Path) -> bool:
    """Whether a file begins as the format does."""
    return bool(LINE.match(untrusted_files.read_bytes(path.parent, path.name)))


def build(path: Path, tokenizer_class: str, alphabet: Mapping[str, int]) -> tokenizers.Tokenizer:
    """alphabet: the byte of each character of byte-level BPE. Raises ValueError where the file is not as expected, or
    the class of another model's."""
    if tokenizer_class not in PATTERNS:
        raise ValueError(
            f"{path} is in tiktoken's format, which does not say how texts are split into words; that is known of "
            f"{', '.join(PATTERNS)}, and this is a {tokenizer_class or 'tokenizer without a tokenizer_class'}: convert "
            "it to a tokenizer.json, for example with transformers' TikTokenConverter, or take that of the same model "
            "converted for transformers"
        )
    try:
        lines = [line.split() for line in untrusted_files.read_bytes(path.parent, path.name).splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path} is not in tiktoken's format, or it is damaged: {error}") from None
    if len(ranks) != len(lines) or set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"{path} is damaged: its ranks are not all numbers from 0 on")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path} is damaged: no token stands for the byte {missing[0]}")
    return from_ranks(ranks, PATTERNS[tokenizer_class], alphabet)


def from_ranks(
    ranks: Mapping[bytes, int], pattern: str, alphabet: Mapping[str, int], others: Mapping[str, int] | None = None
) -> tokenizers.Tokenizer:
    """ranks: the ids of all tokens, the lower of which are merged first. others: ids of the rest of the vocabulary."""
    character = {byte: char for char, byte in alphabet.items()}
    spelled = {"".join(map(character.__getitem__, token)): rank for token, rank in ranks.items()}
    # A word that is a token is taken whole, whether merges lead to it or not.
    made = tokenizers.Tokenizer(
        models.BPE(vocab={**(others or {}), **spelled}, merges=merges_of(spelled), ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made
