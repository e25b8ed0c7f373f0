"""How well texts fit a query: by a reranker's yes and no, or by the cosines of embeddings.

Qwen3-Reranker is a causal model that is asked whether a document fits; the score is the probability of "yes" beside
"no" (Zhang et al. 2025, arXiv 2506.05176, and the model's card).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from operator import mul
from pathlib import Path
from typing import Protocol

from .. import protocol
from .api_error import ApiError
from .embedding_request import EmbeddingRequest
from .embeddings import embed
from .generation import Generation, LoadedModel
from .prompts import Prompt, check_length, context_of
from .schema import MAX_LOGPROBS
from .session import Session
from .text.output_parser import OutputParser
from .text_engine import Sized, TextEngine

TASK = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
Ended = Callable[[str, list[list[int]]], None]


class Pairs(Sized, Protocol):
    """A request for scores."""

    instruction: str | None
    priority: int | None

    def pairs(self) -> list[tuple[str, str]]:
        """Queries, each with a document."""


async def scores(
    engine: TextEngine, request: Pairs, ended: Ended, over: Callable[[Session], None], tokenised: Callable[[], None]
) -> tuple[list[float], int]:
    """A score for each pair, and the prompts' tokens.

    `ended` is told of embeddings, `over` of a session's end. `tokenised` is called once the texts are not needed.
    """
    names = [*engine.names, *Path(engine.config.model_dir).parts[-3:]]  # the hub's cache has a name above two others
    if any("rerank" in name.lower() for name in names):
        return await _judged(engine, request, over, tokenised)
    pairs = request.pairs()
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    inputs = EmbeddingRequest(input=[*texts], model=request.model, priority=request.priority)
    body = await embed(engine, inputs, ended, tokenised)
    vectors = {text: one["embedding"] for text, one in zip(texts, body["data"], strict=True)}
    cosines = await engine.in_pool(lambda: [sum(map(mul, vectors[query], vectors[text])) for query, text in pairs])
    return cosines, body["usage"]["prompt_tokens"]


async def _judged(
    engine: TextEngine, request: Pairs, over: Callable[[Session], None], tokenised: Callable[[], None]
) -> tuple[list[float], int]:
    tokenizer = engine.ready()[0].tokenizer
    yes, no = (tokenizer.token_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise ApiError(400, "this model is no reranker: its vocabulary has no tokens for yes and no", "model")
    with contextlib.closing(await engine.generate(request, _questions)) as session:
        tokenised()
        found = [0.0] * len(session.choices)
        try:
            async for updates in session:
                for update in updates:
                    for entry, _ in update.logprobs:
                        likely = {token: math.exp(value) for token, value in [*entry.top, (entry.token, entry.logprob)]}
                        sure = likely.get(yes, 0.0)
                        found[update.choice.index] = sure / ((sure + likely.get(no, 0.0)) or 1.0)
        finally:
            over(session)
    return found, session.prompt_tokens


def _questions(model: LoadedModel, request: Pairs) -> Generation:
    """One token for each pair."""
    text, context = model.text, context_of(model.ready)
    prompts = []
    pairs, task = request.pairs(), request.instruction or TASK
    for one in dict.fromkeys([task, *(one for pair in pairs for one in pair)]):
        check_length(text, one, context, "documents")
    for query, document in pairs:
        asked = JUDGE.format(*(text.marker.mark(one) for one in (task, query, document)))
        tokens = text.tokenizer.encode(asked, False)
        if len(tokens) >= context:
            raise ApiError(
                400,
                f"a query and its document have {len(tokens)} tokens, but this model takes fewer than {context}; "
                "shorten them",
                "documents",
                "context_length_exceeded",
            )
        prompts.append(Prompt(tokens))
    sampling = protocol.SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS)
    return Generation(
        prompts=prompts,
        sampling=[sampling] * len(prompts),
        parser=lambda prompt: OutputParser(),
        priority=request.priority or 0,
    )
