"""Fields that are not obeyed: those that would change the answer are rejected, and no endpoint forgets one."""

import re

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.embedding_request import EmbeddingRequest
from phalanx.rank.server.hints import Hints
from phalanx.rank.server.http.messages import CountRequest, MessagesRequest
from phalanx.rank.server.responses_request import ResponsesRequest
from phalanx.rank.server.schema import ChatRequest, CompletionRequest

KINDS = [ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, MessagesRequest]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_fits_the_request(kind):
    """No field is both taken and rejected, and the advice names fields that the request has, or a chat request."""
    fields = {*kind.__struct_fields__}
    assert not fields & kind.refused.keys()
    for name, field in kind.refused.items():
        for advised, of_chat in re.findall(r"\buse (?!the )(\w+)( of /v1/chat/completions)?", field.why):
            assert advised in (ChatRequest.__struct_fields__ if of_chat else fields), name


@pytest.mark.parametrize(
    ("name", "value"),
    [("mirostat", 2), ("spaces_between_special_tokens", False), ("functions", [{}]), ("vllm_xargs", {"a": 1})],
)
def test_a_field_that_would_change_the_answer(name, value):
    with pytest.raises(ApiError) as error:
        convert({"prompt": "x", name: value}, CompletionRequest)
    assert (error.value.status, error.value.param) == (400, name) and error.value.message.startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mirostat", 0), ("mirostat", None), ("spaces_between_special_tokens", True), ("functions", []),
     ("vllm_xargs", {"a": None})],
)  # fmt: skip
def test_a_value_that_changes_nothing(name, value):
    convert({"prompt": "x", name: value}, CompletionRequest)


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
    CompletionRequest: {"include", "prediction", *TEMPLATES},  # a completion's prompt is written by the client
    ResponsesRequest: {*IGNORED, "prediction"},
    MessagesRequest: {
        *IGNORED,
        "prediction",
        *HINTS,
        "continue_final_message",
    },  # the last message is continued anyway
    CountRequest: {
        *IGNORED,
        "prediction",
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
    with pytest.raises(ApiError, match=f"enable_thinking is {str(value).lower()}.*(thinking|reasoning)"):
        convert({**body, **messages, "enable_thinking": value}, kind)
