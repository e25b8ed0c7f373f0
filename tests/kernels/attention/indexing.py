"""Kernels of the lightning indexer against the torch references, where only what may be read is not NaN.

Without a GPU by Triton's interpreter: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.attention.indexing
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from phalanx.kernels.attention import indexer
from phalanx.kernels.attention.backend import AttentionParams, Part, Selection
from phalanx.kernels.attention.reference import run as attend_reference

from .decoding import mend_interpreter
from .latents import NAN, Sizes, fp8_latents, latent_cache, new_slots, norm_and_angles, to
from .test_attention import make_rows


class Index(NamedTuple):
    heads: int = 5
    rope: int = 8
    rest: int = 24
    block_size: int = 4
    topk: int = 20

    @property
    def of_latents(self) -> Sizes:
        """Sizes of latents whose cache has as wide rows, whose first part is the rotated one."""
        return Sizes(latent=self.rope, rope=self.rest, block_size=self.block_size)


DEEPSEEK = Index(64, 64, 64, 16, 300)
INDEXES = (Index(), Index(16, 16, 16, 16, 33), Index(3, 6, 0, 1, 7))
# query_len, and tokens of this step and of the context, of each sequence; the first ones decode.
STEPS = ((1, [1, 1, 1, 7, 40], [30, 2, 90, 7, 75]), (3, [3, 3, 3], [60, 3, 25]), (1, [9], [100]))


def make_step(sizes: Index, step, dtype: torch.dtype, fp8: bool):
    query_len, query_lens, kv_lens = step
    blocks = sum(-(-n // sizes.block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, sizes.block_size, blocks, query_len=query_len)
    cache, scales = latent_cache(rows, sizes.of_latents, blocks, dtype), None
    if fp8:
        cache, scales = fp8_latents(cache, sizes.rope)
    tokens = sum(query_lens)
    q = torch.randn(tokens, sizes.heads, sizes.rope + sizes.rest).to(dtype)
    weights = torch.randn(tokens, 2 * sizes.heads).to(dtype)[:, : sizes.heads]
    return rows, q, weights, cache, scales


def listed(selection: Selection) -> list[list[int]]:
    pairs = zip(selection.block_tables.tolist(), selection.lengths.tolist(), strict=True)
    return [slots[:count] for slots, count in pairs]


def check_store(
    sizes: Index, interleaved: bool, dtype: torch.dtype, bound: float, fp8: bool, device="cpu", bias: bool = True
) -> None:
    """bias: of a layer norm; without one it is an RMS norm."""
    from phalanx.kernels.attention import indexer_triton

    rows, q, _, cache, scales = make_step(sizes, STEPS[0], dtype, fp8)
    slots, dim = new_slots(rows, sizes.block_size), sizes.rope + sizes.rest
    _, turn = norm_and_angles(len(q), Sizes(rope=sizes.rope), dtype, interleaved)
    norm = indexer.IndexNorm((torch.rand(dim) + 0.5).to(dtype), torch.randn(dim).to(dtype) if bias else None, 1e-6)
    k = torch.randn(len(q), dim + 3).to(dtype)[:, :dim]
    mine, my_scales = cache.clone(), None if scales is None else scales.clone()
    want = indexer.rope_and_store_index_reference(q.clone(), k.clone(), norm, turn, cache, slots, scales)
    there = norm._replace(weight=norm.weight.to(device), bias=None if norm.bias is None else norm.bias.to(device))
    turn = turn._replace(cos=turn.cos.to(device), sin=turn.sin.to(device))
    mine, my_scales = mine.to(device), None if my_scales is None else my_scales.to(device)
    found = indexer_triton.rope_and_store_index(
        q.to(device), k.to(device), there, turn, mine, slots.to(device), my_scales
    )
    torch.testing.assert_close(found.cpu(), want, atol=bound, rtol=bound)
    if fp8:
        read = indexer.fp8_cache.gather_latents_reference
        kept = (cache, scales), (mine.cpu(), my_scales.cpu())
        one, other = (read(*each, slots, sizes.rope, torch.float32) for each in kept)
        torch.testing.assert_close(one, other, atol=0.2, rtol=0.13)  # a code further where a sum differs
    else:
        torch.testing.assert_close(mine.cpu(), cache, atol=bound, rtol=bound, equal_nan=True)


def check_choice(sizes: Index, step, dtype: torch.dtype, fp8: bool, device: str = "cpu", **how: int) -> None:
    """Scores whose order rounding cannot change: the least chosen one is further from the next than that."""
    from phalanx.kernels.attention import indexer_triton

    rows, q, weights, cache, scales = make_step(sizes, step, dtype, fp8)
    want = indexer.select(q, weights, cache, rows, sizes.topk, sizes.rope, scales)
    assert want is not None
    there = to(rows, device)
    there.scratch = {}
    slots = torch.full(want.block_tables.shape, -1, dtype=torch.int32, device=device)
    counts = torch.full((len(q),), -1, dtype=torch.int32, device=device)
    moved = (x.to(device) for x in (q, weights, cache))
    q, weights, cache = moved
    weights = torch.cat((weights, weights), 1)[:, : sizes.heads]
    for piece in indexer.pieces(there, 4):
        some = slice(piece.start, piece.stop)
        indexer_triton.choose(
            q[some], weights[some], cache, piece, sizes.rope, slots[some], counts[some],
            None if scales is None else scales.to(device), **how,
        )  # fmt: skip
    assert counts.tolist() == want.lengths.tolist()
    found = listed(Selection(slots.cpu(), counts.cpu(), want.kv_lens))
    for mine, other in zip(found, listed(want), strict=True):
        if dtype == torch.float32:
            assert mine == other
        assert len(set(mine) & set(other)) >= 0.95 * len(other) and len(set(mine)) == len(mine)


def check_topk(select: Callable[..., object], device: str) -> None:
    """Equal scores, of either sign of zero, and NaNs, which count as zeros: the first ones are chosen."""

    def chosen(values: list[float], topk: int) -> list[int]:
        scores = torch.tensor([values], device=device)
        slots, counts = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((1, topk), (1,)))
        seen = torch.tensor([len(values)], dtype=torch.int32, device=device)
        tables = torch.arange(100, 100 + len(values), dtype=torch.int32, device=device)[None]
        select(scores, tables, seen, slots, counts, 1, 1)
        assert counts.item() == topk
        want = indexer.best_positions(scores.cpu(), seen.cpu()[:, None], topk)[0].tolist()
        found = [slot - 100 for slot in slots[0].tolist()]
        assert found == want
        return found

    assert chosen([0.0, -0.0, 1.0, 0.0, -1.0, -0.0, 0.0], 4) == [0, 1, 2, 3]
    assert chosen([-2.0, -1.0, NAN, -3.0, 0.0, -1.0, -1e-40], 3) == [2, 4, 6]
    assert chosen([3.0, 3.5, 3.25, -7.0, float("inf"), 3.25, -float("inf")], 3) == [1, 2, 4]
    for size, topk in ((5000, 2048), (12289, 700), (4097, 4096)):
        chosen(torch.randn(size).tolist(), topk)
        chosen(torch.randint(-3, 4, (size,)).float().tolist(), topk)  # many are equal


def check_attention(dtype: torch.dtype, bound: float, fp8: bool, device: str = "cpu") -> None:
    """Latent attention to listed tokens, whose table's entries are not blocks."""
    from phalanx.kernels.attention import mla_triton

    sizes = Sizes(20, 16, 16, 16, 32, 4)
    rows = make_rows([1, 1], [30, 50], sizes.block_size, 30)
    cache, scales = latent_cache(rows, sizes, 30, dtype), None
    slots = torch.cat([new_slots(make_rows([n], [n], 4, 30), 4) for n in (30, 50)])  # for their count alone
    used = torch.arange(30 * 4)[~cache.view(-1, cache.shape[2]).isnan().any(1)]
    if fp8:
        cache, scales = fp8_latents(cache, sizes.latent)
    table = used[torch.randint(len(used), (5, len(slots) // 2))].int()
    counts = torch.tensor([1, 40, 17, 33, 16], dtype=torch.int32)
    chosen = Selection(table, counts, counts.tolist())
    q = torch.randn(5, sizes.heads, sizes.latent + sizes.rope).to(dtype)
    params, keys = AttentionParams(0.2), cache[:, :, None]
    want, out = torch.full((2, 5, sizes.heads, sizes.latent), NAN, dtype=dtype)
    attend_reference(Part(q, keys, keys[..., : sizes.latent], chosen, params, 0, 5, want, scales))
    out, scales = out.to(device), None if scales is None else scales.to(device)
    options = dict(tile=16, split=16, fill=2) if device == "cpu" else {}
    for most in (1, 4):
        mla_triton.decode(
            q.to(device), cache.to(device), sizes.latent, table.to(device), counts.to(device), out, 0.2, most, scales,
            table_size=1, **options,
        )  # fmt: skip
        torch.testing.assert_close(out.cpu(), want, atol=bound, rtol=bound)


def topk_reference(scores, tables, seen, slots, counts, query_len: int, size: int) -> None:
    """topk_select."""
    topk = slots.shape[1]
    torch.clamp(seen, max=topk, out=counts)
    for i, n in enumerate(seen.tolist()):
        at = torch.arange(n)
        if n > topk:
            at = indexer.best_positions(scores[i : i + 1, :n], seen[i : i + 1, None], topk)[0]
        slots[i, : len(at)] = tables[i // query_len, at // size] * size + (at % size).int()


def main() -> None:
    from phalanx.kernels.attention import indexer_triton

    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    indexer_triton.topk_select = SimpleNamespace(topk_select=topk_reference)  # which is no kernel of Triton's
    for i, sizes in enumerate(INDEXES):
        dtype, bound = [(torch.float32, 3e-6), (torch.float16, 3e-3)][i % 2]
        check_store(sizes, bool(i % 2), dtype, bound, fp8=False, bias=i < 2)
        for step in STEPS if i == 0 else STEPS[:1]:
            check_choice(sizes, step, dtype, False, tile=16, programs=2)
    for fp8 in (False, True):
        check_store(INDEXES[1], False, torch.float32, 3e-6, fp8, bias=not fp8)
        for sizes in INDEXES[1:]:
            check_choice(sizes, STEPS[1], torch.float32, fp8, tile=16, programs=3)
        check_attention(torch.float32, 3e-6, fp8)


if __name__ == "__main__":
    main()
