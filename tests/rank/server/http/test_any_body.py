"""The answer to any body is one that is documented: no 500, no hang."""

import json
import random
import sys

import msgspec
import pytest
from phalanx.rank.server.http.routes import routes

pytestmark = pytest.mark.timeout(60)
WORDS = (
    "",
    "x",
    "auto",
    "none",
    "user",
    "assistant",
    "text",
    "function",
    "message",
    "input_text",
    "enabled",
    "<|end|>",
)
KEYS = (
    "type", "text", "role", "content", "name", "function", "id", "call_id", "output", "arguments", "input", "format",
    "tool_calls", "effort", "tools", "mode", "system", "thinking", "tool_use_id", "reasoning",
)  # fmt: skip
NUMBERS = (0, 1, -1, 5, 399, 400, 10**6, 2**63, 2**70, 0.5, -0.5, 1e308)
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
GOOD = {
    "messages": ("hi", [{"role": "user", "content": "hi"}]),
    "prompt": ("hi", ["a", "b"], [1, 2]),
    "input": ("hi", ["a"], [{"role": "user", "content": "hi"}]),
    "tokens": ([1, 2, 3],),
    "max_tokens": (5,),
    "query": ("hi",),
    "documents": (["a", {"text": "b"}],),
    "text_1": ("a",),
    "text_2": ("b", ["c", "d"]),
    "items": ([{"role": "user", "content": "hi"}], [{"type": "web_search_call", "action": {"query": "a"}}]),
    "metadata": ({"a": "b"},),
}


@pytest.fixture(scope="module")
def server(make_server):
    made = make_server(response_store=4, queue_size=1 << 20)
    made.post("chat/completions", messages="hi", record_conversation=True, conversation_id="mine")
    return made


def value(draw, depth=0):
    kind = draw.randrange(8 if depth < 4 else 4)
    if kind < 2:
        return draw.choice((None, True, False, *NUMBERS))
    if kind < 4:
        return draw.choice(WORDS)
    if kind < 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.randrange(5))}


def body(draw, schema):
    found = {name: draw.choice(GOOD[name]) for name in schema.__struct_fields__ if name in GOOD}
    if {"prompt", "messages"} <= found.keys():  # /tokenize takes one of them
        del found[draw.choice(("prompt", "messages"))]
    if {"text_2", "documents"} <= found.keys():  # two names
        del found["documents"]
    for field in msgspec.structs.fields(schema):
        if draw.random() < 0.04:
            found[field.name] = value(draw)
    if isinstance(found.get("messages"), list) and draw.random() < 0.7:
        turn = {"role": draw.choice(WORDS[4:6]), "content": draw.choice(("x", value(draw, 1)))}
        found["messages"] = [
            turn,
            {"role": "user", "content": [{"type": draw.choice(WORDS), "content": value(draw, 2)}]},
        ]
    return found


# There are no files, and this server has one model.
NEVER_WELL = ("/admin/log-level", "/v1/batches", "/v1/messages/batches", "/v1/models/select")


@pytest.mark.sample(4)
@pytest.mark.parametrize("route", [route for route in routes() if route.schema], ids=lambda route: route.path)
def test_no_body_breaks_it(server, route):
    draw = random.Random(route.path)
    statuses, path = set(), route.path.format(conversation_id="mine")
    for _ in range(120):
        sent = json.dumps(body(draw, route.schema))
        answer = server.request("POST", path, sent)
        assert answer.status in (200, 400, 404), (sent, answer.body)
        assert answer.status == 200 or answer.body["error"]["message"], sent
        assert not isinstance(answer.body, bytes) or b"internal error" not in answer.body, sent
        statuses.add(answer.status)
    assert {200, 400} <= statuses or route.path in NEVER_WELL and 400 in statuses


NESTED = "an object of many levels"
# Python code that walks it needs two frames a level before Python 3.12, and the JSON reader one of the same thousand;
# later one, and the reader has a limit of its own.
LEVELS = 800 if sys.version_info < (3, 12) else 1200
USER = {"role": "user", "content": "hi"}
DEEP = {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]}
CALL = [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": NESTED}]}]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/chat/completions", {"messages": "hi", **DEEP}),
        ("/v1/chat/completions", {"messages": "hi", "chat_template_kwargs": {"a": NESTED}}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": NESTED}]}),
        ("/v1/messages", {"messages": CALL, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": CALL}),
        ("/tokenize", {"messages": "hi", **DEEP}),
        ("/apply-template", {"messages": "hi", **DEEP}),
    ],
)
def test_what_is_nested_too_deeply_for_a_prompt(server, path, sent):
    """It is within what JSON's reader takes."""
    levels = '{"items":' * LEVELS + "{}" + "}" * LEVELS
    answer = server.request("POST", path, json.dumps(sent).replace(f'"{NESTED}"', levels))
    assert answer.status == 400 and "nested too deeply" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("responses", {"text": {"format": "x"}}, "text.format"),
        ("responses", {"text": {"format": ["x"]}}, "text.format"),
        ("responses", {"tool_choice": {**ALLOWED, "tools": 5}}, "tool_choice.tools"),
        (
            "responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": {"a": 1}}},
            "tool_choice.tools",
        ),
        ("responses", {"tool_choice": {**ALLOWED, "tools": [{"name": []}]}}, "tool_choice.tools[0].name"),
        ("responses", {"tools": {"a": 1}}, "tools"),
        ("responses", {"tools": [{"type": "function", "name": []}]}, "tools[0].name"),
        ("responses", {"input": [{"type": []}]}, "input[0].type"),
        (
            "chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_wrong_kinds_of_values_within(server, path, sent, param):
    whole = {"input": "hi"} if path == "responses" else {"messages": "hi"}
    answer = server.post(path, **{**whole, **sent})
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert f"{param} is " in answer.body["error"]["message"]
