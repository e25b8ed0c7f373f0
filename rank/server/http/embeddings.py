"""OpenAI's embeddings."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ..embedding_request import EmbeddingRequest
from ..embeddings import embed
from .routes import Call, Route


async def embeddings(call: Call) -> dict[str, Any]:
    """Vectors of texts or of token ids."""
    if call.server is None:
        return await embed(call.engine, call.request, call.owner)
    ended = partial(call.server.metrics.embedding, time.monotonic())
    answer = await embed(call.engine, call.request, call.owner, ended, call.release)
    call.count(answer["usage"]["prompt_tokens"])
    return answer


ROUTES = [Route("/v1/embeddings", embeddings, EmbeddingRequest, also=("/embeddings",), batchable=True)]
