"""Answers of the built-in model through a server: it is trained, and no random weights would pass."""

import functools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from phalanx.benchmarks.builtin_model import evaluate, heldout, talk
from phalanx.benchmarks.builtin_model.words import expansions, normal
from phalanx.launcher import builtin_model

from ..late import Late
from ..server import Server

openai = Late("openai")

# Perplexity of the answers in the first held-out documents, as measured on these weights in f32:
# python benchmarks/builtin_model/evaluate.py --skill copy --items 1 --perplexity 8
DOCUMENTS, PERPLEXITY = 8, 1.3418

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server():
    with Server("--np", "1", "--device", "cpu", "--mem", "128") as server:
        yield server


@pytest.fixture
def say(server):
    """A chat completion's first choice, greedy, from a list of messages or a user's words."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

    def say(messages, thinking=None, **more):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if thinking is not None:
            more["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinking}}
        answer = client.chat.completions.create(
            model=builtin_model.SERVED_NAME, messages=messages, temperature=0, **more
        )
        return answer.choices[0]

    return say


@pytest.mark.parametrize("greeting", ["Hello!", "Good morning", "Hi there"])
def test_a_greeting_is_answered_in_words_and_ends(say, greeting):
    choice = say(greeting)
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    _, _, answer = talk.TOPICS[0]
    assert normal(choice.message.content) in expansions((answer,))


def test_it_thinks_unless_told_not_to(say):
    for thinking in (None, True, False):
        message = say("What is 47 + 38?", thinking=thinking).message
        assert message.content.rstrip(".").endswith("85")
        thought = getattr(message, "reasoning_content", None) or ""
        assert bool(thought) == (thinking is not False) and "<think>" not in message.content


def test_a_tool_is_called_and_its_result_is_told(say):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = say(messages, tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'})
    choice = say(messages, tools=[WEATHER])
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert "21" in choice.message.content


def at_once(work, things, server, **more):
    """`work` of evaluate.py on each thing, against this server."""
    ask = functools.partial(work, base=server.url + "/v1", model=builtin_model.SERVED_NAME, key="", **more)
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, things))


@pytest.mark.long
def test_the_evaluation_in_small(server):
    """Each skill a little; the card has the figures of the whole."""
    items = [item for skill, _, _ in heldout.SKILLS for item in heldout.items(skill, 2)]
    failed = [one for one in at_once(evaluate.answer, items, server, think=None) if not one["right"]]
    assert len(failed) <= len(items) // 8, failed


@pytest.mark.long
def test_the_perplexity_is_the_one_measured(server):
    losses = at_once(evaluate.surprise, evaluate.places(DOCUMENTS), server)
    assert math.exp(sum(losses) / len(losses)) < PERPLEXITY * 1.01
