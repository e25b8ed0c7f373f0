"""Every error that a client can meet, with its text."""

import json

import pytest
from phalanx.rank.server.http import handler
from phalanx.rank.server.http.routes import routes

pytestmark = pytest.mark.timeout(30)
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


CHAT = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is an empty list: give at least one message"),
    ({"messages": 3}, "messages", "messages is 3: expected `string | array`, got `integer`"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
    (
        {"messages": [{"role": "king", "content": "x"}]},
        "messages[0].role",
        'messages[0].role is "king": expected one of system, developer, user, assistant, tool, function',
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "messages[0].content is 5: expected `string | array | null`, got `integer`",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        'messages[0].content[0].type is "image_url": this model takes text only',
    ),
    ({"messages": [{"role": "bad", "content": "x"}]}, "messages[0].role", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "messages[0].content[0].text is missing",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
        None,
    ),
    (
        {"messages": [{"role": "tool", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        None,
    ),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", None),
    ({"max_tokens": "ten"}, "max_tokens", 'max_tokens is "ten": expected `integer | null`, got `string`'),
    ({"max_tokens": 0}, "max_tokens", None),
    (
        {"max_completion_tokens": -1},
        "max_completion_tokens",
        "max_completion_tokens is -1: it must be between 1 and 2147483648",
    ),
    (
        {"max_tokens": 510},
        "max_tokens",
        "the prompt has 20 tokens and max_tokens is 510, 530 together, but this "
        "model's context is 512 tokens; shorten the prompt or lower max_tokens",
    ),
    ({"messages": "x " * 600}, "messages", None),
    ({"temperature": -1}, "temperature", "temperature is -1: it must be between 0 and 100"),
    ({"top_p": 1.5}, "top_p", "top_p is 1.5: it must be between 0 and 1"),
    ({"top_k": -2}, "top_k", "top_k is -2: it must be between -1 and 2147483648"),
    ({"min_p": 2}, "min_p", "min_p is 2: it must be between 0 and 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0: it must be between 0.01 and 100"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3: it must be between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty is -3: it must be between -2 and 2"),
    ({"seed": 1.5}, "seed", "seed is 1.5: expected `integer | null`, got `number`"),
    ({"seed": 2**64}, "seed", None),
    ({"n": 129}, "n", "n is 129: it must be between 1 and 128"),
    ({"n": 2, "best_of": 3}, "best_of", "best_of is 3 with n 2: only best_of equal to n is supported"),
    (
        {"use_beam_search": True},
        "use_beam_search",
        "use_beam_search is true: beam search is not supported, leave it out",
    ),
    ({"stop": ""}, "stop", 'stop is "": expected a text, or a list of texts, none of them empty'),
    ({"stop": {"Any": "x"}}, "stop", None),
    ({"stop": ["x"] * 65}, "stop", "stop has 65 texts, at most 64 are allowed"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids is [-1]: a number of at least 0 is needed"),
    ({"stop_token_ids": [400]}, "stop_token_ids", "stop_token_ids names token 400: this model's tokens are 0 to 399"),
    (
        {"logit_bias": {"x": 1}},
        "logit_bias",
        'logit_bias is {"x":1}: expected token ids, as texts, with values from -100 to 100',
    ),
    (
        {"logit_bias": {"1": 101}},
        "logit_bias",
        'logit_bias is {"1":101}: expected token ids, as texts, with values from -100 to 100',
    ),
    ({"logit_bias": {"400": 1}}, "logit_bias", "logit_bias names token 400: this model's tokens are 0 to 399"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "min_tokens is 5, more than max_tokens 3"),
    ({"top_logprobs": 3}, "top_logprobs", 'top_logprobs is 3, which needs "logprobs": true'),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21: it must be between 0 and 20"),
    ({"logprobs": 5}, "logprobs", "logprobs is 5: expected `boolean | null`, got `integer`"),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        'response_format.type is "xml": expected text, json_object or json_schema',
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "tools[0].function is missing"),
    (
        {"tools": [{"type": "function", "function": {"name": 3}}]},
        "tools[0].function.name",
        "tools[0].function.name is 3: expected `string`, got `integer`",
    ),
    (
        {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
        "tools",
        'tools[0].type is "retrieval": only "function" and "custom" are supported',
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        'tool_choice is "required": it needs tools that may be called',
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        'tool_choice names "g", but the tools are f',
    ),
    (
        {"chat_template": "x"},
        "chat_template",
        "chat_template in a request is not supported: the server's option sets it",
    ),
    ({"echo": True}, "echo", "echo is for /v1/completions; a chat returns only the answer"),
    (
        {"continue_final_message": True},
        "continue_final_message",
        'continue_final_message needs a last message of the assistant, it is of "user"',
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "continue_final_message and add_generation_prompt exclude each other",
    ),
    (
        {"stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        'stream_options.include_usage is "yes": expected `boolean | null`, got `string`',
    ),
]
TEXT = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "the prompt is empty: give at least one token"),
    ({"prompt": []}, "prompt", "prompt is an empty list: give a text, token ids, or a list of either"),
    (
        {"prompt": ["x"] * 33, "n": 128},
        "prompt",
        "33 prompts with n 128 are 4224 sequences: at most 4096 are allowed in a request",
    ),
    ({"prompt": [1, "x"]}, "prompt", "prompt mixes token ids with texts or lists: give one kind only"),
    ({"prompt": [400]}, "prompt", "prompt holds token id 400: this model's tokens are 0 to 399"),
    ({"prompt": [[-1]]}, "prompt", "prompt holds token id -1: this model's tokens are 0 to 399"),
    (
        {"prompt": [1] * 512},
        "prompt",
        "the prompt has 512 tokens, but this model's context is 512 tokens, the answer included; shorten the prompt",
    ),
    (
        {"prompt": "x", "suffix": "y"},
        "suffix",
        "suffix is not supported: it needs a model trained to fill in the middle",
    ),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21: it must be between 0 and 20"),
]


def check(answer, status, param, message, code=None):
    assert answer.status == status, answer.body
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    if message is not None:
        assert error["message"] == message
    assert code is None or error["code"] == code
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("body, param, message", CHAT)
def test_chat(server, body, param, message):
    if body:
        body = {"messages": USER, **body}
    check(server.post("chat/completions", **body), 400, param, message)


@pytest.mark.parametrize("body, param, message", TEXT)
def test_completions(server, body, param, message):
    check(server.post("completions", **body), 400, param, message)


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "the request has no body: send a JSON object"),
        (b"{", "the request's body is not valid JSON: Input data was truncated"),
        (b"{'a': 1}", "the request's body is not valid JSON: JSON is malformed: object keys must be strings (byte 1)"),
        (b'{"a": ' + b"[" * 5000, "the request's body is nested too deeply"),
        (b"[1]", "the request's body is [1]: expected a JSON object"),
        (
            b'{"a": "\xff"}',
            "the request's body is not UTF-8, as JSON has to be: invalid start byte 0xff (byte 7)",
        ),
        (
            b'{"text": "caf\xe9 au lait"}',  # Latin-1
            "the request's body is not UTF-8, as JSON has to be: invalid continuation byte 0xe9 (byte 13)",
        ),
    ],
)
def test_bodies(server, body, message):
    check(server.request("POST", "/v1/chat/completions", body), 400, None, message)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"a": 5, "prompt": ["x", "cut \\ud83d"]}', "prompt", "prompt has \\ud83d, half of a surrogate pair"),
        (b'{"prompt": "\\ude00 x"}', "prompt", "prompt has \\ude00, half of a surrogate pair"),
        (b'{"prompt": "x", "logit_bias": {"5": 1e999}}', "logit_bias", "logit_bias has a number that is out of range"),
        (b'{"prompt": "x", "seed": %s}' % (b"9" * 5000), "seed", "seed has a number that is out of range"),
        (b'{"prompt": "x", "top_p": NaN}', "top_p", "top_p has NaN"),
        (b'{"\\ud83d": NaN}', None, "the request's body is not valid JSON"),
        (b'{"prompt": "x", "top_p": 5,}', None, "the request's body is not valid JSON: JSON is malformed"),
    ],
)
def test_values_that_cannot_be_read(server, body, param, words):
    error = server.request("POST", "/v1/completions", body)
    check(error, 400, param, None)
    assert error.body["error"]["message"].startswith(words)


def test_the_template_s_refusal(server):
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "tool", "content": None},
    ]
    assert server.post("chat/completions", messages=messages).status == 200


def test_unknown_fields_are_ignored(server):
    assert server.post("chat/completions", messages="hi", audio=None, repeat_last_n=64, foo={"bar": 1}).status == 200


def test_no_such_path(server):
    answer = server.request("GET", "/v2/chat")
    check(answer, 404, None, None, "not_found")
    message = answer.body["error"]["message"]
    assert "/v2/chat; the endpoints" in message
    assert all(route.path in message for route in routes())


def test_wrong_method(server):
    answer = server.request("GET", "/v1/completions")
    check(answer, 405, None, "GET is not allowed on /v1/completions: use POST", "method_not_allowed")
    assert answer.headers["Allow"] == "POST, OPTIONS"
    answer = server.request("DELETE", "/health")
    check(answer, 405, None, "DELETE is not allowed on /health: use GET")
    assert answer.headers["Allow"] == "GET, HEAD, OPTIONS"
    assert server.request("OPTIONS", "/health").headers["Allow"] == "GET, HEAD, OPTIONS"
    assert server.request("HEAD", "/v1/completions").headers["Allow"] == "POST, OPTIONS"


def test_a_method_that_is_none_of_http_s_usual_ones(server, caplog):
    for path in ("/v1/completions", "/health", "/none"):
        assert server.request("TRACE", path).status == 405
    assert not caplog.records, "no handler failed"


def test_too_large(server, monkeypatch):
    monkeypatch.setattr(handler, "MAX_BODY", 1 << 20)
    check(
        server.post("completions", prompt="x" * (3 << 19)),
        413,
        None,
        "the request's body is larger than the limit of 1 MiB",
        "too_large",
    )
    answer = server.post("completions", prompt="x" * (3 << 19))
    assert (answer.status, answer.headers["Connection"]) == (413, None)  # it was read: the connection goes on
    answer = server.request("POST", "/v1/completions", b"", {"Content-Length": str(3 << 20)})  # not read at all
    check(answer, 413, None, "the request's body is larger than the limit of 1 MiB", "too_large")
    assert answer.headers["Connection"] == "close"
    assert server.post("completions", prompt="x").status == 200


def test_internal_error(server, monkeypatch):
    monkeypatch.setattr(server.engine, "generate", lambda *_: 1 / 0)
    answer = server.request("POST", "/v1/chat/completions", json.dumps({"messages": "x"}), {"X-Request-Id": "my-id"})
    check(
        answer,
        500,
        None,
        "an internal error; the server's log has the details under the request id my-id",
        "internal_error",
    )
    assert answer.headers["x-request-id"] == "my-id"


def test_error_of_the_engine(server):
    server.scheduler.error = (507, "no room for this prompt")
    try:
        check(server.post("completions", prompt="x"), 507, None, "no room for this prompt")
        check(server.post("completions", prompt="x", stream=True), 507, None, "no room for this prompt")
    finally:
        server.scheduler.error = None


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "starcoder2"])
def test_without_template(start_server, tmp_path, model_type):
    """Models that complete texts, of which no family has a template either."""
    from ..conftest import make_model

    model = make_model(tmp_path / "base", template=None)
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    server = start_server(model=model)
    told = "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
    check(server.post("chat/completions", messages=[{"role": "user", "content": "x"}]), 400, "messages", told)
    assert server.post("completions", prompt="x").status == 200


def test_without_tools(start_server, tmp_path):
    from ..conftest import make_model

    server = start_server(model=make_model(tmp_path / "plain", template="{{ messages[0].content }}"))
    check(
        server.post("chat/completions", messages="x", tools=[TOOL]),
        400,
        "tools",
        "this model's chat template does not take tools: leave them out",
    )


def test_api_key(start_server):
    server = start_server(api_keys=["secret", "clé"])
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        answer = server.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), headers)
        check(answer, 401, None, 'a valid API key is needed: send it as "Authorization: Bearer KEY"', "invalid_api_key")
    for key in ("secret", "clé".encode()):
        headers = {"Authorization": b"Bearer " + key if isinstance(key, bytes) else f"Bearer {key}"}
        assert server.request("POST", "/v1/completions", '{"prompt": "x"}', headers).status == 200
    for token in ("stale", "", "secret"):  # some clients send both headers: one of them is enough
        both = {"Authorization": f"Bearer {token}", "X-Api-Key": "secret" if token != "secret" else "stale"}
        assert server.request("POST", "/v1/completions", '{"prompt": "x"}', both).status == 200
    assert server.request("GET", "/health").status == 200
    assert server.request("GET", "/v1/models").status == 401


def test_strict(start_server):
    server = start_server(strict=True)
    check(
        server.post("completions", prompt="x", model="llama7b"),
        404,
        "model",
        "the model 'llama7b' does not exist; this server has tiny, other",
        "model_not_found",
    )
    assert server.post("completions", prompt="x", model="other").body["model"] == "tiny"
    check(
        server.post("completions", prompt="x", no_such_field=5),
        400,
        "no_such_field",
        "no_such_field is no field of this endpoint, and this server refuses such (--strict): leave it out",
    )
    assert server.post("completions", prompt="x").status == 200


def test_arguments_that_are_nested_too_deeply(server):
    call = {"function": {"name": "f", "arguments": "[" * 20_000}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    assert server.post("chat/completions", messages=messages).status == 200
