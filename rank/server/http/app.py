"""The Tornado application: its routes, and the server that listens for them."""

from __future__ import annotations

import logging
import socket

import tornado.web

from . import health, openai
from .connection import MAX_HEAD, Server
from .handler import MAX_BODY, Handler, NotFound, ServerState

log = logging.getLogger(__name__)
ROUTES: list[tuple[str, type[Handler]]] = [
    (r"/v1/chat/completions", openai.Chat),
    (r"/v1/completions", openai.Completions),
    (r"/v1/embeddings", openai.Embeddings),
    (r"/v1/models", openai.Models),
    (r"/v1/models/(.+)", openai.Model),
    (r"/health", health.Health),
    (r"/metrics", health.MetricsPage),
]
HEADER_TIMEOUT = 120  # seconds for a request's head, and for the pause between two requests of a connection
BODY_TIMEOUT = 120


def make_app(state: ServerState) -> tornado.web.Application:
    """The endpoints of ROUTES, and the answer to everything else."""

    def log_request(handler: tornado.web.RequestHandler) -> None:
        state.metrics.http(handler.request.method or "", handler.request.path, handler.get_status())
        if state.config.access_log:
            log.info(
                "%s %s %d %.0f ms %s",
                handler.request.method,
                handler.request.uri,
                handler.get_status(),
                1000 * handler.request.request_time(),
                getattr(handler, "request_id", ""),
            )

    return tornado.web.Application(ROUTES, default_handler_class=NotFound, log_function=log_request, state=state)


def serve(app: tornado.web.Application, sock: socket.socket) -> Server:
    """Accept clients on a bound socket, TCP or unix."""
    sock.setblocking(False)
    sock.listen(1024)
    server = Server(
        app,
        max_body_size=MAX_BODY,
        max_header_size=MAX_HEAD,
        idle_connection_timeout=HEADER_TIMEOUT,
        body_timeout=BODY_TIMEOUT,
    )
    server.add_socket(sock)
    return server
