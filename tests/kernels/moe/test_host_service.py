"""The host's part of steps of few tokens, with a thread in the place of the GPU: what both tell each other."""

import gc
import os
import threading
import time

import numpy as np
import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_service
from phalanx.kernels.moe.host_choice import ADOPTED, CHEAPEST, COPIED, ON_CPU, Choice, Costs, Residency
from phalanx.kernels.moe.host_experts import Experts, HostRouted
from phalanx.kernels.moe.host_service import Service

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")

EXPERTS, TOKENS, K, HIDDEN, INNER = 12, 3, 2, 32, 16
COSTS = Costs((2.0, 2.0, 3.0, 5.0), copy=1.5)


@pytest.fixture(autouse=True)
def a_gpu_that_works(monkeypatch):
    """Here a thread is the GPU: whether it still has work, only it knows."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Works", (), {"query": lambda self: False})())


class Layer:
    """A layer's experts, and what lies in pinned memory where there is a GPU."""

    def __init__(self, mode, slots, draw):
        self.choice = Choice(EXPERTS, 0, COSTS, mode)
        slot_of = np.full(EXPERTS, -1)
        slot_of[:slots] = np.arange(slots)
        self.of = Residency(slot_of, np.zeros(EXPERTS), np.arange(slots))
        self.w13 = 0.2 * torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw)
        self.w2 = 0.2 * torch.randn(EXPERTS, HIDDEN, INNER, generator=draw)

    def part(self, x, ids, weights, made):
        experts = Experts(self.w13, self.w2)
        work = HostRouted(x, ids, weights, "silu").all_calls(experts, self.choice.on_cpu, made)
        stays = self.choice.mode == ADOPTED
        adopts, self.lag = stays or self.choice.mode == CHEAPEST, torch.zeros(1, dtype=torch.float64)
        call = self.choice.call(ids, self.of, 1 if stays else 4 * (self.choice.mode != ON_CPU), adopts, lag=self.lag)
        kinds = {ADOPTED: host_service.COPIES_TO_STAY, ON_CPU: host_service.NO_COPIES}
        copies = kinds.get(self.choice.mode, host_service.COPIES)
        return host_service.layer(self.choice, call, self.lag, work, made, copies, x, ids, weights, self.of)

    def of_expert(self, e, x):
        gate, up = (x @ self.w13[e].T).chunk(2)
        return (torch.nn.functional.silu(gate) * up) @ self.w2[e].T


class Device:
    """A GPU that knows its experts of before and sums up what it and the CPU have made."""

    def __init__(self, layers, steps, draw):
        self.layers, self.wrong = layers, []
        self.flags = [torch.zeros(n, dtype=torch.int32) for n in (32, 32, 64)]
        self.service = Service(*self.flags)
        self.x = torch.zeros(TOKENS, HIDDEN)
        self.ids, self.weights = torch.zeros(TOKENS, K, dtype=torch.int32), torch.zeros(TOKENS, K)
        self.made = torch.zeros(TOKENS, HIDDEN)
        self.tables = [layer.of.slot_of.copy() for layer in layers]
        self.steps, self.draw, self.adopted, self.copied = steps, draw, 0, 0
        self.late, self.copies = False, []  # late: its copies always end last; copies: how many, layer by layer

    def parts(self):
        return [layer.part(self.x, self.ids, self.weights, self.made) for layer in self.layers]

    def run(self):
        count = 0
        for _ in range(self.steps):
            for layer, table in zip(self.layers, self.tables, strict=True):
                count += 1
                self._layer(layer, table, count)

    def _layer(self, layer, table, count):
        sent, made, told = self.flags
        self.x.copy_(torch.randn(self.x.shape, generator=self.draw))
        likely = torch.arange(EXPERTS, 0, -1).double() ** 2
        self.ids.copy_(torch.stack([likely.multinomial(K, generator=self.draw) for _ in range(TOKENS)]))
        self.weights.copy_(torch.rand(self.weights.shape, generator=self.draw))
        resident = table.copy()
        sent[0] = count
        while int(told[0]) >> 9 != count:
            time.sleep(0)
        entries = told[1 : 1 + (int(told[0]) & 511)].tolist()
        # The CPU computes in this step what is copied to stay.
        copied = set() if layer.choice.mode == ADOPTED else {one & 0xFFFF for one in entries}
        for one in entries:
            if one >> 16:
                table[table == (one >> 16) - 1] = -1
                table[one & 0xFFFF] = (one >> 16) - 1
                self.adopted += 1
        self.copied += len(copied)
        self.copies.append(len(copied))
        if self.late:
            sent[1] = count
        while int(made[0]) != count:
            time.sleep(0)
        want, got = torch.zeros(self.x.shape), self.made.clone()
        for t in range(TOKENS):
            for e, weight in zip(self.ids[t].tolist(), self.weights[t], strict=True):
                part = weight * layer.of_expert(e, self.x[t])
                want[t] += part
                got[t] += part if resident[e] >= 0 or e in copied else 0
        self.wrong.append(float((got - want).abs().max()))


@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize("mode, slots", [(CHEAPEST, 0), (CHEAPEST, 5), (ON_CPU, 5), (COPIED, 5), (ADOPTED, 5)])
def test_both_sides(mode, slots, posted, monkeypatch):
    if not posted:  # nothing is done by one thread alone
        monkeypatch.setattr(host_service, "FEW_NUMBERS", 0)
    draw, steps = torch.Generator().manual_seed(0), 30
    device = Device([Layer(mode, slots, draw) for _ in range(3)], steps, draw)
    service, parts = device.service, device.parts()
    gpu = threading.Thread(target=device.run, daemon=True)
    gpu.start()
    if posted:
        whole = host_service.step(parts)
        for _ in range(steps):
            service.post(whole)
        while gpu.is_alive() and len(device.wrong) < steps * len(parts):
            time.sleep(0.01)
        service.drain()
    else:
        for _ in range(steps):
            for part in parts:
                service.choose(part)
                service.compute(part)
    gpu.join(20)
    assert len(device.wrong) == steps * len(parts) and max(device.wrong) < 1e-4
    resident, cpu, copied, adopted = service.totals[3:].tolist()
    assert (copied, adopted) == (device.copied, device.adopted) and (cpu > 0) == (mode != COPIED)
    assert (resident > 0) == (slots > 0) and (adopted > 0) == (mode in (CHEAPEST, ADOPTED) and slots > 0)
    assert (copied > 0) == (mode in (CHEAPEST, COPIED))
    for layer, table in zip(device.layers, device.tables, strict=True):
        assert layer.of.slot_of.tolist() == table.tolist()  # both sides know the same residents
    assert not posted or min(service.totals[:3]) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", [False, True])
def test_copies_that_end_last_become_fewer(late):
    """And are tried again now and then. Where they end first, nothing is put in their way."""
    draw, steps = torch.Generator().manual_seed(0), 300
    device = Device([Layer(CHEAPEST, 0, draw) for _ in range(3)], steps, draw)
    whole, device.late = host_service.step(device.parts()), late
    gpu = threading.Thread(target=device.run, daemon=True)
    gpu.start()
    for _ in range(steps):
        device.service.post(whole)
    gpu.join(40)
    device.service.drain()
    assert max(device.wrong) < 1e-4
    lags, copies = [float(layer.lag) for layer in device.layers], np.array(device.copies).reshape(steps, 3)
    assert lags[2] == 0  # of a step's last layer nothing is known: what follows it is another step
    if not late:
        assert lags == [0, 0, 0] and (copies[:, :2].mean(0) > 1).all()
        return
    assert (copies[:3, :2] > 0).all() and (copies[-100:, :2].mean(0) < 0.5).all() and copies[-100:, :2].any()
    assert all(0 < lag <= 16 * COSTS.copy for lag in lags[:2])


class Ahead(Device):
    """A GPU that sends a layer's tokens before the CPU has computed the layer before, from other memory."""

    def __init__(self, layers, steps, draw):
        super().__init__(layers, steps, draw)
        kinds = (TOKENS, HIDDEN, torch.float32), (TOKENS, K, torch.int32), (TOKENS, K, torch.float32)
        self.turns = [[torch.zeros(n, m, dtype=kind) for n, m, kind in (*kinds, kinds[0])] for _ in range(2)]

    def parts(self):
        return [layer.part(*self.turns[place % 2]) for place, layer in enumerate(self.layers)]

    def run(self):
        sent, made, _ = self.flags
        count = 0
        for _ in range(self.steps):
            for place in range(len(self.layers)):
                count += 1
                x, ids, weights, sums = self.turns[place % 2]
                x.copy_(torch.randn(x.shape, generator=self.draw))
                ids.copy_(torch.stack([torch.randperm(EXPERTS, generator=self.draw)[:K] for _ in range(TOKENS)]))
                weights.copy_(torch.rand(weights.shape, generator=self.draw))
                sent[0] = count
                last = place == len(self.layers) - 1
                while int(made[0]) < count - (not last):
                    time.sleep(0)
                for of in (place - 1,) * (place > 0) + (place,) * last:
                    self._check(self.layers[of], *self.turns[of % 2])

    def _check(self, layer, x, ids, weights, sums):
        want = torch.zeros(x.shape)
        for t in range(TOKENS):
            for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
                want[t] += weight * layer.of_expert(e, x[t])
        self.wrong.append(float((sums - want).abs().max()))


def test_a_gpu_that_is_a_layer_ahead():
    draw, steps = torch.Generator().manual_seed(0), 30
    device = Ahead([Layer(ON_CPU, 0, draw) for _ in range(5)], steps, draw)
    gpu = threading.Thread(target=device.run, daemon=True)
    whole = host_service.step(device.parts())
    for _ in range(4):
        device.service.post(whole)
    gpu.start()
    for _ in range(steps - 4):
        device.service.post(whole)
    gpu.join(20)
    device.service.drain()
    assert len(device.wrong) == steps * 5 and max(device.wrong) < 1e-4


def test_who_gives_up_is_waited_for_no_more(monkeypatch):
    monkeypatch.setattr(host_service, "PAUSE", 0.01)
    draw = torch.Generator().manual_seed(0)
    device = Device([Layer(ON_CPU, 0, draw)], 1, draw)
    (part,) = device.parts()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Done", (), {"query": lambda self: True})())
    device.service.post(host_service.step([part]))
    with pytest.raises(RuntimeError, match="sent nothing"):
        device.service.drain()
    device.service.give_up()
    device.service.drain()
    assert int(device.flags[1][1]) == 1
    with pytest.raises(RuntimeError, match="has failed before"):
        device.service.choose(part)


def test_a_thread_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(host_service, "LIMIT", 0.02)
    draw = torch.Generator().manual_seed(0)
    device = Device([Layer(ON_CPU, 0, draw) for _ in range(3)], 1, draw)
    whole = host_service.step(device.parts())
    device.service.post(whole)
    device.service.post(whole)
    device.service.drain()
    assert int(device.flags[1][1]) == 3, "kernels wait no more"
    with pytest.raises(RuntimeError, match="waited .*GPU's part"):
        device.service.post(whole)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_thread_ends_with_its_service(in_flight):
    """The service ends as where a model is unloaded; also while it waits for a step that does not come."""
    draw = torch.Generator().manual_seed(0)
    device = Device([Layer(ON_CPU, 0, draw)], 1, draw)
    before = set(os.listdir("/proc/self/task"))
    device.service.post(host_service.step(device.parts()))
    (thread,) = set(os.listdir("/proc/self/task")) - before  # of other tests' threads some may end meanwhile
    if not in_flight:
        device.run()
        device.service.drain()
        assert max(device.wrong) < 1e-4
    del device
    gc.collect()
    end = time.monotonic() + 10
    while thread in os.listdir("/proc/self/task") and time.monotonic() < end:
        time.sleep(0.01)
    assert thread not in os.listdir("/proc/self/task")
