"""Kernels of multi-head latent attention against the torch references, where only what may be read is not NaN.

Without a GPU by Triton's interpreter: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.attention.latents
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from phalanx.kernels.attention import mla
from phalanx.kernels.attention.backend import AttentionParams, Part
from phalanx.kernels.attention.reference import paged_attention_reference, slots_of
from phalanx.kernels.rope import fp8_cache
from phalanx.kernels.rope.rope import CosSin
from torch import Tensor

from .decoding import mend_interpreter, token_by_token
from .test_attention import make_caches, make_rows

NAN = float("nan")


class Sizes(NamedTuple):
    heads: int = 4
    nope: int = 16
    rope: int = 8
    value: int = 12
    latent: int = 24
    block_size: int = 16


DEEPSEEK = Sizes(16, 128, 64, 128, 512)
SIZES = (Sizes(), Sizes(5, 10, 6, 7, 40, 5), Sizes(20, 16, 16, 16, 32, 4), Sizes(2, rope=0, block_size=1))
LENGTHS = ([1], [0, 1, 16, 17, 31, 0], [70, 1, 33, 128, 200])
# Tokens of this step and of the context, of each sequence; the first ones decode.
STEPS = (([1, 1, 7], [30, 1, 7]), ([40, 9, 2], [40, 60, 33]))


def latent_cache(rows, sizes: Sizes, blocks: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere but in the slots that the sequences use."""
    return make_caches(rows, sizes.block_size, blocks, 1, sizes.latent + sizes.rope, dtype)[0][:, :, 0].contiguous()


def new_slots(rows, block_size: int) -> Tensor:
    """[T] int64: where the step's own tokens go."""
    found = (slots_of(rows, i, block_size)[-count:] for i, count in enumerate(rows.query_lens))
    return torch.cat(list(found))


def norm_and_angles(tokens: int, sizes: Sizes, dtype: torch.dtype, interleaved: bool) -> tuple[mla.LatentNorm, CosSin]:
    angles = torch.rand(tokens, 1, sizes.rope // 2) * 6
    turn = CosSin(*(torch.cat(x, -1) for x in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))), interleaved)
    return mla.LatentNorm(torch.rand(sizes.latent).to(dtype) + 0.5, 1e-6), turn


def moved(norm: mla.LatentNorm, cos_sin: CosSin, device: str) -> tuple[mla.LatentNorm, CosSin]:
    there = cos_sin._replace(cos=cos_sin.cos.to(device), sin=cos_sin.sin.to(device))
    return mla.LatentNorm(norm.weight.to(device), norm.eps), there


def to(rows, device: str):
    for name in ("block_tables", "lengths", "query_starts", "slots"):
        if hasattr(rows, name):
            setattr(rows, name, getattr(rows, name).to(device))
    return rows


def fp8_latents(cache: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of such a cache."""
    blocks, size, width = cache.shape
    used = torch.arange(blocks * size)[~cache.view(-1, width).isnan().any(1)]
    codes = torch.full(cache.shape, 0x7F, dtype=torch.uint8).view(fp8_cache.E4M3)
    scales = torch.full((blocks, 1, 2, size), 255, dtype=torch.uint8)
    by = torch.rand(len(used), 1).mul(6).sub(5).exp2()  # tokens differ in size
    fp8_cache.store_latents(cache.view(-1, width)[used].float() * by, codes, scales, latent, used)
    return codes, scales


def check_codes(got: Tensor, want: Tensor) -> None:
    """Codes read from e4m3: where a norm's sum in another order rounds elsewhere, a code may be the next one."""
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0.13)
    assert (got != want).float().mean() < 0.02


def check_fp8_store(sizes: Sizes, interleaved: bool, dtype: torch.dtype, device: str = "cpu") -> None:
    """Stores as the reference does."""
    from phalanx.kernels.attention import mla_store_triton

    n, heads, latent, width = 5, sizes.heads, sizes.latent, sizes.latent + sizes.rope
    q, latents = (torch.randn(n, heads, sizes.nope + sizes.rope).to(dtype), torch.randn(n, width).to(dtype))
    angles = torch.rand(n, 1, sizes.rope // 2) * 6
    turn = CosSin(*(torch.cat(x, -1) for x in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))), interleaved)
    weight, slots = torch.rand(latent).to(dtype) + 0.5, torch.tensor([9, 0, 4, 11, 2])
    found = []
    for store, where in (
        (mla.rope_and_store_latents_reference, "cpu"),
        (mla_store_triton.rope_and_store_latents, device),
    ):
        codes, scales = torch.zeros(3, 4, width, dtype=fp8_cache.E4M3), torch.zeros(3, 1, 2, 4, dtype=torch.uint8)
        codes, scales, at = codes.to(where), scales.to(where), slots.to(where)
        there = CosSin(turn.cos.to(where), turn.sin.to(where), interleaved)
        norm = mla.LatentNorm(weight.to(where), 1e-6)
        store(q.to(where, copy=True), latents.to(where, copy=True), norm, there, codes, at, scales)
        found.append(
            fp8_cache.gather_latents_reference(codes, scales, torch.arange(12).to(where), latent, torch.float32)
        )
    want, got = found[0], found[1].cpu()
    check_codes(got, want)
    assert want[slots].abs().amin(1).max() > 0


def check_store(sizes: Sizes, interleaved: bool, dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    """The queries and latents are parts of a wider tensor; one slot is negative."""
    from phalanx.kernels.attention import mla_store_triton

    n, (heads, nope, rope, _, latent, _) = 5, sizes
    wide = torch.randn(n, heads * (nope + rope) + latent + rope).to(dtype)
    angles = torch.rand(n, 1, rope // 2) * 6
    turn = CosSin(*(torch.cat(x, -1) for x in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))), interleaved)
    weight, cache = torch.randn(latent).to(dtype), torch.full((3, 4, latent + rope), NAN, dtype=dtype)
    slots = torch.tensor([9, 0, 4, 11, 2])

    def both(store, x: Tensor, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        x, cache, slots = (a.to(device, copy=True) for a in (x, cache, slots))
        q, latents = x.split([heads * (nope + rope), latent + rope], 1)
        norm, there = mla.LatentNorm(weight.to(device), 1e-6), turn._replace(cos=turn.cos.to(device))
        there = there._replace(sin=turn.sin.to(device))
        store(q.view(len(x), heads, -1), latents, norm, there, cache, slots)
        return q.cpu().clone(), cache.cpu()

    want_q, want = both(mla.rope_and_store_latents_reference, wide, cache, slots)
    got_q, got = both(mla_store_triton.rope_and_store_latents, wide, cache, torch.where(slots == 4, -1, slots))
    want.view(-1, latent + rope)[4] = NAN
    torch.testing.assert_close(got_q, want_q, atol=bound, rtol=bound)
    torch.testing.assert_close(got, want, atol=bound, rtol=bound, equal_nan=True)


def empty_cache(blocks: int, width: int, dtype: torch.dtype, fp8: bool, device: str) -> tuple[Tensor, Tensor | None]:
    """A cache of blocks of 4 tokens, NaN or zero, and its scales if it is in e4m3."""
    if not fp8:
        return torch.full((blocks, 4, width), NAN, dtype=dtype, device=device), None
    codes = torch.zeros(blocks, 4, width, dtype=fp8_cache.E4M3, device=device)
    return codes, torch.zeros(blocks, 1, 2, 4, dtype=torch.uint8, device=device)


def numbers(cache: Tensor, scales: Tensor | None, latent: int) -> Tensor:
    """[slots, latent + rope], on the CPU."""
    if scales is None:
        return cache.flatten(0, 1).cpu()
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    return fp8_cache.gather_latents_reference(cache.cpu(), scales.cpu(), slots, latent, torch.float32)


def check_absorb(
    sizes: Sizes, interleaved: bool, dtype: torch.dtype, bound: float, device: str = "cpu", fp8: bool = False
) -> None:
    """Queries, and what is stored, as by the references, but nothing where a slot is negative; and the values of what
    attention makes."""
    from phalanx.kernels.attention import mla_store_triton, mla_triton

    heads, nope, rope, value, latent, _ = sizes

    def check(n: int) -> None:
        wide = torch.randn(n, heads * (nope + rope) + latent + rope).to(dtype)
        norm, cos_sin = norm_and_angles(n, sizes, dtype, interleaved)
        up = (torch.randn(heads, nope + value, latent) * latent**-0.5).to(dtype)
        queries = torch.full((n, heads, latent + rope), NAN, dtype=dtype, device=device)

        def stored(store, where: str, slots: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
            q, latents = wide.to(where, copy=True).split([heads * (nope + rope), latent + rope], 1)
            q, (cache, scales) = q.view(n, heads, -1), empty_cache(n, latent + rope, dtype, fp8, where)
            store(q, latents, *moved(norm, cos_sin, where), cache, slots.to(where), *more, scales)
            return q, numbers(cache, scales, latent)

        slots = torch.randperm(4 * n)[:n]
        q, want = stored(mla.rope_and_store_latents_reference, "cpu", slots)
        want[slots[-1]] = 0 if fp8 else NAN
        slots[-1] = -1
        _, got = stored(mla_store_triton.absorb_and_store_latents, device, slots, up.to(device), queries)
        if fp8:
            check_codes(got, want)
        else:
            torch.testing.assert_close(got, want, atol=bound, rtol=bound, equal_nan=True)
        absorbed = torch.einsum("thd,hdl->thl", q[..., :nope].float(), up[:, :nope].float()).to(dtype)
        want = torch.cat((absorbed, q[..., nope:]), 2)
        torch.testing.assert_close(queries.cpu(), want, atol=bound, rtol=bound)
        mla_store_triton.absorb_rotated(q.to(device), up.to(device), queries.fill_(NAN))
        torch.testing.assert_close(queries.cpu(), want, atol=bound, rtol=bound)
        mixed = torch.randn(n, heads, latent).to(dtype)
        made = torch.einsum("thl,hvl->thv", mixed.float(), up[:, nope:].float()).to(dtype)
        found = mla_triton.values(mixed.to(device), up.to(device), nope)
        torch.testing.assert_close(found.cpu(), made, atol=bound, rtol=bound)

    for tokens in (1, 5, 70):
        check(tokens)


def check_decode(
    sizes: Sizes, lengths: list[int], most: int, dtype: torch.dtype, bound: float, device: str = "cpu",
    fp8: bool = False, query_len: int = 1,
) -> None:  # fmt: skip
    """query_len: tokens of each sequence that is not empty; it is at least as long."""
    from phalanx.kernels.attention import mla_triton

    lengths = [max(n, query_len) if n else 0 for n in lengths]
    blocks = sum(-(-n // sizes.block_size) for n in lengths) + 2
    rows = make_rows([query_len] * len(lengths), lengths, sizes.block_size, blocks, query_len=query_len)
    cache, scales = latent_cache(rows, sizes, blocks, dtype), None
    if fp8:
        cache, scales = fp8_latents(cache, sizes.latent)
    q = torch.randn(len(lengths) * query_len, sizes.heads, sizes.latent + sizes.rope).to(dtype)
    want = torch.zeros(len(q), sizes.heads, sizes.latent, dtype=dtype)
    keys, params = cache[:, :, None], AttentionParams(0.2)
    keep, single = token_by_token(rows)
    found = paged_attention_reference(q[keep], keys, keys[..., : sizes.latent], single, params, scales)
    want[keep] = found.view(-1, *want.shape[1:])
    out = torch.full(want.shape, NAN, dtype=dtype, device=device)
    rows = to(rows, device)
    options = dict(tile=16, split=32, fill=1 + most % 3) if device == "cpu" else {}
    mla_triton.decode(
        q.to(device),
        cache.to(device),
        sizes.latent,
        rows.block_tables,
        rows.lengths,
        out,
        0.2,
        most,
        None if scales is None else scales.to(device),
        query_len,
        **options,
    )
    torch.testing.assert_close(out.cpu(), want, atol=bound, rtol=bound)


def check_prompts(
    sizes: Sizes, step: tuple[list[int], list[int]], dtype: torch.dtype, bound: float, fp8: bool = False
) -> None:
    """Chunks of prompts, absorbed and expanded, in the interpreter."""
    from phalanx.kernels.attention import mla_triton

    (heads, nope, rope, value, latent, block_size), (query_lens, kv_lens) = sizes, step
    blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, block_size, blocks)
    cache, scales, params = latent_cache(rows, sizes, blocks, dtype), None, AttentionParams(0.2)
    if fp8:
        cache, scales = fp8_latents(cache, latent)
    n, count, tokens = rows.num_decodes, len(query_lens), sum(query_lens)
    keys = cache[:, :, None]
    q = torch.randn(tokens, heads, latent + rope).to(dtype)
    want = paged_attention_reference(q, keys, keys[..., :latent], rows, params, scales).view(tokens, heads, latent)
    out = torch.full(want.shape, NAN, dtype=dtype)
    starts = rows.query_starts
    mla_triton.prefill(
        q,
        cache,
        latent,
        rows.block_tables,
        rows.lengths,
        starts,
        out,
        0.2,
        n,
        count - n,
        max(query_lens),
        scales,
        16,
        16,
    )
    torch.testing.assert_close(out[n:], want[n:], atol=bound, rtol=bound)
    (context,) = mla.contexts(rows, block_size)
    kv = torch.randn(len(context.slots), heads, nope + value).to(dtype)
    rotated = torch.randn(len(kv), latent + rope)[:, latent:].to(dtype)
    q = torch.randn(tokens, heads, nope + rope).to(dtype)
    want, out = torch.full((2, tokens, heads, value), NAN, dtype=dtype)
    mla.expanded_reference(q, kv, rotated, context, params, want)
    mla_triton.prefill_expanded(q, kv, rotated, context, params, out, 16, 16)
    torch.testing.assert_close(out, want, atol=bound, rtol=bound, equal_nan=True)


def check_gather(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    from phalanx.kernels.rope import fp8_triton

    cache, scales = fp8_latents(torch.randn(5, sizes.block_size, sizes.latent + sizes.rope), sizes.latent)
    slots = torch.randint(5 * sizes.block_size, (33,))
    want = fp8_cache.gather_latents_reference(cache, scales, slots, sizes.latent, dtype)
    there = (x.to(device) for x in (cache, scales, slots))
    assert torch.equal(fp8_triton.gather_latents(*there, sizes.latent, dtype).cpu(), want)


def check_supports() -> None:
    """Caches that hold no latents are left to other backends."""
    from phalanx.kernels.attention import mla_triton

    rows, keys = SimpleNamespace(num_decodes=1), torch.zeros(3, 4, 1, 32)
    q, out, params = torch.zeros(1, 2, 32), torch.zeros(1, 2, 24), AttentionParams(1.0)

    def supports(keys=keys, values=None, params=params) -> bool:
        return mla_triton.supports(Part(q, keys, keys[..., :24] if values is None else values, rows, params, 0, 1, out))

    assert supports() and not supports(values=keys) and not supports(values=torch.zeros(3, 4, 1, 24))
    assert not supports(keys=torch.zeros(3, 4, 2, 32)) and not supports(params=AttentionParams(1.0, window=5))
    assert not supports(keys=keys.half())


def main() -> None:
    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    check_supports()
    for i, sizes in enumerate(SIZES):
        dtype, bound = [(torch.float32, 3e-6), (torch.float16, 3e-3)][i % 2]
        check_store(sizes, bool(i % 2), dtype, bound)
        check_absorb(sizes, bool(i % 2), dtype, bound)
        steps = [(1, LENGTHS[0]), (1, LENGTHS[1]), (4, LENGTHS[2])]
        for most, lengths in steps if i == 0 else [steps[1 + i % 2]]:
            check_decode(sizes, lengths, most, dtype, bound)
        check_prompts(sizes, STEPS[i % 2], dtype, bound)
    for i, sizes in enumerate(SIZES[:2]):
        dtype, bound = [(torch.float32, 3e-6), (torch.float16, 3e-3)][i % 2]
        check_fp8_store(sizes, bool(i % 2), dtype)
        check_absorb(sizes, bool(i % 2), dtype, bound, fp8=True)
        check_decode(sizes, LENGTHS[1 + i], 1 + 3 * i, dtype, bound, fp8=True)
        check_prompts(sizes, STEPS[i % 2], dtype, bound, fp8=True)
        check_gather(sizes, dtype)
        check_decode(sizes, LENGTHS[1 + i], 1 + 3 * i, dtype, bound, fp8=bool(i), query_len=2 + i)


if __name__ == "__main__":
    main()
