"""Kills at random moments: batch jobs lose nothing, servers end with a reason and leave nothing behind.

    python benchmarks/kills.py run.json --batches 1000 --seconds 3600
    python benchmarks/kills.py run.json --servers 300 --seconds 3600
    python benchmarks/kills.py run.json --table

Each is a tiny model on two CPU ranks. SIGKILL goes to one process of the job or to all, while it loads or works.

--batches: `phalanx batch` is started again with the same command until it is through, then a new one begins. Requests
without an answer (lost) and with two (twice) are counted.
--servers: four clients read streams. Counted are jobs that did not end, that ended with another code than
docs/exit-codes.md says, that named no cause, that left something, and clients that hung or whose stream broke off
without a word although there was somebody left to say it.

run.json keeps the counts, so that a nightly job can go on. The exit code is 0 if nothing was wrong in all of it.
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
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
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

    def __init__(self, file: Path, seed: int):
        self.file = file
        self.run: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.dice = random.Random(seed + sum(self.count(kind) for kind in ("batches", "servers")))

    def part(self, kind: str) -> dict[str, Any]:
        return self.run.setdefault(kind, {"kills": {}, "seconds": 0.0, "wrong": []})

    def count(self, kind: str) -> int:
        return sum(self.part(kind)["kills"].values())

    def add(self, kind: str, what: str, seconds: float, wrong: list[str]) -> None:
        part = self.part(kind)
        part["kills"][what] = part["kills"].get(what, 0) + 1
        part["seconds"] = round(part["seconds"] + seconds, 1)
        part["wrong"] += [f"{what}: {one}" for one in wrong]
        save(self.file, self.run)
        for one in wrong:
            print(f"{kind}, {what}: {one}", flush=True)

    def kill(self, job: Job, kind: str, seconds: float) -> bool:
        """Kill it as soon as it is there. kind: of process, or all. False where it does not come, or the job ends."""
        until = time.monotonic() + seconds
        while not job.ended() and time.monotonic() < until:
            victims = [process for name, process in job.processes() if kind in ("all", SERVERS.get(name, name))]
            for process in victims:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if victims:
                return True
            time.sleep(0.01)
        return False


def wait(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
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


def batches(kills: Kills, goal: int, until: float, start: float) -> None:
    loading = start / 4  # seconds until the first answer, as the last job took
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    journal, output = place / "out.jsonl.journal", place / "out.jsonl"
    command = ["batch", str(place / "tiny"), *RANKS, "-i", str(place / "in.jsonl"), "-o", str(output)]
    tiny_model(place / "tiny")
    names: list[str] = []

    def written() -> int:
        return journal.stat().st_size if journal.exists() else 0

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
                    wait(job.ended, 20 * ENDS)
                elif kills.dice.random() < LOADING:
                    wait(job.ended, kills.dice.random() * loading)
                else:
                    wait(lambda job=job, before=before: job.ended() or written() > before, start)
                    loading = time.monotonic() - began
                    wait(job.ended, kills.dice.random() ** 2 * 4)
                size = written()
                killed = not over and kills.kill(job, what, start)
                if not killed and job.ended():
                    if job.process.returncode:
                        kills.add("batches", "none", 0, [f"exit code {job.process.returncode}: {job.output[-500:]}"])
                        return
                    if wrong := verdict(output, names):
                        kills.add("batches", "a whole batch", 0, wrong)
                    kills.part("batches")["whole"] = kills.part("batches").get("whole", 0) + 1
                    names = []
                    for path in place.glob("out.jsonl*"):
                        path.unlink()
                    continue
                wrong = [] if killed else ["there was nothing to kill"]
                wrong += [] if wait(job.ended, ENDS) else ["the job did not end"]
                wrong += job.left(what not in ("all", "mpirun", "launcher", "rank 0"))
                if written() < size and not output.exists() and size > HEADER:  # it may have been through just now
                    wrong.append(f"the journal shrank from {size} to {written()} bytes")
                kills.add("batches", what, time.monotonic() - began, wrong)
            finally:
                job.remove()
    finally:
        shutil.rmtree(place)
        save(kills.file, kills.run)


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


async def one_server(kills: Kills, start: float) -> None:
    began = time.monotonic()
    what = kills.dice.choice(VICTIMS)
    early = kills.dice.random() < LOADING
    server = Server(1, [])
    wrong: list[str] = []
    said: list[str] = []
    try:
        if early:
            await asyncio.sleep(0.5 + kills.dice.random() * start / 6)
        else:
            address = await asyncio.to_thread(server.wait_ready, start)
            client = Client(address, "EMPTY", ENDS + start)
            readers = [asyncio.ensure_future(read(client, said)) for _ in range(4)]
            await asyncio.sleep(0.2 + kills.dice.random() * 3)
        if not await asyncio.to_thread(kills.kill, server, what, start):
            wrong.append(f"there was nothing to kill: {server.output[-700:]}")
        elif not await asyncio.to_thread(wait, server.ended, ENDS):
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
                wrong += [f"a client was told: {one}" for one in said if "closed the connection" in one]
        wrong += await asyncio.to_thread(server.left, what not in ("launcher", "mpirun"))
        kills.add("servers", what, time.monotonic() - began, wrong)
    finally:
        server.remove()


def servers(kills: Kills, goal: int, until: float, start: float) -> None:
    while kills.count("servers") < goal and time.monotonic() < until:
        asyncio.run(one_server(kills, start))


def table(run: dict[str, Any]) -> None:
    print("| | kills | of which | minutes | wrong |\n|---|---|---|---|---|")
    for kind, part in run.items():
        counts, wrong = part["kills"], len(part["wrong"])
        which = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
        print(f"| {kind} | {sum(counts.values())} | {which} | {part['seconds'] / 60:.0f} | {wrong} |")
    for kind, part in run.items():
        for one in part["wrong"]:
            print(f"{kind}, {one}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="of the run's counts, JSON; made where there is none")
    parser.add_argument("--batches", type=int, default=0, help="kills of batch jobs, earlier ones of the file included")
    parser.add_argument("--servers", type=int, default=0, help="kills of servers, likewise")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other kill begins (3600)")
    parser.add_argument("--start", type=float, default=120.0, help="seconds for a job to be ready (120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what the file says, and kill nothing")
    asked = parser.parse_args(argv)
    kills = Kills(asked.file, asked.seed)
    if not asked.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended and removed
        until = time.monotonic() + asked.seconds
        batches(kills, asked.batches, until, asked.start)
        servers(kills, asked.servers, until, asked.start)
    run = {kind: part for kind, part in kills.run.items() if part["kills"]}
    table(run)
    return 1 if any(part["wrong"] for part in run.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
