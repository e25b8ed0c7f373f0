"""Tool servers: which there are, and responses whose calls they make."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ..api_error import bad
from ..conversation import Message
from ..mcp.connection import LEFT_OUT, MAX_TEXTS
from ..mcp.request_tools import RequestTools
from ..mcp.rounds import MAX_CALLS, ToolSession
from ..mcp.tool_servers import Offered
from ..mcp.tool_servers import call as call_tool
from ..responses_request import ResponsesRequest
from ..session import Session
from ..text.events import Event, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolResult
from ..tool_choice import relaxed
from .chat import answer
from .routes import Call, Route


def tools(call: Call) -> dict[str, Any]:
    """The tool servers with their state, and the tools that they have."""
    assert call.server is not None
    servers = call.server.tools
    data = [
        {"name": one.name, "server": one.connection.server.name, "description": one.tool.description,
         "input_schema": one.tool.schema}
        for one in servers.offered().values()
    ]  # fmt: skip
    return {"object": "list", "data": data, "servers": servers.health()}


async def respond(
    call: Call, request: ResponsesRequest, items: list[dict[str, Any]]
) -> tuple[Session, RequestTools | None]:
    """The session of a response to these items. Calls of the request's tool servers are made in it."""
    entries = request.mcp_tools()
    if not entries:
        return await answer(call, request.chat(items)), None
    if call.server is None:
        raise bad("tools", "tools names a tool server: a batch job has none")
    if not call.engine.takes_tools:
        raise bad("tools", "this model's chat template does not take tools: leave them out")
    given = RequestTools(entries, call.server.tools)
    own = {str(tool.get("name")) for tool in request.tools or () if tool.get("type") in ("function", "custom")}
    if both := own & given.offered.keys():
        raise bad("tools", f"tools has one called {min(both)!r}, which a tool server's tool is called, too: rename it")
    begin, made = await _approved(items, given)
    chat = request.chat([*items, *made], given.functions())
    if not chat.tools:  # the servers are not there, and no call can be forced
        chat = msgspec.structs.replace(chat, tool_choice=None)
    chat.check_tools()  # which tools there are to be chosen is known only now

    async def again(messages: list[Message], used: int, tools: bool) -> Session:
        more: dict[str, Any] = {"tool_choice": relaxed(chat.tool_choice)}
        if not tools:
            more = {"tools": None, "tool_choice": None}
        if chat.max_tokens is not None:
            more["max_tokens"] = max(1, chat.max_tokens - used)
        return await answer(call, msgspec.structs.replace(chat, messages=[*chat.messages, *messages], **more))

    first = await answer(call, chat)
    return ToolSession(first, given, again, request.max_tool_calls, begin), given


async def _approved(items: list[dict[str, Any]], given: RequestTools) -> tuple[list[Event], list[dict[str, Any]]]:
    """Make the calls that a person has approved and that were not made yet: their events, and them as items."""
    asked = {item["id"]: item for item in items if item.get("type") == "mcp_approval_request" and item.get("id")}
    over = {item.get("approval_request_id") for item in items if item.get("type") == "mcp_call"}
    said = {item.get("approval_request_id") for item in items if item.get("type") == "mcp_approval_response"}
    if len(said - over) > MAX_CALLS:
        raise bad("input", f"input approves of {len(said - over)} calls: at most {MAX_CALLS} are made for one response")
    events: list[Event] = []
    made: list[dict[str, Any]] = []
    room = MAX_TEXTS
    for item in items:
        wanted = item.get("approval_request_id")
        if item.get("type") != "mcp_approval_response" or not item.get("approve") or wanted in over:
            continue
        over.add(wanted)
        request = asked.get(wanted)
        if request is None:
            raise bad("input", f"input approves of {str(wanted)[:100]!r}: there is no such request before it")
        one = _offered(request, given)
        id, arguments = "call_" + uuid.uuid4().hex[:24], request.get("arguments") or ""
        given.approved[id] = str(wanted)
        result = await call_tool(one, arguments)
        if len(result.text) > room:
            result = LEFT_OUT
        room -= len(result.text)
        index = len(made)
        events += [ToolCallStart(index, id, one.name), ToolCallArguments(index, arguments), ToolCallEnd(index)]
        events.append(ToolResult(id, result.text, result.failed))
        made.append({**request, "type": "mcp_call", "id": id, "output": result.text, "approval_request_id": wanted})
    return events, made


def _offered(request: dict[str, Any], given: RequestTools) -> Offered:
    """The tool that a person has approved to be called."""
    label, name = str(request.get("server_label")), str(request.get("name"))
    found = next((one for one in given.lists.get(label, ()) if one.tool.name == name), None)
    if found is None:
        raise bad("input", f"input approves of a call of {name[:100]!r} of {label[:100]!r}, which tools does not offer")
    return found


ROUTES = [Route("/v1/mcp/tools", tools, method="GET")]
