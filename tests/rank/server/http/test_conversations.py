"""Conversations that the server remembers where a chat asks for it."""

import threading
from types import SimpleNamespace

import msgspec
import pytest
from phalanx.rank.server import conversation_store
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.conversation import Message
from phalanx.rank.server.conversation_store import Conversation, ConversationStore
from phalanx.rank.server.recorded_chat import RecordedChat
from phalanx.rank.server.responses_request import items_of, messages_of
from phalanx.rank.server.schema import ChatRequest
from phalanx.rank.server.text.events import Text

from ....fields import each
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
    server.state.conversations.__init__(4)
    return server.scheduler


def said(text, role="user"):
    return {"role": role, "content": text}


def chat(server, *messages, **more):
    more = {"record_conversation": True} | more
    return server.post("chat/completions", messages=list(messages), **more)


def prompt(server):
    tokens = memoryview(server.scheduler.requests[-1].tokens).cast("I").tolist()
    return server.engine.text.tokenizer.decode(tokens)


def test_only_new_messages_are_sent(server, scheduler):
    first = chat(server, said("be brief", "system"), said("hello"))
    id = first.body["conversation_id"]
    assert id.startswith("conv_")
    scheduler.answer = "fine"
    second = chat(server, said("how are you?"), conversation_id=id)
    assert second.body["conversation_id"] == id
    assert second.body["choices"][0]["message"]["content"] == "fine"
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
    assert done == "[DONE]"
    assert set(each(chunks, "conversation_id")) == {"mine"}
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
    answer = chat(server, said("hello"), conversation_id="mine", record_conversation=False)
    assert answer.status == 200 and "conversation_id" not in answer.body
    answer = chat(server, said("hello"), conversation_id="mine", record_conversation=None)  # it would have no effect
    assert (answer.status, answer.body["error"]["param"]) == (400, "conversation_id")
    assert server.request("GET", "/v1/conversations/mine").status == 404
    assert not len(server.state.conversations._kept)


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
    assert "lost" not in prompt(server)
    assert prompt(server).count("<|turn|>") == 4


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
    turn = store.begin("a", 0)
    session = SimpleNamespace(id="1", created=0, model="m", fingerprint="", close=lambda: None)
    request = ChatRequest(messages=[Message("user", "hello")])
    chat = RecordedChat(session, request, None, turn, items_of(request.messages))
    chat.see([SimpleNamespace(events=[Text("fine")], finish="stop")])
    assert [one.content for one in store.begin("a", 0).conversation.messages] == ["hello", "fine"]
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
    assert chat(server, said("hello"), conversation_id="a", record_conversation=False).status == 200


def record(store, id, text="hello", key=0):
    turn = store.begin(id, key)
    turn.end(items_of([Message("user", text)]))
    return turn.conversation


def test_one_key_s_conversations_do_not_evict_another_s():
    store = ConversationStore(8)
    for i in range(3):
        record(store, f"mine{i}", key=1)
    for i in range(20):
        record(store, f"theirs{i}", "x" * 999)
    assert [one.id for one in store._kept if one.key == 1] == ["mine0", "mine1", "mine2"]
    store._kept.most_bytes = store._kept.bytes // 2
    store._kept.trim()
    assert [one.id for one in store._kept if one.key == 1] == ["mine0", "mine1", "mine2"]
    assert [one.id for one in store._kept if one.key == 0] == ["theirs19"]


def test_bounds():
    store = ConversationStore(3)
    for id in ("a", "b", "c", "a", "d"):  # b is the one that was longest not used
        record(store, id)
    assert [one.id for one in store._kept] == ["c", "a", "d"]
    store._kept.most_bytes = 3 * store.get("a", 0).size + 900
    record(store, "long", "x" * 900)
    assert [one.id for one in store._kept] == ["a", "d", "long"]
    record(store, "too-long", "x" * 50000)
    assert not len(store._kept)
    old = record(store, "old")
    old.used -= conversation_store.MAX_AGE + 1
    assert store.begin("old", 0).conversation.messages == []


def test_one_that_is_removed_while_it_is_answered_stays_so():
    store = ConversationStore(3)
    record(store, "a")
    turn = store.begin("a", 0)
    store.remove("a", 0)
    turn.end(items_of([Message("user", "hello")]))
    assert not len(store._kept)


def test_instructions_alone_change_those_of_before():
    conversation = Conversation(0, "a")
    conversation.content = msgspec.json.encode(items_of([Message("system", "a"), Message("user", "b")]))
    found, items = conversation.with_new([Message("system", "c")])
    assert [one.content for one in found] == ["c", "b"] == [one.content for one in messages_of(items)]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as client:
        yield client


def texts(items):
    return [item.content[0].text for item in items]


def test_conversations_of_responses(server, client, scheduler):
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}], metadata={"a": "b"})
    assert made.object == "conversation" and made.metadata == {"a": "b"}
    ask = client.responses.create
    response = ask(model="m", input="who am I?", conversation=made.id)
    assert response.conversation.id == made.id and "I am Ann." in prompt(server) and "who am I?" in prompt(server)
    scheduler.answer = "fine"
    ask(model="m", input="again", conversation={"id": made.id}, stream=True).close()  # perhaps before its end
    server.wait(lambda: not server.state.conversations._answered)
    with client.responses.stream(model="m", input="and now?", conversation=made.id) as stream:
        stream.until_done()
    assert "hello world" in prompt(server)
    listed = texts(client.conversations.items.list(made.id, order="asc", limit=2))  # page after page
    assert listed[:3] == ["I am Ann.", "who am I?", "hello world"]
    assert listed[-2:] == ["and now?", "fine"]
    ask(model="m", input="behind", conversation=made.id, background=True)
    server.wait(lambda: not server.state.conversations._answered)
    assert texts(client.conversations.items.list(made.id, limit=2).data) == ["fine", "behind"]


def test_items_are_added_and_removed(client):
    id = client.conversations.create().id
    said_now = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    added = client.conversations.items.create(id, items=said_now)
    assert texts(added.data) == ["a", "b"] and (added.first_id, added.has_more) == (added.data[0].id, False)
    first = client.conversations.items.retrieve(added.first_id, conversation_id=id)
    assert (first.role, first.status, first.content[0].type) == ("user", "completed", "input_text")
    assert client.conversations.items.delete(added.first_id, conversation_id=id).id == id
    assert texts(client.conversations.items.list(id).data) == ["b"]
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.conversations.items.retrieve(added.first_id, conversation_id=id)
    with pytest.raises(openai.BadRequestError, match="id"):
        client.conversations.items.create(id, items=[{**said_now[0], "id": added.last_id}])
    assert client.conversations.update(id, metadata={"k": "v"}).metadata == {"k": "v"}
    assert client.conversations.retrieve(id).metadata == {"k": "v"}
    deleted = client.conversations.delete(id)
    assert (deleted.id, deleted.object, deleted.deleted) == (id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(id)


def test_items_that_are_too_many(client, monkeypatch):
    monkeypatch.setattr(conversation_store, "MAX_ADDED", 1000)
    id = client.conversations.create(items=[{"role": "user", "content": "x" * 600}]).id
    with pytest.raises(openai.APIStatusError) as refused:
        client.conversations.items.create(id, items=[{"role": "user", "content": "x" * 600}])
    assert refused.value.status_code == 413 and len(client.conversations.items.list(id).data) == 1


def test_a_chat_and_a_response_share_one(server, client, scheduler):
    id = chat(server, said("hello")).body["conversation_id"]
    scheduler.answer = "fine"
    client.responses.create(model="m", input="how are you?", conversation=id)
    assert "hello world" in prompt(server)
    chat(server, said("and now?"), conversation_id=id)
    assert prompt(server).count("<|turn|>") == 6
    listed = client.conversations.items.list(id, order="asc").data
    assert texts(listed) == ["hello", "hello world", "how are you?", "fine", "and now?", "fine"]
    assert len({item.id for item in listed}) == 6


def test_one_response_at_a_time(server, client, scheduler):
    id = client.conversations.create().id
    scheduler.hold = True
    background = client.responses.create(model="m", input="a", conversation=id, background=True)
    with pytest.raises(openai.ConflictError) as refused:
        client.responses.create(model="m", input="b", conversation=id)
    assert refused.value.body["param"] == "conversation"
    with pytest.raises(openai.ConflictError):
        client.conversations.items.create(id, items=[{"role": "user", "content": "c"}])
    client.responses.cancel(background.id)
    scheduler.hold = False
    assert client.conversations.items.list(id).data == []  # as it was
    assert client.responses.create(model="m", input="d", conversation=id).status == "completed"


def test_a_failed_response_leaves_a_conversation_as_it_was(server, client, scheduler):
    id = client.conversations.create(items=[{"role": "user", "content": "a"}]).id
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="m", input="word " * 3000, conversation=id)
    scheduler.error = (500, "no")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="m", input="b", conversation=id)
    scheduler.error = None
    assert client.responses.create(model="m", input="c", conversation=id).status == "completed"
    assert texts(client.conversations.items.list(id, order="asc").data) == ["a", "c", "hello world"]


def test_conversations_belong_to_their_key_and_count_for_it(start_server):
    server = start_server(api_keys=["one", "two"])
    clients = [
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)
        for key in ("one", "two")
    ]
    with clients[0] as mine, clients[1] as theirs:
        id = mine.conversations.create(items=[{"role": "user", "content": "x" * 5000}], metadata={"k": "v" * 500}).id
        for ask in (theirs.conversations.retrieve, theirs.conversations.delete, theirs.conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                ask(id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.create(model="m", input="a", conversation=id)
        kept = server.state.conversations._kept
        assert kept.bytes > 5500 and kept._held[0].bytes == kept.bytes


def test_no_conversation_where_none_is_kept(start_server):
    server = start_server(conversation_store=0)
    answer = server.post("conversations")
    assert answer.status == 400
    answer = server.post("conversations", items=[{"role": "king"}])
    assert answer.status == 400 and answer.body["error"]["param"] == "items[0].role"
