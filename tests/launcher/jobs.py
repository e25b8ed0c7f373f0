"""Starts the launcher with fake parts, and makes sure that nothing of it is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..leftovers import KERNELS, hand_on_kernels
from ..processes import kill, table, wait
from ..ranks import AS_ROOT, clean

HERE = Path(__file__).resolve().parent
PHALANX = str(HERE / "fake_phalanx.py")


class Launched:
    """A running launcher; its fake parts write what they see into `place`."""

    def __init__(self, command: list[str], place: Path, **environ: str):
        self.place = place
        self.runtime = tempfile.mkdtemp(prefix="run-")
        hand_on_kernels(Path(tempfile.gettempdir()), Path(self.runtime))
        self._output = open(place / "output", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=clean() | {"FAKE_DIR": str(place), "TMPDIR": self.runtime} | environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        kill([self.process.pid, *self.pids()])
        self.process.wait()
        self._output.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def read(self, name: str) -> list[str]:
        """The lines of a file that the parts write."""
        path = self.place / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def output(self) -> str:
        return (self.place / "output").read_text()

    def pids(self) -> list[int]:
        names = [path.name for path in self.place.iterdir() if path.name.startswith("rank-")]
        return [int(line) for name in (*names, "server", "child") for line in self.read(name)]

    def rank(self, rank: int) -> int:
        return int(self.read(f"rank-{rank}")[-1])

    def server(self) -> int:
        return int(self.read("server")[-1])

    def until(self, condition, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def up(self, ranks: int) -> Launched:
        """Until so many ranks are up and connected, and what they say of it has come through mpirun."""
        self.until(lambda: len(self.read("up")) >= ranks and self.read("server-log"))
        self.until(lambda: self.output.count(" is up") > ranks)
        return self

    def end(self, seconds: float = 12) -> int:
        """The exit code, once the launcher has ended and all of its processes with it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s; output:\n{self.output}") from None
        self.gone(0.5)
        return code

    def gone(self, seconds: float = 10) -> None:
        """No process is left, and no directory of the job."""
        left = wait(lambda: set(self.pids()) & table().keys(), seconds)
        assert not left, f"left behind: {left}; output:\n{self.output}"

    def no_directory(self) -> bool:
        """Compiled kernels stay for the next job."""
        left = {name for name in os.listdir(self.runtime) if name.startswith("phalanx-")}
        return not left - {KERNELS}


def serve(place: Path, *argv: str, **environ: str) -> Launched:
    """`phalanx serve` with fake parts."""
    return Launched([sys.executable, PHALANX, "serve", "--p", "0", "--device", "cpu", *argv], place, **environ)


def under_mpirun(place: Path, mpirun: str, ranks: int, *argv: str, **environ: str) -> Launched:
    """A user's own mpirun of the same."""
    command = [mpirun, "-np", str(ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    words = [sys.executable, PHALANX, "serve", "--p", "0", "--device", "cpu", *argv]
    return Launched([*command, *words], place, **AS_ROOT, **environ)
