"""`python -m phalanx.rank.server`: the process with clients.

It answers from its first second on ("loading"), so nothing heavy is imported here, and the tokenizer is read in a
thread. The launcher starts it in a session of its own; its end, and the job's, are reported by errors.py's codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import errors, linux_calls, logs
from .. import heap
from . import server_registry, tls
from .api_error import ApiError
from .config import VARIABLE, HandoverConfig, ServerConfig, take
from .engine_client import EngineClient
from .handover import Handover
from .metrics_push import MetricsPush
from .registration import DRAINING, READY, STARTING, Registration

if TYPE_CHECKING:
    from .http.state import ServerState

log = logging.getLogger("phalanx.server")
IDLE_LOOK = 1.0  # seconds between two looks at whether anything is running
LAST_WORDS = 1.5  # seconds for errors to reach the clients at the end; the launcher allows 2


def main() -> int:
    # Unhandled it would end the process; a drain that comes so early is repeated by its sender.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        config = take(ServerConfig, VARIABLE, "serve")
    except ValueError as error:
        logs.say(str(error), "error")
        return errors.USAGE
    if not prepare(config):
        return errors.ERROR
    return asyncio.run(Server(config).run())


def prepare(config: ServerConfig) -> bool:
    """Prepares every process in the server process's place. False where its parent has ended already."""
    heap.return_large()
    if config.log_format == "json":
        logs.use_json("server")
    logs.start(config.log_level.upper(), "%(message)s")
    logging.getLogger("tornado.access").setLevel(logging.ERROR)
    if not _tie_to_parent(config.parent_pid):
        return False
    if config.cpus:
        try:
            linux_calls.bind(config.cpus)
        except OSError as error:
            log.warning("the server process stays on all cores: cpus %s: %s", config.cpus, error)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one per client
    return True


def _tie_to_parent(parent_pid: int) -> bool:
    """End with the parent, however it ends. False where it has ended already."""
    linux_calls.end_with_parent(signal.SIGTERM)
    return not parent_pid or os.getppid() == parent_pid


class Server:
    """The process's life: listen, load, serve, drain or stop."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.link: EngineClient
        self._end: asyncio.Future[int]
        self._handing_over: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal or the job's end; returns the exit code."""
        from .http.app import make_app, serve
        from .http.state import ServerState
        from .models import Models
        from .text_engine import TextEngine

        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._stop, errors.OK)
        loop.add_signal_handler(signal.SIGUSR1, self._drain)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal's Ctrl-C is the launcher's to handle
        self.link = EngineClient(self.config.link, self.config.restarts_expected, self.config.timeout)
        self.link.on_lost = self._lost
        engines = [
            TextEngine(self.link, self.config.of(one), number, one.options)
            for number, one in enumerate(self.config.models)
        ] or [TextEngine(self.link, self.config)]
        models = Models(engines, self.link, self.config) if self.config.models else None
        engine = engines[0]
        try:
            self._state = ServerState(engine, self.config, models)
        except errors.FatalError as stop:
            logs.say(str(stop), "error")
            return stop.code
        context = tls.server_context(self.config.tls_cert, self.config.tls_key) if self.config.tls_cert else None
        server = serve(make_app(self._state), socket.socket(fileno=self.config.listen_fd), context)
        await self.link.listen()
        self._state.tools.start()
        if models is not None:
            models.start()
        registered = registration(self.config, self._state)
        if registered is not None:
            registered.start()
        if self._state.batches is not None:
            self._state.batches.start()
        tasks = [asyncio.ensure_future(self._greet(engine))]
        push: MetricsPush | None = None
        if self.config.metrics_push:
            push = MetricsPush(self.config.metrics_push, self._state.metrics.text)
            tasks.append(asyncio.ensure_future(push.run()))
        if self.config.handover is not None:
            if self.config.file_store:
                tasks.append(asyncio.ensure_future(self._take_files()))
            if registered is not None:
                self._handing_over = asyncio.ensure_future(self._hand_over(self.config.handover, registered))
                tasks.append(self._handing_over)
            tasks.append(asyncio.ensure_future(self._stop_in_time(self.config.handover.stop_at)))
        if self.config.idle_exit:
            tasks.append(asyncio.ensure_future(self._watch_idle()))
        try:
            return await self._end
        finally:
            for task in tasks:
                task.cancel()
            if registered is not None:
                await registered.close()
            if self._state.batches is not None:
                await self._state.batches.close()
            await self._state.written(LAST_WORDS)
            if push is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(push.close(), LAST_WORDS)
            if self._state.tracing is not None:
                await self._state.tracing.export.close(LAST_WORDS)
            if models is not None:
                models.close()
            self.link.close()
            with contextlib.suppress(OSError):  # the job's directory, when nobody is left to remove it
                os.rmdir(os.path.dirname(self.config.link))
            await asyncio.gather(self._last_words(), self._state.tools.close())
            server.stop()
            for one in engines:
                one.close()

    async def _greet(self, engine) -> None:
        """Load the tokenizer; print the ready line once the job is ready too."""
        try:
            await engine.load()
        except errors.FatalError as stop:
            log.error("%s", stop)
            self._stop(stop.code)
            return
        except Exception as error:  # whatever a damaged file makes the libraries raise
            log.error("the tokenizer in %s cannot be read: %s", self.config.model_dir, error)
            self._stop(errors.MODEL)
            return
        with contextlib.suppress(ApiError):
            await self.link.wait_ready()
            print(ready_line(self.config, engine.names[0], engine.text.chats), flush=True)

    async def _watch_idle(self) -> None:
        """Drain when no request has come for so long. Loading and restarting are no idle time."""
        limit = 60 * self.config.idle_exit
        while not self.link.draining:
            idle = self.link.idle_seconds()
            if idle >= limit and not self._state.active:  # no request is being read or tokenised either
                log.warning(
                    "no request for %g minutes (--idle-exit): the job ends and gives its allocation back",
                    self.config.idle_exit,
                )
                self._drain()
                return
            await asyncio.sleep(min(max(0.01, limit - idle), IDLE_LOOK))

    async def _take_files(self) -> None:
        """Have the files of --file-store, once the job before this one gives them up."""
        try:
            await self._state.take_files()
        except errors.FatalError as stop:
            log.error("%s", stop)
            self._stop(stop.code)

    async def _hand_over(self, config: HandoverConfig, registered: Registration) -> None:
        """Have a successor submitted, and drain once it is ready, or there is no more time."""
        self._state.handover = Handover(config, registered.path.parent, registered.name, registered.job.host)
        await self._state.handover.run(self._state.release_files, self._drain)

    async def _stop_in_time(self, stop_at: float) -> None:
        """End what is still open shortly before the batch system does."""
        while (left := stop_at - time.time()) > 0:  # not one sleep: clocks are set
            await asyncio.sleep(min(left, IDLE_LOOK))
        self._drain()
        while True:
            self.link.give_up("the job's time is over")
            await asyncio.sleep(IDLE_LOOK)

    def _drain(self) -> None:
        handover = self._state.handover
        if self._handing_over is not None and handover is not None and not handover.begun:
            self._handing_over.cancel()  # who ends this job by hand wants no successor
        self.link.drain()
        if self.link.state in ("restarting", "failed"):  # nobody is left to drain
            self._stop(errors.OK)

    def _lost(self) -> None:
        """The scheduler's connection ended."""
        if self.link.draining:
            self._stop(errors.OK)
        elif not self.config.restarts_expected:
            self._stop(self.link.fatal.code if self.link.fatal else errors.RANK_FAILED)

    def _stop(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    async def _last_words(self) -> None:
        """Let the handlers write their last events to clients that still read."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WORDS
        while self._state.active and loop.time() < until:
            await asyncio.sleep(0.01)


def registration(config: ServerConfig, state: ServerState) -> Registration | None:
    """The entry by which this user's other terminals, and gateways, find the server; None: it is hidden."""
    if not config.registry_file:
        return None
    names = config.names()
    job = server_registry.RegisteredServer(
        url=config.url.removesuffix("/v1") or f"unix://{_bound_to(config.listen_fd)}",
        host=socket.gethostname(),
        model=names[0],
        models=list(dict.fromkeys([*names, *(one.name for one in config.models)])),
        pid=os.getpid(),
        start=server_registry.start_of(os.getpid()),
        pids=server_registry.namespace(),
        since=time.time(),
        key=config.api_keys[0] if config.api_keys else "",
        certificate=tls.certificate(config.tls_cert) if config.tls_cert else "",
        batch=config.batch_job,
        end=config.end_time,
        state=STARTING,
        predecessor=config.predecessor,
    )
    load = lambda: state.link.stats.running + state.link.stats.waiting  # noqa: E731
    return Registration(config.registry_file, job, partial(_registered_state, state), load, lambda: state.has_files)


def _registered_state(state: ServerState) -> str:
    """Whether requests are taken, as the registry shows it."""
    link = state.link
    if link.draining or link.state == "failed" or (state.handover is not None and state.handover.begun):
        return DRAINING
    unloaded = link.state == "unloaded" and not link.asleep
    answered = unloaded or (link.state == "ready" and state.engine.text is not None)
    switching = state.models is not None and state.models.switching is not None
    return READY if answered or switching else STARTING


def _bound_to(fd: int) -> Any:
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.getsockname()


def ready_line(config: ServerConfig, model: str, chat: bool) -> str:
    """The server's address, and a command to paste."""
    url, option = config.url, ""
    if not url:
        name = _bound_to(config.listen_fd)
        if isinstance(name, tuple):
            host = "127.0.0.1" if name[0] in ("0.0.0.0", "::") else name[0]
            url = f"http://{f'[{host}]' if ':' in host else host}:{name[1]}/v1"
        else:
            url = f"unix:{name}"
    base = url
    if config.tls_cert:
        option = f" --cacert {config.tls_cert}"
    if url.startswith("unix:"):
        base, option = "http://localhost/v1", f" --unix-socket {url.removeprefix('unix:').removeprefix('//')}"
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if config.api_keys else ""
    if chat:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    else:
        path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 64}'
    return (
        f"Phalanx is ready: {url} (model {model}). Try:\n"
        f"  curl{option} {base}/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    ) + (f"\nor open {base.removesuffix('v1')} in a browser" if config.ui_server and base == url else "")


if __name__ == "__main__":
    code = main()
    logs.flush()
    # Not sys.exit: it would wait for a thread that tokenises a long prompt.
    os._exit(code)
