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

LONGEST_TOKEN = 1 << 16  # bytes; each token of an answer costs that much
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it has one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


ALPHABET = _byte_level_alphabet()


class TokenTable:
    """The tokens' bytes and names: all that reading an answer needs of a tokenizer."""

    added: dict[str, int]  # added tokens by their text
    special: frozenset[int]
    size: int
    end: int  # the number behind the highest token
    bytewise: bool  # each token stands for fixed bytes, whatever its neighbours

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token (a vocabulary is often padded)."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        raise NotImplementedError


class Tokenizer(TokenTable):
    """A tokenizer file of a model (tokenizer_file.py). Safe to use from several threads.

    The file's regular expressions and replacements may take any time and memory: a server has texts encoded in a
    process with limits (text_process.py).
    """

    def __init__(self, path: Path, template: str = "", kept: Collection[str] = (), vocab_size: int | None = None):
        """`template` is the chat template's source, `kept` what of its tokens texts may spell too (control_tokens).

        vocab_size: the model's; tokens beyond it are left out.
        """
        self._tokenizer = tokenizer_file.load(path, ALPHABET)
        if vocab_size is not None:
            self._tokenizer = tokenizer_file.without(self._tokenizer, vocab_size)
        self._tokenizer.no_truncation()  # some files carry a limit of their own
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.control = control_tokens(added.values(), template, kept)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._encoder = Encoder(self._tokenizer, self.control, unknown)
        data = json.loads(tokenizer_file.without_vocabulary(self._tokenizer).to_str())
        self.bound: Bound | None = bound(self._tokenizer, data)
        self._kind, self._space, self._byte_tokens = _decoder_kind(data["decoder"] or {})
        self.bytewise = self._kind != "context"
        self.end = max([self.size - 1, *added]) + 1
        self._pieces: list[bytes | None] = [None] * self.end

    def to_json(self) -> str:
        """A tokenizer.json's text, with a decoder that llguidance knows. Of tokenizers that are `bytewise`.

        It has the tokens alone and not how texts are cut and replaced, which may take any time: masks need no text of a
        client tokenised.
        """
        data = json.loads(self._tokenizer.to_str()) | {"normalizer": None, "pre_tokenizer": None}
        if self._kind == "bytes":
            ways = dict(add_prefix_space=False, trim_offsets=True, use_regex=False)
            data["pre_tokenizer"] = {"type": "ByteLevel", **ways}
        else:
            replace = {"type": "Replace", "pattern": {"String": self._space}, "content": " "}
            data["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps(data)

    def decoding_part(self) -> str:
        """A tokenizer.json's text that decodes as this one does, in a time and size that follow from the tokens'.

        Raises ValueError where the decoder could do more.
        """
        data = json.loads(self._tokenizer.to_str())
        for step in _steps(data.get("decoder") or {}):
            pattern = step["pattern"].get("String", "") if step["type"] == "Replace" else None
            if pattern is not None and not 0 < len(pattern) >= len(step["content"]):
                raise ValueError(
                    f"the tokenizer's decoder replaces {str(step['pattern'])[:100]} by {step['content'][:100]!r}: it "
                    "may replace texts by others that are no longer, as it runs for each token of an answer"
                )
        return json.dumps(data | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor")))

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
        if id >= len(self._pieces):
            return b""
        piece = self._pieces[id]
        if piece is None:
            piece = self._pieces[id] = self._make_piece(id)
        return piece

    def pieces(self) -> list[bytes]:
        """Each token's bytes. Raises ValueError where one is longer than any tokenizer that was trained has."""
        found = list(map(self.piece, range(len(self._pieces))))
        longest = max(map(len, found), default=0)
        if longest > LONGEST_TOKEN:
            raise ValueError(f"the tokenizer has a token of {longest} bytes: at most {LONGEST_TOKEN} are supported")
        return found

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


def _steps(decoder: dict) -> list[dict]:
    """The steps of a decoder, those within sequences too."""
    inner = decoder.get("decoders")
    return [decoder] if inner is None else [step for one in inner for step in _steps(one)]


def _decoder_kind(decoder: dict) -> tuple[str, str, bool]:
    """How tokens become text: ("bytes" | "spaces" | "context", the character that marks a space, has byte tokens).

    A leading space that the decoder would remove from a whole text is kept: our texts continue a prompt.
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

    def __init__(self, tokenizer: TokenTable, skip: frozenset[int] = frozenset()):
        self._piece = tokenizer.piece
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        """The characters that are complete with this token."""
        return "" if token in self._skip else self._decode(self._piece(token))

    def finish(self) -> str:
        """The text that an unfinished character leaves behind."""
        return self._decode(b"", True)


class ContextDetokenizer:
    """A detokenizer for tokenizers whose tokens read differently next to others, such as WordPiece.

    A short window of tokens is decoded with and without the new one; the difference is its text.
    """

    __slots__ = ("_tokenizer", "_skip", "_context", "_new")

    def __init__(self, tokenizer: TokenTable, skip: frozenset[int] = frozenset(), prompt: Iterable[int] = ()):
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


def detokenizer(tokenizer: TokenTable, skip: frozenset[int], prompt: Sequence[int]) -> Detokenizer | ContextDetokenizer:
    """The right one for this tokenizer; `prompt` are the last tokens before the text."""
    if tokenizer.bytewise:
        return Detokenizer(tokenizer, skip)
    return ContextDetokenizer(tokenizer, skip, prompt)
