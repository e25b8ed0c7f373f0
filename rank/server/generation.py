"""A request in the engine's words: whatever endpoint it came to, it becomes a Generation before the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from .. import protocol
from .answer_grammar import Calls, Thoughts, answer_grammar, plain_grammar
from .api_error import bad
from .conversation import tool_name
from .custom_tools import custom_names, enforced
from .prompts import Prompt, chat_prompt, completion_prompts, context_of
from .sampling_params import max_tokens, sampling_params
from .schema import ChatRequest, Common, CompletionRequest
from .text.load import Text
from .text.output_parser import OutputParser
from .text.reasoning import ReasoningFormat
from .text.tool_formats import ToolCallFormat, Tools
from .token_fields import token_limits
from .tool_choice import tool_choice


class LoadedModel(NamedTuple):
    """What a request's prompts and parameters depend on besides the request."""

    text: Text
    ready: protocol.Ready
    defaults: dict[str, Any]  # of sampling
    thinking: bool | None  # enable_thinking of requests that do not say


class Generation(msgspec.Struct, kw_only=True):
    """Prompts, how each is continued, and how what comes is read."""

    prompts: list[Prompt]
    sampling: list[protocol.SamplingParams]  # of each prompt
    parser: Callable[[Prompt], OutputParser]  # a new one for each choice
    n: int = 1  # choices of each prompt
    skip: frozenset[int] = frozenset()  # tokens that have no text
    markers: dict[int, str] = {}  # tokens that the parser looks for; what others spell is text
    keep_stop: bool = False  # the text ends after a stop token's text instead of before it
    priority: int = 0
    cache_salt: str = ""
    grammar: str = ""  # of all choices; "": they are free
    vocabulary: protocol.Vocabulary | None = None  # what the grammar is for


class Called(NamedTuple):
    """How calls of tools are read."""

    format: ToolCallFormat | None = None
    tools: Tools | None = None
    custom: frozenset[str] = frozenset()  # names of those whose input is a text


NOTHING = Called()
Make = Callable[[LoadedModel, Any], Generation]  # from a request of its kind


def chat_generation(model: LoadedModel, request: ChatRequest) -> Generation:
    """The next message of a conversation. Takes as long as its texts are; raises ApiError."""
    prompt = chat_prompt(model.text, request, model.ready, model.thinking)
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.offered() or ()}
    tool_format = model.text.tool_format if tools else None
    grammar = answer_grammar(
        model.text, request.constraint(), _calls(model.text, request), _thoughts(model, request, prompt.thinking)
    )
    called = Called(tool_format, tools, custom_names(request.tools))
    return _generation(model, request, [prompt], grammar, model.text.reasoning, called)


def _calls(text: Text, request: ChatRequest) -> Calls | None:
    """The tools that the answer may call, and whether it must."""
    tools = [enforced(tool, text.tool_format is not None and text.tool_format.raw) for tool in request.chosen()]
    if not tools:
        return None
    choice = tool_choice(request.tool_choice)
    if choice.named:
        return Calls([tool for tool in tools if tool_name(tool) == choice.named], True, False)
    return Calls(tools, choice.mode == "required", request.parallel_calls())


def _thoughts(model: LoadedModel, request: ChatRequest, begun: bool) -> Thoughts | None:
    """How the answer may begin with thoughts; None where it does not."""
    reasoning = model.text.reasoning
    asked = request.thinks()
    thinks = model.thinking if asked is None else asked
    return None if reasoning is None or (thinks is False and not begun) else Thoughts(reasoning, begun)


def completion_generation(model: LoadedModel, request: CompletionRequest) -> Generation:
    """The continuations of texts, which are shown as they come."""
    grammar = plain_grammar(request.constraint())
    return _generation(model, request, completion_prompts(model.text, request, model.ready), grammar)


def _generation(
    model: LoadedModel,
    request: Common,
    prompts: list[Prompt],
    grammar: str,
    reasoning: ReasoningFormat | None = None,
    called: Called = NOTHING,
) -> Generation:
    text, ready, (tool_format, tools, custom) = model.text, model.ready, called
    if grammar and (request.allowed_token_ids or request.bad_words):  # together they might leave no token
        name = "allowed_token_ids" if request.allowed_token_ids else "bad_words"
        raise bad(name, f"{name} and calls that are enforced (tool_choice, strict) exclude each other: leave one out")
    tokenizer, stops = text.tokenizer, request.stops()
    # A special token has no text, so a stop string that names one is matched by its id.
    named = [tokenizer.added.get(stop) for stop in stops]
    stop_tokens = [token for token in named if token is not None and token in tokenizer.special]
    sampling = []
    for prompt in prompts:
        limit = max_tokens(request, model.defaults["max_tokens"], len(prompt.tokens), context_of(ready))
        one = sampling_params(request, model.defaults, text.end_tokens, stop_tokens, ready.vocab_size, limit)
        limits = token_limits(request, text, ready.vocab_size, prompt.thinking)
        sampling.append(msgspec.structs.replace(one, **limits))
    markers = [*(reasoning.markers if reasoning else ())]
    markers += [*tool_format.opens, *tool_format.markers] if tool_format else []
    # The parser has to see the markers that the model was given as special tokens, and those within longer markers.
    seen = {id for token, id in tokenizer.added.items() if len(token) > 1 and any(token in one for one in markers)}
    skip = tokenizer.special - seen if request.skip_special_tokens is not False else frozenset()
    keep_stop, parallel = bool(request.include_stop_str_in_output), request.parallel_calls()
    return Generation(
        prompts=prompts,
        sampling=sampling,
        parser=lambda prompt: OutputParser(
            stops, keep_stop, reasoning, prompt.thinking, tool_format, parallel, tools, custom
        ),
        n=request.n or 1,
        skip=skip,
        markers={id: token for token, id in tokenizer.added.items() if id in seen} if tokenizer.bytewise else {},
        keep_stop=keep_stop,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        grammar=grammar,
        vocabulary=text.vocabulary(ready.vocab_size) if grammar else None,
    )
