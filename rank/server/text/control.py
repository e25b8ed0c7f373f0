"""Control tokens that somebody spells: text of a request must not become the tokens with which a template marks roles
and ends of turns, or whoever writes a message (a user, a page that a tool has read) writes other messages too.

So before a template is rendered, what the request brings is marked wherever it spells such a token. MARK travels with
the text through the template, and marked places are tokenised as plain text. Text without any, nearly all there is, is
rendered and tokenised as if none of this existed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

import tokenizers

# Half of a surrogate pair: JSON of clients cannot hold it alone, a template's trim leaves it, and no text needs it.
MARK = "\udc80"
# An added token whose id is dropped. A part of a text that begins with it is no text's beginning, to which some
# tokenizers add a blank. Unicode assigns these characters no meaning.
GUARD = "\U0010fffe\U0010ffff\U0010fffe"
DEEPEST = 50  # groups within each other in a regular expression that is made; `re` counts its own levels
SIGN = re.compile(r"[^\w\s]")


def control_tokens(added: Iterable[tokenizers.AddedToken], template: str, kept: Collection[str]) -> frozenset[str]:
    """The added tokens that only a template may write.

    These are the special ones and, as some models' files do not call their role tokens special, those that the
    template's source names. Not those in `kept`, which conversations bring back, and no blanks and mere words, which
    stand in a source for other reasons.
    """
    return frozenset(
        token.content
        for token in added
        if token.special
        or (
            token.content in template
            and token.content not in kept
            and len(token.content) > 1
            and SIGN.search(token.content)
        )
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of these texts, the longest that fits."""
    return re.compile(_alternatives(sorted(texts)) or "(?!)")


def _alternatives(texts: list[str], depth: int = 0) -> str:
    """Any of these sorted texts, the longest first. What texts begin with alike is written once: `re` takes long to
    compile, and at each place to try, thousands of texts with the same first characters."""
    if depth == DEEPEST:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    found = []
    for _, group in itertools.groupby((text for text in texts if text), lambda text: text[0]):
        alike = list(group)
        head = os.path.commonprefix(alike)
        rest = [text[len(head) :] for text in alike]
        within = _alternatives(rest, depth + 1)
        found.append(re.escape(head) + (f"(?:{within}){'' if rest[0] else '?'}" if within else ""))
    return "|".join(found)


class Marker:
    """Puts MARK into texts that spell one of the given tokens."""

    def __init__(self, tokens: Iterable[str]):
        tokens = [token for token in tokens if len(token) > 1]  # one character says no more than itself
        self._spelled = _any_of(tokens)
        self._begun = {token[:i] for token in tokens for i in range(1, len(token))}
        self._longest = max(map(len, self._begun), default=0)

    def mark(self, value: Any) -> Any:
        """A text, or an object as JSON has it with all its texts."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, list):
            return [self.mark(one) for one in value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark(one) for key, one in value.items()}
        return value

    def _mark(self, text: str) -> str:
        while self._spelled.search(text):  # again, as the rest of a token may be another one
            text = self._spelled.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        # The next text that the template writes may complete a token that this one begins.
        body = text.rstrip()
        if any(body[-length:] in self._begun for length in range(1, min(self._longest, len(body)) + 1)):
            text = body + MARK + text[len(body) :]
        return text


class Encoder:
    """Encodes texts with marks: as a whole without control tokens between those that the template wrote.

    The library cuts every text at its added tokens before it does anything else, so what is between two of them can be
    encoded by itself. Safe to use from several threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: Collection[str], unknown: str | None):
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._control = _with_blanks([token for token in added.values() if token.content in control])
        self._control_ids = {id for id, token in added.items() if token.content in control and token.content != unknown}
        # Added tokens that are no control tokens, such as <think>, stay: conversations bring them back.
        others = [token for token in added.values() if token.content not in control]
        self._others = {token.content: id for id, token in added.items() if token.content not in control}
        self._plain = _without_added(tokenizer)
        self._plain.add_tokens([tokenizers.AddedToken(GUARD, normalized=False), *others])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The whole text, with its control tokens."""
        # This way to encode releases the GIL and computes no offsets, unlike the library's others.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes a text whose marked parts have no control tokens."""
        ids: list[int] = []
        done = last = 0  # what is encoded; where the last control token ended
        for start, end in [*(found.span() for found in self._control.finditer(text)), (len(text), len(text))]:
            if MARK in text[last:start]:
                if done < last:
                    ids += self.encode(text[done:last])
                ids += self._encode_plain(text[last:start], first=not last)
                done = start
            last = end
        if done < len(text):
            ids += self.encode(text[done:])
        if add_special_tokens:
            before, after = self._around()
            ids = [*before, *ids, *after]
        return ids

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        ids: list[int] = []
        for cut in ("", GUARD):  # some models compose control tokens from letters: then each is cut where it is marked
            whole = ("" if first else GUARD) + text.replace(MARK, cut)
            found = self._plain.encode_batch([whole], add_special_tokens=False)[0]  # the fast one tells no texts
            # Tokens are compared by their texts: added ones have other ids here, which may be those of the vocabulary.
            ids = [
                self._others.get(token, id) for token, id in zip(found.tokens, found.ids, strict=True) if token != GUARD
            ]
            if self._control_ids.isdisjoint(ids):
                break
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer puts before and behind every text."""
        bare, whole = self.encode("a"), self.encode("a", True)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]


def _with_blanks(control: list[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Any control token, with the blanks around it that it takes."""
    if not any(token.lstrip or token.rstrip for token in control):
        return _any_of(token.content for token in control)
    longest_first = sorted(control, key=lambda token: len(token.content), reverse=True)
    texts = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in longest_first
    ]
    return re.compile("|".join(texts))


def _without_added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer without added tokens; both share the vocabulary."""
    plain = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain
