"""Starts the server process. Its starter binds the HTTP port first, so that a taken port fails before loading."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ... import child_python
from ...errors import USAGE, FatalError
from ...logs import say
from ...rank.options import Options
from ...rank.server import server_registry, tls, tracing
from ...rank.server.config import PREDECESSOR, PUSH_GROUP, VARIABLE, ServerConfig, model_settings, named_alike
from .. import builtin_model
from ..options.models_file import Models
from ..options.resolve import rank_options
from . import mpi_env, resubmission, secret_variables

SERVER = ["-m", "phalanx.rank.server"]
BACKLOG = 1024
NULL = subprocess.DEVNULL
NO_KEY = "none"  # of --api-key
_LOOPBACK = ("127.", "::1", "localhost")


class PortTaken(FatalError):
    """Somebody else listens there."""


class Listener(msgspec.Struct):
    """The bound HTTP socket and how clients reach it."""

    socket: socket.socket
    url: str
    open_to_all: bool  # reachable from other machines
    name: str = ""  # the host as the user gave it
    path: str = ""  # of a unix socket
    inode: tuple[int, int] = (0, 0)  # the socket's device and inode number


def open_for_clients(options: Options) -> tuple[Listener, Options]:
    """The bound socket, and the options with the API keys that are in force."""
    check_traces(options.otlp_endpoint)
    if options.tls_key and not options.tls_cert:
        raise FatalError(f"--tls-key {options.tls_key}: its certificate is missing, --tls-cert FILE", USAGE)
    if options.tls_cert:
        if options.host.startswith("unix://"):
            raise FatalError(f"--tls-cert {options.tls_cert}: a unix socket needs no TLS: leave it out", USAGE)
        try:
            tls.server_context(options.tls_cert, options.tls_key)
        except ValueError as error:
            raise FatalError(f"--tls-cert, --tls-key: {error}", USAGE) from None
    listener = _listen_anywhere(options) if options.resubmit else listen(options.host, options.port)
    if options.tls_cert:
        listener.url = listener.url.replace("http://", "https://", 1)
    try:
        return listener, _with_key(listener, options)
    except BaseException:
        listener.socket.close()
        unlink(listener)
        raise


def listen(host: str, port: int) -> Listener:
    """Bind HOST:PORT, or the path of unix:///PATH. Port 0 picks a free one."""
    if host.startswith("unix://"):
        return _listen_unix(host.removeprefix("unix://"))
    host, port = _split(host.removeprefix("tcp://").removeprefix("http://"), port)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise FatalError(f"--host {host!r}: no such host ({error.strerror})", USAGE) from None
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        refused = PortTaken if error.errno == errno.EADDRINUSE else FatalError
        raise refused(_why_not(error, host, port), USAGE) from None
    shown, port = listener.getsockname()[:2]
    local = shown.startswith(_LOOPBACK)
    if shown in ("0.0.0.0", "::"):
        shown = mpi_env.hostname()
    return Listener(listener, f"http://{f'[{shown}]' if ':' in shown else shown}:{port}", not local, host)


def _with_key(listener: Listener, options: Options) -> Options:
    """The options with a key for a server that others can reach and that was given none, or without for NO_KEY.

    Others are on the host's network, and on a node of a batch system's job. The server's job file has the key.
    """
    if options.api_key == NO_KEY:
        if listener.open_to_all:
            say("listening to other machines without a key: --api-key-file FILE lets only its holders in")
        return msgspec.structs.replace(options, api_key="")
    job = mpi_env.batch_job(os.environ)
    if options.api_key and (not options.resubmit or options.api_key_file):
        return options
    if listener.path or not (options.api_key or listener.open_to_all or job):
        return options
    try:
        server_registry.make_directory(server_registry.directory())
    except OSError as error:
        raise FatalError(
            f"no place for an API key: {server_registry.directory()}: {error.strerror}; give one with --api-key-file "
            f"FILE, or let everybody in with --api-key {NO_KEY}",
            USAGE,
        ) from None
    if options.resubmit:
        return msgspec.structs.replace(options, api_key=resubmission.shared_key(options, os.environ))
    why = "other machines reach it" if listener.open_to_all else "other users may be on this node"
    say(
        f"made an API key, as {why}: {_job_file()} has it, for you alone, and phalanx chat finds it there "
        f"(--api-key {NO_KEY} lets everybody in)"
    )
    return msgspec.structs.replace(options, api_key=secrets.token_urlsafe(32))


def _job_file() -> Path:
    return server_registry.directory() / f"{mpi_env.hostname()}-{os.getpid()}.json"


def _listen_anywhere(options: Options) -> Listener:
    """Listens at another port where the job before this one, or another of the service, has the one asked for."""
    try:
        return listen(options.host, options.port)
    except FatalError as taken:
        if not isinstance(taken, PortTaken):
            raise
        listener = listen(options.host, 0)
        say(f"port {options.port} is taken, so this is {listener.url}: phalanx gateway finds it there")
        return listener


def _split(host: str, port: int) -> tuple[str, int]:
    """candle-vLLM's --h also takes HOST:PORT and [V6]:PORT."""
    inner, bracket, rest = host.removeprefix("[").partition("]")
    if not bracket:
        inner, _, rest = host.partition(":") if host.count(":") == 1 else (host, "", "")
        rest = ":" + rest if rest else ""
    if not rest:
        return inner, port
    if not rest.removeprefix(":").isdigit() or int(rest.removeprefix(":")) > 65535:
        raise FatalError(f"--host {host!r}: {rest.removeprefix(':')!r} is no port", USAGE)
    return inner, int(rest.removeprefix(":"))


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken: choose another with --port, or let --port 0 pick a free one"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed to this user: choose one of 1024 or above with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host!r} is no address of this machine; 0.0.0.0 listens on all of them"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _listen_unix(path: str) -> Listener:
    """Bind a unix socket for this user only. Its owner may change the mode afterwards."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _abandoned(path):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        status = os.stat(path)
    except OSError as error:
        listener.close()
        raise FatalError(f"--host unix://{path}: {error.strerror or error}", USAGE) from None
    except FatalError:
        listener.close()
        raise
    return Listener(listener, f"unix://{path}", False, "", path, (status.st_dev, status.st_ino))


def _abandoned(path: str) -> bool:
    """Whether a killed server left its socket there. Only a refused connection proves that; other errors are raised."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # the backlog of a busy server may be full
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass
    raise FatalError(f"--host unix://{path}: another server listens there", USAGE)


def unlink(listener: Listener) -> None:
    """Remove the path of a unix socket, unless it is another server's by now."""
    if not listener.path:
        return
    with contextlib.suppress(OSError):
        status = os.lstat(listener.path)
        if (status.st_dev, status.st_ino) == listener.inode:
            os.unlink(listener.path)


def job_directory() -> str:
    """A new directory for the job's sockets, for this user only."""
    # A socket's path may have 107 characters. logind removes XDG_RUNTIME_DIR at logout, while a job may still run.
    places = [tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR", "")]
    for place in places:
        if place and len(place) < 70 and os.access(place, os.W_OK | os.X_OK):
            return tempfile.mkdtemp(prefix="phalanx-", dir=place)
    raise FatalError(f"no directory for the job's sockets: {', '.join(filter(None, places))} cannot be written", USAGE)


def remove(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def clear(listener: Listener | None, directory: str, registry_file: str) -> None:
    """Remove what a server process that was killed left behind; "": there is none."""
    if listener is not None:
        unlink(listener)
    if directory:
        remove(directory)
    if registry_file:
        server_registry.remove(Path(registry_file))


def _own_name(listener: Listener | None) -> list[str]:
    """The name given by --host, for the allowed hosts. `*` is left out: there it would allow any host."""
    return [listener.name] if listener and listener.name not in ("", "*") else []


def push_url(url: str, instance: str) -> str:
    """The address that figures are pushed to. A URL without a path is a Pushgateway's, where this server has a group of
    its own."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FatalError(f"--metrics-push {url}: it has to be a URL that begins with http:// or https://", USAGE)
    if parts.path.strip("/"):
        return url
    return urllib.parse.urlunsplit(parts._replace(path=PUSH_GROUP + urllib.parse.quote(instance, safe="")))


def check_traces(url: str) -> None:
    """Raises FatalError where traces cannot be sent to --otlp-endpoint."""
    try:
        tracing.check(url)
    except ValueError as error:
        raise FatalError(str(error), USAGE) from None


def config(
    options: Options, link: str, listener: Listener | None, cpus: list[int], models: Models | None = None
) -> ServerConfig:
    """The server process's configuration. link: its socket for rank 0. cpus: those it may run on."""
    keys = [(" ".join(line.split()[:-1]), line.split()[-1]) for line in options.api_key.split("\n") if line.strip()]
    push = options.metrics_push
    if push:
        port = listener.socket.getsockname()[1] if listener and not listener.path else os.getpid()
        push = push_url(push, f"{mpi_env.hostname()}:{port}")
    handover = resubmission.plan(options, os.environ, time.time()) if listener else None
    own = builtin_model.SERVED_NAME if options.model == str(builtin_model.DIRECTORY) else ""
    fields = named_alike(ServerConfig, options) | model_settings(options)
    fields |= dict(
        link=link,
        listen_fd=listener.socket.fileno() if listener else -1,
        url=f"{listener.url}/v1" if listener and listener.url.startswith("http") else "",
        served_model_name=options.served_model_name or own,
        api_keys=[key for _, key in keys],
        key_names={key: name for name, key in keys if name},
        allowed_origins=list(options.allowed_origins),
        allowed_hosts=[*options.allowed_hosts, *_own_name(listener)],
        allowed_media_hosts=list(options.allowed_media_hosts),
        allowed_media_dir=os.path.abspath(options.allowed_media_dir) if options.allowed_media_dir else "",
        load_options="" if models is not None else msgspec.json.encode(rank_options(options)).decode(),
        metrics_push=push,
        file_store=os.path.abspath(options.file_store) if options.file_store else "",
        restarts_expected=options.restarts > 0,
        models=models.configs(options) if models is not None else [],
        idle_unload=models.idle_unload if models is not None else 0.0,
        cpus=cpus,
        parent_pid=os.getpid(),
        registry_file=str(_job_file()) if listener else "",
        batch_job=mpi_env.batch_job(os.environ),
        end_time=handover.end if handover is not None else mpi_env.end_time(os.environ),
        handover=handover,
        predecessor=os.environ.get(PREDECESSOR, ""),
    )
    return ServerConfig(**fields)


def start(settings: ServerConfig, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the server process with the HTTP socket."""
    return spawn(SERVER, VARIABLE, settings, environ, [settings.listen_fd])


def spawn(
    module: list[str],
    variable: str,
    config: msgspec.Struct,
    environ: Mapping[str, str],
    fds: list[int],
    stdin: int | None = NULL,
) -> subprocess.Popen[bytes]:
    """Start the server process, or a batch process in its place: in a session of its own, with its output in a pipe.

    It must not inherit mpirun's output, or mpirun would wait for it after rank 0 is gone. It must not inherit MPI's
    variables either, or a library in it would join the MPI job. Its configuration may hold keys, which an environment
    would show for as long as it runs: so that goes through a pipe, which `variable` names.
    """
    read, write = os.pipe()
    with open(write, "wb", buffering=0) as pipe:
        try:
            child = subprocess.Popen(
                child_python.command(*module),
                env={**secret_variables.without(mpi_env.without_mpi(environ)), variable: str(read)},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[*fds, read],
                start_new_session=True,
            )
        finally:
            os.close(read)
        left = memoryview(msgspec.json.encode(config))
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which its starter sees
            while left:
                left = left[pipe.write(left) :]
    return child
