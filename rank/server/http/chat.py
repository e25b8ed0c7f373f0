"""OpenAI's chat completions."""

from __future__ import annotations

import msgspec

from ..api_error import bad
from ..generation import chat_generation
from ..openai_format import ChatRenderer
from ..prompts import check_number, context_of
from ..recorded_chat import RecordedChat
from ..schema import ChatRequest
from ..session import Session
from .routes import Call, Route


async def chat(call: Call) -> Session | RecordedChat:
    """The answer to a conversation, whole or as server-sent events."""
    request = call.request
    if request.tools is None and call.server is not None and call.engine.takes_tools:
        request = msgspec.structs.replace(request, tools=call.server.tools.functions() or None)
    return await (_recorded(call, request) if _records(call, request) else answer(call, request))


def _records(call: Call, request: ChatRequest) -> bool:
    """Whether the server is to remember it. Raises ApiError where it cannot."""
    asks, server = request.record_conversation, call.server
    if asks is None:
        asks = server is not None and server.config.record_conversation and request.conversation_id is not None
    if not asks:
        return False
    if server is None or not server.conversations.most:
        why = "a batch job keeps none" if server is None else "this server keeps none (--conversation-store 0)"
        raise bad("record_conversation", f"record_conversation is true: {why}, send the whole conversation")
    request.check_recorded()
    return True


async def _recorded(call: Call, request: ChatRequest) -> RecordedChat:
    """The answer to all that was said before and to the request's messages."""
    assert call.server is not None
    store = call.server.conversations
    conversation = store.begin(request.conversation_id, call.key)
    try:
        request = msgspec.structs.replace(request, messages=conversation.with_new(request.conversation()))
        session = await answer(call, request)
        assert call.engine.text is not None
        return RecordedChat(session, request, call.engine.text.tokenizer, store, conversation)
    except BaseException:
        store.release(conversation)
        raise


async def answer(call: Call, request: ChatRequest) -> Session:
    """The answer to a chat that names its tools."""
    check_number(len(request.conversation()), context_of(call.engine.ready()[1]))
    return await call.engine.generate(request, chat_generation)


ROUTES = [Route("/v1/chat/completions", chat, ChatRequest, ChatRenderer, also=("/chat/completions",), batchable=True)]
