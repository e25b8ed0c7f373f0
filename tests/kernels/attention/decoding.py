"""Decode kernels and prompts against the torch references, where only what may be read is not NaN.

Without a GPU by Triton's interpreter: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.attention.decoding
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import decode, kv_boxes, prefill
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.attention.backend import Part, Selection
from phalanx.kernels.attention.reference import paged_attention_reference
from phalanx.kernels.rope import fp8_cache
from phalanx.kernels.rope.rope import CosSin, CurrentKV, KVCache, QKNorm, rope_and_store_kv_reference
from torch import Tensor

from .test_attention import make_caches, make_rows

NAN = float("nan")


class Case(NamedTuple):
    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int = 0
    cap: float = 0.0
    normed: bool = False
    splits: int = 1
    part: int = 32
    tile: int = 16
    sinks: bool = False
    fp8: bool = False
    unwritten: tuple[int, ...] = ()  # rows whose slot is negative though they have tokens


CASES = [
    Case([1]),
    Case([0, 1, 16, 17, 31, 0], normed=True),
    Case([0, 0], splits=4),
    # Parts: none, one of the newest token alone, one, two, four, and what is left over.
    Case([0, 1, 20, 33, 70, 129, 300, 49], splits=4, normed=True, unwritten=(1, 4)),
    Case([300, 1, 97], 2, 2, 80, splits=8, unwritten=(0,)),
    Case([200, 65], 16, 1, 128, splits=4, normed=True),
    Case([40, 7], 3, 1, 96, block_size=5, splits=2),
    Case([100, 3], 7, 1, 112, splits=2, normed=True),
    Case([66, 129], 2, 1, 256, splits=4, tile=32),
    Case([1, 2, 90, 200], dim=40, window=33, splits=4),
    Case([1, 2, 90, 200], dim=10),
    Case([5, 24, 25, 26, 200], window=25, splits=2, normed=True),
    Case([400, 90, 150, 0], 6, 3, window=130, splits=4, block_size=8, unwritten=(2,)),
    Case([66, 1], 4, 1, 128, window=40, cap=0.02),  # exponentials overflow
    Case([1, 70, 0, 33], cap=1.5, splits=4, normed=True),
    Case([200, 9], cap=10.0, splits=2),
    Case([0, 1, 20, 33, 70, 129, 300, 49], splits=4, sinks=True, unwritten=(1, 4)),
    Case([1, 2, 90, 200], 16, 2, window=33, splits=4, sinks=True),
    Case([40, 7], 3, 1, 96, block_size=5, cap=1.5, sinks=True),
    Case([0, 1, 20, 33, 70, 129, 300, 49], splits=4, normed=True, fp8=True, unwritten=(1, 4)),
    Case([40, 7], 3, 1, 96, block_size=5, splits=2, window=33, cap=1.5, sinks=True, fp8=True),
    Case([66, 1], 4, 4, 128, fp8=True),
]


# Several tokens of each sequence: parts that some of them see nothing of, windows that begin in the middle of one.
SEVERAL = [
    Case([0, 1, 20, 33, 70, 129], splits=4),
    Case([140, 9], 5, 1, 80, block_size=5, splits=2, sinks=True),
    Case([1, 40, 90, 140], 8, 2, 34, window=33, splits=4, cap=1.5),
    Case([66, 34, 0, 140], 6, 3, 96, window=9, splits=4, sinks=True),
    Case([33, 70, 17], 16, 2, 64, splits=4, fp8=True),
    Case([0, 0], 4, 1, 16, splits=2),
]


def random_cases(count: int) -> list[Case]:
    draw = random.Random(5)
    cases = []
    for _ in range(count):
        lengths = [draw.choice([0, 1, draw.randint(1, 40), draw.randint(1, 300)]) for _ in range(draw.randint(1, 6))]
        kv_heads = draw.randint(1, 3)
        cases.append(
            Case(
                lengths, kv_heads * draw.choice([1, 2, 4, 5]), kv_heads, draw.choice([16, 34, 64, 96, 128]),
                draw.choice([16, 16, 1, 7, 64]), draw.choice([0, 0, 9, 64]), draw.choice([0.0, 0.0, 1.5]),
                draw.random() < 0.5, draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 100]), draw.choice([16, 32]),
                draw.random() < 0.3, tuple(i for i in range(len(lengths)) if draw.random() < 0.2),
            )
        )  # fmt: skip
    return cases


# Inputs that decode.decode takes: runs that end in the middle of a sequence, groups of up to 16 heads, empty sequences
# and long ones.
BOXES = [
    Case([1]),
    Case([0, 1, 16, 17, 31, 0], normed=True),
    Case([0, 0], 32, 8, 128),
    Case([64, 65, 66, 128, 129, 63], 32, 8, 128, normed=True, unwritten=(1,)),
    Case([5000, 1, 300, 0, 2000], 16, 2, 128, unwritten=(2,)),
    Case([5000, 64, 17], 16, 1, 64, block_size=8, normed=True),
    Case([3000] * 3, 28, 4, 128, block_size=64),
    Case([777, 1025, 5], 9, 1, 128, block_size=128),
    Case([777, 5], 10, 2, 64, block_size=24),
    Case([300, 20, 1500], 10, 5, 128),  # key heads that do not divide the blocks
    Case([300, 20, 1500], 7, 7, 64),
    Case([i % 90 for i in range(decode.SEQUENCES)], 4, 1, 64),
    Case([1, 2, 90, 200, 700], dim=128, window=33),
    Case([1, 64, 65, 90, 200, 700], dim=64, window=65, block_size=32, normed=True),
    Case([66, 1], 4, 1, 128, window=40, cap=0.02),
    Case([1, 70, 0, 33, 1500], cap=1.5, normed=True),
    Case([100 + i for i in range(150)] + [0] * 20, 4, 4, 128),
    Case([0, 1, 16, 17, 300, 5000], 16, 8, 256, window=4096, cap=50.0, unwritten=(2,)),
    Case([64, 65, 66, 128, 129, 63], 8, 1, 256, block_size=64, normed=True),
    Case([2000] * 40 + [7], 4, 4, 256, block_size=8, window=333),
    Case([0, 1, 64, 65, 700, 5000], 64, 8, window=128, sinks=True),
    Case([0, 1, 64, 65, 700, 5000], 64, 8, normed=True, sinks=True, unwritten=(3,)),
    Case([777, 5], 10, 2, 128, cap=1.5, sinks=True),
    Case([0, 1, 16, 17, 300, 5000], 8, 8, 96, window=2047, unwritten=(2,)),
    Case([64, 65, 66, 1300], 16, 1, 96, cap=1.5, normed=True, sinks=True),
    Case([777, 5, 90], 4, 4, 80, normed=True, window=33),
    Case([300, 20, 1500], 12, 1, 80, block_size=8),
    Case([777, 5, 90], 28, 4, 112, block_size=64, normed=True),
    Case([300, 20, 1500], 8, 2, 160, cap=1.5, unwritten=(1,)),
    Case([64, 65, 66, 5000], 8, 1, 160, block_size=32, normed=True),
    Case([0, 1, 31, 1500], 8, 1, 192, window=100, normed=True, sinks=True),
]


def takes(case: Case) -> bool:
    """Whether decode.decode has heads and blocks of these sizes."""
    return not case.fp8 or (case.dim % 32 == 0 and decode.decode_tile(case.dim) % case.block_size == 0)


def random_boxes(count: int) -> list[Case]:
    draw = random.Random(6)
    cases = []
    for _ in range(count):
        lengths = [draw.choice([0, 1, draw.randint(1, 80), draw.randint(1, 3000)]) for _ in range(draw.randint(1, 30))]
        kv_heads, dim = draw.randint(1, 4), draw.choice(kv_boxes.DIMS)
        group = draw.choice([4, 8, draw.randint(1, 16 if dim <= 128 else 8)])
        cases.append(
            Case(
                lengths, kv_heads * group, kv_heads, dim,
                draw.choice([16, 16, 8, 64, 32]), draw.choice([0, 0, 9, 300]), draw.choice([0.0, 0.0, 1.5]),
                draw.random() < 0.5, sinks=draw.random() < 0.3,
                unwritten=tuple(i for i in range(len(lengths)) if draw.random() < 0.2),
            )
        )  # fmt: skip
    return cases


def part_of(rows, keep: list[int]) -> SimpleNamespace:
    """The decoding rows of these sequences alone."""
    return SimpleNamespace(
        block_tables=rows.block_tables[keep], lengths=rows.lengths[keep], num_decodes=len(keep),
        query_len=1, query_starts=torch.arange(len(keep) + 1, dtype=torch.int32), query_lens=[1] * len(keep),
        kv_lens=[rows.kv_lens[i] for i in keep], scratch={},
    )  # fmt: skip


def token_by_token(rows) -> tuple[list[int], SimpleNamespace]:
    """The tokens of decoding sequences that are not empty, by their rows of q, and these as sequences of one token."""
    q = rows.query_len
    keep = [i for i, length in enumerate(rows.kv_lens) if length]
    alone = part_of(rows, [i for i in keep for _ in range(q)])
    alone.kv_lens = [rows.kv_lens[i] - q + 1 + j for i in keep for j in range(q)]
    alone.lengths = torch.tensor(alone.kv_lens, dtype=torch.int32)
    return [i * q + j for i in keep for j in range(q)], alone


def check_several(case: Case, query_len: int, dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    """query_len tokens of each sequence that is not empty; it is at least as long."""
    from phalanx.kernels.attention import attention_triton

    lengths = [max(length, query_len) if length else 0 for length in case.lengths]
    n, blocks = len(lengths), sum(-(-length // case.block_size) for length in lengths) + 2
    rows = make_rows([query_len] * n, lengths, case.block_size, blocks, query_len=query_len)
    cache = make_kv_cache(rows, case, blocks, dtype)
    q = torch.randn(n * query_len, case.heads + 1, case.dim).to(dtype)[:, :-1]
    sinks = torch.randn(case.heads) * 3 if case.sinks else None
    scores = AttentionParams(case.dim**-0.5, case.window, case.cap, sinks)
    want = torch.zeros(q.shape, dtype=dtype)
    keep, single = token_by_token(rows)
    if keep:
        found = paged_attention_reference(q[keep], *cache[:2], single, scores, cache.scales)
        want[keep] = found.view(-1, *want.shape[1:])
    there, wide = moved_cache(cache, device), q.to(device)
    scores = scores._replace(sinks=None if sinks is None else sinks.to(device))
    tables, at = rows.block_tables.to(device), rows.lengths.to(device)
    for _ in range(2):  # the second time with what the first left in the counters
        out = torch.full(want.shape, NAN, dtype=dtype, device=device)
        attention_triton.decode(
            wide, *there[:2], tables, at, out, *scores, case.splits, None, there.scales, query_len, case.tile, case.part
        )  # fmt: skip
        torch.testing.assert_close(out.cpu(), want, atol=bound, rtol=bound)


def make_kv_cache(rows, case: Case, blocks: int, dtype: torch.dtype) -> KVCache:
    """NaN everywhere but in the slots that the sequences use."""
    plain = make_caches(rows, case.block_size, blocks, case.kv_heads, case.dim, dtype)
    if not case.fp8:
        return KVCache(*(x.clone() for x in plain))
    scales = torch.full((blocks, case.kv_heads, 2, case.block_size), 255, dtype=torch.uint8)
    codes = []
    for part, x in enumerate(plain):
        by = torch.rand(*x.shape[:3], 1).mul(6).sub(5).exp2()  # heads and tokens differ in size
        y, exponents = fp8_cache.quantize(x.float() * by)
        unused = x.isnan()
        codes.append(y.view(torch.uint8).masked_fill_(unused, 0x7F).view(fp8_cache.E4M3))
        scales[:, :, part] = exponents.masked_fill_(unused[..., 0], 255).transpose(1, 2)
    return KVCache(*codes, scales)


def moved_cache(cache: KVCache, device: str) -> KVCache:
    return KVCache(*(None if x is None else x.to(device, copy=True) for x in cache))


def spoil(cache: KVCache, slots: list[int]) -> None:
    """Nobody may read these."""
    for x in cache[:2]:
        flat = x.view(-1, *x.shape[2:])
        flat = flat.view(torch.uint8) if cache.scales is not None else flat
        flat[slots] = 0x7F if cache.scales is not None else NAN
    if cache.scales is not None:
        at, size = torch.tensor(slots, dtype=torch.int64), cache.scales.shape[3]
        cache.scales[at // size, :, :, at % size] = 255


def check_caches(found: KVCache, want: KVCache, bound: float) -> None:
    """A code of e4m3 may be the next one, where a sum in another order has rounded elsewhere."""
    if want.scales is None:
        for mine, other in zip(found[:2], want[:2], strict=True):
            torch.testing.assert_close(mine, other, atol=bound, rtol=bound, equal_nan=True)
        return
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(found.scales[:, :, 1], want.scales[:, :, 1])
    mine, other = (
        fp8_cache.dequantize(x.keys, x.scales[:, :, 0].transpose(1, 2), torch.float32).nan_to_num(7)
        for x in (found, want)
    )
    torch.testing.assert_close(mine, other, atol=1e-3, rtol=0.13)
    assert (mine != other).float().mean() < 0.01


def random_cos_sin(tokens: int, dim: int) -> CosSin:
    angles = torch.rand(tokens, 1, dim // 2) * 6
    return CosSin(torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1))


def check(case: Case, dtype: torch.dtype, bound: float, device: str = "cpu", by_boxes: bool = False) -> None:
    """Both ways: turned, written and attended by one call, and attended alone when that is done."""
    from phalanx.kernels.attention import attention_triton

    n, heads, kv_heads, dim, size = len(case.lengths), case.heads, case.kv_heads, case.dim, case.block_size
    blocks = sum(-(-length // size) for length in case.lengths) + 2
    rows = make_rows([1] * n, case.lengths, size, blocks)
    before = make_kv_cache(rows, case, blocks, dtype)
    newest = [rows.block_tables[i, (x - 1) // size].item() * size + (x - 1) % size for i, x in enumerate(case.lengths)]
    spoil(before, [newest[i] for i in range(n) if case.lengths[i]])
    slots = torch.tensor([-1 if i in case.unwritten or not case.lengths[i] else at for i, at in enumerate(newest)])

    turn = random_cos_sin(n, dim)
    norms = QKNorm(*torch.randn(2, dim).to(dtype), 1e-6) if case.normed else None
    wide = torch.randn(n, heads + 2 * kv_heads + 1, dim).to(dtype)  # a row of the merged projection, and more
    wide[:, -1] = NAN
    q, k, v = wide[:, :-1].split([heads, kv_heads, kv_heads], 1)

    keep = [i for i in range(n) if case.lengths[i]]
    turned, after = torch.zeros_like(q), KVCache(*(None if x is None else x.clone() for x in before))
    of_keep = CosSin(turn.cos[keep], turn.sin[keep])
    at = torch.tensor([newest[i] for i in keep], dtype=torch.int64)
    turned[keep] = rope_and_store_kv_reference(q[keep], CurrentKV(k[keep], v[keep], of_keep, norms, at), after)
    sinks = torch.randn(heads) * 3 if case.sinks else None
    scores = AttentionParams(dim**-0.5, case.window, case.cap, sinks)
    want = torch.zeros(n, heads, dim, dtype=dtype)
    found = paged_attention_reference(turned[keep], *after[:2], part_of(rows, keep), scores, after.scales)
    want[keep] = found.view(-1, heads, dim)

    if sinks is not None:
        scores = scores._replace(sinks=sinks.to(device))

    def run(q: Tensor, cache: KVCache, new: CurrentKV | None) -> Tensor:
        out = torch.full((n, heads, dim), NAN, dtype=dtype, device=device)
        tables, lengths = rows.block_tables.to(device), rows.lengths.to(device)
        if by_boxes:
            assert decode.supports_decode(n, q, cache.keys, new, cache.scales)
            torch.cuda.synchronize()  # decode's contract: all but q, k and v is there
            decode.decode(n, q, *cache[:2], tables, lengths, out, *scores, new, cache.scales)
        else:
            options = dict(tile=case.tile, part=case.part)
            arguments = tables, lengths, out, *scores, case.splits, new, cache.scales
            attention_triton.decode(q, *cache[:2], *arguments, **options)
        torch.testing.assert_close(out.cpu(), want, atol=bound, rtol=bound)
        return out

    moved = wide.to(device)
    parts = moved[:, :-1].split([heads, kv_heads, kv_heads], 1)
    there = QKNorm(norms[0].to(device), norms[1].to(device), norms[2]) if norms else None
    new = CurrentKV(parts[1], parts[2], CosSin(turn.cos.to(device), turn.sin.to(device)), there, slots.to(device))
    cache = moved_cache(before, device)
    for _ in range(2):  # the second time with what the first left in the counters
        run(parts[0], cache, new)
        assert torch.equal(moved.cpu().nan_to_num(7), wide.nan_to_num(7))
    spoil(after, [newest[i] for i in case.unwritten if case.lengths[i]])
    check_caches(moved_cache(cache, "cpu"), after, bound)
    if not any(case.lengths[i] for i in case.unwritten):
        run(turned.to(device), moved_cache(after, device), None)


def check_prompts(
    window: int, cap: float, dtype: torch.dtype, bound: float, sinks: bool = False, fp8: bool = False,
    spans: list[tuple[int, int, int]] | None = None,
) -> None:  # fmt: skip
    from phalanx.kernels.attention import attention_triton

    rows = make_rows([40, 1, 7, 33], [40, 5, 60, 70], 16, 16, spans=spans)
    keys, values, scales = make_kv_cache(rows, Case([], dim=40, fp8=fp8), 16, dtype)
    q = torch.randn(81, 6, 40).to(dtype)
    scores = AttentionParams(40**-0.5, window, cap, torch.randn(6) * 3 if sinks else None)
    out = torch.full_like(q, NAN)
    starts = rows.query_starts
    attention_triton.prefill(
        q, keys, values, rows.block_tables, rows.lengths, starts, out, *scores, 0, 4, 40, scales, rows.reach, rows=16,
        tile=16,
    )  # fmt: skip
    want = paged_attention_reference(q, keys, values, rows, scores, scales)
    torch.testing.assert_close(out.flatten(1), want, atol=bound, rtol=bound)


def check_widened(dtype: torch.dtype, device: str = "cpu") -> None:
    """A part's blocks in 16 bits are those of the cache, sequence by sequence."""
    from phalanx.kernels.rope import fp8_triton

    rows = make_rows([1, 7, 33], [5, 60, 70], 16, 16)
    keys, values, scales = make_kv_cache(rows, Case([], dim=40, fp8=True), 16, dtype)
    q = torch.zeros(41, 4, 40, dtype=dtype)
    some = prefill.widened_blocks(Part(q, keys, values, rows, AttentionParams(1.0), 1, 3, q, scales))
    for i, codes in enumerate((keys, values)):
        arguments = (x.to(device) for x in (codes, scales))
        found = fp8_triton.gather_blocks(*arguments, i, some.blocks.to(device), dtype).cpu()
        whole = fp8_cache.dequantize(codes, scales[:, :, i].transpose(1, 2), dtype)
        for b, length in ((1, 60), (2, 70)):
            table, mine = rows.block_tables[b].long(), some.tables[b].long()[: -(-length // 16)]
            want = whole[table[: len(mine)]].flatten(0, 1)[:length]
            assert torch.equal(found[mine].flatten(0, 1)[:length], want)


def check_listed(dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    """Lists of tokens of a cache of one key head, as block_sparse.py makes them."""
    from phalanx.kernels.attention import attention_triton

    lengths = [1, 40, 17, 0, 33, 16]
    keys, values = torch.randn(2, 300, 1, 1, 32).to(dtype)
    table, q = torch.randint(300, (len(lengths), 40), dtype=torch.int32), torch.randn(len(lengths), 16, 32).to(dtype)
    live, found, want = [i for i, n in enumerate(lengths) if n], torch.empty_like(q), torch.zeros_like(q)
    chosen = Selection(table[live], torch.tensor(lengths, dtype=torch.int32)[live], [lengths[i] for i in live])
    want[live] = paged_attention_reference(q[live], keys, values, chosen, AttentionParams(0.2)).view(len(live), 16, 32)
    given = [x.to(device) for x in (q, keys, values, table, torch.tensor(lengths, dtype=torch.int32), found)]
    for splits in (1, 2):
        attention_triton.decode(*given, *AttentionParams(0.2), splits, tile=16, part=16)
        torch.testing.assert_close(given[-1].cpu(), want, atol=bound, rtol=bound)


def mend_interpreter() -> None:
    """Triton 3.6's makes ints of arrays of one element by a way that NumPy 2.5 has closed."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended


def main() -> None:
    """Cases of at most five KV splits in the interpreter, which takes seconds for more; GPUs get the others."""
    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    for i, case in enumerate(CASES + random_cases(3)):
        case = case._replace(lengths=[min(length, 140) for length in case.lengths])
        dtype, bound = [(torch.float32, 3e-6), (torch.float16, 2e-3)][i % 2]
        try:
            check(case, dtype, bound)
        except Exception:
            print(f"in {case} of {dtype}", flush=True)
            raise
    for i, case in enumerate(SEVERAL):
        check_several(case, (4, 2, 3)[i % 3], *[(torch.float32, 3e-6), (torch.float16, 2e-3)][i % 2])
    for i, (window, cap) in enumerate(((0, 0.0), (0, 1.5), (20, 1.5), (0, 0.02))):
        check_prompts(window, cap, *[(torch.float32, 3e-6), (torch.float16, 2e-3)][i % 2])
    for window in (0, 20):
        check_prompts(window, 0.0, torch.float32, 3e-6, sinks=True)
        check_prompts(window, 0.0, torch.float16, 2e-3, fp8=True)
        spans = [(0, 0, 3), (0, 5, 39), (2, 50, 60), (3, 41, 64)]  # over tiles, and one that is in the cache in part
        check_prompts(window, 0.0, torch.float32, 3e-6, spans=spans)
        check_prompts(window, 1.5, torch.float16, 2e-3, fp8=True, spans=spans)
    check_widened(torch.float16)
    check_listed(torch.float32, 3e-6)
    check_listed(torch.float16, 2e-3)
    assert not jit.counters(torch.device("cpu"), 0).any()


if __name__ == "__main__":
    main()
