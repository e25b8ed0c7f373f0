"""Rank 1 has another Phalanx, another model directory, a failing disk or little memory, as DIFFER says."""

import errno
import os

import msgspec
from phalanx.comm import hosts
from phalanx.rank import __main__ as main
from phalanx.rank.model.weights import striped
from phalanx.rank.worker import engine


def fail(fd, buffers, offset):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def share_job(job, world, real=main.share_job):
    job = real(job, world)
    return msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, model=value))


what, _, value = os.environ["DIFFER"].partition(":")
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    if what == "version":
        hosts.__version__ = value
    elif what == "model":
        main.share_job = share_job
    elif what == "memory":
        engine.kv_cache.free_memory = lambda device, ranks_here: int(value)
    else:
        striped.os.preadv = fail
os._exit(main.main())
