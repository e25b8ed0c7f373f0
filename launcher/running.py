"""Servers of this user that are running, found by the files that they leave (`rank/front/jobfile.py`)."""

from __future__ import annotations

import time
import urllib.parse

import msgspec

from ..rank.exits import USAGE, Stop
from ..rank.front import jobfile
from ..rank.front.jobfile import JobFile
from . import client, hosts

START = "start one with `phalanx serve`"


class Server(msgspec.Struct, frozen=True):
    """Where requests go."""

    url: str  # without /v1
    key: str = ""
    remedy: str = START  # what to do if nobody answers there
    direct: bool = False  # no proxy in between: it is a host of the cluster


def find(wanted: str, url: str = "") -> Server | None:
    """The job of that name, or the only one; None where none runs and none was asked for.

    `url` is how it is reached where that is not what its file says. Raises Stop with what to do if there is a choice,
    or if the server cannot be reached from this host.
    """
    jobs = jobfile.running(jobfile.directory(), hosts.hostname())
    chosen = {name: job for name, job in jobs.items() if wanted in ("", *_names(name, job))}
    if not chosen:
        if not wanted:
            return None
        others = f"; these are running:\n{_listing(jobs)}" if jobs else f", nor has any other; {START}"
        raise Stop(f"--job {wanted}: no running job of yours has left a file of this name{others}", USAGE)
    if len(chosen) > 1:
        several = f"{len(chosen)} servers of yours are running; choose one with `phalanx chat --job NAME`"
        raise Stop(f"{several}:\n{_listing(chosen)}", USAGE)
    ((name, job),) = chosen.items()
    return Server(url, job.key) if url else _reached(name, job)


def key_of(url: str) -> str:
    """The key of this host's server at that URL; "" if it has none, or is not known."""
    for job in jobfile.running(jobfile.directory(), hosts.hostname()).values():
        if job.host == hosts.hostname() and job.url == url:
            return job.key
    return ""


def _reached(name: str, job: JobFile) -> Server:
    parts = urllib.parse.urlsplit(job.url)
    if parts.scheme != "http":
        raise Stop(f"job {name} listens on {job.url} only: chat reaches a server that was started with --h HOST", USAGE)
    if job.host == hosts.hostname():
        return Server(job.url, job.key)
    port = parts.port
    if client.is_loopback(parts.hostname or ""):
        raise Stop(
            f"job {name} listens on {job.host} for that host only. In another terminal:\n"
            f"  ssh -N -L {port}:127.0.0.1:{port} {job.host}\n"
            f"and here:\n"
            f"  phalanx chat --job {name} --url http://127.0.0.1:{port}\n"
            "A server that is started with --h 0.0.0.0 and --api-key-file FILE is reached without ssh",
            USAGE,
        )
    path = jobfile.directory() / f"{name}.json"
    remedy = f"if job {name} on {job.host} is over, remove {path}"
    return Server(job.url, job.key, remedy, direct=True)


def _names(name: str, job: JobFile) -> tuple[str, ...]:
    """What --job may be; PBS calls a job 42.server, and its users 42."""
    return tuple(one for one in (name, job.batch, job.batch.partition(".")[0], job.host, job.model) if one)


def _listing(jobs: dict[str, JobFile]) -> str:
    rows = [
        (name, f"job {job.batch}" if job.batch else "", job.model, job.url,
         time.strftime("since %d %b %H:%M", time.localtime(job.since)))
        for name, job in jobs.items()
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(4)] + [0]
    return "\n".join("  " + "  ".join(f"{text:{w}}" for text, w in zip(row, widths, strict=True)) for row in rows)
