"""A cache in e4m3: what quantising loses, and each way on CPUs to write and read it beside the reference."""

import pytest
import torch
from phalanx.kernels.attention import mla
from phalanx.kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from phalanx.kernels.attention.reference import paged_attention_reference
from phalanx.kernels.rope import fp8_cache
from phalanx.kernels.rope.rope import (
    CurrentKV,
    QKNorm,
    cos_sin_reference,
    rope_and_store_kv,
    rope_and_store_kv_reference,
)

from ..conftest import DTYPES, SUFFIXES, close
from .latents import SIZES
from .test_attention import make_rows

NAN = 0x7F  # a code


def empty_cache(blocks, size, kv_heads, dim):
    """Keys, values and scales, with a code that no kernel writes."""
    codes = torch.full((2, blocks, size, kv_heads, dim), NAN, dtype=torch.uint8).view(fp8_cache.E4M3)
    return codes[0], codes[1], torch.full((blocks, kv_heads, 2, size), 255, dtype=torch.uint8)


def fill(cache, rows):
    """Random keys and values in the slots that the sequences use, of sizes that differ from head to head."""
    keys, values, scales = cache
    size, heads, dim = keys.shape[1:]
    for table, length in zip(rows.block_tables.long(), rows.kv_lens, strict=True):
        at = torch.arange(length)
        slots = table[at // size] * size + at % size
        for part, codes in enumerate((keys, values)):
            x = torch.randn(length, heads, dim) * torch.rand(length, heads, 1).mul(6).sub(4).exp2()
            fp8_cache.store(x, codes, scales, part, slots)
    return cache


def widened(cache, dtype=torch.float32):
    keys, values, scales = cache
    return [
        fp8_cache.dequantize(codes, scales[:, :, part].transpose(1, 2), dtype)
        for part, codes in enumerate((keys, values))
    ]


def test_what_quantising_loses():
    x = torch.randn(500, 64) * torch.randn(500, 1).mul(3).exp2()
    codes, exponents = fp8_cache.quantize(x)
    y = fp8_cache.dequantize(codes, exponents, torch.float32)
    largest = x.abs().amax(1, True)
    assert ((x - y).abs() <= torch.maximum(x.abs() / 16, largest * 2**-16)).all()
    assert 0.02 < ((x - y).norm(dim=1) / x.norm(dim=1)).mean() < 0.03  # each row counts alike, whatever its size
    scaled = codes.float().abs().amax(1)
    assert (scaled >= 224).all() and (scaled <= 448).all()  # no scale is larger than it must be, and none too small
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(fp8_cache.dequantize(codes, exponents, dtype).float(), y), "exact in every dtype"
    again = fp8_cache.quantize(y)
    assert torch.equal(fp8_cache.dequantize(*again, torch.float32), y)


def test_the_ends_of_what_there_are_codes_for():
    x = torch.tensor([[0.0, 0.0], [448.0, -1.0], [449.0, 1.0], [1e30, -1.0], [float("nan"), 1.0], [2.0**-22, 0.0]])
    codes, exponents = fp8_cache.quantize(x)
    assert exponents.tolist() == [105, 127, 128, 134, 134, 105]
    found = fp8_cache.dequantize(codes, exponents, torch.float32)
    assert found.tolist() == [[0, 0], [448, -1], [448, 1], [57344, -1], [57344, 1], [2.0**-22, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim, rotated", [(4, 2, 64, 64), (5, 1, 120, 80), (3, 3, 10, 4)])
@pytest.mark.parametrize("normed", [False, True])
def test_cpus_write_what_the_reference_writes(threads, called, dtype, heads, kv_heads, dim, rotated, normed):
    slots = torch.tensor([7, 0, 11])
    wide = (torch.randn(3, heads + 2 * kv_heads, dim) * torch.randn(3, 1, 1).mul(4).exp2()).to(dtype)
    turn = cos_sin_reference(torch.randn(20, 2, rotated // 2), torch.randint(20, (3,)))
    norms = QKNorm(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if normed else None
    found = []
    for write in (rope_and_store_kv_reference, rope_and_store_kv):
        cache = empty_cache(4, 3, kv_heads, dim)
        q, k, v = wide.clone().split([heads, kv_heads, kv_heads], 1)
        q = write(q, CurrentKV(k, v, turn, norms, slots), cache)
        found.append((q, cache))
    (q, cache), (want, wanted) = reversed(found)
    assert called == [f"rope_{SUFFIXES[dtype]}"]
    most = wide.abs().max().item()  # a rotation may leave little of two large numbers
    close(q, want, dtype, atol=1e-5 + most * 1e-6 if dtype == torch.float32 else 6e-2)
    assert torch.equal(cache[1].view(torch.uint8), wanted[1].view(torch.uint8)), "values bit for bit"
    assert torch.equal(cache[2][:, :, 1], wanted[2][:, :, 1])
    for mine, other in zip(widened(cache), widened(wanted), strict=True):
        used = [mine.view(-1, kv_heads, dim)[slots], other.view(-1, kv_heads, dim)[slots]]
        assert (used[0] - used[1]).norm() <= 0.01 * used[1].norm()  # a sum in another order may round elsewhere
        unused = torch.ones(12, dtype=torch.bool)
        unused[slots] = False
    assert (cache[0].view(torch.uint8).view(12, -1)[unused] == NAN).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths, heads, kv_heads, dim, size",
    [([1], 1, 1, 8, 16), ([5, 40, 33], 5, 5, 33, 4), ([700, 0, 3], 18, 1, 64, 16), ([300] * 3, 8, 2, 128, 16)],
)
@pytest.mark.parametrize("window, cap, sinks", [(0, 0.0, False), (7, 2.0, True)])
def test_decoding_on_cpus(isa, threads, called, dtype, lengths, heads, kv_heads, dim, size, window, cap, sinks):
    rows = make_rows([1] * len(lengths), lengths, size, sum(lengths) // size + len(lengths) + 2)
    cache = fill(empty_cache(int(rows.block_tables.max()) + 1, size, kv_heads, dim), rows)
    q = torch.randn(len(lengths), heads + 3, dim).to(dtype)[:, :heads]
    params = AttentionParams(dim**-0.5, window, cap, torch.randn(heads) if sinks else None)
    out = paged_attention(q, *cache[:2], rows, params, cache[2])
    assert [name.rpartition("_")[0] for name in called] == ["decode_fp8", "merge"]
    kept = [i for i, n in enumerate(lengths) if n]
    some = make_rows([1] * len(lengths), lengths, size, 9999)
    some.block_tables, some.lengths = rows.block_tables[kept], rows.lengths[kept]
    some.num_decodes, some.kv_lens, some.query_lens = len(kept), [lengths[i] for i in kept], [1] * len(kept)
    want = paged_attention_reference(q[kept].float(), *widened(cache), some, params)
    close(out[kept], want, dtype, atol=2e-5)


@pytest.mark.parametrize("window", [0, 9])
def test_prompts_and_chunks_by_the_reference(window):
    rows = make_rows([1, 1, 7, 20], [33, 5, 7, 60], 4, 40)
    cache = fill(empty_cache(40, 4, 2, 24), rows)
    q, params = torch.randn(29, 6, 24), AttentionParams(0.2, window)
    want = paged_attention_reference(q, *widened(cache), rows, params)
    for attend in (paged_attention, paged_attention_reference):
        torch.testing.assert_close(attend(q, *cache[:2], rows, params, cache[2]), want, atol=3e-6, rtol=3e-6)


def test_a_step_attends_to_what_it_has_stored():
    """The newest token as well is read as later steps will read it."""
    rows = make_rows([1, 1], [9, 4], 4, 9)
    cache = fill(empty_cache(9, 4, 2, 16), rows)
    tables = rows.block_tables.long()
    rows.slots = torch.stack([tables[0, 2] * 4, tables[1, 0] * 4 + 3])
    turn = cos_sin_reference(torch.randn(20, 2, 8), torch.tensor([8, 3]))
    q, k, v = torch.randn(2, 8, 16).split([4, 2, 2], 1)
    new = CurrentKV(k, v, turn, None, rows.slots)
    out = store_and_attend(q.clone(), new._replace(k=k.clone()), cache, rows, AttentionParams(0.25))
    other = tuple(x.clone() for x in cache)
    rotated = rope_and_store_kv_reference(q, new, other)
    want = paged_attention_reference(rotated, *widened(other), rows, AttentionParams(0.25))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expanded", [False, True])
def test_latents(expanded, monkeypatch):
    monkeypatch.setattr(mla, "expands", lambda *_: expanded)
    sizes = SIZES[0]
    width, size = sizes.latent + sizes.rope, sizes.block_size
    rows = make_rows([1, 1, 5], [17, 3, 30], size, 60)
    codes = torch.full((60, size, width), NAN, dtype=torch.uint8).view(fp8_cache.E4M3)
    scales = torch.full((60, 1, 2, size), 255, dtype=torch.uint8)
    for table, length in zip(rows.block_tables.long(), rows.kv_lens, strict=True):
        slots = torch.stack([table[p // size] * size + p % size for p in range(length)])
        x = torch.randn(length, width)
        x[:, sizes.latent :] *= 30  # the rotated key has a scale of its own
        fp8_cache.store_latents(x, codes, scales, sizes.latent, slots)
        y = fp8_cache.gather_latents(codes, scales, slots, sizes.latent, torch.float32)
        assert ((x - y).norm(dim=1) / x.norm(dim=1) < 0.0625).all()
        assert (x - y)[:, : sizes.latent].norm() < 0.04 * x[:, : sizes.latent].norm()
    plain = fp8_cache.gather_latents(codes, scales, torch.arange(60 * size), sizes.latent, torch.float32)
    up = torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.latent) * sizes.latent**-0.5
    q, params = torch.randn(7, sizes.heads, sizes.nope + sizes.rope), AttentionParams(0.05)
    want = mla.latent_attention(q, plain.view(60, size, width), up, rows, params)
    rows.scratch.clear()
    found = mla.latent_attention(q, codes, up, rows, params, scales)
    torch.testing.assert_close(found, want, atol=3e-6, rtol=3e-6)


def test_latents_are_stored_normed_and_rotated():
    sizes, slots = SIZES[0], torch.tensor([3, 1])
    width = sizes.latent + sizes.rope
    turn = cos_sin_reference(torch.randn(9, 2, sizes.rope // 2), torch.tensor([4, 7]))
    norm = mla.LatentNorm(torch.rand(sizes.latent) + 0.5, 1e-6)
    q, latents = torch.randn(2, sizes.heads, sizes.nope + sizes.rope), torch.randn(2, width)
    plain, codes = torch.zeros(2, 4, width), torch.zeros(2, 4, width, dtype=fp8_cache.E4M3)
    scales = torch.zeros(2, 1, 2, 4, dtype=torch.uint8)
    mla.rope_and_store_latents(q.clone(), latents.clone(), norm, turn, plain, slots)
    mla.rope_and_store_latents(q, latents, norm, turn, codes, slots, scales)
    found = fp8_cache.gather_latents(codes, scales, slots, sizes.latent, torch.float32)
    want = plain.view(-1, width)[slots]
    assert 0 < (found - want).norm() < 0.04 * want.norm()
