"""Custom tools in chats and responses, by OpenAI's own client where it knows the shape."""

import json

import pytest
from phalanx.rank.server import hosted_tools

from ....late import Late

openai = Late("openai")

pytestmark = pytest.mark.timeout(30)
SQL = {"type": "custom", "custom": {"name": "sql", "description": "Runs SQL."}}
DIGITS = {"syntax": "regex", "definition": "[0-9]+|none"}
LARK = {"syntax": "lark", "definition": "start: /[a-z]+/"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT \\"a\\";\\n"}}\n</tool_call>'
INPUT = 'SELECT "a";\n'


@pytest.fixture(scope="module")
def server(make_server):
    return make_server({"per_delta": 3, "answer": CALL})


@pytest.fixture
def client(server):
    server.scheduler.requests.clear()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as client:
        yield client


def chat(client, **more):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **more)


def test_a_chat(server, client):
    answer = chat(client, tools=[SQL, FUNCTION])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "sql", INPUT) and call.id
    assert answer.choices[0].finish_reason == "tool_calls"
    assert '"name": "sql"' in server.asked
    assert '"input": {"type": "string"' in server.asked
    history = [
        {"role": "user", "content": "hi"},
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "1 row"},
    ]
    assert client.chat.completions.create(model="m", messages=history, tools=[SQL]).choices
    assert "1 row" in server.asked


def test_a_chat_streamed(server):
    calls = [
        call
        for event in server.events("chat/completions", messages="hi", tools=[SQL])
        if event != "[DONE]"
        for choice in event.get("choices", [])
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "sql", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls[1:]) == INPUT and len(calls) > 2


def test_a_response(client, server):
    tool = {"type": "custom", "name": "sql", "description": "Runs SQL."}
    response = client.responses.create(model="m", input="hi", tools=[tool])
    (item,) = response.output
    assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "sql", INPUT, "completed")
    assert item.id.startswith("ctc_")
    assert item.call_id
    assert response.tools[0].type == "custom"
    events = list(client.responses.create(model="m", input="hi", tools=[tool], stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    done = next(event for event in events if event.type.endswith("input.done"))
    deltas = [event for event in events if event.type.endswith("input.delta")]
    assert done.input == "".join(event.delta for event in deltas) == INPUT and deltas[0].item_id == done.item_id
    history = [
        {"role": "user", "content": "hi"},
        item.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "1 row"},
    ]
    assert client.responses.create(model="m", input=history, tools=[tool]).status == "completed"
    assert "1 row" in server.asked


def test_tool_choice(client, server):
    named = {"type": "custom", "custom": {"name": "sql"}}
    chat(client, tools=[SQL, FUNCTION], tool_choice=named)
    assert "sql" in server.scheduler.requests[-1].grammar and '\\"f\\"' not in server.scheduler.requests[-1].grammar
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    chat(client, tools=[SQL, FUNCTION], tool_choice=allowed)
    assert "sql" in server.scheduler.requests[-1].grammar and '"name": "f"' not in server.asked
    flat = [{"type": "custom", "name": "sql"}, {"type": "function", "name": "f"}]
    for choice in (flat[0], {"type": "allowed_tools", "mode": "required", "tools": flat[:1]}):
        client.responses.create(model="m", input="hi", tools=flat, tool_choice=choice)
        assert "sql" in server.scheduler.requests[-1].grammar and '\\"f\\"' not in server.scheduler.requests[-1].grammar


def test_a_grammar(client, server):
    tool = {"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": DIGITS}}}
    chat(client, tools=[tool])
    parts = json.loads(server.scheduler.requests[-1].grammar)["grammars"]
    assert parts[-1]["json_schema"]["properties"]["input"]["pattern"] == "^([0-9]+|none)$"
    assert "regex grammar" in server.asked
    client.responses.create(
        model="m", input="hi", tools=[{"type": "custom", "name": "sql", "format": {"type": "grammar", **DIGITS}}]
    )
    assert json.loads(server.scheduler.requests[-1].grammar)["grammars"] == parts


def test_a_lark_grammar_where_texts_are_json(client, server, caplog):
    """It cannot be enforced there. Codex sends one to every model: the model is shown it, and the log tells."""
    hosted_tools.log_left_out.cache_clear()
    caplog.set_level("INFO")
    chat(client, tools=[{"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": LARK}}}])
    asked = server.scheduler.requests[-1]
    assert "lark grammar" in server.asked and LARK["definition"] not in asked.grammar
    assert sum("lark" in one.message for one in caplog.records) == 1


REFUSED = [
    ({"name": "sql", "format": {"type": "grammar", "grammar": {**LARK, "definition": "("}}}, "tools", "no grammar"),
    ({"name": "sql", "format": {"type": "grammar", "grammar": {**DIGITS, "definition": "["}}}, "tools", "enforced"),
    ({"name": "sql", "format": {"type": "grammar", "grammar": {**LARK, "syntax": "ebnf"}}}, None, "lark or regex"),
    ({"name": "sql", "format": {"type": "grammar"}}, None, "grammar is missing"),
    ({"name": "sql", "format": {"type": "json"}}, None, "expected text or grammar"),
    ({}, "tools[0].custom.name", "tools[0].custom.name is missing"),
]


def test_what_is_refused(server):
    for custom, param, words in REFUSED:
        answer = server.post("chat/completions", messages="hi", tools=[{"type": "custom", "custom": custom}])
        error = answer.body["error"]
        assert answer.status == 400 and words in error["message"], (custom, error)
        assert param is None or error["param"] == param
    message = {"role": "assistant", "tool_calls": [{"type": "custom", "id": "c"}]}
    answer = server.post("chat/completions", messages=[message])
    assert answer.status == 400 and answer.body["error"]["param"] == "messages[0].tool_calls[0].function"
