"""How well documents fit a query: reranking as Jina's and Cohere's APIs have it, scores as vLLM's."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any, ClassVar

from .. import unsupported
from ..api_error import bad
from ..decoding import Body, show
from ..relevance import scores
from ..schema import MAX_SEQUENCES, check_ranges
from .routes import Call, Route


class Scored(Body, kw_only=True):
    """What both requests have."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.RERANK

    model: str | None = None
    instruction: str | None = None
    user: str | None = None
    priority: int | None = None

    def pairs(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def characters(self) -> int:
        return sum(len(query) + len(document) for query, document in self.pairs())

    def sequences(self) -> int:
        return len(self.pairs())

    def limit(self) -> int | None:
        return 1

    def check(self) -> None:
        check_ranges(self)
        if (count := len(self.pairs())) > MAX_SEQUENCES // 2:
            raise bad("documents", f"{count} pairs of texts: at most {MAX_SEQUENCES // 2} are allowed in a request")


class RerankRequest(Scored, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one["text"] for one in self.documents]

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.texts()]

    def check(self) -> None:
        if not self.documents:
            raise bad("documents", "documents is an empty list: give at least one")
        for i, one in enumerate(self.documents):
            if isinstance(one, dict) and not isinstance(one.get("text"), str):
                raise bad(
                    f"documents[{i}]", f'documents[{i}] is {show(one)}: expected a text, or an object with "text"'
                )
        if self.top_n is not None and self.top_n < 1:
            raise bad("top_n", f"top_n is {self.top_n}: it must be at least 1")
        super().check()


class ScoreRequest(Scored, kw_only=True):
    """POST /v1/score."""

    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    def check(self) -> None:
        first, second = (1 if isinstance(one, str) else len(one) for one in (self.text_1, self.text_2))
        if not second or first not in (1, second):
            raise bad(
                "text_1", f"text_1 has {first} texts and text_2 {second}: give one for all of text_2, or one for each"
            )
        super().check()


async def _scores(call: Call) -> tuple[list[float], dict[str, int]]:
    if call.server is None:
        found, tokens = await scores(call.engine, call.request, lambda *_: None, lambda _: None, call.release)
    else:
        metrics = call.server.metrics
        ended = partial(metrics.embedding, time.monotonic())
        over = partial(metrics.session, gone=False)
        found, tokens = await scores(call.engine, call.request, ended, over, call.release)
    call.count(tokens)
    return found, {"prompt_tokens": tokens, "total_tokens": tokens}


async def rerank(call: Call) -> dict[str, Any]:
    """Documents in the order in which they fit a query, with their scores."""
    request: RerankRequest = call.request
    found, usage = await _scores(call)
    results: list[dict[str, Any]] = []
    texts = request.texts()
    for index in sorted(range(len(found)), key=lambda index: -found[index])[: request.top_n]:
        results.append({"index": index, "relevance_score": found[index]})
        if request.return_documents is not False:
            results[-1]["document"] = {"text": texts[index]}
    return {"id": f"rerank-{uuid.uuid4().hex[:24]}", "model": call.engine.names[0], "results": results, "usage": usage}


async def score(call: Call) -> dict[str, Any]:
    """How well pairs of texts fit each other."""
    found, usage = await _scores(call)
    return {
        "id": f"score-{uuid.uuid4().hex[:24]}",
        "object": "list",
        "created": int(time.time()),
        "model": call.engine.names[0],
        "data": [{"index": i, "object": "score", "score": one} for i, one in enumerate(found)],
        "usage": usage,
    }


ROUTES = [
    Route("/v1/rerank", rerank, RerankRequest, also=("/rerank", "/v2/rerank"), batchable=True),
    Route("/v1/score", score, ScoreRequest, also=("/score",), batchable=True),
]
