"""The end of a job's time, with a batch system that is a script and a successor that is a file of the registry."""

import asyncio
import json
import os
import threading
import time

import msgspec
import pytest
from phalanx.rank.server import handover, server_registry
from phalanx.rank.server.config import PREDECESSOR, HandoverConfig, ServerConfig
from phalanx.rank.server.handover import Handover

from ... import retries


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("LOOK", 0.02), ("AGAIN", 0.05), ("ASKED_EVERY", 0.05), ("NOTICE", 0.01)):
        monkeypatch.setattr(handover, name, seconds)


class Job:
    """A job that hands over. `events` says in which order things happened."""

    def __init__(self, place, command, submit=0.0, drain=20.0, look=()):
        self.place, self.events = place, []
        now = time.time()
        config = HandoverConfig(
            command=["/bin/sh", "-c", command], script="the script", look=list(look), directory=str(place),
            environ={"PATH": os.environ["PATH"]}, end=now + 60, submit_at=now + submit, drain_at=now + drain,
            stop_at=now + 50,
        )  # fmt: skip
        self.handover = Handover(config, place / "jobs", "old", "here")

    def say(self, name, **entry):
        given = {"url": "http://x:1", "host": "there", "model": "m", "pid": 1, "beat": time.time()}
        server_registry.write(
            self.place / "jobs" / f"{name}.json", server_registry.RegisteredServer(**{**given, **entry})
        )

    async def release(self):
        assert self.handover.begun
        self.events.append("release")

    async def run(self, *steps):
        """Until the job has drained; steps are called one after the other once the one before says so."""
        self.say("old", state="ready")
        running = asyncio.ensure_future(self.handover.run(self.release, lambda: self.events.append("drain")))
        try:
            async with asyncio.timeout(20):
                for step in steps:
                    while not step():
                        await asyncio.sleep(0.01)
                        assert not running.done()
                await running
        finally:
            running.cancel()

    def submitted(self):
        path = self.place / "submitted"
        return path.read_text().splitlines() if path.exists() else []


SUBMIT = "cat >stdin; echo $PHALANX_PREDECESSOR >>submitted; echo Submitted batch job 77"


def test_it_goes_on_until_its_successor_is_ready(tmp_path):
    job = Job(tmp_path, SUBMIT, submit=0.3)

    def other_jobs_do_not_count():
        job.say("another", state="ready", predecessor="somebody", batch="99")
        job.say("stale", state="ready", predecessor="old", beat=time.time() - 3600)
        job.say("new", state="starting", predecessor="old")
        return job.submitted()

    def ready():
        assert not job.events and not job.handover.begun
        job.say("new", state="ready", predecessor="old")
        return True

    began = time.time()
    asyncio.run(job.run(other_jobs_do_not_count, ready))
    assert job.events == ["release", "drain"]
    assert job.submitted() == ["old"]
    assert time.time() - began >= 0.3 and (tmp_path / "stdin").read_text() == "the script"


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_a_successor_whose_clock_is_wrong_is_seen_by_its_heartbeat(tmp_path, ahead):
    job = Job(tmp_path, SUBMIT)
    beats = iter(range(1000))

    def beat():
        job.say("new", state="ready", predecessor="old", beat=time.time() + ahead + next(beats))
        return job.handover.begun

    asyncio.run(job.run(job.submitted, beat))
    assert job.events == ["release", "drain"]


def test_its_number_names_it_where_the_environment_is_lost(tmp_path):
    job = Job(tmp_path, SUBMIT)
    asyncio.run(job.run(job.submitted, lambda: job.say("new", state="ready", batch="77.server") is None))
    assert job.events == ["release", "drain"]


def test_without_a_successor_it_drains_in_time(tmp_path):
    job = Job(tmp_path, "echo no room; exit 1", drain=0.5)
    asyncio.run(job.run())
    assert job.events == ["release", "drain"]


def test_one_that_cannot_be_submitted_or_ends_is_submitted_again(tmp_path):
    job = Job(tmp_path, "test -e room || { touch room; exit 1; }; " + SUBMIT, look=["cat", "queue-{job}"])
    (tmp_path / "queue-77").write_text("RUNNING\n")

    def ended():  # as the batch system says
        if not job.submitted():
            return False
        (tmp_path / "queue-77").write_text("")
        return True

    def waits_again():
        if len(job.submitted()) < 2:
            return False
        (tmp_path / "queue-77").write_text("PENDING\n")
        job.say("new", state="starting", predecessor="old")
        return True

    async def run():
        steps = asyncio.ensure_future(job.run(ended, waits_again))
        while len(job.submitted()) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the one that starts is seen in the registry
        (tmp_path / "jobs" / "new.json").unlink()
        while len(job.submitted()) < 3:
            await asyncio.sleep(0.01)
        job.say("newer", state="ready", predecessor="old")
        await steps

    asyncio.run(run())
    assert job.events == ["release", "drain"] and len(job.submitted()) == 3


def test_a_batch_system_that_fails_does_not_end_the_successor(tmp_path):
    job = Job(tmp_path, SUBMIT, drain=1.0, look=["sh", "-c", "echo cannot connect; exit 1"])
    asyncio.run(job.run())
    assert len(job.submitted()) == 1 and job.events == ["release", "drain"]


def test_a_wrong_answer_of_the_batch_system_does_not_end_a_job_that_tells_of_itself(tmp_path):
    job = Job(tmp_path, SUBMIT, drain=2.0, look=["true"])

    def started():
        job.say("new", state="starting", predecessor="old")
        return job.submitted()

    asyncio.run(job.run(started))
    assert len(job.submitted()) == 1 and job.events == ["release", "drain"]


@pytest.mark.parametrize(
    "said, number",
    [
        ("echo 77", "77"),
        ("echo '77;cluster'", "77"),
        ("echo INFO: 1200 node hours left >&2; echo 77", "77"),
        ("echo project p17 has 1200 node hours left; echo 'Job <77> is submitted to queue <q2>.'", "77"),
        ("echo 77.server; echo 12 warnings >&2", "77.server"),
        ("echo 1200 node hours left >&2; echo submitted", ""),
    ],
)
def test_the_number_is_in_the_last_line_of_the_output(tmp_path, said, number):
    assert asyncio.run(Job(tmp_path, said).handover._submit()) == (0, number)


def test_successors_that_all_end_are_not_submitted_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "MAX_AGAIN", 0.05)
    job = Job(tmp_path, SUBMIT, look=["true"])

    def most():
        return len(job.submitted()) == handover.MAX_SUBMITTED

    began = time.monotonic()

    def some_time_later():
        return time.monotonic() - began > 3

    def one_comes_all_the_same():
        assert most()
        job.say("late", state="ready", predecessor="old")
        return True

    asyncio.run(job.run(most, some_time_later, one_comes_all_the_same))
    assert most() and job.events == ["release", "drain"]


def test_a_command_that_does_not_end_may_have_submitted(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "PATIENCE", 0.5)
    job = Job(tmp_path, SUBMIT + "; sleep 1000 & echo $! >sleeper; wait", look=["true"])
    began = time.monotonic()

    def long_over():
        return job.submitted() and time.monotonic() - began > 3

    asyncio.run(job.run(long_over, lambda: job.say("new", state="ready", predecessor="old") is None))
    assert len(job.submitted()) == 1 and job.events == ["release", "drain"]
    assert server_registry.start_of(int((tmp_path / "sleeper").read_text())) == 0  # all that it started has ended


def test_faults_do_not_lift_the_limit(tmp_path):
    async def failing(*_):
        raise ValueError("a fault")

    job = Job(tmp_path, SUBMIT)
    job.handover._ready = failing
    began = time.monotonic()
    most = lambda: len(job.submitted()) == handover.MAX_SUBMITTED and time.monotonic() - began > 2  # noqa: E731

    def recovered():
        del job.handover._ready
        job.say("new", state="ready", predecessor="old")
        return True

    asyncio.run(job.run(most, recovered))
    assert len(job.submitted()) == handover.MAX_SUBMITTED and job.events == ["release", "drain"]


@retries.CLOCKS
def test_one_that_may_have_been_submitted_is_waited_for_half_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "PATIENCE", 0.2)
    job = Job(tmp_path, "echo x >>submitted; sleep 1000", drain=8.0)
    began = time.monotonic()
    twice = lambda: len(job.submitted()) == 2  # noqa: E731
    asyncio.run(job.run(twice, lambda: job.say("new", state="ready", predecessor="old") is None))
    assert time.monotonic() - began > 3 and job.events == ["release", "drain"]


@pytest.mark.parametrize("wrong", [OSError(116, "Stale file handle"), ValueError("a fault")])
def test_whatever_fails_it_drains_and_says_why(tmp_path, monkeypatch, caplog, wrong):
    job = Job(tmp_path, SUBMIT, drain=1.0)

    def failing(*_):
        raise wrong

    async def release():
        raise wrong

    monkeypatch.setattr(server_registry, "running", failing)
    job.release = release
    asyncio.run(job.run())
    assert job.events == ["drain"] and str(wrong) in caplog.text and len(job.submitted()) <= handover.MAX_SUBMITTED


def test_the_registry_that_hangs_stops_nothing_else(tmp_path, monkeypatch):
    job, waiting = Job(tmp_path, SUBMIT, drain=1.0), threading.Event()
    monkeypatch.setattr(server_registry, "running", lambda *_: waiting.wait(20) and {})
    try:
        asyncio.run(job.run())
    finally:
        waiting.set()
    assert job.events == ["release", "drain"]


def test_the_configuration_travels_as_json():
    config = HandoverConfig(command=["x"], directory="/", environ={PREDECESSOR: "a"}, end=4.0, submit_at=1.0,
                            drain_at=2.0, stop_at=3.0)  # fmt: skip
    sent = msgspec.json.encode(ServerConfig(model_dir="m", link="l", listen_fd=3, handover=config))
    assert json.loads(sent)["handover"]["stop_at"] == 3.0
    assert msgspec.json.decode(sent, type=ServerConfig).handover == config
