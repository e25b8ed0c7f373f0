"""The connection to one tool server, kept by a task of its own: it is opened again where it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .config import ToolServer

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)
CONNECT_TIMEOUT = 20.0  # seconds for a server to start and to list its tools
RETRY = (1.0, 60.0)  # seconds before the first and before later attempts to connect again
CLOSE_TIMEOUT = 2.0  # seconds to take leave of a server
PING_EVERY = 20.0  # seconds of silence after which a server is asked whether it is there
MAX_TOOLS = 256  # of one server
MAX_TEXT = 1 << 20  # characters of a call's result that are kept ...
MAX_TEXTS = 4 << 20  # ... and of all results of a response

# A child that ends with this process even where it is killed: PR_SET_PDEATHSIG outlives exec. Macs have no such call.
_TIED = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Tool(NamedTuple):
    """A tool as its server describes it."""

    name: str
    description: str
    schema: dict[str, Any]


class Result(NamedTuple):
    """The result of a call: the tool's text, or why there is none."""

    text: str
    failed: bool = False


LEFT_OUT = Result("the result is left out: there is no more room for results of this response", failed=True)


class Connection:
    """One tool server. `state` is "connecting", "ready" or "failed" (`why` has the reason, and it is tried again)."""

    def __init__(self, server: ToolServer):
        self.server = server
        self.state = "connecting"
        self.why = ""
        self.tools: dict[str, Tool] = {}
        self.settled = asyncio.Event()  # the first attempt is over
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            for _ in range(2):  # a server that does not answer holds up the first: it is told of the end
                self._task.cancel()
                if (await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT))[0]:
                    break

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """Call a tool. An error is a result too: the model sees it."""
        client, limit = self._client, self.server.timeout_secs
        if client is None:
            return Result(f"the tool server {self.server.name} is not there: {self.why or self.state}", failed=True)
        try:
            answer = await asyncio.wait_for(client.call_tool(name, arguments), limit)
        except TimeoutError:
            return Result(f"{name} has not answered within {limit:g} s", failed=True)
        except Exception as error:  # the SDK raises what the transport did
            self._lost.set()  # or not: the task asks
            return Result(f"{name} failed: {reason(error)}", failed=True)
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in answer.content]
        return Result("\n".join(parts)[:MAX_TEXT], bool(answer.is_error))

    async def _keep(self) -> None:
        """Connect, and again after some time when that failed or ended."""
        pause, most = RETRY
        while True:
            try:
                async with self._connected() as client:
                    await self._watch(client)
            except Exception as error:  # whatever a server does wrong concerns nobody else
                self._fail(reason(error))
            else:
                pause = RETRY[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        """The server, whose tools have been listed. One task enters and leaves, as the SDK needs it."""
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    client = await stack.enter_async_context(Client(await self._transport(stack), cache=None))
                    self.tools = await _list(client)
                self._client = client
                self.state, self.why = "ready", ""
                self.settled.set()
                log.info("tool server %s is ready: %d tools", self.server.name, len(self.tools))
                yield client
            finally:  # before leave is taken, which may last
                self._client, self.tools = None, {}

    async def _watch(self, client: Client) -> None:
        """Return when the server has gone."""
        while True:
            self._lost.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), PING_EVERY)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self.tools = await _list(client)

    def _fail(self, why: str) -> None:
        if self.why != why:  # once, not at each attempt
            log.warning("tool server %s: %s; it is tried again", self.server.name, why)
        self.state, self.why = "failed", why
        self.settled.set()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        server = self.server
        if server.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            limits = httpx2.Timeout(CONNECT_TIMEOUT, read=max(300.0, server.timeout_secs))
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=server.sent_headers(), timeout=limits))
            return streamable_http_client(server.url, http_client=http)
        from mcp import StdioServerParameters, stdio_client

        path = {**os.environ, **server.env}.get("PATH")
        if shutil.which(server.command, path=path) is None:
            raise FileNotFoundError(f"command {server.command!r} is not found")
        words = ["-I", "-S", "-c", _TIED, server.command, *server.args]  # -I: nothing of cwd is imported
        child = StdioServerParameters(command=sys.executable, args=words, env=server.env, cwd=server.cwd)
        # Not sys.stderr, which notebooks replace by what is no file.
        return stdio_client(child, sys.__stderr__ or stack.enter_context(open(os.devnull, "w", encoding="utf-8")))


async def _list(client: Client) -> dict[str, Tool]:
    """All tools of a server, page by page."""
    found: dict[str, Tool] = {}
    cursor = None
    while len(found) < MAX_TOOLS:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            found[tool.name] = Tool(tool.name, tool.description or "", tool.input_schema)
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def reason(error: BaseException) -> str:
    """The innermost words of an error: the SDK wraps them in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it does not answer within {CONNECT_TIMEOUT:g} s"
    return str(error) or type(error).__name__
