"""OpenAI's chat completions."""

from __future__ import annotations

from ..generation import chat_generation
from ..openai_format import ChatRenderer
from ..prompts import check_number, context_of
from ..schema import ChatRequest
from ..session import Session
from .routes import Call, Route


async def chat(call: Call) -> Session:
    """The answer to a conversation, whole or as server-sent events."""
    check_number(len(call.request.conversation()), context_of(call.engine.ready()[1]))
    return await call.engine.generate(call.request, chat_generation)


ROUTES = [Route("/v1/chat/completions", chat, ChatRequest, ChatRenderer, also=("/chat/completions",), batchable=True)]
