"""OpenAI's chat completions."""

from __future__ import annotations

import msgspec

from ..api_error import bad
from ..decoding import show
from ..generation import chat_generation
from ..images import images_of
from ..openai_format import ChatRenderer
from ..prompts import check_number, context_of
from ..recorded_chat import RecordedChat
from ..schema import ChatRequest
from ..session import Session
from .routes import Call, Route


async def chat(call: Call) -> Session | RecordedChat:
    """The answer to a conversation, whole or as server-sent events."""
    request = with_server_tools(call, call.request)
    return await (_recorded(call, request) if _records(call, request) else answer(call, request))


def with_server_tools(call: Call, request: ChatRequest) -> ChatRequest:
    """A chat without a `tools` field is offered those of the tool servers."""
    if request.tools is None and call.server is not None and call.engine.takes_tools:
        return msgspec.structs.replace(request, tools=call.server.tools.functions() or None)
    return request


def _records(call: Call, request: ChatRequest) -> bool:
    """Whether the server is to remember it. Raises ApiError where it cannot."""
    asks, server = request.record_conversation, call.server
    if asks is None and request.conversation_id is not None:
        if server is None or not server.config.record_conversation:
            raise bad(
                "conversation_id",
                f"conversation_id is {show(request.conversation_id)}, but this chat is not recorded: set "
                "record_conversation to true, or to false where the messages are the whole conversation",
            )
        asks = True
    if not asks:
        return False
    if server is None or not server.conversations.most:
        why = "a batch job keeps none" if server is None else "this server keeps none (--conversation-store 0)"
        raise bad("record_conversation", f"record_conversation is true: {why}, send the whole conversation")
    request.check_recorded()
    if images_of(request):
        raise bad("record_conversation", "record_conversation is true: messages with images are not recorded")
    return True


async def _recorded(call: Call, request: ChatRequest) -> RecordedChat:
    """The answer to the conversation so far and the request's messages."""
    assert call.server is not None
    await call.server.conversations.load(request.conversation_id, call.key)
    turn = call.server.conversations.begin(request.conversation_id, call.key)
    call.stored.append((call.server.conversations, turn.conversation.id))
    try:
        messages, items = turn.conversation.with_new(request.conversation())
        request = msgspec.structs.replace(request, messages=messages)
        session = await answer(call, request)
        assert call.engine.text is not None
        return RecordedChat(session, request, call.engine.text.tokenizer, turn, items)
    except BaseException:
        turn.release()
        raise


async def answer(call: Call, request: ChatRequest) -> Session:
    """The answer to a chat that names its tools."""
    check_number(len(request.conversation()), context_of(call.engine.ready()[1]))
    return await call.engine.generate(request, chat_generation, call.owner)


ROUTES = [Route("/v1/chat/completions", chat, ChatRequest, ChatRenderer, also=("/chat/completions",), batchable=True)]
