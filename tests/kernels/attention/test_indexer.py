"""The lightning indexer's choice against its definition, one token at a time; its kernels are Triton's."""

import pytest
import torch
from phalanx.kernels.attention import indexer, mla
from phalanx.kernels.attention.backend import AttentionParams

from ..interpreter import interpret
from ..test_compile import Recorder, compile_launch
from .indexing import DEEPSEEK, INDEXES, STEPS, listed, make_step
from .latents import Sizes, latent_cache


def definition(q, weights, cache, rows, topk, stride=1):
    """The slots of each token's choice. stride: tokens of a key."""
    keys, t = cache.view(-1, cache.shape[2]), 0
    size = cache.shape[1]
    for i, (count, length) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        slots = [int(rows.block_tables[i, j // size]) * size + j % size for j in range(length // stride)]
        for seen in [at // stride for at in range(length - count + 1, length + 1)]:
            scores = ((q[t].double() @ keys[slots[:seen]].double().T).relu() * weights[t, :, None].double()).sum(0)
            best = scores.sort(descending=True, stable=True).indices[:topk].sort().values.tolist()
            yield [slots[j] for j in best]
            t += 1


@pytest.mark.parametrize("sizes", INDEXES)
@pytest.mark.parametrize("step", STEPS)
def test_choice(sizes, step, monkeypatch):
    torch.manual_seed(0)
    rows, q, weights, cache, _ = make_step(sizes, step, torch.float32, False)
    want = list(definition(q, weights, cache, rows, sizes.topk))
    assert listed(indexer.select(q, weights, cache, rows, sizes.topk, sizes.rope)) == want
    monkeypatch.setattr(indexer, "SCORES_BYTES", 4 * sizes.heads * 200)  # a few tokens at once
    rows.scratch = {}
    found = indexer.select(q, weights, cache, rows, sizes.topk, sizes.rope)
    assert listed(found) == want and len(rows.scratch["indexer"]) > 2
    kept = found.keep(torch.tensor([len(q) - 1, 0]), [rows.kv_lens[-1], 1])
    assert listed(kept) == [want[-1], want[0]] and kept.kv_lens == [len(want[-1]), 1]


@pytest.mark.parametrize("step", STEPS)
def test_choice_of_windows(step):
    """Keys of windows that have ended; the first tokens see none."""
    torch.manual_seed(0)
    sizes, stride = INDEXES[2], 4
    rows, q, weights, cache, _ = make_step(sizes, step, torch.float32, False)
    rows.kv_lens = [stride * n - n % 3 for n in rows.kv_lens]
    rows.lengths = torch.tensor(rows.kv_lens, dtype=torch.int32)
    found = indexer.select(q, weights, cache, rows, sizes.topk, sizes.rope, stride=stride)
    assert listed(found) == list(definition(q, weights, cache, rows, sizes.topk, stride))
    assert all(n <= bound for n, bound in zip(found.lengths.tolist(), found.kv_lens, strict=True))


@pytest.mark.parametrize("step", STEPS)
def test_tokens_of_chosen_pools(step):
    """The best pools that have ended are listed, and behind them a token's own pool that has not."""
    torch.manual_seed(0)
    sizes, pool, size = INDEXES[2]._replace(block_size=3, topk=4), 4, 12
    rows, q, weights, cache, _ = make_step(sizes, step, torch.float32, False)
    rows.kv_lens = [n + 20 + n % 3 for n in rows.kv_lens]
    blocks = [-(-n // size) for n in rows.kv_lens]
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        tables[i, :count] = torch.randperm(len(cache))[:count]
    rows.block_tables, rows.lengths = tables, torch.tensor(rows.kv_lens, dtype=torch.int32)
    cache = torch.randn(cache.shape)
    chosen = indexer.select(q, weights, cache, rows, sizes.topk, sizes.rope, stride=pool)
    found = indexer.tokens_of_pools(chosen, rows, pool, size)
    lengths = zip(rows.query_lens, rows.kv_lens, strict=True)
    places = [(i, at) for i, (count, length) in enumerate(lengths) for at in range(length - count, length)]
    want = [
        [slot * pool + j for slot in pools for j in range(pool)]
        + [int(tables[i, p // size]) * size + p % size for p in range((at + 1) // pool * pool, at + 1)]
        for pools, (i, at) in zip(listed(chosen), places, strict=True)
    ]
    assert listed(found) == want and found.kv_lens == [len(one) for one in want]


def test_no_choice_where_all_are_read():
    rows, q, weights, cache, _ = make_step(INDEXES[0], STEPS[0], torch.float32, False)
    assert indexer.select(q, weights, cache, rows, max(rows.kv_lens), 8) is None


def test_latents_of_all_tokens(monkeypatch):
    """A choice of all tokens, a few of them at once, attends as without one."""
    torch.manual_seed(0)
    index, sizes = INDEXES[0]._replace(topk=90), Sizes(block_size=4)
    rows, q, weights, cache, _ = make_step(index, STEPS[0], torch.float32, False)
    selection = indexer.select(q, weights, cache, rows, 89, 8)
    latents = latent_cache(rows, sizes, len(cache), torch.float32)
    up, params = 0.2 * torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.latent), AttentionParams(0.2)
    q = torch.randn(len(q), sizes.heads, sizes.nope + sizes.rope)
    want = mla.latent_attention(q, latents, up, rows, params)
    keep = torch.tensor([i for i, count in enumerate(selection.lengths.tolist()) if i != 2])
    for together in (mla.EXPANDED_BYTES, 7 * sizes.heads * (2 * sizes.latent + sizes.rope) * 4):
        monkeypatch.setattr(mla, "EXPANDED_BYTES", together)
        found = mla.sparse_latent_attention(q, latents, up, selection, params)
        torch.testing.assert_close(found[keep], want[keep], atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(330)  # a process that other processes may slow down
def test_kernels_in_the_interpreter():
    interpret("attention.indexing")


KERNELS = "store_kernel", "score_kernel"
CASES = [
    (torch.bfloat16, 90, False), (torch.bfloat16, 90, True), (torch.float16, 80, True), (torch.bfloat16, 100, False),
    (torch.float32, 90, False), (torch.float32, 80, True), (torch.bfloat16, 100, True),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("dtype, arch, fp8", CASES)
def test_compiles(dtype, arch, fp8, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.attention import indexer_triton
    from phalanx.kernels.rope.rope import CosSin

    kernels = {name: getattr(indexer_triton, name) for name in KERNELS}
    launches = {name: Recorder() for name in KERNELS}
    for name, recorder in launches.items():
        monkeypatch.setattr(indexer_triton, name, recorder)
    monkeypatch.setattr(indexer_triton.topk_select, "topk_select", lambda *_: None)
    rows, q, weights, cache, scales = make_step(DEEPSEEK, (1, [1, 1], [301, 5]), dtype, fp8)
    norm = indexer.IndexNorm(q[0, 0], q[0, 0], 1e-6)
    slots, turn = torch.zeros(2, dtype=torch.int64), CosSin(*torch.zeros(2, 2, 1, 64))
    indexer_triton.rope_and_store_index(q, q[:, 0], norm, turn, cache, slots, scales)
    (piece,) = indexer.pieces(rows, 4)
    chosen = torch.zeros(2, 2048, dtype=torch.int32)
    indexer_triton.choose(q, weights, cache, piece, 64, chosen, chosen[:, 0], scales, programs=8)
    for name, recorder in launches.items():
        for args, options in recorder.found:
            compiled = compile_launch(kernels[name], args, options, arch)
            assert compiled.metadata.shared <= (227 if arch >= 90 else 99) << 10, name
