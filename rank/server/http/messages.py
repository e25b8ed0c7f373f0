"""Anthropic's messages. A request becomes the chat that it means; the answer has Anthropic's shape."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec

from ...sampling_fields import Temperature, TopK, TopP
from .. import unsupported
from ..anthropic_format import MessageRenderer, error_body
from ..api_error import ApiError, bad
from ..conversation import Call as ToolCall
from ..conversation import Function, Message, NamedImage, Part
from ..decoding import Body, show
from ..fields import ModelName, Positive, Priority, Stops, doc
from ..hosted_tools import log_left_out
from ..schema import ChatRequest
from ..session import Session
from .chat import answer
from .routes import Call, Route
from .tokens import count_prompt

BILLING = re.compile(r"\A\s*(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
OWN_TOOL = re.compile(r"[a-z0-9_]+_\d{8}|mcp_toolset")  # types of Anthropic's own tools end with a date
CALLS = ("tool_use", "server_tool_use")
RESULT_TEXTS = {"text": "text", "tool_reference": "tool_name"}  # what a result may have, and where its text is
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}  # and OpenAI's word, where there is one


class ImageSource(msgspec.Struct):
    """An image: base64 with a media_type, or url."""

    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""

    def as_url(self) -> str | None:
        return f"data:{self.media_type};base64,{self.data}" if self.type == "base64" and self.data else self.url or None


class Block(msgspec.Struct):
    """A block of a message: text, image, tool_use, tool_result, thinking, or what came of Anthropic's own tools."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | dict[str, Any] | None = None  # of a result
    source: ImageSource | None = None  # of an image
    is_error: bool | None = None


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        return [Block("text", self.content)] if isinstance(self.content, str) else self.content


class ClientTool(msgspec.Struct):
    """A tool that the client runs, or one of Anthropic's own."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None

    @property
    def offered(self) -> bool:
        """Whether the model sees it. Agents send Anthropic's own tools, for which only its models are made."""
        return self.type in (None, "custom")


class MeantChat(ChatRequest, kw_only=True):
    """Anthropic's clients ask for as many tokens as Anthropic's models have, whatever the prompt leaves."""

    cut_to_context: ClassVar[bool] = True


class Thinking(msgspec.Struct):
    type: str


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(Body, kw_only=True):
    """POST /v1/messages/count_tokens."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.MESSAGES

    messages: Annotated[list[Turn], doc(
        "roles are user and assistant; blocks of type `text`, `image`, `tool_use`, `tool_result`, `thinking`, and "
        "those of Anthropic's own tools. A last message of the assistant is continued"
    )]  # fmt: skip
    model: ModelName | None = None
    system: Annotated[str | list[Block] | None, doc("a text, or blocks of type `text`")] = None
    tools: Annotated[list[ClientTool] | None, doc(
        "tools with an `input_schema`, which the client runs; `strict` holds their arguments to it. Anthropic's own, "
        "such as `web_search_20250305`, are left out"
    )] = None  # fmt: skip
    tool_choice: Annotated[dict[str, Any] | None, doc(
        '`{"type": "auto"}`, `any`, `tool` with a name, or `none`; `disable_parallel_tool_use` keeps the first call '
        'only'
    )] = None  # fmt: skip
    thinking: Annotated[Thinking | None, doc(
        "`enabled`, `adaptive` or `disabled`, the default: the model does not think where its template has a switch, "
        "and what it thinks all the same is left out of the answer. `budget_tokens` is no limit here: `max_tokens` "
        "counts thoughts and answer"
    )] = None  # fmt: skip
    output_config: Annotated[OutputConfig | None, doc(
        "`effort`, handed to the template; `format`, a JSON schema that the answer keeps to"
    )] = None  # fmt: skip
    output_format: Annotated[dict[str, Any] | None, doc("the beta's name for `output_config.format`")] = None

    def check(self) -> None:
        if not self.messages:
            raise bad("messages", "messages is an empty list: give at least one message")
        for i, turn in enumerate(self.messages):
            if turn.role not in ("user", "assistant", "system"):
                raise bad(f"messages[{i}].role", f"messages[{i}].role is {show(turn.role)}: expected user or assistant")
            for j, block in enumerate(turn.blocks()):
                _check_block(block, turn.role, f"messages[{i}].content[{j}]")
        for i, block in enumerate(self.system if isinstance(self.system, list) else ()):
            _check_block(block, "system", f"system[{i}]")
        for i, tool in enumerate(self.tools or ()):
            if tool.type is not None and OWN_TOOL.fullmatch(tool.type):
                log_left_out(f"tools of type {tool.type[:40]}", "nothing here runs them, the model is not told of them")
            elif not tool.offered or tool.input_schema is None or not tool.name:
                raise bad(
                    f"tools[{i}]",
                    f"tools[{i}] is {show(tool.type or tool.name)}: only tools with a name and an input_schema, which "
                    "the client runs, are supported",
                )
        self._check_choices()

    def _check_choices(self) -> None:
        choice = self.tool_choice or {}
        kind = choice.get("type", "auto")
        if not isinstance(kind, str) or kind not in CHOICES:
            raise bad("tool_choice", f"tool_choice.type is {show(kind)}: expected one of {', '.join(CHOICES)}")
        if kind == "tool" and not isinstance(choice.get("name"), str):
            raise bad("tool_choice.name", f"tool_choice.name is {show(choice.get('name'))}: expected a tool's name")
        if kind in ("any", "tool") and not self.tools:
            raise bad("tool_choice", f"tool_choice.type is {show(kind)}: it needs tools that may be called")
        thinking = self.thinking.type if self.thinking else "enabled"
        if thinking not in ("enabled", "adaptive", "disabled"):
            raise bad("thinking.type", f"thinking.type is {show(thinking)}: expected enabled, adaptive or disabled")
        form = self.form()
        if form is not None and form.get("type") != "json_schema":
            at = "output_config.format"
            raise bad(at, f"{at}.type is {show(form.get('type'))}: expected json_schema")
        chat = self.chat()
        chat.check_tools()
        try:
            chat.constraint()
        except ApiError as error:
            raise renamed(error) from None

    @property
    def thinks(self) -> bool:
        """Whether the model is to think: where the request leaves it open, it does not, as Anthropic has it."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def form(self) -> dict[str, Any] | None:
        """The format of the answer. The beta of this API had it in output_format."""
        return (self.output_config.format if self.output_config else None) or self.output_format

    def chat(self) -> ChatRequest:
        """The chat that is meant."""
        messages = _system(self.system)
        for i, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{i}]")
        last = messages[-1]
        choice = self.tool_choice or {}
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                    **({"strict": True} if tool.strict else {}),
                },
            }
            for tool in self.tools or ()
            if tool.offered
        ]
        form = self.form()
        return MeantChat(
            messages=messages,
            model=self.model,
            tools=tools or None,
            tool_choice=CHOICES[choice.get("type", "auto")]
            or {"type": "function", "function": {"name": choice["name"]}},
            # Anthropic has no word for strict: all its schemas are.
            response_format={"type": "json_schema", "json_schema": {**form, "strict": True}} if form else None,
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            enable_thinking=self.thinks,
            reasoning_effort=self.output_config.effort if self.output_config else None,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
        )


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[Positive, doc("longest answer; at most what the context leaves")]
    stop_sequences: Annotated[Stops | None, doc("as `stop`")] = None
    stream: Annotated[bool | None, doc("server-sent events")] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Annotated[dict[str, Any] | None, doc("ignored")] = None
    priority: Priority | None = None

    def limit(self) -> int | None:
        """The answer's max_tokens."""
        return self.max_tokens

    def sequences(self) -> int:
        return 1

    def chat(self) -> ChatRequest:
        return msgspec.structs.replace(
            super().chat(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            priority=self.priority,
        )


def _check_block(block: Block, role: str, at: str) -> None:
    allowed = {
        "user": ("text", "image", "tool_result"),
        "assistant": ("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use"),
        "system": ("text",),
    }[role]
    if role == "assistant" and _is_own_result(block):
        return
    if block.type not in allowed:
        raise bad(at, f"{at}.type is {show(block.type)}: expected one of {', '.join(allowed)}")
    if isinstance(block.content, dict):
        raise bad(f"{at}.content", f"{at}.content is {show(block.content)}: expected a text, or a list of blocks")
    for i, part in enumerate(block.content if isinstance(block.content, list) else ()):
        here, kind = f"{at}.content[{i}]", part.get("type")
        if kind == "image":
            _result_image(part, here)
            continue
        if not isinstance(kind, str) or kind not in RESULT_TEXTS:
            raise bad(here, f"{here}.type is {show(kind)}: expected image or one of {', '.join(RESULT_TEXTS)}")
        if not isinstance(part.get(RESULT_TEXTS[kind], ""), str):
            name = RESULT_TEXTS[kind]
            raise bad(f"{here}.{name}", f"{here}.{name} is {show(part[name])}: expected a text")


def _is_own_result(block: Block) -> bool:
    """Whether it is what one of Anthropic's own tools has given."""
    return block.type.endswith("_tool_result")


def _text(block: Block) -> str:
    """The text of a result."""
    content = block.content
    if _is_own_result(block) and not isinstance(content, str):
        return msgspec.json.encode(_readable(content)).decode()
    if isinstance(content, list):
        texts = (part for part in content if part["type"] in RESULT_TEXTS)
        return "\n".join(part.get(RESULT_TEXTS[part["type"]], "") for part in texts)
    return content if isinstance(content, str) else ""


def _image(source: ImageSource | None, at: str) -> NamedImage:
    field = "source.data" if source is not None and source.type == "base64" else "source.url"
    return NamedImage.of(at, field, "image", source.as_url() if source is not None else None)


def _result_image(part: dict[str, Any], at: str) -> NamedImage:
    """An image in a tool's result. Raises ApiError."""
    try:
        return _image(msgspec.convert(part.get("source") or {}, ImageSource), at)
    except msgspec.ValidationError as error:
        raise bad(f"{at}.source", f"{at}.source is no image: {error}") from None


def _add(messages: list[Message], role: str, said: str | Part) -> None:
    """Add a text or an image to the last message, if it is of the same role, or as one of its own."""
    if not messages or messages[-1].role != role:
        messages.append(Message(role, said if isinstance(said, str) else [said]))
        return
    before = messages[-1].content or ""
    if isinstance(before, str) and isinstance(said, str):
        messages[-1].content = f"{before}\n{said}"
    else:
        messages[-1].content = [*(before if isinstance(before, list) else [before]), said]


def _readable(content: Any) -> Any:
    """A result of one of Anthropic's own tools without what only Anthropic can read."""
    if isinstance(content, list):
        return [_readable(one) for one in content]
    if isinstance(content, dict):
        return {key: _readable(one) for key, one in content.items() if not key.startswith("encrypted_")}
    return content


def _system(system: str | list[Block] | None) -> list[Message]:
    """The system prompt, without the billing lines of Anthropic's clients: they differ from request to request, stand
    first, and so would keep all that follows out of the prefix cache."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n".join(filter(None, (BILLING.sub("", one) for one in texts)))
    return [Message("system", text)] if text else []


def _messages(turn: Turn, at: str) -> list[Message]:
    """A turn as a chat has it: results of tools are messages of their own, and images in them the user's. at: where it
    is, for errors."""
    blocks = turn.blocks()
    messages: list[Message] = []
    if turn.role == "assistant":
        begun: list[Block] = []
        for block in blocks:
            if _is_own_result(block):
                messages += [_answer(begun), Message("tool", _text(block), tool_call_id=block.tool_use_id)]
                begun = []
            else:
                begun.append(block)
        return [*messages, _answer(begun)] if begun or not messages else messages
    shown: list[NamedImage] = []  # by tools: their results follow each other
    for j, block in enumerate(blocks):
        here = f"{at}.content[{j}]"
        if block.type == "tool_result":
            text = ("Error: " if block.is_error else "") + _text(block)
            messages.append(Message("tool", text, tool_call_id=block.tool_use_id))
            parts = block.content if isinstance(block.content, list) else ()
            images = (k for k, part in enumerate(parts) if part["type"] == "image")
            shown += [_result_image(parts[k], f"{here}.content[{k}]") for k in images]
            continue
        for image in shown:
            _add(messages, turn.role, image)
        shown = []
        _add(messages, turn.role, _image(block.source, here) if block.type == "image" else block.text)
    for image in shown:
        _add(messages, turn.role, image)
    return messages or [Message(turn.role, "")]


def _answer(blocks: list[Block]) -> Message:
    """The assistant's texts and calls, up to a result that came within its turn."""
    calls = [ToolCall(Function(one.name, one.input), one.id) for one in blocks if one.type in CALLS]
    texts = [one.text for one in blocks if one.type == "text"]
    thoughts = "\n".join(one.thinking for one in blocks if one.type == "thinking")
    text = "\n".join(texts) if texts else None
    return Message("assistant", text, tool_calls=calls or None, reasoning_content=thoughts or None)


async def messages(call: Call) -> Session:
    """Anthropic's messages: the answer to a conversation, whole or as server-sent events."""
    try:
        return await answer(call, call.request.chat())
    except ApiError as error:
        raise renamed(error) from None


def renamed(error: ApiError) -> ApiError:
    """An error of the chat that is meant, with this API's names of fields."""
    for old in ("response_format.json_schema", "response_format"):
        if (error.param or "").startswith(old):
            error.message = error.message.replace(old, "output_config.format")
            error.param = "output_config.format" + (error.param or "")[len(old) :]
            break
    return error


async def count_tokens(call: Call) -> dict[str, int]:
    """How many tokens the prompt of such a request has."""
    return {"input_tokens": await call.engine.prepare(call.request.chat(), count_prompt, call.owner)}


ROUTES = [
    Route("/v1/messages", messages, MessagesRequest, MessageRenderer, batchable=True, error=error_body),
    Route("/v1/messages/count_tokens", count_tokens, CountRequest, error=error_body),
]
