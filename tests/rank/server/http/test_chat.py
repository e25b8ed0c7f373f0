"""Chat completions, driven by the openai client."""

import shutil

import pytest
from phalanx.rank.protocol import unpack_u32
from phalanx.rank.server.config import SamplingDefaults

from ....fields import joined

pytestmark = pytest.mark.timeout(30)
HELLO = [{"role": "user", "content": "hello"}]


def test_chat(fresh_server, client):
    answer = client.chat.completions.create(model="llama7b", messages=HELLO, seed=7, temperature=0.5, max_tokens=50)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    request = fresh_server.scheduler.requests[0]
    assert request.sampling.seed == 7 and request.sampling.temperature == 0.5 and request.sampling.max_tokens == 50
    assert answer.usage.prompt_tokens == len(request.tokens) // 4
    assert answer.usage.completion_tokens == len(fresh_server.scheduler.encode("hello world"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_stream(fresh_server, client):
    chunks = list(
        client.chat.completions.create(model="x", messages=HELLO, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(c.choices[0].delta.content for c in chunks if c.choices) == "hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])


def test_two_choices_have_their_own_seeds(fresh_server, client):
    answer = client.chat.completions.create(model="x", messages=HELLO, n=2, seed=2**63 - 1)
    assert [c.index for c in answer.choices] == [0, 1]
    assert [c.message.content for c in answer.choices] == ["hello world"] * 2
    assert [r.sampling.seed for r in fresh_server.scheduler.requests] == [2**63 - 1, 0]
    assert len({r.id for r in fresh_server.scheduler.requests}) == 2
    assert answer.usage.prompt_tokens == len(fresh_server.scheduler.requests[0].tokens) // 4


def test_two_choices_streamed(fresh_server, client):
    texts, finished = {0: "", 1: ""}, []
    for chunk in client.chat.completions.create(model="x", messages=HELLO, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert texts == {0: "hello world", 1: "hello world"} and sorted(finished) == [0, 1]


def test_logprobs(fresh_server, client, tokenizer):
    fresh_server.scheduler.answer = "hello 🙂"
    answer = client.chat.completions.create(model="x", messages=HELLO, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "hello 🙂"
    assert content[0].logprob == -0.5 and len(content[0].top_logprobs) == 2
    assert content[0].top_logprobs[1].logprob == -9999.0  # JSON has no -inf
    assert fresh_server.scheduler.requests[0].sampling.logprobs == 2
    streamed = []
    for chunk in client.chat.completions.create(model="x", messages=HELLO, logprobs=True, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]
    assert fresh_server.scheduler.requests[1].sampling.logprobs == 0
    fresh_server.scheduler.answer = "\U0001f98a"  # several tokens, none of them a character
    content = client.chat.completions.create(model="x", messages=HELLO, logprobs=True).choices[0].logprobs.content
    assert content[0].token.startswith("bytes:\\xf0") and len({entry.token for entry in content}) == len(content)


@pytest.mark.parametrize("per_delta", [1, 3, 100])
def test_streamed_logprobs_come_with_their_token(fresh_server, per_delta):
    fresh_server.scheduler.per_delta = per_delta
    fresh_server.scheduler.answer = "hello world, how"
    for event in fresh_server.events("chat/completions", messages="hi", logprobs=True)[:-1]:
        choice = event["choices"][0]
        entries = choice["logprobs"]["content"] if choice["logprobs"] else []
        text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert text == choice["delta"].get("content", "")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["o wor", ["zzz", "o wor"], {"Single": "o wor"}, {"Multi": ["o wor"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(fresh_server, stop, stream):
    fresh_server.scheduler.answer = "hello world, how are you? " * 10
    fresh_server.scheduler.pause = 0.01
    body = {"messages": "hi", "stop": stop}
    if stream:
        chunks = fresh_server.events("chat/completions", stream_options={"include_usage": True}, **body)
        assert joined(c["choices"][0]["delta"].get("content") for c in chunks[:-2]) == "hell"
        assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
        usage = chunks[-2]["usage"]
    else:
        answer = fresh_server.post("chat/completions", **body).body
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "hell"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o wor")
        usage = answer["usage"]
    tokens = 0
    text = ""
    for token in fresh_server.scheduler.encode(
        fresh_server.scheduler.answer
    ):  # counted up to the one that completes the stop string
        tokens += 1
        text += fresh_server.engine.text.tokenizer.piece(token).decode()
        if "o wor" in text:
            break
    assert usage["completion_tokens"] == tokens
    fresh_server.wait(lambda: fresh_server.scheduler.aborted == [fresh_server.scheduler.requests[0].id])


def test_stop_string_can_be_shown(fresh_server):
    answer = fresh_server.post("chat/completions", messages="hi", stop="wor", include_stop_str_in_output=True)
    assert answer.body["choices"][0]["message"]["content"] == "hello wor"


@pytest.mark.parametrize("text", ["你好，世界 🙂🚀", "👩‍👩‍👧 \U0001f98a naïve"])
def test_characters_are_never_cut(fresh_server, client, text):
    fresh_server.scheduler.answer = text
    chunks = list(client.chat.completions.create(model="x", messages=HELLO, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_length(fresh_server, client):
    answer = client.chat.completions.create(model="x", messages=HELLO, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


def test_reasoning(fresh_server, client):
    fresh_server.scheduler.answer = "<think>\nhello\n</think>\n\nworld"
    answer = client.chat.completions.create(model="x", messages=HELLO)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("world", "hello")
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    deltas = [c.choices[0].delta for c in client.chat.completions.create(model="x", messages=HELLO, stream=True)]
    assert joined(getattr(d, "reasoning_content", None) for d in deltas) == "hello"
    assert joined(d.content for d in deltas) == "world"


def test_reasoning_that_the_template_opened(fresh_server):
    fresh_server.scheduler.answer = "hello</think>world"
    for body in (
        {"enable_thinking": True},
        {"thinking": True},
        {"thinking": {"type": "enabled"}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        message = fresh_server.post("chat/completions", messages="hi", **body).body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("world", "hello")
    fresh_server.scheduler.answer = "hello"
    message = fresh_server.post("chat/completions", messages="hi", enable_thinking=False).body["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("hello", None)


def test_a_reasoning_effort_of_none_does_not_think(start_server):
    server = start_server(thinking=True)
    server.scheduler.answer = "hello</think>world"
    for more, thinks in (
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ):
        message = server.post("chat/completions", messages="hi", **more).body["choices"][0]["message"]
        assert message.get("reasoning_content") == ("hello" if thinks else None), more


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def test_tool_calls(fresh_server, client):
    fresh_server.scheduler.answer = CALLS
    answer = client.chat.completions.create(model="mistral", messages=HELLO, tools=[WEATHER], tool_choice="auto")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_weather", '{"city": "Rome"}'),
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    prompt = tokenizer_text(fresh_server, 0)
    assert '{"type": "function", "function": {"name": "get_weather"' in prompt
    # The history goes back in, with the tool's answer.
    history = [*HELLO, choice.message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    client.chat.completions.create(model="mistral", messages=history, tools=[WEATHER])
    assert "tool\nrain" in tokenizer_text(fresh_server, 1)


def tokenizer_text(fresh_server, number):
    return fresh_server.engine.text.tokenizer.decode(list(unpack_u32(fresh_server.scheduler.requests[number].tokens)))


def test_tool_calls_streamed(fresh_server, client):
    fresh_server.scheduler.answer = CALLS
    calls, order = {}, []
    for chunk in client.chat.completions.create(model="x", messages=HELLO, tools=[WEATHER], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                assert call.function.arguments == "" and call.type == "function"
                calls[call.index] = [call.function.name, ""]
                order.append(call.index)
            else:
                calls[call.index][1] += call.function.arguments
    assert order == [0, 1]
    assert calls == {0: ["get_weather", '{"city": "Paris"}'], 1: ["get_weather", '{"city": "Rome"}']}
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_one_tool_call_at_most(fresh_server):
    fresh_server.scheduler.answer = CALLS
    fresh_server.scheduler.pause = 0.01
    answer = fresh_server.post("chat/completions", messages="hi", tools=[WEATHER], parallel_tool_calls=False).body
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    fresh_server.wait(lambda: fresh_server.scheduler.aborted)


def test_tool_choice_none(fresh_server):
    fresh_server.scheduler.answer = CALLS
    answer = fresh_server.post("chat/completions", messages="hi", tools=[WEATHER], tool_choice="none").body
    assert answer["choices"][0]["message"]["content"] == CALLS
    assert "get_weather" not in tokenizer_text(fresh_server, 0)


def test_messages_in_all_forms(fresh_server):
    for messages in (
        "hello",
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"role": "user", "content": ["hello"]}],
    ):
        assert fresh_server.post("chat/completions", messages=messages).status == 200
    prompts = [tokenizer_text(fresh_server, i) for i in range(4)]
    assert prompts == ["<|turn|>user\nhello<|end|>\n<|turn|>assistant\n"] * 4


def test_continue_final_message(fresh_server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
    assert fresh_server.post("chat/completions", messages=messages, continue_final_message=True).status == 200
    assert "Once upon" in tokenizer_text(fresh_server, 0)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages[1] = {"role": "assistant", "tool_calls": [call]}  # without content
    assert fresh_server.post("chat/completions", messages=messages, continue_final_message=True).status == 200
    assert tokenizer_text(fresh_server, 1).startswith("<|turn|>user\nhi<|end|>\n<|turn|>assistant\n")


def test_token_ids_and_continuous_usage(fresh_server):
    events = fresh_server.events(
        "chat/completions",
        messages="hi",
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    ids = [id for event in events[:-1] for choice in event["choices"] for id in choice.get("token_ids", [])]
    assert ids == fresh_server.scheduler.encode("hello world")
    assert events[0]["choices"][0]["prompt_token_ids"]
    assert all(event["usage"]["prompt_tokens"] > 0 for event in events[:-1])
    assert events[-1] == "[DONE]"


def test_end_token_can_be_ignored(fresh_server):
    fresh_server.post("chat/completions", messages="hi", ignore_eos=True, max_tokens=20, stop_token_ids=[9])
    fresh_server.post("chat/completions", messages="hi", stop_token_ids=[9])
    end = fresh_server.scheduler.end_token
    assert [request.sampling.stop_token_ids for request in fresh_server.scheduler.requests] == [(9,), (9, end)]
    answer = fresh_server.post("chat/completions", messages="hi", include_stop_str_in_output=True).body
    assert answer["choices"][0]["message"]["content"] == "hello world<|end|>"


def test_defaults(start_server, tmp_path, model_dir):
    model = tmp_path / "with_defaults"
    shutil.copytree(model_dir, model)
    (model / "generation_config.json").write_text(
        '{"temperature": 0.3, "top_k": 20, "top_p": 0.8, "eos_token_id": [5, 6], "max_new_tokens": 7}'
    )
    server = start_server(model=model, sampling=SamplingDefaults(top_k=30, presence_penalty=0.5))
    server.post("chat/completions", messages="hi", top_p=0.7, max_tokens=3)
    server.post("chat/completions", messages="hi", top_p=0)
    sampling, other = [request.sampling for request in server.scheduler.requests]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.presence_penalty) == (0.3, 30, 0.7, 0.5)
    assert sampling.stop_token_ids == (5, 6, server.scheduler.end_token) and sampling.max_tokens == 3
    assert (other.top_k, other.top_p, other.max_tokens) == (1, 1.0, 7)


def test_a_seed_for_requests_without_one(start_server):
    server = start_server(sampling=SamplingDefaults(seed=7))
    for more in ({}, {"n": 2}, {"seed": 3}, {"seed": 0}):
        server.post("chat/completions", messages="hi", **more)
    assert [request.sampling.seed for request in server.scheduler.requests] == [7, 7, 8, 3, 0]


def test_without_any_seed_one_is_drawn_for_each_request(fresh_server):
    for _ in range(3):
        fresh_server.post("chat/completions", messages="hi")
    assert len({request.sampling.seed for request in fresh_server.scheduler.requests}) == 3


def test_without_max_tokens_the_context_is_the_limit(fresh_server):
    fresh_server.post("chat/completions", messages="hi")
    request = fresh_server.scheduler.requests[0]
    assert request.sampling.max_tokens == 512 - len(request.tokens) // 4


def test_a_prediction(fresh_server, client):
    """Its tokens go to the engine, and usage tells what they were worth."""
    fresh_server.scheduler.drafted = 3, 2
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}]
    for content in ("hello you", parts):
        answer = client.chat.completions.create(
            model="x", messages=HELLO, prediction={"type": "content", "content": content}
        )
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == 2 * details.rejected_prediction_tokens > 0
        request = fresh_server.scheduler.requests[-1]
        assert unpack_u32(request.prediction).tolist() == fresh_server.scheduler.encode("hello you")
    fresh_server.scheduler.drafted = 0, 0
    answer = client.chat.completions.create(model="x", messages=HELLO)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is None
    assert not fresh_server.scheduler.requests[-1].prediction


@pytest.mark.parametrize("prediction", ["x", {"type": "content"}, {"type": "x", "content": "a"}, {"content": 5}])
def test_what_is_no_prediction_is_refused(fresh_server, prediction):
    body = {"messages": HELLO, "prediction": prediction}
    answer = fresh_server.request("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and answer.body["error"]["param"].startswith("prediction")


def test_a_prediction_that_is_longer_than_the_context(fresh_server):
    body = {"messages": HELLO, "prediction": {"type": "content", "content": "hello " * 100_000}}
    answer = fresh_server.request("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and answer.body["error"]["param"] == "prediction"
