"""OpenAI's chat completions."""

from __future__ import annotations

import msgspec

from ..generation import chat_generation
from ..openai_format import ChatRenderer
from ..prompts import check_number, context_of
from ..schema import ChatRequest
from ..session import Session
from .routes import Call, Route


async def chat(call: Call) -> Session:
    """The answer to a conversation, whole or as server-sent events."""
    request = call.request
    if request.tools is None and call.server is not None and call.engine.takes_tools:
        request = msgspec.structs.replace(request, tools=call.server.tools.functions() or None)
    return await answer(call, request)


async def answer(call: Call, request: ChatRequest) -> Session:
    """The answer to a chat that names its tools."""
    check_number(len(request.conversation()), context_of(call.engine.ready()[1]))
    return await call.engine.generate(request, chat_generation)


ROUTES = [Route("/v1/chat/completions", chat, ChatRequest, ChatRenderer, also=("/chat/completions",), batchable=True)]
