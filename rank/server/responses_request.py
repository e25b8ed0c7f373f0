"""OpenAI's responses: the request, and the chat that it means.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec

from . import hosted_tools, unsupported
from .api_error import ApiError, bad
from .conversation import (
    EXPECTED,
    PARTS,
    Call,
    CustomInput,
    Function,
    ImageUrl,
    Message,
    NamedImage,
    Part,
    with_tool_calls,
)  # fmt: skip
from .custom_tools import check_custom, is_custom, nested
from .decoding import explain, show
from .fields import Count, Positive, TopLogprobs, doc
from .hosted_tools import FlatTools, as_history, brought_tools, flat_name, flat_tools, is_hosted
from .mcp.request_tools import McpTool, mcp_tool
from .mcp.tool_servers import full_name
from .schema import ChatRequest, ReasoningOptions, Sampled

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
    "web_search_call": "ws",
    "local_shell_call": "lsh",
    "compaction": "cmp",
}
LOGPROBS = "message.output_text.logprobs"
# Values of `include`. All but LOGPROBS are parts of items that no answer here has: clients send them always.
INCLUDES = (
    LOGPROBS, "reasoning.encrypted_content", "web_search_call.results", "web_search_call.action.sources",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip


class InputItem(msgspec.Struct):
    """A message, a call with its output, the reasoning before them, or a person's word on a tool server's call."""

    type: str = "message"
    role: str | None = None
    content: str | list[str | Part] | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None  # of the called tool
    arguments: str | dict[str, Any] = ""
    input: str = ""  # of a custom tool's call
    output: str | list[str | Part] | None = None
    id: str | None = None
    server_label: str = ""
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None
    approve: bool = False
    where: str = "input"  # where it is in the request, for errors; no client's

    def check(self, at: str) -> None:
        """`at` is where it is, for the error's words."""
        if self.type not in ITEMS:
            known = ", ".join((*ITEMS, *hosted_tools.ITEMS))
            raise bad(f"{at}.type", f"{at}.type is {show(self.type)}: expected one of {known}")
        if self.type == "mcp_approval_response" and not self.approval_request_id:
            raise bad(f"{at}.approval_request_id", f"{at}.approval_request_id is missing: it tells which call is meant")
        if self.type == "message":
            Message(self.role or "", self.content).check(at)
        for i, part in enumerate(self.output if isinstance(self.output, list) else ()):
            if isinstance(part, Part) and part.type not in PARTS and not part.is_image:
                here = f"{at}.output[{i}]"
                raise bad(here, f"{here}.type is {show(part.type)}: {EXPECTED}")
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
        """The value as the response shows it."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def response_format(self) -> dict[str, Any]:
        """The value as chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema, "strict": self.strict}}


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None

    def shown(self) -> dict[str, Any]:
        """The value as the response shows it."""
        verbosity = {"verbosity": self.verbosity} if self.verbosity is not None else {}
        return {"format": (self.format or TextFormat()).shown(), **verbosity}


class NamedTool(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """A tool choice of OpenAI's kinds: function, custom, mcp and allowed_tools."""

    type: str | None = None
    mode: str | None = None
    name: str | None = None
    server_label: str | None = None
    tools: list[NamedTool] | None = None


class ConversationId(msgspec.Struct):
    id: str


class ResponsesRequest(Sampled, kw_only=True):
    """POST /v1/responses."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.RESPONSES

    input: Annotated[str | list[dict[str, Any]], doc(
        "a text of the user, or items: messages, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, reasoning, those of tool servers; calls of OpenAI's own tools are read as calls of "
        "functions"
    )] = []  # fmt: skip
    instructions: Annotated[str | None, doc("the system message")] = None
    previous_response_id: Annotated[str | None, doc("go on from a response that is kept (`--response-store`)")] = None
    conversation: Annotated[str | ConversationId | None, doc(
        "the id of a conversation that the response goes on in, or an object with it"
    )] = None  # fmt: skip
    background: Annotated[bool | None, doc(
        "answer at once; the response is made meanwhile and asked for by its id"
    )] = None  # fmt: skip
    max_output_tokens: Annotated[Positive | None, doc("longest answer, its reasoning included")] = None
    tools: Annotated[list[dict[str, Any]] | None, doc(
        "of type `function`, which the client runs (`strict` holds their arguments to it), `custom`, whose input is a "
        "text (`format`: `text`, or `grammar` with `syntax` and `definition`), and `mcp`: the tool server of "
        "`--mcp-config` with this `server_label`, whose calls are made here (`allowed_tools`, `require_approval`). "
        "Tools of a `namespace` are shown to the model as `<namespace>__<name>`; those that OpenAI's servers run "
        "(`web_search`, `local_shell`, …) are left out"
    )] = None  # fmt: skip
    tool_choice: Annotated[str | ToolChoice | None, doc(
        "`auto`, `none`, `required`, the name of a function or a custom tool, a tool server (`mcp`) or one of its "
        "tools, or `allowed_tools`"
    )] = None  # fmt: skip
    parallel_tool_calls: Annotated[bool | None, doc("false keeps the first call only")] = None
    max_tool_calls: Annotated[Count | None, doc("how many calls of tool servers are made; at most 64")] = None
    reasoning: Annotated[ReasoningOptions | None, doc(
        "`effort` is handed to the template, as `reasoning_effort`; `summary` is ignored"
    )] = None  # fmt: skip
    text: Annotated[TextOptions | None, doc(
        "`format` of type `text`, `json_object` or `json_schema`, which the answer keeps to; `verbosity`, handed to "
        "the template"
    )] = None  # fmt: skip
    include: Annotated[list[str] | None, doc(
        "`message.output_text.logprobs`, log probabilities of the text; the other names that OpenAI has are of items "
        "that no answer here has"
    )] = None  # fmt: skip
    top_logprobs: Annotated[TopLogprobs | None, doc(
        "how many likely tokens beside each token of the text; `include` may ask for log probabilities without them"
    )] = None  # fmt: skip
    truncation: Annotated[str | None, doc("only `disabled`")] = None
    user: Annotated[str | None, doc("comes back in the response")] = None
    metadata: Annotated[dict[str, Any] | None, doc("comes back in the response")] = None
    store: Annotated[bool | None, doc("false keeps the response out of the store")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc(
        "variables for the template; switches are true or false, not texts"
    )] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.conversation is not None and self.previous_response_id is not None:
            raise bad("conversation", "conversation and previous_response_id exclude each other: give one of them")
        before = self.previous_response_id is not None or self.conversation is not None
        if not self.input and not before and not self.instructions:
            raise bad("input", f"input is {show(self.input)}: give a text, or at least one item")
        check_items(self.input if isinstance(self.input, list) else [], "input")
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") == "mcp":
                mcp_tool(tool, f"tools[{i}]")
            elif tool.get("type") != "namespace" and not is_hosted(tool):
                _tool(tool, f"tools[{i}]")
        if self.reasoning is not None and self.reasoning.exclude:
            raise bad("reasoning", "reasoning.exclude is true: the reasoning is an item of its own, pass over it")
        self._check_tool_choice()
        form = self.text.format if self.text else None
        if form is not None and form.type == "json_schema" and form.schema is None:
            raise bad("text.format.schema", "text.format.schema is missing: type json_schema needs it")
        for name in self.include or ():
            if name not in INCLUDES:
                raise bad("include", f"include names {show(name)}: it is not supported, leave it out")
        if self.truncation not in (None, "disabled"):
            raise bad("truncation", f"truncation is {show(self.truncation)}: {unsupported.PROMPT_LENGTH}")
        unknown = [{"type": "function", "function": {"name": one.server_label or "-"}} for one in self.mcp_tools()]
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
            listed = [{"role": "user", "content": listed}] if listed else []
        return whole_items(listed)

    def conversation_id(self) -> str | None:
        """The conversation that the response is a part of."""
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    def shows_logprobs(self) -> bool:
        """Whether the answer has the log probabilities of its text."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def limit(self) -> int | None:
        """The answer's max_tokens, where the request limits them."""
        return self.max_output_tokens

    def sequences(self) -> int:
        return 1

    def flat_tools(self, items: list[dict[str, Any]]) -> FlatTools:
        """The tools that the model may be shown: the request's, and those that these items bring."""
        tools = self.tools or []
        return flat_tools([*tools, *(one for one in brought_tools(items) if one not in tools)])

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
        before = len(items) - len(self.items())
        found = [
            msgspec.structs.replace(_item(one, "input"), where="input" if i < before else f"input[{i - before}]")
            for i, item in enumerate(items)
            for one in as_history(item)
        ]
        _check_outputs(found)
        messages += _messages(found)
        form = self.text.format if self.text else None
        flat = self.flat_tools(items)
        tools = [_tool(tool, "tools") for tool in flat.tools if tool.get("type") != "mcp"]
        request = ChatRequest(
            messages=messages or [Message("user", "")],
            max_tokens=self.max_output_tokens,
            tools=[*tools, *(more or ())] or None,
            tool_choice=_tool_choice(self.tool_choice, more or [], flat),
            logprobs=self.shows_logprobs(),
            top_logprobs=self.top_logprobs if self.shows_logprobs() else None,
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


def _tool_choice(
    choice: str | ToolChoice | None, more: list[dict[str, Any]], flat: FlatTools
) -> str | dict[str, Any] | None:
    """The tool choice as chats have it. more: tools of the servers that it leaves."""
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
        return _named(choice.type, flat.chosen(choice.name))
    own = [tool for tool in choice.tools or () if tool.type != "mcp"]
    tools = [_named(tool.type, flat.chosen(tool.name, tool.namespace)) for tool in own]
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


def check_items(items: list[dict[str, Any]], name: str) -> None:
    """`name` is the field that has them. Raises ApiError 400."""
    for i, item in enumerate(items):
        for one in as_history(item):
            _item(one, f"{name}[{i}]").check(f"{name}[{i}]")


def whole_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as they are listed: each with an id, messages with their content in parts."""
    found = []
    for item in items:
        if item.get("type", "message") == "message":
            content = item.get("content")
            if isinstance(content, str):
                kind = "output_text" if item.get("role") == "assistant" else "input_text"
                content = [_text_part(kind, content)]
            item = {"type": "message", "status": "completed", **item, "content": content}
        found.append(item if item.get("id") else {**item, "id": f"{_prefix(item)}_{uuid.uuid4().hex[:24]}"})
    return found


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def items_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages of a chat as items with ids."""
    items: list[dict[str, Any]] = []
    for message in with_tool_calls(messages):
        text, named = message.text(), {"name": message.name} if message.name else {}
        if message.role == "tool":
            output = {"type": "function_call_output", "call_id": message.tool_call_id, "output": text}
            items.append({**output, "status": "completed", **named})
            continue
        thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if thoughts:
            items.append({"type": "reasoning", "summary": [], "content": [_text_part("reasoning_text", thoughts)]})
        if text or not (thoughts or message.tool_calls):
            items.append({"role": message.role, "content": text, **named})
        items += map(_call_item, message.tool_calls or ())
    return whole_items(items)


def _call_item(call: Call) -> dict[str, Any]:
    about = {"call_id": call.id, "status": "completed"}
    if call.custom is not msgspec.UNSET:
        return {"type": "custom_tool_call", "name": call.custom.name, "input": call.custom.input, **about}
    called = call.called()
    arguments = called.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {"type": "function_call", "name": called.name, "arguments": arguments, **about}


def messages_of(items: list[dict[str, Any]]) -> list[Message]:
    """Items as the messages of a chat. Raises ApiError 400 for what is none."""
    return _messages([_item(one, "input") for item in items for one in as_history(item)])


def _words(content: str | list[str | Part] | None) -> str:
    if isinstance(content, list):
        return "\n".join(
            part if isinstance(part, str) else part.words()
            for part in content
            if isinstance(part, str) or not part.is_image
        )
    return content or ""


def _with_images(content: str | list[str | Part] | None, at: str) -> list[str | Part]:
    """A content's parts, whose images know where they are in the request; empty where it has no image."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, Part) and part.is_image for part in parts):
        return []
    return [
        part
        if isinstance(part, str) or not part.is_image
        else NamedImage.of(
            f"{at}[{j}]",
            "image_url",
            part.type,
            part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url,
            part.detail,
        )
        for j, part in enumerate(parts)
    ]


def _messages(items: list[InputItem]) -> list[Message]:
    """Items as chats have them: thoughts, text and calls of one turn are one message."""
    messages: list[Message] = []
    open_turn = False  # the last message is an assistant's, which may get more
    for item in _calls_of_servers(items):
        assistant = item.type in ("function_call", "custom_tool_call", "reasoning") or item.role == "assistant"
        if not assistant:
            role = "tool" if item.type in ("function_call_output", "custom_tool_call_output") else item.role or "user"
            field = "output" if role == "tool" else "content"
            content = item.output if role == "tool" else item.content
            shown = _with_images(content, f"{item.where}.{field}")
            said = shown if shown and role != "tool" else _words(content)
            messages.append(Message(role, said, name=item.name or None, tool_call_id=item.call_id))
            if shown and role == "tool":  # templates take images in messages of the user
                messages.append(Message("user", [part for part in shown if isinstance(part, NamedImage)]))
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
    name = flat_name(item.namespace, item.name)
    if item.type == "function_call":
        message.tool_calls = [*(message.tool_calls or ()), Call(Function(name, item.arguments), item.call_id)]
    elif item.type == "custom_tool_call":
        custom = Call(id=item.call_id, type="custom", custom=CustomInput(name, item.input))
        message.tool_calls = [*(message.tool_calls or ()), custom]
    elif item.type == "reasoning":
        message.reasoning_content = "\n".join(filter(None, (message.reasoning_content, _words(item.content)))) or None
    else:
        message.content = "\n".join(filter(None, (message.content, _words(item.content))))  # type: ignore[arg-type]
