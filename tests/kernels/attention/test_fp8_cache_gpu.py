"""A cache in e4m3 on a GPU: what is written, and each kernel that reads it, beside the torch references."""

import pytest
import torch
from phalanx.kernels.attention import attention, reference
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.rope import fp8_cache, rope

from ...devices import needs_tma, require_gpu
from ..gpu import KINDS, near, poison  # noqa: F401
from . import decoding, latents
from .latents import DEEPSEEK, LENGTHS, SIZES
from .test_attention import make_rows

require_gpu()
MLA_KINDS = [(torch.float32, 1e-4), (torch.bfloat16, 2.5e-2), (torch.float16, 4e-3)]
CODES = [case._replace(fp8=True) for case in decoding.CASES + decoding.random_cases(30)]
BOXES = [*filter(decoding.takes, (case._replace(fp8=True) for case in decoding.BOXES + decoding.random_boxes(40)))]


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim, turned", [(128, 128), (64, 64), (80, 32), (256, 256), (10, 6)])
@pytest.mark.parametrize("tokens, heads, kv_heads", [(0, 2, 1), (5, 16, 1), (300, 5, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_kernel_writes_what_the_reference_does(dim, turned, tokens, heads, kv_heads, interleaved, dtype, bound):
    angles = torch.rand(tokens, 1, turned // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    turn = rope.CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), interleaved)
    y = (torch.randn(tokens, heads + 2 * kv_heads, dim) * torch.randn(tokens, 1, 1).mul(4).exp2()).to(dtype)
    slots = torch.randperm(19 * 16)[:tokens]
    found = []
    for device in ("cpu", "cuda"):
        codes = torch.full((2, 19, 16, kv_heads, dim), 0x7F, dtype=torch.uint8, device=device).view(fp8_cache.E4M3)
        scales = torch.full((19, kv_heads, 2, 16), 255, dtype=torch.uint8, device=device)
        cache = rope.KVCache(codes[0], codes[1], scales)
        q, k, v = y.to(device, copy=True).split([heads, kv_heads, kv_heads], 1)
        there = rope.CosSin(turn.cos.to(device), turn.sin.to(device), interleaved)
        call = rope.rope_and_store_kv_cuda if device == "cuda" else rope.rope_and_store_kv_reference
        call(q, rope.CurrentKV(k, v, there, None, slots.to(device)), cache)
        found.append(decoding.moved_cache(cache, "cpu"))
    decoding.check_caches(found[1], found[0], bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("case", CODES)
def test_triton_decodes(case, dtype, bound):
    decoding.check(case, dtype, max(bound, 1e-5), "cuda")


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window, cap, sinks", [(0, 0.0, False), (100, 0.0, True), (0, 1.5, False)])
def test_prompts_and_mixtures(dim, window, cap, sinks, dtype, bound):
    query_lens, kv_lens = [1, 1, 1, 40, 300, 2, 2500], [17, 1, 300, 40, 333, 900, 2500]
    rows = make_rows(query_lens, kv_lens, 16, 300)
    cache = decoding.make_kv_cache(rows, decoding.Case([], kv_heads=2, dim=dim, fp8=True), 300, dtype)
    cache = decoding.moved_cache(cache, "cuda")
    for name in ("block_tables", "lengths", "query_starts"):
        setattr(rows, name, getattr(rows, name).cuda())
    q = torch.randn(sum(query_lens), 8, dim, device="cuda").to(dtype)
    params = AttentionParams(dim**-0.5, window, cap, torch.randn(8, device="cuda") if sinks else None)
    want = reference.paged_attention_reference(q, *cache[:2], rows, params, cache.scales)
    rows.scratch.clear()
    near(attention.paged_attention(q, *cache[:2], rows, params, cache.scales), want, max(bound, 5e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_in_16_bits(dtype):
    decoding.check_widened(dtype, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES[:2], DEEPSEEK, DEEPSEEK._replace(heads=128)])
@pytest.mark.parametrize("dtype, bound", MLA_KINDS)
def test_latents(sizes, dtype, bound):
    latents.check_gather(sizes, dtype, "cuda")
    for interleaved in (False, True):
        latents.check_fp8_store(sizes, interleaved, dtype, "cuda")
        latents.check_absorb(sizes, interleaved, dtype, bound, "cuda", fp8=True)
    for most, lengths in zip((1, 4, 64), (*LENGTHS[1:], [5000, 0, 257, 1]), strict=True):
        latents.check_decode(sizes, lengths, most, dtype, bound, "cuda", fp8=True)


@needs_tma
@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize("case", BOXES)
def test_tma_decodes(case, dtype, bound):
    decoding.check(case, dtype, bound, "cuda", by_boxes=True)
