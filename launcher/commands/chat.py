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

HELP = "talk to a running server in the terminal"
USAGE = """phalanx chat [options]: talk to a running server; an empty line or Ctrl-D ends, /new starts over

Without options it finds the server that you have started, on this host or in a job of the cluster.
"""
_GROUP = "Chat"


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
    try:
        return _converse(server, options)
    except KeyboardInterrupt:
        print()
        return 0


def _converse(server: find_server.FoundServer, options: ChatOptions) -> int:
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    while True:
        line = _ask()
        if not line:
            return 0
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for kind, text in _stream(server, options, messages):
                answer += text if kind == "content" else ""
                sys.stdout.write(text if kind == "content" or not sys.stdout.isatty() else f"\x1b[2m{text}\x1b[0m")
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" …")  # the server stops when the connection closes
        except errors.FatalError as stop:
            if not sys.stdin.isatty():
                raise
            print(f"phalanx: {stop}", file=sys.stderr)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _stream(
    server: find_server.FoundServer, options: ChatOptions, messages: list[dict[str, str]]
) -> Iterator[tuple[str, str]]:
    """The answer's pieces: ("content" or "reasoning", text)."""
    body: dict[str, Any] = {"messages": messages, "stream": True}
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
                delta = choice["delta"]
                if delta.get("reasoning_content"):
                    yield "reasoning", delta["reasoning_content"]
                if delta.get("content"):
                    yield "content", delta["content"]
