"""Requests become token ids, by templates and the tokenizer: what takes so long that threads of a pool do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .. import protocol
from .api_error import ApiError, PromptTooLong, bad
from .conversation import Message
from .embedding_request import EmbeddingRequest
from .schema import MAX_SEQUENCES, ChatRequest, Common, CompletionRequest
from .text.load import Text
from .text.tokenizer import detokenizer

MAX_IDS = 1 << 20  # token ids of all prompts of a request, and some more where the context is long
LARGEST = 8 << 20  # characters of one text: tokenising takes up to 200 bytes of memory and 1 µs for each


class Prompt(msgspec.Struct):
    """One prompt's tokens."""

    tokens: list[int]
    thinking: bool = False  # it ends within an opened reasoning block
    echo: str = ""  # its text, where the request wants it back
    offsets: list[int] = []  # where each token's text begins in `echo`, where log probabilities are wanted too
    answer: bool = True  # false: nothing but the prompt is wanted


def context_of(ready: protocol.Ready) -> int:
    """Tokens that a prompt and its answer may have together."""
    return min(ready.max_model_len, ready.kv_tokens)


def check_values(body: bytes, context: int) -> None:
    """Refuse a body of more values than any request needs, while they are bytes and not objects: 10 MB of [1],[1],...
    take the event loop for seconds, and 50 times their memory.

    Each text, list and object of a chat is a token at least, nearly, so many of them could not be answered anyway. Ids
    of prompts are cheaper.
    """
    lists = 2 * (MAX_SEQUENCES + context)
    most = {"texts": 4 * lists, "lists and objects": lists, "values": MAX_IDS + 4 * context}
    # Within a text a quotation mark has a backslash before it: what it says changes none of these numbers.
    marks = body.count(b'"') - body.count(b'\\"')  # at least one for each text, at most two
    found = {"texts": marks // 2}
    if found["texts"] <= most["texts"]:
        if body.count(b"[") + body.count(b"{") <= lists and body.count(b",") <= most["values"]:  # nearly all bodies
            return
        found["lists and objects"], found["values"] = _count_outside_texts(body)
    for kind, count in found.items():
        if count > most[kind]:
            raise ApiError(
                400,
                f"the request's body has {count} {kind}, but this model's context is {context} tokens, for which at "
                f"most {most[kind]} are read; send less, or several requests",
                code="context_length_exceeded",
            )


def _count_outside_texts(body: bytes) -> tuple[int, int]:
    """Lists and objects; commas. By parts, as their pieces take memory."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # the marks that are left begin and end texts
    lists = commas = 0
    within = False
    for at in range(0, len(bare), 1 << 16):
        pieces = bare[at : at + (1 << 16)].split(b'"')
        outside = b"".join(pieces[within::2])
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        within ^= len(pieces) % 2 == 0
    return lists, commas


def check_number(messages: int, context: int) -> None:
    """Each message takes a token at least: templates write its role."""
    if messages >= context:
        raise _too_long("messages", f"it has {messages} messages", messages, context)


def check_length(text: Text, one: str, context: int, param: str, cut: bool = False) -> None:
    """Refuse a text that cannot fit before it is tokenised, which would take seconds and gigabytes. cut: it is made to
    fit."""
    bound = text.tokenizer.bound
    if bound is not None and len(one) >= context and not cut:
        fewest = bound.fewest(one, context)
        if fewest >= context:
            raise _too_long(param, f"it has {len(one)} characters", fewest, context)
    if len(one) > LARGEST:
        raise ApiError(
            413, f"{param} has {len(one)} characters: at most {LARGEST} are tokenised; shorten it", param, "too_large"
        )


def _too_long(param: str, what: str, fewest: int, context: int) -> ApiError:
    name = "input" if param == "input" else "prompt"
    return PromptTooLong(
        f"the {name} has at least {fewest} tokens, but this model's context is {context} tokens, the "
        f"answer included ({what}); shorten it",
        param,
        fewest,
        context,
    )


def completion_prompts(text: Text, request: CompletionRequest, ready: protocol.Ready) -> list[Prompt]:
    """Each prompt as it is, control tokens included: who completes a text writes all of it."""
    context = context_of(ready)
    asked = request.prompts()
    cut = _kept_tokens(request, context)
    for prompt in asked:
        if isinstance(prompt, str):
            check_length(text, prompt, context, "prompt", cut > 0)
    prompts = []
    for prompt in asked:
        if isinstance(prompt, str):
            tokens = text.tokenizer.encode(prompt, request.add_special_tokens is not False)
        else:
            tokens = prompt
        tokens = tokens[-cut:]
        _check_tokens(tokens, ready.vocab_size, "prompt")
        echo, offsets = "", []
        if request.echo:
            # Of a text, the tokenizer's own tokens (such as one that begins it) are no part.
            whole = isinstance(prompt, str) and not cut
            skip = text.tokenizer.special if whole else frozenset()
            echo = str(prompt) if whole else text.tokenizer.decode(tokens)
            offsets = _offsets(text, tokens, skip, len(echo)) if request.likeliest() >= 0 else []
        prompts.append(Prompt(tokens, echo=echo, offsets=offsets, answer=request.limit() != 0))
    return prompts


def _kept_tokens(request: Common, context: int) -> int:
    """How many tokens of a prompt are kept, its last ones; 0: all of them."""
    asked = request.truncate_prompt_tokens or 0
    return max(1, context - max(request.limit() or 1, 1)) if asked < 0 else asked


def _offsets(text: Text, tokens: list[int], skip: frozenset[int], length: int) -> list[int]:
    detok = detokenizer(text.tokenizer, skip, ())
    offsets, at = [], 0
    for token in tokens:
        offsets.append(min(at, length))
        at += len(detok.feed(token))
    return offsets


def embedding_inputs(text: Text, request: EmbeddingRequest, ready: protocol.Ready) -> list[list[int]]:
    """Each input, which has to fit whole: it cannot be cut without changing what it means."""
    context = context_of(ready)
    asked = request.prompts()
    for one in asked:
        if isinstance(one, str):
            check_length(text, one, context, "input")
    found = []
    for one in asked:
        special = request.add_special_tokens is not False
        tokens = text.tokenizer.encode(one, special) if isinstance(one, str) else one
        _check_tokens(tokens, ready.vocab_size, "input")
        if not tokens:
            raise bad("input", "input is empty: give at least one token")
        if len(tokens) >= context:
            raise ApiError(
                400,
                f"the input has {len(tokens)} tokens, but this model takes fewer than {context}; shorten it",
                "input",
                "context_length_exceeded",
            )
        found.append(tokens)
    return found


def chat_prompt(text: Text, request: ChatRequest, ready: protocol.Ready, default_thinking: bool | None) -> Prompt:
    """The conversation as the model's template writes it; default_thinking is for requests that do not say."""
    rendered, thinking = render_chat(text, request, ready, default_thinking)
    cut = _kept_tokens(request, context_of(ready))
    check_length(text, rendered, context_of(ready), "messages", cut > 0)
    tokens = text.tokenizer.encode(rendered, bool(request.add_special_tokens))[-cut:]
    _check_tokens(tokens, ready.vocab_size, "messages")
    return Prompt(tokens, thinking=thinking, answer=request.limit() != 0)


def render_chat(
    text: Text, request: ChatRequest, ready: protocol.Ready, default_thinking: bool | None
) -> tuple[str, bool]:
    """The prompt's text, with MARK in what only looks like control tokens; whether it ends within the reasoning."""
    if text.template is None:
        raise bad(
            "messages",
            "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
        )
    tools = request.offered()
    if tools and not text.template.takes_tools:
        raise bad("tools", "this model's chat template does not take tools: leave them out")
    continued = bool(request.continue_final_message)
    generate = request.add_generation_prompt if request.add_generation_prompt is not None else not continued
    knows_developer = "developer" in text.template.source
    messages = [_mark(text, message) for message in template_messages(request.conversation(), knows_developer)]
    tools, variables = text.marker.mark(tools), text.marker.mark(_variables(request, default_thinking))
    check = None if request.truncate_prompt_tokens else _stop_at(text, context_of(ready))
    rest = (tools, generate, continued, variables, check)
    try:
        rendered = text.template.render(messages, *rest)
    except ApiError as error:
        merged = _merged(messages)
        if merged is None or error.code == "context_length_exceeded":
            raise
        try:
            rendered = text.template.render(merged, *rest)
        except ApiError:
            raise error from None
    thinking = False
    if text.reasoning is not None:
        last = (messages[-1]["content"] or "") if continued else ""  # a message of calls may have none
        thinking = rendered.rstrip().endswith(text.reasoning.opens) or text.reasoning.opened(last)
    return rendered, thinking


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """All system messages as one at the beginning, as many templates take no other; None where it is so already."""
    system = [message["content"] or "" for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system or (len(system) == 1 and messages[0]["role"] == "system"):
        return None
    return [{"role": "system", "content": "\n\n".join(system)}, *others]


def _stop_at(text: Text, context: int) -> Callable[[str], None] | None:
    """Ends the writing of a prompt that has become too long."""
    bound = text.tokenizer.bound
    if bound is None:
        return None
    written = fewest = 0

    def check(part: str) -> None:
        nonlocal written, fewest
        written += len(part)
        fewest += bound.fewest_words(part, context - fewest)
        if fewest >= context:
            raise _too_long("messages", f"in its first {written} characters", fewest, context)

    return check


def _mark(text: Text, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose texts are marked where they spell control tokens: only the template writes those.

    An assistant's message is the client's as well. But it may bring back the markers around reasoning and tool calls
    that the model wrote: templates look for them, and some models have control tokens for them.
    """
    marked = {name: text.marker.mark(value) for name, value in message.items() if name != "role"}
    if message["role"] == "assistant":
        marked |= {
            name: text.answer_marker.mark(message[name]) for name in ("content", "reasoning_content") if name in message
        }
    return {"role": message["role"], **marked}


def _variables(request: ChatRequest, default_thinking: bool | None) -> dict[str, Any]:
    """What the template may ask for besides messages and tools."""
    thinking = request.thinks()
    if thinking is None:
        thinking = default_thinking
    variables: dict[str, Any] = {}
    if thinking is not None:
        variables["enable_thinking"] = variables["thinking"] = thinking
    if (effort := request.effort()) is not None:
        variables["reasoning_effort"] = effort
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    return {**variables, **(request.chat_template_kwargs or {})}


def _check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise bad(param, f"{param} holds token id {wrong}: this model's tokens are 0 to {vocab_size - 1}")


def template_messages(messages: Sequence[Message], knows_developer: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, arguments of calls as objects."""
    rendered = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part if isinstance(part, str) else part.words() for part in content)
        elif content is None and not message.tool_calls:
            content = ""
        # Most templates know "system"; OpenAI renamed it.
        role = "system" if message.role == "developer" and not knows_developer else message.role
        entry: dict[str, Any] = {"role": role, "content": content}
        thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
        named = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thoughts}
        entry |= {name: value for name, value in named.items() if value is not None}
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": called.name, "arguments": _arguments(called.arguments)},
                }
                for call, called in ((call, call.called()) for call in message.tool_calls)
            ]
        rendered.append(entry)
    return rendered


def _arguments(arguments: str | dict[str, Any]) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
