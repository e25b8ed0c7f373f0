"""OpenAI's responses, which are kept for a while: their own endpoints, and runs in the background."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from ..api_error import ApiError, bad
from ..conversation_store import Turn
from ..mcp.request_tools import RequestTools
from ..response_store import Kept, ResponseStore
from ..responses_format import ENDED, ResponseRenderer
from ..responses_request import ResponsesRequest, renamed
from .mcp import respond
from .paging import page
from .routes import EVENTS, JSON, Call, Events, Reply, Route
from .tokens import count_prompt, input_tokens

if TYPE_CHECKING:
    from .state import ServerState

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """The state that a response continues from."""

    before: Kept | None
    turn: Turn | None  # of a conversation
    items: list[dict[str, Any]]  # of the request
    all: list[dict[str, Any]]  # with those before them


def _store(call: Call) -> ResponseStore:
    assert call.server is not None
    return call.server.responses


async def create(call: Call) -> ResponseRenderer | Reply | Events:
    """The answer to a conversation as OpenAI's newer API has it, whole, as events, or made in the background."""
    request: ResponsesRequest = call.request
    most = _store(call).most if call.server is not None else 0
    for name in ("background", "store"):
        if getattr(request, name) and not most:
            why = "a batch job keeps no responses, leave it out"
            if call.server is not None:
                why = "this server keeps no responses, start it with --response-store 1024"
            raise bad(name, f"{name} is true: {why}")
    if request.background and request.store is False:
        raise bad("background", "background is true with store false: what runs in the background has to be kept")
    asked = await _asked(call, request)
    turn = asked.turn
    try:
        session, tools = await respond(call, request, asked.all)
    except BaseException as error:
        if turn is not None:
            turn.release()
        raise renamed(error) if isinstance(error, ApiError) else error from None
    stored = request.store is not False and most > 0
    assert call.engine.text is not None
    flat = request.flat_tools(asked.all)
    renderer = ResponseRenderer(session, request, stored, call.engine.text.tokenizer, flat, tools)
    if turn is not None:
        renderer.on_close = turn.release
        assert call.server is not None
        call.stored.append((call.server.conversations, turn.conversation.id))
    if not stored:
        renderer.on_end = functools.partial(_end, asked, renderer)
        return renderer
    store, kept = _store(call), Kept(asked.before, asked.items, call.key)
    if not request.background:
        call.stored.append((store, renderer.id))
        renderer.on_end = functools.partial(_keep, store, kept, asked, renderer)
        return renderer
    renderer.on_end = functools.partial(_end, asked, renderer)
    kept.show(renderer.body())
    if tools is not None:  # the conversation is held for the next rounds
        kept.more = kept.size
    assert call.server is not None
    kept.task = asyncio.ensure_future(_run(call.server, kept, renderer))
    try:
        store.begin(renderer.id, kept)
    except ApiError:
        kept.task.cancel()
        renderer.close()
        raise
    session.hold = functools.partial(store.hold, renderer.id, kept)
    call.behind = kept.task
    if call.server.models is not None:  # between rounds of tools there is no sequence that holds the model
        kept.task.add_done_callback(call.server.models.hold())
    return Events(kept.follow(0), renderer.error) if request.stream else Reply(kept.body)


async def _asked(call: Call, request: ResponsesRequest) -> Asked:
    """The items that a request means. No other request answers in its conversation until the turn is released."""
    items, previous, conversation = request.items(), request.previous_response_id, request.conversation_id()
    if call.server is None:
        for name in ("previous_response_id", "conversation"):
            if getattr(request, name) is not None:
                raise bad(name, f"{name} is given: a batch job keeps none, send all items as input")
        return Asked(None, None, items, items)
    if conversation is not None:
        store = call.server.conversations
        await store.load(conversation, call.key)
        store.get(conversation, call.key, "conversation")
        turn = store.begin(conversation, call.key, "conversation")
        return Asked(None, turn, items, [*turn.conversation.items, *items])
    if previous is None:
        return Asked(None, None, items, items)
    before = await _store(call).find(previous, call.key, "previous_response_id")
    if before.running or before.elsewhere:
        raise bad("previous_response_id", f"previous_response_id is {previous!r}: that response is still being made")
    return Asked(before, None, items, [*before.conversation, *items])


def _keep(store: ResponseStore, kept: Kept, asked: Asked, renderer: ResponseRenderer) -> None:
    _end(asked, renderer)
    kept.end(renderer.body())
    store.put(renderer.id, kept)


def _end(asked: Asked, renderer: ResponseRenderer) -> None:
    """The conversation, if there is one, goes on with this response."""
    if asked.turn is not None:
        asked.turn.end([*asked.all, *renderer.output()])


async def _run(server: ServerState, kept: Kept, renderer: ResponseRenderer) -> None:
    """Make a response that no client waits for. The request is not held meanwhile: it may be large."""
    session, store = renderer.session, server.responses
    try:
        async for events in renderer.events():
            kept.add(events)
            if not store.grow(renderer.id, kept) and renderer.status not in ENDED:
                raise ApiError(507, "the response has grown beyond what this API key may keep", code="store_full")
    except asyncio.CancelledError:
        renderer.cancel()
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("response %s failed", renderer.id)
            error = ApiError(500, "an internal error; the server's log has the details under the response's id")
        kept.add([renderer.failed(error)])
    finally:
        renderer.close()
        server.metrics.session(session, gone=renderer.status == "cancelled")
        server.used[kept.key].add(session.prompt_tokens, session.completion_tokens)
        kept.end(renderer.body())
        store.finish(renderer.id, kept)


async def count(call: Call) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""
    request: ResponsesRequest = call.request
    asked = await _asked(call, request)
    if asked.turn is not None:
        asked.turn.release()
    entries = request.mcp_tools()
    assert call.server is not None
    more = RequestTools(entries, call.server.tools).functions() if entries else []
    try:
        return input_tokens(await call.engine.prepare(request.chat(asked.all, more), count_prompt, call.owner))
    except ApiError as error:
        raise renamed(error) from None


async def retrieve(call: Call) -> Reply | Events:
    """A response that is kept, as it is now; with `stream=true` its events after `starting_after`."""
    kept = await _store(call).find(call.args["response_id"], call.key)
    if call.query.get("stream", "false").lower() not in ("true", "1"):
        return Reply(kept.body)
    if not kept.log.count and not kept.running:
        raise bad("stream", "stream is true: only responses that were made in the background can be streamed again")
    after = call.query.get("starting_after", "-1")
    try:
        first = int(after) + 1
    except ValueError:
        raise bad("starting_after", f"starting_after is {after[:20]!r}: expected an event's number") from None
    return Events(kept.follow(max(0, first)), lambda error: b"")


async def cancel(call: Call) -> dict[str, Any]:
    """Stop a response that is made in the background."""
    kept = await _store(call).find(call.args["response_id"], call.key)
    if not kept.body["background"]:
        raise ApiError(400, "only responses in the background can be cancelled: to stop another one, close its stream")
    if kept.task is not None:
        kept.task.cancel()
        await asyncio.wait([kept.task])
    return kept.body


async def delete(call: Call) -> dict[str, Any]:
    """Forget a response."""
    id = call.args["response_id"]
    await _store(call).find(id, call.key)
    _store(call).remove(id, call.key)
    return {"id": id, "object": "response", "deleted": True}


async def input_items(call: Call) -> dict[str, Any]:
    """The items that a response was asked with, the last first (`order`, `limit`, `after`)."""
    kept = await _store(call).find(call.args["response_id"], call.key)
    return page(kept.asked(), call.query)


ONE = "/v1/responses/{response_id}"
ROUTES = [
    Route("/v1/responses", create, ResponsesRequest, also=("/responses",), media=(JSON, EVENTS), batchable=True),
    Route("/v1/responses/input_tokens", count, ResponsesRequest, also=("/responses/input_tokens",)),
    Route(ONE, retrieve, method="GET", media=(JSON, EVENTS)),
    Route(ONE, delete, method="DELETE"),
    Route(f"{ONE}/cancel", cancel),
    Route(f"{ONE}/input_items", input_items, method="GET"),
]
