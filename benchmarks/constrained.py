"""A vocabulary and a grammar for measuring constrained decoding with random weights (offline.py, part g)."""

from __future__ import annotations

import json
import random

from phalanx.rank.protocol import Vocabulary
from phalanx.rank.scheduler.grammar import Grammars

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "size": {"type": "number"},
        "kind": {"enum": ["small", "large", "unknown"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ROW, "minItems": 10000}  # no answer ends before its max_tokens


def grammars(size: int) -> Grammars:
    """For a vocabulary of this size; making it takes a second or more."""
    made = Grammars()
    made.know(Vocabulary(_tokenizer(size), size, (0,)))
    return made


def grammar() -> str:
    return json.dumps({"grammars": [{"json_schema": SCHEMA}]})


def _tokenizer(size: int) -> str:
    """A tokenizer.json: byte-level BPE of random merges of letters, numerals and punctuation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    draw = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<end>", *alphabet])}
    common = [char for char in alphabet if char.isascii()]
    parts, merges = [*common, "Ġ"], []
    while len(vocab) < size:
        left, right = draw.choice(parts), draw.choice(parts)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            if len(left + right) <= 6:  # no token is longer than twice that
                parts.append(left + right)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made.to_str()
