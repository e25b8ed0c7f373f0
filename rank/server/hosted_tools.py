"""Tools of /v1/responses that are no functions: namespaces of functions, and those that OpenAI runs itself.

Agents name OpenAI's tools by default. They cannot be offered to a model here, so they are left out, with a line of the
log for each kind. Calls of them in the input are history, and become calls of functions.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from .api_error import bad
from .decoding import show

log = logging.getLogger(__name__)
HOSTED = re.compile(
    r"(web_search(_preview)?|computer(_use_preview)?|file_search)(_\d{4}_\d\d_\d\d)?|tool_search|image_generation"
    r"|local_shell|shell|apply_patch|code_interpreter|programmatic_tool_calling"
)
CALLS = (
    "web_search_call", "local_shell_call", "tool_search_call", "image_generation_call", "file_search_call",
    "code_interpreter_call", "computer_call", "shell_call", "apply_patch_call",
)  # fmt: skip
OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output", "computer_call_output")
TOOLS = ("additional_tools", "tool_search_output")  # items that bring tools
UNREADABLE = ("compaction", "compaction_summary", "context_compaction")  # OpenAI has the key
ITEMS = (*CALLS, *OUTPUTS, *TOOLS, *UNREADABLE)
ANSWERED = ("web_search_call", "image_generation_call", "file_search_call", "code_interpreter_call")
OWN_ID = "call00000"  # of a call whose client keeps no ids: its output follows at once
# Fields of a call that are not arguments; a result may be an image.
ABOUT = ("type", "id", "call_id", "status", "result", "results", "outputs", "execution", "namespace")


@functools.lru_cache(64)
def log_left_out(kind: str, why: str) -> None:
    """One line of the log for each kind."""
    log.warning("clients send %s: %s", kind, why)


def is_hosted(tool: dict[str, Any]) -> bool:
    """Whether it is a tool that OpenAI's servers or models know, and nothing here does."""
    kind = tool.get("type")
    return isinstance(kind, str) and HOSTED.fullmatch(kind) is not None


class Member(NamedTuple):
    """A tool of a namespace."""

    namespace: str
    name: str


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool."""
    return f"{namespace}__{name}" if namespace else name


class FlatTools(NamedTuple):
    """The tools that can be offered, and of which namespace each is, by the names that the model sees."""

    tools: list[dict[str, Any]]
    members: dict[str, Member]

    def chosen(self, name: str | None, namespace: str | None = None) -> str | None:
        """The name under which the model sees the tool that a choice names, with its namespace or without."""
        if name is None or namespace:
            return name and flat_name(namespace, name)
        if any(tool.get("name") == name for tool in self.tools):
            return name
        return next((flat for flat, one in self.members.items() if one.name == name), name)


def flat_tools(tools: list[dict[str, Any]]) -> FlatTools:
    """Functions, custom tools and tool servers, those of namespaces among them. Raises ApiError 400."""
    found = FlatTools([], {})
    names: set[str] = set()
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if is_hosted(tool):
            log_left_out(f"tools of type {tool['type']}", "nothing here runs them, they are not offered to the model")
        elif tool.get("type") == "namespace":
            for member in _members(tool, at):
                flat = flat_name(tool["name"], member["name"])
                found.members[flat] = Member(tool["name"], member["name"])
                found.tools.append({**member, "name": flat})
        else:
            names.add(str(tool.get("name")))
            found.tools.append(tool)
    if both := names & found.members.keys():
        raise bad("tools", f"tools has one called {min(both)!r}, which one of a namespace is called, too: rename it")
    return found


def _members(tool: dict[str, Any], at: str) -> list[dict[str, Any]]:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise bad(f"{at}.name", f"{at}.name is {show(name)}: expected the name of the namespace")
    if not isinstance(inner, list):
        raise bad(f"{at}.tools", f"{at}.tools is {show(inner)}: expected a list of functions")
    found = []
    for j, one in enumerate(inner):
        here = f"{at}.tools[{j}]"
        if not isinstance(one, dict) or one.get("type") not in ("function", "custom"):
            raise bad(here, f"{here} is {show(one)}: expected a tool of type function or custom")
        if not isinstance(one.get("name"), str) or not one["name"]:
            raise bad(f"{here}.name", f"{here}.name is {show(one.get('name'))}: expected a name")
        found.append(one)
    return found


def brought_tools(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that items of the input bring. Raises ApiError 400."""
    found: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") in TOOLS:
            tools = item.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
                raise bad("input", f"input has an item {item['type']} with the tools {show(tools)}: expected a list")
            found += [one for one in tools if one not in found]
    return found


def as_history(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An item with such calls as calls of functions and their outputs; others as they are."""
    kind = item.get("type")
    if kind in UNREADABLE:
        log_left_out(f"items of type {kind}", "only OpenAI's servers can read them, they are left out of the prompt")
    elif kind in CALLS:
        call_id = item.get("call_id") or item.get("id") or (OWN_ID if kind in ANSWERED else None)
        asked = item.get("arguments", item.get("action"))
        if asked is None:
            asked = {name: value for name, value in item.items() if name not in ABOUT}
        yield {"type": "function_call", "call_id": call_id, "name": str(kind)[:-5], "arguments": asked}
        if kind in ANSWERED:
            yield {"type": "function_call_output", "call_id": call_id, "output": str(item.get("status") or "completed")}
    elif kind in OUTPUTS:
        output = item.get("output")
        text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
        yield {"type": "function_call_output", "call_id": item.get("call_id") or item.get("id"), "output": text}
    elif kind == "tool_search_output" and item.get("call_id"):
        names = [tool.get("name") for tool in item.get("tools") or () if isinstance(tool, dict)]
        text = "found: " + ", ".join(map(str, names))
        yield {"type": "function_call_output", "call_id": item["call_id"], "output": text}
    elif kind not in TOOLS:
        yield item
