"""Tool servers for clients: chats that are offered tools, responses whose calls are made here."""

import http.client
import json

import pytest
from phalanx.rank import protocol
from phalanx.rank.server.mcp import rounds

from ....fields import each
from ....late import Late
from ...mcp_servers import STDIO, free_port, written
from ..conftest import parse_events

openai = Late("openai")

pytestmark = pytest.mark.timeout(30)
MCP = {"type": "mcp", "server_label": "local", "require_approval": "never"}
WEATHER = {"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}}


def calls(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = calls("local_add", a=2, b=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory, make_server):
    dead = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    config = written(tmp_path_factory.mktemp("tools"), {"mcpServers": {"local": STDIO, "dead": dead}})
    ready = protocol.Ready(max_model_len=8192, vocab_size=400, kv_tokens=8192, block_size=16, max_num_seqs=4, ranks=1)
    fresh_server = make_server({"per_delta": 3, "ready": ready}, mcp_config=config)
    fresh_server.call(fresh_server.state.tools.settled(30))
    return fresh_server


@pytest.fixture
def says(server, monkeypatch):
    """Answers, one after the other; the last one again and again."""

    def say(*texts):
        left = list(texts)
        tokenizer = server.engine.text.tokenizer
        following = lambda _: tokenizer.encode(left.pop(0) if left[1:] else left[0], False)  # noqa: E731
        monkeypatch.setattr(server.scheduler, "encode", following)

    return say


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as client:
        yield client.responses


def asked(server, back=1):
    request = server.scheduler.requests[-back]
    return server.engine.text.tokenizer.decode(memoryview(request.tokens).cast("I").tolist())


def test_chats_without_tools_are_offered_those_of_the_servers(server, says):
    says(ADD)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = server.post("chat/completions", **body).body["choices"][0]
    assert "local_add" in asked(server) and "Add two numbers." in asked(server)
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], answer["finish_reason"]) == ("local_add", "tool_calls")
    for more in ({"tools": []}, {"tool_choice": "none"}):
        server.post("chat/completions", **body, **more)
        assert "local_add" not in asked(server)
    server.post("messages", max_tokens=5, **body)
    assert "local_add" not in asked(server)


def test_the_servers_are_listed_and_a_dead_one_is_named(server):
    listed = server.request("GET", "/v1/mcp/tools").body
    assert {"name": "local_add", "server": "local"}.items() <= listed["data"][0].items()
    health = server.request("GET", "/health")
    assert (health.status, health.body["status"]) == (200, "ready")
    servers = health.body["tool_servers"]
    assert servers["local"]["status"] == "ready" and servers["dead"]["status"] == "failed"
    assert "message" not in servers["dead"]  # may name addresses, and needs no key
    assert server.request("GET", "/v1/mcp/tools").body["servers"]["dead"]["message"]


def test_calls_are_made_and_the_model_goes_on(server, responses, says):
    says(f"Let me see.{ADD}", "It is 5.")
    response = responses.create(model="m", input="hi", tools=[MCP], store=True)
    listed, message, call, last = response.output
    assert [one.type for one in response.output] == ["mcp_list_tools", "message", "mcp_call", "message"]
    assert {"add", "fail"} <= {tool.name for tool in listed.tools} and listed.error is None
    assert (call.name, call.server_label, call.output, call.error) == ("add", "local", "5", None)
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    assert call.status == "completed"
    assert (last.content[0].text, response.status) == ("It is 5.", "completed")
    assert "<|turn|>tool\n5<|end|>" in asked(server)
    first, second = (len(server.scheduler.requests[-n].tokens) // 4 for n in (2, 1))
    assert response.usage.input_tokens == first + second
    says("Yes.")
    responses.create(model="m", input="sure?", tools=[MCP], previous_response_id=response.id)
    assert "<|turn|>tool\n5<|end|>" in asked(server)


def test_the_events_of_a_stream(server, says):
    says(ADD, "It is 5.")
    answer = server.post("responses", input="hi", tools=[MCP], stream=True)
    events = parse_events(b"\n\n".join(part.partition(b"\n")[2] for part in answer.body.split(b"\n\n")))
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
        "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done",
        "mcp_call.completed", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["output"] == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert each(events, "sequence_number") == list(range(len(events)))


def test_a_call_that_fails_is_told_to_the_model(server, responses, says):
    says(calls("local_fail", why="no luck"), "Sorry.")
    response = responses.create(model="m", input="hi", tools=[MCP])
    call = response.output[1]
    assert call.status == "failed" and "no luck" in call.error and call.output is None
    assert "no luck" in asked(server)
    assert response.output_text == "Sorry."


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_is_asked(server, responses, says, approve):
    says(ADD)
    first = responses.create(model="m", input="hi", tools=[{**MCP, "require_approval": "always"}])
    request = first.output[-1]
    assert (request.type, request.name, first.status) == ("mcp_approval_request", "add", "completed")
    says("Well.")
    word = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}
    second = responses.create(
        model="m", input=[word], previous_response_id=first.id, tools=[{**MCP, "require_approval": "always"}]
    )
    kinds = [one.type for one in second.output]
    assert kinds == ["mcp_list_tools", *(["mcp_call"] if approve else []), "message"]
    assert ("tool\n5<|end|>" if approve else "does not allow") in asked(server)
    if approve:
        assert (second.output[1].output, second.output[1].approval_request_id) == ("5", request.id)
        responses.create(model="m", input="and?", previous_response_id=second.id, tools=[MCP])
        assert asked(server).count("tool\n5<|end|>") == 1


def test_only_allowed_tools_and_some_without_a_person(server, responses, says):
    says(calls("local_secret"), "ok")
    tool = {**MCP, "allowed_tools": ["secret", "add"], "require_approval": {"never": {"tool_names": ["secret"]}}}
    response = responses.create(model="m", input="hi", tools=[tool])
    assert [tool.name for tool in response.output[0].tools] == ["add", "secret"]
    assert response.output[1].output == "none" and "local_fail" not in asked(server)


def test_calls_of_the_client_are_left_to_it(server, responses, says):
    says(ADD + calls("get_weather", city="Paris"))
    response = responses.create(model="m", input="hi", tools=[MCP, WEATHER], store=False)
    assert [one.type for one in response.output] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == "5"


def test_the_number_of_calls_is_limited(server, responses, says):
    says(ADD)
    response = responses.create(model="m", input="hi", tools=[MCP], max_tool_calls=2)
    assert [one.type for one in response.output].count("mcp_call") == 2
    assert "local_add" not in asked(server)  # the last generation has no tools
    assert "local_add" in asked(server, back=2)


def test_results_are_bounded(server, responses, says, monkeypatch):
    monkeypatch.setattr(rounds, "MAX_TEXTS", 3)
    says(calls("local_add", a=1, b=99), calls("local_add", a=1, b=2), "I see.")
    entry = {"type": "mcp", "server_label": "local", "require_approval": "never"}
    made = [item for item in responses.create(model="m", input="hi", tools=[entry]).output if item.type == "mcp_call"]
    assert made[0].output == "100" and "left out" in (made[1].error or made[1].output)
    for background in (False, True):
        says(calls("local_add", a=1, b=99), "I see.")
        with monkeypatch.context() as patch:
            patch.setattr(server.state.live, "take", lambda key, size: size != 3)
            patch.setattr(server.state.responses._running_bytes, "take", lambda key, size: size != 3)
            response = responses.create(model="m", input="hi", tools=[entry], background=background)
            server.wait(lambda: server.link.open_sequences == 0 and len(server.state.active) == 0)
            server.wait(lambda: not any(one.running for one in server.state.responses._kept))
        made = [item for item in responses.retrieve(response.id).output if item.type == "mcp_call"]
        assert "left out" in (made[0].error or made[0].output)


def test_a_forced_call_is_forced_once(server, responses, says):
    says(ADD, "It is 5.")
    response = responses.create(model="m", input="hi", tools=[MCP], tool_choice="required")
    assert [one.type for one in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    forced, free = (server.scheduler.requests[-n].grammar for n in (2, 1))
    assert forced and not free
    dead = {**MCP, "server_label": "dead"}
    assert responses.create(model="m", input="hi", tools=[dead], tool_choice="required").output_text == "It is 5."


def test_a_server_that_is_not_there(server, responses, says):
    says("hello")
    response = responses.create(model="m", input="hi", tools=[{**MCP, "server_label": "dead"}])
    assert response.output[0].error and response.output[0].tools == [] and response.output_text == "hello"


@pytest.mark.parametrize(
    ("tool", "param", "message"),
    [
        ({"server_label": "none"}, "tools[0]", "does not speak to; it has local, dead"),
        ({"server_label": "x", "server_url": "http://a/mcp"}, "tools[0]", "http://a/mcp"),
        ({"server_label": ""}, "tools[0].server_label", "missing"),
        ({"server_label": "local", "headers": {"a": "b"}}, "tools[0].headers", "own file"),
        ({"server_label": "local", "require_approval": "maybe"}, "tools[0].require_approval", "maybe"),
        ({"server_label": "local", "allowed_tools": {"read_only": True}}, "tools[0]", "read_only"),
    ],
)
def test_what_is_wrong_is_said(server, tool, param, message):
    answer = server.post("responses", input="hi", tools=[{"type": "mcp", **tool}])
    assert answer.status == 400 and message in answer.body["error"]["message"]
    assert answer.body["error"]["param"] == param


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_tool_of_the_client_by_the_name_of_a_server_s(server, kind):
    answer = server.post("responses", input="hi", tools=[MCP, {"type": kind, "name": "local_add"}])
    assert answer.status == 400 and answer.body["error"]["param"] == "tools"
    assert "called 'local_add'" in answer.body["error"]["message"]


def test_a_word_on_no_request(server):
    word = {"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}
    answer = server.post("responses", input=[word], tools=[MCP])
    assert answer.status == 400 and "mcpr_x" in answer.body["error"]["message"]
    many = [{**word, "approval_request_id": f"mcpr_{i}"} for i in range(65)]
    answer = server.post("responses", input=many, tools=[MCP])
    assert answer.status == 400 and "at most 64" in answer.body["error"]["message"]
    answer = server.post("responses", input=[{"type": "mcp_approval_response", "approve": True}], tools=[MCP])
    assert answer.status == 400 and "approval_request_id is missing" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "local"}]},
        {"type": "mcp", "server_label": "local"},
        {"type": "mcp", "server_label": "local", "name": "add"},
    ],
)
def test_a_call_that_is_required_is_enforced_in_the_first_round(server, responses, says, choice):
    says(ADD, "five")
    before = len(server.scheduler.requests)
    response = responses.create(model="m", input="2 + 3?", tools=[MCP], tool_choice=choice)
    assert response.output_text == "five"
    first, second = server.scheduler.requests[before:]
    assert "local_add" in first.grammar
    assert second.grammar == ""
    assert ("local_slow" in first.grammar) is (not isinstance(choice, dict) or "name" not in choice)


def test_a_server_s_tool_that_is_not_there_cannot_be_chosen(server):
    choice = {"type": "mcp", "server_label": "local", "name": "none"}
    for label in ("local", "other"):
        body = {"input": "hi", "tools": [MCP], "tool_choice": {**choice, "server_label": label}}
        error = server.post("responses", **body).body["error"]
        assert error["param"] == "tool_choice" and "needs tools" in error["message"]


def test_a_client_that_leaves_during_a_call(server, says):
    says(calls("local_slow", seconds=20), "never asked")
    requests, before = len(server.scheduler.requests), server.state.used[0].requests
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    body = {"input": "hi", "tools": [MCP], "stream": True}
    connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while b"mcp_call_arguments.done" not in answer.readline():
        pass
    connection.close()
    answer.close()
    server.wait(lambda: server.state.used[0].requests > before)
    assert len(server.scheduler.requests) == requests + 1


def test_a_function_by_a_tool_s_name(server):
    tool = WEATHER | {"name": "local_add"}
    answer = server.post("responses", input="hi", tools=[MCP, tool])
    assert answer.status == 400 and "local_add" in answer.body["error"]["message"]
