"""Anthropic's messages, mostly through Anthropic's own client."""

import re

import msgspec
import pytest
from phalanx.rank.server import hosted_tools
from phalanx.rank.server.anthropic_format import MessageRenderer
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.http.messages import MessagesRequest, Turn

from ....fields import each
from ....late import Late
from ..conftest import parse_events

anthropic = Late("anthropic")

pytestmark = pytest.mark.timeout(30)
TOOL = {"name": "get_weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(make_server):
    return make_server({"per_delta": 3}, api_keys=["secret"])


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def says(server, monkeypatch):
    return lambda text: monkeypatch.setattr(server.scheduler, "answer", text)


def test_a_text(server, client, says):
    says("hello world")
    message = client.messages.create(
        model="claude", max_tokens=50, messages=USER, system="be brief", extra_body={"top_k": 5}
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert [block.model_dump(include={"type", "text"}) for block in message.content] == [
        {"type": "text", "text": "hello world"}
    ]
    count = client.messages.count_tokens(model="claude", messages=USER, system="be brief").input_tokens
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count and usage.cache_read_input_tokens == 3
    assert usage.output_tokens == len(server.scheduler.encode("hello world"))
    assert server.asked == "<|turn|>system\nbe brief<|end|>\n<|turn|>user\nhi<|end|>\n<|turn|>assistant\n"
    assert server.scheduler.requests[-1].sampling.top_k == 5


def test_why_it_stopped(client, says):
    says("one two three")
    message = client.messages.create(model="m", max_tokens=50, messages=USER, stop_sequences=["two"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    assert client.messages.create(model="m", max_tokens=2, messages=USER).stop_reason == "max_tokens"


def test_a_limit_beyond_the_context(server, client, says):
    """The clients ask for what Anthropic's models have."""
    says("hello")
    message = client.messages.create(model="m", max_tokens=20_000, messages=USER)
    assert message.stop_reason == "end_turn"
    sampling, prompt = server.scheduler.requests[-1].sampling, len(server.scheduler.requests[-1].tokens) // 4
    assert sampling.max_tokens == 512 - prompt
    says("hello " * 600)
    message = client.messages.create(model="m", max_tokens=20_000, messages=USER)
    assert message.stop_reason == "model_context_window_exceeded" and message.usage.output_tokens == 512 - prompt


def test_a_request_as_claude_code_sends_it(server, says):
    says("hello")
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 32000,
        "stream": True,
        "metadata": {"user_id": "user_1_account__session_2"},
        "system": [{"type": "text", "text": "You are an agent.", **ephemeral}, {"type": "text", "text": "Be short."}],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "temperature": 1,
        "tools": [{"name": "Bash", "description": "d", "input_schema": {"type": "object", "$schema": "s"}}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **ephemeral}]}],
    }
    headers = {
        "Authorization": "Bearer secret",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219",
    }
    answer = server.request("POST", "/v1/messages?beta=true", body, headers)
    assert answer.status == 200 and answer.body.rstrip().endswith(b'{"type":"message_stop"}')
    count = {name: body[name] for name in ("model", "messages", "tools", "system", "thinking")}
    assert server.request("POST", "/v1/messages/count_tokens?beta=true", count, headers).body["input_tokens"] > 20


def test_thoughts_texts_and_calls_in_their_order(client, says):
    says(f"<think>\nhm\n</think>\n\nOne\n{CALL}\n{CALL}")
    body = {"model": "m", "max_tokens": 300, "messages": USER, "tools": [TOOL]}
    message = client.messages.create(**body, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, call, _ = message.content
    assert (thought.thinking, text.text) == ("hm", "One")
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    with client.messages.stream(**body, thinking={"type": "adaptive"}) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message", "content"))]
        streamed = stream.get_final_message()
    blocks = [block.model_dump(exclude={"id"}) for block in message.content]
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == blocks
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", message.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thoughts_only_where_they_are_asked_for(server, client, says, thinking):
    """The template's switch is off, and of a model that thinks all the same the first block is its text."""
    says("<think>\nhm\n</think>\n\nOne")
    body = {"model": "m", "max_tokens": 300, "messages": USER} | ({"thinking": thinking} if thinking else {})
    assert client.messages.create(**body).content[0].text == "One"
    assert not server.asked.endswith("<think>\n")
    count = len(server.scheduler.requests[-1].tokens) // 4
    assert client.messages.count_tokens(model="m", messages=USER).input_tokens == count
    with client.messages.stream(**body) as stream:
        assert [block.text for block in stream.get_final_message().content] == ["One"]
    client.messages.create(**body | {"thinking": {"type": "adaptive"}})
    assert server.asked.endswith("<think>\n")


OWN_TOOLS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]


def test_tools_as_claude_code_has_them(server, client, says, caplog):
    """Anthropic's own are left out with a line of the log for each kind."""
    hosted_tools.log_left_out.cache_clear()
    says("fine")
    deferred = {**TOOL, "name": "get_time", "defer_loading": True}
    for _ in range(2):
        client.messages.create(model="m", max_tokens=30, messages=USER, tools=[*OWN_TOOLS, TOOL, deferred])
    assert "get_weather" in server.asked and "get_time" in server.asked and "web_search" not in server.asked
    logged = [one.message for one in caplog.records if one.name.endswith("hosted_tools")]
    assert all(sum(tool["type"] in line for line in logged) == 1 for tool in OWN_TOOLS)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(
            model="m", max_tokens=30, messages=USER, tools=OWN_TOOLS[:1], tool_choice={"type": "any"}
        )


def test_what_came_of_anthropic_s_tools_is_history(server, client, says):
    says("fine")
    found = {"type": "web_search_result", "title": "T", "url": "http://x", "encrypted_content": "gAAA"}
    references = [{"type": "tool_reference", "tool_name": "get_time"}]
    turns = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found]},
                {"type": "text", "text": "And more."},
                {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": references}]},
    ]
    client.messages.create(model="m", max_tokens=30, messages=turns)
    assert server.asked == (
        "<|turn|>user\nhi<|end|>\n<|turn|>assistant\nI look.<|end|>\n"
        '<|turn|>tool\n[{"type":"web_search_result","title":"T","url":"http://x"}]<|end|>\n'
        "<|turn|>assistant\nAnd more.<|end|>\n<|turn|>tool\nget_time<|end|>\n<|turn|>assistant\n"
    )
    request = MessagesRequest(messages=msgspec.convert(turns, list[Turn]), max_tokens=5)
    calls = [(call.function.name, call.id) for one in request.chat().messages for call in one.tool_calls or ()]
    assert calls == [("web_search", "s1"), ("ToolSearch", "t1")]


def test_the_events_on_the_wire(server, says):
    says(f"a{CALL}")
    body = {"model": "m", "max_tokens": 300, "messages": USER, "tools": [TOOL], "stream": True}
    answer = server.request("POST", "/v1/messages", body, {"X-Api-Key": "secret"})
    names = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    events = parse_events(b"\n\n".join(part.partition(b"\n")[2] for part in answer.body.split(b"\n\n")))
    assert each(events, "type") == names
    short = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", *block, *block, "message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in starts] == [(0, "text"), (1, "tool_use")]
    assert starts[1]["content_block"]["input"] == {}
    parts = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert "".join(parts) == '{"city": "Paris"}' and len(parts) > 1


def test_history_with_calls_and_results(server, client, says):
    says("it rains")
    history = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "gone"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]
    client.messages.create(model="m", max_tokens=50, messages=history, system=system)
    turns = ["system\ns1\ns2", "user\nweather?", "assistant\nI look.", "tool\nrain", "tool\nError: gone", "user\nso?"]
    assert server.asked == "".join(f"<|turn|>{turn}<|end|>\n" for turn in turns) + "<|turn|>assistant\n"


def test_a_last_message_of_the_assistant_goes_on(server, client, says):
    says("world")
    client.messages.create(model="m", max_tokens=50, messages=[*USER, {"role": "assistant", "content": "hello "}])
    assert server.asked.endswith("<|turn|>assistant\nhello ")


def test_keys_in_both_headers(server, client):
    with pytest.raises(anthropic.AuthenticationError, match="API key") as error:
        client.with_options(api_key="wrong").messages.create(model="m", max_tokens=5, messages=USER)
    assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "authentication_error"
    body = {"model": "m", "max_tokens": 5, "messages": USER}
    assert server.request("POST", "/v1/messages", body, {"Authorization": "Bearer secret"}).status == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": [{"role": "king", "content": "x"}]}, 'messages[0].role is "king"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            'messages[0].content[0].type is "image": this model takes text only',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            'messages[0].content[0].content[0].type is "image"',
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "expected one of text, thinking, redacted_thinking, tool_use",
        ),
        ({"system": [{"type": "image"}]}, 'system[0].type is "image"'),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, 'tools[0] is "web_search"'),
        ({"tools": [{"input_schema": {}}]}, "tools with a name"),
        ({"tool_choice": {"type": "any"}}, "it needs tools that may be called"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is null: expected a tool's name"),
        ({"tool_choice": {"type": "all"}}, 'tool_choice.type is "all": expected one of auto, any'),
        ({"thinking": {"type": "maybe"}}, 'thinking.type is "maybe": expected enabled, adaptive or disabled'),
        ({"output_config": {"format": {"type": "json_object"}}}, "expected json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "the JSON schema's not is not supported"),
        ({"mcp_servers": [{}]}, "there are no tool servers"),
        ({"container": "x"}, "nothing is run here"),
        ({"seed": 5}, "seed is 5: it is not supported here, use /v1/chat/completions"),
        ({"stop": "x"}, "use stop_sequences"),
        ({"stop_sequences": ["a", ""]}, 'stop_sequences is ["a",""]: a text that is not empty'),
        ({"stop_sequences": ["a"] * 65}, "at most 64"),
        ({"temperature": -1}, "temperature is -1: it must be between 0 and 100"),
        ({"thinking": {"type": 5}}, "thinking.type is 5"),
        ({"output_config": {"effort": 5}}, "output_config.effort is 5"),
    ],
)
def test_refusals(server, body, words):
    whole = {"model": "m", "max_tokens": 5, "messages": USER, **body}
    answer = server.request("POST", "/v1/messages", whole, {"X-Api-Key": "secret"})
    assert answer.status == 400 and set(answer.body) == {"type", "error"}
    assert answer.body["error"]["type"] == "invalid_request_error" and words in answer.body["error"]["message"]


def test_a_prompt_that_is_too_long(server, client):
    """Agents look for these words, and shorten the conversation then."""
    head = "<|turn|>user\n"
    exact = [{"role": "user", "content": "word " * 250}]
    count = len(server.scheduler.encode(f"{head}{exact[0]['content']}<|end|>\n<|turn|>assistant\n"))
    assert 512 <= count < 1000
    for messages, tokens in ((exact, str(count)), ([{"role": "user", "content": "word " * 3000}], r"\d{3,}")):
        with pytest.raises(anthropic.BadRequestError) as error:
            client.messages.create(model="m", max_tokens=5, messages=messages)
        message = error.value.body["error"]["message"]
        assert re.fullmatch(rf"prompt is too long: {tokens} tokens > 511 maximum", message), message


def test_the_client_knows_the_request_by_its_id(client, says):
    says("x")
    raw = client.messages.with_raw_response.create(model="m", max_tokens=5, messages=USER)
    assert raw.request_id and raw.request_id == raw.headers["x-request-id"]


def test_what_is_not_there_has_anthropic_s_shape_too(server):
    answer = server.request("POST", "/v1/messages/none", {}, {"X-Api-Key": "secret"})
    assert (answer.status, answer.body["type"], answer.body["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_choice_without_tools_is_told_in_its_own_words(server, choice):
    body = {"max_tokens": 5, "messages": USER, "tool_choice": choice}
    answer = server.request("POST", "/v1/messages", body, {"X-Api-Key": "secret"})
    assert answer.status == 400 and f'tool_choice.type is "{choice["type"]}"' in answer.body["error"]["message"]


@pytest.mark.parametrize("kind", [{}, [], 5, None, "required"])
def test_a_choice_of_no_known_type(server, kind):
    body = {"max_tokens": 5, "messages": USER, "tool_choice": {"type": kind}}
    answer = server.request("POST", "/v1/messages", body, {"X-Api-Key": "secret"})
    assert answer.status == 400 and "tool_choice.type is " in answer.body["error"]["message"]


def test_errors_of_streams(server, says, monkeypatch):
    says("hello world")
    broken = lambda change: 1 / 0  # noqa: E731
    monkeypatch.setattr("phalanx.rank.server.anthropic_format._event", broken)
    answer = server.request(
        "POST", "/v1/messages", {"max_tokens": 5, "messages": USER, "stream": True}, {"X-Api-Key": "secret"}
    )
    assert answer.status == 500 and answer.body["error"]["type"] == "api_error"
    event = MessageRenderer.error(None, ApiError(503, "gone"))
    assert event == (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"gone"}}\n\n')


BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("system", [
    lambda line: [{"type": "text", "text": line}, {"type": "text", "text": "Be brief"}],
    lambda line: [{"type": "text", "text": f"{line}\nBe brief"}],
    lambda line: f"{line}\nBe brief",
    lambda line: f"\n{line}\n{line}\nBe brief",
])  # fmt: skip
def test_billing_lines_are_no_part_of_the_prompt(server, says, system):
    """They differ from request to request, and would keep all that follows out of the prefix cache."""
    says("hi")
    prompts = []
    for number in ("0a1b", "9f"):
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
        body = {**asked, "system": system(BILLING.format(number))}
        assert server.request("POST", "/v1/messages", body, {"x-api-key": "secret"}).status == 200
        prompts.append(server.asked)
    assert prompts[0] == prompts[1] and "billing" not in prompts[0] and "system\nBe brief<" in prompts[0]


def test_a_billing_line_alone_is_no_system_message(server, says):
    says("hi")
    asked = {"messages": [{"role": "user", "content": "about x-anthropic-billing-header: x"}], "max_tokens": 9}
    body = {**asked, "system": BILLING.format("0a")}
    assert server.request("POST", "/v1/messages", body, {"x-api-key": "secret"}).status == 200
    assert "system" not in server.asked and "about x-anthropic-billing-header: x" in server.asked
