"""Text completions."""

import pytest
from phalanx.rank.protocol import unpack_u32
from phalanx.rank.server import generation

from ....fields import each, joined

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def encode(fresh_server):
    return fresh_server.scheduler.encode


def test_completion(fresh_server, client):
    answer = client.completions.create(model="x", prompt="hello", max_tokens=50, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "hello world" and answer.choices[0].finish_reason == "stop"
    assert list(unpack_u32(fresh_server.scheduler.requests[0].tokens)) == fresh_server.scheduler.encode("hello")


def test_stream(fresh_server, client):
    chunks = list(
        client.completions.create(model="x", prompt="hello", stream=True, stream_options={"include_usage": True})
    )
    assert joined(c.choices[0].text for c in chunks[:-1]) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0


def test_prompts_in_all_forms(fresh_server, encode):
    ids = encode("hello")
    for prompt, expected in (
        ("hello", [ids]),
        (["hello", "world"], [ids, encode("world")]),
        (ids, [ids]),
        ([ids, [1, 2]], [ids, [1, 2]]),
    ):
        fresh_server.scheduler.requests.clear()
        answer = fresh_server.post("completions", prompt=prompt, n=2, seed=5).body
        assert each(answer["choices"], "index") == list(range(2 * len(expected)))
        sent = [list(unpack_u32(request.tokens)) for request in fresh_server.scheduler.requests]
        assert sent == [ids for ids in expected for _ in range(2)]
        assert [request.sampling.seed for request in fresh_server.scheduler.requests] == [5, 6] * len(expected)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * len(expected)


def test_logprobs_and_offsets(fresh_server, client):
    fresh_server.scheduler.answer = "hello 世界"
    answer = client.completions.create(model="x", prompt="hi", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert logprobs.text_offset[0] == 0 and sorted(logprobs.text_offset) == logprobs.text_offset
    assert logprobs.tokens[1] == "hello 世界"[logprobs.text_offset[1] :][: len(logprobs.tokens[1])]
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def test_logprobs_of_the_sampled_tokens_alone(fresh_server):
    fresh_server.scheduler.answer = "hello world, how are you?"
    asked = {"prompt": "hi", "logprobs": 0}
    whole = fresh_server.post("completions", **asked).body["choices"][0]["logprobs"]
    chunks = [event["choices"][0]["logprobs"] for event in fresh_server.events("completions", **asked)[:-1]]
    assert len(chunks) > 2 and len(whole["tokens"]) > 2
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [value for chunk in chunks if chunk for value in chunk[field]] == whole[field]


def test_echo(fresh_server):
    assert fresh_server.post("completions", prompt="hi, ", echo=True).body["choices"][0]["text"] == "hi, hello world"
    events = fresh_server.events("completions", prompt="hi, ", echo=True)
    assert joined(event["choices"][0]["text"] for event in events[:-1]) == "hi, hello world"
    assert events[0]["choices"][0]["text"].startswith("hi, ")


def test_token_ids(fresh_server, encode):
    choice = fresh_server.post("completions", prompt=[7, 8], return_token_ids=True).body["choices"][0]
    assert choice["prompt_token_ids"] == [7, 8]
    assert choice["token_ids"] == encode("hello world")


def test_special_tokens(fresh_server):
    fresh_server.scheduler.tokens = fresh_server.scheduler.encode("a<|turn|>b<think>c")
    assert fresh_server.post("completions", prompt="x").body["choices"][0]["text"] == "ab<think>c"
    text = fresh_server.post("completions", prompt="x", skip_special_tokens=False).body["choices"][0]["text"]
    assert text == "a<|turn|>b<think>c"


def test_salt_and_bias_are_passed_on(fresh_server):
    fresh_server.post("completions", prompt="x", cache_salt="me", logit_bias={"5": -100}, min_tokens=2)
    request = fresh_server.scheduler.requests[0]
    assert request.cache_salt == "me"
    assert request.sampling.logit_bias == {5: -100.0} and request.sampling.min_tokens == 2


def test_the_prompt_s_log_probabilities(fresh_server, tokenizer):
    """Log-probabilities that lm-eval's loglikelihood reads: those of the prompt before those of the answer."""
    ids = tokenizer.encode("hi, you", add_special_tokens=False).ids
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "temperature": 0}
    choice = fresh_server.post("completions", **asked, max_tokens=1).body["choices"][0]
    found = choice["logprobs"]
    assert choice["text"].startswith("hi, you") and "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"] == [None, *(-1.0 * i for i in range(1, len(ids))), -0.5]
    assert found["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in found["top_logprobs"][1:-1])
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids) + 1)]
    (request,) = fresh_server.scheduler.requests
    assert (request.sampling.prompt_logprobs, request.sampling.max_tokens) == (1, 1)

    answer = fresh_server.post("completions", **asked, max_tokens=0).body
    assert answer["choices"][0]["text"] == "hi, you" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]
    assert answer["usage"]["completion_tokens"] == 0
    assert fresh_server.scheduler.requests[-1].sampling.max_tokens == 1
    first, *_ = fresh_server.events("completions", **asked, max_tokens=0)
    assert first["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]


def test_prompt_logprobs_as_vllm_has_them(fresh_server, tokenizer):
    ids = tokenizer.encode("hi, you", add_special_tokens=False).ids
    answer = fresh_server.post("completions", prompt=ids, prompt_logprobs=1, max_tokens=1).body
    first, second, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 2
    assert second[str(ids[1])] == {"logprob": -1.0, "rank": None, "decoded_token": tokenizer.decode([ids[1]])}
    assert second["10"]["rank"] == 1 and answer["choices"][0]["text"] and answer["choices"][0]["logprobs"] is None
    chat = {"messages": "hi", "prompt_logprobs": 0, "max_tokens": 0}
    answer = fresh_server.post("chat/completions", **chat).body["choices"][0]
    assert len(answer["prompt_logprobs"]) == len(fresh_server.scheduler.requests[-1].tokens) // 4
    assert answer["message"]["content"] == ""


def test_the_text_of_a_prompt_has_no_tokens_of_the_tokenizer_s(fresh_server, tokenizer):
    choice = fresh_server.post("completions", prompt="hi, you", echo=True, logprobs=0, max_tokens=0).body["choices"][0]
    assert choice["text"] == "hi, you" and choice["logprobs"]["text_offset"][-1] < len("hi, you")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "n": 2}, "n"),
        ({"echo": True, "logprobs": 1, "n": 2}, "n"),
    ],
)
def test_log_probabilities_of_prompts_that_are_refused(fresh_server, fields, param):
    answer = fresh_server.post("completions", prompt="x", **fields)
    assert answer.status == 400 and answer.body["error"]["param"] == param


def test_prompt_logprobs_of_the_whole_vocabulary(fresh_server, monkeypatch):
    """At most as many as the server can write at once."""
    answer = fresh_server.post("completions", prompt="hello world", prompt_logprobs=-1, max_tokens=1)
    assert answer.status == 200 and fresh_server.scheduler.requests[-1].sampling.prompt_logprobs == 400
    likely = answer.body["choices"][0]["prompt_logprobs"][1]
    assert "10" in likely and len(likely) == 2  # all that the scheduler has sent
    monkeypatch.setattr(generation, "MAX_PROMPT_ENTRIES", 800)
    for body in ({"prompt": [1, 2, 3]}, {"prompt": [[1, 2], [3]]}):
        refused = fresh_server.post("completions", prompt_logprobs=-1, max_tokens=1, **body)
        assert refused.status == 400 and refused.body["error"]["param"] == "prompt_logprobs"
    assert fresh_server.post("completions", prompt=[1, 2], prompt_logprobs=-1, max_tokens=1).status == 200


def test_a_chat_tells_of_its_prompt_at_the_top_too(fresh_server):
    answer = fresh_server.post("chat/completions", messages="hi", prompt_logprobs=1, return_token_ids=True).body
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert answer[name] == answer["choices"][0][name] and answer[name]


def test_tokens_by_their_ids(fresh_server, tokenizer):
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    names = [f"token_id:{id}" for id in ids]
    more = {"return_tokens_as_token_ids": True, "logprobs": 1}
    found = fresh_server.post("completions", prompt="x", **more).body["choices"][0]["logprobs"]
    assert found["tokens"] == names
    assert [*found["top_logprobs"][0]] == names[:1]
    more = {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1}
    chat = fresh_server.post("chat/completions", messages="x", **more).body["choices"][0]["logprobs"]["content"]
    assert each(chat, "token") == names == [one["top_logprobs"][0]["token"] for one in chat]
    assert bytes(chat[0]["bytes"]).decode() == tokenizer.decode(ids[:1])
    chunks = fresh_server.events("chat/completions", messages="x", **more)[:-1]
    streamed = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert each(streamed, "token") == names
