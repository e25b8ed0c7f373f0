"""`phalanx gateway`: one address for a service whose jobs come and go."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ... import errors, logs
from ...logs import say
from ...rank.options import flag
from ...rank.server import server_registry, tls, tracing
from ..job import mpi_env, server_process
from ..options import option_sources
from ..options.help import shown

HELP = "one address for a service whose jobs come and go"
USAGE = """phalanx gateway [options]: forward requests to your running servers, wherever they run

It finds them by the files that `phalanx serve` leaves, and keeps nothing itself. While no job is ready, as between two
jobs of a service, requests wait.
"""
_GROUP = "Gateway"
PATIENCE = 120.0  # seconds for open requests at the end ...
LAST_SPANS = 1.5  # ... and for their spans


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, flag("--host", "--h", group=_GROUP, metavar="HOST", help="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, flag("--port", "--p", group=_GROUP, metavar="N", low=0, high=65535, help="0 picks a free one")
    ] = 8000
    hold: Annotated[
        float, flag("--hold", group=_GROUP, metavar="S", low=0, help="seconds that a request waits for a job")
    ] = 60.0
    jobs: Annotated[
        str, flag("--jobs", group=_GROUP, metavar="DIR", help="where servers leave their files; none: as serve does")
    ] = ""
    tls_cert: Annotated[
        str, flag("--tls-cert", group=_GROUP, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    ] = ""
    tls_key: Annotated[
        str, flag("--tls-key", group=_GROUP, metavar="FILE", help="its private key; none: it is in --tls-cert's file")
    ] = ""
    otlp_endpoint: Annotated[
        str, flag("--otlp-endpoint", group=_GROUP, metavar="URL", help="send traces there, as serve does")
    ] = ""
    log_format: Annotated[
        str, flag("--log-format", group=_GROUP, choices=("text", "json"), help="lines of the log; json: an object each")
    ] = "text"


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(GatewayOptions, argv, os.environ)
    if shown(chosen, USAGE):
        return 0
    options = chosen.options
    if options.log_format == "json":
        logs.use_json("gateway")
    for note in chosen.notes:
        say(note)
    if options.tls_key and not options.tls_cert:
        missing = f"--tls-key {options.tls_key}: its certificate is missing, --tls-cert FILE"
        raise errors.FatalError(missing, errors.USAGE)
    server_process.check_traces(options.otlp_endpoint)
    listener = server_process.listen(options.host, options.port)
    logs.start("INFO", "%(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each request
    try:
        return asyncio.run(_serve(options, listener))
    finally:
        server_process.unlink(listener)
        logs.flush()


async def _serve(options: GatewayOptions, listener: server_process.Listener) -> int:
    """Forward until a signal, then finish what is open; a second signal ends that, too."""
    from ...rank.server.http.connection import MAX_HEAD, Server  # here: --help needs no Tornado
    from ..gateway.app import BODY_TIMEOUT, Gateway, make_app
    from ..gateway.job_table import LOOK, JobTable

    try:
        context = tls.server_context(options.tls_cert, options.tls_key) if options.tls_cert else None
    except ValueError as error:
        raise errors.FatalError(f"--tls-cert, --tls-key: {error}", errors.USAGE) from None
    place = Path(os.path.abspath(options.jobs)) if options.jobs else server_registry.directory()
    table = JobTable(place, mpi_env.hostname(), listener.open_to_all)
    gateway = Gateway(table, options.hold, tracing.start(options.otlp_endpoint, "phalanx-gateway"))
    server = Server(
        make_app(gateway), context=context, max_body_size=1 << 30, max_header_size=MAX_HEAD,
        idle_connection_timeout=BODY_TIMEOUT, body_timeout=BODY_TIMEOUT,
    )  # fmt: skip
    listener.socket.setblocking(False)
    server.listen_on(listener.socket)
    watching = asyncio.ensure_future(gateway.watch(LOOK))
    asked, loop = [asyncio.Event(), asyncio.Event()], asyncio.get_running_loop()

    def ask() -> None:
        (asked[1] if asked[0].is_set() else asked[0]).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, ask)
    url = listener.url.replace("http://", "https://", 1) if context is not None else listener.url
    say(f"the gateway is at {url}; its jobs are those of {place}")
    await asked[0].wait()
    server.stop()
    ended = loop.time() + PATIENCE
    if gateway.open:
        say(f"ending: {gateway.open} open requests are finished; another signal ends at once")
    while gateway.open and not asked[1].is_set() and loop.time() < ended:
        await asyncio.sleep(0.05)
    watching.cancel()
    if gateway.tracing is not None:
        await gateway.tracing.export.close(LAST_SPANS)
    table.close()
    return errors.OK if not gateway.open else errors.STOPPED
