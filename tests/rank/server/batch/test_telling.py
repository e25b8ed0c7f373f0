"""What a batch job tells: the bar, the lines, the summary, and the energy where there is a meter."""

import ctypes
import json
import re
from types import SimpleNamespace

import pytest
from phalanx.rank.server.batch import energy, progress, summary
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
    assert capsys.readouterr().err.splitlines() == [
        "phalanx: 130 of 1000 requests, 50 tokens/s, 14 min left",
        "phalanx: 160 of 1000 requests, 50 tokens/s, 14 min left",
    ]


def test_a_total_that_is_not_known(clock, capsys):
    told = Progress(0, 1)
    told.began()
    clock.seconds += 2
    told.look(3, 100)
    assert capsys.readouterr().err == "phalanx: 3 requests, 50 tokens/s\n"


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
    assert re.search(r"phalanx  50%\|.+\| 50 of 100 requests, 50 tokens/s, 12 s left", err)
    assert "phalanx: something happened\n" in err
    assert re.search(r"phalanx 100%\|.+\| 100 of 100 requests", err)
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


class Nvml:
    """A library that counts a thousand joules between two looks."""

    def __init__(self, code=0):
        self.code = code
        self.mj = 0
        self.asked = []

    def nvmlInit_v2(self):
        return self.code

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.asked.append(index.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.asked.append(uuid.value)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, out):
        ctypes.cast(out, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.mj
        self.mj += 1_000_000
        return 0


def test_energy(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: nvml)
    meter = energy.EnergyMeter(["3"])
    assert nvml.asked == [3] and meter.joules() == 1000
    nvml = Nvml()
    energy.EnergyMeter(["GPU-x"])
    assert nvml.asked == [b"GPU-x"]


class Three(Nvml):
    """A library with three GPUs that, as NVML does, takes whole UUIDs only. A handle's address is a GPU's number."""

    UUIDS = (b"GPU-ab01", b"GPU-ab02", b"GPU-cd03")

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        super().nvmlDeviceGetHandleByUUID(uuid, handle)
        return 0 if uuid.value in self.UUIDS else 6

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.UUIDS)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value
        return 4 if index.value == 1 else 0  # another job's

    def nvmlDeviceGetUUID(self, handle, text, size):
        text.value = self.UUIDS[handle.value or 0]
        return 0


@pytest.mark.parametrize(("name", "found"), [("GPU-cd03", None), ("GPU-c", 2), ("GPU-A", 0)])
def test_energy_of_a_gpu_whose_uuid_is_cut_short(monkeypatch, name, found):
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: Three())
    meter = energy.EnergyMeter([name])
    assert meter.joules() == 1000
    assert [handle.value or 0 for handle in meter._handles] == [found or 0]


@pytest.mark.parametrize("name", ["GPU-", "GPU-x"])
def test_no_energy_of_a_gpu_that_cannot_be_told(monkeypatch, name):
    nvml = Three()
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: nvml)
    meter = energy.EnergyMeter([name])
    assert meter.joules() is None
    with pytest.raises(OSError, match=f"^{2 if name == 'GPU-' else 0} GPUs have a UUID that begins with {name}$"):
        meter._begun(name)


def test_no_energy(monkeypatch):
    assert energy.EnergyMeter([]).joules() is None
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Nvml(code=9))
    assert energy.EnergyMeter(["0"]).joules() is None

    def missing(name):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(energy.ctypes, "CDLL", missing)
    assert energy.EnergyMeter(["0"]).joules() is None
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: object())  # a library without these functions
    assert energy.EnergyMeter(["0"]).joules() is None


def test_the_summary(tmp_path):
    run, total = summary.totals(Counts(8, 2, 100, 500)), summary.totals(Counts(18, 2, 200, 900))
    one = summary.Summary(
        "complete", 0, "out has every answer", "in", "out", "errors", "tiny", 2, run, total, 100.0, 20.0, 0.125, 6.25,
        7.5, 5000.0, 2, 10.0,
    )  # fmt: skip
    assert summary.text(one).splitlines() == [
        "complete: out has every answer",
        "         requests: 20 done, 2 failed (errors)",
        "                   10 by this start, 10 before",
        "         tokens:   100 of prompts, 500 of output, 6.2 output tokens/s",
        "         time:     2 min, 20 s of it loading",
        "         energy:   5000 J of 2 GPUs, 10 J per output token",
    ]
    summary.save(one, str(tmp_path / "sum.json"))
    assert json.loads((tmp_path / "sum.json").read_text())["joules_per_output_token"] == 10
    assert summary.rate(5, 0) == 0
