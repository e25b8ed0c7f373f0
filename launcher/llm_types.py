"""The library's types: sampling parameters, whole answers, and deltas of one that is being generated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from ..rank.protocol import TokenLogprob
from ..rank.server.openai_format import tool_call
from ..rank.server.session import Session
from ..rank.server.text.events import Answer, Reasoning, Text

Prompt = str | Sequence[int]
Message = dict[str, Any]  # role, content and what else a chat request's messages have


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How answers are sampled and when they end. None: the model's generation_config.json, then OpenAI's default."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: as long as the model's context allows
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None  # of the sampled token and this many of the likeliest
    priority: int | None = None


class Completion(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] | None = None


class Output(msgspec.Struct):
    """The answers to one prompt; the properties are those of the first."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs


class Piece(msgspec.Struct):
    """New output of one answer. Pieces of an answer, put together, are its Completion."""

    index: int  # of the answer, where n is above 1
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: str = ""  # in an answer's last piece
    stop_reason: str | int | None = None
    tool_calls: list[dict[str, Any]] = []  # all of them, in the last piece


async def collect(session: Session, logprobs: bool) -> Output:
    """All that a session produces."""
    found = {
        choice.index: Completion(choice.index, "", [], "", logprobs=[] if logprobs else None)
        for choice in session.choices
    }
    answers = {choice.index: Answer() for choice in session.choices}
    async for updates in session:
        for update in updates:
            one = found[update.choice.index]
            answers[update.choice.index].add(update.events)
            one.token_ids += update.tokens
            if one.logprobs is not None:
                one.logprobs += [entry for entry, _ in update.logprobs]
    for choice in session.choices:
        one, answer = found[choice.index], answers[choice.index]
        one.text, one.reasoning, one.tool_calls = answer.text, answer.reasoning, list(map(tool_call, answer.calls))
        one.finish_reason, one.stop_reason = choice.finish, choice.stop_reason
    return Output(list(session.prompts[0].tokens), list(found.values()), session.usage())


async def pieces(session: Session) -> AsyncIterator[Piece]:
    """Output of a session, as it comes."""
    answers = {choice.index: Answer() for choice in session.choices}
    async for updates in session:
        for update in updates:
            answer = answers[update.choice.index]
            answer.add(update.events)
            yield Piece(
                update.choice.index,
                "".join(event.text for event in update.events if isinstance(event, Text)),
                "".join(event.text for event in update.events if isinstance(event, Reasoning)),
                update.tokens,
                [entry for entry, _ in update.logprobs],
                update.finish,
                update.choice.stop_reason if update.finish else None,
                list(map(tool_call, answer.calls)) if update.finish else [],
            )
