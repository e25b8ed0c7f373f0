"""How well documents fit a query: reranking as Jina's and Cohere's APIs have it, scores as vLLM's."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Any, ClassVar

from .. import unsupported
from ..api_error import bad
from ..decoding import Body, show
from ..fields import ModelName, Positive, Priority, doc
from ..relevance import scores
from ..schema import MAX_SEQUENCES
from .routes import Call, Route


class Scored(Body, kw_only=True):
    """Fields that both requests share."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.RERANK

    model: ModelName | None = None
    instruction: Annotated[str | None, doc("what a reranker is told to look for; refused for other models")] = None
    user: Annotated[str | None, doc("ignored")] = None
    priority: Priority | None = None

    def pairs(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def characters(self) -> int:
        return sum(len(query) + len(document) for query, document in self.pairs())

    def sequences(self) -> int:
        return len(self.pairs())

    def limit(self) -> int | None:
        return 1

    def check(self) -> None:
        if (count := len(self.pairs())) > MAX_SEQUENCES // 2:
            raise bad("documents", f"{count} pairs of texts: at most {MAX_SEQUENCES // 2} are allowed in a request")


class RerankRequest(Scored, kw_only=True):
    """POST /v1/rerank."""

    query: Annotated[str, doc("what the documents are to fit")]
    documents: Annotated[list[str | dict[str, Any]], doc('texts, or objects with "text"')]
    top_n: Annotated[Positive | None, doc("only the best so many")] = None
    return_documents: Annotated[bool | None, doc("false leaves the texts out")] = None

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
        super().check()


class ScoreRequest(Scored, kw_only=True):
    """POST /v1/score. vLLM has two names for each of the two."""

    text_1: Annotated[str | list[str] | None, doc("a text for all of `text_2`, or one for each")] = None
    text_2: Annotated[str | list[str] | None, doc("a text or several")] = None
    queries: Annotated[str | list[str] | None, doc("another name for `text_1`")] = None
    documents: Annotated[str | list[str] | None, doc("another name for `text_2`")] = None

    def pairs(self) -> list[tuple[str, str]]:
        first, second = ([one] if isinstance(one, str) else one for one in self._texts())
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    def _texts(self) -> tuple[str | list[str], str | list[str]]:
        return (
            self._given("text_1", self.text_1, "queries", self.queries),
            self._given("text_2", self.text_2, "documents", self.documents),
        )

    @staticmethod
    def _given(name: str, one: str | list[str] | None, other: str, two: str | list[str] | None) -> str | list[str]:
        if one is None and two is None:
            raise bad(name, f"{name} is missing, and so is its other name {other}")
        if one is not None and two is not None:
            raise bad(name, f"{name} and {other} are two names for one thing: give one of them")
        found = one if two is None else two
        assert found is not None
        return found

    def check(self) -> None:
        first, second = (1 if isinstance(one, str) else len(one) for one in self._texts())
        if not second or first not in (1, second):
            name, other = (
                ("text_1" if self.queries is None else "queries"),
                ("text_2" if self.documents is None else "documents"),
            )
            raise bad(
                name, f"{name} has {first} texts and {other} {second}: give one for all of {other}, or one for each"
            )
        super().check()


async def _scores(call: Call) -> tuple[list[float], dict[str, int]]:
    if call.server is None:
        found, tokens = await scores(
            call.engine, call.request, call.owner, lambda *_: None, lambda _: None, call.release
        )
    else:
        metrics = call.server.metrics
        ended = partial(metrics.embedding, time.monotonic())
        over = partial(metrics.session, gone=False)
        found, tokens = await scores(call.engine, call.request, call.owner, ended, over, call.release)
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
    """How well two texts fit each other, for each of several."""
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
