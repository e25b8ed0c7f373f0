"""Time and energy of calls, on a GPU that a test stands for."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from phalanx.benchmarks import ops_table, timing


class Gpu:
    """A replay takes 2 ms and 1.5 J, which a counter tells in steps of 10 J."""

    def __init__(self):
        self.replays, self.calls, self.capturing, self.tells, self.asked = 0, 0, False, True, []

    def capture_begin(self, capture_error_mode):
        self.capturing, self.calls = True, 0

    def capture_end(self):
        self.capturing = False

    def replay(self):
        self.replays += 1

    def record(self):
        pass

    synchronize = wait_stream = lambda *_: None

    def joules(self, gpus):
        self.asked.append(gpus)
        if not self.tells:
            raise OSError("no NVML")
        return self.replays * 1.5 // 10 * 10

    def call(self):
        self.calls += 1


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    event = SimpleNamespace(record=made.record, synchronize=made.synchronize, elapsed_time=lambda end: 2.0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.replays * 2e-3)
    monkeypatch.setattr(timing.nvml, "joules", made.joules)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    return made


@pytest.mark.parametrize("copies, least, captured", [(1, 16, 16), (3, 16, 15), (24, 16, 24), (2, 1, 2)])
def test_a_graph_takes_each_call_in_turn(copies, least, captured, gpu):
    assert timing.measure([gpu.call] * copies, least) == pytest.approx(2e3 / captured)
    assert gpu.calls == captured


def test_each_measurement_waits_for_what_it_is_told(gpu):
    waited = []
    timing.measure([gpu.call], 4, repeats=3, before=lambda: waited.append(gpu.replays))
    assert waited == [1, 2, 3]


def test_energy_is_counted_from_one_step_of_the_counter_to_another(gpu):
    assert timing.energy([gpu.call], 4, seconds=2.0) == pytest.approx(1.5 / 4, rel=0.01)
    assert gpu.replays >= 1000 and all(gpus == ["6"] for gpus in gpu.asked)


def test_a_gpu_that_does_not_tell(gpu):
    gpu.tells = False
    assert math.isnan(timing.energy([gpu.call], 4))


def test_the_table_has_both(gpu, capsys):
    table = ops_table.Table("sum", joules=True)
    table.add("a sum", 4.52e6, {"ours": [gpu.call]}, least=4)
    table.add("a GEMM", 4.52e6, {"ours": [gpu.call]})
    (line,) = table.lines
    assert line.pop("ours, mJ") == pytest.approx(375, rel=0.01)
    assert line == {"what": "op", "op": "a sum", "limit_us": 1.0, "ours": 500.0}
    assert "ours, mJ 37" in capsys.readouterr().out
