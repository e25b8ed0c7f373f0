"""A live `phalanx batch`, its input, and what is to be found of it on the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from .leftovers import hand_on_kernels
from .processes import Started, wait
from .ranks import AS_ROOT, clean
from .server import PHALANX


class Job:
    """A started `phalanx batch` of which nothing may be left."""

    def __init__(self, place: Path, *arguments: str, command=(), stdin=None, **env: str):
        environ = clean() | AS_ROOT | env
        self.runtime = Path(tempfile.mkdtemp(prefix="run-"))
        (self.runtime / "t").mkdir()  # a mpirun that was killed leaves its own directory there
        hand_on_kernels(Path(tempfile.gettempdir()), self.runtime / "t")
        environ |= {"XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.runtime / "t")}
        self.all_killed = False  # then nobody can remove the job's directory
        self.log = place / "log"
        self._file = open(self.log, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, PHALANX, "batch", *arguments], cwd=place, env=environ, stdin=stdin or subprocess.DEVNULL,
            stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.started = Started(self.process.pid)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)
        self.started.look()

    def end(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self.started.look()
            time.sleep(0.02)
        return self.process.returncode

    def left(self, seconds: float = 10) -> list[str]:
        """Processes that still run of all that was started, and what is left of its directory."""
        return wait(self._rest, seconds)

    def _rest(self) -> list[str]:
        found = list(self.started.living().values())
        return found if self.all_killed else found + [name for name in os.listdir(self.runtime) if name != "t"]

    def pid(self, kind: str) -> int:
        return next(pid for pid, line in self.started.look().items() if line.endswith(kind))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.started.kill()
        self.process.wait()
        self._file.close()
        shutil.rmtree(self.runtime)


def requests(path: Path, count: int, tokens: int = 30) -> list[str]:
    """Greedy requests of both kinds, of different lengths."""
    names = [f"r{i}" for i in range(count)]
    with open(path, "w") as file:
        for i, name in enumerate(names):
            url, body = "/v1/completions", {"prompt": f"the quick {i}", "ignore_eos": True}
            if i % 3 == 0:
                url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"say {i}"}]}
            body |= {"max_tokens": tokens // 2 + i % tokens, "temperature": 0}
            file.write(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n")
    return names


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def answers(path: Path) -> dict[str, object]:
    """Answers by custom_id; each is there once."""
    found = read(path)
    said = {one["custom_id"]: (one["response"]["body"]["choices"], one["response"]["body"]["usage"]["total_tokens"])
            for one in found}  # fmt: skip
    assert len(said) == len(found)  # a custom_id is there twice
    return said


def finished(path: Path) -> int:
    """Whole lines in the journal, without its header."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} - {"in.jsonl", "log"}
