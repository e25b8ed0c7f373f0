"""Copies of entries of many tensors on a GPU, by Triton's kernel."""

import pytest
import torch
from phalanx.rank import protocol
from phalanx.rank.model.cache_spec import RecurrentState
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.state_snapshots import StateSnapshots
from phalanx.rank.worker.upload import Upload

from .steps import check_copies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_entries_are_copied_in_each_tensor():
    check_copies("cuda")


def test_the_first_copy_compiles_for_all():
    from phalanx.kernels.recurrent.copy_entries_triton import copy_kernel

    specs, device = [RecurrentState(3, 7, 2, 4, 5)] * 2, torch.device("cuda", 0)
    caches = kv_cache.allocate(specs, 4, 16, torch.bfloat16, device, rows=9)  # of four sequences and five snapshots
    copies = StateSnapshots(specs, caches, 4, Upload(device))
    copy_kernel.device_caches.clear()
    copies.compile()
    for count in range(1, 5):
        pairs = [number for i in range(count) for number in (i, i)]
        copies.save(protocol.Plan(step=count, state_saves=protocol.pack_u32(pairs)))
        copies.load(protocol.Plan(step=count, state_loads=protocol.pack_u32(pairs)))
    torch.cuda.synchronize()
    assert len(copy_kernel.device_caches[0][0]) == 1
