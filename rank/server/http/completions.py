"""OpenAI's completions."""

from __future__ import annotations

from ..generation import completion_generation
from ..openai_format import TextRenderer
from ..schema import CompletionRequest
from ..session import Session
from .routes import Call, Route


async def complete(call: Call) -> Session:
    """The continuation of a text or of token ids, whole or as server-sent events."""
    return await call.engine.generate(call.request, completion_generation, call.owner)


ROUTES = [Route("/v1/completions", complete, CompletionRequest, TextRenderer, also=("/completions",), batchable=True)]
