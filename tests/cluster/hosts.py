"""Two hosts on one machine: network, host name and mount namespaces of their own, joined by a cable, sshd in each.

What they share is the file system, as nodes of a cluster do, but for /run and /dev/shm. Needs root, and of Debian the
packages openssh-server, openssh-client and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from phalanx.launcher.job import linux, mpirun

from ..leftovers import KERNELS
from ..processes import kill, table, wait
from ..ranks import MEMORY
from ..server import Server, Stream

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "ip": "iproute2",
            "nsenter": "util-linux", "unshare": "util-linux"}  # fmt: skip
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where sshd and ip are, which a user's PATH may lack

_BOOT = """
set -e
hostname $NAME
mount --bind "$PLACE/hosts" /etc/hosts
for each in /dev/shm /run; do mount -t tmpfs tmpfs $each; done
mkdir /run/sshd /run/tmp
test ! -e "$KERNELS" || cp -R "$KERNELS" /run/tmp  # compiled ones
ip link set lo up
echo booted
read -r _
ip addr add $ADDRESS/24 dev eth0
ip link set eth0 up
exec "$SSHD" -D -e -f "$PLACE/sshd_config"
"""

_SSHD = """Port 22
HostKey {place}/host_key
AuthorizedKeysFile {place}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
PidFile none
SetEnv TMPDIR=/run/tmp
"""

_SSH = """#!/bin/sh
exec ssh -i {place}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


def missing() -> str:
    """Why there can be no such hosts here; "" where there can."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    lacking = {package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None}
    if lacking:
        return f"two hosts on one machine need {', '.join(sorted(lacking))}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/run"],
                           capture_output=True, text=True)  # fmt: skip
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


class Host:
    """One of them. Its first process is the shell that prepares it and becomes its sshd."""

    def __init__(self, name: str, address: str, place: Path):
        self.name, self.address = name, address
        environ = os.environ | {"NAME": name, "ADDRESS": address, "PLACE": str(place), "PATH": PATH}
        environ |= {"KERNELS": str(Path(tempfile.gettempdir()) / KERNELS)}
        environ |= {"SSHD": str(shutil.which("sshd", path=PATH))}  # it wants to be started by its full path
        self._log = open(place / f"{name}.log", "wb")  # noqa: SIM115
        self._init = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", _BOOT],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True, preexec_fn=linux.tie_to_parent(),
        )  # fmt: skip
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"booted\n":
            raise RuntimeError(f"{name} cannot be prepared: {self.log()}")
        self.kept = {self.pid}  # what is not of a job: sshd, and what a test adds
        self._network = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    @property
    def pid(self) -> int:
        return self._init.pid

    def go(self) -> None:
        """The cable is plugged in."""
        assert self._init.stdin is not None
        self._init.stdin.write(b"\n")
        self._init.stdin.close()
        if wait(lambda: not self.inside(self._reachable), 10):
            raise RuntimeError(f"{self.name} starts no sshd: {self.log()}")

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def _reachable(self) -> bool:
        try:
            socket.create_connection((self.address, 22), timeout=1).close()
        except OSError:
            return False
        return True

    def enter(self, *command: str) -> tuple[str, ...]:
        """The command line that runs another one on this host."""
        return ("nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--wd=.", *command)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"PATH": PATH}
        return subprocess.run(self.enter(*command), env=environ, capture_output=True, text=True, timeout=30)

    def inside(self, function: Callable[[], T]) -> T:
        """Call it in a thread of this host's network; the sockets that it makes belong there for good."""
        result: list[Any] = []

        def run() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{self.pid}/ns/net") as network:
                assert libc.setns(network.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                result.append(function())
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def processes(self, pattern: str = "") -> dict[int, str]:
        """Processes of this host that are not kept, in the order of their pids."""
        found = {}
        for pid, one in sorted(table().items()):
            try:
                here = os.stat(f"/proc/{pid}/ns/net").st_ino == self._network
            except OSError:
                continue  # it has just ended
            if here and pid not in self.kept and re.search(pattern, one.line):
                found[pid] = one.line
        return found

    def stand_still(self) -> list[int]:
        """Stop all that runs here, as a node does that has a kernel's or a hypervisor's trouble."""
        stopped = [*self.kept, *self.processes()]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        return stopped

    def go_on(self) -> None:
        for pid in (*self.kept, *self.processes()):
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """With its last process its namespaces end."""
        while others := self.processes():
            kill(others)
            time.sleep(0.02)
        self._init.kill()
        self._init.wait()
        self._log.close()


class Hosts:
    """Both, as a context manager. Whoever ends the tests ends the hosts: their first processes die with this one.

    Raises RuntimeError where they do not come up.
    """

    def __init__(self, place: Path):
        self.place = place
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
        addresses = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
        (place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in addresses.items()))
        (place / "hostfile").write_text("".join(f"{name} slots=2\n" for name in addresses))
        (place / "sshd_config").write_text(_SSHD.format(place=place))
        (place / "hostfile.mpich").write_text("".join(f"{name}:2\n" for name in addresses))
        (place / "ssh").write_text(_SSH.format(place=place))
        (place / "ssh").chmod(0o755)
        self.all: list[Host] = []
        try:
            for name, address in addresses.items():
                self.all.append(Host(name, address, place))
            ends = [["name", "eth0", "netns", str(host.pid)] for host in self.all]
            command = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
            cable = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True)
            if cable.returncode:
                raise RuntimeError(f"no network between them: {cable.stderr}")
            for host in self.all:
                host.go()
            login = self.near.run(f"{place}/ssh", self.far.name, "true")
            if login.returncode:
                raise RuntimeError(f"ssh from one to the other fails: {login.stderr}{self.far.log()}")
        except BaseException:
            self.close()
            raise

    @property
    def near(self) -> Host:
        """The host of mpirun, and of rank 0 with the server."""
        return self.all[0]

    @property
    def far(self) -> Host:
        return self.all[1]

    def cable(self, state: str) -> None:
        """ "down": packets are lost, nobody is told; "up"."""
        self.near.run("ip", "link", "set", "eth0", state).check_returncode()

    def mpirun(self, ranks: int = 4) -> tuple[str, ...]:
        """The command that starts a program on both hosts, from the first, with the MPI that the tests run with."""
        mpi = mpirun.find(os.environ)
        if mpi.kind == "mpich":
            agent = ("-launcher", "ssh", "-launcher-exec", f"{self.place}/ssh", "-iface", "eth0")
            return self.near.enter(mpi.mpirun, "-np", str(ranks), "-f", f"{self.place}/hostfile.mpich", *agent)
        daemons = ("--mca", "plm_rsh_agent", f"{self.place}/ssh", "--mca", "oob_tcp_if_include", "eth0")
        if mpi.major >= 5:
            daemons = ("--prtemca", "plm_ssh_agent", f"{self.place}/ssh", "--prtemca", "prte_if_include", "eth0")
        # The far host has none of our variables: tests/launcher/job/test_other_mpi.py chooses the MPI by these.
        handed_on = [word for name in ("MPI4PY_LIBMPI", "OPAL_PREFIX") if name in os.environ for word in ("-x", name)]
        return self.near.enter(
            mpi.mpirun, "-np", str(ranks), "-hostfile", f"{self.place}/hostfile", "--bind-to", "none",
            "--map-by", "slot",
            *daemons, "--mca", "btl_tcp_if_include", "eth0", "--mca", "mpi_yield_when_idle", "1", *handed_on,
        )  # fmt: skip

    def left(self, seconds: float = 10, pattern: str = "") -> dict[int, str]:
        """Processes that still run on either host after so long, sshd left out."""
        return wait(lambda: self.near.processes(pattern) | self.far.processes(pattern), seconds)

    def clear(self) -> None:
        """For the next test: nothing runs, the cable is plugged in."""
        self.near.go_on()
        self.far.go_on()
        kill(self.left(0))
        self.cable("up")
        assert not self.left()

    def close(self) -> None:
        for host in self.all:
            host.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The directories of a job and of MPI, which each host has for itself.
OWN = {"TMPDIR": "/run/tmp", "XDG_RUNTIME_DIR": "/run/tmp", MEMORY: "/dev/shm"}


class HostsServer(Server):
    """`mpirun … phalanx serve` over both hosts, or started by another command, asked from the first one."""

    def __init__(self, hosts: Hosts, *arguments: str, command: tuple[str, ...] = (), wait: bool = True, **env: str):
        self.hosts = hosts
        super().__init__(*arguments, command=command or hosts.mpirun(), wait=wait, **OWN | env)

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self.hosts.near.inside(lambda: Server.request(self, path, body, **headers))

    def stream(self, max_tokens: int = 20000) -> Stream:
        return self.hosts.near.inside(lambda: Stream(self, max_tokens))

    def close(self) -> None:
        super().close()
        self.hosts.clear()
