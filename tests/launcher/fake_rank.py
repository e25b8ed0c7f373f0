"""Stands for `python -m phalanx.rank`: does what FAKE says, without MPI and torch.

FAKE is a list of `what@rank`, separated by spaces, without `@rank` for all: `exit:CODE`, `kill` (itself), `deaf` (to
TERM and USR1), `child` (leave a grandchild in a session of its own), `once:…` (only in the first start), `silent`
(never connect). A rank that is told nothing else connects to the server, if it is rank 0, and ends on USR1 with 0.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from phalanx.rank.options import decode_job

place = Path(os.environ["FAKE_DIR"])
with open(place / "environs", "a") as seen:
    # Arguments of the rank, and of mpirun, which started it.
    seen.write(f"{dict(os.environ)}\n{Path(f'/proc/{os.getppid()}/environ').read_bytes()!r}\n")
job = decode_job(os.environ.pop("PHALANX_JOB"))


def note(name, text=""):
    with open(place / name, "a") as file:
        file.write(f"{text}\n")


first = not (place / f"rank-{job.rank}").exists()
note(f"rank-{job.rank}", os.getpid())
note(f"cpus-{job.rank}", f"{sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']} {job.bound}")
note("gpus", f"rank {job.rank} on GPU {job.device_index}")
wanted = []
for word in os.environ.get("FAKE", "").split():
    what, _, rank = word.partition("@")
    if what.startswith("once:"):
        if not first:
            continue
        what = what.removeprefix("once:")
    if not rank or int(rank) == job.rank:
        wanted.append(what)


def drain(*_):
    note("usr1", job.rank)
    os._exit(0)


signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the launcher held it back
signal.signal(signal.SIGUSR1, (lambda *_: note("heard", job.rank)) if "deaf" in wanted else drain)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in wanted else signal.SIG_DFL)
link = None
if job.server_socket and "silent" not in wanted:
    link = socket.socket(socket.AF_UNIX)
    link.connect(job.server_socket)
if "child" in wanted:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    note("child", child.pid)
print(f"rank {job.rank} of {job.announced_size} is up", file=sys.stderr, flush=True)
note("up", job.rank)
deadline = time.monotonic() + 10
while len((place / "up").read_text().split()) < job.announced_size and time.monotonic() < deadline:
    time.sleep(0.02)  # the others come up before this one fails
if any(what == "kill" or what.startswith("exit:") for what in wanted):
    time.sleep(0.3)  # long enough for mpirun to hand on what ranks say: it loses that where one fails at once
for what in wanted:
    if what.startswith("exit:"):
        os._exit(int(what[5:]))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if link is not None:
    link.settimeout(None)
    link.recv(1)
    if "deaf" not in wanted:
        os._exit(70)
time.sleep(60)  # until the job ends, which kills it
