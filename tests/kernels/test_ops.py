"""The small operations, on odd sizes, strided inputs and empty batches."""

import ctypes
import math
import os
import time

import pytest
import torch
from phalanx.kernels.activation.activation import gated_activation
from phalanx.kernels.cpp import ops
from phalanx.kernels.device import WHOLE_SHARED
from phalanx.kernels.embedding.embedding import embedding
from phalanx.kernels.gemm import gemv
from phalanx.kernels.gemm.linear import PACK_FROM, linear, pack
from phalanx.kernels.gemm.pipelined_gemm import MAX_STAGES, TileConfig, choose, stages, tile_configs
from phalanx.kernels.norm.norm import add_rms_norm, rms_norm
from phalanx.kernels.rope.rope import apply_rotary, cos_sin, store_kv_reference
from phalanx.kernels.sampling.argmax import argmax

SIZES = [(0, 7), (1, 1), (3, 33), (17, 64)]
NARROW = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]


@pytest.mark.parametrize("rows, size", SIZES)
@pytest.mark.parametrize("dtype, bound", NARROW)
def test_rms_norm(rows, size, dtype, bound):
    x, weight = (torch.randn(rows, size) * 5).to(dtype), torch.randn(size).to(dtype)
    before = x.clone()
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)


def test_rms_norm_does_not_overflow_f16():
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_rms_norm_of_heads_in_place_in_a_wider_tensor():
    x = torch.randn(5, 7, 8)
    torch.testing.assert_close(rms_norm(x[:, 2:4], torch.ones(8), 1e-6), rms_norm(x, torch.ones(8), 1e-6)[:, 2:4])


@pytest.mark.parametrize("rows, size", SIZES)
@pytest.mark.parametrize("dtype, bound", NARROW)
def test_add_rms_norm(rows, size, dtype, bound):
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((rows, size), (rows, size), (size,)))
    total = x + residual
    want = rms_norm(total, weight, 1e-5)
    normed, stream = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(stream, total) and torch.equal(normed, want)
    other = torch.randn(rows, size).to(dtype)
    normed, stream = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, other)
    want = add_rms_norm(x + other, residual, weight, 1e-5)
    assert torch.equal(stream, want[1]) and torch.equal(normed, want[0])


@pytest.mark.parametrize("rows, size", SIZES)
@pytest.mark.parametrize("dtype, bound", NARROW)
def test_silu_mul(rows, size, dtype, bound):
    x = torch.randn(rows, 2 * size).to(dtype)
    gate, up = x.double().chunk(2, -1)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(gated_activation(x).double(), want, atol=bound, rtol=bound)


@pytest.mark.parametrize("dim, rotated", [(8, 8), (10, 10), (16, 4), (6, 2)])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("dtype, bound", NARROW)
def test_rope(dim, rotated, rows, dtype, bound):
    angles = torch.rand(50, rotated // 2) * 2 * math.pi
    table = torch.stack((angles.cos(), angles.sin()), 1)
    positions = torch.randint(50, (rows,))
    wide = torch.randn(rows, 5, dim).to(dtype)
    x = wide[:, 1:4]  # strided
    want = x.double()
    for t in range(rows):
        for i in range(rotated // 2):
            c, s = angles[positions[t], i].cos().double(), angles[positions[t], i].sin().double()
            a, b = x[t, :, i].double(), x[t, :, i + rotated // 2].double()
            want[t, :, i], want[t, :, i + rotated // 2] = a * c - b * s, b * c + a * s
    got = apply_rotary(x, cos_sin(table, positions))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_storing_keys_and_values_touches_its_slots_alone(cache_dtype):
    blocks, block_size, heads, dim = 5, 3, 2, 4
    keys, values = (torch.full((blocks, block_size, heads, dim), float("nan"), dtype=cache_dtype) for _ in range(2))
    wide = torch.randn(6, 3 * heads, dim)
    k, v = wide[:, heads : 2 * heads], wide[:, 2 * heads :]
    slots = torch.tensor([14, 0, 7, 8, 3, 12])
    store_kv_reference(k, v, (keys, values), slots)
    for cache, source in ((keys, k), (values, v)):
        flat = cache.view(-1, heads, dim)
        assert torch.equal(flat[slots], source.to(cache_dtype))
        untouched = [i for i in range(blocks * block_size) if i not in slots.tolist()]
        assert flat[untouched].isnan().all()
    store_kv_reference(k[:0], v[:0], (keys, values), slots[:0])


@pytest.mark.parametrize(
    "outputs, inputs, want",
    [
        (6144, 4096, TileConfig(48, 256)),  # of an 8B model on one GPU: qkv, o, gate and up, down, head
        (4096, 4096, TileConfig(32, 256)),
        (28672, 4096, TileConfig(224, 64)),
        (4096, 14336, TileConfig(32, 256)),
        (128256, 4096, TileConfig(128, 128)),
        (14336, 4096, TileConfig(112, 128)),  # of two
        (32064, 8192, TileConfig(64, 256)),  # a quarter of a vocabulary
        (64, 1536, TileConfig(32, 256)),
        (64, 192, TileConfig(32, 64)),
        (100278, 4096, TileConfig(128, 128)),  # a vocabulary that no tile divides
        (100, 4096, None),
        (64, 100, None),
    ],
)
def test_how_products_of_few_rows_are_cut(outputs, inputs, want):
    assert choose(16, outputs, inputs, 132) == want
    for num_sms in (78, 114, 148):  # of an H20, an H100 on PCIe, a B200
        config = choose(16, outputs, inputs, num_sms)
        assert (config is None) == (want is None) and (
            config is None or (outputs == 100278 or outputs % config.outputs == 0) and inputs % config.inputs == 0
        )
    if want:
        for rows, whole in ((3, False), (16, False), (64, False), (33, True), (64, True)):
            count, shared = stages(want, rows, whole)
            assert 2 <= count <= MAX_STAGES and shared <= WHOLE_SHARED
    assert gemv.takes(1, outputs, inputs) == (outputs % 64 == 0 and inputs % 512 == 0)


@pytest.mark.parametrize(
    "outputs, inputs, want",
    [
        (4096, 14336, TileConfig(32, 256)),
        (4096, 4096, TileConfig(32, 256)),
        (28672, 4096, TileConfig(224, 64)),
        (37888, 3584, TileConfig(96, 128)),  # three tiles on each multiprocessor, of which the last has 64 outputs
        (27392, 4096, TileConfig(224, 64)),
    ],
)
def test_tiles_of_all_64_rows_may_not_divide_the_outputs(outputs, inputs, want):
    assert choose(64, outputs, inputs, 132, True) == want
    count, shared = stages(want, 64, True)
    assert count >= 2 and shared <= WHOLE_SHARED
    assert all(inputs % config.inputs == 0 for config in tile_configs(64, inputs, True))


def test_the_first_of_equals_is_the_largest():
    values, ids = argmax(torch.tensor([[1.0, 3, 3, -5], [-1, -1, -2, -1]], dtype=torch.bfloat16))
    assert values.tolist() == [3, -1] and ids.tolist() == [1, 0] and values.dtype == torch.float32
    assert argmax(torch.empty(0, 4))[1].shape == (0,)


def test_embedding_of_a_slice_is_zero_elsewhere():
    table = torch.randn(10, 4)
    ids = torch.tensor([0, 3, 9, 5, 4, 7])
    assert torch.equal(embedding(ids, table), table[ids])
    poisoned = table[4:8].clone()
    poisoned[0] = float("nan")  # the row that stands in for absent ids
    got = embedding(ids, poisoned, start=4, whole=False)
    assert torch.equal(got[[0, 1, 2]], torch.zeros(3, 4))
    assert got[4].isnan().all() and torch.equal(got[[3, 5]], table[[5, 7]])
    assert torch.equal(ids, torch.tensor([0, 3, 9, 5, 4, 7]))
    parts = sum(embedding(ids, table[a : a + 5], a, whole=False) for a in (0, 5))
    assert torch.equal(parts, table[ids])
    assert embedding(ids[:0], table, 0, whole=False).shape == (0, 4)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("outputs, inputs", [(9, 6), (255, 257), (515, 1001)])
def test_linear_plain_and_packed(rows, outputs, inputs, monkeypatch):
    monkeypatch.setattr(ops, "available", lambda: False)  # which take weights as they are
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack(weight)
    assert (packed is weight) == (weight.numel() < PACK_FROM)
    for form in (weight, packed):
        for b in (None, bias):
            got = linear(x, form, b)
            assert got.is_contiguous() and got.shape == (rows, outputs)
            want = (x.double() @ weight.double().T + (b.double() if b is not None else 0)).float()
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_only_f32_is_packed():
    weight = torch.randn(1024, 512, dtype=torch.bfloat16)
    assert pack(weight) is weight


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
def test_threads_may_stay_awake(monkeypatch):
    """For lists and operations with little between them; what they compute is the same."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.randn(64, 64)
    want = linear(x, x)
    assert all(before == ops.LOOK for before in ops.stay_awake(2e-3))
    try:
        for pause in (0, 1e-3, 1e-2):
            time.sleep(pause)  # up to 10 ms: less and more than the 2 ms that they stay awake
            assert torch.equal(linear(x, x), want)
    finally:
        assert set(ops.stay_awake()) == {2e-3}


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
def test_threads_that_are_woken_before_a_list_compute_the_same(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.randn(64, 64)
    want = linear(x, x)
    for pause in (0, 1e-4, 1e-3, 1e-2):
        time.sleep(pause)  # 1 ms and more: long enough for them to fall asleep
        ops.libraries()["pool"].pool_wake(ctypes.c_void_p(ops._pool(3)))
        time.sleep(pause)  # as long as before: they look, or sleep again by then
        assert torch.equal(linear(x, x), want)


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("threads, others", [(1, 0), (2, 1), (4, 3), (8, 6)])
def test_a_core_stays_free_beside_threads_that_look_for_work(monkeypatch, threads, others):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert ops.others() == others
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert ops.others() == 0 and ops._pool(0) is None
