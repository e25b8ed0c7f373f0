"""`phalanx chat`: its options, and its start."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from .... import errors
from ....rank.server.mcp import connection
from ... import find_server
from ...options import option_sources
from ...options.help import shown
from ...tool_thread import ToolThread
from .conversation import Conversation
from .display import Display, Live, Plain, Whole
from .loading import wait_until_ready
from .options import ChatOptions, sampling
from .prompt import Prompt
from .slash_commands import run

BASE_TOKENS = 256  # of an answer of a base model, which seldom ends one by itself
HELP = "talk to a running server in the terminal"
USAGE = """phalanx chat [options]: talk to a running server; an empty line or Ctrl-D ends, /help lists commands

With --mcp FILE the model calls tools, which run on this machine.
Without options it finds the server that you have started, on this host or in a job of the cluster.
"""


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(ChatOptions, argv, os.environ)
    if shown(chosen, USAGE):
        return 0
    options = chosen.options
    server = find_server.chosen(chosen, "chat")
    wait_until_ready(server)
    model = find_server.model(server)
    if sys.stdin.isatty():
        print(f"{model['id']} at {server.url}; an empty line ends, /help lists commands")
    tools = _tools(options.mcp) if options.mcp else None
    fields = {name: getattr(options, name) for name in sampling()}
    if options.thinking is not None:
        fields["enable_thinking"] = options.thinking
    if model.get("chat_template") is False:
        fields["max_tokens"] = fields["max_tokens"] or BASE_TOKENS
        print(
            "phalanx: this looks like a base model, as it has no chat template: it continues texts, for which there is "
            f"/v1/completions. Answers end after {fields['max_tokens']} tokens (--max-tokens)",
            file=sys.stderr,
        )
    conversation = Conversation(server, _display(options), fields, options.system, tools, options.approve)
    conversation.context = model.get("max_model_len") or 0
    prompt = Prompt()
    try:
        return _converse(conversation, prompt)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            return errors.STOPPED
        print()
        return 0
    finally:
        prompt.close()
        if tools is not None:
            tools.close()


def _display(options: ChatOptions) -> Display:
    if options.live and sys.stdout.isatty():
        return Live(options.frequency)
    return Plain() if options.stream else Whole()


def _tools(path: str) -> ToolThread:
    """The tool servers of a file; missing ones are reported to the user."""
    logging.getLogger(connection.__name__).setLevel(logging.ERROR)  # its warnings would stand between the answers
    try:
        tools = ToolThread(path)
    except ValueError as error:
        raise errors.FatalError(f"--mcp {error}", errors.USAGE) from None
    for name, why in tools.failed().items():
        print(f"phalanx: tool server {name}: {why}", file=sys.stderr)
    return tools


def _converse(conversation: Conversation, prompt: Prompt) -> int:
    """Until the user ends it. Raises FatalError where no person is there to try again."""
    while True:
        try:
            line = prompt.ask()
            if line is None or (not line and sys.stdin.isatty()):
                return 0
            if not line:
                continue  # of a file or pipe, where a blank line is no wish to end
            if not line.startswith("/"):
                conversation.say(line)
            elif not run(conversation, line):
                return 0
        except errors.FatalError as stop:
            if not sys.stdin.isatty():
                raise
            print(f"phalanx: {stop}", file=sys.stderr)
