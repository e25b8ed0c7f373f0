"""OpenAI's custom tools, whose input is a text instead of arguments by a schema.

The model sees a function with one text, `input`, as templates know only functions. Clients see the text as `input`.
https://platform.openai.com/docs/guides/function-calling#custom-tools
"""

from __future__ import annotations

from typing import Any

import msgspec

from .api_error import bad
from .constraint import checked, grammar, regex
from .decoding import explain, show
from .hosted_tools import log_left_out
from .text.argument_schema import GRAMMAR

INPUT = "input"


class Grammar(msgspec.Struct):
    syntax: str
    definition: str


class Format(msgspec.Struct):
    """The form of the input: type text, or grammar with a grammar."""

    type: str = "text"
    grammar: Grammar | None = None


class Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: Format | None = None


class CustomTool(msgspec.Struct):
    type: str
    custom: Custom


def is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom"


def custom_names(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """Names of the custom tools among a chat's tools."""
    return frozenset(tool["custom"]["name"] for tool in tools or () if is_custom(tool))


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool of /v1/responses as chats have it."""
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar" and "grammar" not in form:
        form = {"type": "grammar", "grammar": {key: value for key, value in form.items() if key != "type"}}
    inner = {"name": tool.get("name"), "description": tool.get("description"), "format": form}
    return {"type": "custom", "custom": {key: value for key, value in inner.items() if value is not None}}


def check_custom(tool: dict[str, Any], at: str) -> None:
    """`at` is where it is, for the error's words. Raises ApiError 400."""
    try:
        one = msgspec.convert(tool, CustomTool).custom
    except msgspec.ValidationError as error:
        raise explain(str(error), tool, at) from None
    form = one.format or Format()
    here = f"{at}.custom.format"
    if form.type not in ("text", "grammar"):
        raise bad(here, f"{here}.type is {show(form.type)}: expected text or grammar")
    if form.type == "text":
        return
    if form.grammar is None:
        raise bad(here, f"{here}.grammar is missing: give its syntax, lark or regex, and its definition")
    if form.grammar.syntax not in ("lark", "regex"):
        raise bad(here, f"{here}.grammar.syntax is {show(form.grammar.syntax)}: expected lark or regex")
    if form.grammar.syntax == "lark":
        log_left_out(
            "custom tools with a lark grammar",
            "a model whose calls have texts as JSON is shown the grammar, and its calls are not held to it",
        )


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """The function that the model sees."""
    if not is_custom(tool):
        return tool
    custom = tool["custom"]
    form = (custom.get("format") or {}).get("grammar")
    wanted = f"a text by this {form['syntax']} grammar:\n{form['definition']}" if form else "a text of any form"
    schema = _schema({"type": "string", "description": wanted})
    return {
        "type": "function",
        "function": {
            "name": custom["name"],
            "description": custom.get("description") or "",
            "parameters": schema,
        },
    }


def enforced(tool: dict[str, Any], raw: bool) -> dict[str, Any]:
    """A function whose arguments are held to the custom tool's grammar. May take long.

    raw: the model writes texts in calls as they are. Raises ApiError 400 for a grammar that cannot be enforced.
    """
    function = as_function(tool)
    if not is_custom(tool) or not (form := (tool["custom"].get("format") or {}).get("grammar")):
        return function
    name, text = tool["custom"]["name"], form["definition"]
    field = f"tools: the grammar of {name}"
    if form["syntax"] == "regex":
        checked(regex(field, text))
        schema = {"type": "string", "pattern": f"^({text})$"}
    else:
        part = checked(grammar(field, text))
        if not raw:  # agents send such tools to every model: it sees the grammar, and the client checks the input
            return function
        schema = {"type": "string", GRAMMAR: part["lark_grammar"]}
    return {**function, "function": {**function["function"], "parameters": _schema(schema), "strict": True}}


def _schema(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
