"""Generations with the calls of tool servers between them, as one session to whoever reads it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..conversation import Call, Function, Message
from ..session import Session, Update
from ..text.events import Answer, Event, ToolCall, ToolResult
from .connection import LEFT_OUT, MAX_TEXTS, Result
from .request_tools import RequestTools
from .tool_servers import call

MAX_CALLS = 64  # of one response
MAX_ROUNDS = 16  # generations of one response; the last is asked without tools

Again = Callable[[list[Message], int, bool], Awaitable[Session]]


class ToolSession(Session):
    """Goes on after calls of tool servers: they are made, the model gets their results and is asked again.

    `again` opens a session for the conversation with these messages after it, less so many tokens, with tools or
    without. `begin` are events of calls that were made before the first generation.
    """

    def __init__(self, first: Session, tools: RequestTools, again: Again, max_calls: int | None, begin: list[Event]):
        # Nothing of the base's constructor: what a reader asks for is the first session's, or the sum of all.
        self.id, self.created, self.start = uuid.uuid4().hex[:24], first.created, first.start
        self.model, self.fingerprint = first.model, first.fingerprint
        self.first_token = self.last_token = 0.0
        self.prompts, self.choices = [*first.prompts], [*first.choices]
        self._session = first
        self._tools = tools
        self._again = again
        self._room = MAX_TEXTS  # characters of results
        self._calls_left = MAX_CALLS if max_calls is None else min(max_calls, MAX_CALLS)
        self._rounds = 1
        self._begin = begin
        self._messages: list[Message] = []  # since the request's
        self._answer = Answer()
        self._waiting: deque[ToolCall] = deque()  # calls to make now
        self._results: dict[str, Result] = {}  # of this round, by the calls' ids
        self._state = "generates"  # or "calls", or "over"
        self._closed = False
        self._calling: asyncio.Future[Result] | None = None  # the call that is being made

    async def __anext__(self) -> list[Update]:
        if self._begin:
            update = self._update(self._begin)
            self._begin = []
            for event in update.events:
                if isinstance(event, ToolResult):
                    self._take(len(event.text))
            return [update]
        if self._state == "over":
            raise StopAsyncIteration
        if self._state == "calls":
            if self._waiting:
                made = await self._call(self._waiting.popleft())
                return [self._update([made])]
            if self._left_to_client():
                self._state = "over"
                update = self._update([])
                update.finish = "tool_calls"
                return [update]
            await self._next_round()
        updates = await self._session.__anext__()
        for update in updates:
            self._see(update)
        self.first_token = self.first_token or self._session.first_token
        return updates

    def _update(self, events: list[Event]) -> Update:
        update = Update(self.choices[-1])
        update.events = events
        return update

    def _see(self, update: Update) -> None:
        """A generation that ends with calls of ours is not the end."""
        self._answer.add(update.events)
        if not update.finish:
            return
        self.last_token = time.monotonic()
        calls = self._answer.calls if update.finish == "tool_calls" else []
        mine = [one for one in calls if one.name in self._tools.offered and not self._tools.asks(one.name, one.id)]
        if not mine:
            self._state = "over"
            return
        self._state = "calls"
        self._waiting.extend(mine)
        update.finish = ""

    async def _call(self, one: ToolCall) -> ToolResult:
        if self._calls_left > 0:
            result = await self._while_read(call(self._tools.offered[one.name], one.arguments))
            if not self._take(len(result.text)):
                result = LEFT_OUT
        else:
            result = Result("not called: this response has had all the calls it may have", failed=True)
        self._calls_left -= 1
        self._results[one.id] = result
        return ToolResult(one.id, result.text, result.failed)

    def _take(self, size: int) -> bool:
        """Count characters of results until the response is over. False where there is no room for them."""
        if size > self._room or not self.hold(size):
            return False
        self._room -= size
        return True

    async def _while_read(self, made: Coroutine[Any, Any, Result]) -> Result:
        """The result of a call, which is given up once the client has gone."""
        self._calling = asyncio.ensure_future(made)
        try:
            return await self._calling
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise StopAsyncIteration from None
        finally:
            self._calling = None

    def _left_to_client(self) -> bool:
        """Whether calls are left that somebody else has to make or to approve."""
        return len(self._results) < len(self._answer.calls)

    async def _next_round(self) -> None:
        answer = self._answer
        calls = [Call(Function(one.name, one.arguments), one.id) for one in answer.calls]
        thoughts = answer.reasoning or None
        self._messages.append(Message("assistant", answer.text, tool_calls=calls, reasoning_content=thoughts))
        self._messages += [Message("tool", self._results[one.id].text, tool_call_id=one.id) for one in answer.calls]
        self._answer, self._results, self._state = Answer(), {}, "generates"
        self._rounds += 1
        tools = self._calls_left > 0 and self._rounds < MAX_ROUNDS
        self._session = await self._again(self._messages, self.completion_tokens, tools)
        if self._closed:
            self._session.close()
            raise StopAsyncIteration
        self.prompts += self._session.prompts
        self.choices += self._session.choices

    def close(self) -> None:
        self._state, self._begin, self._closed = "over", [], True
        if self._calling is not None:
            self._calling.cancel()
        self._session.close()
