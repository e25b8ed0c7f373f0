"""Multi-head latent attention against the plainest computation: all keys and values expanded, one token at a time."""

import pytest
import torch
from phalanx.kernels.attention import mla
from phalanx.kernels.attention.backend import AttentionParams

from ..interpreter import interpret
from .latents import SIZES, Sizes, latent_cache
from .test_attention import make_rows

PARAMS = AttentionParams(0.2)


def plain(q, cache, up, rows, sizes):
    out, t = torch.empty(len(q), sizes.heads, sizes.value, dtype=torch.float64), 0
    for i, (count, length) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        table = rows.block_tables[i].tolist()
        slots = [table[j // sizes.block_size] * sizes.block_size + j % sizes.block_size for j in range(length)]
        kept = cache.view(-1, cache.shape[2])[slots].double()
        kv = torch.einsum("hol,sl->sho", up.double(), kept[:, : sizes.latent])
        shared = kept[:, None, sizes.latent :].expand(-1, sizes.heads, -1)
        keys = torch.cat((kv[..., : sizes.nope], shared), 2)
        for p in range(length - count, length):
            scores = torch.einsum("hd,shd->hs", q[t].double(), keys[: p + 1]) * PARAMS.scale
            out[t] = torch.einsum("hs,shv->hv", scores.softmax(-1), kv[: p + 1, :, sizes.nope :])
            t += 1
    return out.flatten(1)


def check(query_lens, kv_lens, sizes=SIZES[0], dtype=torch.float32, bound=3e-6):
    torch.manual_seed(len(kv_lens))
    blocks = sum(-(-n // sizes.block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, sizes.block_size, blocks)
    cache = latent_cache(rows, sizes, blocks, dtype)
    up = (torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.latent) * sizes.latent**-0.5).to(dtype)
    q = torch.randn(sum(query_lens), sizes.heads, sizes.nope + sizes.rope).to(dtype)
    before, want = q.clone(), plain(q, cache, up, rows, sizes)
    for _ in range(2):  # the second time from what the first layer left in scratch
        out = mla.latent_attention(q, cache, up, rows, PARAMS)
        assert out.dtype == dtype and torch.equal(q, before)
        torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)
    return rows


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("expanded", [False, True])
def test_both_ways(sizes, expanded, monkeypatch):
    monkeypatch.setattr(mla, "expands", lambda *_: expanded)
    check([1, 1, 1], [9, 2, 30], sizes)
    check([1, 1, 7, 12, 1], [9, 2, 7, 40, 5], sizes)
    rows = check([6], [40], sizes)
    assert ("mla contexts" in rows.scratch) == expanded


def test_few_heads_and_few_sequences_at_once(monkeypatch):
    """Heads and sequences at once are as many as memory is kept for."""
    monkeypatch.setattr(mla, "expands", lambda *_: True)
    monkeypatch.setattr(mla, "EXPANDED_BYTES", 40 * 28 * 4 * 3)
    monkeypatch.setattr(mla, "CONTEXT", 30)
    rows = check([1, 7, 12, 9, 3], [9, 7, 40, 9, 20])
    assert [(one.first, one.kv_lens) for one in rows.scratch["mla contexts"]] == [(1, [7]), (8, [40]), (20, [9, 20])]


def test_narrow_latents():
    check([1, 1, 9], [50, 3, 31], dtype=torch.bfloat16, bound=2e-2)


def test_what_takes_fewer_multiply_adds():
    """In DeepSeek's sizes: prompts and long chunks are expanded, short ones on a long context are not."""
    up = torch.empty(16, 256, 512, device="meta")

    def expands(query_lens, kv_lens):
        return mla.expands(make_rows(query_lens, kv_lens, 16, 2000), 64, up)

    assert expands([400], [400]) and expands([1, 1, 500, 300], [9, 9, 20000, 300]) and expands([2], [2])
    assert not expands([100], [20000]) and not expands([1, 4, 4], [5000, 4000, 4])


@pytest.mark.long
@pytest.mark.timeout(330)  # a process that other processes may slow down
def test_kernels_in_the_interpreter():
    interpret("attention.latents")


def test_sizes_of_one_head():
    check([1, 5], [4, 9], Sizes(heads=1))
