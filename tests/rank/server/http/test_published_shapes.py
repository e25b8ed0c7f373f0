"""Answers and events have the shapes that OpenAI and Anthropic publish: their clients' models accept each as it is."""

import importlib
import json

import pytest
from pydantic import TypeAdapter

from ....fields import each

pytestmark = pytest.mark.timeout(30)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CHAT = {"messages": "hi", "tools": [{"type": "function", "function": FUNCTION}], "logprobs": True, "top_logprobs": 2}
CHAT |= {"n": 2, "stream_options": {"include_usage": True}}
MESSAGES = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 300,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}
RESPONSES = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
KINDS = {  # chunks of completions have no model of their own
    "chat/completions": (CHAT, "openai.types.chat.ChatCompletion", "openai.types.chat.ChatCompletionChunk"),
    "completions": ({"prompt": ["hi", "x"], "logprobs": 2}, "openai.types.Completion", None),
    "messages": (MESSAGES, "anthropic.types.Message", "anthropic.types.RawMessageStreamEvent"),
    "responses": (RESPONSES, "openai.types.responses.Response", "openai.types.responses.ResponseStreamEvent"),
}


@pytest.fixture(scope="module")
def server(make_server):
    return make_server({"per_delta": 3, "answer": f"<think>\nhm\n</think>\n\nOne\n{CALL}\ntwo"})


def check(kind, value):
    module, _, name = kind.rpartition(".")
    TypeAdapter(getattr(importlib.import_module(module), name)).validate_json(json.dumps(value))


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("short", [False, True])
def test_whole_and_streamed(server, path, short):
    body, whole, event = KINDS[path]
    if short:
        body = body | {"max_output_tokens" if path == "responses" else "max_tokens": 4}
    answer = server.post(path, **body)
    assert answer.status == 200, answer.body
    check(whole, answer.body)
    lines = server.post(path, **body, stream=True).body.decode().splitlines()
    events = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert len(events) > 1
    for one in events if event is not None else ():
        check(event, json.loads(one))


def test_lists_and_small_answers(server):
    check("openai.types.CreateEmbeddingResponse", server.post("embeddings", input=["a", "b"]).body)
    check("openai.types.Model", server.request("GET", "/v1/models/tiny").body)
    check(
        "anthropic.types.MessageTokensCount", server.post("messages/count_tokens", messages=MESSAGES["messages"]).body
    )
    error = server.post("messages", messages=[], max_tokens=5)
    check("anthropic.types.ErrorResponse", error.body | {"request_id": None})
    id = server.post("responses", input="hi").body["id"]
    check("openai.types.responses.ResponseItemList", server.request("GET", f"/v1/responses/{id}/input_items").body)
    check("openai.types.responses.Response", server.request("GET", f"/v1/responses/{id}").body)


def test_conversations_models_and_counts(server):
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One"}]
    made = server.post("conversations", items=items, metadata={"a": "b"}).body
    check("openai.types.conversations.Conversation", made)
    server.post("responses", **RESPONSES, conversation=made["id"], top_logprobs=2)
    listed = server.request("GET", f"/v1/conversations/{made['id']}/items").body
    assert set(each(listed["data"], "type")) == {"message", "reasoning", "function_call"}
    check("openai.types.conversations.ConversationItemList", listed)
    check("openai.types.responses.InputTokenCountResponse", server.post("responses/input_tokens", **RESPONSES).body)
    found = server.request("GET", "/v1/models/tiny", headers={"anthropic-version": "2023-06-01"}).body
    check("anthropic.types.ModelInfo", found)
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]}
    check("openai.types.responses.Response", server.post("responses", input="hi", tools=[namespace]).body)
