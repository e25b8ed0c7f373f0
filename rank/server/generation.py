"""A request in the engine's words: whatever endpoint it came to, it becomes a Generation before the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec

import msgspec

from .. import protocol
from .answer_grammar import Calls, Thoughts, answer_grammar, plain_grammar
from .api_error import ApiError, bad
from .conversation import tool_name
from .custom_tools import custom_names, enforced
from .fields import MAX_LOGPROBS, MAX_PROMPT_ENTRIES
from .prompts import Prompt, chat_prompt, completion_prompts, context_of
from .sampling_params import max_tokens, sampling_params
from .schema import WHOLE_VOCABULARY, ChatRequest, Common, CompletionRequest
from .text.load import ModelText
from .text.output_parser import OutputParser
from .text.reasoning import ReasoningFormat
from .text.tool_formats import ToolCallFormat, Tools
from .token_fields import token_limits
from .tool_choice import tool_choice

MAX_OBJECTS = 50  # points or boxes of an answer, where the request has no max_tokens
P = ParamSpec("P")


class LoadedModel(NamedTuple):
    """The model that a request's prompts and parameters depend on."""

    text: ModelText
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
# A Generation whose grammar has to be checked first, which may take long.
Unchecked = Callable[[], Generation]
Make = Callable[[LoadedModel, Any], Generation | Unchecked]  # from a request of its kind


def chat_generation(model: LoadedModel, request: ChatRequest) -> Generation | Unchecked:
    """The next message of a conversation. Takes as long as its texts are; raises ApiError."""
    prompt = model.text.run(chat_prompt, request, model.ready, model.thinking)
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.offered() or ()}
    tool_format = model.text.tool_format if tools else None
    if tool_format is not None and request.constraint() is not None:
        tool_format = tool_format._replace(unmarked=False)  # JSON without markers is what the request wants
    rest = model.text.reasoning, Called(tool_format, tools, custom_names(request.tools))
    if request.constraint() is None and not request.chosen():
        return _generation(model, request, [prompt], "", *rest)

    def checked() -> Generation:
        grammar = _limited(model.text, chat_grammar, request, model.thinking, prompt.thinking)
        return _generation(model, request, [prompt], grammar, *rest)

    return checked


def chat_grammar(text: ModelText, request: ChatRequest, default_thinking: bool | None, begun: bool) -> str:
    """The grammar of the next message. begun: the prompt has opened thoughts.

    A short schema may ask for minutes of work and gigabytes: this runs where that is limited.
    """
    thoughts = _thoughts(text, request, default_thinking, begun)
    return answer_grammar(text, request.constraint(), _calls(text, request), thoughts)


def completion_grammar(text: ModelText, request: CompletionRequest) -> str:
    """The grammar of a continuation, as chat_grammar."""
    return plain_grammar(request.constraint())


def _limited(text: ModelText, make: Callable[Concatenate[ModelText, P], str], *args: P.args, **more: P.kwargs) -> str:
    """The grammar that `make` gives. Raises ApiError 400 where that takes too much time or memory."""
    try:
        return text.run(make, *args, **more)
    except ApiError as error:
        if error.code != "text_limits":
            raise
        raise ApiError(
            400,
            "the answer's grammar takes too much time or memory to check: make the schema, the pattern, the grammar or "
            "the tools simpler",
            code="text_limits",
        ) from None


def _calls(text: ModelText, request: ChatRequest) -> Calls | None:
    """The tools that the answer may call, and whether it must."""
    tools = [enforced(tool, text.tool_format is not None and text.tool_format.raw) for tool in request.chosen()]
    if not tools:
        return None
    choice = tool_choice(request.tool_choice)
    if choice.named:
        return Calls([tool for tool in tools if tool_name(tool) == choice.named], True, False)
    return Calls(tools, choice.mode == "required", request.parallel_calls())


def _thoughts(text: ModelText, request: ChatRequest, default_thinking: bool | None, begun: bool) -> Thoughts | None:
    """How the answer may begin with thoughts; None where it does not."""
    reasoning = text.reasoning
    asked = request.thinks()
    thinks = default_thinking if asked is None else asked
    return None if reasoning is None or (thinks is False and not begun) else Thoughts(reasoning, begun)


def completion_generation(model: LoadedModel, request: CompletionRequest) -> Generation | Unchecked:
    """The continuations of texts, which are shown as they come."""
    prompts = model.text.run(completion_prompts, request, model.ready)
    if request.constraint() is None:
        return _generation(model, request, prompts, "")
    return lambda: _generation(model, request, prompts, _limited(model.text, completion_grammar, request))


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
    _check_prompt_entries(request, prompts, ready.vocab_size)
    tokenizer, stops = text.tokenizer, request.stops()
    # A special token has no text, so a stop string that names one is matched by its id.
    named = [tokenizer.added.get(stop) for stop in stops]
    stop_tokens = [token for token in named if token is not None and token in tokenizer.special]
    sampling = []
    for prompt in prompts:
        limit = max_tokens(request, model.defaults["max_tokens"], len(prompt.tokens), context_of(ready))
        one = sampling_params(request, model.defaults, text.end_tokens, stop_tokens, ready.vocab_size, limit)
        limits = token_limits(request, text, ready.vocab_size, prompt.thinking)
        one = msgspec.structs.replace(one, **limits)
        sampling.append(_of_heads(request, prompt.heads, one, text.end_tokens, grammar) if prompt.heads else one)
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


def _of_heads(
    request: Common, heads: tuple[int, ...], shared: protocol.SamplingParams, end_tokens: tuple[int, ...], grammar: str
) -> protocol.SamplingParams:
    """The parameters of an answer whose tokens other heads than the vocabulary's choose: only its length counts. Raises
    ApiError for fields that ask for more than tokens."""
    if shared.logprobs >= 0 or shared.prompt_logprobs >= 0:
        raise bad("logprobs", "logprobs is given: points and boxes have none; leave it out")
    if grammar:
        raise bad("response_format", "the answer is constrained: points and boxes have a format of their own")
    most = shared.max_tokens if request.limit() is not None else min(shared.max_tokens, MAX_OBJECTS * len(heads))
    return protocol.SamplingParams(max_tokens=most, temperature=0, stop_token_ids=end_tokens, heads=heads)


def _check_prompt_entries(request: Common, prompts: list[Prompt], vocab_size: int) -> None:
    """Refuse log probabilities of the whole vocabulary for more tokens than the server can write at once."""
    count = sum(len(prompt.tokens) for prompt in prompts)
    if request.prompt_likeliest() == WHOLE_VOCABULARY and count * vocab_size > MAX_PROMPT_ENTRIES:
        most = MAX_PROMPT_ENTRIES // vocab_size
        raise bad(
            "prompt_logprobs",
            f"prompt_logprobs is -1, for all {vocab_size} tokens of the vocabulary beside each of the prompt's {count} "
            f"tokens: an answer has at most {MAX_PROMPT_ENTRIES} of them, for {most} tokens of this model; send "
            f"no more, or ask for up to {MAX_LOGPROBS} tokens beside each",
        )
