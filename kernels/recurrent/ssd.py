"""State space duality, the recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), and the gated norm behind it.

Each head keeps a matrix S [state, head dim] of its sequence. A token decays it, adds its own input x under its key b,
both scaled by the time step dt, and reads it by its query c:

    dt = softplus(dt + dt_bias);  S = exp(-exp(A_log) dt) S + b (dt x)^T;  y = S^T c + D x

The heads of a group have b and c in common. It is the gated delta rule without what that subtracts, so that within a
chunk there is no system to solve. Rows, rings of states and steps are as gated_delta.py says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpp import ops
from .gated_delta import CHUNK, Chunks, Rows, all_decode, in_chunks

SSD_STATE = 512  # elements of a key that ssd.cpp has room for


class SsdSizes(NamedTuple):
    """Sizes of this rank's part of a layer. Each group has the same number of heads, which follow each other."""

    groups: int
    heads: int
    state: int  # elements of b, and of c
    head_dim: int

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, b and c, one after the other."""
        return self.values + 2 * self.keys


class TimeSteps(NamedTuple):
    """How far each token's head steps, and what it passes by its state."""

    dt: Tensor  # [T, heads]
    A_log: Tensor  # [heads] f32
    dt_bias: Tensor  # [heads] f32
    D: Tensor  # [heads] f32

    def steps(self) -> tuple[Tensor, Tensor]:
        """dt and the logarithm of the decay, [T, heads] f32."""
        dt = F.softplus(self.dt.float() + self.dt_bias)
        return dt, -self.A_log.exp() * dt


def ssd(xbc: Tensor, times: TimeSteps, state: Tensor, batch: Rows, sizes: SsdSizes) -> Tensor:
    """y of each head, [T, heads, head dim].

    xbc: [T, channels], behind the convolution. state: [rows, entries, heads, state, head dim] f32, rings of as many
    states, which are updated: of sequences that decode by each token, of others by the last one.
    """
    assert batch.query_len <= state.shape[1], "caches are made for steps of fewer tokens"
    if not xbc.is_cuda:
        rows = xbc.stride(1) == times.dt.stride(1) == 1 and xbc.dtype == times.dt.dtype
        if all_decode(batch) and sizes.state <= SSD_STATE and rows and ops.takes(xbc):
            return ssd_step_cpu(xbc, times, state, batch, sizes)
        return ssd_reference(xbc, times, state, batch, sizes)
    from . import ssd_triton

    out = torch.empty(len(xbc), sizes.heads, sizes.head_dim, dtype=xbc.dtype, device=xbc.device)
    decodes = out[: batch.num_decodes * batch.query_len]
    ssd_triton.ssd_step(xbc, times, state, batch.rows, batch.lengths, sizes, decodes, batch.query_len)
    if batch.num_decodes < len(batch.query_lens):
        ssd_triton.ssd_chunks(xbc, times, state, batch, sizes, out)
    return out


def ssd_step_cpu(xbc: Tensor, times: TimeSteps, state: Tensor, batch: Rows, sizes: SsdSizes) -> Tensor:
    """ssd of sequences that decode, in C++."""
    assert state.is_contiguous() and all(x.is_contiguous() for x in times[1:])
    out = xbc.new_empty(len(xbc), sizes.heads, sizes.head_dim)
    ops.typed("ssd", "ssd_step", xbc.dtype)(
        xbc, *times, state, batch.rows.contiguous(), batch.lengths.contiguous(), out, len(batch.rows),
        batch.query_len, xbc.stride(0), times.dt.stride(0), *sizes, state.shape[1],
    )  # fmt: skip
    return out


def ssd_reference(xbc: Tensor, times: TimeSteps, state: Tensor, batch: Rows, sizes: SsdSizes) -> Tensor:
    x, b, c = xbc.float().split([sizes.values, sizes.keys, sizes.keys], 1)
    x = x.unflatten(1, (sizes.groups, -1, sizes.head_dim))  # [T, groups, heads of one, head dim]
    b, c = (one.unflatten(1, (sizes.groups, -1)) for one in (b, c))  # [T, groups, state]
    dt, decay = (one.unflatten(1, (sizes.groups, -1)) for one in times.steps())
    v = x * dt[..., None]
    n, query_len, entries = batch.num_decodes, batch.query_len, state.shape[1]
    firsts = (batch.lengths - batch.query_starts.diff()).long()
    before = torch.where(firsts[:, None, None, None] <= 0, 0, state[batch.rows, (firsts - 1) % entries])
    before = before.unflatten(1, (sizes.groups, -1))  # [B, groups, heads of one, state, head dim]
    out = torch.empty_like(v)
    rows, s = batch.rows[:n], before[:n]
    for j in range(query_len if n else 0):
        some = slice(j, n * query_len, query_len)
        s = s * decay[some].exp()[..., None, None] + b[some][:, :, None, :, None] * v[some][..., None, :]
        out[some] = (c[some][:, :, None, None] @ s)[..., 0, :]
        state[rows, (firsts[:n] + j) % entries] = s.flatten(1, 2)
    if n < len(batch.query_lens):
        chunks = batch.scratch.get("chunks") or Chunks.of(batch.query_lens[n:], xbc.device)
        batch.scratch["chunks"] = chunks
        rest = slice(n * query_len, None)
        out[rest], s = chunked(c[rest], b[rest], v[rest], decay[rest], before[n:], chunks)
        state[batch.rows[n:], (batch.lengths[n:].long() - 1) % entries] = s.flatten(1, 2)
    out += times.D.view(sizes.groups, -1, 1) * x
    return out.flatten(1, 2).to(xbc.dtype)


def chunked(c: Tensor, b: Tensor, v: Tensor, decay: Tensor, state: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Several tokens of N sequences. c, b: [T, G, state]. v: [T, G, E, head dim]. decay: [T, G, E]. state: [N, G, E,
    state, head dim].

    Returns [T, G, E, head dim] and the new states, all f32. Decays stand at values and outputs, so that the products
    with b and c are of a whole group's heads side by side.
    """
    each, dim = v.shape[2:]
    c, b = (in_chunks(x, chunks) for x in (c, b))  # [M, G, CHUNK, state]
    v = in_chunks(v.flatten(2), chunks).unflatten(3, (each, dim))  # [M, G, CHUNK, E, head dim]
    # In f64: heads that forget fast have large sums, of whose differences f32 would keep little.
    total = in_chunks(decay, chunks).double().cumsum(2)  # [M, G, CHUNK, E]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=c.device).tril()
    spans = (total.mT[..., None] - total.mT[..., None, :]).float()  # [M, G, E, CHUNK, CHUNK]
    within = (c @ b.mT)[:, :, None] * spans.masked_fill_(~lower, -torch.inf).exp_()
    out = (within @ v.transpose(2, 3)).transpose(2, 3)
    v = (v * (total[:, :, -1:] - total).float().exp()[..., None]).flatten(3)
    total = total.float().exp()
    kept, left = total[..., None], total[:, :, -1, :, None, None]  # [M, G, CHUNK, E, 1], [M, G, E, 1, 1]
    state = state.clone()
    for sequences, at in chunks.steps:
        before = state[sequences]
        read = c[at] @ before.permute(0, 1, 3, 2, 4).flatten(3)
        out[at] += read.unflatten(3, (each, dim)) * kept[at]
        written = (b[at].mT @ v[at]).unflatten(3, (each, dim)).transpose(2, 3)
        state[sequences] = before * left[at] + written
    return out.transpose(1, 2).flatten(0, 1)[chunks.places], state


def ssd_norm(x: Tensor, z: Tensor, weight: Tensor | None, eps: float, groups: int, gate_first: bool = True) -> Tensor:
    """x * SiLU(z), and the RMS norm of each of the groups of that, or the norm of x before it is gated: [T, values].

    z: [T, values]. weight: [values]; None: there is no norm.
    """
    assert z.stride(1) == 1 and x.is_contiguous()
    if x.is_cuda:
        from . import ssd_triton

        return ssd_triton.ssd_norm(x, z, weight, eps, groups, gate_first)
    if z.dtype == x.dtype and ops.takes(x):
        y = torch.empty_like(x)
        ops.typed("ssd", "ssd_norm", x.dtype)(
            x, z, weight, y, *x.shape, z.stride(0), groups, int(gate_first), float(eps)
        )
        return y
    return ssd_norm_reference(x, z, weight, eps, groups, gate_first)


def ssd_norm_reference(
    x: Tensor, z: Tensor, weight: Tensor | None, eps: float, groups: int, gate_first: bool = True
) -> Tensor:
    wide, gate = x.float(), F.silu(z.float())
    if weight is None:
        return (wide * gate).to(x.dtype)
    wide = (wide * gate if gate_first else wide).unflatten(1, (groups, -1))
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1) * weight.float()
    return (normed if gate_first else normed * gate).to(x.dtype)
