"""The Tornado application: its routes, and the server that listens for them."""

from __future__ import annotations

import logging
import socket
import ssl

import tornado.web

from .connection import MAX_HEAD, Server
from .endpoint import Endpoint
from .handler import MAX_BODY, Handler, NotFound
from .routes import paths
from .state import ServerState

log = logging.getLogger(__name__)
HEADER_TIMEOUT = 120  # seconds for a request's head, and for the pause between two requests of a connection
BODY_TIMEOUT = 120


def make_app(state: ServerState) -> tornado.web.Application:
    """All endpoints, and the answer to everything else."""

    def log_request(handler: tornado.web.RequestHandler) -> None:
        label = handler.label if isinstance(handler, Handler) else "other"
        state.metrics.http(handler.request.method or "", label, handler.get_status())
        if state.config.access_log:
            log.info(
                "%s %s %d %.0f ms %s",
                handler.request.method,
                handler.request.uri,
                handler.get_status(),
                1000 * handler.request.request_time(),
                getattr(handler, "request_id", ""),
            )

    rules = [
        (next(iter(routes.values())).pattern(path), Endpoint, {"routes": routes}) for path, routes in paths().items()
    ]
    return tornado.web.Application(rules, default_handler_class=NotFound, log_function=log_request, state=state)


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
    server.add_socket(sock)
    return server
