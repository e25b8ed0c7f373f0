"""`phalanx chat`: a conversation in the terminal with a running server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from ... import errors
from ...rank.options import flag
from .. import find_server
from ..options import option_sources
from ..options.help import options_help, show_config
from ..tool_thread import ToolThread

HELP = "talk to a running server in the terminal"
USAGE = """phalanx chat [options]: talk to a running server; an empty line or Ctrl-D ends, /new starts over

With --mcp FILE the model calls tools, which run on this machine.
Without options it finds the server that you have started, on this host or in a job of the cluster.
"""
_GROUP = "Chat"
MOST_ROUNDS = 16  # answers with calls of tools, one after the other
DENIED = "the user does not allow this call"
Message = dict[str, Any]


class ChatOptions(find_server.ServerOptions, frozen=True, kw_only=True):
    """The choices of this verb; the others are the server's."""

    system: Annotated[
        str, flag("--system", "--system_prompt", group=_GROUP, metavar="TEXT", help="what the model is told first")
    ] = ""
    temperature: Annotated[
        float | None, flag("--temperature", group=_GROUP, metavar="X", low=0, help="0 is greedy")
    ] = None
    top_p: Annotated[float | None, flag("--top-p", group=_GROUP, metavar="X", low=0, high=1, help="1 keeps all")] = None
    top_k: Annotated[int | None, flag("--top-k", group=_GROUP, metavar="N", low=-1, help="0 keeps all")] = None
    max_tokens: Annotated[
        int | None, flag("--max-tokens", "--max_tokens", group=_GROUP, metavar="N", low=1, help="longest answer")
    ] = None
    mcp: Annotated[
        str, flag("--mcp", group=_GROUP, metavar="FILE", help="mcp.json: tool servers that the model may use")
    ] = ""
    approve: Annotated[
        bool, flag("--approve", group=_GROUP, off=("--no-approve",), help="ask before each call of a tool")
    ] = False
    thinking: Annotated[
        bool | None, flag("--thinking", group=_GROUP, off=("--no-thinking",), help="let the model reason first")
    ] = None


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(ChatOptions, argv, os.environ)
    if chosen.help or chosen.show_config:
        print(USAGE + options_help(ChatOptions) if chosen.help else show_config(chosen))
        return 0
    options = chosen.options
    server = find_server.chosen(chosen, "chat")
    model = find_server.model(server)["id"]
    if sys.stdin.isatty():
        print(f"{model} at {server.url}; an empty line ends, /new starts over")
    tools = _tools(options.mcp) if options.mcp else None
    try:
        return _converse(server, options, tools)
    except KeyboardInterrupt:
        print()
        return 0
    finally:
        if tools is not None:
            tools.close()


def _tools(path: str) -> ToolThread:
    """The tool servers of a file; the user is told of those that are not there."""
    try:
        tools = ToolThread(path)
    except ValueError as error:
        raise errors.FatalError(f"--mcp {error}", errors.USAGE) from None
    for name, why in tools.failed().items():
        print(f"phalanx: tool server {name}: {why}", file=sys.stderr)
    return tools


def _converse(server: find_server.FoundServer, options: ChatOptions, tools: ToolThread | None) -> int:
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    while True:
        line = _ask()
        if not line:
            return 0
        if line == "/new":
            messages = list(start)
            continue
        before = len(messages)
        messages.append({"role": "user", "content": line})
        try:
            for rounds in range(MOST_ROUNDS + 1):
                offered = tools.functions() if tools is not None and rounds < MOST_ROUNDS else []
                answer = _answer(server, options, messages, offered)
                messages.append(answer)
                if tools is None or not answer.get("tool_calls"):
                    break
                messages += [_called(tools, call, options.approve) for call in answer["tool_calls"]]
        except errors.FatalError as stop:
            if not sys.stdin.isatty():
                raise
            print(f"phalanx: {stop}", file=sys.stderr)
            del messages[before:]


def _answer(
    server: find_server.FoundServer, options: ChatOptions, messages: list[Message], tools: list[Message]
) -> Message:
    """Show the answer as it comes; it is the next message."""
    message: Message = {"role": "assistant", "content": ""}
    calls: dict[int, Message] = {}
    try:
        for delta in _stream(server, options, messages, tools):
            if thought := delta.get("reasoning_content"):
                _show(thought, faint=True)
            if text := delta.get("content"):
                message["content"] += text
                _show(text)
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = part.get("id") or call.get("id")
                for name in ("name", "arguments"):
                    call["function"][name] += part.get("function", {}).get(name) or ""
    except KeyboardInterrupt:
        sys.stdout.write(" …")  # the server stops when the connection closes
        calls = {}
    print()
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _show(text: str, faint: bool = False) -> None:
    sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if faint and sys.stdout.isatty() else text)
    sys.stdout.flush()


def _called(tools: ToolThread, call: Message, approve: bool) -> Message:
    """Make a call, where the user allows it; its result is the next message."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    _show(f"[{name} {arguments}]\n", faint=True)
    if approve and input("allow this call? [y/N] ").strip().lower() not in ("y", "yes"):
        text = DENIED
    else:
        text = tools.call(name, arguments).text
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _stream(
    server: find_server.FoundServer, options: ChatOptions, messages: list[Message], tools: list[Message]
) -> Iterator[Message]:
    """The answer's pieces. `tools: []` leaves out those of the server's tool servers: nobody here could call them."""
    body: dict[str, Any] = {"messages": messages, "stream": True, "tools": tools}
    for name in ("temperature", "top_p", "top_k", "max_tokens"):
        if (value := getattr(options, name)) is not None:
            body[name] = value
    if options.thinking is not None:
        body["enable_thinking"] = options.thinking
    with find_server.request(server, "/v1/chat/completions", body) as answer:
        for line in answer:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise errors.FatalError(event["error"]["message"], errors.ERROR)
            for choice in event["choices"]:
                yield choice["delta"]
