"""A tool server made with the SDK: `python tool_server.py stdio`, or `http PORT`, which says "ready" first."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def slow(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)  # as long as the test asks for
    return "done"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def leave() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


@server.tool()
def secret() -> str:
    """The environment's variables."""
    return os.environ.get("SECRET", "none")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import uvicorn

        app = server.streamable_http_app(stateless_http=True, json_response=True)
        config = uvicorn.Config(app, port=int(sys.argv[2]), log_level="error", lifespan="on")
        print("ready", flush=True)
        uvicorn.Server(config).run()
