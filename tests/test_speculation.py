"""Speculation over HTTP: answers of all kinds are those without it, whatever drafts."""

import pytest
from phalanx.launcher.builtin_model import DIRECTORY

from .processes import wait
from .server import Server

TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"], "additionalProperties": False,
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
STORY = "Once upon a time there was a little girl. She had a red ball. She had a red ball. She had a red ball."
RIGHT = "vllm:spec_decode_num_accepted_tokens_total"
BODIES = {
    "choices": {"n": 3, "temperature": 1.0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "temperature": 0.7},
    "biases": {"logit_bias": {"40": 4, "41": -4}, "min_p": 0.02, "top_p": 0.95, "temperature": 1.0},
    "bad words": {"bad_words": ["the", "a little"], "min_tokens": 12},
    "stop texts": {"stop": [" she", "."], "min_tokens": 3},
    "stop tokens": {"stop_token_ids": [14, 15, 16], "include_stop_str_in_output": True},
    "log-probabilities": {"logprobs": True, "top_logprobs": 4, "temperature": 0.8},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "a forced call": {
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "temperature": 1.0,
    },
    "a required call": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    "a prediction": {"prediction": {"type": "content", "content": STORY}},
}  # fmt: skip


def answers(*options):
    """Sends every body. Returns what its choices are, by its name, and how many tokens of all were guessed right."""
    found, guessed = {}, 0
    with Server(
        "--model", str(DIRECTORY), "--device", "cpu", "--dtype", "f32", "--mem", "64", "--max-num-seqs", "8", *options
    ) as server:
        for name, body in BODIES.items():
            given = {"messages": [{"role": "user", "content": f"Repeat: {STORY}"}], "max_tokens": 60, "seed": 5}
            status, answer, _ = server.request("/v1/chat/completions", given | body)
            assert status == 200, (name, answer)
            found[name] = [told(choice) for choice in answer["choices"]]
            details = answer["usage"].get("completion_tokens_details") or {}
            guessed += details.get("accepted_prediction_tokens") or 0
        assert not wait(lambda: right(server) < guessed, 10)  # figures come now and then
    return found, guessed


def right(server):
    """Sums the tokens that were guessed right, of all sources."""
    _, text, _ = server.request("/metrics")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{RIGHT}{{"))


def told(choice):
    """A choice without ids that are drawn; log-probabilities and those of the likeliest tokens apart, as cuts round
    them otherwise."""
    message, logged = choice["message"], (choice.get("logprobs") or {}).get("content") or ()
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    values = [x["logprob"] for one in logged for x in (one, *one["top_logprobs"])]
    return (message.get("content"), calls, [one["token"] for one in logged], choice["finish_reason"]), values


@pytest.fixture(scope="module")
def plain():
    found, guessed = answers("--speculate", "none")
    assert not guessed
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [
    ["--speculate", "ngram"], ["--speculate", "mtp", "--np", "2", "--tp", "2"],
    ["--draft-model", str(DIRECTORY), "--np", "2", "--pp", "2"],
    ["--speculative-config", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 3}'],
])  # fmt: skip
def test_answers_are_those_without_drafts(plain, options):
    found, guessed = answers(*options)
    assert guessed > 0
    for name, choices in plain.items():
        for (want, values), (got, others) in zip(choices, found[name], strict=True):
            assert got == want and others == pytest.approx(values, abs=1e-3), name
