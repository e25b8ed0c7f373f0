"""An answer's events in chats: their order in streams, and where stop strings are looked for."""

import json

import pytest

from ...fields import each
from .conftest import make_model

pytestmark = pytest.mark.timeout(30)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{{"name": "f", "arguments": {{"x": {}}}}}\n</tool_call>'


def order(events):
    """A stream's deltas in one line: kinds with their text, calls with their indices."""
    found = []
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        for kind in ("reasoning_content", "content"):
            if delta.get(kind):
                found.append([kind, delta[kind]])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            found.append([call["index"], function.get("name", "") + function["arguments"]])
    merged = [found[0]]
    for kind, text in found[1:]:
        if kind == merged[-1][0]:
            merged[-1][1] += text
        else:
            merged.append([kind, text])
    return merged


@pytest.mark.parametrize("per_delta", [1, 7, 100])
def test_text_and_calls_keep_their_order(fresh_server, per_delta):
    fresh_server.scheduler.per_delta = per_delta
    one, two, three = (CALL.format(i) for i in (1, 2, 3))
    fresh_server.scheduler.answer = f"<think>\nhm\n</think>\n\nOne\n{one}\ntwo\n{two}{three}\nthree"
    body = {"messages": "hi", "tools": [TOOL]}
    events = fresh_server.events("chat/completions", **body)
    assert order(events) == [
        ["reasoning_content", "hm"],
        ["content", "One"],
        [0, 'f{"x": 1}'],
        ["content", "\ntwo"],
        [1, 'f{"x": 2}'],
        [2, 'f{"x": 3}'],
        ["content", "\nthree"],
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    message = fresh_server.post("chat/completions", **body).body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("One\ntwo\nthree", "hm")
    assert each(message["tool_calls"], "function") == [{"name": "f", "arguments": f'{{"x": {i}}}'} for i in (1, 2, 3)]


@pytest.mark.parametrize("stop, content", [("\n", "one"), ("w", "one\nt"), ("hm", "one\ntwo"), ("</think>", "")])
def test_stop_strings_belong_to_the_content(fresh_server, stop, content):
    fresh_server.scheduler.answer = "<think>\nhm\nhm\n</think>\n\none\ntwo"
    choice = fresh_server.post("chat/completions", messages="hi", stop=stop).body["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (content, "hm\nhm")
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (None if stop == "hm" else stop)


def test_a_stop_string_in_what_was_held_back(fresh_server):
    fresh_server.scheduler.answer = "one <"  # which might have become a marker
    choice = fresh_server.post("chat/completions", messages="hi", stop="<").body["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("one ", "<")


def test_a_call_in_thoughts_that_were_not_closed(fresh_server):
    fresh_server.scheduler.answer = f"<think>\nhm\n{CALL.format(1)}"
    choice = fresh_server.post("chat/completions", messages="hi", tools=[TOOL]).body["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1
    choice = fresh_server.post("chat/completions", messages="hi").body["choices"][0]  # no tools, no calls
    assert choice["finish_reason"] == "stop" and choice["message"]["reasoning_content"].endswith("</tool_call>")


@pytest.mark.parametrize("per_delta", [1, 100])
@pytest.mark.parametrize(
    ("answer", "thought", "calls"),
    [
        (f"<think>\nhm\n{CALL.format(1)}\n</think>", "hm", 1),
        (f"<think>\nhm\n{CALL.format(1)}</think>\n\n", "hm", 1),
        (f"<think>\nhm\n{CALL.format(1)}\n{CALL.format(2)}\n</think>\n", "hm", 2),
        (f"<think>{CALL.format(1)}</think>", None, 1),
    ],
    ids=["closed", "white space behind", "two calls", "nothing but a call"],
)
def test_a_call_that_its_thoughts_were_closed_behind(fresh_server, answer, thought, calls, per_delta):
    fresh_server.scheduler.answer, fresh_server.scheduler.per_delta = answer, per_delta
    body = {"messages": "hi", "tools": [TOOL]}
    choice = fresh_server.post("chat/completions", **body).body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == (thought, None)
    expected = [{"name": "f", "arguments": f'{{"x": {i + 1}}}'} for i in range(calls)]
    assert each(choice["message"]["tool_calls"], "function") == expected
    events = fresh_server.events("chat/completions", **body)
    thoughts = [["reasoning_content", thought]] if thought else []
    assert order(events) == [*thoughts, *[[i, f'f{{"x": {i + 1}}}'] for i in range(calls)]]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + [
        "tool_calls"
    ]


@pytest.mark.parametrize("per_delta", [1, 100])
def test_a_draft_that_its_thoughts_were_closed_behind(fresh_server, per_delta):
    fresh_server.scheduler.answer, fresh_server.scheduler.per_delta = (
        f"<think>\n{CALL.format(1)}\n</think>\n\nDone.",
        per_delta,
    )
    body = {"messages": "hi", "tools": [TOOL]}
    choice = fresh_server.post("chat/completions", **body).body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Done.")
    assert choice["message"]["reasoning_content"] == CALL.format(1)
    assert not choice["message"].get("tool_calls")
    events = fresh_server.events("chat/completions", **body)
    assert order(events) == [["reasoning_content", CALL.format(1)], ["content", "Done."]]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_markers_that_are_special_tokens_reach_the_parser(start_server, tmp_path):
    model = make_model(tmp_path / "mistral", "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}")
    data = json.loads((model / "tokenizer.json").read_text())
    token = data["added_tokens"][0]
    size = len(data["model"]["vocab"])
    markers = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    data["added_tokens"] += [{**token, "id": size + i, "content": marker} for i, marker in enumerate(markers)]
    (model / "tokenizer.json").write_text(json.dumps(data))
    server = start_server(model=model)
    parts = (markers[0], "f", markers[1], "abc123XYZ", markers[2], '{"x": 1}', "\nhello")
    server.scheduler.tokens = [token for part in parts for token in server.engine.text.tokenizer.encode(part, False)]
    message = server.post("chat/completions", messages="hi", tools=[TOOL]).body["choices"][0]["message"]
    assert message["content"] == "hello" and message["tool_calls"] == [
        {"id": "abc123XYZ", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]
