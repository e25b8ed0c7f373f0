"""How a chat template takes messages: contents as texts or as lists of parts, thoughts, and messages of calls.

Templates differ without notice: one that iterates over parts writes nothing of a text, one that joins the arguments of
a call to a text fails on an object. So each template is tried once, when it is loaded, with messages whose words are
known, and messages are handed to it in the shape that it writes whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ..api_error import ApiError

# Stand in a prompt where a template writes the content, the call or the thoughts that they are in.
WORD, NAME, THOUGHT = "Quokka7", "lookup7", "Numbat7"
PATIENCE = 5.0  # seconds after which no further message is tried
ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what templates call the thoughts of a message
ABSENT = msgspec.UNSET
ARGUMENTS = {"animal": WORD}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Looks an animal up.",
            "parameters": {"type": "object", "properties": {"animal": {"type": "string", "description": "Its name"}}},
        },
    }
]
Render = Callable[[list[dict[str, Any]]], str]


class MessageShape(msgspec.Struct, frozen=True):
    """The shape of messages that a template is handed. The default is what most take."""

    parts: frozenset[str] = frozenset()  # roles whose content is a list of parts
    empty: Any = ""  # the content of a message of calls that has no text: "", None, or ABSENT where the key is left out
    json_arguments: bool = False  # the arguments of calls are a text in JSON, not an object
    thoughts: str = THOUGHTS[0]  # the key of a message's thoughts
    thoughts_alone: bool = False  # a message of calls that has them and a content is refused

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose content is a text, or a list of parts where it has images, whose thoughts are in THOUGHTS[0]
        and whose arguments are objects, as the template takes it."""
        made = {self.thoughts if key == THOUGHTS[0] else key: value for key, value in message.items()}
        if self.thoughts_alone and made.get(self.thoughts) and made["content"] and made.get("tool_calls"):
            made[self.thoughts] += f"\n\n{made['content']}"  # the words said before a call lead to it as well
            made["content"] = ""
        if calls := message.get("tool_calls"):
            if not made["content"]:
                made["content"] = self.empty
            if self.json_arguments:
                made["tool_calls"] = [_in_json(call) for call in calls]
        if made["content"] is ABSENT:
            del made["content"]
        elif message["role"] in self.parts and not isinstance(made["content"], list):
            made["content"] = as_parts(made["content"] or "")
        return made


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def find_shape(render: Render) -> MessageShape:
    """The shape in which a template writes whole messages. render: raises ApiError where the template fails."""
    until = time.monotonic() + PATIENCE

    def tried(messages: list[dict[str, Any]]) -> str:
        """The template's output; "" where it fails, or where trying has taken too long."""
        try:
            return render(messages) if time.monotonic() < until else ""
        except ApiError:
            return ""

    shape = _with_thoughts(tried, _shape_of_calls(tried))
    parts = {role for role in ROLES if _takes_parts(tried, role, shape)}
    return msgspec.structs.replace(shape, parts=frozenset(parts))


def _shape_of_calls(tried: Render) -> MessageShape:
    """How a message of calls without text is written best: the call is there, and nothing else that can be left out,
    such as the word None or an empty turn before it."""

    def flaws(shape: MessageShape) -> tuple[bool, bool, bool, int]:
        text = tried([shape.apply(one) for one in _conversation("tool", "Done")])
        missing = WORD not in text or NAME not in text
        in_python = f"{{'{next(iter(ARGUMENTS))}'" in text  # an object where the template expects JSON
        return missing, in_python, shape.json_arguments, 0 if missing else len(text)

    shapes = [MessageShape(empty=empty, json_arguments=as_json) for as_json in (False, True) for empty in _EMPTY]
    return min(shapes, key=flaws)  # the first of equal ones


_EMPTY: tuple[Any, ...] = ("", ABSENT, None)


def _with_thoughts(tried: Render, shape: MessageShape) -> MessageShape:
    """The shape with the key whose thoughts the template writes: those that led to a call, as far as none were given
    later."""
    for name in THOUGHTS:
        named = msgspec.structs.replace(shape, thoughts=name)
        if THOUGHT in tried([named.apply(one) for one in _conversation("tool", "Done", thoughts=THOUGHT)]):
            both = [named.apply(one) for one in _conversation("tool", "Done", thoughts=THOUGHT, said="On it")]
            return msgspec.structs.replace(named, thoughts_alone=not tried(both))
    return shape


def _takes_parts(tried: Render, role: str, shape: MessageShape) -> bool:
    """Whether a template loses a text of this role that it writes where it is a part."""
    if WORD in tried([shape.apply(one) for one in _conversation(role, WORD, "Nothing")]):
        return False
    listed = msgspec.structs.replace(shape, parts=frozenset({role}))
    text = tried([listed.apply(one) for one in _conversation(role, WORD, "Nothing")])
    return WORD in text and not any(f"{quote}type{quote}: {quote}text{quote}" in text for quote in "'\"")


def _conversation(
    role: str, content: str, argument: str = WORD, thoughts: str = "", said: str = ""
) -> Iterable[dict[str, Any]]:
    """A conversation with a message of this role and content. thoughts, said: of the message of calls before a tool's
    result."""
    message: dict[str, Any] = {"role": role, "content": content}
    hello = {"role": "user", "content": "Hello"}
    if role in ("system", "developer"):
        return message, hello
    if role == "user":
        return (message,)
    if role == "assistant":
        return hello, message, hello
    function = {"name": NAME, "arguments": dict.fromkeys(ARGUMENTS, argument)}
    call = {"id": "call00001", "type": "function", "function": function}  # nine characters, as Mistral's templates want
    calling = {"role": "assistant", "content": said, "tool_calls": [call]}
    if thoughts:
        calling[THOUGHTS[0]] = thoughts
    return hello, calling, {**message, "tool_call_id": call["id"], "name": NAME}
