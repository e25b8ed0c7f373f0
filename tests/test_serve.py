"""The whole product: `phalanx serve` on two ranks, driven by the openai client."""

import functools
import json
import random
import threading

import pytest

from .checkpoints import make_checkpoint
from .fields import joined
from .late import Late
from .processes import wait
from .rank.reference import Reference
from .server import Server

openai = Late("openai")

SEED = 5  # a checkpoint whose greedy text is varied and never close to a tie
PROMPT = random.Random(0).choices(range(3, 500), k=60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny-llama", seed=SEED)


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(str(checkpoint), "--np", "2", "--device", "cpu", "--mem", "64", "--seed", "7") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def want(checkpoint):
    return functools.cache(lambda count: Reference(checkpoint).yardstick(PROMPT, count))


def ask(text="Say something."):
    return dict(model="any-name", messages=[{"role": "user", "content": text}])


def test_what_a_newcomer_sees(server):
    assert len(server.ranks) == 2
    assert "loading" in server.lines[0]
    assert f"Phalanx is ready: {server.url}/v1" in server.output
    wait(lambda: "curl" not in server.output, 10)  # the line after
    assert f"curl {server.url}/v1/chat/completions" in server.output
    assert server.url.startswith("http://127.0.0.1:")


def test_the_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny-llama"


def test_completions_of_token_ids_are_transformers_tokens(client, want):
    done = client.completions.create(
        model="x",
        prompt=PROMPT,
        max_tokens=64,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert done.choices[0].model_extra["token_ids"] == want(64)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.prompt_tokens == 60 and done.usage.completion_tokens == 64
    assert done.model == "tiny-llama"


def test_chat(client):
    done = client.chat.completions.create(**ask(), max_tokens=12, temperature=0)
    again = client.chat.completions.create(**ask(), max_completion_tokens=12, temperature=0)
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == again.choices[0].message.content != ""
    assert done.usage.completion_tokens <= 12
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_says_the_same_as_the_whole(client):
    options = dict(**ask(), max_tokens=30, temperature=0, extra_body={"ignore_eos": True})
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = joined(c.choices[0].delta.content for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    # How many tokens came from the cache or were guessed depends on the requests before.
    details = {"prompt_tokens_details", "completion_tokens_details"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len(chunks) > 2


def test_several_choices_and_a_seed(client):
    options = dict(**ask(), max_tokens=16, temperature=1.0, n=2, seed=7)
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in second.choices]
    assert texts[0] != texts[1]
    assert [c.index for c in first.choices] == [0, 1]
    other = client.chat.completions.create(**{**options, "seed": 8})
    assert other.choices[0].message.content != texts[0]


def test_the_server_s_seed_is_for_requests_without_one(client):
    options = dict(**ask(), max_tokens=16, temperature=1.0)
    texts = [client.chat.completions.create(**options, **more).choices[0].message.content
             for more in ({}, {}, {"seed": 7}, {"seed": 8})]  # fmt: skip
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_logprobs(client):
    done = client.chat.completions.create(**ask(), max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    for entry in done.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs) <= 0
        assert entry.token == entry.top_logprobs[0].token


def test_answers_of_a_random_model_keep_to_what_is_asked(client, server):
    """Whole and streamed, two choices, a client that leaves in the middle, and wrong input."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    options = dict(**ask(), max_tokens=60, temperature=1.0, seed=3)
    both = client.chat.completions.create(**options, n=2, response_format=form, logprobs=True)
    for choice in both.choices:
        assert choice.finish_reason == "length" or json.loads(choice.message.content)["a"] in (1, 2)
        assert choice.logprobs.content
    picked = dict(extra_body={"guided_choice": ["yes", "no"]})
    whole = client.chat.completions.create(**options, **picked).choices[0]
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**options, **picked, stream=True)]
    assert joined(part.delta.content for part in parts) == whole.message.content in ("yes", "no")
    assert parts[-1].finish_reason == whole.finish_reason == "stop"
    endless = client.completions.create(
        model="x", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"guided_regex": "[a-z ]*[0-9]{3}", "n": 3}
    )
    next(iter(endless))
    endless.close()
    assert not wait(lambda: server.request("/health")[1]["running"], 10)
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot be enforced"):
        client.completions.create(model="x", prompt=PROMPT, extra_body={"guided_regex": "("})


def test_stop_strings(client):
    whole = client.chat.completions.create(**ask(), max_tokens=40, temperature=0, extra_body={"ignore_eos": True})
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    done = client.chat.completions.create(
        **ask(), max_tokens=40, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert done.choices[0].message.content == text[: text.index(stop)]
    assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"messages": []}, ["messages"]),
        ({"top_p": "high"}, ["top_p"]),
        ({"n": 0}, ["n"]),
    ],
)
def test_a_bad_field_is_named(client, change, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ask(), **change})
    assert all(word in caught.value.message for word in words)
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_gets_both_numbers(client, server):
    limit = server.request("/v1/models")[1]["data"][0]["max_model_len"]
    with pytest.raises(openai.BadRequestError, match=str(limit)) as caught:
        client.completions.create(model="x", prompt=[5] * (limit + 7))
    assert str(limit + 7) in caught.value.message


def test_malformed_json(server):
    status, body, _ = server.request("/v1/chat/completions", b'{"messages": [')
    assert status == 400 and body["error"]["type"] == "invalid_request_error"


def test_a_client_that_goes_away_frees_its_blocks(client, server):
    stream = client.completions.create(
        model="x", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert not wait(lambda: server.request("/health")[1]["running"], 10)


def test_every_event_of_a_raw_stream_is_whole_json(server):
    import urllib.request

    body = json.dumps({"messages": "hello", "max_tokens": 8, "stream": True}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = answer.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.long
def test_mixed_load_from_many_clients(client, want):
    """64 requests at once, half of them streams; the greedy one among them is not disturbed."""
    results = {}

    def one(i):
        options = dict(model="x", prompt=PROMPT[: 1 + i % 50], max_tokens=1 + i % 23, temperature=0.9, seed=i)
        if i == 13:
            options = dict(model="x", prompt=PROMPT, max_tokens=64, temperature=0)
        extra = {"return_token_ids": True, "ignore_eos": True}
        if i % 2 and i != 13:
            chunks = client.completions.create(**options, stream=True, extra_body=extra)
            results[i] = sum(len(c.choices[0].model_extra.get("token_ids") or []) for c in chunks if c.choices)
        else:
            results[i] = client.completions.create(**options, extra_body=extra).choices[0].model_extra["token_ids"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[13] == want(64)
    for i in range(64):
        if i != 13:
            assert (results[i] if i % 2 else len(results[i])) == 1 + i % 23
