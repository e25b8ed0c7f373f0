"""The messages and tools of a chat, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from ..vision import ImageRules
from .api_error import bad
from .decoding import show

PARTS = ("text", "input_text", "output_text", "refusal")
IMAGE_PARTS = ("image_url", "input_image")
TEXT_ONLY = "this model takes text only"
EXPECTED = f"expected one of {', '.join((*PARTS, *IMAGE_PARTS))}"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ImageUrl(msgspec.Struct):
    url: str | None = None
    detail: str | None = None


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    detail: str | None = None  # of an input_image

    @property
    def is_image(self) -> bool:
        return self.type in IMAGE_PARTS

    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


class NamedImage(Part, kw_only=True):
    """An image of another API, in the chat that its request means."""

    at: str  # where it is in that request, for errors ...
    named: str  # ... the field that has its URL ...
    kind: str  # ... and its type there

    @classmethod
    def of(cls, at: str, named: str, kind: str, url: str | None, detail: str | None = None) -> Self:
        return cls("image_url", image_url=url, detail=detail, at=at, named=f"{at}.{named}", kind=kind)


class ShownImage(Part, kw_only=True):
    """An image that was read: in the request in its part's place."""

    rules: ImageRules  # the model's
    digest: bytes  # of its pixels
    rows: int  # of its features
    columns: int
    tokens: list[int]  # that take a placeholder's place
    runs: int = 1  # how many placeholders it has
    text: str = ""  # that takes the place of the rules' `mark`
    spans: tuple[tuple[int, int], ...] = ()  # (first, end) of these that attend to each other


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
        """The call as the model made it. `check` has seen that there is one."""
        if self.custom is not UNSET:
            return Function(self.custom.name, {"input": self.custom.input})
        assert self.function is not UNSET
        return self.function


class Message(msgspec.Struct):
    role: str
    content: str | list[str | Part] | None = None
    refusal: str | None = None  # of an assistant that answers with nothing else
    name: str | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None  # the one call of messages from before there were tool_calls
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under vLLM's newer name

    def text(self) -> str:
        """The content as one text; empty where there is none."""
        content = self.content or self.refusal or ""
        if isinstance(content, str):
            return content
        return "\n".join(part if isinstance(part, str) else part.words() for part in content if not _is_image(part))

    @property
    def has_images(self) -> bool:
        return isinstance(self.content, list) and any(map(_is_image, self.content))

    def parts(self) -> list[dict[str, str]]:
        """The content as templates take images: a list of parts."""
        assert isinstance(self.content, list)
        return [
            {"type": "image"} if _is_image(part)
            else {"type": "text", "text": part if isinstance(part, str) else part.words()}
            for part in self.content
        ]  # fmt: skip

    def characters(self) -> int:
        """Nearly how many are to be tokenised."""
        calls = self.tool_calls or self.function_call
        thoughts = self.reasoning_content or self.reasoning or ""
        return (len(msgspec.json.encode(calls)) if calls else 0) + len(thoughts) + len(self.text())

    def check(self, at: str) -> None:
        """`at` is where it is, for the error's words."""
        if self.role not in ROLES:
            raise bad(f"{at}.role", f"{at}.role is {show(self.role)}: expected one of {', '.join(ROLES)}")
        for name in ("tool_calls", "function_call"):
            if getattr(self, name) and self.role != "assistant":
                raise bad(f"{at}.{name}", f"{at}.{name} is there with the role {self.role}: an assistant calls tools")
        for j, call in enumerate(self.tool_calls or ()):
            if call.function is UNSET and call.custom is UNSET:
                raise bad(f"{at}.tool_calls[{j}].function", f"{at}.tool_calls[{j}].function is missing")
        for j, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, Part) and part.is_image:
                if self.role != "user":
                    raise bad(
                        f"{at}.content[{j}]",
                        f"{at}.content[{j}].type is {show(part.type)} with the role {self.role}: images are taken in "
                        "messages of the user",
                    )
                continue
            if isinstance(part, Part) and part.type not in PARTS:
                raise bad(f"{at}.content[{j}]", f"{at}.content[{j}].type is {show(part.type)}: {EXPECTED}")
            if isinstance(part, Part) and part.text is None and part.refusal is None:
                name = "refusal" if part.type == "refusal" else "text"
                raise bad(f"{at}.content[{j}].{name}", f"{at}.content[{j}].{name} is missing")


def _is_image(part: str | Part) -> bool:
    return isinstance(part, Part) and part.is_image


def with_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls in tool_calls and results of the role tool.

    Older clients send function_call, and results of the role function, which name the function and no call.
    """
    made: list[Message] = []
    for number, message in enumerate(messages):
        if message.function_call is not None and not message.tool_calls:
            # Nine alphanumeric characters: templates of Mistral take no other id.
            call = Call(message.function_call, f"call{number % 100_000:05d}")
            message = msgspec.structs.replace(message, tool_calls=[call])
        elif message.role == "function":
            called = [call for one in made for call in one.tool_calls or () if call.called().name == message.name]
            id = message.tool_call_id or (called[-1].id if called else None)
            message = msgspec.structs.replace(message, role="tool", tool_call_id=id)
        made.append(message)
    return made


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
