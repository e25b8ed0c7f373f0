"""`phalanx serve`: a command line becomes a running server, whichever way it was started."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from ... import logs
from ...logs import say
from ...rank.options import Options
from ...rank.server import tls
from .. import http_client
from ..job import mpi_env, rank_bootstrap, sbatch, secret_variables, server_process, supervisor
from ..options import models_file, option_sources
from ..options.help import options_help, show_config
from ..options.resolve import DEMO, in_force, joined, resolve

HELP = "start the server; the default when no verb is given"
USAGE = "phalanx [serve] [DIR] [options]: start an OpenAI-compatible server\n"
HEALTH_PATIENCE = 2.0  # seconds for a server process that shares its cores with ranks that load


def main(argv: Sequence[str]) -> int:
    mpi_env.refuse_lonely_srun(os.environ)
    place = mpi_env.rank_placement(os.environ)
    first = place is None or place.rank == 0
    models: models_file.Models | None = None  # where there are several
    shown = False  # all that is wanted is to be printed: no rank joins MPI
    try:
        argv, nodes = sbatch.wanted(argv)
        chosen = option_sources.read(Options, argv, os.environ, strict=first)
        if chosen.options.models_config and models_file.load_dotenv(chosen.options.models_config, os.environ):
            chosen = option_sources.read(Options, argv, os.environ, strict=first)
        if chosen.options.log_format == "json":
            logs.use_json("launcher")
        place = joined(chosen.options, place)
        shown = chosen.help or chosen.show_config or nodes is not None
        if nodes is not None and not chosen.help:
            print(sbatch.script("serve", chosen, nodes), end="")
            return 0
        if chosen.help:
            if first:
                print(USAGE + options_help(Options))
            return 0
        if first:
            for note in chosen.notes:
                say(note)
            if chosen.show_config:
                print(show_config(chosen, in_force(chosen.options, place)))
                return 0
            if chosen.options.models_config:
                models = models_file.read(chosen.options)
                for note in models.notes:
                    say(note)
            options = resolve(models.first() if models is not None else chosen.options, place)
        elif chosen.show_config:
            return 0
    except option_sources.FatalError as stop:
        if not first:
            raise option_sources.FatalError("", stop.code) from None  # rank 0 tells it
        if place is not None and not shown and not getattr(stop, "everywhere", False):
            rank_bootstrap.give_up(stop, place)
        raise
    secret_variables.forget()
    if place is not None:
        rank_bootstrap.join(options if first else chosen.options, place, models=models)
    return serve(options, models)


def serve(options: Options, models: models_file.Models | None = None) -> int:
    """Not under MPI: supervise."""
    listener, options = server_process.open_for_clients(options)
    directory = registered = ""
    try:
        directory = server_process.job_directory()
        link = os.path.join(directory, "link")
        bar = sys.stderr.isatty() and not logs.is_json()
        columns = shutil.get_terminal_size().columns if bar else 0
        start = supervisor.launch_spec(options, link, columns)
        _announce(options, listener.url)
        settings = server_process.config(options, link, listener, [], models)
        registered = settings.registry_file
        child = server_process.start(settings, os.environ)
        job = supervisor.Supervisor(start, child, options.restarts, serving=lambda: _serving(options, listener, link))
        return job.run()
    finally:
        server_process.clear(listener, directory, registered)


def _announce(options: Options, url: str) -> None:
    what = "the built-in model" if options.model == str(DEMO) else options.model
    ranks = "one rank" if options.ranks == 1 else f"{options.ranks} ranks"
    shared = f", ep {options.ep}" if options.ep > 1 else ""
    how = f" (tp {options.tp}, pp {options.pp}{shared})" if options.ranks > 1 else ""
    say(f"serving {what} on {ranks}{how} at {url}; loading")


def _serving(options: Options, listener: server_process.Listener, link: str) -> bool:
    """Whether a request may be open, which ending at once would lose. Where that is unknown, one may be."""
    if not os.path.exists(link):
        return False  # the server process opens that socket when it begins to answer
    if not listener.url.startswith("http"):
        return True
    # Its own address and no proxy: whoever else answers under the name knows nothing of this server.
    host, port = listener.socket.getsockname()[:2]
    url, certificate = http_client.url_of(host, port), ""
    if options.tls_cert:
        url, certificate = url.replace("http://", "https://", 1), tls.certificate(options.tls_cert)
    request = urllib.request.Request(f"{url}/health")
    try:
        with http_client.open_url(request, HEALTH_PATIENCE, direct=True, certificate=certificate):
            return True
    except urllib.error.HTTPError as error:
        try:
            return json.load(error).get("status") not in ("loading", "restarting")
        except (ValueError, AttributeError, OSError):
            return True
    except (OSError, http.client.HTTPException):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
