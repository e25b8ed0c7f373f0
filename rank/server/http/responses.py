"""OpenAI's responses, which are kept for a while: their own endpoints, and runs in the background."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from ..api_error import ApiError, bad
from ..response_store import Kept, ResponseStore
from ..responses_format import ResponseRenderer
from ..responses_request import ResponsesRequest, renamed
from .mcp import respond
from .paging import page
from .routes import EVENTS, JSON, Call, Events, Reply, Route

log = logging.getLogger(__name__)


def _store(call: Call) -> ResponseStore:
    assert call.server is not None
    return call.server.responses


async def create(call: Call) -> ResponseRenderer | Reply | Events:
    """The answer to a conversation as OpenAI's newer API has it, whole, as events, or made in the background."""
    request: ResponsesRequest = call.request
    store = _store(call)
    for name in ("background", "store"):
        if getattr(request, name) and not store.most:
            raise bad(name, f"{name} is true: this server keeps no responses, start it with --response-store 1024")
    if request.background and request.store is False:
        raise bad("background", "background is true with store false: what runs in the background has to be kept")
    previous = request.previous_response_id
    before = store.get(previous, call.key, "previous_response_id") if previous is not None else None
    if before is not None and before.running:
        raise bad("previous_response_id", f"previous_response_id is {previous!r}: that response is still being made")
    earlier, items = before.conversation if before else [], request.items()
    try:
        session, tools = await respond(call, request, [*earlier, *items])
    except ApiError as error:
        raise renamed(error) from None
    stored = request.store is not False and store.most > 0
    renderer = ResponseRenderer(session, request, stored, tools)
    if not stored:
        return renderer
    kept = Kept(before, items, call.key)
    renderer.on_end = functools.partial(_keep, store, kept, renderer)
    if not request.background:
        return renderer
    kept.body = renderer.body()
    call.behind = kept.task = asyncio.ensure_future(_run(call, kept, renderer))
    assert call.server is not None
    if call.server.models is not None:  # between rounds of tools there is no sequence that holds the model
        kept.task.add_done_callback(call.server.models.hold())
    store.put(renderer.id, kept)
    return Events(kept.follow(0), renderer.error) if request.stream else Reply(kept.body)


def _keep(store: ResponseStore, kept: Kept, renderer: ResponseRenderer) -> None:
    kept.end(renderer.body())
    store.put(renderer.id, kept)


async def _run(call: Call, kept: Kept, renderer: ResponseRenderer) -> None:
    """Make a response that no client waits for."""
    session, store = renderer.session, _store(call)
    renderer.on_end = lambda: None  # the last event comes after it
    try:
        async for events in renderer.events():
            kept.add(events)
    except asyncio.CancelledError:
        renderer.cancel()
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("response %s failed", renderer.id)
            error = ApiError(500, "an internal error; the server's log has the details under the response's id")
        kept.add([renderer.error(error)])
    finally:
        session.close()
        assert call.server is not None
        call.server.metrics.session(session, gone=renderer.status == "cancelled")
        call.count(session.prompt_tokens, session.completion_tokens)
        kept.end(renderer.body())
        store.trim()


def retrieve(call: Call) -> Reply | Events:
    """A response that is kept, as it is now; with `stream=true` its events after `starting_after`."""
    kept = _store(call).get(call.args["response_id"], call.key)
    if call.query.get("stream", "false").lower() not in ("true", "1"):
        return Reply(kept.body)
    if not kept.events and not kept.running:
        raise bad("stream", "stream is true: only responses that were made in the background can be streamed again")
    after = call.query.get("starting_after", "-1")
    try:
        first = int(after) + 1
    except ValueError:
        raise bad("starting_after", f"starting_after is {after[:20]!r}: expected an event's number") from None
    return Events(kept.follow(max(0, first)), lambda error: b"")


async def cancel(call: Call) -> dict[str, Any]:
    """Stop a response that is made in the background."""
    kept = _store(call).get(call.args["response_id"], call.key)
    if not kept.body["background"]:
        raise ApiError(400, "only responses in the background can be cancelled: to stop another one, close its stream")
    if kept.task is not None:
        kept.task.cancel()
        await asyncio.wait([kept.task])
    return kept.body


def delete(call: Call) -> dict[str, Any]:
    """Forget a response."""
    id = call.args["response_id"]
    _store(call).remove(id, call.key)
    return {"id": id, "object": "response", "deleted": True}


def input_items(call: Call) -> dict[str, Any]:
    """The items that a response was asked with, the last first (`order`, `limit`, `after`)."""
    kept = _store(call).get(call.args["response_id"], call.key)
    return page([*kept.before, *kept.input], call.query)


ONE = "/v1/responses/{response_id}"
ROUTES = [
    Route("/v1/responses", create, ResponsesRequest, also=("/responses",), media=(JSON, EVENTS)),
    Route(ONE, retrieve, method="GET", media=(JSON, EVENTS)),
    Route(ONE, delete, method="DELETE"),
    Route(f"{ONE}/cancel", cancel),
    Route(f"{ONE}/input_items", input_items, method="GET"),
]
