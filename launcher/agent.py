"""The library's agent: a model that calls tools until it has an answer."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .llm import LLM
from .llm_types import Message, Output, SamplingParams
from .tool_thread import DENIED, ToolThread

Function = Callable[..., Any]


class AgentCall(msgspec.Struct):
    """One call of a tool."""

    name: str
    arguments: str  # JSON, as the model wrote it
    result: str
    failed: bool = False


class AgentAnswer(msgspec.Struct):
    """The result of a run. `messages` is the whole conversation, to go on from."""

    text: str
    calls: list[AgentCall]
    rounds: int  # how often the model was asked
    messages: list[Message]
    finish_reason: str


class Agent:
    """Answers with the help of tools: Python functions, and those of tool servers (mcp.json).

    A function's name, first docstring line and annotated parameters are what the model sees of it; it returns a
    text, or what msgspec writes as JSON. `allowed_tools` are the names that the model may use, None: all; those of a
    server are `server_tool`. `approve` is asked before each call, with the tool's name and its arguments as JSON. After
    `max_rounds` answers with calls the model is asked once more, without tools. Close it, or use it in a `with`
    statement; the LLM is the caller's to close.
    """

    def __init__(
        self,
        llm: LLM,
        tools: Sequence[Function] = (),
        *,
        mcp_config: str = "",
        instructions: str = "",
        allowed_tools: Sequence[str] | None = None,
        max_rounds: int = 16,
        approve: Callable[[str, str], bool] | None = None,
    ):
        self._llm = llm
        self._functions = {tool.__name__: _Checked(tool) for tool in tools}
        self._instructions = instructions
        self._max_rounds = max_rounds
        self._approve = approve
        self._servers = ToolThread(mcp_config) if mcp_config else None
        known = {_name(tool) for tool in self._all()}
        if allowed_tools is not None and (wrong := set(allowed_tools) - known):
            self.close()
            raise ValueError(f"allowed_tools names {min(wrong)!r}: the tools are {', '.join(sorted(known))}")
        self._allowed = None if allowed_tools is None else set(allowed_tools)

    def tools(self) -> list[dict[str, Any]]:
        """The tools that the model is offered now, as chats have them."""
        return [tool for tool in self._all() if self._allowed is None or _name(tool) in self._allowed]

    def _all(self) -> list[dict[str, Any]]:
        own = [function.described for function in self._functions.values()]
        return own + (self._servers.functions() if self._servers is not None else [])

    def run(
        self, messages: str | Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AgentAnswer:
        """Answer a question, or the last message of a conversation. `fields` are more fields of a chat request."""
        said: list[Message] = [{"role": "system", "content": self._instructions}] if self._instructions else []
        said += [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        calls: list[AgentCall] = []
        for rounds in range(1, self._max_rounds + 2):
            tools = self.tools() if rounds <= self._max_rounds else []
            (output,) = self._llm.chat(said, sampling_params, tools=tools, **fields)
            said.append(_message(output))
            wanted = output.outputs[0].tool_calls if output.finish_reason == "tool_calls" else []
            for one in wanted:
                done = self._call(one["function"]["name"], one["function"]["arguments"])
                calls.append(done)
                said.append({"role": "tool", "tool_call_id": one["id"], "content": done.result})
            if not wanted:
                break
        return AgentAnswer(output.text, calls, rounds, said, output.finish_reason)

    def _call(self, name: str, arguments: str) -> AgentCall:
        if name not in {_name(tool) for tool in self.tools()}:
            return AgentCall(name, arguments, f"there is no tool {name}", failed=True)
        if self._approve is not None and not self._approve(name, arguments):
            return AgentCall(name, arguments, DENIED, failed=True)
        if (function := self._functions.get(name)) is not None:
            return function.call(arguments)
        assert self._servers is not None
        result = self._servers.call(name, arguments)
        return AgentCall(name, arguments, result.text, result.failed)

    def close(self) -> None:
        """End the tool servers that were started."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Checked:
    """A Python function as a tool. Raises TypeError where its parameters have no JSON type."""

    def __init__(self, function: Function):
        self.function = function
        hints = typing.get_type_hints(function)
        fields: list[Any] = []
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"{function.__name__}: the parameter {name} cannot be given by its name")
            kind = hints.get(name, Any)
            fields.append((name, kind) if parameter.default is parameter.empty else (name, kind, parameter.default))
        self._kind = msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)
        (schema,), components = msgspec.json.schema_components([self._kind], ref_template="#/$defs/{name}")
        parameters = components.pop(self._kind.__name__, schema)
        parameters.pop("title", None)
        if components:
            parameters["$defs"] = components
        about = (inspect.getdoc(function) or "").split("\n")[0]
        described = {"name": function.__name__, "description": about, "parameters": parameters}
        self.described = {"type": "function", "function": described}

    def call(self, arguments: str) -> AgentCall:
        """Errors are results too: the model gets them."""
        name = self.function.__name__
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._kind)
            result = self.function(**{field: getattr(given, field) for field in given.__struct_fields__})
            words = result if isinstance(result, str) else msgspec.json.encode(result).decode()
        except Exception as error:
            return AgentCall(name, arguments, f"{name} failed: {error or type(error).__name__}", failed=True)
        return AgentCall(name, arguments, words)


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _message(output: Output) -> Message:
    """An answer as the conversation's next message."""
    one = output.outputs[0]
    message: Message = {"role": "assistant", "content": one.text}
    if one.reasoning:
        message["reasoning_content"] = one.reasoning
    if one.tool_calls:
        message["tool_calls"] = one.tool_calls
    return message
