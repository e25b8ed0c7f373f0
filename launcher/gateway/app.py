"""The gateway's HTTP: each request is forwarded to a job that is ready, or waits until one is."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import tornado.iostream
import tornado.web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tornado import httputil

from ...rank.server.anthropic_format import error_body as anthropic_error
from ...rank.server.api_error import NOT_TAKEN, ApiError
from ...rank.server.blocking import on_body
from ...rank.server.file_store import MAX_FILE
from ...rank.server.http.connection import StreamHandler
from ...rank.server.registration import READY
from ...rank.server.shares import Budget
from . import request_facts, upstream
from .job_table import PROBE, Job, JobTable
from .request_facts import Facts

if TYPE_CHECKING:
    from ...rank.server.otel import RequestTrace, Tracing

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20  # bytes of a body that is kept, so that it can be sent again
INLINE = 256 << 10  # bytes of a body that is read on the event loop
MAX_KEPT = 512 << 20  # bytes of all such bodies; an address may have half of them
DISCARD_TIMEOUT = 30  # seconds in which the body of a refused request is read and dropped
BODY_TIMEOUT = 120
UPLOAD_TIMEOUT = 3600
PROBE_ANSWER = 5.0  # seconds for a job to answer a probe
SMALL = 1 << 20  # bytes of answers that the gateway reads itself
AGAIN = 0.05, 0.5  # seconds before a request is sent again to jobs that have all refused it
LISTS = ("/v1/models", "/models")
PROBES = ("/health", "/v1/health", "/ready", "/ping")
SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
LOST = "the job that was answering has ended; send the request again"
ANTHROPIC_PATHS = ("/v1/messages", "/messages", "/anthropic")


class Metrics:
    """Metrics of a gateway for Prometheus."""

    def __init__(self, table: JobTable):
        self._table = table
        self._registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self._registry}
        name = "phalanx_gateway_"
        self.requests = Counter(name + "requests", "Requests by how they ended", ["outcome"], **make)
        self.again = Counter(name + "sent_again", "Requests that a job did not take and another was sent", **make)
        self.held = Histogram(name + "held_seconds", "Waits for a job that is ready", buckets=SECONDS, **make)
        self.waiting = Gauge(name + "waiting", "Requests that wait for a job", **make)
        self._open = Gauge(name + "open_requests", "Requests that jobs are answering", **make)
        self._jobs = Gauge(name + "jobs", "Jobs by model and state", ["model", "state"], **make)

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        jobs = self._table.jobs.values()
        self._open.set(sum(job.open for job in jobs))
        self._jobs.clear()
        for job in jobs:
            self._jobs.labels(job.models[0], "ejected" if job.ejected else job.server.state).inc()
        return generate_latest(self._registry)


class Gateway:
    """State that all requests share. hold: seconds that a request waits for a job."""

    def __init__(self, table: JobTable, hold: float, traces: Tracing | None = None):
        self.table, self.hold, self.tracing = table, hold, traces
        self.metrics = Metrics(table)
        self.bodies = Budget(MAX_KEPT, 2, 0)
        self.open = 0  # requests that are not answered yet
        self._probing: set[asyncio.Task[None]] = set()

    async def watch(self, every: float) -> None:
        """Keep the table current and probe its jobs, for ever. A file system that hangs holds up no probe."""
        await asyncio.gather(_repeat(every, self.table.refresh), _repeat(every, self._probe_due))

    async def _probe_due(self) -> None:
        """Begin the probes that are due."""
        now = time.monotonic()
        for job in self.table.jobs.values():
            if now >= max(job.probed + PROBE, job.tried_again):
                job.probed = now + PROBE_ANSWER
                task = asyncio.ensure_future(self._probe(job))
                self._probing.add(task)
                task.add_done_callback(self._probing.discard)

    async def _probe(self, job: Job) -> None:
        headers = httputil.HTTPHeaders({"Host": upstream.host_of(job.server), "Connection": "close"})
        try:
            async with asyncio.timeout(PROBE_ANSWER):
                status, _ = await upstream.fetch(job.server, "/health", headers, SMALL)
            if status != 200 and job.server.state == READY:
                raise upstream.Lost(f"its file says that it is ready, and its /health {status}")
        except (upstream.Unreachable, upstream.Lost, TimeoutError) as error:
            job.failed(str(error) or f"no answer to /health within {PROBE_ANSWER:g} s")
        else:
            job.answered()
            self.table.wake()
        job.probed = time.monotonic()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of the gateway's own /health."""
        models: dict[str, dict[str, int]] = {}
        for job in self.table.jobs.values():
            states = models.setdefault(job.models[0], {})
            state = "ejected" if job.ejected else job.server.state
            states[state] = states.get(state, 0) + 1
        ready = any(job.ready for job in self.table.jobs.values())
        return (200 if ready else 503), {"status": "ready" if ready else "waiting", "models": models}


async def _repeat(every: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("the jobs cannot be looked at")
        await asyncio.sleep(every)


class Handler(StreamHandler):
    """Base of the gateway's handlers."""

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.settings["gateway"]
        return gateway

    def set_default_headers(self) -> None:
        self.set_header("Server", "phalanx-gateway")

    def compute_etag(self) -> None:
        return None

    def reply(self, status: int, body: Any) -> None:
        """Finish with a JSON object."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(body))

    def tell(self, error: ApiError) -> None:
        """Finish with an error in the shape of the client's API."""
        if not self._connection._read_finished:
            self.set_header("Connection", "close")
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        self.reply(error.status, anthropic_error(error) if self._anthropic else error.body())

    @property
    def _anthropic(self) -> bool:
        return "Anthropic-Version" in self.request.headers or self.request.path.startswith(ANTHROPIC_PATHS)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if not isinstance(error, ApiError):
            error = ApiError(status_code, self._reason if status_code < 500 else "an internal error of the gateway")
        self.tell(error)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, ApiError | tornado.web.HTTPError | asyncio.CancelledError):
            log.error("a request failed: %s", self.request.path[:200], exc_info=(typ, value, tb))


class Health(Handler):
    """/health and its like: whether requests would be answered at once."""

    def get(self) -> None:
        status, body = self.gateway.health()
        self.reply(status, body)

    head = get


class Figures(Handler):
    """/metrics, for holders of a key that a job's file has, or had where there is no such job now."""

    def get(self) -> None:
        table = self.gateway.table
        sent = self.request.headers.get("Authorization", "").partition(" ")[2].strip()
        known = any([hmac.compare_digest(sent.encode(), key.encode()) for key in table.keys])
        if (table.keys or table.open_to_all) and not known:
            raise ApiError(401, "the key of a job's file is needed", code="invalid_api_key")
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(self.gateway.metrics.text())


@tornado.web.stream_request_body
class Forward(Handler):
    """Any other request."""

    def initialize(self) -> None:
        self._counted = False  # among the gateway's open requests
        self._body: list[bytes] = []
        self._kept = 0  # bytes that the budget knows of
        self._size = 0
        self._late: ApiError | None = None  # told once the body is read
        self._passing: upstream.Exchange | None = None  # the upload that is passed on while it comes
        self._job: Job | None = None
        self._client = ""  # whose bodies are counted
        self._task: asyncio.Task[None] | None = None
        self._gone = False  # the client has left
        self._outcome = ""
        self._events = False  # the answer is a stream of events
        self._tail = b""  # its last bytes
        self._trace: RequestTrace | None = None

    # The request.

    async def prepare(self) -> None:
        self.gateway.open += 1
        self._counted, self._client = True, self._socket.client.name
        if self.gateway.tracing is not None:
            self._trace = self.gateway.tracing.begin(self.request.headers, self.request._start_time)
        length = self.request.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() and len(length) <= 12 else 0 if not length else MAX_FILE * 4
        if self._socket.crowded:
            self._refuse(ApiError(503, "all connections are in use; try again later", code="busy", retry_after=1))
        elif not self.request.uri or not self.request.uri.startswith("/"):
            self._refuse(ApiError(400, "the request's target has to be a path"))
        elif size > MAX_FILE + SMALL:
            raise ApiError(413, f"the body has {length} bytes: at most {MAX_FILE >> 20} MiB are passed on")
        elif size > MAX_BODY:  # an upload: it is sent while it comes, and cannot be sent again
            self._connection.set_max_body_size(size)
            self._connection.set_body_timeout(UPLOAD_TIMEOUT)
            try:
                self._passing = await self._begin_upload()
            except ApiError as error:
                self._refuse(error)
        else:
            self._connection.set_max_body_size(2 * MAX_BODY)

    def _refuse(self, error: ApiError) -> None:
        """Answer once the body is read and dropped: a reset would take the answer from a client that still sends."""
        self._late = self._late or error
        self._give_back()
        self._connection.set_body_timeout(DISCARD_TIMEOUT)

    async def data_received(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._late is not None:
            return
        if self._passing is not None:
            try:
                await self._passing.write(chunk)
            except tornado.iostream.StreamClosedError:
                self._refuse(ApiError(502, LOST, code="job_lost", retry_after=1))
        elif self._size > MAX_BODY:
            self._refuse(ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", code="too_large"))
        elif not self.gateway.bodies.take(self._client, len(chunk)):
            self._refuse(ApiError(429, "open requests hold all the gateway's memory", code="busy", retry_after=1))
        else:
            self._kept += len(chunk)
            self._body.append(chunk)

    def _give_back(self) -> None:
        self.gateway.bodies.give(self._client, self._kept)
        self._kept = 0
        self._body.clear()

    # The answer.

    async def _answer(self) -> None:
        self._socket.answering()
        if self._late is not None:
            raise self._late
        self._task = asyncio.ensure_future(self._upload() if self._passing is not None else self._serve())
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._gone:
                raise
        except ApiError:
            self._outcome = self._outcome or "refused"
            raise

    get = head = post = put = patch = delete = options = _answer

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._gone = True
        self._outcome = self._outcome or "client_left"
        if self._task is not None:
            self._task.cancel()  # which closes the connection to the job: it stops computing
        self._end()

    def on_finish(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._counted:
            return
        self._counted = False
        self.gateway.metrics.requests.labels(self._outcome or "answered").inc()
        self.gateway.open -= 1
        self._give_back()
        if self._passing is not None:
            self._passing.close()
        if self._trace is not None:
            self._end_trace(self._trace)

    def _end_trace(self, trace: RequestTrace) -> None:
        status = self.get_status() if self._headers_written else None
        trace.attributes |= {
            "http.request.method": self.request.method,
            "http.response.status_code": status,
            "url.path": self.request.path,
            "phalanx.job": self._job.name if self._job is not None else None,
            "phalanx.outcome": self._outcome or "answered",
        }
        failed = (status or 0) >= 500 or self._outcome == "lost"
        trace.end(f"gateway {self.request.method}", self._outcome or str(status) if failed else "")

    async def _serve(self) -> None:
        """Forward a request whose body is here, as often as it takes."""
        body = b"".join(self._body)
        self._body = [body]
        if self.request.method == "GET" and self.request.path in LISTS and await self._list_models():
            return
        coding = self.request.headers.get("Content-Encoding", "").lower()
        if len(body) > INLINE or coding:
            facts = await on_body(request_facts.read, body, coding)
        else:
            facts = request_facts.read(body)
        headers = self._to_job()
        if body or self.request.method in ("POST", "PUT", "PATCH"):
            headers["Content-Length"] = str(len(body))
        until = time.monotonic() + self.gateway.hold
        passed: list[Job] = []
        while True:
            job = self.gateway.table.choose(facts.model, facts.prefix, passed) or await self._wait(facts, until)
            if await self._forward(job, headers, body):
                return
            self.gateway.metrics.again.inc()
            passed.append(job)
            if self.gateway.table.choose(facts.model, facts.prefix, passed) is None:  # all have refused it
                if time.monotonic() >= until:
                    raise self._none_ready()
                await asyncio.sleep(random.uniform(*AGAIN))
                passed.clear()

    async def _wait(self, facts: Facts, until: float) -> Job:
        """The job that is ready first. Raises ApiError where none is in time."""
        table, metrics = self.gateway.table, self.gateway.metrics
        began = time.monotonic()
        with metrics.waiting.track_inprogress():
            while True:
                if (job := table.choose(facts.model, facts.prefix)) is not None:
                    metrics.held.observe(time.monotonic() - began)
                    if self._trace is not None:
                        self._trace.child("wait for a job", began, time.monotonic(), {})
                    return job
                if not table.may_come(facts.model):
                    what = f"no job serves {facts.model[:100]!r}; there are {', '.join(sorted(table.known))}"
                    raise ApiError(404, what, "model", "model_not_found")
                if (left := until - time.monotonic()) <= 0:
                    raise self._none_ready()
                await table.change(left)

    def _none_ready(self) -> ApiError:
        what = f"no job has become ready within {self.gateway.hold:g} s; send the request again"
        return ApiError(503, what, code="no_job", retry_after=5)

    def _to_job(self) -> httputil.HTTPHeaders:
        """The client's headers, its Host among them: the job checks it, as it does the key."""
        headers = upstream.passed_on(self.request.headers)
        headers["Connection"] = "close"
        if "X-Request-Id" not in headers:
            headers["X-Request-Id"] = uuid.uuid4().hex
        for name, value in (self._trace.headers() if self._trace is not None else {}).items():
            headers[name] = value
        return headers

    async def _forward(self, job: Job, headers: httputil.HTTPHeaders, body: bytes) -> bool:
        """Have a job answer. False where it has not taken the request, which can go to another."""
        job.open += 1
        self._job = job
        stream = None
        try:
            try:
                stream = await upstream.connect(job.server)
            except upstream.Unreachable as error:
                job.failed(error)
                return False
            exchange = upstream.Exchange(stream, self.request.method or "", self.request.uri or "", headers)
            if body:
                exchange.write(body)
            return await self._pass_on(exchange, job)
        finally:
            job.open -= 1
            if stream is not None:
                stream.close()

    async def _pass_on(self, exchange: upstream.Exchange, job: Job) -> bool:
        """Pass the answer on as it comes. False where it shows that the job has not taken the request."""
        refused = False

        async def begin(status: int, headers: httputil.HTTPHeaders) -> None:
            nonlocal refused
            if NOT_TAKEN in headers and self._passing is None:
                refused = True
                exchange.close()
                return
            self._begin(status, headers)
            await self._flush(exchange)

        async def more(chunk: bytes) -> None:
            if refused or self._gone:
                return
            if self._events:
                self._tail = (self._tail + chunk)[-4:]
            self.write(chunk)
            await self._flush(exchange)

        try:
            await exchange.read(upstream.Answer(begin, more))
        except upstream.Lost as error:
            if refused:
                return False
            if not self._gone:
                self._lost(job, error)
            return True
        if refused:
            return False
        if not self._gone:
            self.finish()
        return True

    def _begin(self, status: int, headers: httputil.HTTPHeaders) -> None:
        self.clear()
        for name in ("Server", "Content-Type", "Date"):
            self.clear_header(name)
        self.set_status(status)
        for name, value in upstream.passed_on(headers).get_all():
            self.add_header(name, value)
        self._events = headers.get("Content-Type", "").startswith("text/event-stream")
        if self._events:
            self._socket.set_nodelay(True)

    async def _flush(self, exchange: upstream.Exchange) -> None:
        """Wait until the client's socket takes it: so long nothing more is read from the job."""
        try:
            await self.flush()
        except tornado.iostream.StreamClosedError:
            exchange.close()

    def _lost(self, job: Job, why: upstream.Lost) -> None:
        """The job has ended, or the way to it."""
        log.warning("job %s was lost while it answered: %s", job.name, why)
        job.tried_again = 0.0  # probe it at once
        job.probed = 0.0
        error = ApiError(502, LOST, code="job_lost", retry_after=1)
        self._outcome = "lost"
        if not self._headers_written:
            self.tell(error)
        elif self._events:
            if not self._tail.endswith((b"\n\n", b"\r\n\r\n")):
                self.write(b"\n\n")  # ends an event that was cut
            self.write(self._error_event(error))
            self.finish()
        else:
            self._socket.close()  # the client sees that the answer is not whole

    def _error_event(self, error: ApiError) -> bytes:
        if self._anthropic:
            return b"event: error\ndata: " + msgspec.json.encode(anthropic_error(error)) + b"\n\n"
        if self.request.path.endswith("/responses"):
            fields = {"type": "error", "code": error.code, "message": error.message, "param": None}
            return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"
        return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"

    # An upload, which is passed on while it comes.

    async def _begin_upload(self) -> upstream.Exchange:
        passed: list[Job] = []
        until = time.monotonic() + self.gateway.hold
        while True:
            job = self.gateway.table.choose("", b"", passed) or await self._wait(Facts(), until)
            try:
                stream = await upstream.connect(job.server)
            except upstream.Unreachable as error:
                job.failed(error)
                passed.append(job)
                continue
            self._job = job
            return upstream.Exchange(stream, self.request.method or "", self.request.uri or "", self._to_job())

    async def _upload(self) -> None:
        assert self._passing is not None and self._job is not None
        self._job.open += 1
        try:
            await self._pass_on(self._passing, self._job)
        finally:
            self._job.open -= 1

    # The models of several jobs.

    async def _list_models(self) -> bool:
        """Answer with all jobs' models. False where one job can answer for all."""
        chosen = {job.models: job for job in self.gateway.table.jobs.values() if job.ready}
        if len(chosen) < 2:
            return False
        headers = self._to_job()
        headers.pop("Content-Length", None)  # the client's body, if any, goes to none of them
        listed: list[Any] = []
        for job in chosen.values():
            try:
                async with asyncio.timeout(PROBE_ANSWER):
                    status, body = await upstream.fetch(job.server, "/v1/models", headers, SMALL)
            except (upstream.Unreachable, upstream.Lost, TimeoutError):
                continue
            if status != 200:
                self.set_status(status)
                self.set_header("Content-Type", "application/json")
                self.finish(body)
                return True
            listed += msgspec.json.decode(body)["data"]
        self.reply(200, {"object": "list", "data": listed})
        return True


def make_app(gateway: Gateway) -> tornado.web.Application:
    """The gateway's own paths, and everything else."""
    own = [*((path, Health) for path in PROBES), ("/metrics", Figures)]
    return tornado.web.Application([*own, (r".*", Forward)], gateway=gateway, log_function=lambda handler: None)
