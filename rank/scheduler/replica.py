"""One replica of the model on rank 0: its scheduler, its executor and the steps in flight."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from .. import protocol
from .grammar import accept, draft, masks
from .scheduler import Scheduler
from .step import ScheduledStep

POLL_INTERVAL = 2e-4  # seconds between polls for a result while plans are still being sent


class StepFuture(Protocol):
    """The output of a step that may still run."""

    def wait(self, seconds: float | None) -> bool:
        """Wait for so many seconds, or without limit. Returns whether the output is here."""

    def output(self) -> protocol.StepOutput:
        """The step output. Call it only after `wait` has returned True."""


class Executor(Protocol):
    """The ranks of one replica; rank/worker/executor.py has the real ones."""

    def start(self, plan: protocol.Plan) -> StepFuture:
        """Send the plan to every rank and start the step."""

    def mask(self, masks: protocol.Masks) -> None:
        """Send masks to the ranks that sample, which wait for them."""

    def show(self, image: protocol.Pixels) -> None:
        """Send an image to every rank."""

    def progress(self) -> bool:
        """Progress outstanding sends; False when none is left."""

    def counters(self) -> dict[str, int]:
        """Counters of the ranks for protocol.Stats; empty where they are other processes."""


class Replica:
    """Keeps one step in flight for each pipeline stage and one more, which is planned and sent meanwhile."""

    def __init__(self, scheduler: Scheduler, executor: Executor):
        self.scheduler = scheduler
        self.executor = executor
        self.depth = scheduler.stages + 1
        self._in_flight: deque[tuple[ScheduledStep, StepFuture]] = deque()
        self._unmasked: deque[ScheduledStep] = deque()  # steps in flight that wait for masks

    @property
    def idle(self) -> bool:
        return not self._in_flight and self.scheduler.idle

    def plan(self) -> bool:
        """Start another step if possible. False when no further one can start before the oldest has its result."""
        if len(self._in_flight) == self.depth:
            return False
        planned = self.scheduler.schedule()
        if planned is None:
            return False
        for image in planned.pixels:
            self.executor.show(image)
        self._in_flight.append((planned, self.executor.start(planned.plan)))
        if planned.constrained:
            self._unmasked.append(planned)
            if planned.query_len > 1:  # nothing is in flight of sequences with drafts: their next masks are there
                drafted = ((one.sequence.grammar, one.drafts) for one in planned.constrained if one.drafts)
                draft((grammar, drafts) for grammar, drafts in drafted if grammar is not None)
            self._send_masks()
        return len(self._in_flight) < self.depth

    def stats(self) -> protocol.Stats:
        return msgspec.structs.replace(self.scheduler.stats(), **self.executor.counters())

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def wait(self, seconds: float | None) -> bool:
        """Wait for the oldest step's result; returns whether it is here."""
        return self._in_flight[0][1].wait(seconds)

    def wait_with_progress(self) -> None:
        """Wait for the oldest step's result while progressing the sends, which MPI needs to reach other hosts."""
        wait = POLL_INTERVAL
        while self.executor.progress() and not self.wait(wait):
            wait = min(wait * 2, 0.01)
        self.wait(None)

    def finish(self) -> list[protocol.Delta]:
        """Wait for the oldest step and apply its output. Returns what it added to each sequence."""
        done, result = self._in_flight.popleft()
        result.wait(None)
        output = result.output()
        if done.constrained:
            accept(done.accepted(output.tokens(), output.failed))
        deltas = self.scheduler.update(done, output)
        self._send_masks()
        return deltas

    def _send_masks(self) -> None:
        """Send the masks of steps in flight, in order, as far as all tokens before are known.

        The ranks wait for them, with everybody's sequences: a sequence whose mask is late leaves its steps.
        """
        while self._unmasked and self._unmasked[0].masks_due:
            step = self._unmasked.popleft()
            for sequence in step.maskless:
                self.scheduler.withdraw(sequence, [other for other, _ in self._in_flight])
            sampled = [(one.sampled, len(one.drafts)) for one in step.constrained]
            bits = masks([one.sequence for one in step.constrained], step.dropped, sampled)
            self.executor.mask(protocol.Masks(step.plan.step, bits))
