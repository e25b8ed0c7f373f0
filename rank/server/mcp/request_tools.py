"""The tool servers that one request to /v1/responses names: what the model may call, and what needs a person's word."""

from __future__ import annotations

from typing import Any

import msgspec

from ..api_error import bad
from ..decoding import explain, show
from .connection import Connection
from .tool_servers import Offered, ToolServers, full_name


class AllowedTools(msgspec.Struct):
    tool_names: list[str] = []
    read_only: bool | None = None


class Approval(msgspec.Struct):
    """Tools whose calls always need approval, and tools whose calls never do."""

    always: AllowedTools | None = None
    never: AllowedTools | None = None


class McpTool(msgspec.Struct):
    """An entry of `tools` with the type `mcp`."""

    server_label: str = ""
    server_url: str | None = None
    connector_id: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: list[str] | AllowedTools | None = None
    require_approval: str | Approval | None = None  # None: "always", as OpenAI has it

    def check(self, at: str) -> None:
        """`at` is where it is, for the error's words."""
        for name in ("connector_id", "authorization", "headers"):
            if getattr(self, name):
                raise bad(f"{at}.{name}", f"{at}.{name} is given: this server reaches its tool servers by its own file")
        filters = [self.allowed_tools]
        if isinstance(self.require_approval, Approval):
            filters += [self.require_approval.always, self.require_approval.never]
        elif self.require_approval not in (None, "always", "never"):
            here = f"{at}.require_approval"
            raise bad(here, f'{here} is {show(self.require_approval)}: expected "always", "never" or tools for each')
        if any(isinstance(one, AllowedTools) and one.read_only for one in filters):
            raise bad(at, f"{at} asks for read_only tools: name the tools, servers do not say it reliably")

    def allows(self, tool: str) -> bool:
        allowed = self.allowed_tools
        names = allowed.tool_names if isinstance(allowed, AllowedTools) else allowed
        return names is None or tool in names

    def asks(self, tool: str) -> bool:
        """Whether a person has to approve of a call of it."""
        rule = self.require_approval
        if isinstance(rule, Approval):
            if rule.never is not None and tool in rule.never.tool_names:
                return False
            return rule.always is None or not rule.always.tool_names or tool in rule.always.tool_names
        return rule != "never"


def mcp_tool(tool: dict[str, Any], at: str) -> McpTool:
    """The entry, checked."""
    try:
        entry = msgspec.convert(tool, McpTool)
    except msgspec.ValidationError as error:
        raise explain(str(error), tool, at) from None
    entry.check(at)
    return entry


class RequestTools:
    """A request's tools with the tool servers as they are now. Raises ApiError for an unknown server."""

    def __init__(self, entries: list[McpTool], servers: ToolServers):
        self.lists: dict[str, list[Offered]] = {}  # by the entries' labels
        self.missing: dict[str, str] = {}  # labels of servers that are not there now, and why
        self.offered: dict[str, Offered] = {}
        self.labels: dict[str, str] = {}  # of each tool's name
        self.approved: dict[str, str] = {}  # ids of calls that a person has approved, and of the requests for that
        self._asks: set[str] = set()
        self._servers = [entry.server_label for entry in entries]
        for i, entry in enumerate(entries):
            self._add(entry, _server(entry, servers, f"tools[{i}]"))

    def _add(self, entry: McpTool, connection: Connection) -> None:
        label = entry.server_label
        if connection.state != "ready":
            self.missing[label] = f"the tool server is not there: {connection.why or connection.state}"
        tools = [tool for tool in connection.tools.values() if entry.allows(tool.name)]
        named = [(full_name(label, tool.name, self._servers), tool) for tool in tools]
        self.lists[label] = [Offered(name, connection, tool) for name, tool in named]
        for one in self.lists[label]:
            self.offered[one.name] = one
            self.labels[one.name] = label
            if entry.asks(one.tool.name):
                self._asks.add(one.name)

    def functions(self) -> list[dict[str, Any]]:
        """The tools as functions of chats."""
        return [one.as_function() for one in self.offered.values()]

    def asks(self, name: str, call_id: str) -> bool:
        """Whether this call waits for a person's word."""
        return name in self._asks and call_id not in self.approved


def _server(entry: McpTool, servers: ToolServers, at: str) -> Connection:
    """The connection that is meant, by its label or by its address."""
    known = servers.connections
    found = known.get(entry.server_label)
    if entry.server_url is not None:
        same = [one for one in known.values() if one.server.url.rstrip("/") == entry.server_url.rstrip("/")]
        found = same[0] if same else None
    if not entry.server_label:
        raise bad(f"{at}.server_label", f"{at}.server_label is missing")
    if found is None:
        has = f"it has {', '.join(known)}" if known else "it has none (--mcp-config)"
        wanted = show(entry.server_url or entry.server_label)
        raise bad(at, f"{at} names the tool server {wanted}, which this server does not speak to; {has}")
    return found
