"""All tool servers of mcp.json: which tools there are now, and calls of them by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from .. import tracing
from .config import ToolServer
from .connection import Connection, Result, Tool

LONGEST_NAME = 64  # what clients of OpenAI's API take


class Offered(NamedTuple):
    """A tool under the name that the model calls it by."""

    name: str
    connection: Connection
    tool: Tool

    def as_function(self) -> dict[str, Any]:
        """The tool as a function of chats."""
        function = {"name": self.name, "description": self.tool.description, "parameters": self.tool.schema}
        return {"type": "function", "function": function}


def full_name(server: str, tool: str, others: Iterable[str] = ()) -> str:
    """The model's name of a server's tool: `server_tool`, and no other tool has the same.

    `others` are the other servers. A name that could be another tool's, too, ends with a hash: one of which
    characters were replaced or cut off, and "a_b_c" of server "a_b" next to "a", whose tool "b_c" has it already.
    """
    plain = f"{server}_{tool}"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", plain)
    if name == plain and len(name) <= LONGEST_NAME and not any(server.startswith(f"{other}_") for other in others):
        return name
    mark = blake2b(f"{server}\0{tool}".encode(), digest_size=3).hexdigest()
    return f"{name[: LONGEST_NAME - 1 - len(mark)]}_{mark}"


class ToolServers:
    """Starts and keeps the connections. Whoever has none gets no tools, and no request waits for one."""

    def __init__(self, servers: list[ToolServer]):
        self.connections = {one.name: Connection(one) for one in servers}

    def start(self) -> None:
        """Begin to connect, on the running loop."""
        for connection in self.connections.values():
            connection.start()

    async def close(self) -> None:
        """End all connections, and the servers that were started."""
        await asyncio.gather(*(one.close() for one in self.connections.values()))

    async def settled(self, seconds: float) -> None:
        """Wait until every server is there or has failed once, at most so long."""
        waits = [asyncio.ensure_future(one.settled.wait()) for one in self.connections.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for wait in late:
                wait.cancel()

    def offered(self, server: str | None = None) -> dict[str, Offered]:
        """The tools of one server, or of all, by the names that the model calls them by."""
        found: dict[str, Offered] = {}
        for connection in self.connections.values():
            if server in (None, connection.server.name):
                for tool in connection.tools.values():
                    name = full_name(connection.server.name, tool.name, self.connections)
                    found.setdefault(name, Offered(name, connection, tool))
        return found

    def functions(self) -> list[dict[str, Any]]:
        """All of them, as chats have tools."""
        return [one.as_function() for one in self.offered().values()]

    async def call(self, name: str, arguments: str) -> Result:
        """Call a tool by the name that the model uses, with arguments as JSON."""
        one = self.offered().get(name)
        if one is None:
            return Result(f"there is no tool {name}", failed=True)
        return await call(one, arguments)

    def health(self) -> dict[str, dict[str, Any]]:
        """Each server's state, and why it is not ready."""
        return {
            name: {"status": one.state, "tools": len(one.tools)} | ({"message": one.why} if one.why else {})
            for name, one in self.connections.items()
        }


async def call(one: Offered, arguments: str) -> Result:
    """Call a tool with arguments as the model wrote them."""
    try:
        given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        return Result(f"the arguments of {one.name} are no JSON object: {error}", failed=True)
    with tracing.tool_call(one.tool.name, one.connection.server.name) as said:
        result = await one.connection.call(one.tool.name, given)
        if result.failed:
            said["error"] = "tool_error"
    return result
