"""Output of a batch job: the bar, the lines, the summary, and the energy where there is a meter."""

import json
import re
from types import SimpleNamespace

import pytest
from phalanx.rank.server.batch import progress, summary
from phalanx.rank.server.batch.progress import Counts, Progress, duration


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def test_durations():
    texts = [duration(seconds) for seconds in (0.2, 59.6, 100, 3600, 5400, 4 * 3600 + 300)]
    assert texts == ["0 s", "60 s", "2 min", "60 min", "1 h 30 min", "4 h 05 min"]


def test_lines(clock, capsys):
    told = Progress(0, 30)
    told.total, told.before = 1000, 100
    told.began()
    for second in range(1, 62):
        clock.seconds = 100 + second
        told.look(second, second * 50)
    told.close()
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d+", line) for line in lines] == [["130", "1000", "50", "14"], ["160", "1000", "50", "14"]]
    assert all(line.startswith("phalanx: ") for line in lines)


def test_a_total_that_is_not_known(clock, capsys):
    told = Progress(0, 1)
    told.began()
    clock.seconds += 2
    told.look(3, 100)
    assert re.findall(r"\d+", capsys.readouterr().err) == ["3", "50"]


def test_the_bar(clock, capsys):
    told = Progress(80, 30)
    told.total, told.before = 100, 10
    told.began()
    clock.seconds += 10
    told.look(40, 500)
    told.say("something happened")
    told.look(90, 1000, last=True)
    told.close()
    err = capsys.readouterr().err
    assert re.search(r" 50%.* 50 of.*12 s", err)
    assert "phalanx: something happened\n" in err
    assert re.search(r"100%\|.+\| 100 of 100", err)
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", err))


def test_a_terminal_that_is_gone(monkeypatch):
    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError

        flush = fileno = write

    told = Progress(0, 30)
    monkeypatch.setattr("sys.stderr", Gone())
    told.say("nobody hears this")


def test_the_summary(tmp_path):
    run, total = summary.totals(Counts(8, 2, 100, 500)), summary.totals(Counts(18, 2, 200, 900))
    one = summary.Summary(
        "complete", 0, "out has every answer", "in", "out", "errors", "tiny", 2, run, total, 100.0, 20.0, 0.125, 6.25,
        7.5, 5000.0, 2, 10.0,
    )  # fmt: skip
    head, *lines = summary.text(one).splitlines()
    assert head.split(": ") == ["complete", one.reason]
    assert [re.findall(r"[\d.]+", line) for line in lines] == [
        ["20", "2"], ["10", "10"], ["100", "500", "6.2"], ["2", "20"], ["5000", "2", "10"],
    ]  # fmt: skip
    summary.save(one, str(tmp_path / "sum.json"))
    assert json.loads((tmp_path / "sum.json").read_text())["joules_per_output_token"] == 10
    assert summary.rate(5, 0) == 0
