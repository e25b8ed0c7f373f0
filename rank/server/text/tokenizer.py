"""Text to token ids and back; the way back is incremental and never cuts a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from . import tokenizer_file
from .bound import Bound, bound
from .control import MARK, Encoder, control_tokens

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it has one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """A tokenizer file of a model (tokenizer_file.py). Safe to use from several threads."""

    def __init__(self, path: Path, template: str = "", kept: Collection[str] = ()):
        """`template` is the chat template's source, `kept` what of its tokens texts may spell too (control_tokens)."""
        self._tokenizer = tokenizer_file.load(path, ALPHABET)
        self._tokenizer.no_truncation()  # some files carry a limit of their own
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.control = control_tokens(added.values(), template, kept)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        data = json.loads(self._tokenizer.to_str())
        self.bound: Bound | None = bound(data)
        self._encoder = Encoder(self._tokenizer, self.control, data["model"].get("unk_token"))
        self._kind, self._space, self._byte_tokens = _decoder_kind(data.get("decoder") or {})
        self._pieces: list[bytes | None] = [None] * (max([self.size - 1, *added]) + 1)

    def to_json(self) -> str:
        """A tokenizer.json's text, with a decoder that llguidance knows. Of tokenizers that are `bytewise`."""
        data = json.loads(self._tokenizer.to_str())
        if self._kind == "spaces":
            replace = {"type": "Replace", "pattern": {"String": self._space}, "content": " "}
            data["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps(data)

    @property
    def bytewise(self) -> bool:
        """Each token stands for fixed bytes, whatever its neighbours."""
        return self._kind != "context"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. A control token that holds a MARK is read as plain text."""
        if MARK in text:
            return self._encoder.encode_marked(text, add_special_tokens)
        return self._encoder.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token (a vocabulary is often padded)."""
        if id >= len(self._pieces):
            return b""
        piece = self._pieces[id]
        if piece is None:
            piece = self._pieces[id] = self._make_piece(id)
        return piece

    def _make_piece(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if self._kind == "bytes":
            try:
                return bytes([ALPHABET[char] for char in token])
            except KeyError:  # an added token in plain text
                return token.encode()
        if self._kind == "spaces":
            byte = BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
            return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()
        return self._tokenizer.decode([id], skip_special_tokens=False).encode()


def _decoder_kind(decoder: dict) -> tuple[str, str, bool]:
    """How tokens become text: ("bytes" | "spaces" | "context", the character that marks a space, has byte tokens).

    A leading space that the decoder would strip from a whole text is kept: our texts continue a prompt.
    """
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", "", False
    if kinds == ["Metaspace"]:
        return "spaces", steps[0].get("replacement", "\u2581"), False
    replaced = [step for step in steps if step.get("type") == "Replace"]
    if (
        len(replaced) == 1
        and replaced[0].get("content") == " "
        and "String" in replaced[0].get("pattern", {})
        and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    ):
        return "spaces", replaced[0]["pattern"]["String"], "ByteFallback" in kinds
    return "context", "", False


class Detokenizer:
    """The text of one sequence, token by token: what `feed` and `finish` return, joined, is the text of all tokens.

    Bytes that are not UTF-8 become U+FFFD. Tokens in `skip` have no text.
    """

    __slots__ = ("_decode", "_piece", "_skip")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int] = frozenset()):
        self._piece = tokenizer.piece
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        """The characters that are complete with this token."""
        return "" if token in self._skip else self._decode(self._piece(token))

    def finish(self) -> str:
        """What an unfinished character leaves behind."""
        return self._decode(b"", True)


class ContextDetokenizer:
    """The same for tokenizers whose tokens read differently beside others, such as WordPiece.

    A short window of tokens is decoded with and without the new one; the difference is its text.
    """

    __slots__ = ("_tokenizer", "_skip", "_context", "_new")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int] = frozenset(), prompt: Iterable[int] = ()):
        self._tokenizer = tokenizer
        self._skip = skip
        self._context = [token for token in prompt if token not in skip][-4:]
        self._new: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._new.append(token)
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._new)
        if after.endswith("\ufffd") and len(self._new) < 8:  # a character may be completed by the next token
            return ""
        self._context, self._new = self._new, []
        return after[len(before) :]

    def finish(self) -> str:
        if not self._new:
            return ""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(before) :]


def detokenizer(tokenizer: Tokenizer, skip: frozenset[int], prompt: Sequence[int]) -> Detokenizer | ContextDetokenizer:
    """The right one for this tokenizer; `prompt` are the last tokens before the text."""
    if tokenizer.bytewise:
        return Detokenizer(tokenizer, skip)
    return ContextDetokenizer(tokenizer, skip, prompt)
