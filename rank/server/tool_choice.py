"""OpenAI's tool_choice: whether the answer must be a call, and of which tools."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .api_error import bad
from .conversation import Tool, tool_name
from .custom_tools import check_custom, is_custom
from .decoding import explain, show

MODES = ("auto", "none", "required")


class ToolChoice(NamedTuple):
    mode: str = "auto"  # one of MODES
    allowed: frozenset[str] | None = None  # the only tools that the model is told of; None: all
    named: str = ""  # the tool that must be called


def tool_choice(choice: str | dict[str, Any] | None) -> ToolChoice:
    """Raises ApiError 400 for what is no tool_choice."""
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str) and choice in MODES:
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom") and (name := tool_name(choice)):
        return ToolChoice("required", named=name)
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    expected = "auto, none, required, or an object of type function or custom (with its name) or allowed_tools"
    raise bad("tool_choice", f"tool_choice is {show(choice)}: expected {expected}")


def _allowed(inner: Any) -> ToolChoice:
    at = "tool_choice.allowed_tools"
    if not isinstance(inner, dict) or inner.get("mode") not in ("auto", "required"):
        raise bad(at, f'{at} is {show(inner)}: expected an object with a mode, "auto" or "required", and tools')
    tools = inner.get("tools") or []
    if not isinstance(tools, list):
        raise bad(f"{at}.tools", f"{at}.tools is {show(tools)}: expected a list of tools")
    return ToolChoice(inner["mode"], frozenset(name for tool in tools if (name := tool_name(tool))))


def chosen(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tools that it leaves."""
    wanted = tool_choice(choice)
    if wanted.mode == "none":
        return []
    return [tool for tool in tools or () if wanted.allowed is None or tool_name(tool) in wanted.allowed]


def check_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    """The tools, and whether the choice fits them. Raises ApiError 400."""
    for i, tool in enumerate(tools or ()):
        if is_custom(tool):
            check_custom(tool, f"tools[{i}]")
            continue
        try:
            checked = msgspec.convert(tool, Tool)
        except msgspec.ValidationError as error:
            raise explain(str(error), tool, f"tools[{i}]") from None
        if checked.type != "function":
            raise bad("tools", f'tools[{i}].type is {show(checked.type)}: only "function" and "custom" are supported')
        if not checked.function.name:
            raise bad(f"tools[{i}].function.name", f"tools[{i}].function.name is empty: a call needs the name")
        kind = (checked.function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            at = f"tools[{i}].function.parameters.type"
            raise bad(at, f'{at} is {show(kind)}: expected "object", as arguments have names')
    wanted = tool_choice(choice)
    offered = [tool_name(tool) for tool in chosen(tools, choice)]
    if wanted.mode == "required" and not offered:
        raise bad("tool_choice", f"tool_choice is {show(choice)}: it needs tools that may be called")
    if wanted.named and wanted.named not in offered:
        shown = ", ".join(offered)
        raise bad("tool_choice", f"tool_choice names {show(wanted.named)}, but the tools are {shown}")


def relaxed(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The tool choice with `required` lifted: for the rounds after the one that had to call."""
    wanted = tool_choice(choice)
    if wanted.mode != "required":
        return choice
    if wanted.allowed is None:
        return "auto"
    assert isinstance(choice, dict)
    return {**choice, "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
