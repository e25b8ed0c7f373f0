"""The requests that clients send: their fields, and what is refused before any work is done.

Unknown fields are ignored, as other servers do, but those that would change the answer are refused (unsupported.py). A
known one with a wrong value is an error that names the field, the value and what is allowed.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from . import unsupported
from .api_error import ApiError, bad

TOKEN_ID = re.compile(r"[0-9]{1,10}")  # int() refuses to read thousands of digits
MAX_CHOICES = 128
MAX_SEQUENCES = 4096
MAX_STOPS = 64
MAX_BIASES = 1 << 16
MAX_LOGPROBS = 20
POOLINGS = ("mean", "last")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Field: lowest and highest value. None is "not given" everywhere.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "n": (1, MAX_CHOICES),
    "min_tokens": (0, 1 << 31),
    "max_tokens": (1, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "priority": (-(1 << 31), 1 << 31),
    "top_logprobs": (0, MAX_LOGPROBS),
    "dimensions": (1, 1 << 31),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class Call(msgspec.Struct):
    function: Function
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[str | Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str
    function: ToolFunction


class Common(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    stop: str | list[str] | dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None

    def stops(self) -> list[str]:
        """The stop strings; {"Single": …} and {"Multi": […]} are how candle-vLLM's examples write them."""
        stop = self.stop
        if isinstance(stop, dict):
            stop = stop.get("Single", stop.get("Multi", ""))
        if stop is None:
            stop = []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise bad("stop", f"stop is {show(self.stop)}: expected a text, or a list of texts, none of them empty")
        if len(stop) > MAX_STOPS:
            raise bad("stop", f"stop has {len(stop)} texts, at most {MAX_STOPS} are allowed")
        return stop


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: str | list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids."""
        return _texts_or_tokens("prompt", self.prompt)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None  # float or base64
    embedding_type: str | None = None  # mean or last
    normalize: bool | None = None  # to length 1, unless false
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each input as text or token ids."""
        return _texts_or_tokens("input", self.input)


Kind = TypeVar("Kind", ChatRequest, CompletionRequest, EmbeddingRequest)
UNSUPPORTED: dict[type, dict[str, unsupported.Field]] = {
    ChatRequest: unsupported.CHAT,
    CompletionRequest: unsupported.COMPLETION,
    EmbeddingRequest: unsupported.EMBEDDING,
}


def _texts_or_tokens(name: str, value: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad(name, f"{name} is an empty list: give a text, token ids, or a list of either")
    if all(isinstance(item, int) for item in value):
        return [value]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in value):
        raise bad(name, f"{name} mixes token ids with texts or lists: give one kind only")
    return value  # type: ignore[return-value]


def show(value: Any) -> str:
    """A value as JSON, cut to a line."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decode(body: bytes, kind: type[Kind]) -> Kind:
    """A request's body. Raises ApiError 400."""
    if not body.strip():
        raise ApiError(400, "the request has no body: send a JSON object")
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the request's body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request's body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the request's body is {show(raw)}: expected a JSON object")
    return convert(raw, kind)


def convert(raw: dict[str, Any], kind: type[Kind]) -> Kind:
    """A request from its JSON object; the ranges of all fields are checked."""
    if (found := unsupported.first(raw, UNSUPPORTED[kind])) is not None:
        name, why = found
        raise bad(name, f"{name} is {show(raw[name])}: {why}")
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw) from None
    check(request)
    return request


def _explain(message: str, raw: Any, root: str = "") -> ApiError:
    """msgspec's message with the field and its value put first."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", message)
    if missing:
        param = ".".join(filter(None, [root, missing[2], missing[1]]))
        return bad(param, f"{param} is missing")
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    value = raw
    for key in re.findall(r"\w+|\.\.\.", path):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            break  # `...` stands for some key of a mapping
    param = ".".join(filter(None, [root, path])) or "body"
    return bad(param, f"{param} is {show(value)}: {what[:1].lower()}{what[1:]}")


def check(request: ChatRequest | CompletionRequest | EmbeddingRequest) -> None:
    """Everything that can be judged without the model. Raises ApiError 400."""
    for name, (low, high) in RANGES.items():
        value = getattr(request, name, None)
        if value is not None and not low <= value <= high:  # NaN fails too
            raise bad(name, f"{name} is {show(value)}: it must be between {low} and {high}")
    if isinstance(request, EmbeddingRequest):
        return _check_embedding(request)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad("best_of", f"best_of is {show(request.best_of)} with n {n}: only best_of equal to n is supported")
    if request.use_beam_search:
        raise bad("use_beam_search", "use_beam_search is true: beam search is not supported, leave it out")
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise bad("response_format", f'response_format.type is {show(kind)}: only "text" is supported so far')
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens or limit
    if request.min_tokens and limit and request.min_tokens > limit:
        raise bad("min_tokens", f"min_tokens is {request.min_tokens}, more than max_tokens {limit}")
    if (count := len(request.logit_bias or ())) > MAX_BIASES:
        raise bad("logit_bias", f"logit_bias names {count} tokens: at most {MAX_BIASES} are allowed")
    for key, value in (request.logit_bias or {}).items():
        if not TOKEN_ID.fullmatch(key) or not -100 <= value <= 100:
            raise bad(
                "logit_bias", f"logit_bias is {show({key: value})}: expected token ids with values between -100 and 100"
            )
    if any(token < 0 for token in request.stop_token_ids or ()):
        raise bad("stop_token_ids", f"stop_token_ids is {show(request.stop_token_ids)}: token ids are not negative")
    request.stops()
    if isinstance(request, ChatRequest):
        _check_chat(request)
    else:
        _check_completion(request)


def _check_embedding(request: EmbeddingRequest) -> None:
    count = len(request.prompts())
    if count > MAX_SEQUENCES:
        raise bad("input", f"input has {count} texts: at most {MAX_SEQUENCES} are allowed in a request")
    for name, allowed in (("encoding_format", ("float", "base64")), ("embedding_type", POOLINGS)):
        value = getattr(request, name)
        if value is not None and value not in allowed:
            raise bad(name, f"{name} is {show(value)}: expected {' or '.join(allowed)}")


def _check_completion(request: CompletionRequest) -> None:
    count = len(request.prompts())
    if count * (request.n or 1) > MAX_SEQUENCES:
        raise bad(
            "prompt",
            f"{count} prompts with n {request.n or 1} are {count * (request.n or 1)} sequences: "
            f"at most {MAX_SEQUENCES} are allowed in a request",
        )
    if request.suffix:
        raise bad("suffix", "suffix is not supported: it needs a model trained to fill in the middle")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise bad("logprobs", f"logprobs is {show(request.logprobs)}: it must be between 0 and {MAX_LOGPROBS}")
    if request.echo and request.logprobs is not None:
        raise bad("logprobs", "logprobs with echo: log probabilities of the prompt are not supported")


def _check_chat(request: ChatRequest) -> None:
    if request.echo:
        raise bad("echo", "echo is for /v1/completions; a chat returns only the answer")
    if request.chat_template is not None:
        raise bad("chat_template", "chat_template in a request is not supported: the server's option sets it")
    if request.top_logprobs and not request.logprobs:
        raise bad("top_logprobs", f'top_logprobs is {request.top_logprobs}, which needs "logprobs": true')
    if request.continue_final_message and request.add_generation_prompt:
        raise bad("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    if isinstance(request.thinking, dict) and request.thinking.get("budget_tokens") is not None:
        raise bad(
            "thinking.budget_tokens",
            f"thinking.budget_tokens is {show(request.thinking['budget_tokens'])}: {unsupported.THINKING}",
        )
    _check_messages(request)
    for i, tool in enumerate(request.tools or ()):
        try:
            checked = msgspec.convert(tool, Tool)
        except msgspec.ValidationError as error:
            raise _explain(str(error), tool, f"tools[{i}]") from None
        if checked.type != "function":
            raise bad("tools", f'tools[{i}].type is {show(checked.type)}: only "function" is supported')
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        hint = "required" if choice == "required" else show(choice)
        raise bad("tool_choice", f'tool_choice is {hint}: a call cannot be enforced yet, use "auto" or "none"')


def _check_messages(request: ChatRequest) -> None:
    if isinstance(request.messages, str):
        request.messages = [Message("user", request.messages)]
    if not request.messages:
        raise bad("messages", "messages is an empty list: give at least one message")
    for i, message in enumerate(request.messages):
        at = f"messages[{i}]"
        if message.role not in ROLES:
            raise bad(f"{at}.role", f"{at}.role is {show(message.role)}: expected one of {', '.join(ROLES)}")
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, Part) and part.type not in ("text", "input_text", "output_text"):
                    raise bad(
                        f"{at}.content[{j}]", f"{at}.content[{j}].type is {show(part.type)}: this model takes text only"
                    )
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise bad(
            "continue_final_message",
            f"continue_final_message needs a last message of the assistant, it is of {show(request.messages[-1].role)}",
        )
