"""OpenTelemetry traces of requests, for the parts of the server that may run without the SDK (the extra `otel`)."""

from __future__ import annotations

import contextlib
import importlib.util
import urllib.parse
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .otel import RequestTrace, Tracing

INPUT, OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED = "gen_ai.usage.cache_read.input_tokens"
PACKAGES = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
# The trace of the request that this task handles; None where none is kept.
active: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)


def current() -> RequestTrace | None:
    """The trace that this task's work belongs to; None once its request is over."""
    trace = active.get()
    return None if trace is None or trace.over else trace


def endpoint(url: str) -> str:
    """The address that spans are posted to: a URL without a path is a collector's. Raises ValueError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--otlp-endpoint {url}: it has to be a URL of OTLP over HTTP, such as http://collector:4318 (4317 is gRPC)"
        )
    return url if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path="/v1/traces"))


def check(url: str) -> None:
    """Raises ValueError where traces cannot be sent to this address."""
    if not url:
        return
    endpoint(url)
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the one that it is in
            found = None
        if found is None:
            raise ValueError(f"--otlp-endpoint {url}: {package} is not installed: pip install 'phalanx[otel]'")


def start(url: str, service: str) -> Tracing | None:
    """The source of this process's spans; None without an address. service: its name for the collector."""
    if not url:
        return None
    from .otel import Tracing

    return Tracing(endpoint(url), service)


@contextlib.contextmanager
def tool_call(name: str, server: str) -> Iterator[dict[str, str]]:
    """The span of a call of a tool server's tool. An `error` put into what it yields marks it as failed."""
    trace = current()
    if trace is None:
        yield {}
        return
    about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "extension"}
    with trace.call(f"execute_tool {name}", {**about, "phalanx.tool_server": server}) as said:
        yield said
