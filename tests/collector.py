"""A collector of OpenTelemetry traces: it takes them by OTLP over HTTP and keeps them."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .processes import wait


@dataclass
class Span:
    """A span as it came."""

    name: str
    trace: str
    id: str
    parent: str  # "": none
    kind: int
    began: int  # nanoseconds since 1970
    ended: int
    failed: bool
    state: str  # tracestate
    attributes: dict[str, Any]
    service: str = ""


@dataclass
class Collector:
    """Use it as a context manager. status: of its answers."""

    status: int = 200
    spans: list[Span] = field(default_factory=list)
    posts: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path and headers

    def __enter__(self) -> Collector:
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.posts.append((self.path, dict(self.headers)))
                if collector.status == 200:
                    collector._take(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for one in (span for scope in resource.scope_spans for span in scope.spans):
                ids = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
                times = one.start_time_unix_nano, one.end_time_unix_nano
                rest = one.status.code == 2, one.trace_state, _attributes(one.attributes), service
                self.spans.append(Span(one.name, *ids, one.kind, *times, *rest))

    def named(self, name: str, count: int = 1) -> list[Span]:
        """Spans whose name begins so, once there are that many."""
        found = lambda: [one for one in self.spans if one.name.startswith(name)]  # noqa: E731
        assert not wait(lambda: len(found()) < count, 30), [one.name for one in self.spans]
        return found()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
