"""Tool servers for programs that block: an Agent, the chat in the terminal. Their loop runs in a thread."""

from __future__ import annotations

from typing import Any

from ..rank.server.mcp import config
from ..rank.server.mcp.connection import CONNECT_TIMEOUT, Result
from ..rank.server.mcp.tool_servers import ToolServers
from .loop_thread import LoopThread

DENIED = "the user does not allow this call"  # the result of such a call, for the model
CLOSE_PATIENCE = 5.0


class ToolThread:
    """The servers of an mcp.json. The constructor waits until each is there or has failed; ValueError: a wrong file."""

    def __init__(self, path: str):
        servers = config.read(path)
        self._thread = LoopThread("tool-servers")
        self._servers = ToolServers(servers)
        self._thread.run(self._start())

    async def _start(self) -> None:
        self._servers.start()
        await self._servers.settled(CONNECT_TIMEOUT)

    def functions(self) -> list[dict[str, Any]]:
        """The tools, as chats have them."""
        return self._servers.functions()

    def failed(self) -> dict[str, str]:
        """The servers that are not there, and why."""
        late = f"it has not answered within {CONNECT_TIMEOUT:g} s"
        health = self._servers.health().items()
        return {name: one.get("message", late) for name, one in health if one["status"] != "ready"}

    def call(self, name: str, arguments: str) -> Result:
        """Call a tool with arguments as JSON; blocks as long as its server may take."""
        return self._thread.run(self._servers.call(name, arguments))

    def close(self) -> None:
        """End the connections, and the servers that were started."""
        self._thread.run(self._servers.close(), CLOSE_PATIENCE)
        self._thread.stop(CLOSE_PATIENCE)
