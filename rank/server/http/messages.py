"""Anthropic's messages. A request becomes the chat that it means; the answer has Anthropic's shape."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from .. import unsupported
from ..anthropic_format import MessageRenderer, error_body
from ..api_error import ApiError, bad
from ..conversation import Call as ToolCall
from ..conversation import Function, Message
from ..decoding import Body, show
from ..generation import LoadedModel
from ..prompts import chat_prompt
from ..schema import MAX_STOPS, ChatRequest, check_ranges
from ..session import Session
from .chat import answer
from .routes import Call, Route

TEXT_ONLY = "this model takes text only"
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}  # and OpenAI's word, where there is one


class Block(msgspec.Struct):
    """A piece of a message: text, tool_use, tool_result, thinking or redacted_thinking."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Block] | None = None  # of a tool_result
    is_error: bool | None = None


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]

    def blocks(self) -> list[Block]:
        return [Block("text", self.content)] if isinstance(self.content, str) else self.content


class ClientTool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


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

    messages: list[Turn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None

    def check(self) -> None:
        check_ranges(self)
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
            if tool.type not in (None, "custom") or tool.input_schema is None:
                raise bad(
                    f"tools[{i}]",
                    f"tools[{i}] is {show(tool.type or tool.name)}: only tools with an input_schema, which the client "
                    "runs, are supported",
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

    def form(self) -> dict[str, Any] | None:
        """What the answer must be. The beta of this API had it in output_format."""
        return (self.output_config.format if self.output_config else None) or self.output_format

    def chat(self) -> ChatRequest:
        """The chat that is meant."""
        messages = _system(self.system)
        for turn in self.messages:
            messages += _messages(turn)
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
        ]
        form = self.form()
        return MeantChat(
            messages=messages,
            model=self.model,
            tools=tools or None,
            tool_choice=CHOICES[choice.get("type", "auto")]
            or {"type": "function", "function": {"name": choice["name"]}},
            response_format={"type": "json_schema", "json_schema": form} if form else None,
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            enable_thinking=None if self.thinking is None else self.thinking.type != "disabled",
            reasoning_effort=self.output_config.effort if self.output_config else None,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
        )


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0:
            raise bad("max_tokens", "max_tokens is 0: it must be at least 1")
        stops = self.stop_sequences or []
        if not all(stops) or len(stops) > MAX_STOPS:
            what = show(stops) if not all(stops) else f"{len(stops)} texts"
            raise bad("stop_sequences", f"stop_sequences is {what}: at most {MAX_STOPS} texts, none of them empty")

    def chat(self) -> ChatRequest:
        return msgspec.structs.replace(
            super().chat(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _check_block(block: Block, role: str, at: str) -> None:
    allowed = {
        "user": ("text", "tool_result"),
        "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
        "system": ("text",),
    }[role]
    if block.type not in allowed:
        why = TEXT_ONLY if role == "user" else f"expected one of {', '.join(allowed)}"
        raise bad(at, f"{at}.type is {show(block.type)}: {why}")
    for i, part in enumerate(block.content if isinstance(block.content, list) else ()):
        if part.type != "text":
            raise bad(f"{at}.content[{i}]", f"{at}.content[{i}].type is {show(part.type)}: {TEXT_ONLY}")


def _text(content: str | list[Block] | None) -> str:
    return content or "" if not isinstance(content, list) else "\n".join(block.text for block in content)


def _system(system: str | list[Block] | None) -> list[Message]:
    return [Message("system", text)] if (text := _text(system)) else []


def _messages(turn: Turn) -> list[Message]:
    """A turn as a chat has it: results of tools are messages of their own."""
    blocks = turn.blocks()
    if turn.role == "assistant":
        calls = [ToolCall(Function(one.name, one.input), one.id) for one in blocks if one.type == "tool_use"]
        texts = [one.text for one in blocks if one.type == "text"]
        thoughts = "\n".join(one.thinking for one in blocks if one.type == "thinking")
        text = "\n".join(texts) if texts else None
        return [Message("assistant", text, tool_calls=calls or None, reasoning_content=thoughts or None)]
    messages: list[Message] = []
    for block in blocks:
        if block.type == "tool_result":
            text = ("Error: " if block.is_error else "") + _text(block.content)
            messages.append(Message("tool", text, tool_call_id=block.tool_use_id))
        elif messages and messages[-1].role == turn.role:
            messages[-1].content = f"{messages[-1].content}\n{block.text}"
        else:
            messages.append(Message(turn.role, block.text))
    return messages or [Message(turn.role, "")]


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
    return {"input_tokens": await call.engine.prepare(call.request.chat(), _count)}


def _count(model: LoadedModel, request: ChatRequest) -> int:
    return len(chat_prompt(model.text, request, model.ready, model.thinking).tokens)


ROUTES = [
    Route("/v1/messages", messages, MessagesRequest, MessageRenderer, error=error_body),
    Route("/v1/messages/count_tokens", count_tokens, CountRequest, error=error_body),
]
