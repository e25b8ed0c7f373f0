"""Requests become token ids, by templates and the tokenizer: what takes so long that threads of a pool do it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from .. import protocol
from ..vision import TASK
from .api_error import ApiError, PromptTooLong, bad
from .conversation import Message, Part, ShownImage, with_tool_calls
from .decoding import show
from .embedding_request import EmbeddingRequest
from .schema import ChatRequest, Common, CompletionRequest
from .text.control import MARK
from .text.load import Text
from .text.message_shape import as_parts
from .text.tokenizer import detokenizer

LARGEST = 8 << 20  # characters of one text: tokenising takes up to 200 bytes of memory and 1 µs for each


class Prompt(msgspec.Struct):
    """One prompt's tokens."""

    tokens: Sequence[int]  # a list, and an array once they are sent: that takes a ninth of the memory
    thinking: bool = False  # it ends within an opened reasoning block
    echo: str = ""  # its text, where the request wants it back
    offsets: list[int] = []  # where each token's text begins in `echo`, where log probabilities are wanted too
    answer: bool = True  # false: nothing but the prompt is wanted
    prediction: list[int] = []  # tokens that the answer will probably have
    pictures: list[protocol.Picture] = []  # images in it
    read: bytes = b""  # as Pixels.text, of the one image in it
    heads: tuple[int, ...] = ()  # of the model, that choose the answer's tokens in turn; (): the vocabulary's alone


def context_of(ready: protocol.Ready) -> int:
    """Tokens that a prompt and its answer may have together."""
    return min(ready.max_model_len, ready.kv_tokens)


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
        tokens = _cut(tokens, cut, request)
        _check_tokens(tokens, ready.vocab_size, "prompt")
        echo, offsets = "", []
        if request.echo:
            # Tokens that the tokenizer adds (such as one that begins a text) are no part of a text.
            whole = isinstance(prompt, str) and not cut
            skip = text.tokenizer.special if whole else frozenset()
            echo = str(prompt) if whole else text.tokenizer.decode(tokens)
            offsets = _offsets(text, tokens, skip, len(echo)) if request.likeliest() >= 0 else []
        prompts.append(Prompt(tokens, echo=echo, offsets=offsets, answer=request.limit() != 0))
    return prompts


def _kept_tokens(request: Common, context: int) -> int:
    """How many tokens of a prompt are kept; 0: all of them."""
    asked = request.truncate_prompt_tokens or 0
    return max(1, context - max(request.limit() or 1, 1)) if asked < 0 else asked


def _cut(tokens: list[int], kept: int, request: Common) -> list[int]:
    """The last tokens, or the first ones where truncation_side is right."""
    return tokens[:kept] if kept and request.truncation_side == "right" else tokens[-kept:]


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
    """The conversation as the model's template writes it; default_thinking is for requests that leave it open."""
    rendered, thinking = render_chat(text, request, ready, default_thinking)
    images = _images(request)
    rendered, heads = _heads(rendered, images)
    rendered = _with_frames(rendered, images)
    cut = _kept_tokens(request, context_of(ready))
    check_length(text, rendered, context_of(ready), "messages", cut > 0)
    tokens = text.tokenizer.encode(rendered, bool(request.add_special_tokens))
    if images and cut:
        raise bad("truncate_prompt_tokens", "truncate_prompt_tokens is given: prompts with images are not cut")
    read = b""
    if images and images[0].rules.frame:
        tokens, pictures, read = _read_with_image(tokens, images, ready.vocab_size)
    else:
        tokens, pictures = _with_images(tokens, images) if images else (_cut(tokens, cut, request), [])
    _check_tokens(tokens, ready.vocab_size, "messages")
    prediction = _predicted(text, request, context_of(ready))
    return Prompt(
        tokens, thinking=thinking, answer=request.limit() != 0, prediction=prediction, pictures=pictures, heads=heads,
        read=read,
    )  # fmt: skip


def _heads(rendered: str, images: list[ShownImage]) -> tuple[str, tuple[int, ...]]:
    """A prompt without the task that the template wrote behind it, and the heads that the task takes."""
    task = TASK.search(rendered)
    if task is None:
        return rendered, ()
    if not images:
        raise bad("messages", f"the messages have no image: to {task[1]} something takes one")
    return rendered[: task.start()], images[0].rules.tasks.get(task[1], ())


def _images(request: ChatRequest) -> list[ShownImage]:
    """A chat's images, in its order. Raises ApiError where one was not read: this endpoint takes none."""
    found = []
    for i, message in enumerate(request.conversation()):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ShownImage):
                found.append(part)
            elif isinstance(part, Part) and part.is_image:
                at = f"messages[{i}].content[{j}]"
                raise bad(at, f"{at}.type is {show(part.type)}: this endpoint takes text only")
    return found


def _with_frames(rendered: str, images: list[ShownImage]) -> str:
    """A prompt with the texts that images have in the places that the template wrote."""
    if not images or not images[0].rules.mark:
        return rendered
    first, *others = rendered.split(images[0].rules.mark)
    _check_places(len(others), len(images))
    return first + "".join(image.text + other for image, other in zip(images, others, strict=True))


def _check_places(found: int, images: int) -> None:
    if found != images:
        raise bad(
            "messages",
            f"the model's chat template writes {found} places for the {images} images of these messages: "
            "it does not take them there",
        )


def _with_images(tokens: list[int], images: list[ShownImage]) -> tuple[list[int], list[protocol.Picture]]:
    """A prompt whose images' placeholders are the tokens that features stand for, and where these are."""
    at = [i for i, token in enumerate(tokens) if token == images[0].rules.placeholder]
    _check_places(len(at), sum(one.runs for one in images))
    made: list[int] = []
    pictures = []
    begin, places = 0, iter(at)
    for one in images:
        start, spans = -1, list[tuple[int, int]]()
        for place in itertools.islice(places, one.runs):
            made += tokens[begin:place]
            start = len(made) if start < 0 else start
            spans += [(len(made) + first, len(made) + end) for first, end in one.spans]
            made += one.tokens
            begin = place + 1
        pictures.append(protocol.Picture(one.digest, start, len(made) - start, one.rows, one.columns, tuple(spans)))
    return made + tokens[begin:], pictures


def _read_with_image(
    tokens: list[int], images: list[ShownImage], vocab_size: int
) -> tuple[list[int], list[protocol.Picture], bytes]:
    """A prompt whose text the tower reads with the image before it, the place of that text's features, and its
    tokens, packed."""
    rules, digest = images[0].rules, images[0].digest
    _check_places(tokens.count(rules.placeholder), len(images))
    first, last = rules.frame
    read = [first, *tokens[tokens.index(rules.placeholder) + 1 :], last]
    if len(read) > rules.longest:
        most = f"this model reads at most {rules.longest} with an image; shorten it"
        raise bad("messages", f"the question has {len(read)} tokens: {most}")
    _check_tokens(read, vocab_size, "messages")
    packed = protocol.pack_u32(read)
    digest = blake2b(digest + packed, digest_size=len(digest)).digest()
    made = rules.tokens(len(read), 1)
    return made, [protocol.Picture(digest, 0, len(made), len(read), 1)], packed


def _predicted(text: Text, request: ChatRequest, context: int) -> list[int]:
    """The tokens of a chat's prediction: as many as an answer may have."""
    if request.prediction is None:
        return []
    predicted = request.prediction.text()
    check_length(text, predicted, context, "prediction")
    return list(text.tokenizer.encode(predicted, False))[:context]


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
    if tools and not text.takes_tools:
        raise bad("tools", "this model's chat template does not take tools: leave them out")
    continued = bool(request.continue_final_message)
    generate = request.add_generation_prompt if request.add_generation_prompt is not None else not continued
    knows_developer = "developer" in text.template.source
    messages = [_mark(text, message) for message in template_messages(request.conversation(), knows_developer)]
    tools, variables = text.marker.mark(tools), text.marker.mark(_variables(request, default_thinking))
    shape = text.shape(tools)

    def written(messages: list[dict[str, Any]]) -> str:
        check = None if request.truncate_prompt_tokens else _stop_at(text, context_of(ready))
        assert text.template is not None
        return text.template.render(
            [shape.apply(message) for message in messages], tools, generate, continued, variables, check
        )

    rendered = _first_accepted(written, messages)
    thinking = False
    if text.reasoning is not None:
        last = messages[-1]["content"] if continued else ""
        thinking = rendered.rstrip().endswith(text.reasoning.opens) or text.reasoning.opened(last)
    return rendered, thinking


def rendered_text(text: Text, request: ChatRequest, ready: protocol.Ready, default_thinking: bool | None) -> str:
    """The prompt's text as people read it."""
    return TASK.sub("", render_chat(text, request, ready, default_thinking)[0]).replace(MARK, "")


def _first_accepted(written: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """The prompt of the messages as they are, or else in the first order that the template accepts. Raises the ApiError
    for the messages as they are where it accepts none."""
    try:
        return written(messages)
    except ApiError as error:
        if error.code == "context_length_exceeded":
            raise
        refused, tried = error, messages
    for change in (_with_one_system_message, _with_joined_turns, _with_joined_results, _with_user_first):
        changed = change(tried)
        if changed == tried:
            continue
        tried = changed
        try:
            return written(tried)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                raise
    raise refused


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one at the beginning: many templates take no other."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else others


def _with_joined_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive messages of the user, or of the assistant, as one: many templates want the two to alternate."""
    return _joined(messages, lambda before, role: before == role and role in ("user", "assistant"))


def _with_joined_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the user's text behind the results of tools to the last result: templates that want turns to
    alternate do not count results."""
    return _joined(messages, lambda before, role: before == "tool" and role == "user")


def _with_user_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat that the assistant begins, with an empty turn of the user before it."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), None)
    if first is None or messages[first]["role"] != "assistant":
        return messages
    return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]


def _joined(messages: list[dict[str, Any]], joins: Callable[[str, str], bool]) -> list[dict[str, Any]]:
    """joins: whether a message of the second role becomes a part of one of the first before it."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if made and joins(made[-1]["role"], message["role"]):
            both = made[-1], message
            made[-1] = dict(made[-1])
            for name in ("content", "reasoning_content"):
                if texts := [one[name] for one in both if one.get(name)]:
                    made[-1][name] = _one_content(texts)
            if calls := [call for one in both for call in one.get("tool_calls", ())]:
                made[-1]["tool_calls"] = calls
        else:
            made.append(message)
    return made


def _one_content(contents: list[Any]) -> Any:
    """Contents as one: a text, or a list of parts where one is such a list."""
    if all(isinstance(one, str) for one in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for one in contents:
        parts += [*(as_parts("\n\n") if parts else ()), *(as_parts(one) if isinstance(one, str) else one)]
    return parts


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
    """The template's variables other than messages and tools."""
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
    given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
    return {**variables, **given}


def _check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise bad(param, f"{param} holds token id {wrong}: this model's tokens are 0 to {vocab_size - 1}")


def template_messages(messages: Sequence[Message], knows_developer: bool = False) -> list[dict[str, Any]]:
    """Messages in one shape, which MessageShape turns into the template's: text content, which may be empty, and
    arguments of calls as objects."""
    rendered = []
    for message in with_tool_calls(messages):
        # Most templates know "system"; OpenAI renamed it.
        role = "system" if message.role == "developer" and not knows_developer else message.role
        entry: dict[str, Any] = {"role": role, "content": message.parts() if message.has_images else message.text()}
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
