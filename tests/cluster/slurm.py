"""A real Slurm over the two hosts: munged and slurmctld on the first, a slurmd on each, all as this test's children.

Of Debian the packages slurm-wlm, munge, libpmix2 and libpmix-dev: `srun --mpi=pmix` loads libpmix.so by that name. The
system's own Slurm is left alone: configuration, state and munge's socket lie in a directory of the test, the ports in
the hosts' networks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from phalanx.launcher.job import linux

from ..processes import wait
from ..server import PHALANX
from .hosts import PATH, Host, Hosts

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}

# cred_expire is also the shortest time between a job's end and its next start; the default is two minutes.
_CONF = """ClusterName=rehearsal
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1
ReturnToService=2
MinJobAge=3600
KillWait=5
MailProg=/bin/true
TmpFS=/run/tmp
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
PartitionName=short Nodes=ALL MaxTime=3 State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Why there can be no Slurm here; "" where there may be."""
    lacking = {package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None}
    return f"Slurm needs {', '.join(sorted(lacking))}" if lacking else ""


class Slurm:
    """A context manager that runs Slurm. Raises RuntimeError where it does not come up."""

    def __init__(self, hosts: Hosts, place: Path):
        self.hosts, self.place = hosts, place
        place.chmod(0o755)
        (place / "munge").mkdir(mode=0o755)
        (place / "state").mkdir()
        key = place / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        cpus = os.cpu_count() or 1
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} State=UNKNOWN" for host in hosts.all
        )
        (place / "slurm.conf").write_text(_CONF.format(place=place, nodes=nodes))
        self.conf = str(place / "slurm.conf")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
        self.environ |= {
            "SLURM_CONF": self.conf,
            "PATH": f"{Path(PHALANX).parent}:{PATH}",
            "TMPDIR": "/run/tmp",
            "XDG_RUNTIME_DIR": "/run/tmp",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            words = [f"--{name}={place}/munge/{name.removesuffix('-file')}" for name in
                     ("socket", "key-file", "pid-file", "log-file", "seed-file")]  # fmt: skip
            self._daemon(hosts.near, "munged", "--foreground", "--force", *words)
            self._await(lambda: not (place / "munge" / "socket").exists(), "munged")
            self._daemon(hosts.near, "slurmctld", "-D")
            for host in hosts.all:
                self._daemon(host, "slurmd", "-D")
            self._await(lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.splitlines()[:1] != ["idle 2"], "Slurm")
            for host in hosts.all:
                host.kept |= host.processes().keys()
            plugins = self.run("srun", "--mpi=list")
            if "pmix" not in plugins.stdout + plugins.stderr:
                raise RuntimeError("this Slurm has no plugin for PMIx")
        except BaseException:
            self.close()
            raise

    def _daemon(self, host: Host, program: str, *words: str) -> None:
        command = host.enter(str(shutil.which(program, path=PATH)), *words)
        with open(self.place / f"{program}-{host.name}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True, preexec_fn=linux.tie_to_parent())
            )  # fmt: skip

    def _await(self, left, what: str) -> None:
        if wait(left, 20):
            logs = "".join(f"{path.name}: {path.read_text()[-600:]}\n" for path in self.place.glob("*.log"))
            raise RuntimeError(f"{what} does not come up: {logs}")

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of Slurm on the first host."""
        words = self.hosts.near.enter(*command)
        return subprocess.run(words, env=self.environ, cwd=cwd, capture_output=True, text=True, timeout=30)

    def state(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Restarts, ExitCode, …"""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def close(self) -> None:
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root")
            time.sleep(0.5)  # 0.5 s are enough for jobs that end when they hear of it; the rest is killed below
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for host in self.hosts.all:
            host.kept = {host.pid}
        self.hosts.clear()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
