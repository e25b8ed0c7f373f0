"""OpenAI's responses, mostly through OpenAI's own client."""

import json
import types

import msgspec
import pytest
from phalanx.rank.server import hosted_tools, response_store
from phalanx.rank.server.renderer import LongEvent
from phalanx.rank.server.response_store import EventLog
from phalanx.rank.server.responses_request import messages_of

from ....fields import each
from ....late import Late
from ..conftest import parse_events

openai = Late("openai")

pytestmark = pytest.mark.timeout(30)
TOOL = {"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(make_server):
    return make_server({"per_delta": 3}, response_store=4)


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as client:
        yield client.responses


@pytest.fixture
def says(server, monkeypatch):
    return lambda text, **more: [
        monkeypatch.setattr(server.scheduler, name, value) for name, value in {"answer": text, **more}.items()
    ]


def turns(*texts):
    return "".join(f"<|turn|>{text}<|end|>\n" for text in texts) + "<|turn|>assistant\n"


def test_a_text(server, responses, says):
    says("hello world")
    response = responses.create(model="m", input="hi", instructions="be brief", metadata={"a": "b"})
    assert (response.status, response.output_text, response.model) == ("completed", "hello world", "tiny")
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert response.error is None
    assert [item.type for item in response.output] == ["message"] and response.output[0].status == "completed"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)
    assert server.asked == turns("system\nbe brief", "user\nhi")


def test_sampling_as_in_chats(server, responses, says):
    says("one two")
    more = {"top_k": 3, "min_p": 0.1, "seed": 7, "stop": "two", "presence_penalty": 0.5, "logit_bias": {"3": 1}}
    response = responses.create(model="m", input="hi", temperature=0.3, top_p=0.9, extra_body=more)
    sampling = server.scheduler.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 3, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.logit_bias) == (7, 0.5, {3: 1.0})
    assert response.output_text == "one "


def test_too_short(responses, says):
    says("hello world")
    response = responses.create(model="m", input="hi", max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_items_in_their_order_whole_and_streamed(responses, says):
    says(f"<think>\nhm\n</think>\n\nOne\n{CALL}\n{CALL}")
    body = {"model": "m", "input": "hi", "tools": [TOOL], "reasoning": {"effort": "low"}}
    whole = responses.create(**body)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, call, _ = whole.output
    assert (thought.content[0].text, message.content[0].text) == ("hm", "One")
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}') and call.call_id.startswith("call_")
    with responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert (final.output_text, final.output[2].arguments) == ("One", call.arguments)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_events_on_the_wire(server, says):
    says(f"a{CALL}")
    answer = server.post("responses", input="hi", tools=[TOOL], stream=True)
    names = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    events = parse_events(b"\n\n".join(part.partition(b"\n")[2] for part in answer.body.split(b"\n\n")))
    assert each(events, "type") == names
    short = [name.removeprefix("response.") for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    assert short == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    assert events[-1]["response"]["status"] == "completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(one["id"], one["status"]) for one in added] == [(one["id"], "in_progress") for one in done]


def test_history_as_agents_send_it(server, responses, says):
    says("it rains")
    items = [
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": "so?"},
    ]
    include = ["reasoning.encrypted_content"]
    response = responses.create(model="m", input=items, store=False, include=include, tools=[TOOL], tool_choice="none")
    assert response.store is False
    assert server.asked == turns("system\ns", "user\nweather?", "assistant\nI look.", "tool\nrain", "user\nso?")
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        responses.retrieve(response.id)


def test_a_request_as_codex_sends_it(server, says):
    says("hello")
    body = {
        "model": "gpt-5-codex",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandboxed"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [{**TOOL, "name": "shell", "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
    }
    answer = server.request("POST", "/v1/responses", body, {"session_id": "1", "originator": "codex_cli_rs"})
    assert answer.status == 200 and b"event: response.completed" in answer.body
    assert server.asked.endswith("user\n<environment_context/><|end|>\n<|turn|>user\nhi<|end|>\n<|turn|>assistant\n")


GITHUB = {
    "type": "namespace", "name": "github", "description": "d",
    "tools": [{**TOOL, "name": "search", "defer_loading": True}, {"type": "custom", "name": "patch"}],
}  # fmt: skip
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client", "parameters": {}},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]


def named_call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_tools_as_codex_has_them(server, responses, says, caplog, monkeypatch):
    """Tools of OpenAI's servers are left out with a line of the log, those of namespaces are called by both names."""
    hosted_tools.log_left_out.cache_clear()
    says(named_call("github__search", '{"a": 1}') + "\n" + named_call("github__patch", '{"input": "x"}'))
    monkeypatch.setattr(server.link, "ready", msgspec.structs.replace(server.link.ready, max_model_len=2000))
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    tools = [TOOL, GITHUB, *HOSTED, {"type": "custom", "name": "apply_patch", "format": lark}]
    for _ in range(2):
        whole = responses.create(model="m", input="hi", tools=tools)
        assert "github__search" in server.asked and "apply_patch" in server.asked and "web_search" not in server.asked
    logged = [one.message for one in caplog.records if one.name.endswith("hosted_tools")]
    assert all(sum(tool["type"] in line for line in logged) == 1 for tool in HOSTED)
    called = [(one.type, one.namespace, one.name) for one in whole.output]
    assert called == [("function_call", "github", "search"), ("custom_tool_call", "github", "patch")]
    with responses.stream(model="m", input="hi", tools=tools) as stream:
        events = list(stream)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(one.type, one.namespace, one.name) for one in done] == called
    assert [event.name for event in events if event.type == "response.function_call_arguments.done"] == ["search"]


def test_a_tool_of_a_namespace_that_is_chosen(server, responses, says):
    says("x")
    tools = [TOOL, GITHUB]
    responses.create(model="m", input="hi", tools=tools, tool_choice={"type": "function", "name": "search"})
    grammar = server.scheduler.requests[-1].grammar
    assert "github__search" in grammar and "get_weather" not in grammar
    allowed = [{"type": "function", "name": "search", "namespace": "github"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    responses.create(model="m", input="hi", tools=tools, tool_choice=choice)
    assert "github__search" in server.asked and "get_weather" not in server.asked


HISTORY = [
    {"role": "user", "content": "look"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
    {"type": "function_call", "call_id": "c2", "namespace": "github", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c2", "output": "found"},
    {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {"query": "mail"}},
    {"type": "tool_search_output", "call_id": "c3", "execution": "client", "tools": [{**TOOL, "name": "send"}]},
    {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "aGVsbG8="},
    {"type": "compaction", "encrypted_content": "gAAA"},
    {"type": "additional_tools", "role": "developer", "tools": [{**TOOL, "name": "late"}]},
    {"role": "user", "content": "so?"},
]


def test_items_of_codex_are_history(server, responses, says):
    says("fine")
    response = responses.create(model="m", input=HISTORY)
    assert response.output_text == "fine"
    assert "late" in server.asked and "send" in server.asked and "gAAA" not in server.asked
    messages = messages_of(HISTORY)
    calls = [(call.function.name, call.function.arguments) for one in messages for call in one.tool_calls or ()]
    assert calls == [
        ("web_search", {"type": "search", "query": "q"}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
        ("github__search", "{}"),
        ("tool_search", {"query": "mail"}),
        ("image_generation", {}),
    ]
    results = [(one.content, one.tool_call_id) for one in messages if one.role == "tool"]
    assert results[1:4] == [("a.txt", "c1"), ("found", "c2"), ("found: send", "c3")]
    for message in messages:
        ids = {call.id for call in message.tool_calls or ()}
        assert ids <= {one.tool_call_id for one in messages if one.role == "tool"}
    kept = [item.type for item in responses.input_items.list(response.id, order="asc")]
    assert kept == [item.get("type", "message") for item in HISTORY]
    responses.create(model="m", input="go on", previous_response_id=response.id)
    assert "late" in server.asked and "a.txt" in server.asked


def text_logprobs(item):
    return [[one.token for one in part.logprobs] for part in item.content]


def test_log_probabilities_of_the_text_alone(server, responses, says):
    says(f"<think>\nhm\n</think>\n\nOne two\n{CALL}", per_delta=2)
    body = {"model": "m", "input": "hi", "tools": [TOOL], "top_logprobs": 2}
    whole = responses.create(**body)
    (tokens,) = text_logprobs(whole.output[1])
    assert "".join(tokens).strip() == "One two" and whole.top_logprobs == 2
    first = whole.output[1].content[0].logprobs[0]
    assert first.logprob == -0.5 and len(first.top_logprobs) == 2 and bytes(first.bytes).decode() == first.token
    with responses.stream(**body) as stream:
        events = list(stream)
    deltas = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert deltas == tokens == [one.token for one in done.logprobs]
    plain = responses.create(**body | {"top_logprobs": 0, "include": ["message.output_text.logprobs"]})
    assert text_logprobs(plain.output[1]) == [tokens] and plain.output[1].content[0].logprobs[0].top_logprobs == []
    assert text_logprobs(responses.create(**body | {"top_logprobs": 0}).output[1]) == [[]]


def test_log_probabilities_that_stop_texts_hold_back(responses, says):
    says("hello world, how are you?", per_delta=1)
    response = responses.create(model="m", input="hi", top_logprobs=1, extra_body={"stop": ["are we"]})
    (tokens,) = text_logprobs(response.output[0])
    assert "".join(tokens) == response.output_text == "hello world, how are you?"


def test_how_many_tokens_the_input_has(server, responses, says):
    says("x")
    body = {"model": "m", "input": "hi", "instructions": "be brief", "tools": [TOOL]}
    counted = responses.input_tokens.count(**body)
    made = responses.create(**body)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    after = {"model": "m", "input": "and?", "previous_response_id": made.id}
    assert responses.input_tokens.count(**after).input_tokens == responses.create(**after).usage.input_tokens
    answer = server.post("responses/input_tokens", input="word " * 3000)
    assert answer.status == 400 and answer.body["error"]["param"] == "input"


def test_allowed_tools(server, responses, says):
    says("x")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    responses.create(model="m", input="hi", tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice)
    assert "get_weather" in server.asked and "other" not in server.asked


def test_going_on_and_forgetting(server, responses, says):
    says("one")
    first = responses.create(model="m", input="a", instructions="not inherited")
    says("two")
    second = responses.create(model="m", input="b", previous_response_id=first.id)
    assert server.asked == turns("user\na", "assistant\none", "user\nb")
    assert responses.retrieve(second.id).output_text == "two" and second.previous_response_id == first.id
    listed = responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in listed.data] == ["b", "one"] and listed.has_more
    assert [item.content[0].text for item in listed] == ["b", "one", "a"]  # page after page
    responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="the last 4 are kept"):
        responses.retrieve(first.id)
    assert responses.create(model="m", input="c", previous_response_id=second.id).status == "completed"
    for _ in range(4):
        responses.create(model="m", input="x")
    with pytest.raises(openai.NotFoundError) as error:
        responses.create(model="m", input="d", previous_response_id=second.id)
    assert error.value.param == "previous_response_id"


def test_in_the_background(server, responses, says):
    says("hello world", hold=True)
    response = responses.create(model="m", input="hi", background=True)
    assert (response.status, response.background, response.output) == ("in_progress", True, [])
    assert responses.retrieve(response.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="is still being made"):
        responses.create(model="m", input="hi", previous_response_id=response.id)
    says("hello world", hold=False)
    events = list(responses.retrieve(response.id, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    rest = list(responses.retrieve(response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[4:]]
    done = responses.retrieve(response.id)
    assert (done.status, done.output_text) == ("completed", "hello world")
    assert responses.cancel(response.id).status == "completed"


def test_a_stream_in_the_background(responses, says):
    says("hello world")
    events = list(responses.create(model="m", input="hi", background=True, stream=True))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "hello world"


def test_cancelling(server, responses, says):
    says("x", hold=True)
    response = responses.create(model="m", input="hi", background=True)
    server.wait(lambda: server.scheduler.requests and server.link.open_sequences == 1)
    assert responses.cancel(response.id).status == "cancelled"
    assert server.link.open_sequences == 0 and server.scheduler.requests[-1].id in server.scheduler.aborted
    other = responses.create(model="m", input="hi", background=True)
    responses.delete(other.id)
    server.wait(lambda: server.link.open_sequences == 0)
    says("x", hold=False)
    plain = responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="can be streamed again"):
        responses.retrieve(plain.id, stream=True)


def test_failures(server, responses, says):
    says("x", error=(500, "on fire"))
    with pytest.raises(openai.InternalServerError, match="on fire"):
        responses.create(model="m", input="hi")
    response = responses.create(model="m", input="hi", background=True)
    server.wait(lambda: server.link.open_sequences == 0)
    failed = responses.retrieve(response.id)
    assert (failed.status, failed.error.code, failed.error.message) == (
        "failed",
        "server_error",
        "on fire",
    )
    events = list(responses.create(model="m", input="hi", stream=True))
    assert events[-1].type == "response.failed" and "on fire" in events[-1].response.error.message


def test_a_server_that_keeps_none(start_server):
    server = start_server(response_store=0)
    assert server.post("responses", input="hi").body["store"] is False
    for name in ("store", "background"):
        answer = server.post("responses", input="hi", **{name: True})
        assert answer.status == 400 and "start it with --response-store" in answer.body["error"]["message"]
    answer = server.request("GET", "/v1/responses/resp_1")
    assert answer.status == 404 and "none is kept" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", 'input is "": give a text, or at least one item'),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "expected one of message, function_call"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", 'input[0].role is "king"'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "this model takes text only",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "input[0].call_id is missing"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input[0].output[0]",
            'input[0].output[0].type is "input_file"',
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input",
            "No tool call found for function call output with call_id c.",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
                ]
            },
            "input",
            "No tool call found for custom tool call output with call_id c.",
        ),
        ({"input": [{"type": 5}]}, "input[0].type", "input[0].type is 5"),
        ({"tools": [{"type": "king"}]}, "tools[0]", 'only "function", "custom" and "mcp" are supported'),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "expected the name of the namespace"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools[0]", "function or custom"),
        (
            {"tools": [{**TOOL, "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "f"}]}]},
            "tools",
            "rename it",
        ),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input", "expected a list"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
        ({"tool_choice": "required"}, "tool_choice", "it needs tools that may be called"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "expected auto, none, required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", 'text.format.type is "xml"'),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is missing"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}, "strict": True}}},
            "text.format.schema",
            "text.format.schema cannot be enforced: the JSON schema's not is not supported",
        ),
        ({"include": ["x"]}, "include", "it is not supported, leave it out"),
        ({"truncation": "auto"}, "truncation", "prompts are not cut"),
        ({"conversation": "x"}, "conversation", "there is no conversation 'x' here"),
        ({"conversation": "x", "previous_response_id": "resp_0"}, "conversation", "exclude each other"),
        ({"prompt": {"id": "x"}}, "prompt", "there are no stored prompts"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"messages": []}, None, None),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"n": 2}, "n", "use /v1/chat/completions"),
        ({"guided_regex": "a"}, "guided_regex", "use /v1/chat/completions"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "min_tokens is 9"),
        ({"max_output_tokens": 600}, "max_output_tokens", "max_output_tokens is 600"),
        ({"max_output_tokens": 0}, "max_output_tokens", "it must be between 1"),
        ({"input": "word " * 3000}, "input", "context is 512 tokens"),
        ({"background": True, "store": False}, "background", "has to be kept"),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "there is no response 'resp_0' here"),
    ],
)
def test_refusals(server, body, param, words):
    answer = server.post("responses", **{"input": "hi", **body})
    if words is None:
        assert answer.status == 200
        return
    assert answer.status in (400, 404) and answer.body["error"]["param"] == param
    assert words in answer.body["error"]["message"]


def test_the_output_of_an_earlier_response_s_call(server, responses, says):
    says('<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>')
    response = responses.create(model="m", input="weather?", tools=[TOOL])
    (call,) = [item for item in response.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    says("it rains")
    assert responses.create(model="m", input=[output], previous_response_id=response.id).output_text == "it rains"
    with pytest.raises(openai.BadRequestError, match="call_x"):
        responses.create(model="m", input=[{**output, "call_id": "call_x"}], previous_response_id=response.id)


def test_each_key_has_its_own(start_server):
    server = start_server(response_store=4, api_keys=["a", "b"])
    first, second = ({"Authorization": f"Bearer {key}"} for key in "ab")
    id = server.request("POST", "/v1/responses", {"input": "hi"}, first).body["id"]
    one = f"/v1/responses/{id}"
    asked = [("GET", one), ("GET", f"{one}/input_items"), ("POST", f"{one}/cancel"), ("DELETE", one)]
    answers = [server.request(method, path, headers=second) for method, path in asked]
    answers.append(server.request("POST", "/v1/responses", {"input": "so?", "previous_response_id": id}, second))
    assert [answer.status for answer in answers] == [404] * 5
    assert all(f"response '{id}'" in answer.body["error"]["message"] for answer in answers)
    assert server.request("GET", one, headers=first).status == 200


def test_what_came_before_counts(server, monkeypatch):
    id = server.post("responses", input="hi " * 100).body["id"]
    ids = [id]
    for _ in range(3):
        ids.append(server.post("responses", input="so?", previous_response_id=ids[-1]).body["id"])
    store = server.state.responses._kept
    kept = [store.get(id) for id in ids]
    assert all(one.size > len(json.dumps(one.conversation, separators=(",", ":"))) for one in kept)
    monkeypatch.setattr(store, "most_bytes", kept[-1].size)
    server.call(store.trim)
    assert [id in store for id in ids] == [False, False, False, True]


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=x", "after=y"])
def test_wrong_queries(server, query):
    id = server.post("responses", input="hi").body["id"]
    answer = server.request("GET", f"/v1/responses/{id}/input_items?{query}")
    assert answer.status == 400 and answer.body["error"]["param"] == query.partition("=")[0]


def as_key(key):
    return {"Authorization": f"Bearer {key}"}


def test_one_key_s_responses_do_not_evict_another_s(start_server):
    server = start_server(response_store=8, api_keys=["a", "b"])
    ask = {"input": "hi", "max_output_tokens": 1}
    mine = [server.request("POST", "/v1/responses", ask, as_key("b")).body["id"] for _ in range(3)]
    theirs = [server.request("POST", "/v1/responses", ask, as_key("a")).body["id"] for _ in range(20)]
    assert [server.request("GET", f"/v1/responses/{id}", headers=as_key("b")).status for id in mine] == [200] * 3
    found = [server.request("GET", f"/v1/responses/{id}", headers=as_key("a")).status for id in theirs]
    assert found == [404] * 15 + [200] * 5  # and what nobody else needs is used


LONG = "x" * (1 << 19)


@pytest.mark.parametrize(
    "more",
    [
        {"user": LONG},
        {"metadata": {"a": LONG}},
        {"tools": [{**TOOL, "description": LONG}], "tool_choice": "none"},
    ],
    ids=["user", "metadata", "tools"],
)
def test_what_is_made_in_the_background_is_bounded_and_kept_once(start_server, monkeypatch, more):
    monkeypatch.setattr(response_store, "MAX_BYTES", 4 << 20)
    monkeypatch.setattr(response_store, "FLOOR_BYTES", 1 << 20)
    server = start_server(response_store=64, api_keys=["a", "b"], scheduler={"hold": True})
    body = {"input": "hi", "background": True, **more}
    answers = [server.request("POST", "/v1/responses", body, as_key("a")) for _ in range(8)]
    assert [answer.status for answer in answers] == [200] * 3 + [429] * 5  # a half of 4 MiB
    assert answers[-1].body["error"]["code"] == "busy" and answers[-1].headers["Retry-After"]
    assert server.request("POST", "/v1/responses", body, as_key("b")).status == 200
    server.wait(lambda: server.link.open_sequences == 4)  # those that were refused have none
    ids = [answer.body["id"] for answer in answers[:3]]
    server.scheduler.hold = False
    server.wait(lambda: server.link.open_sequences == 0)
    kept = [server.state.responses._kept.get(id) for id in ids]
    copies = [sum(LONG in json.dumps(part.decode(errors="replace")) for part in texts(one)) for one in kept]
    assert copies == [1] * 3 and all(one.size < 2 * len(LONG) for one in kept)
    followed = server.request("GET", f"/v1/responses/{ids[0]}?stream=true", headers=as_key("a")).body
    assert followed.count(LONG.encode()) == 3  # created, in_progress, completed
    assert server.request("POST", "/v1/responses", body, as_key("a")).status == 200


def texts(kept):
    """All that a response holds in memory, each object once."""
    seen, found = set(), []
    waiting = [kept]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, bytes):
            found.append(one)
        elif isinstance(one, str):
            found.append(one.encode())
        elif isinstance(one, msgspec.Raw):
            found.append(bytes(one))
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, response_store.Kept | response_store.EventLog):
            waiting += vars(one).values()
    return found


def test_a_response_that_grows_beyond_its_share_ends(start_server, monkeypatch):
    monkeypatch.setattr(response_store, "MAX_BYTES", 1 << 17)
    monkeypatch.setattr(response_store, "FLOOR_BYTES", 1 << 16)
    monkeypatch.setattr(response_store.zlib, "compress", lambda data, level: b"x" + data)
    server = start_server(response_store=4, api_keys=["a", "b"], scheduler={"pause": 0.001})
    ask = {"input": "hi", "background": True, "ignore_eos": True}
    id = server.request("POST", "/v1/responses", ask, as_key("a")).body["id"]
    server.wait(lambda: server.link.open_sequences == 0)
    body = server.request("GET", f"/v1/responses/{id}", headers=as_key("a")).body
    assert body["status"] == "failed" and "may keep" in body["error"]["message"]
    assert server.state.responses._running_bytes.held(0) == 0


def test_events_are_read_from_any_number_on():
    log, events = EventLog(), [b"event %d" % i * 40 for i in range(500)]
    whole = LongEvent("whole", {})
    log.add([whole, *events[:1]])
    log.add(events[1:])
    log.add([whole])
    wanted = [whole, *events, whole]
    assert log.count == len(wanted) and log.size < sum(map(len, events)) / 4
    for first in (0, 1, 2, 77, 499, 500, 501, 502, 900):
        found, at = [], first
        while read := log.read(at)[0]:
            found += read
            at = log.read(at)[1]
        assert found == wanted[first:]
