"""A service over several jobs of a real Slurm, with clients at its gateway all the time: planned ends, and kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from phalanx.rank.server import server_registry

from .. import retries
from ..checkpoints import make_checkpoint
from ..processes import tree, wait
from ..server import PHALANX
from . import clients
from . import slurm as real

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500), retries.CLUSTER]

# The long proof of docs/measurements/handover.md sets these: it takes a quarter of an hour.
CLIENTS = int(os.environ.get("HANDOVER_CLIENTS", "20"))
LIMIT = os.environ.get("HANDOVER_LIMIT", "--time=3")  # of a job, as sbatch takes it
LEAD = float(os.environ.get("HANDOVER_LEAD", "166"))  # seconds before its end: a quarter of a minute after its start
JOBS = int(os.environ.get("HANDOVER_JOBS", "4"))  # that end in order
KILL_SECONDS = float(os.environ.get("HANDOVER_KILL_SECONDS", "100"))  # of random kills
SCRIPT = """#!/bin/bash
#SBATCH --output={place}/job-%j.log
#SBATCH {limit}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
exec {phalanx} serve {model} --device cpu --mem 64 --max-num-seqs 8 --h 0.0.0.0 --p 0 --file-store {place}/store \\
    {more} --resubmit --handover {lead}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("handover") / "tiny", max_position_embeddings=4096)


class Service:
    """Jobs that hand over to each other, a gateway and clients."""

    def __init__(self, slurm: real.Slurm, model: Path, place: Path, hold: float, more: str = ""):
        self.slurm, self.place, self.hold = slurm, place, hold
        self.registry = place / "phalanx" / "jobs"
        slurm.environ["XDG_STATE_HOME"] = str(place)
        self.script = place / "serve.sh"
        self.script.write_text(
            SCRIPT.format(place=place, phalanx=PHALANX, model=model, limit=LIMIT, lead=LEAD, more=more)
        )
        self.gateway: subprocess.Popen[bytes] | None = None
        self.log = open(place / "gateway.log", "ab")  # noqa: SIM115
        self.seen: dict[str, server_registry.RegisteredServer] = {}  # all jobs that have been ready
        self.submitted = 0

    def submit(self) -> None:
        """Submits as a person does."""
        sent = self.slurm.run("sbatch", "--parsable", self.script.name, cwd=self.place)
        assert sent.returncode == 0, sent.stderr
        self.submitted += 1

    def begin(self) -> None:
        self.submit()
        late = wait(lambda: not self.ready(), 180)
        judge(self, ["the first job is not ready after 180 s"] * bool(late), list(self.seen))
        self.start_gateway()

    def start_gateway(self) -> None:
        before = os.path.getsize(self.log.name)
        words = self.slurm.hosts.near.enter(
            PHALANX, "gateway", "--h", "127.0.0.1", "--p", "8123", "--hold", str(self.hold)
        )
        self.gateway = subprocess.Popen(
            words, env=self.slurm.environ, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        path = Path(self.log.name)
        assert not wait(lambda: b"jobs are those of" not in path.read_bytes()[before:], 60), self.logs()

    def jobs(self) -> dict[str, server_registry.RegisteredServer]:
        found = server_registry.running(self.registry, "")
        self.seen |= {name: job for name, job in found.items() if job.state == "ready"}
        return found

    def running(self) -> dict[str, server_registry.RegisteredServer]:
        """Jobs that Slurm still runs: one that was killed on another node leaves its file."""
        batches = self.slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").stdout.split()
        return {name: job for name, job in self.jobs().items() if job.batch in batches}

    def ready(self) -> list[str]:
        return [name for name, job in self.jobs().items() if job.state == "ready"]

    def key(self) -> str:
        return next(iter(self.jobs().values())).key

    def start_clients(self) -> subprocess.Popen[str]:
        words = self.slurm.hosts.near.enter(
            sys.executable, clients.__file__, "http://127.0.0.1:8123", self.key(), str(CLIENTS)
        )
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def logs(self) -> str:
        return "".join(f"{path.name}:\n{path.read_text()[-3000:]}\n" for path in sorted(self.place.glob("*.log")))

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """The gateway's answer of status 200, decoded where it is an object."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key()}", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:8123{path}", data, headers)

        def send() -> bytes:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.read()

        text = self.slurm.hosts.near.inside(send).decode()
        return json.loads(text) if path.partition("?")[0].rpartition("/")[2] != "content" else text

    def batch(self, count: int) -> str:
        """The id of a new batch of so many requests."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
            for i in range(count)
        ]
        parts = [
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
            '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
            "\n".join(lines) + "\r\n--b--\r\n",
        ]
        form = {"Content-Type": "multipart/form-data; boundary=b"}
        file = self.ask("/v1/files", "".join(parts).encode(), **form)["id"]
        window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return self.ask("/v1/batches", {"input_file_id": file, **window})["id"]

    def kill(self, batch: str) -> None:
        """All processes of a job at once, as a node's failure ends them: none sees another's end."""
        mark = f"SLURM_JOB_ID={batch}".encode()
        first = [pid for host in self.slurm.hosts.all for pid in host.processes() if mark in _environ(pid)]
        pids = {child for pid in first for child in tree(pid)}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def cancel(self, batch: str) -> None:
        """SIGTERM to each process of a job, children first, and SIGKILL after KillWait: as at the end of its time."""
        self.slurm.run("scancel", batch)

    def resubmit(self) -> None:
        """Submits where Slurm has no job any more: one was ended that had not submitted its successor."""
        if not self.slurm.run("squeue", "-h", "-t", "PENDING,RUNNING").stdout.strip():
            self.submit()

    def close(self) -> None:
        if self.gateway is not None:
            self.gateway.kill()
            self.gateway.wait()
        self.slurm.run("scancel", "--user=root")
        wait(lambda: self.slurm.run("squeue", "-h").stdout.strip(), 40)
        self.log.close()


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return []


def result(process: subprocess.Popen[str]) -> dict:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=clients.PATIENCE + 60)
    return json.loads(output.splitlines()[-1])


def faults(found: dict, allowed: set[str]) -> list[str]:
    """Faults of what clients have seen. allowed: outcomes besides whole answers."""
    told = [f"{one}: {found[one]} times" for one in found.keys() - allowed - {"ok", "odd", "longest"}]
    return told + found["odd"] + ["no answer was whole"] * (not found.get("ok"))


def judge(service: Service, wrong: list[str], told: object) -> None:
    """Fails with the faults. The logs come first: the end of a long report is what is read of it."""
    if wrong:
        print(service.logs())
    print(told)
    if wrong:
        pytest.fail(f"{'; '.join(wrong)[:2000]} ({told})", pytrace=False)


def test_a_service_over_several_jobs(slurm, hosts, checkpoint, tmp_path):
    """Nobody is refused, no stream breaks, and each job ends in order before its time."""
    service = Service(slurm, checkpoint, tmp_path, hold=60)
    try:
        service.begin()
        said = service.ask("/v1/responses", {"input": "one", "max_output_tokens": 4})
        talk = service.ask("/v1/conversations", {"items": []})["id"]
        service.ask("/v1/responses", {"input": "one", "max_output_tokens": 4, "conversation": talk})
        batch = service.batch(300)
        asking = service.start_clients()
        over = wait(lambda: service.ready() and len(service.seen) <= JOBS, 800)
        found = result(asking)
        late = [f"only {len(service.seen)} jobs have been ready after 800 s"] * bool(over)
        judge(service, late + faults(found, set()), found)
        # The last job goes on from what the first one kept.
        more = {"input": "two", "max_output_tokens": 4}
        assert service.ask("/v1/responses", {**more, "previous_response_id": said["id"]})["status"]
        service.ask("/v1/responses", {**more, "conversation": talk})
        assert len(service.ask(f"/v1/conversations/{talk}/items")["data"]) == 4
        assert not wait(lambda: service.ask(f"/v1/batches/{batch}")["status"] != "completed", 200)
        ended = service.ask(f"/v1/batches/{batch}")
        assert ended["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        lines = service.ask(f"/v1/files/{ended['output_file_id']}/content")
        answered = [json.loads(line)["custom_id"] for line in lines.splitlines()]
        assert answered == [str(number) for number in range(300)]  # each once
        keys = {job.key for job in service.seen.values()}
        assert len(keys) == 1 and "" not in keys
        names = list(service.seen)
        assert [service.seen[later].predecessor for later in names[1:]] == names[:-1]
        # Each but the last has ended by itself, with code 0.
        for name in names[:-1]:
            state = slurm.state(service.seen[name].batch)
            assert not wait(lambda job=service.seen[name].batch: slurm.state(job)["JobState"] == "RUNNING", 60)
            state = slurm.state(service.seen[name].batch)
            assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), service.logs()
    finally:
        service.close()


def test_kills_at_random(slurm, hosts, checkpoint, tmp_path):
    """The old job, the new one and the gateway are killed at random moments: what clients see is told to them."""
    (tmp_path / "keys").write_text("one-key\n")  # a job that a person submits again has no other way to it
    more = f"--api-key-file {tmp_path}/keys"
    service = Service(slurm, checkpoint, tmp_path, hold=60, more=more)
    choice = random.Random(int(os.environ.get("HANDOVER_SEED", "1")))
    kills = {"old": 0, "new": 0, "gateway": 0}
    try:
        service.begin()
        asking = service.start_clients()
        until = time.monotonic() + KILL_SECONDS
        while time.monotonic() < until or sum(kills.values()) < 3:
            time.sleep(choice.uniform(2, 12))  # a random moment is what this is about
            service.resubmit()
            jobs = service.running()
            young = [name for name, job in jobs.items() if job.predecessor in jobs]
            # One that is alone is spared until it has been ready: a slow machine would start jobs and nothing else.
            old = [name for name, job in jobs.items() if name not in young and job.state != "starting"]
            victims = {"old": old, "new": young, "gateway": [""]}
            what = choice.choice([kind for kind, names in victims.items() if names])
            if what == "gateway":
                assert service.gateway is not None
                service.gateway.kill()
                service.gateway.wait()
                service.start_gateway()
            else:
                choice.choice((service.kill, service.cancel))(jobs[choice.choice(victims[what])].batch)
            kills[what] += 1
        until = time.monotonic() + 300
        late = False
        while not late and all(job.state != "ready" for job in service.running().values()):
            service.resubmit()
            time.sleep(0.5)  # Slurm is asked each time
            late = time.monotonic() > until
        found = result(asking)
        wrong = ["no job has become ready 300 s after the last kill"] * late
        wrong += faults(found, {"again", "unheld", "no_gateway"})
        log = Path(service.log.name).read_text()
        wrong += ["the gateway's log has a Traceback" + log.partition("Traceback")[2][:1500]] * ("Traceback" in log)
        judge(service, wrong, {**found, "kills": kills, "alone": service.submitted - 1, "jobs": len(service.seen)})
    finally:
        service.close()
