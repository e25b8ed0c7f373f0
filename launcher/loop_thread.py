"""An event loop in a thread of its own, for programs that block or have a loop already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from the start on. The thread does not keep the program alive."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run it there; blocks, for so many seconds at most. An interrupt meanwhile (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there while the caller's loop waits. A caller that is cancelled cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def stop(self, patience: float) -> None:
        """patience: seconds to wait for what runs there."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(patience)
        if not self._thread.is_alive():
            self.loop.close()
