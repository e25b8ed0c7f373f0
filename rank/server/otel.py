"""The spans of a request, sent to a collector by OTLP over HTTP. Needs the extra `otel`: imported where it is wanted.

Times come from what is measured anyway, so that most spans are made once a request is over.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .trace_context import TraceContext
from .tracing import CACHED, INPUT, OUTPUT
from .version import version

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger(__name__)
MAX_WAITING = 4096  # spans that wait for the collector
BATCH = 128  # spans sent together
EVERY = 1.0  # seconds that a span waits for others
LONGEST_VALUE = 512  # characters of an attribute: a client may name a model of megabytes


class _LastMessage(logging.Handler):
    """Keeps what the exporter logs last: its result has no reason for a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Export(SpanProcessor):
    """Sends ended spans in a thread of its own.

    The SDK's BatchSpanProcessor does not count the spans that it drops, and waits up to 30 s at the end.
    """

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        self._shown = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._said = _LastMessage()
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [self._said], False
        self._waiting: collections.deque[ReadableSpan] = collections.deque()
        self._wake = threading.Event()
        self._closing = self._failing = False
        self.sent = 0
        self._overflowed = self._failed = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that the collector did not take, or not in time."""
        return self._overflowed + self._failed

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._overflowed += 1
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH:
            self._wake.set()

    def shutdown(self) -> None:
        self._closing = True
        self._wake.set()

    async def close(self, seconds: float) -> None:
        """Send what waits, for so long at most."""
        self.shutdown()
        until = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._exporter.shutdown()  # ends its repetitions

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(EVERY)
            self._wake.clear()
            while self._waiting:
                self._send([self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))])

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever it is, it must not end the thread
            taken, self._said.text = False, str(error)
        if taken:
            self.sent += len(spans)
        else:
            self._failed += len(spans)
        if taken == self._failing:
            self._failing = not taken
            if taken:
                log.info("traces: %s takes spans again; %d were dropped", self._shown, self.dropped)
            else:
                log.warning("traces: %s takes no spans, they are dropped: %s", self._shown, self._said.text)


class Tracing:
    """The source of this process's spans."""

    def __init__(self, url: str, service: str):
        """service: the service's name, unless the environment has one."""
        self.export = Export(url)
        known = Resource({"service.name": service, "service.version": version()})
        # The sampler is that of OTEL_TRACES_SAMPLER; by default all is recorded but what the caller does not record.
        provider = TracerProvider(
            resource=Resource.create().merge(known).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=LONGEST_VALUE),
        )
        provider.add_span_processor(self.export)
        self._tracer = provider.get_tracer("phalanx", version())
        self._headers = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], began: float) -> RequestTrace:
        """The trace of a request that came with these headers. began: Unix time."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return RequestTrace(self._tracer, self._headers.extract(carrier, context.Context()), began)


class RequestTrace:
    """The span of one request, and the spans within it."""

    def __init__(self, tracer: trace.Tracer, parent: context.Context, began: float):
        self._tracer = tracer
        self._span = tracer.start_span("request", parent, trace.SpanKind.SERVER, start_time=int(began * 1e9))
        self._within = trace.set_span_in_context(self._span)
        self._offset = time.time() - time.monotonic()
        found = self._span.get_span_context()
        self.recorded = self._span.is_recording()
        self.context = TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", self.recorded)
        self.attributes: dict[str, Any] = {}  # of the request's span, as they become known
        self.sessions: list[Session] = []  # its generations, in order
        self.over = False  # what its task has started, such as a batch, goes on without it

    def child(self, name: str, began: float, ended: float, attributes: Mapping[str, Any], error: str = "") -> None:
        """Record what was done between two times of time.monotonic()."""
        if self.recorded:
            span = self._tracer.start_span(name, self._within, start_time=self._nanoseconds(began))
            _finish(span, attributes, error, self._nanoseconds(ended))

    @contextlib.contextmanager
    def call(self, name: str, attributes: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """A span of a call that is made within; its id goes to the service that is called. An `error` in what it yields
        marks it as failed."""
        span = self._tracer.start_span(name, self._within, trace.SpanKind.CLIENT)
        token = context.attach(trace.set_span_in_context(span))
        said: dict[str, str] = {}
        try:
            yield said
        except BaseException as error:
            said["error"] = type(error).__name__
            raise
        finally:
            context.detach(token)
            _finish(span, attributes, said.get("error", ""), None)

    def end(self, name: str, error: str = "") -> None:
        """The request is answered. error: which kind of failure, if it was the server's."""
        if self.recorded:
            self._span.update_name(name)
            _finish(self._span, self.attributes, error, None)

    def end_sessions(self) -> None:
        """Record the generations, which have ended or will get no reader."""
        now = time.monotonic()
        for session in self.sessions:
            first, last = session.first_token or now, session.last_token or now
            usage = session.usage()
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            self.child("queue", session.submitted, session.admitted or first, {})
            if session.admitted:
                tokens = {INPUT: usage["prompt_tokens"], CACHED: cached}
                self.child("prefill", session.admitted, first, tokens)
            if session.first_token:
                self.child("decode", first, last, {OUTPUT: usage["completion_tokens"]})
        self.sessions.clear()
        self.over = True

    def headers(self) -> dict[str, str]:
        """Headers for another server that is asked on behalf of this request."""
        found = {"Traceparent": self.context.header()}
        if state := self._span.get_span_context().trace_state.to_header():
            found["Tracestate"] = state
        return found

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._offset) * 1e9)


def _finish(span: trace.Span, attributes: Mapping[str, Any], error: str, at: int | None) -> None:
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if error:
        span.set_attribute("error.type", error)
        span.set_status(trace.StatusCode.ERROR)
    span.end(at)
