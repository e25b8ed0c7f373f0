"""Paged attention against the plainest possible computation: one token, one head, one dot product at a time."""

import random

import pytest
import torch
from phalanx.errors import MODEL, FatalError
from phalanx.kernels.attention import attention, cudnn, decode, prefill, reference
from phalanx.kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from phalanx.kernels.attention.backend import Part
from phalanx.kernels.attention.reference import paged_attention_reference
from phalanx.kernels.candidate import Candidate
from phalanx.kernels.rope.rope import CosSin, CurrentKV, QKNorm, rope_and_store_kv
from phalanx.rank import cache_groups

from ..interpreter import interpret


def make_rows(query_lens, kv_lens, block_size, blocks, spare=1, query_len=1, spans=None):
    """Block tables in random order; unused entries are 0, and block 0 is nobody's. spans: (sequence, first token, end)
    of tokens that attend to each other."""
    free = list(range(1, blocks))
    random.Random(1).shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // block_size))] for n in kv_lens]
    width = max((len(table) for table in tables), default=0) + spare

    class Rows:
        pass

    rows = Rows()
    rows.block_tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    rows.block_tables = rows.block_tables.view(len(tables), width)
    rows.lengths = torch.tensor(kv_lens, dtype=torch.int32)
    rows.query_starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows.num_decodes = next((i for i, n in enumerate(query_lens) if n != query_len), len(query_lens))
    rows.query_len = query_len
    rows.query_lens, rows.kv_lens, rows.scratch = list(query_lens), list(kv_lens), {}
    rows.reach = None
    if spans is not None:
        found = [torch.arange(kv - n, kv) for n, kv in zip(query_lens, kv_lens, strict=True)]
        for i, first, end in spans:
            found[i][(found[i] >= first) & (found[i] < end)] = end - 1
        rows.reach = torch.cat(found).int()
    return rows


def make_caches(rows, block_size, blocks, kv_heads, dim, dtype, window=0):
    """NaN everywhere but in the slots that the sequences use: not in blocks that are freed behind a window."""
    caches = torch.full((2, blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype)
    for table, count, length in zip(rows.block_tables.tolist(), rows.query_lens, rows.kv_lens, strict=True):
        first = cache_groups.first_read(window, length - count) // block_size * block_size
        for p in range(first, length):
            caches[:, table[p // block_size], p % block_size] = torch.randn(2, kv_heads, dim).to(dtype)
    return caches[0], caches[1]


def plain(q, keys, values, rows, scores, chunk=0):
    block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    t = 0
    for i, (count, length) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        table = rows.block_tables[i].tolist()
        for p in range(length - count, length):
            first = max(0, p - scores.window + 1) if scores.window else 0
            first = p // chunk * chunk if chunk else first
            end = p if rows.reach is None else int(rows.reach[t])
            seen = [(table[j // block_size], j % block_size) for j in range(first, end + 1)]
            for h in range(q.shape[1]):
                k = torch.stack([keys[b, o, h // group] for b, o in seen]).double()
                v = torch.stack([values[b, o, h // group] for b, o in seen]).double()
                s = k @ q[t, h].double() * scores.scale
                if scores.softcap:
                    s = scores.softcap * torch.tanh(s / scores.softcap)
                if scores.sinks is not None:
                    s, v = torch.cat((s, scores.sinks[h : h + 1].double())), torch.cat((v, v.new_zeros(1, v.shape[1])))
                out[t, h] = torch.softmax(s, 0) @ v
            t += 1
    return out.flatten(1)


def check(
    query_lens,
    kv_lens,
    heads=4,
    kv_heads=2,
    dim=8,
    block_size=4,
    window=0,
    cap=0.0,
    dtype=torch.float32,
    bound=2e-6,
    sinks=False,
    spans=None,
):
    torch.manual_seed(len(query_lens) + dim)
    blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, block_size, blocks, spans=spans)
    keys, values = make_caches(rows, block_size, blocks, kv_heads, dim, dtype, window)
    whole = torch.randn(sum(query_lens), heads + 3, dim).to(dtype)
    q = whole[:, :heads]  # strided, as it is when it comes out of the merged projection
    before = q.clone()
    scores = AttentionParams(dim**-0.5, window, cap, torch.randn(heads) * 3 if sinks else None)
    want = plain(q, keys, values, rows, scores)
    # Each the second time from what the first layer left in scratch.
    for attend in (paged_attention, paged_attention, paged_attention_reference, paged_attention_reference):
        out = attend(q, keys, values, rows, scores)
        assert out.shape == (sum(query_lens), heads * dim) and out.dtype == dtype
        torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)
    assert torch.equal(q, before)


@pytest.mark.parametrize("kv_lens", [[1], [4], [5], [1, 1, 1], [9, 2, 9, 30, 1], [7] * 6, list(range(20, 0, -1))])
def test_decoding_rows(kv_lens):
    check([1] * len(kv_lens), kv_lens)


@pytest.mark.parametrize("query_lens, kv_lens", [([7], [7]), ([7], [8]), ([2], [30]), ([5, 1, 3], [5, 9, 40])])
def test_prompts_and_chunks(query_lens, kv_lens):
    """A one-token row after a longer one is no decode by its place, and must work all the same."""
    check(query_lens, kv_lens)


def test_mixed():
    check([1, 1, 1, 6, 1, 12], [33, 2, 17, 6, 5, 20])


SPANS = [(1, 0, 9), (2, 20, 33), (2, 40, 47), (3, 5, 6)]  # one that is in the cache in part, two, one of one token


@pytest.mark.parametrize("window, cap, sinks", [(0, 0.0, False), (6, 0.0, False), (0, 1.5, True), (40, 1.5, False)])
def test_spans_of_tokens_that_attend_to_each_other(window, cap, sinks, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", 10)
    check([1, 9, 30, 12, 2], [33, 9, 51, 12, 20], window=window, cap=cap, sinks=sinks, spans=SPANS)


def test_kernels_that_know_causal_prompts_alone_leave_spans(monkeypatch):
    monkeypatch.setattr(prefill, "supports_prefill", lambda *_: True)
    q, keys = torch.zeros(cudnn.FROM, 4, 64, dtype=torch.float16), torch.zeros(3, 16, 2, 64, dtype=torch.float16)
    for spans in (None, [(0, 3, 9)]):
        rows = make_rows([len(q)], [len(q)], 16, 200, spans=spans)
        part = Part(q, keys, keys, rows, AttentionParams(1.0), 0, 1, q)
        assert prefill.supports(part) == cudnn.supports(part) == (spans is None)


def test_nothing_at_all():
    check([], [])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("dim", [8, 80, 96])
def test_head_sizes_and_groups(ratio, dim):
    check([1, 1, 4], [3, 18, 9], heads=2 * ratio, kv_heads=2, dim=dim)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(block_size):
    check([1, 1, 5], [16, 17, 33], block_size=block_size)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 100])
def test_sliding_window(window, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", 5)
    check([1, 1, 1, 13, 2], [30, 4, 5, 21, 9], window=window)


@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_behind_the_window_are_not_read(sinks, monkeypatch):
    """A CPU's kernels do not read them, whatever they hold; kernels for prompts on GPUs read whole tiles."""
    monkeypatch.setattr(cache_groups, "TILE", 1)
    for window in (1, 5, 16):
        check([1, 1, 1, 13, 2], [90, 14, 5, 61, 29], window=window, sinks=sinks)


def test_tiles_are_not_wider_than_blocks_are_kept_behind_a_window():
    assert max(prefill.KEYS) <= cache_groups.TILE


@pytest.mark.parametrize("window, cap", [(0, 0.0), (5, 0.0), (0, 1.5)])
def test_sinks(window, cap, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", 5)
    check([1, 1, 1, 13, 2, 5], [30, 4, 5, 21, 9, 5], heads=6, window=window, cap=cap, sinks=True)
    check([1, 1], [30, 4], window=window, cap=cap, sinks=True)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("cap", [0.02, 1.5, 50.0])
def test_soft_cap(cap, window, monkeypatch):
    monkeypatch.setattr(reference, "QUERY_CHUNK", 5)
    check([1, 1, 1, 13, 2, 5], [30, 4, 5, 21, 9, 5], heads=6, window=window, cap=cap)
    check([1, 1], [30, 4], window=window, cap=cap)


def test_soft_cap_against_its_formula():
    rows = make_rows([3], [3], 4, 2)
    q, k, v = torch.randn(3, 3, 2, 8) * 9
    keys, values = torch.zeros(2, 2, 4, 2, 8)
    keys[1, :3], values[1, :3] = k, v
    s = 5 * torch.tanh(torch.einsum("thd,shd->hts", q, k) * 0.25 / 5)
    s = s.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    want = torch.einsum("hts,shd->thd", s.softmax(-1), v).flatten(1)
    torch.testing.assert_close(paged_attention(q, keys, values, rows, AttentionParams(0.25, softcap=5.0)), want)
    assert not torch.allclose(paged_attention(q, keys, values, rows, AttentionParams(0.25)), want, atol=0.1)


def test_which_prompts_suit_cudnn():
    rows = make_rows([4096], [4096], 16, 300)
    q, keys = (torch.empty(*shape, 2, 64, dtype=torch.bfloat16, device="meta") for shape in ((4096,), (300, 16)))

    def supports(rows=rows, **params):
        return cudnn.supports(Part(q, keys, keys, rows, AttentionParams(0.1, **params), 0, len(rows.kv_lens), q))

    assert supports() and not supports(window=100) and not supports(softcap=50.0) and not supports(sinks=q[0, :, 0])
    assert not supports(make_rows([4096], [4097], 16, 300)), "a chunk"
    mixed = make_rows([2048, 2, 9, 2100, 3000, 5, 2047], [2048, 2, 9, 2100, 3000, 5, 2047], 16, 900)
    assert supports(mixed)
    found = cudnn.plan(Part(q, keys, keys, mixed, AttentionParams(0.1), 0, 7, q))
    assert found == [(True, 0, 1), (False, 1, 3), (True, 3, 4), (True, 4, 5), (False, 5, 7)]


def test_the_first_candidate_that_takes_a_part_computes_it(monkeypatch):
    rows = make_rows([1, 1, 5], [3, 4, 9], 4, 8)
    q, keys = torch.randn(7, 4, 8), torch.randn(8, 4, 2, 8)
    parts = []

    def made(wanted):
        return Candidate("", "", "", lambda part: part.decodes == wanted, lambda part: parts.append(part[5:7]))

    monkeypatch.setitem(attention.CANDIDATES, "cpu", (made(True), made(False), reference.CANDIDATE))
    paged_attention(q, keys, keys, rows, AttentionParams(1.0))
    assert parts == [(0, 2), (2, 3)]
    monkeypatch.setitem(attention.CANDIDATES, "cpu", (made(True),))
    with pytest.raises(FatalError) as caught:
        paged_attention(q, keys, torch.randn(8, 4, 2, 6), rows, AttentionParams(1.0))
    assert caught.value.code == MODEL and "head: use --device" in str(caught.value)


@pytest.mark.parametrize("window, cap", [(0, 0.0), (5, 0.0), (0, 1.5)])
def test_values_may_be_of_another_size_than_keys(window, cap):
    """Sizes of multi-head latent attention whose latent is expanded."""
    rows = make_rows([1, 1, 6], [3, 14, 9], 4, 12)
    keys, padded = make_caches(rows, 4, 12, 2, 12, torch.float32)
    q, params = torch.randn(8, 4, 12), AttentionParams(0.3, window, cap)
    want = plain(q, keys, padded, rows, params).view(8, 4, 12)[..., :7].flatten(1)
    out = paged_attention(q, keys, padded[..., :7].contiguous(), rows, params)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_caches_accumulate_in_f32(dtype, bound):
    check([1, 1, 9], [50, 3, 31], dtype=dtype, bound=bound)


def test_random_shapes(monkeypatch):
    """Small limits, so that groups and pieces split in every way."""
    monkeypatch.setattr(reference, "SLACK", 4)
    monkeypatch.setattr(reference, "QUERY_CHUNK", 6)
    draw = random.Random(7)
    for _ in range(15):
        monkeypatch.setattr(reference, "GATHER_BYTES", draw.choice([500, 3000, 20000]))
        decodes = [1] * draw.randint(0, 6)
        query_lens = decodes + [draw.randint(2, 20) for _ in range(draw.randint(0, 3))]
        kv_lens = [n + draw.choice([0, draw.randint(0, 40)]) for n in query_lens]
        kv_heads = draw.randint(1, 3)
        window, cap = draw.choice([0, 0, 9]), draw.choice([0.0, 0.0, 1.5])
        heads = kv_heads * draw.randint(1, 3)
        check(query_lens, kv_lens, heads, kv_heads, draw.choice([2, 5, 16]), window=window, cap=cap)


@pytest.mark.parametrize("query_lens, kv_lens", [([1, 1, 1], [1, 9, 30]), ([1, 4, 3], [12, 4, 20])])
def test_write_and_attend(query_lens, kv_lens):
    rows = make_rows(query_lens, kv_lens, 4, 20)
    cache = make_caches(rows, 4, 20, 2, 8, torch.float32)
    q, k, v = torch.randn(sum(query_lens), 8, 8).split([4, 2, 2], 1)
    cos_sin = CosSin(*torch.rand(2, len(q), 1, 8))
    norms = QKNorm(*torch.rand(2, 8), 1e-6)
    rows.slots = torch.cat(
        [
            table[positions // 4].long() * 4 + positions % 4
            for table, count, length in zip(rows.block_tables, query_lens, kv_lens, strict=True)
            for positions in [torch.arange(length - count, length)]
        ]
    )
    theirs, new = [c.clone() for c in cache], CurrentKV(k, v, cos_sin, norms, rows.slots)
    rotated = rope_and_store_kv(q.clone(), new._replace(k=k.clone()), (theirs[0], theirs[1]))
    want = paged_attention(rotated, theirs[0], theirs[1], rows, AttentionParams(0.3))
    assert torch.equal(store_and_attend(q, new, cache, rows, AttentionParams(0.3)), want)
    for mine, other in zip(cache, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


def test_which_steps_suit_one_kernel():
    rows = make_rows([1, 1, 1], [3, 4, 5], 4, 8)
    whole, part = (CosSin(*torch.zeros(2, 3, 1, r)) for r in (8, 6))
    q, k, v = torch.zeros(3, 9, 8)[:, :8].split([4, 2, 2], 1)
    keys = torch.zeros(8, 4, 2, 8)

    def supports(q=q, k=k, cos_sin=whole, keys=keys, rows=rows):
        return attention.supports_one_kernel(q, CurrentKV(k, v, cos_sin, None, q), (keys, keys), rows)

    assert supports()
    assert not supports(cos_sin=part)  # some dimensions are not rotated
    assert not supports(keys=keys.bfloat16()) and not supports(k=torch.zeros(3, 8, 2).mT)
    assert not supports(q=torch.zeros(3, 8, 8)[:, ::2])
    assert not supports(rows=make_rows([1, 1, 2], [3, 4, 5], 4, 8))
    assert not supports(q=q[:0], rows=make_rows([], [], 4, 8))


@pytest.mark.long
@pytest.mark.timeout(330)  # a process that other processes may slow down
def test_decode_kernel_in_the_interpreter():
    interpret("attention.decoding")


def test_tokens_of_prompts_do_not_count_as_decoding_sequences(monkeypatch):
    """decode.cu has a limit of sequences: a step has as many tokens of prompts beside them as it likes."""
    monkeypatch.setattr(decode, "boxed", lambda *_: True)
    q, keys = torch.zeros(decode.SEQUENCES + 9, 4, 64), torch.zeros(3, 16, 2, 64)
    rows = make_rows([1, 1, len(q) - 2], [3, 5, len(q)], 16, 100)
    for stop, taken in ((2, True), (len(q), False)):
        rows.num_decodes = stop
        part = Part(q, keys, keys, rows, AttentionParams(1.0), 0, stop, q)
        assert decode.supports(part) is taken
