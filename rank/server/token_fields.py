"""Fields of a request that say which tokens an answer may have, and how many of them thoughts."""

from __future__ import annotations

from typing import Any

from .api_error import bad
from .decoding import show
from .hints import Hints
from .text.load import Text

MAX_WORDS = 256


class TokenFields(Hints, kw_only=True):
    """What all that generates takes of these."""

    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repeat_last_n: int | None = None

    def check(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise bad("allowed_token_ids", "allowed_token_ids is an empty list: name at least one token")
        if any(token < 0 for token in self.allowed_token_ids or ()):
            shown = show(self.allowed_token_ids)
            raise bad("allowed_token_ids", f"allowed_token_ids is {shown}: token ids are not negative")
        words = self.bad_words or []
        if not all(words) or len(words) > MAX_WORDS:
            what = show(words) if not all(words) else f"{len(words)} words"
            raise bad("bad_words", f"bad_words is {what}: at most {MAX_WORDS} texts, none of them empty")

    def thinking_budget(self) -> int | None:
        """How many tokens of the answer may be thoughts; None: any number."""
        return self.thinking_token_budget


def token_limits(request: TokenFields, text: Text, vocab_size: int, thinking: bool) -> dict[str, Any]:
    """These fields as SamplingParams has them. thinking: the prompt has opened the thoughts. Raises ApiError 400."""
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    if allowed and max(allowed) >= vocab_size:
        raise bad(
            "allowed_token_ids",
            f"allowed_token_ids names token {max(allowed)}: this model's tokens are 0 to {vocab_size - 1}",
        )
    limits: dict[str, Any] = {"allowed_token_ids": allowed, "bad_words": _words(request.bad_words or [], text)}
    window = -1 if request.repeat_last_n is None else request.repeat_last_n
    limits |= {"repeat_last_n": max(window, 0)} if window else {"repetition_penalty": 1.0}
    if (budget := request.thinking_budget()) is not None:
        limits |= {"thinking_budget": budget, "thinking_tokens": _thinking_tokens(text), "thinking": thinking}
    return limits


def _words(words: list[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it stands behind a blank and elsewhere."""
    spelled = [tuple(text.tokenizer.encode(blank + word, False)) for word in words for blank in ("", " ")]
    return tuple(dict.fromkeys(filter(None, spelled)))


def _thinking_tokens(text: Text) -> tuple[int, int]:
    """The tokens that open and close thoughts."""
    added, form = text.tokenizer.added, text.reasoning
    if form is None or form.open not in added or form.close not in added:
        raise bad(
            "thinking_token_budget",
            "thinking_token_budget: this model has no tokens around its reasoning, which the limit needs; leave it out",
        )
    return added[form.open], added[form.close]


def texts_or_tokens(name: str, value: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Each as text or token ids."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad(name, f"{name} is an empty list: give a text, token ids, or a list of either")
    if all(isinstance(item, int) for item in value):
        return [value]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in value):
        raise bad(name, f"{name} mixes token ids with texts or lists: give one kind only")
    return value  # type: ignore[return-value]
