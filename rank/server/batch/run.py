"""A batch job's life: every line of the input to the ranks, every answer into the journal, and an end in time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time

from .... import errors
from ... import nvml
from ...protocol import Ready
from ..api_error import ApiError
from ..blocking import on_disk
from ..engine_client import EngineClient
from ..text_engine import TextEngine
from . import batch_input, output, summary
from .admission import Admission, enough
from .answers import Answers
from .batch_input import Feed, Reader
from .config import BatchConfig
from .deadline import Deadline
from .journal import MAX_PENDING, Found, Journal
from .progress import Counts, Progress, duration

LOOK_EVERY = 1.0
LEAVE_PATIENCE = 3.0  # seconds for the ranks to end


class BatchRun:
    """One start of a job. `journal` is open; `link` listens. Everything here runs on one asyncio loop."""

    def __init__(self, config: BatchConfig, journal: Journal, link: EngineClient, engine: TextEngine):
        self.config = config
        self.journal = journal
        self.link = link
        self.engine = engine
        self.progress = Progress(config.columns, config.interval)
        self.before = Found()  # by earlier ones
        self.reason = ""  # why no more requests are taken, or the job ended
        self.code: int | None = None  # of an end that cannot wait
        self._begun = time.monotonic()
        self._first = 0.0  # when the first request went out
        self._end = config.end_time - config.reserve if config.end_time else float("inf")  # Unix time
        self._deadline = Deadline(self._end)
        self._answers = Answers(engine, journal, self._deadline, self.end)
        self.counts = self._answers.counts
        self._reader: Reader
        self._all_read = self._too_short = False
        self._world: Ready | None = None
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._energy: float | None = None  # of the GPUs, in joules, when the first request went out
        link.on_lost = self._lost
        link.on_draining = lambda: self.stop("asked to by a signal")

    # Events that may come at any time.

    def stop(self, reason: str) -> None:
        """Take no more requests; what is under way is finished."""
        if not self._stopping.is_set():
            self.reason = reason
            self._stopping.set()
            if self.link.state == "restarting":
                return self.end(errors.UNFINISHED, f"{reason}, while the ranks were away")
            count = len(self._answers.under_way)
            under_way = f"{count} requests under way are finished first" if count else "at once"
            self.progress.say(f"stopping, {reason}: {under_way}")

    def end(self, code: int, reason: str) -> None:
        """Give up what is under way."""
        if self.code is None:
            self.code, self.reason = code, reason
            self._woken.set()

    def _lost(self) -> None:
        fatal = self.link.fatal
        if self.link.state != "restarting":
            self.end(fatal.code if fatal else errors.RANK_FAILED, fatal.message if fatal else "the ranks are gone")
        elif self._stopping.is_set():  # nobody starts them again
            if fatal and fatal.code == errors.STOPPED:
                self.end(fatal.code, fatal.message)
            else:
                self.end(errors.UNFINISHED, f"{self.reason}; then the ranks ended")
        elif count := len(self._answers.under_way):
            self.progress.say(f"the ranks ended; {count} requests are asked again when they are back")

    # The run.

    async def run(self) -> int:
        """Until all is done, or as much as can be; the job's exit code."""
        ticker = asyncio.ensure_future(self._tick())
        work = asyncio.ensure_future(self._work())
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait([work, woken], return_when=asyncio.FIRST_COMPLETED)
            await self._abandon(work)
            if not work.cancelled():
                work.result()
        except errors.FatalError as stop:
            self.code, self.reason = stop.code, str(stop)
        finally:
            ticker.cancel()
            woken.cancel()
        await self._answers.settle()
        return await self._conclude()

    async def _work(self) -> None:
        await self._recover()
        self._reader = Reader(self.config.input, self.before.finished)
        counting = asyncio.ensure_future(on_disk(batch_input.count, self.config.input))
        counting.add_done_callback(self._counted)
        feed = Feed(iter(self._reader))
        admission = asyncio.ensure_future(self._admit(feed))
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([admission, stopped], return_when=asyncio.FIRST_COMPLETED)
            admission.cancel()
            await asyncio.wait([admission])
            if not admission.cancelled():
                admission.result()
            while waiting := self._answers.under_way | self._answers.records:
                await asyncio.wait(waiting)
        finally:
            feed.close()
            admission.cancel()
            stopped.cancel()

    def _counted(self, counting: asyncio.Future[int]) -> None:
        if not counting.cancelled() and counting.exception() is None:
            self.progress.total = counting.result()

    async def _recover(self) -> None:
        found = await on_disk(self.journal.recover)
        self.before, self.progress.before = found, found.answered + found.failed
        if found.finished:
            self.progress.say(f"going on after {len(found.finished)} finished requests in {self.journal.path}")
        if found.torn:
            self.progress.say(f"the journal's last line was cut off ({found.torn} bytes); its request is done again")
        if found.damaged:
            self.progress.say(f"the journal has {found.damaged} damaged lines; their requests are done again")

    async def _admit(self, feed: Feed) -> None:
        """One task for each request, as many as the ranks can use."""
        room: Admission | None = None
        async for item in feed:
            request = self._answers.read(item)
            if request is None:
                continue
            if room is None:
                room = Admission(enough((await self._ready()).max_num_seqs))
            taken = await room.take(request.sequences())
            while self.journal.pending_bytes > MAX_PENDING:
                await asyncio.sleep(0.05)
            if not self._deadline.fits(self._answers.limit(request)):
                self.stop("the time that is left is too short for another request")
                return
            self._answers.begin(item, request).add_done_callback(functools.partial(_give, room, taken))
        self._all_read = True

    async def _ready(self) -> Ready:
        """Wait for tokenizer and ranks; energy and rates count from here."""
        try:
            await self.engine.load()
        except errors.FatalError:
            raise
        except Exception as error:  # whatever a damaged file makes the libraries raise
            raise errors.FatalError(
                f"the tokenizer in {self.config.server.model_dir} cannot be read: {error}", errors.MODEL
            ) from None
        with contextlib.suppress(ApiError):  # `_lost` has the word
            self._world = await self.link.wait_ready()
            self._first = time.monotonic()
            self._energy = self._joules()
            self.progress.began()
            ranks = "one rank" if self._world.ranks == 1 else f"{self._world.ranks} ranks"
            took = duration(self._first - self._begun)
            self.progress.say(f"{self.engine.names[0]} is ready on {ranks} after {took}; answering {self.config.input}")
            return self._world
        await asyncio.Event().wait()
        raise AssertionError

    async def _tick(self) -> None:
        """Show progress, and end the job in time; not by one timer, as clocks are set."""
        while self.code is None:
            await asyncio.sleep(min(LOOK_EVERY, max(0.0, self._end - time.time())))
            if time.time() >= self._end:
                self._time_is_over()
            elif self._first:
                self.progress.look(self.counts.done, self._answers.output_tokens)

    def _time_is_over(self) -> None:
        self._too_short = not self.counts.done
        self.end(
            errors.UNFINISHED, f"the time is over; {len(self._answers.under_way)} requests under way were given up"
        )

    # The end.

    async def _abandon(self, work: asyncio.Task[None]) -> None:
        """Cancel what still runs: its sequences are freed on the ranks."""
        tasks = [work, *self._answers.under_way]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _conclude(self) -> int:
        """Write the output where all is done; tell what there is to tell."""
        self.progress.look(self.counts.done, self.counts.output_tokens, last=True)
        self.progress.close()
        failed = self.before.failed + self.counts.failed
        complete = self.code is None and self._all_read
        if complete:
            complete = await self._finish(failed)
        elif self.code is None:
            self.code = errors.UNFINISHED
        assert self.code is not None
        if self._too_short:
            self.code = errors.ERROR
            self.reason = "the time was over before one request was finished: more time is needed"
        told = self._summary(complete, failed)
        fatal = self.link.fatal  # its rank has printed the reason, unless a signal has stopped it
        printed = fatal is not None and fatal.code != errors.STOPPED and self.reason == fatal.message
        self.progress.say(summary.text(told, printed))
        if self.config.summary:
            try:
                await on_disk(summary.save, told, self.config.summary)
            except OSError as error:
                self.progress.say(f"--summary {self.config.summary}: {error.strerror}")
        if not complete:
            self.progress.say(f"what is finished is in {self.journal.path}; the same command goes on there")
        return self.code

    async def _finish(self, failed: int) -> bool:
        config = self.config
        write = (self.journal, self._reader.seen, config.output, config.errors, config.ordered)
        try:
            orphans = await on_disk(output.write, *write)
            await on_disk(self.journal.remove)
        except errors.FatalError as stop:
            self.code, self.reason = stop.code, str(stop)
            return False
        if orphans:
            self.progress.say(f"{orphans} finished requests are not in the input any more; they are left out")
        self.code, self.reason = errors.OK, f"{config.output} has every answer"
        if failed and config.fail_on_error:
            self.code, self.reason = errors.ERROR, f"{failed} requests failed (--fail-on-error)"
        return True

    def _summary(self, complete: bool, failed: int) -> summary.Summary:
        config, run, before = self.config, self.counts, self.before
        now = time.monotonic()
        first = self._first or now
        everything = Counts(
            before.answered + run.answered,
            failed,
            before.prompt_tokens + run.prompt_tokens,
            before.output_tokens + run.output_tokens,
        )
        told = summary.Summary(
            state="complete" if complete else "unfinished" if self.code == errors.UNFINISHED else "stopped",
            exit_code=self.code or 0,
            reason=self.reason,
            input=config.input,
            output=config.output if complete else "",
            errors=config.errors if complete and failed else "",
            model=self.engine.names[0],
            ranks=self._world.ranks if self._world else 0,
            run=summary.totals(run),
            total=summary.totals(everything),
            seconds=round(now - self._begun, 3),
            loading_seconds=round(first - self._begun, 3),
            requests_per_second=summary.rate(run.done, now - first),
            output_tokens_per_second=summary.rate(run.output_tokens, now - first),
            total_tokens_per_second=summary.rate(run.prompt_tokens + run.output_tokens, now - first),
        )
        energy = self._joules()
        if energy is not None and self._energy is not None and self._world is not None:
            joules = energy - self._energy
            told.energy_joules, told.energy_gpus = round(joules, 1), len(config.gpus)
            if len(set(self._world.hosts)) == 1 and run.output_tokens:
                told.joules_per_output_token = round(joules / run.output_tokens, 4)
        return told

    def _joules(self) -> float | None:
        """The energy that this host's GPUs have used; None where it cannot be measured."""
        with contextlib.suppress(OSError):
            return nvml.joules(self.config.gpus) if self.config.gpus else None
        return None

    async def leave(self, code: int) -> None:
        """End the ranks; without a supervisor they are the ones who end with the code."""
        if self.link.state in ("failed", "restarting") or (self.config.supervised and self.link.state != "ready"):
            return  # nobody is there; or the supervisor ends them, who cannot hear us yet
        gone = asyncio.Event()
        self.link.on_lost = gone.set
        self.link.drain(errors.OK if self.config.supervised else code)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gone.wait(), LEAVE_PATIENCE if self.config.supervised else None)


def _give(room: Admission, count: int, _: object) -> None:
    room.give(count)
