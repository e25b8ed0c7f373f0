"""Conversations that chats have asked to record: what they hold, and how they are forgotten."""

from __future__ import annotations

from typing import Any

import msgspec

from ..conversation import Message
from .routes import Call, Route


def retrieve(call: Call) -> dict[str, Any]:
    """A conversation that is recorded (`record_conversation`), with its messages."""
    assert call.server is not None
    found = call.server.conversations.get(call.args["conversation_id"], call.key)
    return {
        "id": found.id,
        "object": "conversation",
        "created_at": found.created,
        "metadata": {},
        "messages": [_shown(one) for one in found.messages],
    }


def _shown(message: Message) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}


def delete(call: Call) -> dict[str, Any]:
    """Forget a conversation."""
    assert call.server is not None
    id = call.args["conversation_id"]
    call.server.conversations.remove(id, call.key)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


ONE = "/v1/conversations/{conversation_id}"
ROUTES = [Route(ONE, retrieve, method="GET"), Route(ONE, delete, method="DELETE")]
