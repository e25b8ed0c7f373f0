"""A sentencepiece model (tokenizer.model; Kudo and Richardson 2018, arXiv 1808.06226) as a tokenizer of `tokenizers`.

The file is a protocol buffer: sentencepiece_model.proto of https://github.com/google/sentencepiece names its fields. We
read the few that count, so that no protobuf library is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ... import untrusted_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
SPACE = "\u2581"


class Piece(NamedTuple):
    text: str
    score: float
    type: int


@dataclass
class Model:
    """A sentencepiece file's contents; the defaults are the format's."""

    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    removes_extra_spaces: bool = True

    def first(self, type: int) -> str | None:
        return next((piece.text for piece in self.pieces if piece.type == type), None)


def read(path: Path) -> Model:
    """Raises ValueError where the file is no sentencepiece model."""
    model = Model()
    try:
        for number, value in _fields(untrusted_files.read_bytes(path.parent, path.name)):
            if number == 1:
                piece = dict(_fields(value))
                score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
                model.pieces.append(Piece(piece[1].decode(), score, piece.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(_fields(value))
                model.kind, model.byte_fallback = trainer.get(3, UNIGRAM), bool(trainer.get(35, 0))
            elif number == 3:
                spec = dict(_fields(value))
                model.charsmap = spec.get(2, b"")
                model.dummy_prefix, model.removes_extra_spaces = bool(spec.get(3, 1)), bool(spec.get(4, 1))
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        model.pieces.clear()
    if not model.pieces:
        raise ValueError(f"{path} is not a sentencepiece model, or it is damaged")
    if model.kind not in (UNIGRAM, BPE):
        raise ValueError(f"{path} is a sentencepiece model of type {model.kind}; unigram (1) and BPE (2) can be read")
    return model


def build(model: Model, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """config: tokenizer_config.json. Its `legacy`, true where it is absent, puts a space before the text behind each
    special token, as before the first text; else that is done before the first alone."""
    made = tokenizers.Tokenizer(_bpe(model) if model.kind == BPE else _unigram(model))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.removes_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    given = {name: value for name, value in config.items() if value is not None}
    prefix = bool(given.get("add_prefix_space", model.dummy_prefix))
    if given.get("legacy", True) or not prefix:
        steps += [normalizers.Prepend(SPACE)] if prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    if steps:
        made.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_tokens(added_tokens((piece.text, piece.type) for piece in model.pieces))
    return made


def added_tokens(pieces: Iterable[tuple[str, int]]) -> list[AddedToken]:
    """The added tokens among these: texts are cut at them. To be added at once: each call takes milliseconds."""
    return [
        AddedToken(text, special=type != USER_DEFINED, normalized=False)
        for text, type in pieces
        if type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def merges_of(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs that byte-pair encoding merges, best first. ranks: of the tokens, the lower the better."""
    found: list[tuple[str, str]] = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (left, right)
            for at in range(1, len(piece))
            if (left := piece[:at]) in ranks and (right := piece[at:]) in ranks
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += pairs
    return found


def _bpe(model: Model) -> models.BPE:
    mergeable = {i: piece for i, piece in enumerate(model.pieces) if piece.type in (NORMAL, USER_DEFINED)}
    order = sorted(mergeable, key=lambda i: (-mergeable[i].score, i))
    return models.BPE(
        vocab={piece.text: i for i, piece in enumerate(model.pieces)},
        merges=merges_of({mergeable[i].text: rank for rank, i in enumerate(order)}),
        unk_token=model.first(UNKNOWN),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: Model) -> models.Unigram:
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(vocab, unknown, model.byte_fallback)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message: number and value, an int or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(data):
            raise ValueError("a field ends behind its message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
