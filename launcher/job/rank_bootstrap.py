"""The rank bootstrap: a small process that binds itself and then becomes the rank, `python -m phalanx.rank`, by exec.

The supervisor starts it, or the supervisor's mpirun does; then the job is in PHALANX_JOB. Under a user's own mpirun or
srun `phalanx serve` calls `join` with the options, and rank 0 starts the server process.
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

from ... import child_python, logs
from ...errors import RANK_FAILED, RANK_KILLED, USAGE, FatalError
from ...logs import say
from ...rank.options import JOB_ENV, Job, Options, decode_job, encode_job
from ...rank.server import server_registry
from ...rank.server.config import ServerConfig
from ..options.models_file import Models
from ..options.resolve import rank_options
from . import binding, linux, mpi_env, secret_variables, server_process, visible_devices
from .mpi_env import RankPlacement

# The process id of a supervisor that starts ranks through mpirun.
PARENT_ENV = "PHALANX_PARENT"
RANK = ["-m", "phalanx.rank"]
ABORT = ["-c", "import sys; from mpi4py import MPI; MPI.COMM_WORLD.Abort(int(sys.argv[1]))"]
Jobs = Callable[[ServerConfig], "subprocess.Popen[bytes]"]
SERVER_PATIENCE = 30.0  # seconds for the server process to open its socket
WATCHER_PATIENCE = 3.0  # seconds that the server process may outlive rank 0
ABORT_DELAY = "5"  # seconds
MPIRUN_PATIENCE = 15.0  # seconds that mpirun may outlive rank 0
MPIRUNS = ("mpirun", "prterun", "orterun", "orterun_wrapper", "mpiexec", "mpiexec.hydra")


def main() -> int:
    """`python -m phalanx.launcher.job.rank_bootstrap`: a rank under the supervisor."""
    hold_drain()
    parent = os.getppid()
    linux.die_with(parent)
    supervisor = int(os.environ.pop(PARENT_ENV, "0"))  # 0: there is no mpirun between
    # If mpirun died before the line above, the parent is whoever adopts orphans: the supervisor, or if that has died
    # too, another. start_of: a zombie has died, although its threads may still hold a pidfd.
    if supervisor and (supervisor == parent or (linux.LINUX and not server_registry.start_of(supervisor))):
        return RANK_KILLED
    linux.ignore((signal.SIGUSR1, signal.SIGUSR2))
    job = decode_job(os.environ[JOB_ENV])
    place = mpi_env.rank_placement(os.environ) or RankPlacement(0, 1, 0, 1, "phalanx")
    try:
        exec_rank(job, place)
    except FatalError as stop:
        give_up(stop, place)
        if str(stop):
            say(str(stop), "error")
        else:
            linux.let_another_speak()
        return stop.code


def join(options: Options, place: RankPlacement, jobs: Jobs | None = None, models: Models | None = None) -> NoReturn:
    """Become a rank under a user's mpirun or srun. Of ranks other than 0, only the device options are used.

    jobs: starts a process in place of the server process, for batch jobs. models: what the server serves, if several.
    """
    linux.die_with(os.getppid())
    linux.ignore((signal.SIGUSR1, signal.SIGUSR2))
    link = ""
    try:
        if place.rank == 0:
            if len(options.devices) > 1 and options.device != "cpu" and given_one(place):
                listed = ",".join(str(one) for one in options.devices)
                say(f"each rank computes on the one GPU that it sees: --d {listed} chooses nothing")
            link = _start_server(options, jobs, models)
        else:
            hold_drain()
        job = Job(options=options, announced_size=place.size, server_socket=link, server_watched=True)
        exec_rank(job, place, own=True)
    except FatalError as stop:
        give_up(stop, place)
        raise


def finish(options: Options, place: RankPlacement) -> NoReturn:
    """End a job for which rank 0 has nothing to do. It joins to tell the other ranks, which do not see its files."""
    linux.die_with(os.getppid())
    exec_rank(Job(options=options, announced_size=place.size, over=True), place, own=True)


def give_up(stop: FatalError, place: RankPlacement) -> None:
    """End the whole job because of an error in this rank, while the others wait for it in MPI_Init.

    Open MPI's mpirun ends them when one rank exits with a code, so this returns there. srun and MPICH's hydra would let
    them wait for ever: there this process joins MPI and calls MPI_Abort, which also passes the code on.
    """
    if place.size == 1 or mpi_env.ends_together(os.environ):
        return
    if str(stop):
        say(str(stop), "error")
    os.execve(sys.executable, child_python.command(*ABORT, str(stop.code)), os.environ)


def hold_drain() -> None:
    """Block SIGUSR1 until the rank can drain. Start the server process before: it must not inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def exec_rank(job: Job, place: RankPlacement, own: bool = False) -> NoReturn:
    """Bind this process and exec the rank. own: as in device_index."""
    gpu = device_index(job.options, place, own)
    share = binding.choose(place, gpu, os.environ)
    environ = secret_variables.without(os.environ)
    bound = binding.apply(share, environ)
    if mpi_env.ends_together(os.environ):
        # Open MPI ends a rank that loses its connection to another and names neither: delay it for the watchdog.
        environ.setdefault("OMPI_MCA_opal_abort_delay", ABORT_DELAY)
    job = msgspec.structs.replace(
        job,
        options=rank_options(job.options),
        rank=place.rank,
        local_rank=place.local_rank,
        server_socket=job.server_socket if place.rank == 0 else "",
        device_index=gpu,
        bound=bound,
        abort=mpi_env.codes_by_abort(os.environ),
    )
    if place.rank == 0:
        _await_socket(job.server_socket)
    environ[JOB_ENV] = encode_job(job)
    os.execve(sys.executable, child_python.command(*RANK), environ)


def device_index(options: Options, place: RankPlacement, own: bool = False) -> int:
    """This rank's GPU, by CUDA's index among those that this process sees; -1 for the CPU.

    own: the launcher may have given each rank a GPU of its own, as srun --gpus-per-task=1 does. If this process then
    sees one GPU, it is this rank's. comm/gpu_owners.py checks later that no other rank has it too.
    """
    available = mpi_env.gpus()
    if options.device in ("cpu", "mps") or (options.device == "auto" and not available):
        return -1
    index = place.local_rank
    given = own and given_one(place)
    if given and options.devices == (0,):  # each rank sees its GPU as 0
        return 0
    if options.devices:
        if index > len(options.devices):
            raise FatalError("", USAGE)  # the first rank without a device prints the reason
        if index == len(options.devices):
            raise FatalError(
                f"--d lists {len(options.devices)} devices, but {mpi_env.hostname()} has more ranks", USAGE
            )
        index = options.devices[index]
    if given:
        return 0
    if index >= available:
        why = _visible_words()
        count = f"{available} GPU{'s' * (available != 1)}"
        raise FatalError(f"{mpi_env.hostname()} has {count}: there is none with index {index}{why}", USAGE)
    return index


def given_one(place: RankPlacement) -> bool:
    """Whether this rank sees one GPU and shares its node. The GPU is its own, unless all ranks see the same one."""
    return mpi_env.gpus() == 1 and (place.local_size > 1 or place.local_rank > 0)


def _visible_words() -> str:
    """A hint about CUDA_VISIBLE_DEVICES for the message about a missing GPU."""
    entries = visible_devices.listed(os.environ)
    if entries is None:
        return ""
    name = f"{visible_devices.VARIABLE}={os.environ[visible_devices.VARIABLE]}"
    if entries and entries[0].startswith("MIG-"):
        return f" ({name}, of which CUDA shows a process one MIG device: give each rank its own variable)"
    return f" ({name}, and indices count what it leaves, from 0)"


def _await_socket(path: str, child: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for the server's socket. The server usually opens it before the rank gets here, but not always."""
    deadline = time.monotonic() + SERVER_PATIENCE
    while path and not os.path.exists(path):
        if child is not None and child.poll() is not None:
            raise FatalError("", child.returncode if child.returncode > 0 else RANK_FAILED)  # it has printed the reason
        if time.monotonic() > deadline:
            raise FatalError(f"the server process did not start within {SERVER_PATIENCE:g} s", RANK_FAILED)
        time.sleep(0.01)


def _start_server(options: Options, jobs: Jobs | None, models: Models | None) -> str:
    """Rank 0 without a supervisor: start the server process, and fork a watcher that ends it after rank 0.

    Returns the path of the server's socket.
    """
    listener = None
    if jobs is None:
        listener, options = server_process.open_for_clients(options)
    directory = server_process.job_directory()
    link = os.path.join(directory, "link")
    settings = server_process.config(options, link, listener, binding.allowed(), models)
    child = server_process.start(settings, os.environ) if jobs is None else jobs(settings)
    hold_drain()
    if listener is not None:
        listener.socket.close()
    rank, mpirun = linux.pidfd(os.getpid()), _mpirun()
    if os.fork() == 0:
        code = 1
        try:
            watch_server(child, rank, directory, listener, settings.registry_file)
            if mpirun:
                kill_stuck_mpirun(*mpirun)
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


def watch_server(
    child: subprocess.Popen[bytes],
    rank: int,
    directory: str,
    listener: server_process.Listener | None = None,
    registry_file: str = "",
) -> None:
    """The watcher: copies the server's output to mpirun's stderr, and kills the server if it outlives rank 0 for long.

    mpirun waits for all processes that hold its pipes. This one holds stderr, for some seconds after rank 0 at most.
    """
    os.setsid()  # mpirun ends rank 0's process group
    linux.ignore((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE))
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
            deadline = time.monotonic() + WATCHER_PATIENCE
        if output in ready:
            data = os.read(output, 65536)
            if not data:
                watched.remove(output)
            logs.writer(2).write(data)
        if not ready:
            linux.kill_group(child.pid, signal.SIGKILL)
            deadline = float("inf")
    logs.flush()
    server_process.clear(listener, directory, registry_file)


def _mpirun() -> tuple[int, int] | None:
    """The mpirun that started this process, and its pidfd. Under MPICH a proxy stands between them."""
    pid = os.getppid()
    for _ in range(2):
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition(" (")[2].rpartition(") ")
        except OSError:
            break
        if name in MPIRUNS:
            return pid, linux.pidfd(pid)
        pid = int(rest.split()[1])
    return None


def kill_stuck_mpirun(mpirun: int, ended: int) -> None:
    """Kill mpirun if it outlives rank 0 for long. ended: its pidfd.

    mpirun waits for a node that is cut off or hangs until TCP gives up, which takes a quarter of an hour.
    """
    # mpirun may be waiting for this process to close its pipe, or the socket between rank 0 and mpirun.
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    os.closerange(3, ended)
    os.closerange(ended + 1, os.sysconf("SC_OPEN_MAX"))
    if select.select([ended], [], [], MPIRUN_PATIENCE)[0]:
        return
    text = f"phalanx: mpirun waits for a node that does not answer; it is ended {MPIRUN_PATIENCE:g} s after rank 0\n"
    with contextlib.suppress(OSError):
        family = [mpirun, *linux.children(mpirun)]  # including its ssh clients, which would wait as long
        with contextlib.suppress(OSError):
            # Its own open file: O_NONBLOCK keeps this process from waiting for whoever reads mpirun.
            os.write(os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), text.encode())
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
