"""The Tornado application: its routes, and the server that listens for them."""

from __future__ import annotations

import logging
import re
import socket
import ssl
from typing import Any

import tornado.web
from tornado import httputil

from .connection import MAX_HEAD, Server
from .endpoint import Endpoint
from .handler import MAX_BODY, Handler, NotFound
from .routes import paths
from .state import ServerState

log = logging.getLogger(__name__)
HEADER_TIMEOUT = 120  # seconds for a request's head, and for the pause between two requests of a connection
BODY_TIMEOUT = 120
ACCESS_RATE = 500  # lines of --access-log a second; others are counted
ABSOLUTE = re.compile(r"https?://([^/?#]+)([^#]*)", re.IGNORECASE)


def make_app(state: ServerState) -> tornado.web.Application:
    """All endpoints, and the answer to everything else."""

    def log_request(handler: tornado.web.RequestHandler) -> None:
        label = handler.label if isinstance(handler, Handler) else "other"
        state.metrics.http(handler.request.method or "", label, handler.get_status())
        if state.config.access_log:
            ids = handler.ids if isinstance(handler, Handler) else {}
            fields = {
                "method": handler.request.method,
                "path": handler.request.uri,
                "status": handler.get_status(),
                "duration_ms": round(1000 * handler.request.request_time()),
                **ids,
            }
            text = "%(method)s %(path)s %(status)d %(duration_ms)d ms " + " ".join(ids.values())
            log.info(text, fields, extra={"rate": ACCESS_RATE, "fields": fields})

    rules = [
        (next(iter(routes.values())).pattern(path), Endpoint, {"routes": routes}) for path, routes in paths().items()
    ]
    return Application(rules, default_handler_class=NotFound, log_function=log_request, state=state)


class Application(tornado.web.Application):
    """Tornado's, which also knows targets that name the server, as proxies send them: GET http://HOST:PORT/health."""

    def find_handler(self, request: httputil.HTTPServerRequest, **more: Any) -> tornado.web._HandlerDelegate:
        if absolute := ABSOLUTE.fullmatch(request.uri or ""):
            host, rest = absolute.groups()
            request.headers["Host"] = request.host = host  # what the target names counts: RFC 9112, 3.2.2
            request.host_name = httputil.split_host_and_port(host.lower())[0]
            request.uri = rest if rest.startswith("/") else f"/{rest}"
            request.path = request.uri.partition("?")[0]
        return super().find_handler(request, **more)


def serve(app: tornado.web.Application, sock: socket.socket, context: ssl.SSLContext | None = None) -> Server:
    """Accept clients on a bound socket, TCP or unix; with a context by TLS."""
    sock.setblocking(False)
    sock.listen(1024)
    server = Server(
        app,
        context=context,
        max_body_size=MAX_BODY,
        max_header_size=MAX_HEAD,
        idle_connection_timeout=HEADER_TIMEOUT,
        body_timeout=BODY_TIMEOUT,
    )
    server.listen_on(sock)
    state: ServerState = app.settings["state"]
    if not state.requests_per_key and len(state.keys) > 1:  # one of several keys never has all connections
        state.requests_per_key = server.listener.descriptors.per_client
    return server
