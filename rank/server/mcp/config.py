"""mcp.json: which tool servers there are. Both shapes that candle-vLLM has are read, and what other clients write.

{"mcpServers": {NAME: {"command", "args", "env", "cwd"} or {"url", "headers"}}}
{"servers": [{"name", "url", "auth", "timeout_secs", "instructions"} or {"name", "command", …}]}
"""

from __future__ import annotations

import importlib.util
import re

import msgspec

from ... import json_decoding

TIMEOUT = 30.0  # seconds that a call may take, where the file does not say
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
TYPES = ("stdio", "http", "streamable-http", "streamableHttp")


class ToolServer(msgspec.Struct, kw_only=True):
    """One entry. Either `command` starts it as a child that is spoken to by its pipes, or `url` reaches it."""

    name: str = ""
    type: str | None = None
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = {}
    auth: str | None = None  # a bearer token
    timeout_secs: float = TIMEOUT  # of each call
    instructions: str | None = None  # to whoever reads the file
    disabled: bool = False

    def sent_headers(self) -> dict[str, str]:
        return self.headers | ({"Authorization": f"Bearer {self.auth}"} if self.auth else {})


class _File(msgspec.Struct):
    mcpServers: dict[str, ToolServer] = {}
    servers: list[ToolServer] = []


def read(path: str) -> list[ToolServer]:
    """The servers that a file names. Raises ValueError that names its fault."""
    try:
        with open(path, "rb") as file:
            found = json_decoding.decode_as(file.read(), _File)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if not (found.mcpServers or found.servers):
        raise ValueError(f'{path}: it names no server: {{"mcpServers": {{"NAME": {{"command": …}}}}}} is expected')
    servers = [msgspec.structs.replace(one, name=name) for name, one in found.mcpServers.items()] + found.servers
    for one in servers:
        if (wrong := _wrong(one)) is not None:
            raise ValueError(f"{path}: server {one.name!r}: {wrong}")
    names = [one.name for one in servers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: server {min(twice)!r} is there twice")
    if importlib.util.find_spec("mcp") is None:
        raise ValueError(f"{path}: tool servers need the Python package `mcp`: pip install 'phalanx[mcp]'")
    return [one for one in servers if not one.disabled]


def _wrong(server: ToolServer) -> str | None:
    """The fault of a tool server's entry, as a message; None if there is none."""
    if not NAME.fullmatch(server.name):
        return "a name has 1 to 40 letters, digits, - or _, as the names of its tools begin with it"
    if bool(server.command) == bool(server.url):
        return "either `command` or `url` is needed: how it is started, or where it is"
    if server.type is not None and server.type not in TYPES:
        return f"type is {server.type!r}: only stdio and streamable HTTP (http) are spoken"
    if server.url and not server.url.startswith(("http://", "https://")):
        return f"url is {server.url!r}: it must begin with http:// or https://"
    if not server.timeout_secs > 0:
        return f"timeout_secs is {server.timeout_secs:g}: it must be above 0"
    return None
