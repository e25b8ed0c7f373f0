"""How few tokens a text can have, which is enough to refuse one that is far too long without tokenising it.

Everything follows from the vocabulary and holds however the text is split, as long as each of its characters ends up in
a token. So there is no bound for tokenizers that drop characters (most normalizers, splitting at blanks) or that read
any number of unknown ones as one token.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

LETTER, DIGIT, BLANK, OTHER, WIDE, WIDEST = b"a0 .\xfe\xff"


def _kind(byte: int) -> int:
    if byte >= 0x80:
        return WIDEST if byte >= 0xF0 else WIDE  # WIDEST: the first byte of a character of four
    char = chr(byte)
    return (
        LETTER if char in string.ascii_letters else DIGIT if char in string.digits else BLANK if char == " " else OTHER
    )


PIECE = 1 << 16  # characters
ASCII = re.compile("[\x00-\x7f]")
KINDS = bytes(map(_kind, range(256)))
WORDS = bytes({*range(256)} - {LETTER, DIGIT})  # to be deleted, so that letters and digits are left
OTHERS = bytes({*range(256)} - {BLANK, OTHER})
ASTRAL = bytes({*range(256)} - {WIDEST})
WORD_ENDS = bytes((LETTER, BLANK))
SPACES = [char for char in map(chr, range(0x3001)) if char.isspace()]
WIDE_SPACES = [char for char in SPACES if not char.isascii()]
# Byte-level tokens have a character for each byte; those from U+0122 on are 0x80 to 0xA0 and 0xAD.
WORD_OF_BYTES = re.compile("[A-Za-z0-9\u00a1-\u00ff\u0122-\u0143]")
WORD_OF_CHARACTERS = re.compile("[A-Za-z0-9]|[^\x00-\x7f]")
WORD_END = re.compile("[A-Za-z][ \u0120\u2581]")


class Bound:
    """Two bounds, of which the greater one holds.

    Each character counts as 1 / the length of the longest token in which its kind occurs, so that no token counts more
    than 1 (the longest tokens are often runs of blanks or dashes, which are not words). And an ASCII letter
    with a blank behind it is within a token or between two, so n of them need n / (most within a token + 1) tokens.
    """

    def __init__(
        self,
        tokens: Iterable[str],
        added: Iterable[str],
        bytewise: bool,
        composes: bool,
        strips: bool,
        blanks_stay: bool,
    ):
        """`composes`: NFC joins characters; `strips`: an added token takes the blanks around it, however many;
        `blanks_stay`: nothing replaces them but the character that marks them."""
        self._bytewise = bytewise
        self._composes = composes
        self._strips = strips
        written = WORD_OF_BYTES if bytewise else WORD_OF_CHARACTERS
        self.longest = self.longest_word = 1
        inside = 0
        lengths = [(len(token), token, written) for token in tokens]
        lengths += [(len(token.encode()), token, WORD_OF_CHARACTERS) for token in added]
        for length, token, word in sorted(lengths, key=lambda one: one[0], reverse=True):
            self.longest = max(self.longest, length)
            if length > self.longest_word and word.search(token):
                self.longest_word = length
            if length < 2 * (inside + 1):  # nor has any shorter one more
                break
            inside = max(inside, len(WORD_END.findall(token)))
        self._per_token = inside + 1 if blanks_stay else 0

    def fewest(self, text: str, enough: float = float("inf")) -> int:
        """No tokenisation of this text has fewer tokens. It is read until these are enough."""
        least, weight, ends = 0, 0.0, 0
        for piece in _pieces(text):
            kinds = piece.encode("utf-8", "ignore").translate(KINDS)
            weight += self._weight(piece, kinds)
            ends += kinds.count(WORD_ENDS)
            least = max(int(weight), ends // self._per_token if self._per_token else 0)
            if least >= enough:
                break
        return least

    def fewest_words(self, text: str, enough: float) -> int:
        """The second bound alone: those of parts of a text can be added, wherever it was cut."""
        ends = least = 0
        for piece in _pieces(text) if self._per_token else ():
            ends += piece.encode("utf-8", "ignore").translate(KINDS).count(WORD_ENDS)
            least = ends // self._per_token
            if least >= enough:
                break
        return least

    def _weight(self, text: str, kinds: bytes) -> float:
        words = len(kinds.translate(None, WORDS))
        others: float = len(kinds.translate(None, OTHERS))
        wide = (len(kinds) if self._bytewise else len(text)) - words - others
        if self._strips:
            others -= sum(text.count(char) for char in SPACES if char.isascii())
            wide -= sum(text.count(char) * (len(char.encode()) if self._bytewise else 1) for char in WIDE_SPACES)
        if self._composes and wide:
            # NFC makes at most 3.5 bytes one, and ASCII of some. A text that is in NFC stays as it is, but Python may
            # not know the newest characters that compose, all of them beyond U+FFFF.
            loose = 4 * len(kinds.translate(None, ASTRAL)) if unicodedata.is_normalized("NFC", text) else wide
            wide, others = wide - loose, others + loose / 4
        return (words + wide) / self.longest_word + others / self.longest


def _pieces(text: str) -> Iterator[str]:
    """Cut in front of ASCII, which no character composes with."""
    start = 0
    while start < len(text):
        found = ASCII.search(text, start + PIECE)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def bound(tokenizer: tokenizers.Tokenizer, data: dict[str, Any]) -> Bound | None:
    """data: its tokenizer.json without the vocabulary. None where characters may vanish, or its parts are
    not known here."""
    model, added = tokenizer.model, data["added_tokens"]
    splits, normalizers = _steps(data["pre_tokenizer"]), _steps(data["normalizer"])
    kinds = {step["type"] for step in splits}
    bytewise = "ByteLevel" in kinds | {step["type"] for step in normalizers}
    if (
        not isinstance(model, models.BPE)
        or not kinds <= {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}
        or any("removed" in str(step.get("behavior")).lower() for step in splits)
        or not all(map(_keeps, normalizers))
        or not _knows_all(model, bytewise)
    ):
        return None
    composes = any(step["type"] == "NFC" for step in normalizers)
    if composes and not bytewise:
        return None
    replaced = [step for step in normalizers if step["type"] == "Replace"]
    return Bound(
        tokenizer.get_vocab(with_added_tokens=False),
        [token["content"] for token in added],
        bytewise,
        composes,
        strips=any(token.get("lstrip") or token.get("rstrip") for token in added),
        blanks_stay=(
            all(step["pattern"] == {"String": " "} and step["content"] == "\u2581" for step in replaced)
            and all(step.get("replacement", "\u2581") == "\u2581" for step in splits)
        ),
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A pre-tokenizer's or normalizer's steps; one that is not a sequence is its own."""
    if part is None:
        return []
    inner = part.get("pretokenizers") or part.get("normalizers")
    return [step for one in inner for step in _steps(one)] if inner else [part]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Whether no character of the text vanishes; NFC is counted with."""
    if normalizer["type"] == "Replace":
        pattern, content = normalizer["pattern"].get("String", ""), normalizer["content"]
        return 0 < len(pattern) <= len(content) and len(pattern.encode()) <= len(content.encode())
    return normalizer["type"] in ("Prepend", "ByteLevel", "NFC")


def _knows_all(model: models.BPE, bytewise: bool) -> bool:
    """Whether each character becomes a token of its own at least."""
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if bytewise:
        return all(model.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk
