"""Conversations that the server remembers where a chat asks for it."""

import threading
from types import SimpleNamespace

import pytest
from phalanx.rank.server import conversation_store
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.conversation import Message
from phalanx.rank.server.conversation_store import Conversation, ConversationStore
from phalanx.rank.server.recorded_chat import RecordedChat
from phalanx.rank.server.schema import ChatRequest
from phalanx.rank.server.text.events import Text

from ....late import Late

openai = Late("openai")

pytestmark = pytest.mark.timeout(60)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(make_server):
    return make_server(conversation_store=4)


@pytest.fixture(autouse=True)
def scheduler(server, monkeypatch):
    for name, value in {"answer": "hello world", "hold": False, "error": None}.items():
        monkeypatch.setattr(server.scheduler, name, value)
    server.state.conversations._kept.clear()
    return server.scheduler


def said(text, role="user"):
    return {"role": role, "content": text}


def chat(server, *messages, **more):
    more = {"record_conversation": True} | more
    return server.post("chat/completions", messages=list(messages), **more)


def prompt(server):
    tokens = memoryview(server.scheduler.requests[-1].tokens).cast("I").tolist()
    return server.sessions.text.tokenizer.decode(tokens)


def test_only_new_messages_are_sent(server, scheduler):
    first = chat(server, said("be brief", "system"), said("hello"))
    id = first.body["conversation_id"]
    assert id.startswith("conv_")
    scheduler.answer = "fine"
    second = chat(server, said("how are you?"), conversation_id=id)
    assert second.body["conversation_id"] == id and second.body["choices"][0]["message"]["content"] == "fine"
    assert prompt(server) == (
        "<|turn|>system\nbe brief<|end|>\n<|turn|>user\nhello<|end|>\n<|turn|>assistant\nhello world<|end|>\n"
        "<|turn|>user\nhow are you?<|end|>\n<|turn|>assistant\n"
    )
    chat(server, said("be long", "developer"), said("and now?"), conversation_id=id)  # other instructions
    assert prompt(server).startswith("<|turn|>system\nbe long<|end|>\n<|turn|>user\nhello<|end|>")
    assert "be brief" not in prompt(server)


def test_a_stream_and_whole_answers_share_one(server):
    body = dict(messages=[said("hello")], record_conversation=True, conversation_id="mine")
    *chunks, done = server.events("chat/completions", **body)
    assert done == "[DONE]" and {chunk["conversation_id"] for chunk in chunks} == {"mine"}
    chat(server, said("again"), conversation_id="mine")
    assert prompt(server).count("<|turn|>") == 4 and "hello world" in prompt(server)


def test_a_tool_s_call_and_its_result(server, scheduler):
    scheduler.answer = f"<think>\nI look.\n</think>\n\n{CALL}"
    call = chat(server, said("weather?"), conversation_id="a", tools=[TOOL]).body["choices"][0]["message"]
    (made,) = call["tool_calls"]
    chat(server, {"role": "tool", "tool_call_id": made["id"], "content": "rain"}, conversation_id="a")
    kept = server.request("GET", "/v1/conversations/a").body
    roles = [message["role"] for message in kept["messages"]]
    assert kept["object"] == "conversation" and roles == ["user", "assistant", "tool", "assistant"]
    assert kept["messages"][1]["tool_calls"] == [made] and "I look." in kept["messages"][1]["reasoning_content"]


def test_a_custom_tool_s_call_keeps_its_shape(server, scheduler):
    scheduler.answer = CALL.replace("get_weather", "sql").replace('"city": "Paris"', '"input": "5"')
    first = chat(server, said("hi"), tools=[{"type": "custom", "custom": {"name": "sql"}}])
    id, called = (first.body[name] for name in ("conversation_id", "choices"))
    kept = server.request("GET", f"/v1/conversations/{id}").body["messages"][1]["tool_calls"]
    assert kept == called[0]["message"]["tool_calls"] and kept[0]["custom"] == {"name": "sql", "input": "5"}
    result = {**said("1 row", "tool"), "tool_call_id": kept[0]["id"]}
    assert chat(server, result, conversation_id=id).status == 200 and "1 row" in prompt(server)


def test_nothing_is_recorded_unless_asked(server):
    for more in ({"record_conversation": False}, {"record_conversation": None}):
        answer = chat(server, said("hello"), conversation_id="mine", **more)
        assert answer.status == 200 and "conversation_id" not in answer.body
    assert server.request("GET", "/v1/conversations/mine").status == 404
    assert not server.state.conversations._kept


def test_the_option_records_what_names_a_conversation(start_server):
    server = start_server(record_conversation=True)
    chat(server, said("hello"), conversation_id="mine", record_conversation=None)
    chat(server, said("again"), conversation_id="mine", record_conversation=None)
    assert prompt(server).count("<|turn|>") == 4
    chat(server, said("hello"), record_conversation=None)
    chat(server, said("hello"), conversation_id="mine", record_conversation=False)
    assert prompt(server).count("<|turn|>") == 2 and len(server.state.conversations._kept) == 1
    assert chat(server, said("hello"), conversation_id="mine", n=2, record_conversation=None).status == 400


def test_it_is_forgotten(server):
    id = chat(server, said("hello")).body["conversation_id"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert client.conversations.retrieve(id).id == id
    assert client.conversations.delete(id).deleted
    answer = chat(server, said("again"), conversation_id=id)
    assert answer.status == 404 and answer.body["error"]["code"] == "conversation_not_found"
    assert server.request("DELETE", f"/v1/conversations/{id}").status == 404


def test_one_key_never_reads_another_s(start_server):
    server = start_server(api_keys=["a", "b"])

    def ask(key, method="POST", path="chat/completions", **body):
        body = {"messages": [said(f"I am {key}")], "record_conversation": True, **body} if method == "POST" else None
        return server.request(method, f"/v1/{path}", body, {"Authorization": f"Bearer {key}"})

    id = ask("a").body["conversation_id"]
    assert ask("b", conversation_id=id).status == 404
    for key in "aabb":
        assert ask(key, conversation_id="same").status == 200
        assert ("I am a" in prompt(server), "I am b" in prompt(server)) == (key == "a", key == "b")
    for method in ("GET", "DELETE"):
        assert ask("b", method, f"conversations/{id}").status == 404
    assert ask("a", "GET", f"conversations/{id}").status == 200


def test_an_answer_that_breaks_off_leaves_it_as_it_was(server, scheduler):
    chat(server, said("hello"), conversation_id="a")
    scheduler.error = (500, "the engine stumbled")
    assert chat(server, said("lost"), conversation_id="a").status == 500
    assert chat(server, said("x " * 3000), conversation_id="a").status == 400  # longer than the context
    scheduler.error = None
    assert chat(server, said("again"), conversation_id="a").status == 200
    assert "lost" not in prompt(server) and prompt(server).count("<|turn|>") == 4


def test_one_answer_at_a_time(server, scheduler):
    scheduler.hold = True
    answers = []
    thread = threading.Thread(target=lambda: answers.append(chat(server, said("hello"), conversation_id="a")))
    count = len(scheduler.requests)
    thread.start()
    server.wait(lambda: len(scheduler.requests) > count)
    busy = chat(server, said("again"), conversation_id="a")
    assert busy.status == 409 and busy.body["error"]["code"] == "conversation_busy"
    scheduler.hold = False
    thread.join(20)
    assert answers[0].status == 200 and chat(server, said("again"), conversation_id="a").status == 200


def test_the_next_message_may_follow_the_last_event():
    """Before the first request's handler has ended, which then leaves the second one's place alone."""
    store = ConversationStore(3)
    conversation = store.begin("a", 0)
    session = SimpleNamespace(id="1", created=0, model="m", fingerprint="", close=lambda: None)
    request = ChatRequest(messages=[Message("user", "hello")])
    chat = RecordedChat(session, request, None, store, conversation)
    chat.see([SimpleNamespace(events=[Text("fine")], finish="stop")])
    assert [one.content for one in store.begin("a", 0).messages] == ["hello", "fine"]
    chat.close()
    with pytest.raises(ApiError, match="is being answered"):
        store.begin("a", 0)


@pytest.mark.parametrize(
    "more, field",
    [
        ({"n": 2}, "n"),
        ({"conversation_id": ""}, "conversation_id"),
        ({"conversation_id": "x" * 257}, "conversation_id"),
        ({"continue_final_message": True, "messages": [said("hi"), said("so", "assistant")]}, "continue_final_message"),
    ],
)
def test_what_is_refused(server, more, field):
    answer = server.post("chat/completions", **{"messages": [said("hi")], "record_conversation": True, **more})
    assert answer.status == 400 and answer.body["error"]["param"] == field


def test_where_none_is_kept(start_server):
    server = start_server(conversation_store=0)
    answer = chat(server, said("hello"))
    assert answer.status == 400 and "--conversation-store" in answer.body["error"]["message"]
    assert chat(server, said("hello"), conversation_id="a", record_conversation=None).status == 200


def record(store, id, text="hello"):
    conversation = store.begin(id, 0)
    store.end(conversation, [Message("user", text)])
    store.release(conversation)
    return conversation


def test_bounds(monkeypatch):
    store = ConversationStore(3)
    for id in ("a", "b", "c", "a", "d"):  # b is the one that was longest not used
        record(store, id)
    assert [id for _, id in store._kept] == ["c", "a", "d"]
    monkeypatch.setattr(conversation_store, "MAX_BYTES", 3 * store.get("a", 0).size + 900)
    record(store, "long", "x" * 900)
    assert [id for _, id in store._kept] == ["a", "d", "long"]
    record(store, "too-long", "x" * 5000)
    assert not store._kept
    old = record(store, "old")
    old.used -= conversation_store.MAX_AGE + 1
    assert store.begin("old", 0).messages == []


def test_one_that_is_removed_while_it_is_answered_stays_so():
    store = ConversationStore(3)
    record(store, "a")
    conversation = store.begin("a", 0)
    store.remove("a", 0)
    store.end(conversation, [Message("user", "hello")])
    assert not store._kept


def test_instructions_alone_change_those_of_before():
    conversation = Conversation(0, "a")
    conversation.messages = [Message("system", "a"), Message("user", "b")]
    found = conversation.with_new([Message("system", "c")])
    assert [one.content for one in found] == ["c", "b"]
