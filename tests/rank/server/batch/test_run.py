"""A batch job's life with a fake scheduler: all answered once, whatever happens in between."""

import asyncio
import json
import re
import time

import pytest
from phalanx.errors import UNFINISHED
from phalanx.rank import protocol
from phalanx.rank.server import session
from phalanx.rank.server.batch import deadline, run
from phalanx.rank.server.batch.config import VARIABLE, BatchConfig
from phalanx.rank.server.config import take

NAMES = [f"r{i}" for i in range(30)]


def interrupt(stage, requests=30, begun=8):
    """The code of a job of so many requests that is stopped when as many are under way."""
    stage.input(requests)
    stage.scheduler_has = {"hold": True}

    async def stop(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == begun)
        stage.batch.stop("asked to by a signal")
        stage.scheduler.hold = False

    return stage.start(stop)


def test_every_request_is_answered(stage, capsys):
    chat = {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": "hi", "seed": 99}}
    stage.input(30, json.dumps(chat))
    assert stage.start(supervised=True) == 0
    assert sorted(stage.ids()) == sorted([*NAMES, "chat"])
    assert sorted(stage.asked) == [*range(30), 99]
    bodies = {one["custom_id"]: one["response"]["body"] for one in stage.read()}
    assert bodies["chat"]["choices"][0]["message"]["content"] == "hello world"
    assert bodies["r3"]["choices"][0]["text"] == "hello world" and bodies["r3"]["usage"]["prompt_tokens"] > 0
    assert stage.left() == ["out.jsonl"]
    told = stage.summary
    assert (told["state"], told["exit_code"], told["ranks"], told["model"]) == ("complete", 0, 2, "tiny")
    assert told["run"] == told["total"] and told["run"]["requests"] == 31
    assert told["run"]["output_tokens"] == sum(body["usage"]["completion_tokens"] for body in bodies.values())
    assert told["energy_joules"] is None and told["joules_per_output_token"] is None
    err = capsys.readouterr().err
    assert f"phalanx: complete: {stage.place}/out.jsonl" in err
    assert "requests: 31 done, none" in err and "output tokens/s" in err
    assert re.search(r"tiny.*2 ranks.* \d+ s", err)
    assert "energy" not in err


def test_the_energy_that_gpus_used_since_the_first_request(stage, monkeypatch, capsys):
    read = iter((5000.0, 5310.0))
    monkeypatch.setattr(run.nvml, "joules", lambda gpus: next(read) if gpus == ["0", "1"] else None)
    stage.input(5)
    assert stage.start(supervised=True, gpus=["0", "1"]) == 0
    assert (stage.summary["energy_joules"], stage.summary["energy_gpus"]) == (310.0, 2)
    assert "310 J" in capsys.readouterr().err


def test_no_energy_where_it_cannot_be_read(stage, monkeypatch):
    def missing(gpus):
        raise OSError("no NVML")

    monkeypatch.setattr(run.nvml, "joules", missing)
    stage.input(5)
    assert stage.start(supervised=True, gpus=["0"]) == 0
    assert stage.summary["energy_joules"] is None


def test_the_ranks_are_asked_to_end(stage):
    stage.input(1)
    stage.start(supervised=True)
    assert stage.scheduler.drained and stage.link._drain == protocol.Drain(0)


def test_order_on_request(stage):
    stage.input(30)
    stage.scheduler_has = {"pause": 0.001}
    assert stage.start(ordered=True) == 0
    assert stage.ids() == NAMES


@pytest.mark.parametrize(("body", "requests"), [({}, 8), ({"n": 2}, 8), ({"n": 3}, 6)])
def test_what_is_under_way_is_bounded(stage, body, requests):
    """Twice as many sequences as the scheduler runs, however many there are."""
    stage.input(30, **body)
    stage.scheduler_has = {"hold": True}

    async def look(stage):
        await stage.until(lambda: len(stage.scheduler.requests) >= requests)
        await asyncio.sleep(0.1)  # 0.1 s are enough to begin all 30, if nothing held it back
        assert len(stage.scheduler.requests) == requests
        stage.scheduler.hold = False

    assert stage.start(look) == 0
    assert len(stage.ids()) == 30


def test_a_stop_finishes_what_is_under_way_and_the_next_start_goes_on(stage, capsys):
    stage.input(30)
    stage.scheduler_has = {"hold": True}

    async def stop(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 8)
        stage.batch.stop("asked to by a signal")
        stage.batch.stop("asked to by a signal")  # it is repeated
        await asyncio.sleep(0.05)  # 0.05 s are enough to begin another request, which none may
        stage.scheduler.hold = False

    assert stage.start(stop) == UNFINISHED == 75
    err = capsys.readouterr().err
    assert len(re.findall("stopping.*signal.*8 requests", err)) == 1
    assert "phalanx: unfinished: asked" in err
    assert f"{stage.place}/out.jsonl.journal; the same command" in err
    assert stage.link._drain == protocol.Drain(75)  # without a supervisor the ranks end with the code
    assert stage.left() == ["out.jsonl.journal"]
    assert (stage.summary["state"], stage.summary["exit_code"], stage.summary["output"]) == ("unfinished", 75, "")
    stage.scheduler_has = {}
    assert stage.start() == 0
    err = capsys.readouterr().err
    assert "8 finished requests" in err
    assert "30 done, none failed" in err and "start, 8" in err
    assert sorted(stage.ids()) == sorted(NAMES) and sorted(stage.asked) == list(range(30))
    assert stage.summary["total"]["requests"] == 30
    assert stage.summary["run"]["requests"] == 22


def test_a_stop_at_the_end_is_an_end(stage):
    assert interrupt(stage, requests=3, begun=3) == 0
    assert len(stage.ids()) == 3


def test_a_stop_while_the_model_loads(stage):
    stage.input(3)

    async def stop(stage):
        await asyncio.sleep(0.1)  # it waits for the ranks by then; a stop that comes before ends it alike
        stage.batch.stop("asked to by a signal")

    assert stage.start(stop, connect=False, supervised=True) == 75
    assert stage.asked == []


def test_the_ranks_hear_the_signal(stage):
    stage.input(30)
    stage.scheduler_has = {"hold": True}

    async def stop(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 8)
        stage.scheduler.send(protocol.Draining())
        await stage.until(lambda: stage.batch.reason)
        stage.scheduler.hold = False

    assert stage.start(stop) == 75
    assert len(stage.asked) == 8


def test_the_ranks_die(stage, capsys):
    stage.input(30)
    stage.scheduler_has = {"most": 10}

    async def die(stage):
        await stage.until(lambda: stage.batch.counts.done == 10)
        stage.scheduler.send(protocol.Fatal("rank 1 on two has died", 137))
        await asyncio.sleep(0.01)  # longer than a read takes, so that the end is not read together with the word
        stage.scheduler.close()

    assert stage.start(die) == 137
    said = capsys.readouterr().err
    assert "stopped (exit code 137)\n" in said and "rank 1 on two" not in said  # the rank has printed that
    assert "rank 1" in stage.summary["reason"]
    stage.scheduler_has = {}
    assert stage.start() == 0
    assert sorted(stage.ids()) == sorted(NAMES)


def test_ranks_that_end_without_a_word(stage, capsys):
    stage.input(3)
    stage.scheduler_has = {"hold": True}

    async def die(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 3)
        stage.scheduler.close()

    assert stage.start(die) == 70
    assert "phalanx: stopped:" in capsys.readouterr().err


def test_a_stop_while_the_ranks_are_away(stage):
    stage.input(30)
    stage.scheduler_has = {"hold": True}

    async def stop(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 8)
        stage.scheduler.close()
        await stage.until(lambda: stage.link.state == "restarting")
        stage.batch.stop("asked to by a signal")

    assert stage.start(stop, restarts=True) == 75
    assert "signal, while" in stage.summary["reason"]


@pytest.mark.parametrize(("word", "code", "end"), [
    (None, 75, "unfinished: asked to by a signal; then the ranks ended"),
    (protocol.Fatal("the job was stopped", 130), 130, "stopped: the job was stopped"),  # by a second signal
])  # fmt: skip
def test_ranks_that_go_away_during_a_stop(stage, capsys, word, code, end):
    """No restart follows."""
    stage.input(30)
    stage.scheduler_has = {"hold": True}

    async def stop(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 8)
        stage.batch.stop("asked to by a signal")
        if word is not None:
            stage.scheduler.send(word)
            await asyncio.sleep(0.01)  # longer than a read takes, so that the end is not read together with the word
        stage.scheduler.close()

    assert stage.start(stop, restarts=True) == code
    assert stage.summary["reason"] == end.partition(": ")[2]
    assert f"phalanx: {end}\n" in capsys.readouterr().err


def test_a_stop_at_once_keeps_what_is_finished(stage, capsys):
    stage.input(30)
    stage.scheduler_has = {"most": 10}

    async def stop(stage):
        await stage.until(lambda: stage.batch.counts.done == 10)
        stage.batch.end(130, "stopped by a signal")

    assert stage.start(stop, supervised=True) == 130
    assert "phalanx: stopped: stopped" in capsys.readouterr().err
    assert stage.summary["run"]["requests"] == 10
    stage.scheduler_has = {}
    assert stage.start() == 0
    assert stage.summary["run"]["requests"] == 20 and sorted(stage.ids()) == sorted(NAMES)


def test_the_time_is_over(stage, capsys):
    """Requests that do not end in time are given up and done by the next start."""
    stage.input(30)

    stage.scheduler_has = {"most": 10}
    assert stage.start(seconds=2, supervised=True) == 75
    found = re.search(
        r"phalanx: unfinished: the time is over; (\d+) requests under way were given up", capsys.readouterr().err
    )
    assert found and int(found[1]) == len(stage.scheduler.aborted) == 8 and stage.summary["run"]["requests"] == 10
    stage.scheduler_has = {}
    assert stage.start() == 0
    assert sorted(stage.ids()) == sorted(NAMES)


class Clock:
    """Goes on when the test says so."""

    def __init__(self):
        self.now = 0.0
        self.set_to = time.time()

    def time(self):
        return self.set_to + self.now

    def monotonic(self):
        return self.now


def test_no_more_is_begun_than_fits(stage, capsys, monkeypatch):
    """Eight requests at once, which take 100 s: those that would begin at 900 might not end before 1000."""
    clock = Clock()
    for module in (deadline, run, session):
        monkeypatch.setattr(module, "time", clock)
    stage.input(2000)
    stage.scheduler_has = {"most": 0}

    async def answer(stage):
        while True:
            await stage.until(lambda: stage.batch.reason or len(stage.scheduler.requests) == stage.scheduler.most + 8)
            if stage.batch.reason:
                return
            clock.now += 100
            stage.scheduler.most += 8

    assert stage.start(answer, seconds=1000) == 75
    assert "another request:" in capsys.readouterr().err
    assert stage.scheduler.aborted == []
    assert clock.now == 900
    assert stage.summary["run"]["requests"] == len(stage.asked) == 9 * 8


@pytest.mark.parametrize("connect", [True, False])
def test_a_time_in_which_nothing_can_be_done_is_no_reason_to_start_again(stage, capsys, connect):
    stage.input(3)
    stage.scheduler_has = {"hold": True}
    assert stage.start(seconds=0.4, connect=connect, supervised=True) == 1
    assert "request was finished:" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_read(stage, tmp_path):
    stage.input(1)
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    stage.model_dir = broken
    assert stage.start() == 3
    assert str(broken / "tokenizer.json") in stage.summary["reason"]


def test_plain_lines_of_progress(stage, capsys, monkeypatch):
    monkeypatch.setattr(run, "LOOK_EVERY", 0.05)
    stage.input(30)
    stage.scheduler_has = {"pause": 0.2}
    assert stage.start(interval=0.3, supervised=True) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 30 requests, " in line]
    assert len(lines) >= 2
    assert lines[-1].startswith("phalanx: ") and "tokens/s" in lines[-1] and lines[-1].endswith(" left")


def test_started_by_hand(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match="PHALANX_BATCH: .*`phalanx batch`"):
        take(BatchConfig, VARIABLE, "batch")


def test_the_end_comes_in_time_where_the_clock_is_set(stage, capsys, monkeypatch):
    """The batch system ends a job by the time of day: where the clock is put right, so does this."""
    clock = Clock()
    for module in (deadline, run):
        monkeypatch.setattr(module, "time", clock)
    stage.input(20)
    stage.scheduler_has = {"most": 3}

    async def answer(stage):
        await stage.until(lambda: len(stage.scheduler.requests) > 3)
        clock.set_to += 3600
        await stage.until(lambda: stage.batch.reason)

    assert stage.start(answer, seconds=3600, supervised=True) == 75
    assert "the time is over" in capsys.readouterr().err
