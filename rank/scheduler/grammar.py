"""Rank 0's end of the grammar processes: requests' grammars, their masks, and what happens where one takes too long.

Grammars come from clients, and a short one can ask for hours of work and gigabytes of memory. So they are compiled and
asked for masks in processes of their own (grammar_process.py), one for each API key as far as there are enough. The
step loop waits for a mask for `LATE` seconds. What is later does not hold it up: the sequence leaves the step and comes
back with its mask. A grammar that takes longer than its limit costs its process: that sequence ends with an error, and
the others' grammars are compiled again.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from ... import linux_calls
from ..fork_server import ForkServer
from ..framed_socket import FramedSocket
from ..protocol import Request, Vocabulary
from . import grammar_process as process

MAX_WORKERS = 8  # processes; more keys than that share them
OUTSTANDING = 64  # grammars that a worker is asked for at once
LONGEST = 60.0  # seconds from a request to its compiled grammar, the waiting for others of its key included
LATE = 0.05  # seconds of a worker's CPU time that a step waits for masks ...
LATEST = 0.25  # ... and seconds in all
CAREFUL = 60.0  # seconds after a late mask in which no step is planned on the worker's masks before they are there
MASK_LIMIT = 1.0  # seconds for a mask; llguidance's own limits are reached after about 0.02
COMPILE_LIMIT = 5.0  # seconds; the largest schemas that requests may have take about one
LOOK_EVERY = 0.02  # seconds between two looks at what workers are doing
MAX_DEATHS = 3  # of processes that a sequence's grammar outlives
LATE_NICE = 10  # of a worker that was late: what it computes from then on waits for the ranks
OUT_OF_MEMORY = "it needs too much memory"


class GrammarError(Exception):
    """Why a request's output cannot be constrained; status: HTTP's."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Grammar:
    """One sequence's."""

    def __init__(self, request: Request, worker: Worker):
        self.request = request
        self.worker = worker
        self.tokens: list[int] = []  # of the output, all that were accepted
        self.slot = -1  # in the worker's memory; -1 while it waits to be compiled
        self.compiled = False
        self.ready = False  # its mask is there, or it is over
        self.forced: list[int] = []  # tokens of the text that has to follow, where it is ready
        self.over = ""  # why no token may follow: "stop", the text is complete, or "error"
        self.ended_at = 0  # with how many output tokens it was over
        self.error = ""
        self.status = 0  # HTTP's, of an error
        self.deaths = 0

    @property
    def planned_ahead(self) -> bool:
        """Whether steps may be planned that need masks which are not there yet."""
        return self.worker.prompt

    def allows(self, token: int) -> bool:
        """Whether the token may be next, as far as that is known."""
        process = self.worker.process
        if not self.ready or self.over or process is None:
            return True
        word, bit = divmod(token, 32)
        return word < process.bits.shape[2] and bool(process.bits[self.slot, 0, word] >> bit & 1)

    def end(self, over: str, error: str = "", status: int = 400) -> None:
        self.over, self.error, self.ready = over, error, True
        self.status = status if over == "error" else 0
        self.ended_at = len(self.tokens)

    def drop(self) -> None:
        """Its sequence has ended."""
        self.worker.drop(self)


class Process:
    """A worker's process while it lives: its socket, its memory, its free slots."""

    def __init__(self, number: int, sock: socket.socket, memory: mmap.mmap, words: int):
        """number: the fork server's, of the worker."""
        self.number = number
        self.messages = FramedSocket(sock, process.ToRank)
        self.bits = process.masks_in(memory, words)
        self.progress = process.Progress(memory)
        self.free = list(range(process.SLOTS))

    @property
    def pid(self) -> int:
        return self.progress.pid

    def cpu(self) -> float:
        """Seconds of CPU time that it has used."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)  # the kernel's clock id of another process (CPUCLOCK_SCHED)
        return 0.0

    def lower(self) -> None:
        """Have all its threads wait for the ranks."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), LATE_NICE)


class Worker:
    """A key's grammars and the process that has them; it starts another where that one ends."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.process: Process | None = None
        self.queue: deque[Grammar] = deque()  # to be compiled
        self.grammars: dict[int, Grammar] = {}  # by slot
        self.waiting = 0  # of these, whose masks are not there yet
        self.prompt = True  # no mask was late lately
        self.prompt_at = 0.0  # when it counts as prompt again
        # The threads' work: when it was first seen, and the process's CPU time then.
        self._stuck: dict[tuple[bool, int, float], tuple[float, float]] = {}

    @property
    def idle(self) -> bool:
        return not self.queue and not self.grammars

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.waiting)

    def add(self, grammar: Grammar) -> None:
        self.queue.append(grammar)
        self.start()

    def start(self) -> None:
        """Have as many grammars compiled as may be at once."""
        if not self.queue:
            return
        if self.process is None:
            try:
                self.process = self.pool.new_process(self)
            except OSError as error:  # no process, descriptor or memory is left
                self.pool.changed += self.give_up(f"the output cannot be constrained now: {error}", 500)
                return
        while self.queue and self.waiting < OUTSTANDING and self.process.free:
            grammar = self.queue.popleft()
            grammar.slot = heapq.heappop(self.process.free)
            self.grammars[grammar.slot] = grammar
            self.waiting += 1
            sampling = grammar.request.sampling
            fields = grammar.request.grammar, sampling.stop_token_ids, sampling.min_tokens, grammar.tokens
            self.process.messages.send(process.Start(grammar.slot, *fields))

    def give_up(self, why: str, status: int) -> list[Grammar]:
        """End all grammars; those that were not over."""
        ended = [one for one in (*self.queue, *self.grammars.values()) if not one.over]
        for grammar in ended:
            grammar.end("error", why, status)
        self.queue.clear()
        self.grammars.clear()
        self.waiting = 0
        return ended

    def ask(self, grammars: list[tuple[Grammar, list[int]]], kind: type[process.Accept] | type[process.Draft]) -> None:
        """Pass on tokens of sequences whose masks are there: new ones, or drafts."""
        assert self.process is not None
        for grammar, _ in grammars:
            grammar.ready = False
        self.waiting += len(grammars)
        self.process.messages.send(kind([(grammar.slot, tokens) for grammar, tokens in grammars]))

    def drop(self, grammar: Grammar) -> None:
        if grammar.slot < 0:
            with contextlib.suppress(ValueError):
                self.queue.remove(grammar)
        elif self.grammars.pop(grammar.slot, None) is not None:
            self.waiting -= not grammar.ready
            if self.process is not None:
                self.process.messages.send(process.Forget(grammar.slot))
            grammar.slot = -1
            self.start()

    def receive(self) -> list[Grammar]:
        """Read the process's messages. Returns grammars that are compiled or over since."""
        assert self.process is not None
        self.process.messages.flush()
        messages = self.process.messages.receive()
        if messages is None:
            return self._died()
        found = []
        for message in messages:
            if isinstance(message, process.Freed):
                heapq.heappush(self.process.free, message.slot)
            elif (grammar := self.grammars.get(message.slot)) is not None:
                found += [grammar] if self._state(grammar, message) else []
        self.start()
        return found

    def _state(self, grammar: Grammar, state: process.State) -> bool:
        """Returns whether the grammar is compiled now, or over."""
        if not state.over and state.count < len(grammar.tokens):  # sampled while it was compiled again
            assert self.process is not None
            self.process.messages.send(process.Accept([(grammar.slot, grammar.tokens[state.count :])]))
            return False
        self.waiting -= not grammar.ready
        if state.over:
            grammar.end(state.over, state.error)
            grammar.ended_at = state.count
        grammar.ready, grammar.forced = True, state.forced
        news, grammar.compiled = bool(state.over) or not grammar.compiled, True
        return news

    def cpu(self) -> float:
        """Seconds of CPU time that its process has used."""
        return self.process.cpu() if self.process is not None and self.process.pid else 0.0

    def late(self, now: float) -> None:
        """A step did not get masks in time."""
        self.prompt, self.prompt_at = False, now + CAREFUL
        if self.process is not None:
            self.process.lower()

    def look(self, now: float) -> list[Grammar]:
        """Whether the process works on something for too long, and then kill it. Returns grammars that are over."""
        if not self.prompt and now >= self.prompt_at:
            self.prompt = True
        if self.process is None or not self.process.pid:
            return []
        used = self.cpu()
        self._stuck = work = {one: self._stuck.get(one) or (now, used) for one in self.process.progress.work()}
        for (compiles, _, _), (since, cpu) in work.items():
            limit = COMPILE_LIMIT if compiles else MASK_LIMIT
            if now - since > limit and used - cpu > limit:  # both: on a busy machine nothing that is merely slow
                return self._died()
        return []

    def _died(self) -> list[Grammar]:
        """The process has ended or is to end: blame a grammar, and have the others compiled again."""
        assert self.process is not None
        self.pool.hear_server()
        work, now = self.process.progress.work(), time.monotonic()
        blamed: dict[int, str] = {}
        for compiles, slot, since in work:
            if now - since > (limit := COMPILE_LIMIT if compiles else MASK_LIMIT):
                blamed[slot] = f"it takes more than {limit:g} s to {'compile' if compiles else 'find the next token'}"
        if work and not blamed:  # an allocation failed, or the system ended it; the longest at work is the likeliest
            blamed[min(work, key=lambda one: one[2])[1]] = OUT_OF_MEMORY
        self.pool.forget(self)
        found = []
        for slot, grammar in list(self.grammars.items()):
            grammar.deaths += 1
            why = blamed.get(slot, "its process ended several times" if grammar.deaths > MAX_DEATHS else "")
            why = self.pool.broken or why
            grammar.slot = -1
            if grammar.over:
                continue
            if why:
                hint = "" if self.pool.broken else "; make the schema or the grammar simpler"
                grammar.end("error", f"the output cannot be constrained: {why}{hint}")
                found.append(grammar)
            else:
                grammar.ready = False
                self.queue.append(grammar)
        self.grammars.clear()
        self.waiting = 0
        self._stuck = {}
        self.start()
        return found


class Pool:
    """The processes for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self.words = process.mask_words(vocabulary)
        self.everything = b"\xff" * (self.words * 4)  # a mask that allows all tokens
        self._workers: dict[str, Worker] = {}  # by key
        self._poll = select.poll()
        self._by_fd: dict[int, Worker] = {}
        self._looked = 0.0
        self.settings = msgspec.msgpack.encode(vocabulary)
        self._server = ForkServer(process.__name__, self.settings, "grammar process")
        self.broken = ""  # why nothing can be compiled
        self.changed: list[Grammar] = []  # compiled or over since; who looks takes them out

    def worker(self, owner: str) -> Worker:
        """The worker of a key; keys share the one with the fewest sequences where there are too many."""
        found = self._workers.get(owner)
        if found is None:
            made = list({id(one): one for one in self._workers.values()}.values())
            if len(made) < MAX_WORKERS:
                found = Worker(self)
            else:
                found = min(made, key=lambda one: len(one.queue) + len(one.grammars))
                if found.idle:  # its keys have ended; what it keeps of them goes with it
                    self._workers = {name: one for name, one in self._workers.items() if one is not found}
                    self.forget(found)
                    found = Worker(self)
            self._workers[owner] = found
        return found

    @property
    def busy(self) -> bool:
        return bool(self.changed) or any(worker.busy for worker in self._workers.values())

    def new_process(self, worker: Worker) -> Process:
        if not self._server.running:
            self._stop_server()
            control = self._server.start()
            control.setblocking(False)
            self._poll.register(control, select.POLLIN)
        size = process.memory_size(self.words)
        file = linux_calls.memory_file("masks", size)
        try:
            memory = mmap.mmap(file, size)
            number, sock = self._server.fork([file])
        finally:
            os.close(file)
        sock.setblocking(False)
        self._poll.register(sock, select.POLLIN)
        self._by_fd[sock.fileno()] = worker
        return Process(number, sock, memory, self.words)

    def _stop_server(self) -> None:
        if self._server.control is not None:
            self._poll.unregister(self._server.control)
        self._server.stop()

    def forget(self, worker: Worker) -> None:
        """End a worker's process, whatever it does."""
        if worker.process is not None:
            sock = worker.process.messages.socket
            self._poll.unregister(sock)
            del self._by_fd[sock.fileno()]
            sock.close()
            with contextlib.suppress(OSError):
                self._server.end(worker.process.number)
            worker.process = None

    def poll(self, seconds: float = 0.0) -> None:
        """Read the processes' messages, waiting so long for one."""
        found = self.changed
        for fd, _ in self._poll.poll(seconds * 1e3):
            if fd in self._by_fd:
                found += self._by_fd[fd].receive()
            else:
                self.hear_server()
        now = time.monotonic()
        if now >= self._looked + LOOK_EVERY:
            self._looked = now
            for worker in set(self._workers.values()):
                found += worker.look(now)

    def hear_server(self) -> None:
        """Take over that the tokenizer cannot be read, or that the fork server has ended: its workers end with it."""
        with contextlib.suppress(BlockingIOError):
            while (answer := self._server.answer()) is not None:
                self.broken = answer[1] or self.broken
            self._stop_server()

    def give_up(self, why: str, status: int) -> list[Grammar]:
        """End all sequences' grammars; those that were not over."""
        return [grammar for worker in set(self._workers.values()) for grammar in worker.give_up(why, status)]

    def close(self) -> None:
        for worker in set(self._workers.values()):
            self.forget(worker)
        self._stop_server()


def accept(sampled: Iterable[tuple[Grammar, list[int]]]) -> None:
    """Take over tokens that sequences have sampled, and wait a little for the masks of what may follow.

    A worker that was late is not waited for, until it has been prompt for some time.
    """
    pairs = list(sampled)
    for grammar, tokens in pairs:
        grammar.tokens += tokens
    _ask(pairs, process.Accept)


def draft(drafted: Iterable[tuple[Grammar, list[int]]]) -> None:
    """Wait a little for the masks of what may follow each of these drafts."""
    _ask(drafted, process.Draft)


def _ask(pairs: Iterable[tuple[Grammar, list[int]]], kind: type[process.Accept] | type[process.Draft]) -> None:
    asked: dict[int, tuple[Worker, list[tuple[Grammar, list[int]]]]] = {}
    for grammar, tokens in pairs:
        if grammar.ready and not grammar.over:
            asked.setdefault(id(grammar.worker), (grammar.worker, []))[1].append((grammar, tokens))
    for worker, grammars in asked.values():
        worker.ask(grammars, kind)
    waited = [(worker, grammar) for worker, pairs in asked.values() if worker.prompt for grammar, _ in pairs]
    began = time.monotonic()
    cpu = {id(worker): worker.cpu() for worker, _ in waited}
    while waited and (now := time.monotonic()) < began + LATEST:
        # A worker that did not get a core is not late yet.
        if now >= began + LATE and all(worker.cpu() >= cpu[id(worker)] + LATE for worker, _ in waited):
            break
        waited[0][0].pool.poll(LATE / 5)
        waited = [one for one in waited if not one[1].ready]
    for worker in {id(worker): worker for worker, _ in waited}.values():
        worker.late(time.monotonic())


class Constrained(Protocol):
    """A sequence that may have a grammar."""

    grammar: Grammar | None
    finished: bool


def masks(
    sequences: Sequence[Constrained], dropped: Sequence[object] = (), sampled: Sequence[tuple[int, int]] = ()
) -> bytes:
    """The tokens that may follow each sequence's: a bit for each token, in 32-bit integers, one sequence after the
    other.

    All have a grammar. What is sampled of those that are over, finished or dropped counts for nothing: all is allowed.
    sampled: how many tokens the step samples of each, and how many of these are drafted, if not one and none. Behind
    the last draft nothing counts.
    """
    rows = []
    for one, (count, drafts) in zip(sequences, sampled or [(1, 0)] * len(sequences), strict=True):
        assert one.grammar is not None
        worker = one.grammar.worker
        if one.finished or one in dropped or one.grammar.over:
            rows += [worker.pool.everything] * count
        else:
            assert worker.process is not None
            rows += [mask.data for mask in worker.process.bits[one.grammar.slot, : 1 + drafts]]
            rows += [worker.pool.everything] * (count - 1 - drafts)
    return b"".join(rows)


class Grammars:
    """The grammars of all requests: no step waits for one that is compiled, and no key for another's."""

    def __init__(self) -> None:
        # Deadlines by request id: requests that are being compiled and were not aborted; in order.
        self._open: dict[str, tuple[float, Grammar]] = {}
        self._refused: list[Request] = []  # there is no vocabulary
        self._pool: Pool | None = None

    @property
    def pending(self) -> bool:
        return bool(self._open or self._refused)

    @property
    def busy(self) -> bool:
        """Whether something is compiled, or a mask is awaited."""
        return bool(self._refused) or (self._pool is not None and self._pool.busy)

    def know(self, vocabulary: Vocabulary) -> None:
        """Requests that come from now on are for this vocabulary. What is left of those for another ends."""
        new = Pool(vocabulary)
        if (old := self._pool) is not None:
            if old.settings == new.settings:
                return
            why = "the model's vocabulary has changed; send the request again"
            new.changed = old.changed + old.give_up(f"the output cannot be constrained any more: {why}", 503)
            old.close()
        self._pool = new

    def compile(self, request: Request) -> Grammar | None:
        """Its grammar while it is compiled; None where no vocabulary is known."""
        if self._pool is None:
            self._refused.append(request)
            return None
        grammar = Grammar(request, self._pool.worker(request.owner))
        self._open[request.id] = time.monotonic() + LONGEST, grammar
        grammar.worker.add(grammar)
        return grammar

    def close(self) -> None:
        """End the processes, and with them what is kept of the model; what was to be compiled is given up."""
        self._open.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            if (found := self._open.pop(id, None)) is not None:
                found[1].drop()

    def take(self) -> tuple[list[tuple[Request, Grammar | GrammarError]], list[Grammar]]:
        """The requests that are compiled, with their grammars, or with why there is none; and grammars that were over
        later than their sequences' steps."""
        made: list[tuple[Request, Grammar | GrammarError]] = []
        ended: list[Grammar] = []
        for request in self._refused:
            made.append((request, GrammarError("the output cannot be constrained: the vocabulary is not known")))
        self._refused = []
        if self._pool is None:
            return made, ended
        if self._pool.busy:
            self._pool.poll()
        changed, self._pool.changed = self._pool.changed, []
        for grammar in changed:
            if self._open.get(grammar.request.id, (0.0, None))[1] is not grammar:
                if grammar.over:
                    ended.append(grammar)
                continue
            del self._open[grammar.request.id]
            if grammar.over == "error":
                made.append((grammar.request, GrammarError(grammar.error, grammar.status)))
                grammar.drop()
            else:
                made.append((grammar.request, grammar))
        now = time.monotonic()
        while self._open and (first := next(iter(self._open.values())))[0] < now:
            grammar = first[1]
            why = f"it was not compiled within {LONGEST:g} s, make the schema or the grammar simpler"
            made.append((grammar.request, GrammarError(f"the output cannot be constrained: {why}")))
            self.abort([grammar.request.id])
        return made, ended
