"""Fields of a request that decide which tokens an answer may have, and how many of them thoughts."""

from __future__ import annotations

from typing import Annotated, Any

from .api_error import bad
from .fields import BadWords, Count, TokenIds, Window, doc
from .hints import Hints
from .text.load import ModelText, Text


class TokenFields(Hints, kw_only=True):
    """Token fields of every request that generates."""

    allowed_token_ids: Annotated[TokenIds | None, doc("no other tokens are sampled")] = None
    bad_words: Annotated[BadWords | None, doc(
        "texts that the answer never has, as tokens spell them alone or behind a blank"
    )] = None  # fmt: skip
    thinking_token_budget: Annotated[Count | None, doc(
        "most tokens of reasoning, which is closed then, where the model has tokens around it"
    )] = None  # fmt: skip
    repeat_last_n: Annotated[Window | None, doc(
        "`repetition_penalty` looks at the last so many tokens; -1: at all; 0: at none"
    )] = None  # fmt: skip

    def thinking_budget(self) -> int | None:
        """How many tokens of the answer may be thoughts; None: any number."""
        return self.thinking_token_budget


def token_limits(request: TokenFields, text: ModelText, vocab_size: int, thinking: bool) -> dict[str, Any]:
    """The fields as SamplingParams has them. thinking: the prompt has opened the thoughts. Raises ApiError 400."""
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    if allowed and max(allowed) >= vocab_size:
        raise bad(
            "allowed_token_ids",
            f"allowed_token_ids names token {max(allowed)}: this model's tokens are 0 to {vocab_size - 1}",
        )
    limits: dict[str, Any] = {"allowed_token_ids": allowed, "bad_words": ()}
    if request.bad_words:
        limits["bad_words"] = text.run(word_tokens, request.bad_words)
    window = -1 if request.repeat_last_n is None else request.repeat_last_n
    limits |= {"repeat_last_n": max(window, 0)} if window else {"repetition_penalty": 1.0}
    if (budget := request.thinking_budget()) is not None:
        limits |= {"thinking_budget": budget, "thinking_tokens": _thinking_tokens(text), "thinking": thinking}
    return limits


def word_tokens(text: Text, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it stands behind a blank and elsewhere."""
    spelled = [tuple(text.tokenizer.encode(blank + word, False)) for word in words for blank in ("", " ")]
    return tuple(dict.fromkeys(filter(None, spelled)))


def _thinking_tokens(text: ModelText) -> tuple[int, int]:
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
