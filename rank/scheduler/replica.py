"""One copy of the model as the lead sees it: its scheduler, its ranks, and the steps that are under way on them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from .. import protocol
from .scheduler import ScheduledStep, Scheduler

GLANCE = 2e-4  # seconds between looks at a result while there is something else to do


class StepFuture(Protocol):
    """A step's outcome, still to come."""

    def wait(self, seconds: float | None) -> bool:
        """True once it is there."""

    def outcome(self) -> protocol.StepOutput:
        """What was sampled, in the plan's order. It has to be there."""


class Executor(Protocol):
    """The ranks of one replica; rank/worker/executor.py has the real ones."""

    def start(self, plan: protocol.Plan) -> StepFuture:
        """Send the plan to every rank and begin it."""

    def progress(self) -> bool:
        """Move outstanding sends on; False when none is left."""


class Replica:
    """A step runs on each pipeline stage while the next one is planned and sent."""

    def __init__(self, scheduler: Scheduler, ranks: Executor):
        self.scheduler = scheduler
        self.ranks = ranks
        self.depth = scheduler.stages + 1
        self._under_way: deque[tuple[ScheduledStep, StepFuture]] = deque()

    @property
    def idle(self) -> bool:
        return not self._under_way and self.scheduler.idle

    def plan(self) -> bool:
        """Start another step; False when none can be started before the oldest one's result is here."""
        if len(self._under_way) == self.depth:
            return False
        planned = self.scheduler.schedule()
        if planned is None:
            return False
        self._under_way.append((planned, self.ranks.start(planned.plan)))
        return len(self._under_way) < self.depth

    @property
    def busy(self) -> bool:
        """There is a result to wait for."""
        return bool(self._under_way)

    def wait(self, seconds: float | None) -> bool:
        """True once the oldest step's result is here."""
        return self._under_way[0][1].wait(seconds)

    def wait_pushing(self) -> None:
        """Wait for the oldest step's result; a plan may need a push to reach the far ranks."""
        wait = GLANCE
        while self.ranks.progress() and not self.wait(wait):
            wait = min(wait * 2, 0.01)
        self.wait(None)

    def finish(self) -> list[protocol.Delta]:
        """What the oldest step added to its sequences; waits for it."""
        done, result = self._under_way.popleft()
        result.wait(None)
        return self.scheduler.update(done, result.outcome())
