"""Several models in one server: one is loaded at a time, and requests for the others wait for their turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import FatalError
from .. import protocol
from .api_error import ApiError
from .config import ServerConfig
from .engine_client import STOPPING, EngineClient
from .text_engine import TextEngine

log = logging.getLogger(__name__)
PATIENCE = 10.0  # seconds that a request waits before no new ones of the running model go before it
FIRST = 0  # the number of the model that the ranks load when they start
UNLOAD = -1  # the number of no model
LOOK = 0.05  # seconds between two looks at whether the running model has finished


class Waiter:
    """A request until its model is loaded."""

    __slots__ = ("model", "since", "turn")

    def __init__(self, model: int, since: float):
        self.model = model
        self.since = since
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Models:
    """Whose turn it is.

    The model that has requests open keeps its turn until they have ended; then the oldest request's model is loaded.
    Requests of the running model go on being answered meanwhile, until another model's request has waited for PATIENCE:
    later ones wait behind it. So each request waits for at most what runs, PATIENCE, and the turns of the models that
    were asked for before it.
    """

    def __init__(self, engines: list[TextEngine], link: EngineClient, config: ServerConfig):
        self.engines = engines
        self.link = link
        self.config = config
        self.failed: dict[int, str] = {}  # models whose last load failed, and why
        self.switching: int | None = None  # the model that is being loaded, or UNLOAD
        self._using = 0  # requests of the model that is loaded
        self._waiting: deque[Waiter] = deque()
        self._changed = asyncio.Event()
        self._used_at = 0.0  # on the loop's clock: when the last request ended
        self._seen: protocol.Ready | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for waiter in self._waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(ApiError(503, STOPPING, code="draining"))

    @property
    def loaded(self) -> int | None:
        """The number of the model that is loaded."""
        ready = self.link.ready
        return ready.model if ready is not None and self.link.state in ("ready", "draining") else None

    def named(self, name: str | None) -> TextEngine:
        """The model of this name; None is the one that is loaded, or the first. Raises ApiError 404."""
        if name is None:
            return self.engines[self.loaded or 0]
        for engine in self.engines:
            if name == engine.names[0]:
                return engine
        names = ", ".join(engine.names[0] for engine in self.engines)
        raise ApiError(404, f"the model {name!r} does not exist; this server has {names}", "model", "model_not_found")

    async def enter(self, engine: TextEngine) -> TextEngine:
        """Wait until this model is loaded; it stays until `leave`. Raises ApiError where it cannot be."""
        if self.link.state not in ("ready", "unloaded") and self.switching is None:
            raise self.link.unavailable()
        if self._open(engine.model):
            self._using += 1
            return engine
        if len(self._waiting) >= self.config.queue_size:
            text = f"the queue is full: {len(self._waiting)} requests wait for other models; try again later"
            raise ApiError(429, text, code="queue_full", retry_after=1)
        waiter = Waiter(engine.model, asyncio.get_running_loop().time())
        self._waiting.append(waiter)
        self._changed.set()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.leave()  # its turn came in the same moment
            raise
        return engine

    def hold(self) -> Callable[[object], None]:
        """Who has entered goes on after its request: the model stays until the function that is returned is called."""
        self._using += 1
        return lambda _: self.leave()

    def leave(self) -> None:
        """A request that entered is over."""
        self._using -= 1
        self._used_at = asyncio.get_running_loop().time()
        self._changed.set()

    def status(self, engine: TextEngine) -> str:
        """loaded, loading, failed or unloaded."""
        starts = self.switching is None and self.link.state in ("loading", "restarting")
        if engine.model == (FIRST if starts else self.switching):
            return "loading"
        if engine.model == self.loaded:
            return "loaded"
        return "failed" if engine.model in self.failed else "unloaded"

    def describe(self) -> list[dict[str, Any]]:
        """Each model's state, why it failed, and how many requests wait for it."""
        waits = [waiter.model for waiter in self._waiting]
        return [
            {
                "id": engine.names[0],
                "status": self.status(engine),
                "waiting": waits.count(engine.model),
                "running": self._using if engine.model == self.loaded else 0,
                "message": self.failed.get(engine.model),
            }
            for engine in self.engines
        ]

    def _open(self, model: int) -> bool:
        """Whether a new request of this model is answered at once."""
        if model != self.loaded or self.switching is not None:
            return False
        now = asyncio.get_running_loop().time()
        return not self._waiting or now < self._waiting[0].since + PATIENCE

    @property
    def _busy(self) -> bool:
        """Sequences of a request that has just left may still be running."""
        return self._using > 0 or self.link.open_sequences > 0

    async def _run(self) -> None:
        """Give turns, for ever."""
        while True:
            self._changed.clear()
            if not self._waiting:
                await self._rest()
            elif self._waiting[0].model == self.loaded:
                self._admit(self._waiting[0].model)
            elif self._busy or self.link.state not in ("ready", "unloaded"):
                await self._wait(LOOK)
            else:
                await self._switch(self._waiting[0].model)

    async def _wait(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _rest(self) -> None:
        """No request waits: unload the model once it has been unused for long."""
        limit, loop = self.config.idle_unload, asyncio.get_running_loop()
        if self.link.ready is not self._seen:  # it was loaded since the last look
            self._seen, self._used_at = self.link.ready, loop.time()
        if not limit or self._busy or self.loaded is None or self.link.draining:
            return await self._wait(1.0 if limit else None)
        left = self._used_at + limit - loop.time()
        if left > 0:
            return await self._wait(left)
        log.info("no request for %g s (idle_unload_secs): the model is unloaded", limit)
        self.switching = UNLOAD
        try:
            await self._load(UNLOAD, "")
        finally:
            self.switching = None

    def _admit(self, model: int) -> None:
        """The turn of all that wait for this model."""
        mine = [waiter for waiter in self._waiting if waiter.model == model]
        self._waiting = deque(waiter for waiter in self._waiting if waiter.model != model)
        for waiter in mine:
            if not waiter.turn.done():
                self._using += 1
                waiter.turn.set_result(None)

    async def _switch(self, model: int) -> None:
        """Load this model and give its requests their turn, or tell them why it cannot be loaded."""
        engine = self.engines[model]
        log.info("switching to %s: %d requests wait", engine.names[0], len(self._waiting))
        self.switching = model
        try:
            if engine.text is None:
                await engine.load()
            why = await self._load(model, engine.options)
        except FatalError as error:
            why = str(error)
        except Exception as error:  # whatever a damaged file makes the libraries raise; others still get their turns
            why = f"its tokenizer cannot be read: {error}"
        finally:
            self.switching = None
        if why:
            self._refuse(model, why)
        else:
            self.failed.pop(model, None)
            self._admit(model)

    async def _load(self, model: int, options: str) -> str:
        """Have the ranks load it; why they could not, or ""."""
        try:
            why = await self.link.switch(model, options)
        except ApiError as error:
            return error.message
        if not why and options and self.loaded != model:
            return "the job was started anew meanwhile"
        return why

    def _refuse(self, model: int, why: str) -> None:
        name = self.engines[model].names[0]
        log.warning("the model %s cannot be loaded: %s", name, why)
        self.failed[model] = why
        refused = [waiter for waiter in self._waiting if waiter.model == model]
        self._waiting = deque(waiter for waiter in self._waiting if waiter.model != model)
        for waiter in refused:
            if not waiter.turn.done():
                text = f"the model {name} cannot be loaded: {why}"
                waiter.turn.set_exception(ApiError(503, text, code="model_load_failed"))
