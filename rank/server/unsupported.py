"""Fields of OpenAI, vLLM, llama.cpp and SGLang that would change the answer and that nothing here obeys yet.

Such a field is rejected with a clear error: an answer that breaks the client's constraint in silence is worse than
none. A field that would not change the answer (`store`, `cache_prompt`, …) is ignored like any unknown one.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

OUTPUT = "use structured_outputs, or response_format"
THINKING = "use thinking_token_budget"
_FUNCTIONS = 'it is deprecated and not supported, use "tools" and "tool_choice"'
PROMPT_LENGTH = "prompts are not cut, shorten the prompt"
_TOKENS = "it is not supported, leave it out or use logit_bias"
_SAMPLER = "this way of sampling is not supported, leave it out"
_INPUT = "the server takes text and token ids only"
_REASONING = "the reasoning comes in a field of its own, which the client may pass over: leave it out"
_ADAPTER = "adapters are not supported yet"
_BODY = "this is an argument of the openai Python client, not a field: send the fields in it beside the others"
_CHAT = "this is for /v1/chat/completions"
_ONLY_RESPONSES = "this is for /v1/responses"
_IMAGES = "images are read as the model's files say, leave it out"
_ADVICE = re.compile(r"\buse (\w+)")
_VECTOR = "vectors are written as 32-bit floats of little-endian byte order"


class Field(NamedTuple):
    why: str  # it is refused, and what to do
    neutral: tuple[Any, ...] = ()  # values that change nothing, besides null, "", [] and false
    default: bool = False  # what a switch is where it is left out: true, and false is refused


def _all(why: str, *names: str) -> dict[str, Field]:
    return {name: Field(why) for name in names}


_PROMPTS: dict[str, Field] = {
    **_all(_INPUT, "prompt_embeds"),
    "extra_body": Field(_BODY, ({},)),
    "mm_processor_kwargs": Field(_IMAGES, ({},)),
    "media_io_kwargs": Field(_IMAGES, ({},)),
}

_COMMON: dict[str, Field] = {
    **_PROMPTS,
    **_all(OUTPUT, "structural_tag", "grammar", "json_schema", "regex", "ebnf", "stop_regex"),
    **_all(_TOKENS, "logits_processors", "custom_logit_processor"),
    **_all(_TOKENS, "banned_tokens", "banned_strings"),
    "n_probs": Field("use logprobs", (0,)),
    **_all(_FUNCTIONS, "functions"),
    "function_call": Field(_FUNCTIONS, ("none", "auto")),
    **_all(THINKING, "thinking_budget", "max_thinking_tokens"),
    "thinking_budget_tokens": Field(THINKING, (-1,)),
    "reasoning_budget": Field(THINKING, (-1,)),
    "n_predict": Field("use max_tokens", (-1,)),
    **_all("use max_tokens", "max_new_tokens"),
    "min_new_tokens": Field("use min_tokens", (0,)),
    **_all("use seed", "sampling_seed"),
    "t_max_predict_ms": Field("use max_tokens", (0, -1)),
    **_all("use include_stop_str_in_output", "no_stop_trim"),
    "spaces_between_special_tokens": Field("texts are shown as the tokens spell them", (True,), default=True),
    "length_penalty": Field("it is for beam search, which is not supported", (1,)),
    "repeat_penalty": Field("use repetition_penalty", (1,)),
    "mirostat": Field(_SAMPLER, (0,)),
    "no_repeat_ngram_size": Field("use repetition_penalty or frequency_penalty", (0,)),
    "typical_p": Field(_SAMPLER, (1,)),
    "typ_p": Field(_SAMPLER, (1,)),
    **_all("samplers work in a fixed order, leave it out", "samplers"),
    "top_n_sigma": Field(_SAMPLER, (-1, 0)),
    "dynatemp_range": Field(_SAMPLER, (0,)),
    "xtc_probability": Field(_SAMPLER, (0,)),
    "dry_multiplier": Field(_SAMPLER, (0,)),
    "tfs_z": Field(_SAMPLER, (1,)),
    "smoothing_factor": Field(_SAMPLER, (0,)),
    "vllm_xargs": Field("arguments of vLLM's plugins are not supported", ({},)),
    "nvext": Field("extensions of NVIDIA's servers are not supported, use the fields of vLLM", ({},)),
    **_all(_ADAPTER, "lora", "lora_path"),
}

_RESPONSES: dict[str, Field] = {
    **_all(_ONLY_RESPONSES, "background", "conversation", "previous_response_id", "max_tool_calls"),
    "text": Field(_ONLY_RESPONSES, ({}, {"format": {"type": "text"}})),
    "truncation": Field(PROMPT_LENGTH, ("disabled",)),
}

CHAT: dict[str, Field] = {
    **_COMMON,
    **_RESPONSES,
    **_all("use messages", "prompt", "input"),
    **_all("write it into the messages", "system", "instructions"),
    **_all("use stop", "stop_sequences"),
    **_all("use max_tokens", "max_output_tokens"),
    "output_config": Field("use reasoning_effort", ({},)),
    **_all("use response_format", "output_format"),
    "modalities": Field("the answer is text", (["text"],)),
    **_all("the answer is text", "audio"),
    "separate_reasoning": Field(_REASONING, (True,), default=True),
    "stream_reasoning": Field(_REASONING, (True,), default=True),
    "reasoning_format": Field(_REASONING, ("auto", "deepseek")),
    "parse_tool_calls": Field("calls are read where tools are offered: leave the tools out", (True,), default=True),
    **_all("there is no web search", "web_search_options"),
    **_all("write them into the messages", "documents"),
    **_all("this is for models that fill in the middle", "suffix"),
}

COMPLETION: dict[str, Field] = {
    **_COMMON,
    **_RESPONSES,
    "tool_choice": Field(_CHAT, ("none", "auto")),
    **_all(_CHAT, "tools", "messages", "conversation_id", "record_conversation"),
    **_all("use prompt", "input"),
    **_all("write it into the prompt", "system", "instructions"),
    **_all("use stop", "stop_sequences"),
    **_all("use max_tokens", "max_completion_tokens", "max_output_tokens"),
    "output_config": Field(_CHAT, ({},)),
    **_all("use response_format", "output_format"),
    "top_logprobs": Field("use logprobs, which is a number here", (0,)),
}

EMBEDDING: dict[str, Field] = {
    **_PROMPTS,
    **_all(PROMPT_LENGTH, "truncate_prompt_tokens"),
    "truncate": Field(PROMPT_LENGTH, ("NONE",)),
    "truncation_side": Field(PROMPT_LENGTH, ("left",)),
    **_all("write the conversation as a text", "messages"),
    **_all("write it into the input as the model's card says", "input_type", "prompt_name", "instruction"),
    "embed_dtype": Field(_VECTOR, ("float32",)),
    "endianness": Field(_VECTOR, ("native", "little")),
}


_ELSEWHERE = "it is not supported here, use /v1/chat/completions"


def _followed(fields: dict[str, Field]) -> dict[str, Field]:
    """The fields. Where the advice of one names another that is rejected too, it becomes that one's advice, or names
    that field of /v1/chat/completions.
    """

    def followed(why: str) -> str:
        advice = _ADVICE.search(why)
        if not advice or advice[1] not in fields:
            return why
        other = fields[advice[1]].why
        return f"use {advice[1]} of /v1/chat/completions" if other == _ELSEWHERE else other

    return {name: field._replace(why=followed(field.why)) for name, field in fields.items()}


_NOT_CHAT: dict[str, Field] = {
    **_all(_ELSEWHERE, "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
    "structured_outputs": Field(_ELSEWHERE, ({},)),
    **_all(_ELSEWHERE, "logprob_token_ids", "truncate_prompt_tokens"),
    "truncation_side": Field(_ELSEWHERE, ("left",)),
    **_all(
        _ELSEWHERE,
        "logprobs",
        "prompt_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "add_special_tokens",
        "use_beam_search",
    ),
    "n": Field(_ELSEWHERE, (1,)),
    "best_of": Field(_ELSEWHERE, (1,)),
    "add_generation_prompt": Field(_ELSEWHERE, (True,), default=True),
    "include_reasoning": Field(_ELSEWHERE, (True,), default=True),
    **_all("the server's option --chat-template sets it", "chat_template"),
    **_all("this is for models that fill in the middle", "suffix"),
}

MESSAGES: dict[str, Field] = _followed(
    {
        **_COMMON,
        **_RESPONSES,
        **_NOT_CHAT,
        "top_logprobs": Field(_ELSEWHERE, (0,)),
        **_all(_ELSEWHERE, "min_p", "seed", "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos"),
        **_all(_ELSEWHERE, "min_tokens", "presence_penalty", "frequency_penalty", "cache_salt"),
        **_all(_ELSEWHERE, "include_stop_str_in_output", "allowed_token_ids", "bad_words", "thinking_token_budget"),
        "repeat_last_n": Field(_ELSEWHERE, (-1, 64)),
        "chat_template_kwargs": Field(_ELSEWHERE, ({},)),
        "skip_special_tokens": Field(_ELSEWHERE, (True,), default=True),
        "parallel_tool_calls": Field("use tool_choice with disable_parallel_tool_use", (True,), default=True),
        "enable_thinking": Field("use thinking", default=True),
        **_all("use output_config", "reasoning_effort"),
        "reasoning": Field("use thinking and output_config", ({},)),
        "response_format": Field("use output_config", ({}, {"type": "text"})),
        **_all("use messages", "prompt", "input"),
        **_all("use system", "instructions"),
        **_all("use max_tokens", "max_completion_tokens", "max_output_tokens"),
        **_all("use stop_sequences", "stop"),
        **_all(_ELSEWHERE, "conversation_id", "record_conversation", "verbosity"),
        **_all("there are no tool servers, send the tools that the client runs", "mcp_servers"),
        **_all("nothing is run here, send the tools that the client runs", "container"),
    }
)


RESPONSES: dict[str, Field] = _followed(
    {
        **_COMMON,
        **_NOT_CHAT,
        **_all(_ELSEWHERE, "continue_final_message"),
        "enable_thinking": Field("use reasoning", default=True),
        "thinking": Field("use reasoning", ({},), default=True),
        **_all("use instructions", "system"),
        **_all("use stop", "stop_sequences"),
        "output_config": Field("use reasoning and text", ({},)),
        **_all(
            "use conversation or previous_response_id, or record_conversation of /v1/chat/completions",
            *("conversation_id", "record_conversation"),
        ),
        **_all("there are no stored prompts, write it into instructions and input", "prompt"),
        **_all("this is for /v1/chat/completions: use input", "messages"),
        **_all("use max_output_tokens", "max_tokens", "max_completion_tokens"),
        **_all("use text", "response_format", "output_format", "verbosity"),
        **_all("use reasoning", "reasoning_effort"),
    }
)


RERANK: dict[str, Field] = {
    **_all(PROMPT_LENGTH, "truncate_prompt_tokens", "max_tokens_per_doc", "max_chunks_per_doc", "truncate"),
    "truncation_side": Field(PROMPT_LENGTH, ("left",)),
    **_all("only texts are compared", "rank_fields"),
}


def first(raw: dict[str, Any], fields: dict[str, Field]) -> tuple[str, str] | None:
    """The first field of a request that is not obeyed, and why."""
    for name, value in raw.items():
        if name not in fields:
            continue
        field = fields[name]
        if isinstance(value, dict):  # of structured_outputs: a switch that is off is no constraint
            value = {key: one for key, one in value.items() if one is not None and one is not False}
        if value is None or value is False and not field.default or value in ("", []) or value in field.neutral:
            continue
        return name, field.why
    return None
