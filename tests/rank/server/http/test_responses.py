"""OpenAI's responses, mostly through OpenAI's own client."""

import json

import pytest

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
    assert response.id.startswith("resp_") and response.metadata == {"a": "b"} and response.error is None
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
    assert [event["type"] for event in events] == names
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
    with pytest.raises(openai.BadRequestError, match="only responses in the background can be cancelled"):
        responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="can be streamed again"):
        responses.retrieve(plain.id, stream=True)


def test_failures(server, responses, says):
    says("x", error=(500, "the cache is on fire"))
    with pytest.raises(openai.InternalServerError, match="the cache is on fire"):
        responses.create(model="m", input="hi")
    response = responses.create(model="m", input="hi", background=True)
    server.wait(lambda: server.link.open_sequences == 0)
    failed = responses.retrieve(response.id)
    assert (failed.status, failed.error.code, failed.error.message) == (
        "failed",
        "server_error",
        "the cache is on fire",
    )
    events = list(responses.create(model="m", input="hi", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "the cache is on fire"


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
            "this model takes text only",
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
        ({"tools": [{"type": "web_search"}]}, "tools[0]", 'only "function", "custom" and "mcp" are supported'),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
        ({"tool_choice": "required"}, "tool_choice", "it needs tools that may be called"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "expected auto, none, required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", 'text.format.type is "xml"'),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is missing"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format.schema",
            "text.format.schema cannot be enforced: the JSON schema's not is not supported",
        ),
        ({"include": ["message.output_text.logprobs"]}, "include", "it is not supported, leave it out"),
        ({"truncation": "auto"}, "truncation", "prompts are not cut"),
        ({"conversation": "x"}, "conversation", "use previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "there are no stored prompts"),
        ({"top_logprobs": 2}, "top_logprobs", "use /v1/chat/completions"),
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
    with pytest.raises(openai.BadRequestError, match="No tool call found for function call output with call_id call_x"):
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
    assert all(f"there is no response '{id}' here" in answer.body["error"]["message"] for answer in answers)
    assert server.request("GET", one, headers=first).status == 200


def test_what_came_before_counts(server, monkeypatch):
    id = server.post("responses", input="hi " * 100).body["id"]
    ids = [id]
    for _ in range(3):
        ids.append(server.post("responses", input="so?", previous_response_id=ids[-1]).body["id"])
    kept = [server.state.responses._kept[id] for id in ids]
    assert all(one.size > len(json.dumps([*one.before, *one.input, *one.body["output"]]).encode()) for one in kept)
    monkeypatch.setattr("phalanx.rank.server.response_store.MAX_BYTES", kept[-1].size)
    server.call(server.state.responses.trim)
    assert list(server.state.responses._kept) == ids[-1:]


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=x", "after=y"])
def test_wrong_queries(server, query):
    id = server.post("responses", input="hi").body["id"]
    answer = server.request("GET", f"/v1/responses/{id}/input_items?{query}")
    assert answer.status == 400 and answer.body["error"]["param"] == query.partition("=")[0]
