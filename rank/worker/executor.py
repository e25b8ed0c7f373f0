"""Executors send a replica's ranks their plans and return the step outputs to rank 0's step loop.

Rank 0 is the first rank of the first replica and computes with it. The first rank of every other replica samples, and
sends step outputs to rank 0 over the group on which the replica gets its plans.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Protocol

import msgspec

from ...comm.broadcast import PlanBroadcast
from ...comm.watchdog import LocalWatchdog
from .. import protocol
from .model_runner import ModelRunner, StepFuture

POLL_INTERVAL = 1e-4  # seconds between polls for a step output


class ResultChannel(Protocol):
    """Bytes from a replica's first rank to rank 0; comm/mpi.py and comm/threads.py implement it."""

    def send(self, data: bytes) -> None: ...

    def collect(self) -> list[bytes]: ...


class LocalExecutor:
    """The executor of the replica that rank 0 belongs to."""

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

    def mask(self, masks: protocol.Masks) -> None:
        self.control.publish(protocol.encode_plan(masks))
        self.runner.mask(masks)

    def show(self, image: protocol.Pixels) -> None:
        show(self.control, image)
        self.runner.show(image)

    def progress(self) -> bool:
        return self.control.progress()

    def counters(self) -> dict[str, int]:
        offload = self.runner.model.offload
        experts = {} if offload is None else {f"experts_{name}": n for name, n in vars(offload.counters).items()}
        return experts | {"tower_seconds": self.runner.tower_seconds}


class RemoteExecutor:
    """The executor of another replica, which computes in other processes."""

    def __init__(self, control: PlanBroadcast, channel: ResultChannel):
        self.control = control
        self.channel = channel
        self._pending: deque[RemoteStepFuture] = deque()  # in the order of the plans, which is that of the step outputs

    def start(self, plan: protocol.Plan) -> RemoteStepFuture:
        self.control.publish(protocol.encode_plan(plan))
        result = RemoteStepFuture(self)
        if plan.stop < 0:
            self._pending.append(result)
        else:
            while self.control.progress():
                pass
        return result

    def mask(self, masks: protocol.Masks) -> None:
        self.control.publish(protocol.encode_plan(masks))

    def show(self, image: protocol.Pixels) -> None:
        show(self.control, image)

    def progress(self) -> bool:
        return self.control.progress()

    def counters(self) -> dict[str, int]:
        return {}

    def collect(self) -> None:
        """Assign the step outputs that have arrived."""
        for data in self.channel.collect():
            self._pending.popleft().result = protocol.decode_step_output(data)


class RemoteStepFuture:
    """The output of a step of another replica."""

    def __init__(self, executor: RemoteExecutor):
        self._executor = executor
        self.result: protocol.StepOutput | None = None

    def wait(self, seconds: float | None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        while self.result is None:
            self._executor.progress()
            self._executor.collect()
            if self.result is None:
                if until is not None and time.monotonic() >= until:
                    return False
                time.sleep(POLL_INTERVAL)
        return True

    def output(self) -> protocol.StepOutput:
        assert self.result is not None
        return self.result


def show(control: PlanBroadcast, image: protocol.Pixels) -> None:
    """Tell all ranks of an image, and send its pixels to the one that has to make its features."""
    control.publish(protocol.encode_plan(msgspec.structs.replace(image, data=b"")))
    if (to := control.size + image.rank) != control.rank:
        control.send(image.data, to)


class Reporter:
    """Runs on the first rank of another replica: a thread that sends step outputs to rank 0, in order."""

    def __init__(self, channel: ResultChannel, watch: LocalWatchdog):
        self._channel = channel
        self._watch = watch
        self._results: queue.SimpleQueue[StepFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report, name="report", daemon=True)
        self._thread.start()

    def add(self, result: StepFuture) -> None:
        self._results.put(result)

    def finish(self) -> None:
        """Send what is still to come, then end the thread."""
        self._results.put(None)
        self._thread.join()

    def _report(self) -> None:
        try:
            while (result := self._results.get()) is not None:
                result.wait(None)
                self._channel.send(protocol.encode_step_output(result.output()))
        except BaseException as error:
            self._watch.fail(error)


def follow(runner: ModelRunner, control: PlanBroadcast, reporter: Reporter | None) -> protocol.Plan:
    """The main loop of every rank but rank 0: execute plans until one stops the job. Returns that one."""
    while True:
        plan = protocol.decode_plan(control.receive())
        if isinstance(plan, protocol.Masks):
            runner.mask(plan)
            continue
        if isinstance(plan, protocol.Pixels):
            if control.rank == control.size + plan.rank:
                plan = msgspec.structs.replace(plan, data=control.take(plan.height * plan.width * 3))
            runner.show(plan)
            continue
        if plan.stop >= 0:
            runner.finish()
            if reporter is not None:
                reporter.finish()
            return plan
        result = runner.start(plan)
        if reporter is not None:
            reporter.add(result)
