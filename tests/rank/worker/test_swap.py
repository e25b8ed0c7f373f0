import pytest
import torch
from phalanx.rank import protocol
from phalanx.rank.model.cache_spec import PagedKV, PagedLatent
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.swap import NEVER, CopyCost, Swap

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
SPECS = [PagedKV(2, 5, 3), PagedLatent(7)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_go_to_host_memory_and_come_back_elsewhere(dtype, device):
    caches = kv_cache.allocate(SPECS, 6, 4, dtype, torch.device(device))
    tensors = [x for layer in caches for x in layer]
    for x in tensors:
        x.copy_(torch.randn(x.shape))
    tensors = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in tensors]  # codes: equal bit by bit
    before = [x.clone() for x in tensors]
    swap = Swap([x for layer in caches for x in layer], 3)
    swap.apply(protocol.Plan(0, swap_out=protocol.pack_u32([4, 0, 1, 2])))
    for x in tensors:
        x[[1, 4]] = 9
    # In one plan, copies out happen first: block 3 goes to host block 1, and is overwritten by what was block 4.
    swap.apply(protocol.Plan(1, swap_out=protocol.pack_u32([3, 1]), swap_in=protocol.pack_u32([0, 3, 2, 5, 1, 0])))
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x[[3, 5, 0, 2]], old[[4, 1, 3, 2]]) and (x[[1, 4]] == 9).all()
    swap.apply(protocol.Plan(2))
    cost = swap.measure()
    assert cost.start >= 0 and cost.block >= 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_blocks_than_buffers_hold_back_and_forth_on_a_gpu(monkeypatch):
    """Many plans in a row without waiting: each host block is read and written by streams that must wait in turn."""
    monkeypatch.setattr("phalanx.rank.worker.swap.BUFFER", 1 << 14)
    specs = [PagedKV(4, 64, 64)] * 3
    caches = kv_cache.allocate(specs, 64, 16, torch.bfloat16, torch.device("cuda"))
    tensors = [x for layer in caches for x in layer]
    swap = Swap(tensors, 32)
    for x in tensors:
        x.copy_(torch.randn(x.shape, device="cuda"))
    before = [x.clone() for x in tensors]
    for step in range(20):
        out = [number for i in range(32) for number in (i, (i + step) % 32)]
        back = [number for i in range(32) for number in ((i + step) % 32, i + 32)]
        swap.apply(protocol.Plan(step, swap_out=protocol.pack_u32(out)))
        for x in tensors:
            x[:32] += 0  # a step that writes what was copied out
            x[32:] = 0
        swap.apply(protocol.Plan(step, swap_in=protocol.pack_u32(back)))
        assert all(torch.equal(x[32:], old[:32]) for x, old in zip(tensors, before, strict=True)), step


@pytest.mark.parametrize(
    "start, block, compute, least",
    [(0, 1, 2, 1), (0, 1, 1, NEVER), (0, 2, 1, NEVER), (5, 1, 2, 6), (0.5, 1, 2, 1), (1, 0, 1e-12, NEVER)],
)
def test_a_copy_must_be_sooner_than_computing(start, block, compute, least):
    assert CopyCost(start, block).least_blocks(compute) == least


@pytest.mark.parametrize("block, seconds, blocks", [(42e-6, 0.01, 238), (1.0, 0.01, 1), (0.0, 0.01, NEVER)])
def test_how_many_blocks_are_copied_in_a_time(block, seconds, blocks):
    assert CopyCost(1.0, block).blocks_in(seconds) == blocks
