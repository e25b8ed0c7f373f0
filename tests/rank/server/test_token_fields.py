"""Fields that say which tokens an answer may have: what becomes of them, and what is refused."""

import pytest
from phalanx.rank.protocol import unpack_u32

pytestmark = pytest.mark.timeout(30)
CHAT = {"messages": "hi", "max_tokens": 2}


def sampling(fresh_server, **fields):
    answer = fresh_server.post("chat/completions", **CHAT, **fields)
    assert answer.status == 200, answer.body
    return fresh_server.scheduler.requests[-1].sampling


def test_tokens_and_words(fresh_server, tokenizer):
    found = sampling(fresh_server, allowed_token_ids=[7, 5, 7], bad_words=["hello", " world"])
    encode = lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    assert found.allowed_token_ids == (7, 5)
    assert found.bad_words == tuple(map(encode, ("hello", " hello", " world", "  world")))
    plain = sampling(fresh_server, bad_words=[])
    assert (plain.allowed_token_ids, plain.bad_words, plain.thinking_budget) == ((), (), -1)


def test_how_far_the_repetition_penalty_looks_back(fresh_server):
    found = sampling(fresh_server, repetition_penalty=1.5, repeat_last_n=64)
    assert (found.repetition_penalty, found.repeat_last_n) == (1.5, 64)
    found = sampling(fresh_server, repetition_penalty=1.5, repeat_last_n=-1)
    assert (found.repetition_penalty, found.repeat_last_n) == (1.5, 0)
    assert sampling(fresh_server, repetition_penalty=1.5, repeat_last_n=0).repetition_penalty == 1.0


def test_log_probabilities_of_named_tokens(fresh_server):
    found = sampling(fresh_server, logprobs=True, logprob_token_ids=[3, 9, 3])
    assert found.logprob_token_ids == (3, 9)
    answer = fresh_server.post("completions", prompt="x", logprobs=1, logprob_token_ids=[3, 9], max_tokens=1)
    assert answer.status == 200 and fresh_server.scheduler.requests[-1].sampling.logprob_token_ids == (3, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"reasoning": {"max_tokens": 5}},
        {"thinking_token_budget": 5, "reasoning": {"max_tokens": 9}},
    ],
)
def test_a_limit_of_the_reasoning(fresh_server, tokenizer, fields):
    found = sampling(fresh_server, **fields)
    assert found.thinking_budget == 5
    assert found.thinking_tokens == tuple(map(tokenizer.token_to_id, ("<think>", "</think>")))


def test_a_limit_needs_tokens_around_the_reasoning(start_server):
    server = start_server(reasoning_parser="granite")
    answer = server.post("chat/completions", **CHAT, thinking_token_budget=5)
    assert answer.status == 400 and "leave it out" in answer.body["error"]["message"]


def test_only_the_last_tokens_of_a_prompt(fresh_server, tokenizer):
    ids = tokenizer.encode("hello you, hello world", add_special_tokens=False).ids

    def prompt(path="completions", **fields):
        answer = fresh_server.post(path, **{"max_tokens": 2, **fields})
        assert answer.status == 200, answer.body
        return unpack_u32(fresh_server.scheduler.requests[-1].tokens).tolist(), answer.body["choices"][0]

    assert prompt(prompt=ids, truncate_prompt_tokens=3)[0] == ids[-3:]
    assert prompt(prompt=ids, truncate_prompt_tokens=100)[0] == ids
    assert prompt(prompt="hello " * 5000, truncate_prompt_tokens=-1)[0] == tokenizer.encode("hello " * 5000).ids[-510:]
    _, choice = prompt(prompt=ids, truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=0)
    assert choice["text"] == tokenizer.decode(ids[-3:])
    assert len(choice["logprobs"]["tokens"]) == 3
    found, _ = prompt("chat/completions", messages="hello " * 5000, truncate_prompt_tokens=40)
    assert len(found) == 40


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [400]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking": {"budget_tokens": "many"}}, "thinking_token_budget"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [400], "logprobs": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 300, "logprobs": True}, "logprob_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"bad_words": ["a"], "guided_regex": "a+"}, "bad_words"),
        ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
    ],
)
def test_refused(fresh_server, fields, param):
    answer = fresh_server.post("chat/completions", **{**CHAT, **fields})
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer.body
    assert param.split("_")[0] in answer.body["error"]["message"] or "reasoning" in answer.body["error"]["message"]


def test_other_endpoints_refuse_or_take_them(fresh_server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for name, value in (("bad_words", ["a"]), ("allowed_token_ids", [1]), ("prompt_logprobs", 1)):
        answer = fresh_server.post("messages", **body, **{name: value})
        assert answer.status == 400 and name in answer.body["error"]["message"]
    assert fresh_server.post("messages", **{**body, "max_tokens": 0}).status == 400
    assert fresh_server.post("responses", input="x", bad_words=["a"], max_output_tokens=2).status == 200
    assert fresh_server.scheduler.requests[-1].sampling.bad_words
