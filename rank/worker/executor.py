"""The ranks of a replica as the lead's step loop sees them: a plan goes out to them, and its outcome comes back.

Rank 0 is the first rank of the first replica and computes with it. Of every other replica the first rank, the one that
samples, reports to rank 0 over the group that the replica's plans come by.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Protocol

from ...comm.broadcast import PlanBroadcast
from ...comm.watchdog import LocalWatchdog
from .. import protocol
from .model_runner import ModelRunner, StepFuture

POLL_INTERVAL = 1e-4  # seconds between looks for a report that is waited for


class ResultChannel(Protocol):
    """Bytes from a replica's first rank to rank 0; comm/mpi.py and comm/threads.py have it."""

    def send(self, data: bytes) -> None: ...

    def collect(self) -> list[bytes]: ...


class LocalExecutor:
    """The replica that rank 0 belongs to."""

    def __init__(self, control: PlanBroadcast, runner: ModelRunner):
        self.control = control
        self.runner = runner

    def start(self, plan: protocol.Plan) -> StepFuture:
        self.control.publish(protocol.encode_plan(plan))
        if plan.stop < 0:
            return self.runner.start(plan)
        while self.control.progress():
            pass
        self.runner.finish()
        return StepFuture()

    def progress(self) -> bool:
        return self.control.progress()


class RemoteExecutor:
    """Another replica: nothing of it is computed in this process."""

    def __init__(self, control: PlanBroadcast, mail: ResultChannel):
        self.control = control
        self.mail = mail
        self._open: deque[RemoteStepFuture] = deque()  # in the order of their plans, in which the reports come

    def start(self, plan: protocol.Plan) -> RemoteStepFuture:
        self.control.publish(protocol.encode_plan(plan))
        result = RemoteStepFuture(self)
        if plan.stop < 0:
            self._open.append(result)
        else:
            while self.control.progress():
                pass
        return result

    def progress(self) -> bool:
        return self.control.progress()

    def collect(self) -> None:
        for data in self.mail.collect():
            self._open.popleft().told = protocol.decode_step_output(data)


class RemoteStepFuture:
    def __init__(self, team: RemoteExecutor):
        self._team = team
        self.told: protocol.StepOutput | None = None

    def wait(self, seconds: float | None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        while self.told is None:
            self._team.progress()
            self._team.collect()
            if self.told is None:
                if until is not None and time.monotonic() >= until:
                    return False
                time.sleep(POLL_INTERVAL)
        return True

    def output(self) -> protocol.StepOutput:
        assert self.told is not None
        return self.told


class Reporter:
    """First rank of another replica: a thread that waits for results, in order, and tells rank 0."""

    def __init__(self, mail: ResultChannel, watch: LocalWatchdog):
        self._mail = mail
        self._watch = watch
        self._results: queue.SimpleQueue[StepFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report, name="report", daemon=True)
        self._thread.start()

    def add(self, result: StepFuture) -> None:
        self._results.put(result)

    def finish(self) -> None:
        """Report what is still to come, then end."""
        self._results.put(None)
        self._thread.join()

    def _report(self) -> None:
        try:
            while (result := self._results.get()) is not None:
                result.wait(None)
                self._mail.send(protocol.encode_step_output(result.output()))
        except BaseException as error:
            self._watch.fail(error)


def follow(runner: ModelRunner, control: PlanBroadcast, reporter: Reporter | None) -> int:
    """Every rank but rank 0: execute plans until one says stop; its exit code."""
    while True:
        plan = protocol.decode_plan(control.receive())
        if plan.stop >= 0:
            runner.finish()
            if reporter is not None:
                reporter.finish()
            return plan.stop
        result = runner.start(plan)
        if reporter is not None:
            reporter.add(result)
