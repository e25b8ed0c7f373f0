"""Kills at random moments: batch jobs lose nothing, servers end with a reason and leave nothing behind.

    python benchmarks/kills.py run.json --batches 1000 --seconds 3600
    python benchmarks/kills.py run.json --servers 300 --seconds 3600
    python benchmarks/kills.py run.json other.json --table

Each is a tiny model on two CPU ranks. SIGKILL goes to one process of the job or to all, while it loads or works.

--batches: `phalanx batch` is started again with the same command until it is through, then a new one begins. Requests
without an answer (lost) and with two (twice) are counted.
--servers: four clients read streams. Counted are jobs that did not end, that ended with another code than
docs/exit-codes.md says, that named no cause, that left something, and clients that hung or whose stream broke off
without a word although there was somebody left to say it.

run.json keeps the counts, so that a nightly job can go on. --jobs N has N jobs run side by side, each on its share of
the cores. --table adds up several files. The exit code is 0 if nothing was wrong in all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from phalanx import linux_calls
from phalanx.benchmarks.soak import RANKS, Job, Server, save, tiny_model
from phalanx.launcher.commands.bench.client import Answer, Client, Failure

ENDS = 60.0  # seconds for a job to end, and for a client to hear of it
REQUESTS = 600  # of a batch
HEADER = 1000  # bytes of a journal that may have no answer yet
LOADING = 0.3  # share of the kills that come before the job is ready
SERVERS = {"rank.server": "server", "batch": "server"}  # of a server, and of a batch job
VICTIMS = ("rank 0", "rank 1", "server", "mpirun", "launcher")
CODES = {"rank 0": (137,), "rank 1": (137,), "server": (70,), "mpirun": (137,), "launcher": (-signal.SIGKILL,)}
NAMED = re.compile(r"has died|was killed|SIGKILL|has gone|signal 9|ended by|went away|has ended", re.IGNORECASE)


class Kills:
    """The run's counts."""

    def __init__(self, file: Path, seed: int, start: float):
        self.file = file
        self.start = start  # seconds for a job to be ready
        self.loading = start / 4  # until it is, as the last one took
        self.run: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.dice = random.Random(seed + sum(self.count(kind) for kind in ("batches", "servers")))
        self.lock = threading.Lock()
        self.stopped = False

    def stop(self, *_: object) -> None:
        """Have what runs ended and removed."""
        self.stopped = True

    def part(self, kind: str) -> dict[str, Any]:
        return self.run.setdefault(kind, {"kills": {}, "seconds": 0.0, "wrong": []})

    def count(self, kind: str) -> int:
        return sum(self.part(kind)["kills"].values())

    def add(self, kind: str, what: str, seconds: float, wrong: list[str]) -> None:
        with self.lock:
            part = self.part(kind)
            part["kills"][what] = part["kills"].get(what, 0) + 1
            part["seconds"] = round(part["seconds"] + seconds, 1)
            part["wrong"] += [f"{what}: {one}" for one in wrong]
            save(self.file, self.run)
        for one in wrong:
            print(f"{kind}, {what}: {one}", flush=True)

    def kill(self, job: Job, kind: str, seconds: float) -> bool:
        """Kill it as soon as it is there. kind: of process, or all. False where it does not come, or the job ends."""
        victims: list[psutil.Process] = []

        def strike() -> bool:
            victims.extend(one for name, one in job.processes() if kind in ("all", SERVERS.get(name, name)))
            for process in victims:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return bool(victims) or job.ended()

        self.wait(strike, seconds)
        return bool(victims)

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Whether it came true in time. Raises SystemExit when the run is stopped."""
        until = time.monotonic() + seconds
        while not condition():
            if self.stopped:
                sys.exit(1)
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


# -- batches


def requests(path: Path) -> list[str]:
    """Their names."""
    names = [f"r{i}" for i in range(REQUESTS)]
    with open(path, "w") as file:
        for i, name in enumerate(names):
            body = {"prompt": f"number {i}", "max_tokens": 2 + i % 20, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return names


def verdict(output: Path, names: list[str]) -> list[str]:
    """The faults of a finished batch."""
    found = Counter(json.loads(line)["custom_id"] for line in output.read_bytes().splitlines())
    lost, twice = [n for n in names if n not in found], [n for n, count in found.items() if count > 1]
    return [f"{len(lost)} lost: {lost[:5]}"] * bool(lost) + [f"{len(twice)} twice: {twice[:5]}"] * bool(twice)


def batches(kills: Kills, goal: int, until: float) -> None:
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    journal, output = place / "out.jsonl.journal", place / "out.jsonl"
    command = ["batch", str(place / "tiny"), "--np", "2", "--device", "cpu", *RANKS]
    command += ["-i", str(place / "in.jsonl"), "-o", str(output)]
    tiny_model(place / "tiny")
    names: list[str] = []

    def written() -> int:
        return journal.stat().st_size if journal.exists() else 0

    def answered(job: Job, before: int) -> bool:
        return job.ended() or written() > before

    try:
        while kills.count("batches") < goal and time.monotonic() < until or names:
            if not names:
                names = requests(place / "in.jsonl")
            began, before = time.monotonic(), written()
            job = Job(lambda _: [*command, "--max-num-seqs", "2"])
            try:
                what = "all" if kills.dice.random() < 0.4 else kills.dice.choice(VICTIMS)
                over = kills.count("batches") >= goal or time.monotonic() >= until  # this one may end by itself
                if over:
                    kills.wait(job.ended, 20 * ENDS)
                elif kills.dice.random() < LOADING:
                    kills.wait(job.ended, kills.dice.random() * kills.loading)
                else:
                    kills.wait(partial(answered, job, before), kills.start)
                    kills.loading = time.monotonic() - began
                    kills.wait(job.ended, kills.dice.random() ** 2 * 4)
                size = written()
                killed = not over and kills.kill(job, what, kills.start)
                if not killed and job.ended():
                    if job.process.returncode:
                        kills.add("batches", "none", 0, [f"exit code {job.process.returncode}: {job.output[-500:]}"])
                        return
                    if wrong := verdict(output, names):
                        kills.add("batches", "a whole batch", 0, wrong)
                    with kills.lock:
                        kills.part("batches")["whole"] = kills.part("batches").get("whole", 0) + 1
                        save(kills.file, kills.run)
                    names = []
                    for path in place.glob("out.jsonl*"):
                        path.unlink()
                    continue
                wrong = [] if killed else ["there was nothing to kill"]
                wrong += [] if kills.wait(job.ended, ENDS) else ["the job did not end"]
                wrong += job.left(what not in ("all", "mpirun", "launcher", "rank 0"))
                if written() < size and not output.exists() and size > HEADER:  # it may have been through just now
                    wrong.append(f"the journal shrank from {size} to {written()} bytes")
                kills.add("batches", what, time.monotonic() - began, wrong)
            finally:
                job.remove()
    finally:
        shutil.rmtree(place)


# -- servers


async def read(client: Client, said: list[str]) -> None:
    """Streams one after the other until one fails: how."""
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0,
            "stream_options": {"include_usage": True}}  # fmt: skip
    while True:
        try:
            await client.call("POST", "/v1/completions", json.dumps(body).encode(), Answer())
        except Failure as failure:
            said.append(str(failure))
            return


async def one_server(kills: Kills) -> None:
    began = time.monotonic()
    what = kills.dice.choice(VICTIMS)
    early = kills.dice.random() < LOADING
    server = Server()
    wrong: list[str] = []
    said: list[str] = []
    try:
        if early:
            await asyncio.to_thread(kills.wait, server.ended, kills.dice.random() * kills.loading)
        else:
            await asyncio.to_thread(kills.wait, lambda: server.ended() or server.address(), kills.start)
            kills.loading = time.monotonic() - began
            client = Client(server.wait_ready(1), "EMPTY", ENDS + kills.start)
            readers = [asyncio.ensure_future(read(client, said)) for _ in range(4)]
            await asyncio.sleep(0.2 + kills.dice.random() * 3)
        if not await asyncio.to_thread(kills.kill, server, what, kills.start):
            wrong.append(f"there was nothing to kill: {server.output[-700:]}")
        elif not await asyncio.to_thread(kills.wait, server.ended, ENDS):
            wrong.append("the job did not end")
        elif server.process.returncode not in CODES[what]:
            wrong.append(f"exit code {server.process.returncode}: {server.output[-700:]}")
        elif what != "launcher" and not NAMED.search(server.output):
            wrong.append(f"no cause is named: {server.output[-700:]}")
        if not early:
            _, hung = await asyncio.wait(readers, timeout=ENDS)
            for reader in hung:
                reader.cancel()
            wrong += ["a client hung"] * len(hung)
            if what in ("rank 0", "rank 1", "mpirun"):  # the server process is there to say it
                broken = [one for one in said if "closed the connection" in one]
                wrong += [f"a client was told: {one}: {server.output[-700:]}" for one in broken]
        wrong += await asyncio.to_thread(server.left, what not in ("launcher", "mpirun"))
        kills.add("servers", what, time.monotonic() - began, wrong)
    finally:
        server.remove()


def servers(kills: Kills, goal: int, until: float) -> None:
    while kills.count("servers") < goal and time.monotonic() < until:
        try:
            asyncio.run(one_server(kills))
        except Failure as failure:  # it was never ready
            kills.add("servers", "none", 0, [str(failure)])


def side_by_side(jobs: int, work: Callable[[], None]) -> None:
    """Each in a thread bound to its share of the cores, as is all that it starts."""
    cores = sorted(linux_calls.processors())

    def one(index: int) -> None:
        if jobs > 1 and (share := cores[index * len(cores) // jobs : (index + 1) * len(cores) // jobs]):
            linux_calls.bind(share)
        work()

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, index) for index in range(jobs)]:
            future.result()


def table(runs: list[dict[str, Any]]) -> bool:
    """Prints the counts of all runs together. Whether nothing was wrong."""
    print("| | kills | of which | whole | minutes | wrong |\n|---|---|---|---|---|---|")
    faults = []
    for kind in ("batches", "servers"):
        parts = [run[kind] for run in runs if kind in run]
        counts = sum((Counter(part["kills"]) for part in parts), Counter[str]())
        wrong = [f"{kind}, {one}" for part in parts for one in part["wrong"]]
        if counts or wrong:
            which = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
            whole, minutes = (sum(part.get(key, 0) for part in parts) for key in ("whole", "seconds"))
            print(f"| {kind} | {counts.total()} | {which} | {whole} | {minutes / 60:.0f} | {len(wrong)} |")
        faults += wrong
    print("\n".join(faults))
    return not faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+", help="of the run's counts, JSON; made where there is none")
    parser.add_argument("--batches", type=int, default=0, help="kills of batch jobs, earlier ones of the file included")
    parser.add_argument("--servers", type=int, default=0, help="kills of servers, likewise")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other kill begins (3600)")
    parser.add_argument("--jobs", type=int, default=1, help="that run side by side (1)")
    parser.add_argument("--start", type=float, default=120.0, help="seconds for a job to be ready (120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what the file says, and kill nothing")
    asked = parser.parse_args(argv)
    if asked.table:
        return 0 if table([json.loads(file.read_text()) for file in asked.file]) else 1
    if len(asked.file) > 1:
        parser.error("several files can only be added up, with --table")
    kills = Kills(asked.file[0], asked.seed, asked.start)
    stop = [(number, signal.signal(number, kills.stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    until = time.monotonic() + asked.seconds
    try:
        for work, goal in ((batches, asked.batches), (servers, asked.servers)):
            if goal:
                side_by_side(asked.jobs, partial(work, kills, goal, until))
    finally:
        for number, before in stop:
            signal.signal(number, before)
    return 0 if table([kills.run]) else 1


if __name__ == "__main__":
    sys.exit(main())
