"""Clients that people bring, each with a chat, a stream and a tool call, on one server of two ranks.

And fields that only a model that has something to say can show.
"""

import asyncio
import json
import math
import os
import re
import subprocess
import textwrap
from pathlib import Path

import phalanx
import pytest
from phalanx.launcher import builtin_model

from .fields import each, joined
from .late import Late
from .processes import wait
from .rank.mcp_servers import STDIO, free_port, http_server, written
from .server import Server

anthropic = Late("anthropic")
openai = Late("openai")

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
MODEL = builtin_model.SERVED_NAME
SUM, WEATHER = "What is 47 + 38?", "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


ONE = ("--np", "2", "--device", "cpu", "--mem", "64", "--temperature", "0")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(*ONE, "--file-store", str(tmp_path_factory.mktemp("files"))) as server:
        yield server


@pytest.fixture(scope="module")
def base(server):
    return server.url + "/v1"


def said(text):
    return [{"role": "user", "content": text}]


def check_call(name, arguments):
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert (name, arguments) == ("get_weather", {"city": "Paris"})


def test_openai(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    ask = client.chat.completions.create
    answer = ask(model=MODEL, messages=said(SUM)).choices[0].message
    assert answer.content.rstrip(".").endswith("85") and answer.reasoning_content
    parts = [chunk.choices[0].delta for chunk in ask(model=MODEL, messages=said(SUM), stream=True)]
    assert joined(part.content for part in parts) == answer.content
    (call,) = ask(model=MODEL, messages=said(WEATHER), tools=[TOOL]).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    with client.chat.completions.stream(model=MODEL, messages=said(WEATHER), tools=[TOOL]) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_the_tool_loop_of_the_readme(base, capsys):
    """README's loop but for the address: a call that is held to its schema, its result, and an answer with it."""
    text = (Path(phalanx.__file__).parent / "README.md").read_text(encoding="utf-8")
    (loop,) = (one for one in re.findall(r"^  ```python\n(.*?)^  ```$", text, re.M | re.S) if "tool_call_id" in one)
    exec(textwrap.dedent(loop).replace("http://127.0.0.1:2000/v1", base), {})
    said_last = capsys.readouterr().out
    assert "18" in said_last and "sunny" in said_last and "Paris" in said_last


def test_openai_asynchronously(base):
    async def run():
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            ask = client.chat.completions.create
            whole, stream, called = await asyncio.gather(
                ask(model=MODEL, messages=said(SUM)),
                ask(model=MODEL, messages=said(SUM), stream=True),
                ask(model=MODEL, messages=said(WEATHER), tools=[TOOL]),
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(parts), called.choices[0].message.tool_calls

    whole, streamed, (call,) = asyncio.run(run())
    assert whole == streamed and "85" in whole
    check_call(call.function.name, call.function.arguments)


def test_openai_s_other_endpoints(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    first = client.responses.create(model=MODEL, input=SUM)
    assert "85" in first.output_text
    with client.responses.stream(model=MODEL, input="And 2 + 2?", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    assert second.output_text and second.previous_response_id == first.id
    same, other = (one.embedding for one in client.embeddings.create(model=MODEL, input=[SUM, WEATHER]).data)
    assert len(same) == len(other) and math.isclose(sum(x * x for x in same), 1, rel_tol=1e-3) and same != other
    body = {"messages": said(SUM)}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert not wait(lambda: client.batches.retrieve(batch.id).status != "completed", 60)
    text = client.files.content(client.batches.retrieve(batch.id).output_file_id).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(each(answers, "custom_id")) == ["0", "1", "2"]
    assert all("85" in one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)


def test_tool_servers(tmp_path):
    """The server calls one that is its child and one over HTTP."""
    with http_server(free_port()) as url:
        config = written(tmp_path, {"mcpServers": {"local": STDIO, "web": {"url": url}}})
        with Server(*ONE, "--mcp-config", config) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            for label in ("local", "web"):
                tool = {"type": "mcp", "server_label": label, "allowed_tools": ["add"], "require_approval": "never"}
                tools = dict(tools=[tool], tool_choice="required", max_tool_calls=1)
                said = client.responses.create(model=MODEL, input="Add 2 and 3.", **tools).output
                (call,) = (one for one in said if one.type == "mcp_call")
                given = json.loads(call.arguments)
                assert (call.server_label, call.name, call.output) == (label, "add", str(given["a"] + given["b"]))


def test_anthropic(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask = dict(model=MODEL, max_tokens=500)
    answer = client.messages.create(**ask, messages=said(SUM))
    assert "85" in next(block.text for block in answer.content if block.type == "text")
    with client.messages.stream(**ask, messages=said(SUM)) as stream:
        assert "85" in "".join(stream.text_stream)
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}
    answer = client.messages.create(**ask, messages=said(WEATHER), tools=[tool])
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    check_call(call.name, call.input)


def test_langchain(base):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_retries=0)
    answer = model.invoke(SUM)
    assert "85" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(SUM)) == answer.content
    called = model.bind_tools([TOOL])
    (call,) = called.invoke(WEATHER).tool_calls
    check_call(call["name"], call["args"])
    whole = None
    for chunk in called.stream(WEATHER):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    check_call(call["name"], call["args"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # pydantic's, of litellm's own types
def test_litellm(base, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    ask = dict(model=f"openai/{MODEL}", api_base=base, api_key="none", num_retries=0)
    answer = litellm.completion(**ask, messages=said(SUM)).choices[0].message
    assert "85" in answer.content and answer.reasoning_content
    chunks = list(litellm.completion(**ask, messages=said(SUM), stream=True))
    assert joined(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == answer.content
    (call,) = litellm.completion(**ask, messages=said(WEATHER), tools=[TOOL]).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_llama_index(base):
    """In its own interpreter: llama-index-llms-openai 0.8 needs openai below 3, the other tests are of openai 3."""
    python = os.environ.get("LLAMA_INDEX_PYTHON", "")
    if not python:
        pytest.skip(
            "LLAMA_INDEX_PYTHON does not name a Python that has llama-index-llms-openai-like: python -m venv DIR; "
            "DIR/bin/pip install llama-index-llms-openai-like; LLAMA_INDEX_PYTHON=DIR/bin/python"
        )
    script = Path(__file__).with_name("llama_index_client.py")
    ran = subprocess.run([python, str(script), base, MODEL], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "85" in found["chat"]
    assert found["chat"] == found["stream"] == found["achat"] == found["astream"]
    for name in ("calls", "streamed calls", "required"):
        assert found[name] == [["get_weather", {"city": "Paris"}]], name
    assert found["completion"] and found["agent"] == [["get_weather", "rain in Paris"]]


def test_what_lm_eval_s_loglikelihood_asks(server, base):
    """Token ids of context and continuation together; the log probabilities of the continuation are summed up."""
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)

    def tokens(text):
        return client.post("/tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)["tokens"]

    context, totals, greedy = tokens("What is 2 + 2? 2 + 2 is"), [], []
    for ending in (" 4", " purple"):
        ids = context + tokens(ending)
        choice = client.completions.create(
            model=MODEL, prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
        ).choices[0]
        found, top = choice.logprobs.token_logprobs[len(context) : -1], choice.logprobs.top_logprobs[len(context) : -1]
        assert len(choice.logprobs.token_logprobs) == len(ids) + 1 and choice.logprobs.token_logprobs[0] is None
        assert all(math.isfinite(value) and value <= 0 for value in found)
        totals.append(sum(found) / len(found))
        greedy.append(all(value == max(best.values()) for value, best in zip(found, top, strict=True)))
    assert totals[0] > totals[1] and not greedy[1]


def test_limits_on_tokens(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)

    def say(text, **extra):
        choice = client.chat.completions.create(model=MODEL, messages=said(text), extra_body=extra).choices[0]
        return choice.message, getattr(choice.message, "reasoning_content", None) or ""

    message, thought = say(SUM)
    assert len(thought) > 10
    limited, less = say(SUM, thinking_token_budget=2, return_token_ids=True)
    assert 0 < len(less) < len(thought) and thought.startswith(less) and limited.content
    assert say(SUM, thinking_token_budget=0)[1] == ""
    assert "85" not in say(SUM, bad_words=["85", "5"])[0].content
