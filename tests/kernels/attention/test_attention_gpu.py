"""Paged attention on a GPU against its torch reference, with NaN in all that must not be read or left."""

import random

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import attention, attention_triton, prefill, reference
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.rope import rope
from phalanx.kernels.rope.rope import CurrentKV

from ...devices import needs_tma, require_gpu
from ..gpu import KINDS, near, poison  # noqa: F401
from . import decoding
from .test_attention import make_caches, make_rows

require_gpu()


def check_attention(
    query_lens, kv_lens, heads, kv_heads, dim, dtype, bound, window=0, block_size=16, cap=0.0, sinks=False, spans=None
):
    blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, block_size, blocks, spans=spans)
    keys, values = (c.cuda() for c in make_caches(rows, block_size, blocks, kv_heads, dim, dtype))
    for name in ("block_tables", "lengths", "query_starts", *(["reach"] if spans else [])):
        setattr(rows, name, getattr(rows, name).cuda())
    q = torch.randn(sum(query_lens), heads + 2 * kv_heads, dim, device="cuda").to(dtype)[:, :heads]
    scores = AttentionParams(dim**-0.5, window, cap, torch.randn(heads, device="cuda") * 3 if sinks else None)
    want = reference.paged_attention_reference(q, keys, values, rows, scores)
    rows.scratch.clear()
    near(attention.paged_attention(q, keys, values, rows, scores), want, bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [32, 64, 72, 80, 96, 112, 128, 144, 160, 192, 224, 256])
def test_attention_head_sizes(dim, dtype, bound):
    check_attention([1, 1, 1, 40, 130], [17, 1, 300, 40, 333], 8, 2, dim, dtype, bound)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("window", [0, 1, 24, 1000])
def test_attention_groups_and_windows(ratio, window):
    check_attention([1] * 5 + [70, 3], [16, 64, 65, 1, 511, 70, 140], 2 * ratio, 2, 64, torch.float16, 2e-3, window)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 72, 96, 128, 256])
@pytest.mark.parametrize("window, cap", [(0, 0.0), (128, 0.0), (0, 1.5)])
def test_attention_sinks(window, cap, dim, dtype, bound):
    bound = max(bound, 5e-5)
    lengths = [17, 1, 300, 5000, 40, 333]
    check_attention([1, 1, 1, 1, 40, 130], lengths, 16, 2, dim, dtype, bound, window, cap=cap, sinks=True)
    check_attention([2560], [2560], 4, 1, dim, dtype, bound, window, cap=cap, sinks=True)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("window", [0, 128])
def test_attention_in_spans(window, dim, dtype, bound):
    spans = [(2, 10, 266), (3, 200, 301), (3, 310, 340)]
    check_attention([1, 1, 300, 133], [17, 5000, 300, 366], 8, 4, dim, dtype, max(bound, 5e-5), window, spans=spans)


def test_attention_random_shapes():
    draw = random.Random(3)
    for _ in range(20):
        query_lens = [1] * draw.randint(0, 40) + [draw.randint(2, 200) for _ in range(draw.randint(0, 3))]
        kv_lens = [n + draw.choice([0, draw.randint(0, 700)]) for n in query_lens]
        dtype, bound = draw.choice(KINDS)
        kv_heads, block_size = draw.randint(1, 3), draw.choice([16, 16, 8, 64])
        heads = kv_heads * draw.choice([1, 4, 7])
        window, cap = draw.choice([0, 0, 100]), draw.choice([0.0, 0.0, 1.5])
        check_attention(query_lens, kv_lens, heads, kv_heads, 128, dtype, bound, window, block_size, cap)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 72, 112, 256])
@pytest.mark.parametrize("window, cap", [(0, 0.02), (0, 1.5), (24, 1.5), (100, 50.0)])
def test_attention_soft_caps(window, cap, dim, dtype, bound):
    bound = max(bound, 5e-5)  # a few units in the last place of an f32 near 72, which is 50 to the base 2
    check_attention([1, 1, 1, 40, 130], [17, 1, 300, 40, 333], 8, 2, dim, dtype, bound, window, cap=cap)


@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("by_triton", [False, True])
def test_prompts_of_all_lengths(by_triton, dim, dtype, bound, monkeypatch):
    """Rows and keys that end in the middle of a tile, at its end and just past it, with and without keys before."""
    if by_triton:
        monkeypatch.setattr(prefill, "supports_prefill", lambda *_: False)
    for block_size, window, before in ((16, 0, 0), (8, 0, 33), (128, 0, 200), (64, 90, 64), (32, 0, 1000)):
        lens = [2, 63, 64, 65, 127, 128, 129, 500, 1024]
        random.Random(before).shuffle(lens)
        check_attention(lens, [n + before for n in lens], 8, 2, dim, dtype, bound, window, block_size)


@pytest.mark.parametrize("dtype, bound", KINDS[1:])
def test_long_prompts(dtype, bound):
    """Whole prompts that cuDNN takes where prefill.cu does not take them, among others and alone."""
    check_attention([1, 60, 2049, 5], [77, 60, 2049, 9], 4, 2, 128, dtype, bound)
    check_attention([2560], [2560], 4, 1, 64, dtype, bound)
    check_attention([2560], [2560], 4, 1, 64, dtype, bound, cap=1.5)  # not by cuDNN


def test_empty_decode_rows_give_zeros():
    rows = make_rows([1, 1, 1], [20, 1, 16], 16, 8)
    rows.lengths = torch.tensor([20, 0, 16], dtype=torch.int32).cuda()
    rows.block_tables = rows.block_tables.cuda()
    cache = torch.randn(2, 8, 16, 2, 64, device="cuda").half()
    out = attention.paged_attention(
        torch.randn(3, 4, 64, device="cuda").half(), cache[0], cache[1], rows, AttentionParams(0.1)
    )
    assert (out[1] == 0).all() and out.isfinite().all() and (out[[0, 2]] != 0).any()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("case", decoding.CASES)
def test_decode_kernel(case, dtype, bound):
    decoding.check(case, dtype, max(bound, 1e-5), "cuda")
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


@pytest.mark.parametrize("i, case", [*enumerate(decoding.random_cases(15))])
def test_decode_kernel_random_shapes(i, case):
    dtype, bound = KINDS[i % 3]
    decoding.check(case, dtype, max(bound, 1e-5), "cuda")


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("case", [*decoding.SEVERAL, *(case._replace(unwritten=()) for case in decoding.CASES)])
@pytest.mark.parametrize("query_len", [2, 4, 5])
def test_several_tokens_of_a_sequence(case, dtype, bound, query_len):
    decoding.check_several(case, query_len, dtype, max(bound, 1e-5), "cuda")
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


@needs_tma
@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize("case", decoding.BOXES)
def test_decode_by_tma(case, dtype, bound):
    decoding.check(case, dtype, bound, "cuda", by_boxes=True)
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


@needs_tma
@pytest.mark.parametrize("i, case", [*enumerate(decoding.random_boxes(40))])
def test_decode_by_tma_random_shapes(i, case):
    dtype, bound = KINDS[1 + i % 2]
    decoding.check(case, dtype, bound, "cuda", by_boxes=True)


@pytest.mark.parametrize("turned", [64, 32])
@pytest.mark.parametrize("query_lens, kv_lens", [([1] * 4, [3000, 1, 17, 500]), ([1, 1, 9], [300, 16, 40])])
def test_write_and_attend(query_lens, kv_lens, turned):
    """Writes and attends in one kernel, or in two where heads are turned in part or a step has a prompt."""
    rows, cache, y, rest = a_step(query_lens, kv_lens, turned)
    theirs = cache.clone()
    q, k, v = split(y)
    q = rope.rope_and_store_kv_reference(q, CurrentKV(k, v, *rest, rows.slots), (theirs[0], theirs[1]))
    want = reference.paged_attention_reference(q, theirs[0], theirs[1], rows, AttentionParams(0.125))
    rows.scratch.clear()
    q, k, v = split(y)
    new = CurrentKV(k, v, *rest, rows.slots)
    near(attention.store_and_attend(q, new, (cache[0], cache[1]), rows, AttentionParams(0.125)), want, 2e-3)
    torch.testing.assert_close(cache, theirs, atol=2e-3, rtol=2e-3, equal_nan=True)


def a_step(query_lens, kv_lens, turned):
    """Rows with slots, a cache, rows of a merged projection, and rotation and norms."""
    rows = make_rows(query_lens, kv_lens, 16, sum(kv_lens) // 16 + len(kv_lens) + 2)
    cache = torch.stack(make_caches(rows, 16, sum(kv_lens) // 16 + len(kv_lens) + 2, 2, 64, torch.float16)).cuda()
    spans = [torch.arange(n - count, n) for count, n in zip(query_lens, kv_lens, strict=True)]
    slots = [t[p // 16].long() * 16 + p % 16 for t, p in zip(rows.block_tables, spans, strict=True)]
    rows.slots = torch.cat(slots)
    for name in ("block_tables", "lengths", "query_starts", "slots"):
        setattr(rows, name, getattr(rows, name).cuda())
    angles = torch.rand(sum(query_lens), 1, turned // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    turn = rope.CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    norms = rope.QKNorm(*torch.randn(2, 64, device="cuda").half(), 1e-6)
    return rows, cache, torch.randn(sum(query_lens), 12, 64, device="cuda").half(), (turn, norms)


def split(y):
    return y.clone().split([8, 2, 2], 1)


def test_one_kernel_in_a_graph():
    """Captured for long sequences, replayed for others: each time as many parts as the lengths at hand ask for."""
    rows, cache, y, rest = a_step([1] * 4, [3000, 2000, 2500, 700], 64)
    cache.nan_to_num_(0)
    q, k, v = split(y)
    new = CurrentKV(k, v, *rest, rows.slots)

    def step():
        return attention.store_and_attend(q, new, (cache[0], cache[1]), rows, AttentionParams(0.125))

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        out = step()
        graph.capture_end()
        for lengths in ([3000, 2000, 2500, 700], [1, 256, 0, 700], [2999, 0, 0, 0], [600, 700, 800, 500]):
            rows.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            found = out.clone()
            near(found, step(), 2e-3)
            alone = torch.empty_like(q, memory_format=torch.contiguous_format)
            attention_triton.decode(
                q, cache[0], cache[1], rows.block_tables, rows.lengths, alone, *AttentionParams(0.125), 1, new
            )
            near(found, alone.flatten(1), 2e-3)
        assert not jit.counters(q.device, stream.cuda_stream).any()
