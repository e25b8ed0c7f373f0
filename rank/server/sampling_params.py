"""From a request's optional fields to the step's Sampling: defaults resolved, limits of the model checked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from .. import protocol
from .api_error import ApiError, PromptTooLong, bad
from .config import SamplingDefaults
from .decoding import show
from .schema import Common

OPENAI_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
SEED_MASK = (1 << 63) - 1


def resolve_defaults(configured: SamplingDefaults, generation: dict[str, Any]) -> dict[str, Any]:
    """Command line over the model's generation_config.json over OpenAI's; "max_tokens" and "seed" may stay None."""
    resolved = dict(OPENAI_DEFAULTS)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        if generation.get(name) is not None:
            resolved[name] = generation[name]
    resolved["max_tokens"] = generation.get("max_new_tokens")
    resolved["seed"] = None
    for name in SamplingDefaults.__struct_fields__:
        value = getattr(configured, name)
        if value is not None:
            resolved[name] = value
    return resolved


def max_tokens(request: Common, default: int | None, prompt: int, context: int) -> int:
    """How many tokens may be generated. Raises ApiError 400 with both numbers where they do not fit."""
    if prompt == 0:
        raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
    if prompt >= context:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens, but this model's context is {context} tokens, "
            "the answer included; shorten the prompt",
            request.prompt_field,
            prompt,
            context,
        )
    wanted = request.limit()
    if wanted is None:
        return min(default or context, context - prompt)
    if prompt + wanted > context and request.cut_to_context:
        return context - prompt
    if prompt + wanted > context:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, {prompt + wanted} together, "
            f"but this model's context is {context} tokens; shorten the prompt or lower max_tokens",
            "max_tokens",
            "context_length_exceeded",
        )
    return wanted


def sampling_params(
    request: Common,
    defaults: dict[str, Any],
    end_tokens: Sequence[int],
    stop_tokens: Sequence[int],
    vocab_size: int,
    limit: int,
) -> protocol.SamplingParams:
    """The parameters that all choices of a request share; `limit` is max_tokens.

    `end_tokens` are the model's own, `stop_tokens` the tokens of stop strings that are tokens.
    """
    values = {name: _or(getattr(request, name), defaults[name]) for name in OPENAI_DEFAULTS}
    if values["top_p"] == 0:  # only the most likely token, says OpenAI's documentation of 0
        values["top_p"], values["top_k"] = 1.0, 1
    values["top_k"] = max(values["top_k"], 0)
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    named = ("stop_token_ids", request.stop_token_ids or ()), ("logprob_token_ids", request.logprob_token_ids or ())
    for name, tokens in (("logit_bias", bias), *named):
        if tokens and max(tokens) >= vocab_size:
            raise bad(name, f"{name} names token {show(max(tokens))}: this model's tokens are 0 to {vocab_size - 1}")
    ends = (*(request.stop_token_ids or ()), *stop_tokens, *(() if request.ignore_eos else end_tokens))
    # The default is the seed itself, not where a sequence of seeds begins: the order in which requests arrive, or in
    # which a batch job is taken up again, must not decide what is drawn.
    seed = _or(request.seed, defaults["seed"])
    return protocol.SamplingParams(
        max_tokens=max(limit, 1),  # a prompt's log probabilities come with a token, which nobody sees
        logit_bias=bias,
        seed=random.getrandbits(63) if seed is None else seed & SEED_MASK,
        logprobs=request.likeliest(),
        prompt_logprobs=min(request.prompt_likeliest(), vocab_size),
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
        stop_token_ids=tuple(token for token in dict.fromkeys(ends) if token < vocab_size),
        min_tokens=min(request.min_tokens or 0, limit),
        **values,
    )


def _or(value, default):
    return default if value is None else value
