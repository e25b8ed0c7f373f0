"""Requests as the templates of models expect them."""

from phalanx.rank.front.prompts import template_messages
from phalanx.rank.front.schema import Call, Function, Message


def test_messages_for_templates():
    call = Call(Function("f", '{"a": 1}'), id="1")
    messages = [
        Message("developer", "be brief"),
        Message("assistant", None, tool_calls=[call]),
        Message("tool", None, tool_call_id="1"),
    ]
    rendered = template_messages(messages)
    assert rendered[0] == {"role": "system", "content": "be brief"}
    assert rendered[1]["content"] is None and rendered[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert rendered[2] == {"role": "tool", "content": "", "tool_call_id": "1"}
    assert template_messages(messages, knows_developer=True)[0]["role"] == "developer"
    broken = Message("assistant", None, tool_calls=[Call(Function("f", "{a"))])
    assert template_messages([broken])[0]["tool_calls"][0]["function"]["arguments"] == "{a"
