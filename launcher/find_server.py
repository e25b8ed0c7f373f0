"""Servers of this user that are running, found by the files that they leave (`rank/server/server_registry.py`)."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import msgspec

from ..errors import ERROR, USAGE, FatalError
from ..rank.options import flag
from ..rank.server import server_registry
from ..rank.server.server_registry import RegisteredServer
from . import http_client
from .job import mpi_env
from .options import option_sources

_GROUP = "Server"
UNIX = "unix://"
KEY = "give it with --api-key KEY, or as PHALANX_API_KEY, which other users do not see"
SCHEMES = "http://", "https://", UNIX
START = "start one with `phalanx serve`"


class FoundServer(msgspec.Struct, frozen=True):
    """The address that requests go to."""

    url: str  # without /v1; or unix:///PATH
    key: str = ""
    certificate: str = ""  # of TLS, PEM, as the server's file has it; "": the usual authorities vouch for it
    remedy: str = START  # what to do if nobody answers there
    direct: bool = False  # no proxy in between: it is a host of the cluster


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that choose the server of a verb."""

    job: Annotated[
        str,
        flag("--job", group=_GROUP, metavar="NAME",
             help="which of your servers: the job's number, its host, its model or its file"),
    ] = ""  # fmt: skip
    url: Annotated[
        str, flag("--url", group=_GROUP, metavar="URL", help="of the server; with --job, the way through a tunnel")
    ] = ""
    host: Annotated[str, flag("--host", "--h", group=_GROUP, metavar="HOST", help="where the server is")] = "127.0.0.1"
    port: Annotated[
        int, flag("--port", "--p", group=_GROUP, metavar="N", low=1, high=65535, help="and on which port")
    ] = 2000
    api_key: Annotated[
        str, flag("--api-key", group=_GROUP, metavar="KEY", secret=True, help="if the server wants one")
    ] = ""


def chosen(where: option_sources.ParsedOptions[Any], verb: str) -> FoundServer:
    """The one that the options name, else the one that is running, else the one that would be by default.

    `where` is of a struct that extends ServerOptions; `verb` is for the messages.
    """
    options: ServerOptions = where.options
    url, default = options.url.rstrip("/").removesuffix("/v1"), http_client.url_of(options.host, options.port)
    if url and not url.startswith(SCHEMES):
        raise FatalError(f"--url {options.url}: it has to begin with {', '.join(SCHEMES)}", USAGE)
    if any(where.origins[name] != "default" for name in ("host", "port")):
        url = url or default
    found = find(options.job, verb, url) if options.job or not url else None
    if found is None:
        found = _known(url or default)
    return msgspec.structs.replace(found, key=options.api_key or found.key)


def request(server: FoundServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """The open answer. Raises FatalError with the server's message, or with what to do where none answers."""
    url = f"{server.url}{path}"
    try:
        return _open(server, path, body)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{error.code} {error.reason}"
        if error.code == 401:
            message = f"it {'takes another API key' if server.key else 'wants an API key'}: {KEY}"
        raise FatalError(f"{url}: {message}", ERROR) from None
    except (OSError, ValueError) as error:  # a connection that it closes without an answer among them
        why = getattr(error, "reason", error)
        raise FatalError(f"no server answers at {url} ({why}); {server.remedy}", USAGE) from None
    except http.client.HTTPException:
        raise FatalError(f"what answers at {url} is no HTTP server", USAGE) from None


def _open(server: FoundServer, path: str, body: dict[str, Any] | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    data = None if body is None else json.dumps(body).encode()
    if server.url.startswith(UNIX):
        request = urllib.request.Request(f"http://localhost{path}", data, headers)
        return http_client.open_unix(server.url.removeprefix(UNIX), request)
    request = urllib.request.Request(f"{server.url}{path}", data, headers)
    return http_client.open_url(request, direct=server.direct, certificate=server.certificate)


def health(server: FoundServer) -> dict[str, Any]:
    """The body of its /health; {} where it has none, or does not answer."""
    try:
        with _open(server, "/health", None) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            found = json.load(error)
        except (ValueError, OSError):
            return {}
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) else {}


def model(server: FoundServer) -> dict[str, Any]:
    """The first that the server lists: its "id", and from most servers "max_model_len"."""
    with request(server, "/v1/models") as answer:
        try:
            found: dict[str, Any] = json.load(answer)["data"][0]
            found["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise FatalError(
                f"{server.url}/v1/models lists no model: is this an OpenAI-compatible server?", ERROR
            ) from None
    return found


def find(wanted: str, verb: str, url: str = "") -> FoundServer | None:
    """The job of that name, or the only one; None where none runs and none was asked for.

    `url` is how it is reached where that is not its file's address. Raises FatalError with what to do if there are
    several, or if the server cannot be reached from this host.
    """
    jobs = server_registry.running(server_registry.directory(), mpi_env.hostname())
    matching = {name: job for name, job in jobs.items() if wanted in ("", *_names(name, job))}
    if not matching:
        if not wanted:
            return None
        others = f"; these are running:\n{_listing(jobs)}" if jobs else f", nor has any other; {START}"
        raise FatalError(f"--job {wanted}: no running job of yours has left a file of this name{others}", USAGE)
    if len(matching) > 1:
        several = f"{len(matching)} servers of yours are running; choose one with `phalanx {verb} --job NAME`"
        raise FatalError(f"{several}:\n{_listing(matching)}", USAGE)
    ((name, job),) = matching.items()
    return FoundServer(url, job.key, job.certificate) if url else _reached(name, job, verb)


def _known(url: str) -> FoundServer:
    """The server of this host at the URL, with the key of its file; without one where it has none, or is not known."""
    for job in server_registry.running(server_registry.directory(), mpi_env.hostname()).values():
        if job.host == mpi_env.hostname() and job.url == url:
            return FoundServer(url, job.key, job.certificate)
    return FoundServer(url)


def _reached(name: str, job: RegisteredServer, verb: str) -> FoundServer:
    parts = urllib.parse.urlsplit(job.url)
    if job.host == mpi_env.hostname():
        return FoundServer(job.url, job.key, job.certificate)
    if parts.scheme == "unix":
        remedy = f"run phalanx {verb} there, or start the server with --host HOST"
        raise FatalError(f"job {name} listens on {job.url} of {job.host} only: {remedy}", USAGE)
    port = parts.port
    if http_client.is_loopback(parts.hostname or ""):
        raise FatalError(
            f"job {name} listens on {job.host} for that host only. In another terminal:\n"
            f"  ssh -N -L {port}:127.0.0.1:{port} {job.host}\n"
            f"and here:\n"
            f"  phalanx {verb} --job {name} --url {parts.scheme}://127.0.0.1:{port}\n"
            "A server that is started with --host 0.0.0.0 is reached without ssh",
            USAGE,
        )
    path = server_registry.directory() / f"{name}.json"
    remedy = f"if job {name} on {job.host} is over, remove {path}"
    return FoundServer(job.url, job.key, job.certificate, remedy, direct=True)


def _names(name: str, job: RegisteredServer) -> tuple[str, ...]:
    """Forms of --job; PBS calls a job 42.server, and its users 42."""
    return tuple(one for one in (name, job.batch, job.batch.partition(".")[0], job.host, job.model) if one)


def _listing(jobs: dict[str, RegisteredServer]) -> str:
    rows = [
        (name, f"job {job.batch}" if job.batch else "", job.model, job.url,
         time.strftime("since %d %b %H:%M", time.localtime(job.since)))
        for name, job in jobs.items()
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(4)] + [0]
    return "\n".join("  " + "  ".join(f"{text:{w}}" for text, w in zip(row, widths, strict=True)) for row in rows)
