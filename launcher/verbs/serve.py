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

from ...rank.options import Options
from .. import choices, client, front, hosts, member, sbatch, supervise
from ..resolve import DEMO, in_force, joined, resolve
from ..usage import options_help, show_config

USAGE = "phalanx [serve] [DIR] [options]: start an OpenAI-compatible server\n"
HEALTH_PATIENCE = 2.0  # seconds for a front that shares its cores with ranks that load


def main(argv: Sequence[str]) -> int:
    hosts.refuse_lonely_srun(os.environ)
    place = hosts.world(os.environ)
    first = place is None or place.rank == 0
    shown = False  # all that is wanted is to be printed: no rank joins MPI
    try:
        argv, script = sbatch.wanted(argv)
        chosen = choices.read(Options, argv, os.environ, strict=first)
        place = joined(chosen.options, place)
        shown = chosen.help or chosen.show_config or script
        if script and not chosen.help:
            print(sbatch.script("serve", chosen), end="")
            return 0
        if chosen.help:
            if first:
                print(USAGE + options_help(Options))
            return 0
        if first:
            for note in chosen.notes:
                supervise.say(note)
            if chosen.show_config:
                print(show_config(chosen, in_force(chosen.options, place)))
                return 0
            options = resolve(chosen.options, place)
        elif chosen.show_config:
            return 0
    except choices.Stop as stop:
        if not first:
            raise choices.Stop("", stop.code) from None  # rank 0 tells it
        if place is not None and not shown and not getattr(stop, "everywhere", False):
            member.give_up(stop, place)
        raise
    if place is not None:
        member.join(options if first else chosen.options, place)
    return serve(options)


def serve(options: Options) -> int:
    """Not under MPI: supervise."""
    listener = front.listen(options.host, options.port)
    directory = ""
    try:
        front.warn(listener, options)
        directory = front.job_directory()
        link = os.path.join(directory, "lead")
        columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
        start = supervise.plan(options, link, columns)
        _announce(options, listener.url)
        child = front.start(front.config(options, link, listener, []), os.environ)
        job = supervise.Supervisor(start, child, options.restarts, serving=lambda: _serving(listener, link))
        return job.run()
    finally:
        front.unlink(listener)
        if directory:
            front.remove(directory)


def _announce(options: Options, url: str) -> None:
    what = "the built-in model" if options.model == str(DEMO) else options.model
    ranks = "one rank" if options.ranks == 1 else f"{options.ranks} ranks"
    how = f" (tp {options.tp}, pp {options.pp})" if options.ranks > 1 else ""
    supervise.say(f"serving {what} on {ranks}{how} at {url}; loading")


def _serving(listener: front.Listener, link: str) -> bool:
    """Whether a request may be open, which ending at once would lose. Where nobody can tell, one may be."""
    if not os.path.exists(link):
        return False  # the front opens that socket when it begins to answer
    if not listener.url.startswith("http"):
        return True
    # Its own address and no proxy: whoever else answers under the name knows nothing of this server.
    host, port = listener.socket.getsockname()[:2]
    request = urllib.request.Request(f"{client.url_of(host, port)}/health")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=HEALTH_PATIENCE):
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
