"""Copies of states between rows and snapshots, as plans list them."""

import torch
from phalanx.rank import protocol
from phalanx.rank.model.cache_spec import PagedKV, RecurrentState
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.state_snapshots import StateSnapshots
from phalanx.rank.worker.upload import Upload

CPU = torch.device("cpu")
SPECS = [RecurrentState(3, 7, 2, 4, 5), PagedKV(1, 8, 8), RecurrentState(2, 7, 2, 4, 5)]


def test_states_go_to_snapshots_and_to_another_row():
    caches = kv_cache.allocate(SPECS, 4, 16, torch.float32, CPU, rows=5)  # of three sequences and two snapshots
    for layer in caches:
        for x in layer:
            x.normal_()
    before = [[x.clone() for x in layer] for layer in caches]
    copies = StateSnapshots(SPECS, caches, 3, Upload(CPU))
    plan = protocol.Plan(step=1, state_saves=protocol.pack_u32([2, 0, 0, 1]))
    copies.load(plan)
    assert torch.equal(caches[0][0], before[0][0])
    copies.save(plan)
    copies.load(protocol.Plan(step=2, state_loads=protocol.pack_u32([0, 1])))
    for now, then in zip(caches, before, strict=True):
        for x, y in zip(now, then, strict=True):
            assert torch.equal(x, y if x.shape[0] == 4 else y[[0, 2, 2, 2, 0]])


def test_the_first_copy_is_made_before_all_steps(monkeypatch):
    copied = []
    for entries in (3, 5):
        copies = StateSnapshots(SPECS, kv_cache.allocate(SPECS, 4, 16, torch.float32, CPU, entries), 3, Upload(CPU))
        monkeypatch.setattr(copies._copies, "copy", lambda *pair: copied.append([x.tolist() for x in pair]))
        copies.compile()
    assert copied == [[[0], [0]]]  # none where there are no snapshots
