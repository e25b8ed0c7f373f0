"""Items of tool servers in OpenAI's responses: a server's list of tools, calls, and requests for approval.

https://platform.openai.com/docs/guides/tools-connectors-mcp
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .items import Change, Item
from .mcp.request_tools import RequestTools


def server_item(item: Item, own: str, text: str, status: str, tools: RequestTools) -> dict[str, Any]:
    """An output item. own: what its id ends with. text: a call's arguments so far."""
    if item.kind == "tools":
        listed = [
            {"name": one.tool.name, "description": one.tool.description, "input_schema": one.tool.schema,
             "annotations": None}
            for one in tools.lists[item.name]
        ]  # fmt: skip
        error = tools.missing.get(item.name)
        return {
            "type": "mcp_list_tools", "id": f"mcpl_{own}", "server_label": item.name, "tools": listed, "error": error,
        }  # fmt: skip
    name = tools.offered[item.name].tool.name
    called = {"name": name, "server_label": tools.labels[item.name], "arguments": text}
    if tools.asks(item.name, item.id):
        return {"type": "mcp_approval_request", "id": f"mcpr_{own}", **called}
    result = item.result
    return {
        "type": "mcp_call",
        "id": f"mcp_{own}",
        **called,
        "approval_request_id": tools.approved.get(item.id),
        "output": result.text if result is not None and not result.failed else None,
        "error": result.text if result is not None and result.failed else None,
        "status": _status(item, status),
    }


def _status(item: Item, status: str) -> str:
    if item.result is not None:
        return "failed" if item.result.failed else "completed"
    return "incomplete" if status == "incomplete" else "in_progress"


def server_events(change: Change, whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a change, without their numbers. whole: the item as it is now."""
    item, index = change.item, change.item.index
    place: dict[str, Any] = {"item_id": whole["id"], "output_index": index}
    added = ("response.output_item.added", {"output_index": index, "item": whole})
    done = ("response.output_item.done", {"output_index": index, "item": whole})
    if item.kind == "tools":
        yield added
        yield "response.mcp_list_tools.in_progress", place
        yield f"response.mcp_list_tools.{'failed' if whole['error'] else 'completed'}", place
        yield done
    elif whole["type"] == "mcp_approval_request":
        if change.what == "end":  # its arguments are part of what is to be approved
            yield added
            yield done
    elif change.what == "begin":
        yield added
        yield "response.mcp_call.in_progress", place
    elif change.what == "grow":
        yield "response.mcp_call_arguments.delta", {**place, "delta": change.text}
    elif change.what == "end":
        yield "response.mcp_call_arguments.done", {**place, "arguments": item.text}
    else:
        yield f"response.mcp_call.{whole['status']}", place
        yield done
