"""Tool servers for real, on this machine: one that is a child, one that is reached by HTTP."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

TOOL_SERVER = str(Path(__file__).parents[1] / "tool_server.py")
STDIO = {"command": sys.executable, "args": [TOOL_SERVER, "stdio"]}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def http_server(port):
    child = subprocess.Popen([sys.executable, TOOL_SERVER, "http", str(port)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        until = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < until  # the tool server does not listen
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def written(directory, content):
    """An mcp.json with this in it; its path."""
    path = directory / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


async def until(condition, seconds=30):
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "timed out"
        await asyncio.sleep(0.02)
