"""Conversations that are recorded: by chats (`record_conversation`), and by responses in one (`conversation`)."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from ..api_error import ApiError, bad
from ..conversation import Message
from ..conversation_store import Conversation, ConversationStore
from ..decoding import Body
from ..fields import Metadata, doc
from ..responses_request import check_items, whole_items
from .paging import page
from .routes import Call, Route


class ItemsRequest(Body, kw_only=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[dict[str, Any]], doc("items as `input` of /v1/responses has them")]

    def check(self) -> None:
        check_items(self.items, "items")


class ConversationRequest(Body, kw_only=True):
    """POST /v1/conversations."""

    items: Annotated[list[dict[str, Any]] | None, doc("items as `input` of /v1/responses has them")] = None
    metadata: Annotated[Metadata | None, doc("comes back in the conversation")] = None

    def check(self) -> None:
        check_items(self.items or [], "items")


class MetadataRequest(Body, kw_only=True):
    """POST /v1/conversations/{conversation_id}."""

    metadata: Annotated[Metadata, doc("takes the place of the conversation's metadata")]


def _store(call: Call) -> ConversationStore:
    assert call.server is not None
    return call.server.conversations


def _found(call: Call) -> Conversation:
    return _store(call).get(call.args["conversation_id"], call.key)


async def create(call: Call) -> dict[str, Any]:
    """A new conversation, with `items` of an earlier one."""
    request: ConversationRequest = call.request
    made = _store(call).create(call.key, whole_items(request.items or []), request.metadata or {})
    await _store(call).saved(made.id, call.key)
    return made.body()


def update(call: Call) -> dict[str, Any]:
    """Other metadata for a conversation."""
    request: MetadataRequest = call.request
    return _store(call).change(call.args["conversation_id"], call.key, metadata=request.metadata).body()


def retrieve(call: Call) -> dict[str, Any]:
    """A conversation, also with its items as the messages of a chat."""
    found = _found(call)
    return {**found.body(), "messages": [_shown(one) for one in found.messages]}


def _shown(message: Message) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}


def delete(call: Call) -> dict[str, Any]:
    """Forget a conversation."""
    id = call.args["conversation_id"]
    _store(call).remove(id, call.key)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


def items(call: Call) -> dict[str, Any]:
    """The items of a conversation, the last first (`order`, `limit`, `after`)."""
    return page(_found(call).items, call.query)


def add_items(call: Call) -> dict[str, Any]:
    """Add items to a conversation."""
    request: ItemsRequest = call.request
    new, known = whole_items(request.items), _found(call).items
    ids = [one["id"] for one in (*known, *new)]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise bad("items", f"items has the id {str(twice)[:100]!r} of another item: leave the ids out")
    _store(call).change(call.args["conversation_id"], call.key, [*known, *new])
    return page(new, {"order": "asc"}, max(1, len(new)), max(1, len(new)))


def item(call: Call) -> dict[str, Any]:
    """An item of a conversation."""
    return _found(call).items[_place(call)]


def delete_item(call: Call) -> dict[str, Any]:
    """Remove an item from a conversation."""
    place, known = _place(call), _found(call).items
    return _store(call).change(call.args["conversation_id"], call.key, known[:place] + known[place + 1 :]).body()


def _loaded(prepare: Callable[[Call], Any]) -> Callable[[Call], Awaitable[Any]]:
    """Waits until the conversation that the path names is as the service's jobs have it."""

    @functools.wraps(prepare)
    async def run(call: Call) -> Any:
        await _store(call).load(call.args["conversation_id"], call.key)
        answer = prepare(call)
        await _store(call).saved(call.args["conversation_id"], call.key)
        return answer

    return run


def _place(call: Call) -> int:
    """The position of the item that the path names. Raises ApiError 404."""
    id = call.args["item_id"]
    for place, one in enumerate(_found(call).items):
        if one["id"] == id:
            return place
    raise ApiError(404, f"there is no item {id[:100]!r} in this conversation", "item_id", "item_not_found")


ALL = "/v1/conversations"
ONE = f"{ALL}/{{conversation_id}}"
ITEM = f"{ONE}/items/{{item_id}}"
ROUTES = [
    Route(ALL, create, ConversationRequest),
    Route(ONE, _loaded(retrieve), method="GET"),
    Route(ONE, _loaded(update), MetadataRequest),
    Route(ONE, _loaded(delete), method="DELETE"),
    Route(f"{ONE}/items", _loaded(items), method="GET"),
    Route(f"{ONE}/items", _loaded(add_items), ItemsRequest),
    Route(ITEM, _loaded(item), method="GET"),
    Route(ITEM, _loaded(delete_item), method="DELETE"),
]
