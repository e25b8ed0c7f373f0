"""Queries for latents, and latents in their cache, of decoding sequences by mla_absorb.cu: in DeepSeek's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import jit
from ..rope.rope import CosSin

if TYPE_CHECKING:
    from .mla import LatentNorm

LATENT, ROPE = 512, 64
THREADS = 256
TILE = 64  # tokens of a block
COLUMNS = 64  # elements of a head's queries of a block
STORED = THREADS // 32  # tokens that a block stores


def supports(q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, up: Tensor) -> bool:
    """Whether `absorb_and_store_latents` takes these: all in 16 bits, the cache too."""
    same = {one.dtype for one in (q, latents, norm.weight, cache, up)} == {q.dtype} and q.element_size() == 2
    sizes = len(norm.weight) == LATENT and cos_sin.cos.shape[-1] == ROPE and (q.shape[2] - ROPE) % 64 == 0
    plain = jit.plain(norm.weight, cache, up, cos_sin.cos, cos_sin.sin) and q.stride()[1:] == (q.shape[2], 1)
    plain = plain and cos_sin.cos.dtype == cos_sin.sin.dtype == torch.float32
    rows = latents.stride(1) == 1 and all(x.data_ptr() % 16 == x.stride(0) % 8 == 0 for x in (q, latents))
    return same and sizes and plain and rows


def absorb_and_store_latents(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor, up: Tensor,
    queries: Tensor,
) -> None:  # fmt: skip
    """absorb_and_store_latents of mla_store_triton.py, where `supports` says so."""
    tokens, heads, width = q.shape
    assert jit.plain(queries, slots)
    programs = -(-tokens // TILE) * heads * (LATENT // COLUMNS)
    consts = sizes(heads, width, up.shape[1], cos_sin.interleaved)
    kernel = jit.kernel("mla_absorb", "mla_absorb", q.dtype, consts["ROOM"], **consts)
    kernel(
        (programs + -(-tokens // STORED), 1, 1), THREADS, q, latents, norm.weight, cos_sin.cos, cos_sin.sin, cache,
        slots, up, queries, norm.eps, q.stride(0), latents.stride(0), tokens, programs,
        shared=consts["ROOM"],
    )  # fmt: skip


def sizes(heads: int, width: int, each: int, interleaved: bool) -> dict[str, int]:
    """What mla_absorb.cu is compiled for. width: of a head's query; each: rows of a head's matrix of `up`."""
    nope = width - ROPE
    room = (TILE + COLUMNS) * nope * 2
    return dict(HEADS=heads, NOPE=nope, VALUE=each - nope, INTERLEAVED=int(interleaved), ROOM=room)
