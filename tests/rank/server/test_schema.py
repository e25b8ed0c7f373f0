"""Fields that would change the answer and are not obeyed yet, and JSON that tries to be a number too many."""

import json

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import SamplingDefaults
from phalanx.rank.server.decoding import convert, decode
from phalanx.rank.server.embedding_request import EmbeddingRequest
from phalanx.rank.server.sampling_params import resolve_defaults, sampling_params
from phalanx.rank.server.schema import ChatRequest, CompletionRequest

BASE = {ChatRequest: {"messages": "x"}, CompletionRequest: {"prompt": "x"}, EmbeddingRequest: {"input": "x"}}
CONSTRAINTS = {
    "structural_tag": "{}", "grammar": "root ::= \"a\"",
    "json_schema": {}, "regex": "a", "ebnf": "a",
    "logits_processors": ["a.b"], "functions": [{"name": "f"}], "function_call": {"name": "f"}, "n_predict": 8,
    "thinking_budget": 10, "mirostat": 2, "repeat_penalty": 1.1,
    "prompt_embeds": "AAAA", "lora": [{"id": 0, "scale": 1.0}], "vllm_xargs": {"a": 1},
    "no_repeat_ngram_size": 3, "banned_tokens": [1], "banned_strings": ["a"], "max_new_tokens": 8, "min_new_tokens": 8,
    "sampling_seed": 0, "tfs_z": 0.9, "smoothing_factor": 0.2, "lora_path": "a", "nvext": {"top_k": 1},
    "extra_body": {"top_k": 1},
}  # fmt: skip
NEUTRAL = {
    "guided_json": None, "guided_regex": None, "structured_outputs": {"json": None, "regex": None},
    "prompt_logprobs": None, "allowed_token_ids": None, "bad_words": [], "functions": [], "function_call": "none",
    "response_format": {"type": "text"}, "n_predict": -1, "mirostat": 0, "repeat_penalty": 1.0, "typical_p": 1.0,
    "vllm_xargs": {}, "lora": [],
    "no_repeat_ngram_size": 0, "banned_tokens": [], "banned_strings": "", "max_new_tokens": None, "min_new_tokens": 0,
    "sampling_seed": None, "tfs_z": 1.0, "smoothing_factor": 0, "lora_path": None, "nvext": {}, "extra_body": {},
    "include_reasoning": True, "separate_reasoning": True,
}  # fmt: skip


def refusal(kind, **fields):
    with pytest.raises(ApiError) as error:
        convert({**BASE[kind], **fields}, kind)
    assert error.value.status == 400
    assert error.value.message.startswith(str(error.value.param))
    return error.value.param


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_are_refused(kind, name):
    assert refusal(kind, **{name: CONSTRAINTS[name]}) == name


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_values_that_constrain_nothing_are_taken(kind):
    convert({**BASE[kind], **NEUTRAL, "cache_prompt": True, "store": True, "repeat_last_n": 64}, kind)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"modalities": ["text", "audio"]}),
        (ChatRequest, {"web_search_options": {}}),
        (ChatRequest, {"suffix": "x"}),
        (ChatRequest, {"separate_reasoning": False}),
        (CompletionRequest, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CompletionRequest, {"max_completion_tokens": 5}),
        (CompletionRequest, {"top_logprobs": 3}),
        (EmbeddingRequest, {"truncate_prompt_tokens": 100}),
        (EmbeddingRequest, {"truncate": "END"}),
        (EmbeddingRequest, {"extra_body": {"dimensions": 8}}),
        (EmbeddingRequest, {"input_type": "query"}),
        (EmbeddingRequest, {"embed_dtype": "float16"}),
    ],
)
def test_what_one_endpoint_would_ignore(kind, fields):
    (name,) = fields
    assert refusal(kind, **fields) == name


EMPTY = [
    {"guided_regex": ""}, {"guided_choice": []}, {"guided_grammar": ""}, {"guided_json": ""},
    {"structured_outputs": {"regex": ""}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"grammar": " "}}, {"structured_outputs": {"json": ""}},
    {"structured_outputs": {"structural_tag": ""}}, {"response_format": {"type": "structural_tag"}},
    {"response_format": {"type": "json_object", "schema": ""}},
]  # fmt: skip


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("fields", EMPTY, ids=str)
def test_an_empty_constraint_is_refused(kind, fields):
    (name,) = fields
    assert refusal(kind, **fields).split(".")[0] == name


def test_an_empty_schema_is_any_json():
    request = convert({"messages": "x", "guided_json": {}}, ChatRequest)
    assert request.constraint().field == "guided_json"


def test_white_space_of_what_is_no_json():
    assert refusal(ChatRequest, guided_whitespace_pattern=" ") == "guided_whitespace_pattern"
    spaced = {"regex": "a", "whitespace_pattern": " "}
    assert refusal(ChatRequest, structured_outputs=spaced) == "structured_outputs.whitespace_pattern"
    dense = {"choice": ["a"], "disable_any_whitespace": True}
    assert refusal(ChatRequest, structured_outputs=dense) == "structured_outputs.disable_any_whitespace"
    closed = {"json": {}, "disable_additional_properties": True}
    assert refusal(ChatRequest, structured_outputs=closed) == "structured_outputs.disable_additional_properties"


@pytest.mark.parametrize(
    "kwargs",
    [{"enable_thinking": "false"}, {"thinking": "no"}, {"web": "False"}, {"enable_thinking": {}}, {"thinking": []}],
    ids=str,
)
def test_a_switch_of_the_template_is_true_or_false(kwargs):
    (name,) = kwargs
    assert refusal(ChatRequest, chat_template_kwargs=kwargs) == f"chat_template_kwargs.{name}"


def test_the_template_and_the_answer_know_the_same_switch():
    for name in ("enable_thinking", "thinking"):
        for value in (True, False):
            request = convert({"messages": "x", "chat_template_kwargs": {name: value}}, ChatRequest)
            assert request.thinks() is value
        for more, thinks in (({}, None), ({"thinking": True}, True), ({"reasoning_effort": "none"}, False)):
            fields = {"messages": "x", "chat_template_kwargs": {name: None}, **more}
            assert convert(fields, ChatRequest).thinks() is thinks, "null is not given"
    assert convert({"messages": "x", "thinking": {"type": "auto"}}, ChatRequest).thinks() is None
    assert refusal(ChatRequest, thinking={"type": "maybe"}) == "thinking"


def test_an_integer_may_be_written_with_a_fraction_of_nothing():
    fields = {"max_tokens": 5.0, "n": 2.0, "top_k": 3.0, "stop_token_ids": [7.0, 8], "seed": 1e3, "temperature": 1.0}
    request = convert({"prompt": [[1.0, 2]], **fields}, CompletionRequest)
    assert (request.max_tokens, request.n, request.top_k, request.seed) == (5, 2, 3, 1000)
    assert request.stop_token_ids == [7, 8] and request.prompt == [[1, 2]]
    assert all(type(one) is int for one in (request.max_tokens, *request.stop_token_ids, *request.prompt[0]))
    thinking = {"type": "enabled", "budget_tokens": 64.0}
    assert convert({"messages": "x", "thinking": thinking}, ChatRequest).thinking_budget() == 64
    assert convert({"input": "x", "dimensions": 8.0}, EmbeddingRequest).dimensions == 8
    for name, value in (("max_tokens", 5.5), ("n", 1e300), ("stop_token_ids", [7.5])):
        assert refusal(CompletionRequest, **{name: value}).startswith(name)


@pytest.mark.parametrize("switches", [{"disable_any_whitespace": False}, {"json": None, "json_object": False}, {}])
def test_structured_outputs_that_are_switched_off(switches):
    convert({"messages": "x", "structured_outputs": switches}, ChatRequest)
    request = convert({"messages": "x", "structured_outputs": {**switches, "regex": "a"}}, ChatRequest)
    assert request.constraint().field == "structured_outputs.regex"


def test_an_argument_of_the_client_is_named_as_such():
    with pytest.raises(ApiError, match="openai Python"):
        convert({"messages": "x", "extra_body": {"top_k": 1}}, ChatRequest)


def test_values_that_change_nothing():
    convert({"messages": "x", "thinking": {"type": "enabled"}, "modalities": ["text"]}, ChatRequest)
    convert({"input": "x", "truncate": "NONE", "truncate_prompt_tokens": None, "logit_bias": {}}, EmbeddingRequest)


def test_a_batch_job_and_the_server_decode_alike():
    with pytest.raises(ApiError, match="guided_choice"):
        decode(json.dumps({"prompt": "x", "guided_choice": [""]}).encode(), CompletionRequest)


ODD = [
    "1" * 5000, "-" + "1" * 5000, "1" * 4299, "1" * 30, "18446744073709551616", "1e999", "NaN", "-1e308", "0", "true",
    '"\\ud800"', '"\\u0000"', '"' + "1" * 5000 + '"', "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[]",
    "[null]", "[1.5]", "[9223372036854775808]", "{}", '{"' + "9" * 5000 + '": 1}', '{"4294967296": 1}', '{"-1": 1}',
    '{"": 1}', '{"٣": 1}', '{"1": 1e308}', '{"type": []}',
]  # fmt: skip


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:12])
def test_odd_values_are_taken_or_refused(kind, value):
    """In every field: digits without end, numbers that no float holds, depth, half a surrogate pair."""
    for name in kind.__struct_fields__:
        fields = {**{key: json.dumps(one) for key, one in BASE[kind].items()}, name: value}
        body = "{" + ", ".join(f'"{key}": {one}' for key, one in fields.items()) + "}"
        try:
            request = decode(body.encode(), kind)
            if kind is not EmbeddingRequest:
                sampling_params(request, resolve_defaults(SamplingDefaults(), {}), [0], [], 400, 10)
        except ApiError as error:
            assert error.status == 400 and len(error.message) < 300


def test_a_token_id_of_many_digits():
    assert refusal(CompletionRequest, logit_bias={"1" * 5000: 1.0}) == "logit_bias"
    assert convert({"prompt": "x", "logit_bias": {"7": 1}}, CompletionRequest).logit_bias == {"7": 1.0}


def test_the_number_of_biases():
    assert refusal(CompletionRequest, logit_bias=dict.fromkeys(map(str, range((1 << 16) + 1)), 1)) == "logit_bias"


def test_parameters_of_a_tool_are_an_object():
    def tool(kind):
        return {"type": "function", "function": {"name": "go", "parameters": {"type": kind}}}

    for kind in ("string", ["array", "null"], 5, None):
        assert refusal(ChatRequest, tools=[tool(kind)]) == "tools[0].function.parameters.type"
    convert({"messages": "x", "tools": [tool("object"), tool(["object", "null"])]}, ChatRequest)


def test_a_choice_of_some_tools():
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools[1], 5, {"function": 5}]}}
    request = convert({"messages": "x", "tools": tools, "tool_choice": choice}, ChatRequest)
    assert request.offered() == [tools[1]]
    assert convert({"messages": "x", "tools": tools, "tool_choice": "none"}, ChatRequest).offered() is None
    choice["allowed_tools"]["mode"] = "required"
    assert convert({"messages": "x", "tools": tools, "tool_choice": choice}, ChatRequest).offered() == [tools[1]]
    choice["allowed_tools"]["mode"] = "maybe"
    assert refusal(ChatRequest, tools=tools, tool_choice=choice) == "tool_choice.allowed_tools"


@pytest.mark.parametrize(
    ("fields", "thinks", "effort", "shown"),
    [
        ({}, None, None, True),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, None, "low", True),
        ({"reasoning": {"enabled": False, "exclude": True}}, False, None, False),
        ({"reasoning_effort": "none"}, False, "none", True),
        ({"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}}, True, None, True),
        ({"enable_thinking": False, "thinking": True, "include_reasoning": False}, False, None, False),
    ],
)
def test_ways_to_ask_for_reasoning(fields, thinks, effort, shown):
    request = convert({"messages": "x", **fields}, ChatRequest)
    assert (request.thinks(), request.effort(), request.shows_reasoning()) == (thinks, effort, shown)


def test_an_effort_is_a_text():
    assert refusal(ChatRequest, reasoning={"effort": 5}) == "reasoning.effort"
