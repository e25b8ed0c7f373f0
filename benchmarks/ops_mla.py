"""Multi-head latent attention next to the least time its bytes or its arithmetic take.

    python benchmarks/ops_mla.py [--heads 16] [--only decode] [--json FILE]

Sizes are DeepSeek's, heads a rank's: 16 of V2-Lite, or of V3 on eight GPUs. The byte limit of decoding counts each
token's latent once, and the weights that are absorbed; the arithmetic limit of prompts the multiply-adds of expanded
keys and values. As in ops.py, calls rotate over copies of the cache that do not fit in the GPU's cache together.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from phalanx.benchmarks.ops_table import Table, copies, make_rows, randn
from phalanx.benchmarks.timing import Call
from phalanx.kernels.attention import (
    indexer,
    indexer_triton,
    mla,
    mla_decode,
    mla_store_triton,
    mla_triton,
    topk_select,
)
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.attention.backend import Selection
from phalanx.kernels.rope import fp8_cache
from phalanx.kernels.rope.rope import CosSin
from torch import Tensor

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
WIDTH = LATENT + ROPE
LONGEST = 32768  # tokens of a sequence, for which a graph fixes the most KV splits
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048  # DeepSeek-V3.2's
PARAMS = AttentionParams((NOPE + ROPE) ** -0.5)
DECODES = [(batch, length) for length in (256, 1024, 8192, 32768) for batch in (1, 4, 16, 64)] + [(256, 256)]
PROMPTS = (1, 1024, 0), (1, 8192, 0), (16, 1024, 0), (1, 2048, 30720), (1, 64, 32704)  # sequences, new tokens, others


def decode(table: Table, heads: int, batch: int, length: int) -> None:
    """Each kernel alone, in a graph's splits; those before and after it; and all of them, which store the tokens."""
    rows, blocks = make_rows([1] * batch, [length] * batch)
    bytes_ = batch * length * WIDTH * 2
    caches = [randn(blocks, 16, WIDTH) for _ in range(min(4, copies(bytes_)))]
    q, out = randn(batch, heads, WIDTH), torch.empty(batch, heads, LATENT, device="cuda", dtype=torch.bfloat16)
    new, up = make_new(heads, batch), randn(heads, NOPE + VALUE, LATENT)
    last = rows.block_tables[:, (length - 1) // 16].long()
    rows.slots, rows.kv_lens = last * 16 + (length - 1) % 16, [LONGEST] * batch
    programs, num_sms = batch * -(-heads // mla_triton.GROUP), torch.cuda.get_device_properties(0).multi_processor_count
    rest = rows.block_tables, rows.lengths, out, PARAMS.scale
    splits = mla_triton.choose_kv_splits(programs, LONGEST, num_sms)
    splits = mla_decode.choose_kv_splits(programs, LONGEST, num_sms * mla_decode.choose_tiles(q.device, False).per_sm)
    versions: dict[str, list[Call]] = {
        f"Triton, tiles of {tile}": [partial(mla_triton.decode, q, c, LATENT, *rest, splits, tile=tile) for c in caches]
        for tile in (32, 64)
    }
    for fill in (0, 1, 2, 4):
        name = f"CUDA, {fill} splits" if fill else "CUDA"
        versions[name] = [partial(mla_decode.decode, q, c, *rest, splits, fill) for c in caches]
    versions["absorb"] = [
        partial(mla_store_triton.absorb_and_store_latents, *new, c, rows.slots, up, torch.empty_like(q)) for c in caches
    ]
    versions["values"] = [partial(mla_triton.values, out, up, NOPE)]
    whole = [partial(mla.store_and_attend, *new, c, up, rows, PARAMS) for c in caches]
    for name, least in (("Triton", batch + 1), ("CUDA", 1)):
        versions[f"all by {name}"] = [partial(chosen, least, one) for one in whole]
    even = torch.full((blocks, 1, 2, 16), 127, dtype=torch.uint8, device="cuda")  # scales of 1
    versions["all, e4m3 cache"] = [
        partial(mla.store_and_attend, *new, c.to(fp8_cache.E4M3), up, rows, PARAMS, even) for c in caches
    ]
    table.add(f"mla decode {batch} x {length}", bytes_ + up.numel() * 2, versions)


def chosen(least: int, call: Call) -> None:
    """The call, with this for LEAST_SEQUENCES of mla_decode.py."""
    before = mla_decode.LEAST_SEQUENCES
    mla_decode.LEAST_SEQUENCES = least
    try:
        call()
    finally:
        mla_decode.LEAST_SEQUENCES = before


def prompt(table: Table, heads: int, batch: int, count: int, before: int) -> None:
    """New tokens of sequences of which others are cached: as it is chosen, expanded and absorbed."""
    rows, blocks = make_rows([count] * batch, [count + before] * batch)
    cache, up = randn(blocks, 16, WIDTH), randn(heads, NOPE + VALUE, LATENT)
    q = randn(batch * count, heads, NOPE + ROPE)
    out = q.new_empty(len(q), heads, VALUE)

    def expanded() -> None:
        for context in mla.contexts(rows, 16):
            mla.attend_expanded(q, cache, up, context, PARAMS, out)

    def absorbed() -> None:
        mla.attend_absorbed(q, cache, up, rows, PARAMS, [0, batch], out)

    versions: dict[str, list[Call]] = {
        "ours": [partial(mla.latent_attention, q, cache, up, rows, PARAMS)],
        "expanded": [expanded],
        "absorbed": [absorbed],
    }
    pairs = batch * count * (before + count / 2)
    flops = 2 * heads * (pairs * (NOPE + ROPE + VALUE) + batch * (count + before) * LATENT * (NOPE + VALUE))
    table.add(f"mla prompt {batch} x {count} after {before}", 0, versions, flops, least=2)


def make_new(heads: int, tokens: int) -> tuple[Tensor, Tensor, mla.LatentNorm, CosSin]:
    """A step's queries and latents, and how these are normed and rotated."""
    x = randn(tokens, heads * (NOPE + ROPE) + WIDTH)
    q, latents = x.split([heads * (NOPE + ROPE), WIDTH], 1)
    cos, sin = torch.rand(2, tokens, 1, ROPE, device="cuda")
    return q.view(tokens, heads, -1), latents, mla.LatentNorm(randn(LATENT), 1e-6), CosSin(cos, sin, interleaved=True)


def store(table: Table, heads: int, tokens: int) -> None:
    """Latent attention of steps with prompts."""
    cache, slots = randn(-(-tokens // 16), 16, WIDTH), torch.randperm(tokens, device="cuda")
    arguments = *make_new(heads, tokens), cache, slots
    versions: dict[str, list[Call]] = {
        "ours": [partial(mla.rope_and_store_latents, *arguments)],
        "reference": [partial(mla.rope_and_store_latents_reference, *arguments)],
    }
    table.add(f"mla store {tokens}", 2 * tokens * 2 * (heads * ROPE + WIDTH), versions)


def sparse(table: Table, heads: int, batch: int, length: int) -> None:
    """A decode step whose tokens an indexer chooses, next to dense attention: all of either, and their parts."""
    rows, blocks = make_rows([1] * batch, [length] * batch)
    caches = [randn(blocks, 16, WIDTH) for _ in range(2)]
    keys = [randn(blocks, 16, INDEX_DIM) for _ in range(copies(batch * length * INDEX_DIM * 2))]
    index = randn(batch, INDEX_HEADS, INDEX_DIM)
    q, up, weights = randn(batch, heads, NOPE + ROPE), randn(heads, NOPE + VALUE, LATENT), randn(batch, INDEX_HEADS)

    def choose(keys: Tensor) -> Selection:
        found = indexer.select(index, weights, keys, rows, TOPK, ROPE)
        assert found is not None
        return found

    def both(cache: Tensor, keys: Tensor) -> Tensor:
        return mla.sparse_latent_attention(q, cache, up, choose(keys), PARAMS)

    selection, (piece,) = choose(keys[0]), indexer.pieces(rows, 4)
    versions: dict[str, list[Call]] = {
        "dense": [partial(mla.latent_attention, q, c, up, rows, PARAMS) for c in caches],
        "sparse": [partial(both, caches[i % 2], k) for i, k in enumerate(keys)],
        "choice": [partial(choose, k) for k in keys],
        "chosen": [partial(mla.sparse_latent_attention, q, c, up, selection, PARAMS) for c in caches],
    }
    score = partial(indexer_triton.score, index, weights)
    scores = score(keys[0], piece, ROPE, TOPK)
    for tile, programs, stages in ((0, 0, 3), (64, 2, 3), (64, 3, 3), (64, 8, 3), (128, 2, 2), (128, 2, 3), (32, 6, 3)):
        each = max(1, programs * 132 // batch) if programs else 0
        name = f"scores, tiles of {tile}, {programs} programs, {stages} stages" if tile else "scores"
        versions[name] = [partial(score, k, piece, ROPE, TOPK, None, tile, each, stages) for k in keys]
    slots, counts = selection.block_tables, selection.lengths
    select = partial(topk_select.topk_select, scores, rows.block_tables, rows.lengths, slots, counts, 1, 16)
    versions["select"] = [select]
    versions |= {f"select, {n} blocks": [partial(select, blocks=n)] for n in (1, 2, 4, 8)}
    queries, out = randn(batch, heads, WIDTH), torch.empty(batch, heads, LATENT, device="cuda", dtype=torch.bfloat16)
    versions["absorb"] = [partial(mla_store_triton.absorb_rotated, q, up, queries)]
    versions["values"] = [partial(mla_triton.values, out, up, NOPE)]
    listed = slots, counts, out, PARAMS.scale
    for most in (8, 16, 32):
        versions[f"attend, Triton, {most} splits"] = [
            partial(mla_triton.decode, queries, c, LATENT, *listed, most, table_size=1) for c in caches
        ]
    most = mla_decode.choose_kv_splits(batch, TOPK, 264)
    for fill in (0, 8, 16, 32):
        versions[f"attend, CUDA, {fill} splits" if fill else "attend, CUDA"] = [
            partial(mla_decode.decode, queries, c.view(-1, 1, WIDTH), *listed, most, fill) for c in caches
        ]
    table.add(f"mla sparse {batch} x {length}", batch * 2 * (length * INDEX_DIM + TOPK * WIDTH), versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="of one rank")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    table = Table(asked.only)
    with torch.no_grad():
        for tokens in (64, 8192):
            store(table, asked.heads, tokens)
        for batch, length in DECODES:
            decode(table, asked.heads, batch, length)
        for batch in (1, 4, 16, 64):
            sparse(table, asked.heads, batch, 65536)
        for batch, count, before in PROMPTS:
            prompt(table, asked.heads, batch, count, before)
    table.append(asked.json, heads=asked.heads)


if __name__ == "__main__":
    main()
