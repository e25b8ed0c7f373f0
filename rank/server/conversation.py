"""The messages and tools of a chat, as OpenAI writes them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .api_error import bad
from .decoding import show

PARTS = ("text", "input_text", "output_text", "refusal")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class CustomInput(msgspec.Struct):
    name: str
    input: str = ""


class Call(msgspec.Struct):
    """A call of a function or of a custom tool."""

    function: Function | UnsetType = UNSET
    id: str | None = None
    type: str = "function"
    custom: CustomInput | UnsetType = UNSET

    def called(self) -> Function:
        """As the model has called it. `check` has seen that there is one."""
        if self.custom is not UNSET:
            return Function(self.custom.name, {"input": self.custom.input})
        assert self.function is not UNSET
        return self.function


class Message(msgspec.Struct):
    role: str
    content: str | list[str | Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under vLLM's newer name

    def characters(self) -> int:
        """Nearly how many are to be tokenised."""
        content = self.content or ""
        parts = [content] if isinstance(content, str) else content
        calls = len(msgspec.json.encode(self.tool_calls)) if self.tool_calls else 0
        texts = [one if isinstance(one, str) else one.words() for one in parts]
        return calls + len(self.reasoning_content or self.reasoning or "") + sum(map(len, texts))

    def check(self, at: str) -> None:
        """`at` is where it is, for the error's words."""
        if self.role not in ROLES:
            raise bad(f"{at}.role", f"{at}.role is {show(self.role)}: expected one of {', '.join(ROLES)}")
        for j, call in enumerate(self.tool_calls or ()):
            if call.function is UNSET and call.custom is UNSET:
                raise bad(f"{at}.tool_calls[{j}].function", f"{at}.tool_calls[{j}].function is missing")
        for j, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, Part) and part.type not in PARTS:
                raise bad(
                    f"{at}.content[{j}]", f"{at}.content[{j}].type is {show(part.type)}: this model takes text only"
                )


class ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str
    function: ToolFunction


def tool_name(tool: Any) -> str:
    """The name in {"type": "function", "function": {"name": …}}, or in a custom tool's "custom"; "" where none is."""
    function = tool.get("custom" if tool.get("type") == "custom" else "function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""
