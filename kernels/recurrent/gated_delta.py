"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464), Kimi delta attention (Kimi Team 2025,
arXiv 2510.26692) and the causal convolution before them.

Each value head keeps a matrix S [key, value] of its sequence. A token decays it, replaces what it holds under the
token's key by the token's value, scaled by beta, and reads it:

    S = diag(exp(g)) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

g is one number for a head, or in Kimi delta attention one for each channel of its key.

The tokens of a sequence that decodes are computed so. Of prompts, chunks of CHUNK tokens are computed at once, in the
form of the paper's section 3.3: within a chunk the updates are one triangular system, and only chunks follow each
other.

States are kept by rows of a batch (`RecurrentState` in rank/model/cache_spec.py), of each row in a ring: the state
behind the token at position p is entry p modulo the ring's length, and a step of a sequence that decodes leaves one
behind each of its tokens. So a later step may start behind any of them, and reads nothing of the tokens after. The
convolution's inputs are kept likewise. A sequence whose first token is in the step begins with zeros, whatever its row
holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpp import ops

CHUNK = 64
BLOCK = 16  # tokens of a chunk between which decays of channels are computed pair by pair
DELTA_KEYS = 512  # elements of a key that gated_delta.cpp has room for
L2_EPS = 1e-6  # of the norm of queries and keys, as the published models have it


class DeltaSizes(NamedTuple):
    """Sizes of this rank's part of a layer. Each key head serves the same number of value heads, which follow each
    other."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values, one after the other."""
        return 2 * self.keys + self.values


class Gates(NamedTuple):
    """Gates that decide, for each token and value head, how fast a state is forgotten and how far it is overwritten. A
    head has one decay, or one for each element of its key."""

    b: Tensor  # [T, value heads]: beta = sigmoid(b)
    a: Tensor  # [T, value heads * decays]: g = -exp(A_log) softplus(a + dt_bias)
    A_log: Tensor  # [value heads] f32
    dt_bias: Tensor  # [value heads * decays] f32
    floor: float = 0.0  # below 0: g = floor * sigmoid(exp(A_log) (a + dt_bias)), which is not below it

    @property
    def each(self) -> int:
        """Decays of a head."""
        return len(self.dt_bias) // len(self.A_log)

    def decays(self) -> tuple[Tensor, Tensor]:
        """g [T, value heads, decays] and beta [T, value heads], f32."""
        steps = (self.a.float() + self.dt_bias).unflatten(1, (len(self.A_log), -1))
        rates = self.A_log.exp()[:, None]
        g = self.floor * (rates * steps).sigmoid() if self.floor else -rates * F.softplus(steps)
        return g, self.b.float().sigmoid()


class Rows(Protocol):
    """The part of a Batch that is read here (rank/model/batch.py): B sequences, the first num_decodes of query_len
    tokens each."""

    rows: Tensor  # [B] int64; -1: no sequence, of captured steps
    lengths: Tensor  # [B] int32: tokens of the sequence after this step
    query_starts: Tensor  # [B + 1] int32
    query_lens: list[int]
    num_decodes: int
    query_len: int
    scratch: dict[Any, Any]


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, batch: Rows, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """Each channel's convolution over the newest K tokens, this one last, and SiLU of it unless told otherwise: [T, C].

    x: [T, C]. weight: [C, K]. state: [rows, K - 1 or more, C], rings of the inputs of the tokens before: an input
    replaces the oldest. bias: [C].
    """
    if not x.is_cuda:
        if all_decode(batch) and x.stride(1) == weight.stride(1) == 1 and x.dtype == weight.dtype and ops.takes(x):
            return conv_step_cpu(x, weight, state, batch, bias, silu)
        return causal_conv_reference(x, weight, state, batch, bias, silu)
    from . import gated_delta_chunks_triton, gated_delta_triton

    if all_decode(batch):
        return gated_delta_triton.conv_step(x, weight, state, batch.rows, batch.lengths, bias, silu)
    return gated_delta_chunks_triton.conv_chunks(x, weight, state, batch, bias, silu)


def all_decode(batch: Rows) -> bool:
    return batch.num_decodes == len(batch.query_lens)


def conv_step_cpu(
    x: Tensor, weight: Tensor, state: Tensor, batch: Rows, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """causal_conv of sequences that decode, in C++."""
    assert state.is_contiguous() and state.dtype == torch.float32
    out = x.new_empty(x.shape)
    ops.typed("gated_delta", "conv_step", x.dtype)(
        x, weight, bias, state, batch.rows.contiguous(), batch.lengths.contiguous(), out, len(batch.rows),
        batch.query_len, x.stride(0), weight.stride(0), *weight.shape, state.shape[1], int(silu),
    )  # fmt: skip
    return out


def causal_conv_reference(
    x: Tensor, weight: Tensor, state: Tensor, batch: Rows, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """Tokens stand behind their sequence's K - 1 older inputs, so that every tap is one gather."""
    taps, kept = weight.shape[1], state.shape[1]
    of, before = _places(x, taps - 1, batch)
    firsts = (batch.lengths - batch.query_starts.diff()).long()
    at = firsts[:, None] - (taps - 1) + torch.arange(taps - 1, device=x.device)  # positions, [B, taps - 1]
    older = torch.where(at[..., None] < 0, 0, state[batch.rows[:, None], at % max(kept, 1)]).to(x.dtype)
    line = x.new_empty(len(x) + len(of) * (taps - 1), x.shape[1])
    line[before] = older.flatten(0, 1)
    at = torch.arange(len(x), device=x.device) + of.repeat_interleave(_counts(batch), output_size=len(x))
    line[at + taps - 1] = x
    y = sum(line[at + k].float() * weight[:, k].float() for k in range(taps))
    left = (batch.query_starts[1:].repeat_interleave(_counts(batch)) - torch.arange(len(x), device=x.device)).long()
    newest = left <= kept  # of each sequence
    positions = batch.lengths.repeat_interleave(_counts(batch))[newest] - left[newest]
    state[batch.rows.repeat_interleave(_counts(batch))[newest], positions % max(kept, 1)] = x[newest].to(state.dtype)
    assert isinstance(y, Tensor)
    y = y if bias is None else y + bias.float()
    return (F.silu(y) if silu else y).to(x.dtype)


def _places(x: Tensor, columns: int, batch: Rows) -> tuple[Tensor, Tensor]:
    """The shift of each sequence's tokens, [B], and where the older inputs stand, [B * columns]."""
    of = torch.arange(len(batch.rows), device=x.device) * columns
    before = (batch.query_starts[:-1].long() + of)[:, None] + torch.arange(columns, device=x.device)
    return of, before.flatten()


def _counts(batch: Rows) -> Tensor:
    return batch.query_starts.diff().long()


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, batch: Rows, sizes: DeltaSizes) -> Tensor:
    """The inputs of each value head, [T, value heads, value dim].

    qkv: [T, channels], behind the convolution. state: [rows, entries, value heads, key dim, value dim] f32, rings of as
    many states, which are updated: of sequences that decode by each token, of others by the last one.
    """
    assert batch.query_len <= state.shape[1], "caches are made for steps of fewer tokens"
    if not qkv.is_cuda:
        rows = all(x.stride(1) == 1 and x.dtype == qkv.dtype for x in (qkv, gates.b, gates.a))
        if all_decode(batch) and sizes.key_dim <= DELTA_KEYS and rows and ops.takes(qkv):
            return delta_step_cpu(qkv, gates, state, batch, sizes)
        return gated_delta_reference(qkv, gates, state, batch, sizes)
    from . import gated_delta_chunks_triton, gated_delta_triton

    out = torch.empty(len(qkv), sizes.value_heads, sizes.value_dim, dtype=qkv.dtype, device=qkv.device)
    decodes = out[: batch.num_decodes * batch.query_len]
    gated_delta_triton.delta_step(
        qkv, gates, state, batch.rows, batch.lengths, sizes, L2_EPS, decodes, batch.query_len
    )  # fmt: skip
    if batch.num_decodes < len(batch.query_lens):
        gated_delta_chunks_triton.delta_chunks(qkv, gates, state, batch, sizes, L2_EPS, out)
    return out


def delta_step_cpu(qkv: Tensor, gates: Gates, state: Tensor, batch: Rows, sizes: DeltaSizes) -> Tensor:
    """gated_delta of sequences that decode, in C++."""
    assert state.is_contiguous() and gates.A_log.is_contiguous() and gates.dt_bias.is_contiguous()
    out = qkv.new_empty(len(qkv), sizes.value_heads, sizes.value_dim)
    ops.typed("gated_delta", "delta_step", qkv.dtype)(
        qkv, *gates[:4], state, batch.rows.contiguous(), batch.lengths.contiguous(), out, len(batch.rows),
        batch.query_len, qkv.stride(0), gates.b.stride(0), gates.a.stride(0), *sizes, gates.each, state.shape[1],
        L2_EPS, float(gates.floor),
    )  # fmt: skip
    return out


def gated_delta_reference(qkv: Tensor, gates: Gates, state: Tensor, batch: Rows, sizes: DeltaSizes) -> Tensor:
    q, k, v = _heads(qkv, sizes)
    g, beta = gates.decays()
    n, query_len, entries = batch.num_decodes, batch.query_len, state.shape[1]
    firsts = (batch.lengths - batch.query_starts.diff()).long()
    before = torch.where(firsts[:, None, None, None] <= 0, 0, state[batch.rows, (firsts - 1) % entries])
    out = torch.empty_like(v)
    rows, s = batch.rows[:n], before[:n]
    for j in range(query_len if n else 0):
        some = slice(j, n * query_len, query_len)
        out[some], s = recurrent_step(q[some], k[some], v[some], g[some], beta[some], s)
        state[rows, (firsts[:n] + j) % entries] = s
    if n < len(batch.query_lens):
        chunks = batch.scratch.get("chunks") or Chunks.of(batch.query_lens[n:], qkv.device)
        batch.scratch["chunks"] = chunks
        rest = slice(n * query_len, None)
        out[rest], s = chunked(q[rest], k[rest], v[rest], g[rest], beta[rest], before[n:], chunks)
        state[batch.rows[n:], (batch.lengths[n:].long() - 1) % entries] = s
    return out.to(qkv.dtype)


def _heads(qkv: Tensor, sizes: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [T, value heads, key dim], normed, and v [T, value heads, value dim], in f32."""
    q, k, v = qkv.float().split([sizes.keys, sizes.keys, sizes.values], 1)
    each = sizes.value_heads // sizes.key_heads
    q, k = (_l2_norm(x.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(each, 1) for x in (q, k))
    return q * sizes.key_dim**-0.5, k, v.unflatten(1, (sizes.value_heads, -1))


def _l2_norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of B sequences. q, k: [B, H, key]. v: [B, H, value]. g: [B, H, 1 or key]. beta: [B, H]. state: [B, H,
    key, value].

    Returns [B, H, value] and the new states, all f32.
    """
    state = state * g.exp()[..., None]
    change = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
    state += k[..., None] * change[:, :, None]
    return (q[:, :, None] @ state)[:, :, 0], state


class Chunks(NamedTuple):
    """How N sequences of several tokens each fall into M chunks. A sequence's last one is filled up."""

    tokens: Tensor  # [M * CHUNK] int64: each place's token; places that are filled up have the number of tokens
    places: Tensor  # [T] int64: where each token stands
    steps: list[tuple[Tensor, Tensor]]  # of the chunks that are each a sequence's i-th: sequences and chunks, int64

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Chunks:
        """counts: of each sequence's tokens."""
        whole = torch.tensor(counts)
        chunks = (whole + CHUNK - 1) // CHUNK
        first = chunks.cumsum(0) - chunks
        ends = whole.cumsum(0)
        shift = (first * CHUNK - (ends - whole)).repeat_interleave(whole)
        places = torch.arange(int(ends[-1])) + shift
        tokens = torch.full((int(chunks.sum()) * CHUNK,), len(places))
        tokens[places] = torch.arange(len(places))
        steps = []
        for i in range(int(chunks.max())):
            active = (chunks > i).nonzero()[:, 0]
            steps.append((active.to(device), (first[active] + i).to(device)))
        return cls(tokens.to(device), places.to(device), steps)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Several tokens of N sequences. q, k: [T, H, key]. v: [T, H, value]. g: [T, H, 1 or key]. beta: [T, H]. state: [N,
    H, key, value].

    Returns [T, H, value] and the new states, all f32. Decays are sums of g and no differences of sums, which would keep
    little of a channel that forgets slowly behind a token at which it forgot much.
    """
    q, k, v, g, beta = (in_chunks(x, chunks) for x in (q, k, v, g, beta[..., None]))
    before, behind = g.cumsum(2), _behind(g)  # [M, H, CHUNK, decays]: up to each token, and from there to the end
    # The update of each token, less what earlier tokens of the chunk have written under its key: of the state before
    # the chunk it is linear, so one system is solved for both parts.
    system, within = decayed(torch.stack((k * beta, q)), k, g)
    written = torch.linalg.solve_triangular(
        system, torch.cat((v, k * before.exp()), 3) * beta, upper=False, unitriangular=True
    )
    own, read = written.split([v.shape[3], k.shape[3]], 3)
    q *= before.exp()
    k *= behind.exp()
    left = before[:, :, -1:].exp().mT
    out = torch.empty_like(own)
    state = state.clone()
    for sequences, at in chunks.steps:
        old = state[sequences]
        new = own[at] - read[at] @ old
        out[at] = q[at] @ old + within[at] @ new
        state[sequences] = old * left[at] + k[at].mT @ new
    return out.transpose(1, 2).flatten(0, 1)[chunks.places], state


def _behind(g: Tensor) -> Tensor:
    """Sums of g over the tokens behind each, along the last axis but one."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def decayed(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """x k^T [..., CHUNK, CHUNK] with each product of channels decayed from k's token to x's; zeros where that is no
    later. x, k: [..., CHUNK, key]. g: [..., CHUNK, 1 or key]."""
    if g.shape[-1] == 1:
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
        total = g.cumsum(-2)
        return x @ k.mT * (total - total.mT).masked_fill(~lower, -torch.inf).exp()
    x, k, g = (one.unflatten(-2, (-1, BLOCK)) for one in (x, k, g))  # [..., blocks, BLOCK, key]
    made = x.new_zeros(*x.shape[:-3], CHUNK, CHUNK)
    squares = x.new_zeros(*x.shape[:-1], BLOCK)
    between = torch.zeros_like(g)  # decays from tokens to those n later in their block
    for n in range(BLOCK):
        if n:
            between = between[..., 1:, :] + g[..., 1 : BLOCK + 1 - n, :]
        earlier = k[..., : BLOCK - n, :] * between.exp()
        squares.diagonal(-n, -2, -1).copy_((x[..., n:, :] * earlier).sum(-1))
    # From a block to a later one in three parts: behind the token, between the blocks, and up to the later token.
    x, since = x * g.cumsum(-2).exp(), _behind(g)
    for i in range(g.shape[-3]):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        made[..., rows, rows] = squares[..., i, :, :]
        if i:
            keys = (k[..., :i, :, :] * since[..., :i, :, :].exp()).flatten(-3, -2)
            made[..., rows, : i * BLOCK] = x[..., i, :, :] @ keys.mT
            since[..., :i, :, :] += g[..., i, :, :].sum(-2)[..., None, None, :]
    return made


def in_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, H, d] → [M, H, CHUNK, d]; zeros where chunks are filled up, which leave states as they are."""
    filled = torch.cat((x, torch.zeros_like(x[:1])))[chunks.tokens]
    return filled.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def ungroup(qkvz: Tensor, ba: Tensor, sizes: DeltaSizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [T, channels], z [T, values], b and a [T, value heads] of linears that have all of a key head together: qkvz
    [T, key heads * (query, key, values, z)], and ba [T, key heads * (b, a)] of its value heads."""
    if qkvz.is_cuda:
        from . import gated_delta_triton

        return gated_delta_triton.ungroup(qkvz, ba, sizes)
    heads, each = sizes.key_heads, sizes.value_heads // sizes.key_heads
    wide = each * sizes.value_dim
    parts = qkvz.unflatten(1, (heads, -1)).split([sizes.key_dim, sizes.key_dim, wide, wide], 2)
    q, k, v, z = (x.flatten(1) for x in parts)
    b, a = (x.flatten(1).contiguous() for x in ba.unflatten(1, (heads, -1)).split(each, 2))
    return torch.cat((q, k, v), 1), z, b, a


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, silu: bool = True) -> Tensor:
    """The RMS norm of each head times SiLU(z), or sigmoid(z). x, z: [T, heads, dim]. weight: [dim]."""
    if x.is_cuda and x.is_contiguous() and z.stride(2) == 1:
        from . import gated_delta_triton

        return gated_delta_triton.gated_norm(x, z, weight, eps, silu)
    if x.is_contiguous() and z.is_contiguous() and x.dtype == z.dtype == weight.dtype and ops.takes(x):
        y = torch.empty_like(x)
        ops.typed("gated_delta", "gated_norm", x.dtype)(
            x, z, weight, y, x.numel() // x.shape[-1], x.shape[-1], int(silu), eps
        )
        return y
    return gated_norm_reference(x, z, weight, eps, silu)


def gated_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float, silu: bool = True) -> Tensor:
    wide = x.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    return (normed * (F.silu(z.float()) if silu else z.float().sigmoid())).to(x.dtype)
