"""Requests become token ids, by templates and the tokenizer: what takes so long that threads of a pool do it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from .. import step
from .errors import ApiError, bad
from .schema import ChatRequest, CompletionRequest, EmbeddingRequest, Message
from .text.load import Text


class Prompt(msgspec.Struct):
    """One prompt's tokens."""

    tokens: list[int]
    thinking: bool = False  # it ends within an opened reasoning block
    echo: str = ""  # its text, where the request wants it back


def completion_prompts(text: Text, request: CompletionRequest, vocab_size: int) -> list[Prompt]:
    """Each prompt as it is."""
    prompts = []
    for prompt in request.prompts():
        if isinstance(prompt, str):
            tokens = text.tokenizer.encode(prompt, request.add_special_tokens is not False)
        else:
            tokens = prompt
        _check_tokens(tokens, vocab_size, "prompt")
        echo = ""
        if request.echo:
            echo = prompt if isinstance(prompt, str) else text.tokenizer.decode(tokens)
        prompts.append(Prompt(tokens, echo=echo))
    return prompts


def embedding_inputs(text: Text, request: EmbeddingRequest, ready: step.Ready) -> list[list[int]]:
    """Each input, which has to fit whole: it cannot be cut without changing what it means."""
    context = min(ready.max_model_len, ready.kv_tokens)
    found = []
    for one in request.prompts():
        special = request.add_special_tokens is not False
        tokens = text.tokenizer.encode(one, special) if isinstance(one, str) else one
        _check_tokens(tokens, ready.vocab_size, "input")
        if not tokens:
            raise bad("input", "input is empty: give at least one token")
        if len(tokens) >= context:
            raise ApiError(400, f"the input has {len(tokens)} tokens, but this model takes fewer than {context}; "
                                "shorten it", "input", "context_length_exceeded")
        found.append(tokens)
    return found


def chat_prompt(text: Text, request: ChatRequest, vocab_size: int, default_thinking: bool | None) -> Prompt:
    """The conversation as the model's template writes it; default_thinking is for requests that do not say."""
    if text.template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions, or start the server with one",
                       "messages")
    tools = request.tools if request.tools and request.tool_choice != "none" else None
    if tools and not text.template.takes_tools:
        raise bad("tools", "this model's chat template does not take tools: leave them out")
    continued = bool(request.continue_final_message)
    generate = request.add_generation_prompt if request.add_generation_prompt is not None else not continued
    messages = template_messages(request.messages, "developer" in text.template.source)
    rendered = text.template.render(messages, tools, generate, continued, _variables(request, default_thinking))
    thinking = False
    if text.reasoning is not None:
        last = (messages[-1]["content"] or "") if continued else ""  # a message of calls may have none
        thinking = (rendered.rstrip().endswith(text.reasoning.open)
                    or last.rfind(text.reasoning.open) > last.rfind(text.reasoning.close))
    tokens = text.tokenizer.encode(rendered, bool(request.add_special_tokens))
    _check_tokens(tokens, vocab_size, "messages")
    return Prompt(tokens, thinking=thinking)


def _variables(request: ChatRequest, default_thinking: bool | None) -> dict[str, Any]:
    """What the template may ask for besides messages and tools."""
    thinking = request.enable_thinking
    if thinking is None:
        thinking = request.thinking if isinstance(request.thinking, bool) else None
        if isinstance(request.thinking, dict):
            thinking = request.thinking.get("type") == "enabled"
        elif thinking is None:
            thinking = default_thinking
    variables: dict[str, Any] = {}
    if thinking is not None:
        variables["enable_thinking"] = variables["thinking"] = thinking
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return {**variables, **(request.chat_template_kwargs or {})}


def _check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise bad(param, f"{param} holds token id {wrong}: this model's tokens are 0 to {vocab_size - 1}")


def template_messages(messages: str | Sequence[Message], knows_developer: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, arguments of calls as objects."""
    assert not isinstance(messages, str)
    rendered = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part if isinstance(part, str) else part.text or "" for part in content)
        elif content is None and not message.tool_calls:
            content = ""
        # Most templates know "system"; OpenAI renamed it.
        role = "system" if message.role == "developer" and not knows_developer else message.role
        entry: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry[name] = value
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": call.id, "type": call.type,
                 "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
                for call in message.tool_calls]
        rendered.append(entry)
    return rendered


def _arguments(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
