"""Embeddings: texts or token ids become vectors. One sequence for each input; the ranks pool its hidden states."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Callable
from typing import Any

from .. import protocol
from .api_error import ApiError, bad
from .embedding_request import POOLINGS, EmbeddingRequest
from .generation import LoadedModel
from .prompts import embedding_inputs
from .text_engine import TextEngine


async def embed(
    engine: TextEngine,
    request: EmbeddingRequest,
    owner: str,
    ended: Callable[[str, list[list[int]]], None] = lambda *_: None,
    tokenised: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """OpenAI's object with the vectors of all inputs; a task that is cancelled frees its sequences. Raises ApiError.

    owner: whose it is, as Call.owner has it. `ended` gets how the sequences ended, "stop", "error" or "cancelled",
    and their tokens. `tokenised` is called once the texts are not needed any more.
    """
    prompts, pooling = await engine.prepare(request, _inputs, owner)
    engine.admit(len(prompts))
    tokenised()
    requests = [
        protocol.Request(
            engine.next_id(),
            protocol.pack_u32(tokens),
            protocol.SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling),
            request.priority or 0,
            request.cache_salt or "",
        )
        for tokens in prompts
    ]
    stream = engine.link.submit(requests)
    vectors: dict[str, bytes] = {}
    finish = "error"
    try:
        async for deltas in stream:
            for delta in deltas:
                if delta.finish == "error":
                    raise ApiError(delta.status or 500, delta.error or "the engine failed on this request")
                vectors[delta.id] = delta.embedding
        finish = "stop"
    except asyncio.CancelledError:
        finish = "cancelled"
        raise
    finally:
        stream.abort()
        ended(finish, prompts)
    data = await engine.in_pool(owner, lambda: _data([vectors[one.id] for one in requests], request))
    used = sum(map(len, prompts))
    return {
        "object": "list",
        "data": data,
        "model": engine.names[0],
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }


def _inputs(model: LoadedModel, request: EmbeddingRequest) -> tuple[list[list[int]], str]:
    """Token ids of each input, and how the model pools them."""
    pooling = request.embedding_type or model.text.pooling
    if pooling not in POOLINGS:
        raise bad(
            "embedding_type",
            f"this model pools by {pooling}, which is not supported: only {', '.join(POOLINGS)} are, "
            "which give other vectors",
        )
    return model.text.run(embedding_inputs, request, model.ready), pooling


def _data(vectors: list[bytes], request: EmbeddingRequest) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": _written(v, request)} for i, v in enumerate(vectors)]


def _written(vector: bytes, request: EmbeddingRequest) -> list[float] | str:
    values = array("f", vector)
    if request.dimensions is not None:
        if request.dimensions > len(values):
            raise bad("dimensions", f"dimensions is {request.dimensions}: this model's vectors have {len(values)}")
        values = values[: request.dimensions]  # of models trained so (Kusupati et al. 2022, arXiv 2205.13147)
    if request.normalize is not False:
        length = math.sqrt(sum(value * value for value in values)) or 1.0
        values = array("f", [value / length for value in values])
    if request.encoding_format == "base64":
        return base64.b64encode(values.tobytes()).decode()
    return values.tolist()
