"""The small process that every rank starts as: it binds itself and becomes `python -m phalanx.rank`.

Started by the supervisor, or by the mpirun that the supervisor runs, it finds the job in PHALANX_JOB. Under a user's
own mpirun or srun `phalanx serve` comes here with the options, and rank 0 starts the front.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from ..rank.exits import RANK_FAILED, RANK_KILLED, USAGE, Stop
from ..rank.front.config import FrontConfig
from ..rank.options import JOB_ENV, Job, Options, decode_job, encode_job
from . import bind, front, hosts, process
from .hosts import World

# Set by the supervisor: its process id. A rank whose parent that is, or became, has lost its mpirun.
PARENT_ENV = "PHALANX_PARENT"
KEY_ENV = "PHALANX_API_KEY"
RANK = ["-m", "phalanx.rank"]
ABORT = ["-c", "import sys; from mpi4py import MPI; MPI.COMM_WORLD.Abort(int(sys.argv[1]))"]
Jobs = Callable[[FrontConfig], "subprocess.Popen[bytes]"]
FRONT_PATIENCE = 30.0  # seconds for the front to open its socket
KEEPER_PATIENCE = 3.0  # seconds that the front may outlive rank 0
ABORT_DELAY = "5"  # seconds
MPIRUN_PATIENCE = 15.0  # seconds that mpirun may outlive rank 0
MPIRUNS = ("mpirun", "prterun", "orterun", "orterun_wrapper", "mpiexec", "mpiexec.hydra")


def main() -> int:
    """A supervised rank; `python -m phalanx.launcher.member`."""
    hold_drain()
    parent = os.getppid()
    process.die_with(parent)
    if str(parent) == os.environ.pop(PARENT_ENV, ""):
        return RANK_KILLED  # mpirun died before the line above
    process.ignore((signal.SIGUSR1, signal.SIGUSR2))
    job = decode_job(os.environ[JOB_ENV])
    place = hosts.world(os.environ) or World(0, 1, 0, 1, "phalanx")
    try:
        become(job, place)
    except Stop as stop:
        give_up(stop, place)
        if str(stop):
            process.say(str(stop))
        else:
            process.let_another_speak()
        return stop.code


def join(options: Options, place: World, jobs: Jobs | None = None) -> NoReturn:
    """A rank under a user's mpirun or srun. Options of ranks other than 0 count for their device only.

    `jobs` starts the process that takes the front's place.
    """
    process.die_with(os.getppid())
    process.ignore((signal.SIGUSR1, signal.SIGUSR2))
    link = ""
    try:
        if place.rank == 0:
            link = _start_front(options, jobs)
        else:
            hold_drain()
        become(Job(options=options, announced_size=place.size, front_socket=link), place)
    except Stop as stop:
        give_up(stop, place)
        raise


def finish(options: Options, place: World) -> NoReturn:
    """Rank 0 has nothing to do. The other ranks wait to hear that: they do not see its files."""
    process.die_with(os.getppid())
    become(Job(options=options, announced_size=place.size, over=True), place)


def give_up(stop: Stop, place: World) -> None:
    """End the whole job because of an error that this rank alone has met; the others wait for it in MPI_Init.

    Open MPI's mpirun ends them when one ends with a code, so here it returns. srun and MPICH's hydra let them wait for
    ever: there this process joins them and aborts, which also hands the code on.
    """
    if place.size == 1 or hosts.ends_together(os.environ):
        return
    if str(stop):
        process.say(str(stop))
    os.execve(sys.executable, [sys.executable, *ABORT, str(stop.code)], os.environ)


def hold_drain() -> None:
    """Hold SIGUSR1 back until the rank can drain. A front that is started from here must not inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def become(job: Job, place: World) -> NoReturn:
    """Bind this process and replace it by the rank."""
    gpu = device_index(job.options, place)
    share = bind.choose(place, gpu, os.environ)
    environ = dict(os.environ)
    environ.pop(KEY_ENV, None)
    bound = bind.apply(share, environ)
    if hosts.ends_together(os.environ):
        # Open MPI ends a rank whose connection to a lost one closes, and names nobody: the watchdog goes first.
        environ.setdefault("OMPI_MCA_opal_abort_delay", ABORT_DELAY)
    job = msgspec.structs.replace(
        job,
        options=without_key(job.options),
        rank=place.rank,
        local_rank=place.local_rank,
        front_socket=job.front_socket if place.rank == 0 else "",
        device_index=gpu,
        bound=bound,
        abort=hosts.codes_by_abort(os.environ),
    )
    if place.rank == 0:
        _await_socket(job.front_socket)
    environ[JOB_ENV] = encode_job(job)
    os.execve(sys.executable, [sys.executable, *RANK], environ)


def without_key(options: Options) -> Options:
    """What mpirun and the ranks get. Only the front checks the key; what they do not have they cannot show."""
    return msgspec.structs.replace(options, api_key="", api_key_file="")


def device_index(options: Options, place: World) -> int:
    """The GPU of this rank on its node; -1 for the CPU."""
    available = hosts.gpus()
    if options.device == "cpu" or (options.device == "auto" and not available):
        return -1
    index = place.local_rank
    if options.devices:
        if index > len(options.devices):
            raise Stop("", USAGE)  # the first rank without a device says it
        if index == len(options.devices):
            raise Stop(f"--d lists {len(options.devices)} devices, but {hosts.hostname()} has more ranks", USAGE)
        index = options.devices[index]
    if index >= available:
        raise Stop(f"{hosts.hostname()} has {available} GPUs: there is none with index {index}", USAGE)
    return index


def _await_socket(path: str, child: subprocess.Popen[bytes] | None = None) -> None:
    """The front opens its socket in half a second; the rank needs longer to get there, but not surely."""
    deadline = time.monotonic() + FRONT_PATIENCE
    while path and not os.path.exists(path):
        if child is not None and child.poll() is not None:
            raise Stop("", child.returncode if child.returncode > 0 else RANK_FAILED)  # it has said what is wrong
        if time.monotonic() > deadline:
            raise Stop(f"the front did not start within {FRONT_PATIENCE:g} s", RANK_FAILED)
        time.sleep(0.01)


def _start_front(options: Options, jobs: Jobs | None) -> str:
    """Rank 0 without a supervisor: the front is a child of the rank, and a keeper watches over its end."""
    listener = None
    if jobs is None:
        listener = front.listen(options.host, options.port)
        front.warn(listener, options)
    directory = front.job_directory()
    link = os.path.join(directory, "lead")
    settings = front.config(options, link, listener, bind.allowed())
    child = front.start(settings, os.environ) if jobs is None else jobs(settings)
    hold_drain()
    if listener is not None:
        listener.socket.close()
    rank, mpirun = process.pidfd(os.getpid()), _mpirun()
    if os.fork() == 0:
        code = 1
        try:
            keep(child, rank, directory, listener)
            if mpirun:
                outlive(*mpirun)
            code = 0
        finally:
            os._exit(code)
    os.close(rank)
    if mpirun:
        os.close(mpirun[1])
    assert child.stdout is not None
    child.stdout.close()
    _await_socket(link, child)
    return link


def keep(child: subprocess.Popen[bytes], rank: int, directory: str, listener: front.Listener | None = None) -> None:
    """Copy the front's output to mpirun's stderr until it ends, and see to it that it ends soon after rank 0.

    mpirun waits for all who hold its pipes: this process holds its stderr, but for seconds at most after rank 0.
    """
    os.setsid()  # mpirun ends rank 0's process group
    process.ignore((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    assert child.stdout is not None
    output = child.stdout.fileno()
    deadline = float("inf")
    watched = [output, rank]
    while output in watched:
        left = deadline - time.monotonic()
        ready, _, _ = select.select(watched, [], [], None if left == float("inf") else max(0.0, left))
        if rank in ready:
            watched.remove(rank)
            deadline = time.monotonic() + KEEPER_PATIENCE
        if output in ready:
            data = os.read(output, 65536)
            if not data:
                watched.remove(output)
            process.write(2, data)
        if not ready:
            process.kill_group(child.pid, signal.SIGKILL)
            deadline = float("inf")
    if listener is not None:
        front.unlink(listener)
    front.remove(directory)


def _mpirun() -> tuple[int, int] | None:
    """The mpirun that started this process, and its pidfd. Under MPICH's a proxy is between."""
    pid = os.getppid()
    for _ in range(2):
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition(" (")[2].rpartition(") ")
        except OSError:
            break
        if name in MPIRUNS:
            return pid, process.pidfd(pid)
        pid = int(rest.split()[1])
    return None


def outlive(mpirun: int, ended: int) -> None:
    """End mpirun where it does not end after rank 0: it waits for a node that was cut off or stands still until TCP
    gives up, which takes a quarter of an hour. `ended` is its pidfd.
    """
    # It may be waiting for us: to let go of its pipe, or of the socket through which rank 0 spoke to it.
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    os.closerange(3, ended)
    os.closerange(ended + 1, os.sysconf("SC_OPEN_MAX"))
    if select.select([ended], [], [], MPIRUN_PATIENCE)[0]:
        return
    text = f"phalanx: mpirun waits for a node that does not answer; it is ended {MPIRUN_PATIENCE:g} s after rank 0\n"
    with contextlib.suppress(OSError):
        family = [mpirun, *process.children(mpirun)]  # its ssh clients would wait as long
        with contextlib.suppress(OSError):
            process.write(os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_APPEND), text.encode())
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
