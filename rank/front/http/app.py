"""The Tornado application: its routes, and the server that listens for them."""

from __future__ import annotations

import logging
import socket

import tornado.httpserver
import tornado.web

from . import health, openai
from .handler import MAX_BODY, NotFound, State

log = logging.getLogger(__name__)
HEADER_TIMEOUT = 120  # seconds for a request's head, and for the pause between two requests of a connection
BODY_TIMEOUT = 120


def make_app(state: State) -> tornado.web.Application:
    """All routes."""
    shared = {"state": state}
    routes = [
        (r"/v1/chat/completions", openai.Chat, shared),
        (r"/v1/completions", openai.Completions, shared),
        (r"/v1/embeddings", openai.Embeddings, shared),
        (r"/v1/models", openai.Models, shared),
        (r"/v1/models/(.+)", openai.Model, shared),
        (r"/health", health.Health, shared),
        (r"/metrics", health.MetricsPage, shared),
    ]

    def log_request(handler: tornado.web.RequestHandler) -> None:
        state.metrics.http(handler.request.method or "", handler.request.path, handler.get_status())
        if state.config.access_log:
            log.info("%s %s %d %.0f ms %s", handler.request.method, handler.request.uri, handler.get_status(),
                     1000 * handler.request.request_time(), getattr(handler, "request_id", ""))

    return tornado.web.Application(routes, default_handler_class=NotFound, default_handler_args=shared,
                                   log_function=log_request)


def serve(app: tornado.web.Application, sock: socket.socket) -> tornado.httpserver.HTTPServer:
    """Accept clients on a bound socket, TCP or unix."""
    sock.setblocking(False)
    sock.listen(1024)
    server = tornado.httpserver.HTTPServer(
        app, max_body_size=MAX_BODY, max_header_size=64 << 10, idle_connection_timeout=HEADER_TIMEOUT,
        body_timeout=BODY_TIMEOUT)
    server.add_socket(sock)
    return server
