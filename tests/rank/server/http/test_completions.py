"""Text completions."""

import pytest
from phalanx.rank.protocol import unpack_u32

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def encode(front):
    return front.lead.encode


def test_completion(front, client):
    answer = client.completions.create(model="x", prompt="hello", max_tokens=50, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "hello world" and answer.choices[0].finish_reason == "stop"
    assert list(unpack_u32(front.lead.requests[0].tokens)) == front.lead.encode("hello")


def test_stream(front, client):
    chunks = list(
        client.completions.create(model="x", prompt="hello", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0


def test_prompts_in_all_forms(front, encode):
    ids = encode("hello")
    for prompt, expected in (
        ("hello", [ids]),
        (["hello", "world"], [ids, encode("world")]),
        (ids, [ids]),
        ([ids, [1, 2]], [ids, [1, 2]]),
    ):
        front.lead.requests.clear()
        answer = front.post("completions", prompt=prompt, n=2, seed=5).body
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        sent = [list(unpack_u32(request.tokens)) for request in front.lead.requests]
        assert sent == [ids for ids in expected for _ in range(2)]
        assert [request.sampling.seed for request in front.lead.requests] == [5, 6] * len(expected)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * len(expected)


def test_logprobs_and_offsets(front, client):
    front.lead.answer = "hello 世界"
    answer = client.completions.create(model="x", prompt="hi", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert logprobs.text_offset[0] == 0 and sorted(logprobs.text_offset) == logprobs.text_offset
    assert logprobs.tokens[1] == "hello 世界"[logprobs.text_offset[1] :][: len(logprobs.tokens[1])]
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert front.post("completions", prompt="hi", logprobs=0).body["choices"][0]["logprobs"]["tokens"]


def test_echo(front):
    assert front.post("completions", prompt="hi, ", echo=True).body["choices"][0]["text"] == "hi, hello world"
    events = front.events("completions", prompt="hi, ", echo=True)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hi, hello world"
    assert events[0]["choices"][0]["text"].startswith("hi, ")


def test_token_ids(front, encode):
    choice = front.post("completions", prompt=[7, 8], return_token_ids=True).body["choices"][0]
    assert choice["prompt_token_ids"] == [7, 8] and choice["token_ids"] == encode("hello world")


def test_special_tokens(front):
    front.lead.tokens = front.lead.encode("a<|turn|>b<think>c")
    assert front.post("completions", prompt="x").body["choices"][0]["text"] == "ab<think>c"
    text = front.post("completions", prompt="x", skip_special_tokens=False).body["choices"][0]["text"]
    assert text == "a<|turn|>b<think>c"


def test_priority_and_salt_are_passed_on(front):
    front.post("completions", prompt="x", priority=-3, cache_salt="me", logit_bias={"5": -100}, min_tokens=2)
    request = front.lead.requests[0]
    assert (request.priority, request.cache_salt) == (-3, "me")
    assert request.sampling.logit_bias == {5: -100.0} and request.sampling.min_tokens == 2
