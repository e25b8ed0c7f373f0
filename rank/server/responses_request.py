"""OpenAI's responses: the request, and the chat that it means.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from . import unsupported
from .api_error import ApiError, bad
from .conversation import PARTS, Call, CustomInput, Function, Message, Part
from .custom_tools import check_custom, is_custom, nested
from .decoding import explain, show
from .mcp.request_tools import McpTool, mcp_tool
from .mcp.tool_servers import full_name
from .schema import ChatRequest, ReasoningOptions, Sampled

# What `include` may name although nothing here has it: clients always send it.
ITEMS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
    "mcp_list_tools", "mcp_call",
    "mcp_approval_request", "mcp_approval_response",
)  # fmt: skip
PREFIXES = {  # of items' ids
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
INCLUDES = ("reasoning.encrypted_content",)


class InputItem(msgspec.Struct):
    """A message, a call with its output, the reasoning before them, or a person's word on a tool server's call."""

    type: str = "message"
    role: str | None = None
    content: str | list[str | Part] | None = None
    call_id: str | None = None
    name: str = ""
    arguments: str = ""
    input: str = ""  # of a custom tool's call
    output: str | list[str | Part] | None = None
    id: str | None = None
    server_label: str = ""
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None
    approve: bool = False

    def check(self, at: str) -> None:
        """`at` is where it is, for the error's words."""
        if self.type not in ITEMS:
            raise bad(f"{at}.type", f"{at}.type is {show(self.type)}: expected one of {', '.join(ITEMS)}")
        if self.type == "mcp_approval_response" and not self.approval_request_id:
            raise bad(f"{at}.approval_request_id", f"{at}.approval_request_id is missing: it tells which call is meant")
        if self.type == "message":
            Message(self.role or "", self.content).check(at)
        for i, part in enumerate(self.output if isinstance(self.output, list) else ()):
            if isinstance(part, Part) and part.type not in PARTS:
                here = f"{at}.output[{i}]"
                raise bad(here, f"{here}.type is {show(part.type)}: this model takes text only")
        if self.type.removesuffix("_output") in ("function_call", "custom_tool_call") and not self.call_id:
            raise bad(f"{at}.call_id", f"{at}.call_id is missing: it tells which call is meant")


class FunctionTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def shown(self) -> dict[str, Any]:
        """As the response shows it."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def response_format(self) -> dict[str, Any]:
        """As chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema}}


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None

    def shown(self) -> dict[str, Any]:
        """As the response shows it."""
        verbosity = {"verbosity": self.verbosity} if self.verbosity is not None else {}
        return {"format": (self.format or TextFormat()).shown(), **verbosity}


class NamedTool(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    name: str | None = None
    server_label: str | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """Of the kinds that OpenAI has: function, custom, mcp and allowed_tools."""

    type: str | None = None
    mode: str | None = None
    name: str | None = None
    server_label: str | None = None
    tools: list[NamedTool] | None = None


class ResponsesRequest(Sampled, kw_only=True):
    """POST /v1/responses."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.RESPONSES

    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if not self.input and self.previous_response_id is None and not self.instructions:
            raise bad("input", f"input is {show(self.input)}: give a text, or at least one item")
        for i, item in enumerate(self.input if isinstance(self.input, list) else ()):
            _item(item, f"input[{i}]").check(f"input[{i}]")
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") == "mcp":
                mcp_tool(tool, f"tools[{i}]")
            else:
                _tool(tool, f"tools[{i}]")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise bad("max_tool_calls", f"max_tool_calls is {self.max_tool_calls}: it must be at least 0")
        self._check_tool_choice()
        form = self.text.format if self.text else None
        if form is not None and form.type == "json_schema" and form.schema is None:
            raise bad("text.format.schema", "text.format.schema is missing: type json_schema needs it")
        for name in self.include or ():
            if name not in INCLUDES:
                raise bad("include", f"include names {show(name)}: it is not supported, leave it out")
        if self.truncation not in (None, "disabled"):
            raise bad("truncation", f"truncation is {show(self.truncation)}: {unsupported.PROMPT_LENGTH}")
        unknown = [{"type": "function", "function": {"name": one.server_label}} for one in self.mcp_tools()]
        try:
            self.chat([], unknown).check()  # with something for the tools of servers, which are known later
        except ApiError as error:
            raise renamed(error) from None

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return
        if (choice.type in ("function", "custom") and choice.name) or (choice.type == "mcp" and choice.server_label):
            return
        if choice.type == "allowed_tools" and choice.mode in ("auto", "required"):
            return
        kinds = "function or custom (with a name), mcp (with a server_label) or allowed_tools (with a mode)"
        expected = f"auto, none, required, or an object of type {kinds}"
        raise bad("tool_choice", f"tool_choice is {show(choice)}: expected {expected}")

    def items(self) -> list[dict[str, Any]]:
        """The input as items with ids."""
        listed = self.input
        if isinstance(listed, str):
            part = {"type": "input_text", "text": listed}
            listed = [{"type": "message", "role": "user", "content": [part], "status": "completed"}] if listed else []
        return [one if one.get("id") else {**one, "id": f"{_prefix(one)}_{uuid.uuid4().hex[:24]}"} for one in listed]

    def mcp_tools(self) -> list[McpTool]:
        """The tool servers that are named, less those that tool_choice leaves out."""
        entries = [mcp_tool(tool, "tools") for tool in self.tools or () if tool.get("type") == "mcp"]
        if not isinstance(self.tool_choice, ToolChoice):
            return entries
        choice = self.tool_choice
        allowed = {tool.server_label for tool in choice.tools or () if tool.type == "mcp"}
        if choice.type == "mcp":
            allowed = {choice.server_label}
        return [entry for entry in entries if entry.server_label in allowed]

    def chat(self, items: list[dict[str, Any]], more: list[dict[str, Any]] | None = None) -> ChatRequest:
        """The chat that is meant by these items: those of earlier responses and the input. `more`: tools of servers."""
        messages = [Message("system", self.instructions)] if self.instructions else []
        found = [_item(item, "input") for item in items]
        _check_outputs(found)
        messages += _messages(found)
        form = self.text.format if self.text else None
        tools = [_tool(tool, "tools") for tool in self.tools or () if tool.get("type") != "mcp"]
        request = ChatRequest(
            messages=messages or [Message("user", "")],
            max_tokens=self.max_output_tokens,
            tools=[*tools, *(more or ())] or None,
            tool_choice=_tool_choice(self.tool_choice, more or []),
            response_format=form.response_format() if form else None,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=self.reasoning,
            verbosity=self.text.verbosity if self.text else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        shared = {name: getattr(self, name) for name in Sampled.__struct_fields__}
        return msgspec.structs.replace(request, **shared)


def renamed(error: ApiError) -> ApiError:
    """An error of the chat that is meant, with this API's names of fields."""
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }
    for old, new in names.items():
        if error.param == old or (error.param or "").startswith(f"{old}."):
            error.message = error.message.replace(old, new) if old != "messages" else error.message
            error.param = new + (error.param or "")[len(old) :]
            break
    return error


def _tool_choice(choice: str | ToolChoice | None, more: list[dict[str, Any]]) -> str | dict[str, Any] | None:
    """As chats have it. more: tools of the servers that it leaves."""
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "mcp":
        names = [tool["function"]["name"] for tool in more]
        if choice.name is not None:  # before the servers are asked, a label stands for all tools of one
            label = choice.server_label or ""
            names = [name for name in names if name in (label, full_name(label, choice.name))]
        tools = [_named("function", name) for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    if choice.type != "allowed_tools":
        return _named(choice.type, choice.name)
    tools = [_named(tool.type, tool.name) for tool in choice.tools or () if tool.type != "mcp"]
    tools += [_named("function", tool["function"]["name"]) for tool in more]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _named(kind: str | None, name: str | None) -> dict[str, Any]:
    kind = "custom" if kind == "custom" else "function"
    return {"type": kind, kind: {"name": name}}


def _prefix(item: dict[str, Any]) -> str:
    return PREFIXES.get(item.get("type", ""), "msg")


def _item(item: dict[str, Any], at: str) -> InputItem:
    try:
        return msgspec.convert(item, InputItem)
    except msgspec.ValidationError as error:
        raise explain(str(error), item, at) from None


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A tool as chats have it."""
    if is_custom(tool):
        found = nested(tool)
        check_custom(found, at)
        return found
    try:
        one = msgspec.convert(tool, FunctionTool)
    except msgspec.ValidationError as error:
        raise explain(str(error), tool, at) from None
    if one.type != "function":
        raise bad(at, f'{at}.type is {show(one.type)}: only "function", "custom" and "mcp" are supported, leave it out')
    if not one.name:
        raise bad(f"{at}.name", f"{at}.name is missing")
    function: dict[str, Any] = {
        "name": one.name,
        "description": one.description or "",
        "parameters": one.parameters or {},
    }
    if one.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _check_outputs(items: list[InputItem]) -> None:
    """Refuse the output of a call that is not there, in OpenAI's words, which clients know."""
    calls = {(item.type, item.call_id) for item in items}
    for item in items:
        kind = item.type.removesuffix("_output")
        if kind != item.type and (kind, item.call_id) not in calls:
            call_id = (item.call_id or "")[:100]
            raise bad("input", f"No tool call found for {kind.replace('_', ' ')} output with call_id {call_id}.")


def _words(content: str | list[str | Part] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.words() for part in content)
    return content or ""


def _messages(items: list[InputItem]) -> list[Message]:
    """Items as chats have them: thoughts, text and calls of one turn are one message."""
    messages: list[Message] = []
    open_turn = False  # the last message is an assistant's, which may get more
    for item in _calls_of_servers(items):
        assistant = item.type in ("function_call", "custom_tool_call", "reasoning") or item.role == "assistant"
        if not assistant:
            role = "tool" if item.type in ("function_call_output", "custom_tool_call_output") else item.role or "user"
            text = _words(item.output if role == "tool" else item.content)
            messages.append(Message(role, text, tool_call_id=item.call_id))
        else:
            # Thoughts come first: behind a text or a call they are another turn's.
            if not open_turn or (item.type == "reasoning" and (messages[-1].content or messages[-1].tool_calls)):
                messages.append(Message("assistant"))
            _extend(messages[-1], item)
        open_turn = assistant
    return messages


def _calls_of_servers(items: list[InputItem]) -> Iterator[InputItem]:
    """The items with calls of tool servers as functions' calls and outputs. One that was denied has that as output."""
    asked = {item.id: item for item in items if item.type == "mcp_approval_request"}
    labels = {item.server_label for item in items if item.server_label}
    for item in items:
        output, made = item.output or item.error, item
        if item.type == "mcp_approval_response" and not item.approve and item.approval_request_id in asked:
            output, made = "the user does not allow this call", asked[item.approval_request_id]
        elif item.type in ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"):
            continue
        if made.type in ("mcp_call", "mcp_approval_request"):
            name = full_name(made.server_label, made.name, labels)
            words = output if isinstance(output, str) else _words(output) if isinstance(output, list) else str(output)
            yield InputItem("function_call", call_id=made.id, name=name, arguments=made.arguments)
            yield InputItem("function_call_output", call_id=made.id, output=words)
        else:
            yield item


def _extend(message: Message, item: InputItem) -> None:
    if item.type == "function_call":
        message.tool_calls = [*(message.tool_calls or ()), Call(Function(item.name, item.arguments), item.call_id)]
    elif item.type == "custom_tool_call":
        custom = Call(id=item.call_id, custom=CustomInput(item.name, item.input))
        message.tool_calls = [*(message.tool_calls or ()), custom]
    elif item.type == "reasoning":
        message.reasoning_content = "\n".join(filter(None, (message.reasoning_content, _words(item.content)))) or None
    else:
        message.content = "\n".join(filter(None, (message.content, _words(item.content))))  # type: ignore[arg-type]
