"""What a user reads about a field that is not obeyed: its name, its value, why, and what to do."""

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.embedding_request import EmbeddingRequest
from phalanx.rank.server.hints import Hints
from phalanx.rank.server.http.messages import CountRequest, MessagesRequest
from phalanx.rank.server.responses_request import ResponsesRequest
from phalanx.rank.server.schema import ChatRequest, CompletionRequest

BASE = {ChatRequest: {"messages": "x"}, CompletionRequest: {"prompt": "x"}, EmbeddingRequest: {"input": "x"}}
OUTPUT = "use structured_outputs, or response_format"
REASONING = "use thinking_token_budget"
LENGTH = "prompts are not cut, shorten the prompt"
TOKENS = "it is not supported, leave it out or use logit_bias"
SAMPLER = "this way of sampling is not supported, leave it out"
SHOWN = "the reasoning comes in a field of its own, which the client may pass over: leave it out"
VECTOR = "vectors are written as 32-bit floats of little-endian byte order"
CHAT = "this is for /v1/chat/completions"
PROMPTS = {
    "prompt_embeds": "the server takes text and token ids only",
    "extra_body": "this is an argument of the openai Python client, not a field: "
    "send the fields in it beside the others",
}
COMMON = {
    **PROMPTS,
    **dict.fromkeys(("structural_tag", "grammar", "json_schema"), OUTPUT),
    **dict.fromkeys(("regex", "ebnf", "stop_regex"), OUTPUT),
    **dict.fromkeys(("banned_tokens", "banned_strings"), TOKENS),
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), TOKENS),
    "n_probs": "use logprobs",
    "return_tokens_as_token_ids": "use return_token_ids",
    **dict.fromkeys(
        ("functions", "function_call"), 'it is deprecated and not supported, use "tools" and "tool_choice"'
    ),
    **dict.fromkeys(("thinking_budget", "max_thinking_tokens"), REASONING),
    **dict.fromkeys(("thinking_budget_tokens", "reasoning_budget"), REASONING),
    **dict.fromkeys(("n_predict", "max_new_tokens"), "use max_tokens"),
    "min_new_tokens": "use min_tokens",
    "sampling_seed": "use seed",
    "repeat_penalty": "use repetition_penalty",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    **dict.fromkeys(("mirostat", "typical_p", "top_n_sigma", "dynatemp_range", "xtc_probability"), SAMPLER),
    **dict.fromkeys(("dry_multiplier", "tfs_z", "smoothing_factor"), SAMPLER),
    "vllm_xargs": "arguments of vLLM's plugins are not supported",
    "nvext": "extensions of NVIDIA's servers are not supported, use the fields of vLLM",
    **dict.fromkeys(("lora", "lora_path"), "adapters are not supported yet"),
    # fields of the other endpoints
    **dict.fromkeys(("background", "previous_response_id", "text", "max_tool_calls"), "this is for /v1/responses"),
    "truncation": LENGTH,
    "stop_sequences": "use stop",
    "max_output_tokens": "use max_tokens",
    "output_format": "use response_format",
}
REASONS = {
    ChatRequest: {
        **COMMON,
        **dict.fromkeys(("modalities", "audio"), "the answer is text"),
        "separate_reasoning": SHOWN,
        "web_search_options": "there is no web search",
        "documents": "write them into the messages",
        "suffix": "this is for models that fill in the middle",
        **dict.fromkeys(("prompt", "input"), "use messages"),
        **dict.fromkeys(("system", "instructions"), "write it into the messages"),
        "output_config": "use reasoning_effort",
    },
    CompletionRequest: {
        **COMMON,
        **dict.fromkeys(("tools", "tool_choice", "messages", "output_config"), CHAT),
        **dict.fromkeys(("conversation_id", "record_conversation"), CHAT),
        "input": "use prompt",
        **dict.fromkeys(("system", "instructions"), "write it into the prompt"),
        "max_completion_tokens": "use max_tokens",
        "top_logprobs": "use logprobs, which is a number here",
    },
    EmbeddingRequest: {
        **PROMPTS,
        "truncate_prompt_tokens": LENGTH,
        "truncate": LENGTH,
        "messages": "write the conversation as a text",
        **dict.fromkeys(
            ("input_type", "prompt_name", "instruction"), "write it into the input as the model's card says"
        ),
        **dict.fromkeys(("embed_dtype", "endianness"), VECTOR),
    },
}


def refusal(kind, name, value):
    with pytest.raises(ApiError) as error:
        convert({**BASE[kind], name: value}, kind)
    assert (error.value.status, error.value.param) == (400, name)
    return error.value.message


@pytest.mark.parametrize("kind", BASE)
def test_every_reason(kind):
    assert set(REASONS[kind]) == set(kind.refused)
    for name, why in REASONS[kind].items():
        value, shown = (False, "false") if why == SHOWN else (7, "7")
        assert refusal(kind, name, value) == f"{name} is {shown}: {why}"


# Fields of other endpoints that would not change the answer.
TEMPLATES = {
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("enable_thinking", "thinking", "reasoning", "reasoning_effort", "include_reasoning", "parallel_tool_calls"),
    "verbosity",
}
IGNORED = {"include", "store", "user", "stream_options"}
HINTS = {*Hints.__struct_fields__}
HARMLESS = {
    ChatRequest: {"include"},
    CompletionRequest: {"include", *TEMPLATES},  # a completion's prompt is written by the client
    ResponsesRequest: IGNORED,
    MessagesRequest: {
        *IGNORED,
        *HINTS,
        "continue_final_message",
    },  # the last message is continued anyway
    CountRequest: {
        *IGNORED,
        *HINTS,
        "continue_final_message",
        *MessagesRequest.__struct_fields__,
    },  # same prompt
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_fields_of_other_endpoints(kind):
    fields = {name for other in HARMLESS for name in other.__struct_fields__}
    assert fields - {*kind.__struct_fields__, *kind.refused} - HARMLESS[kind] == set()


def test_a_schema_of_a_message():
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    convert({**body, "response_format": {"type": "text"}}, MessagesRequest)
    with pytest.raises(ApiError, match="use output_config"):
        convert({**body, "response_format": {"type": "json_schema", "schema": {}}}, MessagesRequest)


@pytest.mark.parametrize(("kind", "body"), [(MessagesRequest, {"max_tokens": 5}), (ResponsesRequest, {"input": "x"})])
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_of_another_endpoint(kind, body, value):
    messages = {"messages": [{"role": "user", "content": "x"}]} if kind is MessagesRequest else {}
    with pytest.raises(ApiError, match="enable_thinking is (true|false): use (thinking|reasoning)"):
        convert({**body, **messages, "enable_thinking": value}, kind)
