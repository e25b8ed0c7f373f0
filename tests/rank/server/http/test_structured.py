"""Structured output as clients ask for it: what rank 0 gets, and what is refused."""

import json
import sys

import pytest

pytestmark = pytest.mark.timeout(60)
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
STRICT = {"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}, "uniqueItems": True}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
USER = [{"role": "user", "content": "hello"}]


def grammars(fresh_server, count=1):
    """The grammars that rank 0 has got."""
    assert len(fresh_server.scheduler.requests) == count
    return [
        json.loads(request.grammar)["grammars"] if request.grammar else []
        for request in fresh_server.scheduler.requests
    ]


ASKED = [
    ({"response_format": FORM}, "json_schema", SCHEMA),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    ({"guided_regex": "[0-9]+"}, "lark_grammar", "start: /[0-9]+/"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "lark_grammar", "start: /[0-9]+/"),
    ({"guided_choice": ["yes", "no"]}, "lark_grammar", 'start: TEXT\nTEXT: "yes" | "no"'),
    ({"structured_outputs": {"choice": ["yes"]}}, "lark_grammar", 'start: TEXT\nTEXT: "yes"'),
    ({"guided_grammar": 'start: "a"+'}, "lark_grammar", 'start: "a"+'),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "lark_grammar", None),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_every_way_to_ask(fresh_server, path):
    for asked, kind, what in ASKED:
        fresh_server.scheduler.requests.clear()
        prompt = {"messages": USER} if path.startswith("chat") else {"prompt": "hello"}
        assert fresh_server.post(path, **prompt, **asked).status == 200
        ((*_, part),) = grammars(fresh_server)
        found = part[kind]
        if kind == "json_schema":
            assert "whitespace_pattern" in found.pop("x-guidance")
        assert found == what or (what is None and 'start: "a"' in found), asked


def test_what_asks_for_nothing(fresh_server):
    for asked in ({"response_format": {"type": "text"}}, {"guided_regex": None}, {"structured_outputs": {}}, {}):
        assert fresh_server.post("chat/completions", messages=USER, **asked).status == 200
    assert grammars(fresh_server, 4) == [[]] * 4 and not fresh_server.scheduler.vocabularies


def test_the_vocabulary_is_sent_once_and_before(fresh_server, tokenizer):
    fresh_server.post("completions", prompt="x")
    assert not fresh_server.scheduler.vocabularies
    for _ in range(2):
        fresh_server.post("completions", prompt=["x", "y"], guided_regex="a+", n=2)
    (vocabulary,) = fresh_server.scheduler.vocabularies
    assert vocabulary.size == fresh_server.scheduler.ready.vocab_size
    assert tokenizer.token_to_id("<|end|>") in vocabulary.ends
    assert json.loads(vocabulary.tokenizer)["model"] == json.loads(tokenizer.to_str())["model"]
    assert len({request.grammar for request in fresh_server.scheduler.requests[1:]}) == 1


def test_another_rank_0_is_told_again(fresh_server):
    fresh_server.post("completions", prompt="x", guided_regex="a+")
    fresh_server.call(fresh_server.scheduler.send, fresh_server.scheduler.ready)
    fresh_server.post("completions", prompt="x", guided_regex="a+")
    assert len(fresh_server.scheduler.vocabularies) == 2


REFUSED = [
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude each other"),
    ({"guided_regex": "a", "response_format": FORM}, "response_format.json_schema.schema", "exclude each other"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "guided_regex cannot be enforced: "),
    ({"guided_regex": "a["}, "guided_regex", "unclosed character class"),
    ({"guided_regex": "(" * 65 + ")" * 65}, "guided_regex", "65 brackets within each other: at most 64"),
    ({"guided_regex": "a" * 16385}, "guided_regex", "16385 characters: at most 16384"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "expected 1 to 4096 texts, none of them empty"),
    ({"guided_choice": ["a"] * 4097}, "guided_choice", "4097 texts"),
    ({"guided_choice": ["a" * 99999, "b" * 99999]}, "guided_choice", "199998 characters"),
    ({"guided_choice": 5}, "guided_choice", "guided_choice is 5"),
    ({"guided_grammar": "start: ("}, "guided_grammar", "cannot be enforced"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "no grammar, in Lark's notation or in GBNF"),
    ({"guided_json": "{"}, "guided_json", "guided_json is no JSON schema"),
    ({"guided_json": "[]"}, "guided_json", "expected a JSON schema, which is an object"),
    ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
    ({"response_format": STRICT}, "response_format.json_schema.schema", "not, uniqueItems are not supported"),
    ({"guided_json": {"const": 1 << 60}}, "guided_json", "const"),
    ({"guided_json": {"enum": ["x" * 300000]}}, "guided_json", "at most 262144 are allowed in a JSON schema"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "use grammar"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "cannot be enforced"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "expected an object with a schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema", "is 5"),
    ({"tools": [TOOL], "tool_choice": "required", "bad_words": ["x"]}, "bad_words", "exclude each other"),
    ({"tool_choice": "sometimes"}, "tool_choice", "expected auto, none, required"),
]


def test_what_is_refused(fresh_server):
    for asked, param, words in REFUSED:
        answer = fresh_server.post("chat/completions", messages=USER, **asked)
        error = answer.body["error"]
        assert (answer.status, error["param"]) == (400, param), (asked, error)
        assert words in error["message"], (words, error["message"])
    assert not fresh_server.scheduler.requests


def test_deep_schemas_do_no_harm(fresh_server):
    deep = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    assert fresh_server.post("completions", prompt="x", guided_json=deep).status in (200, 400)
    assert fresh_server.post("completions", prompt="x").status == 200


def test_without_llguidance(fresh_server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = fresh_server.post("completions", prompt="x", guided_regex="a")
    assert answer.status == 501 and "llguidance is not installed" in answer.body["error"]["message"]
    assert fresh_server.post("completions", prompt="x").status == 200


def test_a_grammar_that_rank_0_refuses(fresh_server):
    fresh_server.scheduler.error = (400, "the output cannot be constrained: too large")
    answer = fresh_server.post("completions", prompt="x", guided_regex="a")
    assert answer.status == 400 and "too large" in answer.body["error"]["message"]


def test_responses_and_messages_ask_for_the_same(fresh_server):
    part = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = fresh_server.post("responses", input="hi", text={"format": part})
    assert answer.status == 200 and answer.body["text"]["format"] == part
    form = {"type": "json_schema", "schema": SCHEMA}
    assert fresh_server.post("messages", messages=USER, max_tokens=5, output_config={"format": form}).status == 200
    assert fresh_server.post("messages", messages=USER, max_tokens=5, output_format=form).status == 200
    for parts in grammars(fresh_server, 3):
        assert parts[-1]["json_schema"]["properties"] == SCHEMA["properties"]


def test_tools_that_must_be_called(fresh_server):
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    for choice in ("required", named, allowed):
        assert (
            fresh_server.post("chat/completions", messages=USER, tools=[TOOL, other], tool_choice=choice).status == 200
        )
    every, one, some = [
        "".join(part.get("lark_grammar") or "" for part in parts) for parts in grammars(fresh_server, 3)
    ]
    assert '\\"f\\"' in every and '\\"g\\"' in every
    assert '\\"f\\"' in one
    assert '\\"g\\"' not in one
    assert '\\"g\\"' not in some
    fresh_server.scheduler.requests.clear()
    flat = {"type": "function", "name": "f", "parameters": SCHEMA}
    for choice in ("required", {"type": "function", "name": "f"}):
        assert fresh_server.post("responses", input="hi", tools=[flat], tool_choice=choice).status == 200
    tools = [{"name": "f", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        body = dict(messages=USER, max_tokens=5, tools=tools, tool_choice=choice)
        assert fresh_server.post("messages", **body).status == 200
    assert all(parts for parts in grammars(fresh_server, 4))
