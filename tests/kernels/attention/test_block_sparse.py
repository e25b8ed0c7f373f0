"""Attention to the blocks that each key head chooses against its definition, one token at a time."""

import pytest
import torch
from phalanx.kernels.attention import block_sparse, indexer
from phalanx.kernels.attention.backend import AttentionParams
from phalanx.kernels.attention.block_sparse import Blocks
from phalanx.kernels.attention.reference import slots_of
from phalanx.kernels.rope import fp8_cache
from phalanx.kernels.rope.rope import KVCache

from .indexing import STEPS
from .latents import Sizes, fp8_latents, latent_cache
from .test_attention import make_caches, make_rows

HEADS, KV_HEADS, DIM, ROTATED, REST, SIZE = 6, 2, 16, 8, 4, 4
CHOICES = Blocks(5, 3, 1), Blocks(4, 4, 2), Blocks(1, 7, 3), Blocks(16, 2, 2)
PARAMS = AttentionParams(0.3)


def make_step(step, dtype=torch.float32):
    query_len, query_lens, kv_lens = step
    blocks, tokens = sum(-(-n // SIZE) for n in kv_lens) + 2, sum(query_lens)
    rows = make_rows(query_lens, kv_lens, SIZE, blocks, query_len=query_len)
    cache = KVCache(*make_caches(rows, SIZE, blocks, KV_HEADS, DIM, dtype))
    index_keys = latent_cache(rows, Sizes(latent=ROTATED, rope=REST, block_size=SIZE), blocks, dtype)
    return rows, torch.randn(tokens, HEADS, DIM), cache, torch.randn(tokens, KV_HEADS, ROTATED + REST), index_keys


def definition(rows, q, cache, index_q, index_keys, blocks):
    """[T, heads, dim], and how many tokens each key head reads."""
    out, counts, t = torch.empty(q.shape, dtype=torch.float64), [], 0
    keys, values, found = (x.flatten(0, 1).double() for x in (cache.keys, cache.values, index_keys))
    for i, (count, length) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        slots = slots_of(rows, i, SIZE)
        for seen in range(length - count + 1, length + 1):
            own = (seen - 1) // blocks.size
            for head in range(KV_HEADS):
                scores = found[slots[:seen]] @ index_q[t, head].double()
                best = [max(part) for part in scores.split(blocks.size)]
                best[max(0, own + 1 - blocks.local) :] = [float("inf")] * min(blocks.local, own + 1)
                chosen = torch.tensor(best).topk(min(blocks.topk, len(best))).indices
                read = slots[:seen][torch.isin(torch.arange(seen) // blocks.size, chosen)]
                group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
                weights = (PARAMS.scale * q[t, group].double() @ keys[read, head].T).softmax(-1)
                out[t, group] = weights @ values[read, head]
                counts.append(len(read))
            t += 1
    return out, counts


@pytest.mark.parametrize("blocks", CHOICES)
@pytest.mark.parametrize("step", STEPS)
def test_attention(blocks, step, monkeypatch):
    """In one piece, and of a few tokens and blocks at once."""
    torch.manual_seed(0)
    rows, q, cache, index_q, index_keys = make_step(step)
    want, counts = definition(rows, q, cache, index_q, index_keys, blocks)
    lengths = [blocks.counts(seen) for seen in indexer.tokens_seen(rows)]
    assert counts == [n for n in lengths for _ in range(KV_HEADS)]
    for room in (indexer.SCORES_BYTES, 3000):
        monkeypatch.setattr(indexer, "SCORES_BYTES", room)
        rows.scratch = {}
        found = block_sparse.block_sparse_attention(q, cache, index_q, index_keys, rows, PARAMS, blocks, ROTATED)
        torch.testing.assert_close(found.view(q.shape).double(), want, atol=1e-5, rtol=1e-5)
    assert len(rows.scratch["indexer"]) > 1


def test_a_cache_in_8_bits():
    torch.manual_seed(0)
    rows, q, cache, index_q, index_keys = make_step(STEPS[0])
    used = torch.cat([slots_of(rows, i, SIZE) for i in range(len(rows.kv_lens))])
    codes = [torch.full(cache.keys.shape, 0x7F, dtype=torch.uint8).view(fp8_cache.E4M3) for _ in range(2)]
    scales = torch.full((len(index_keys), KV_HEADS, 2, SIZE), 255, dtype=torch.uint8)
    plain = KVCache(*(torch.full_like(cache.keys, float("nan")) for _ in range(2)))
    for part in range(2):
        fp8_cache.store(cache[part].flatten(0, 1)[used], codes[part], scales, part, used)
        plain[part].flatten(0, 1)[used] = fp8_cache.gather(codes[part], scales, part, used)
    index_codes, index_scales = fp8_latents(index_keys, ROTATED)
    kept = torch.full_like(index_keys, float("nan"))
    kept.flatten(0, 1)[used] = fp8_cache.gather_latents(index_codes, index_scales, used, ROTATED, torch.float32)
    given = rows, PARAMS, CHOICES[0], ROTATED
    want = block_sparse.block_sparse_attention(q, plain, index_q, kept, *given)
    rows.scratch = {}
    eight = KVCache(*codes, scales)
    found = block_sparse.block_sparse_attention(q, eight, index_q, index_codes, *given, index_scales)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_what_is_read(monkeypatch):
    """Decoding reads the listed tokens' keys and values and no others: these may be anything."""
    torch.manual_seed(0)
    rows, q, cache, index_q, index_keys = make_step((1, [1, 1], [90, 61]))
    blocks, listed = CHOICES[0], []
    tokens_of = block_sparse.tokens_of
    monkeypatch.setattr(block_sparse, "tokens_of", lambda *given: listed.append(tokens_of(*given)) or listed[-1])
    given = index_q, index_keys, rows, PARAMS, blocks, ROTATED
    want = block_sparse.block_sparse_attention(q, cache, *given)
    unread = torch.ones(cache.keys[..., 0].numel(), dtype=torch.bool)
    unread[listed[0].flatten().long()] = False
    assert (~unread).sum() <= 2 * KV_HEADS * blocks.tokens
    for kept in (cache.keys, cache.values):
        kept.view(-1, DIM)[unread] = float("nan")
    assert torch.equal(block_sparse.block_sparse_attention(q, cache, *given), want)
