"""A model that sleeps: its memory is given back, while the ranks, their connections and the server stay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .api_error import ApiError
from .engine_client import EngineClient

LOOK = 0.05  # seconds between two looks at whether open requests have ended
MODEL = 0  # the number of the only model
TAGS = WEIGHTS, CACHE = "weights", "kv_cache"  # what sleeps, by vLLM's names


class Sleeper:
    """Puts the model of a job to sleep and wakes it. options: those that rank 0 gets to load it, as JSON."""

    def __init__(self, link: EngineClient, options: str):
        self._link, self._options = link, options
        self._turn = asyncio.Lock()
        self._awake: set[str] = set()  # of TAGS, while the others sleep

    @property
    def sleeping(self) -> bool:
        return self._link.asleep

    async def sleep(self, level: int) -> None:
        """Finish what is open, take nothing new, and unload the model. level: 1 keeps the weights in host memory.

        Raises ApiError.
        """
        link = self._link
        async with self._turn:
            if link.asleep and not self._awake:
                return
            if not self._options:
                raise ApiError(400, "several models take turns here: use idle_unload_secs of --models-config")
            if link.state != "ready" and not link.asleep:
                raise link.unavailable()
            link.asleep = True
            link.state = "unloaded"  # nothing new is taken; what is open goes on
            while link.open_sequences and link.state == "unloaded":
                await asyncio.sleep(LOOK)
            try:
                await link.switch(MODEL, "", "keep" if level == 1 else "")
            except ApiError:  # the job ends, or begins anew
                link.asleep = False
                raise
            self._awake = set()

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Have the model again, once all of TAGS are awake. Raises ApiError."""
        link = self._link
        async with self._turn:
            if not link.asleep:
                return
            awake = self._awake.union(tags)
            if awake != self._awake and awake != {CACHE}:  # a cache alone waits for the weights
                why = await link.switch(MODEL, self._options, "only" if CACHE not in awake else "")
                if why:
                    raise ApiError(503, f"the model cannot be loaded: {why}", code="model_load_failed")
            self._awake = awake
            link.asleep = len(awake) < len(TAGS)
