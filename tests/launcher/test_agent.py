"""The agent's loop, with an LLM that says what is written here, functions, and a real tool server."""

import json

import pytest
from phalanx.launcher.agent import Agent
from phalanx.launcher.llm_types import Completion, Output

from ..rank.mcp_servers import STDIO, free_port, written

pytestmark = pytest.mark.timeout(60)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The model is not told this.
    """
    return a + b


def broken(why: str) -> str:
    raise RuntimeError(why)


def wants(*calls):
    """An answer with these calls: names and arguments."""
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]


class Scripted:
    """Answers with these, one after the other: texts, or calls."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def chat(self, messages, sampling_params=None, **fields):
        self.asked.append(([*messages], fields))
        answer = self.answers.pop(0)
        calls = answer if isinstance(answer, list) else []
        text = "" if calls else answer
        return [Output([1], [Completion(0, text, [2], "tool_calls" if calls else "stop", tool_calls=calls)], {})]


def test_calls_until_there_is_an_answer():
    llm = Scripted(wants(("add", {"a": 2, "b": 3}), ("add", {"a": 1})), wants(("broken", {"why": "no luck"})), "5")
    agent = Agent(llm, [add, broken], instructions="Be brief.")
    answer = agent.run("2 + 3?", temperature=0)
    assert (answer.text, answer.rounds, answer.finish_reason) == ("5", 3, "stop")
    assert [(call.name, call.result, call.failed) for call in answer.calls] == [
        ("add", "5", False), ("add", "2", False), ("broken", "broken failed: no luck", True),
    ]  # fmt: skip
    roles = [message["role"] for message in answer.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert answer.messages[3] == {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    tool = llm.asked[0][1]["tools"][0]["function"]
    assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
    assert tool["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}}
    assert tool["parameters"]["required"] == ["a"] and llm.asked[0][1]["temperature"] == 0


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [("add", {"a": "x"}, "Expected `int`"), ("add", {"a": 1, "c": 2}, "unknown field"), ("none", {}, "no tool none")],
)
def test_wrong_calls_are_told_to_the_model(name, arguments, why):
    answer = Agent(Scripted(wants((name, arguments)), "ok"), [add]).run("x")
    assert answer.calls[0].failed and why in answer.calls[0].result


def test_rounds_are_limited():
    llm = Scripted(*[wants(("add", {"a": 1}))] * 2, "enough")
    answer = Agent(llm, [add], max_rounds=2).run([{"role": "user", "content": "x"}])
    assert (answer.text, answer.rounds, len(answer.calls)) == ("enough", 3, 2)
    assert llm.asked[2][1]["tools"] == []


def test_approval_and_allowed_tools():
    asked = []
    llm = Scripted(wants(("add", {"a": 1}), ("broken", {"why": "x"})), "ok")
    agent = Agent(llm, [add, broken], allowed_tools=["add"], approve=lambda *call: asked.append(call))
    answer = agent.run("x")
    assert "not allow" in answer.calls[0].result and "no tool" in answer.calls[1].result
    assert asked == [("add", '{"a": 1}')]
    with pytest.raises(ValueError, match="allowed_tools.*'sub'.*add"):
        Agent(llm, [add], allowed_tools=["sub"])
    with pytest.raises(TypeError, match="by its name"):
        Agent(llm, [print])


def test_tool_servers(tmp_path):
    dead = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    config = written(tmp_path, {"mcpServers": {"local": STDIO, "dead": dead}})
    llm = Scripted(wants(("local_add", {"a": 2, "b": 2})), "4")
    with Agent(llm, [add], mcp_config=config) as agent:
        assert {"add", "local_add"} <= {tool["function"]["name"] for tool in agent.tools()}
        assert agent.run("x").calls[0].result == "4"
    with pytest.raises(ValueError, match="No such file"):
        Agent(llm, mcp_config=str(tmp_path / "none"))
