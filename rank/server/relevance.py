"""How well texts fit a query: by a reranker's yes and no, or by the cosines of embeddings.

Qwen3-Reranker is a causal model that is asked whether a document fits; the score is the probability of "yes" against
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
from .api_error import ApiError, bad
from .embedding_request import EmbeddingRequest
from .embeddings import embed
from .fields import MAX_LOGPROBS
from .generation import Generation, LoadedModel
from .prompts import Prompt, check_length, context_of
from .session import Session
from .text.load import Text
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
    engine: TextEngine,
    request: Pairs,
    owner: str,
    ended: Ended,
    over: Callable[[Session], None],
    tokenised: Callable[[], None],
) -> tuple[list[float], int]:
    """A score for each query and document, and the prompts' tokens.

    owner: whose the request is, as Call.owner has it. `ended` is called for embeddings, `over` at a session's end.
    `tokenised` is called once the texts are not needed.
    """
    names = [*engine.names, *Path(engine.config.model_dir).parts[-3:]]  # the hub's cache has a name above two others
    if any("rerank" in name.lower() for name in names):
        return await _judged(engine, request, owner, over, tokenised)
    if request.instruction:
        raise bad("instruction", "instruction is for rerankers, this model compares embeddings: leave it out")
    pairs = request.pairs()
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    inputs = EmbeddingRequest(input=[*texts], model=request.model, priority=request.priority)
    body = await embed(engine, inputs, owner, ended, tokenised)
    vectors = {text: one["embedding"] for text, one in zip(texts, body["data"], strict=True)}
    cosines = await engine.in_pool(
        owner, lambda: [sum(map(mul, vectors[query], vectors[text])) for query, text in pairs]
    )
    return cosines, body["usage"]["prompt_tokens"]


async def _judged(
    engine: TextEngine, request: Pairs, owner: str, over: Callable[[Session], None], tokenised: Callable[[], None]
) -> tuple[list[float], int]:
    yes, no = await engine.in_pool(owner, lambda: engine.ready()[0].run(answer_tokens))
    if yes is None or no is None:
        raise ApiError(400, "this model is no reranker: its vocabulary has no tokens for yes and no", "model")
    with contextlib.closing(await engine.generate(request, _questions, owner)) as session:
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


def answer_tokens(text: Text) -> tuple[int | None, int | None]:
    """The tokens of yes and no."""
    return text.tokenizer.token_id("yes"), text.tokenizer.token_id("no")


def question_prompts(text: Text, pairs: list[tuple[str, str]], task: str, context: int) -> list[Prompt]:
    """The question to the model about each query and document. Raises ApiError where it is too long."""
    prompts = []
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
    return prompts


def _questions(model: LoadedModel, request: Pairs) -> Generation:
    """One token for each query and document."""
    task = request.instruction or TASK
    prompts = model.text.run(question_prompts, request.pairs(), task, context_of(model.ready))
    sampling = protocol.SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS)
    return Generation(
        prompts=prompts,
        sampling=[sampling] * len(prompts),
        parser=lambda prompt: OutputParser(),
        priority=request.priority or 0,
    )
