"""Steps of gated delta nets on states with NaN where a sequence begins; run as a program, Triton's kernels in the
interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from phalanx.kernels.recurrent import gated_delta
from phalanx.kernels.recurrent.gated_delta import DeltaSizes, Gates
from torch import Tensor

from ..attention.decoding import mend_interpreter

NAN = float("nan")
GUARD = 4096  # elements around a tensor
SIZES = [DeltaSizes(2, 6, 12, 20), DeltaSizes(3, 3, 16, 40), DeltaSizes(1, 2, 8, 8)]
PUBLISHED = DeltaSizes(16, 32, 128, 128)  # Qwen3-Next


def make_rows(query_lens: list[int], kv_lens: list[int], rows: list[int] | None = None, query_len: int = 1) -> Any:
    """The part of a Batch that is read here."""
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return SimpleNamespace(
        rows=torch.tensor(list(range(len(query_lens)))[::-1] if rows is None else rows),
        lengths=torch.tensor(kv_lens, dtype=torch.int32),
        query_starts=starts,
        query_lens=query_lens,
        num_decodes=query_lens.count(query_len),
        query_len=query_len,
        scratch={},
    )


class Layer:
    """Random weights, inputs of a step, and states of the sequences before it."""

    def __init__(
        self, sizes: DeltaSizes, batch: Any, taps: int = 4, dtype: torch.dtype = torch.float32, entries: int = 0,
        plain: bool = False, channels: bool = False, floor: float = 0.0,
    ):  # fmt: skip
        """entries: of the rings; as many as the batch needs unless given. plain: a convolution with a bias and without
        SiLU. channels: each element of a key has a decay of its own."""
        tokens, count = sum(batch.query_lens), int(batch.rows.max()) + 1
        self.sizes, self.batch = sizes, batch
        self.x = torch.randn(tokens, sizes.channels).to(dtype)
        self.weight = torch.randn(sizes.channels, taps).to(dtype)
        self.bias, self.silu = torch.randn(sizes.channels).to(dtype) if plain else None, not plain
        heads = sizes.value_heads
        decays = heads * (sizes.key_dim if channels else 1)
        b, a = (torch.randn(tokens, width).to(dtype) for width in (heads, decays))
        self.gates = Gates(b, a, torch.rand(heads) * 3 - 2, torch.randn(decays), floor)
        entries = entries or batch.query_len
        self.convolution = torch.randn(count, taps + entries - 2, sizes.channels).to(dtype).float()
        self.state = torch.randn(count, entries, heads, sizes.key_dim, sizes.value_dim)
        begins = batch.rows[(batch.lengths <= batch.query_starts.diff()) & (batch.rows >= 0)]
        self.convolution[begins], self.state[begins] = NAN, NAN

    def on(self, device: str) -> Layer:
        other = Layer.__new__(Layer)
        other.sizes, other.silu = self.sizes, self.silu
        other.bias = None if self.bias is None else self.bias.to(device)
        other.batch = SimpleNamespace(
            **{key: x.to(device) if isinstance(x, Tensor) else x for key, x in vars(self.batch).items()}
            | {"scratch": {}}
        )
        other.gates = Gates(*(x.to(device) for x in self.gates[:4]), self.gates.floor)
        for name in ("x", "weight", "convolution", "state"):
            setattr(other, name, getattr(self, name).to(device, copy=True))
        return other

    def guard(self) -> list[tuple[Tensor, Tensor]]:
        """Put NaN around all floats that kernels read and write. Returns the memory, and where
        in it none of theirs is."""
        guards = []

        def inside(x: Tensor) -> Tensor:
            room = torch.full((x.numel() + 2 * GUARD,), NAN, dtype=x.dtype, device=x.device)
            room[GUARD:-GUARD] = x.flatten()
            free = torch.ones(len(room), dtype=torch.bool, device=x.device)
            free[GUARD:-GUARD] = False
            guards.append((room, free))
            return room[GUARD:-GUARD].view(x.shape)

        self.gates = Gates(*map(inside, self.gates[:4]), self.gates.floor)
        for name in ("x", "weight", "convolution", "state"):
            setattr(self, name, inside(getattr(self, name)))
        return guards

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """The results of `run`, one token at a time in f64: outputs, and the rows' new states."""
        q_to, k_to = self.sizes.keys, 2 * self.sizes.keys
        each = self.sizes.value_heads // self.sizes.key_heads
        g, beta = Gates(*(x.double() for x in self.gates[:4]), self.gates.floor).decays()
        out = torch.empty(len(self.x), self.sizes.value_heads, self.sizes.value_dim, dtype=torch.float64)
        convolution, states, t = self.convolution.double(), self.state.double(), 0
        kept, entries, taps = convolution.shape[1], states.shape[1], self.weight.shape[1]
        for i, count in enumerate(self.batch.query_lens):
            row, first = int(self.batch.rows[i]), int(self.batch.lengths[i]) - count
            state = states[row, (first - 1) % entries].clone() if first else torch.zeros_like(states[row, 0])
            for j in range(count):
                older = [convolution[row, p % kept] for p in range(max(first + j - taps + 1, 0), first + j)]
                begin = [torch.zeros_like(self.x[t]).double()] * (taps - 1 - len(older))
                seen = torch.stack((*begin, *older, self.x[t].double()))
                if kept:
                    convolution[row, (first + j) % kept] = self.x[t]
                y = (seen.T * self.weight.double()).sum(1) + (0 if self.bias is None else self.bias.double())
                y = torch.nn.functional.silu(y) if self.silu else y
                q, k = (z.view(self.sizes.key_heads, -1) for z in (y[:q_to], y[q_to:k_to]))
                q, k = (z / (z.square().sum(1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
                q, k = (z.repeat_interleave(each, 0) for z in (q * self.sizes.key_dim**-0.5, k))
                v = y[k_to:].view(self.sizes.value_heads, -1)
                held = state * g[t].double().exp()[:, :, None]
                change = (v - torch.einsum("hkv,hk->hv", held, k)) * beta[t].double()[:, None]
                state = held + torch.einsum("hk,hv->hkv", k, change)
                out[t] = torch.einsum("hkv,hk->hv", state, q)
                if i < self.batch.num_decodes or j == count - 1:  # of a prompt the last token's state alone is kept
                    states[row, (first + j) % entries] = state
                t += 1
        return out, convolution, states

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        y = gated_delta.causal_conv(self.x, self.weight, self.convolution, self.batch, self.bias, self.silu)
        out = gated_delta.gated_delta(y, self.gates, self.state, self.batch, self.sizes)
        assert out.dtype == self.x.dtype
        return out, self.convolution, self.state

    def steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Results by the Triton kernels of decode steps."""
        from phalanx.kernels.recurrent import gated_delta_triton

        rows, lengths = self.batch.rows, self.batch.lengths
        y = gated_delta_triton.conv_step(self.x, self.weight, self.convolution, rows, lengths, self.bias, self.silu)
        out = y.new_empty(len(y), self.sizes.value_heads, self.sizes.value_dim)
        gated_delta_triton.delta_step(
            y, self.gates, self.state, rows, lengths, self.sizes, gated_delta.L2_EPS, out, self.batch.query_len
        )
        return out, self.convolution, self.state

    def chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Results by the Triton kernels of prompts. What stands in `out` of sequences of one token stays NaN."""
        from phalanx.kernels.recurrent import gated_delta_chunks_triton

        y = gated_delta_chunks_triton.conv_chunks(
            self.x, self.weight, self.convolution, self.batch, self.bias, self.silu
        )
        out = torch.full((len(y), self.sizes.value_heads, self.sizes.value_dim), NAN, dtype=y.dtype, device=y.device)
        gated_delta_chunks_triton.delta_chunks(
            y, self.gates, self.state, self.batch, self.sizes, gated_delta.L2_EPS, out
        )
        return out, self.convolution, self.state


def check_steps(
    sizes: DeltaSizes, taps: int, dtype: torch.dtype, bound: float, device: str = "cpu", query_len: int = 1,
    entries: int = 0, plain: bool = False, channels: bool = False, floor: float = 0.0,
) -> None:  # fmt: skip
    """Sequences that begin and that go on, and a row that fills a captured step up."""
    torch.manual_seed(0)
    lengths = [9, query_len, 300, query_len, query_len + 1]
    rows = make_rows([query_len] * 5, lengths, [4, 0, 6, 2, 1], query_len)
    layer = Layer(sizes, rows, taps, dtype, entries, plain, channels, floor)
    there = layer.on(device)
    there.batch.rows = torch.tensor([4, 0, 6, -1, 1], device=device)
    want = layer.run()
    got = there.steps()
    out, convolution, state = (x.cpu() for x in got)
    out, wanted = (x.unflatten(0, (5, query_len)) for x in (out, want[0]))
    assert not out[3].any() and torch.isnan(state[2]).all() and torch.isnan(convolution[2]).all()
    live = [0, 1, 2, 4]
    torch.testing.assert_close(out[live].float(), wanted[live].float(), atol=bound, rtol=bound)
    for x, y in ((convolution, want[1]), (state, want[2])):
        for row in (4, 0, 6, 1):
            torch.testing.assert_close(x[row], y[row], atol=bound, rtol=bound, equal_nan=True)
        for row in (3, 5):
            assert torch.equal(x[row], y[row])  # of no sequence in this step


PROMPTS = [1, 2, 64, 65, 130], [5, 2, 64, 100, 1000]  # chunks that are full, not full, and several; begun and new
BESIDE_DRAFTS = [4, 4, 2, 64, 70], [5, 40, 3, 64, 100]  # the first two decode


def check_chunks(layer: Layer, bound: float, device: str = "cpu") -> None:
    """Checks sequences of several tokens; those of one, before them, only pass the convolution."""
    there, decodes = layer.on(device), layer.batch.num_decodes
    n = decodes * layer.batch.query_len
    guards = there.guard()
    out, convolution, state = (x.cpu() for x in there.chunks())
    assert all(room[free].isnan().all() for room, free in guards), "written beside a tensor"
    want = layer.run()
    assert torch.isnan(out[:n]).all()
    torch.testing.assert_close(out[n:].float(), want[0][n:].float(), atol=bound, rtol=bound)
    torch.testing.assert_close(convolution, want[1], equal_nan=True)
    rows = layer.batch.rows[decodes:]
    torch.testing.assert_close(state[rows], want[2][rows], atol=bound, rtol=bound, equal_nan=True)


def check_ungroup(sizes: DeltaSizes, dtype: torch.dtype, device: str = "cpu") -> None:
    """Bit for bit, of linears' outputs that are parts of wider rows."""
    from phalanx.kernels.recurrent import gated_delta_triton

    torch.manual_seed(0)
    qkvz, ba = (torch.randn(5, n + 8).to(dtype)[:, :n] for n in (sizes.channels + sizes.values, 2 * sizes.value_heads))
    got = gated_delta_triton.ungroup(qkvz.to(device), ba.to(device), sizes)
    for one, want in zip(got, gated_delta.ungroup(qkvz, ba, sizes), strict=True):
        assert torch.equal(one.cpu(), want)


def check_norm(sizes: DeltaSizes, dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    """z: a part of wider rows."""
    from phalanx.kernels.recurrent import gated_delta_triton

    torch.manual_seed(0)
    shape = 5, sizes.value_heads, sizes.value_dim
    x, weight = torch.randn(shape).to(dtype), torch.randn(sizes.value_dim).to(dtype)
    z = torch.randn(5, sizes.values + 8).to(dtype)[:, : sizes.values].unflatten(1, shape[1:])
    for silu in (True, False):
        got = gated_delta_triton.gated_norm(x.to(device), z.to(device), weight.to(device), 0.1, silu)
        want = gated_delta.gated_norm_reference(x, z, weight, 0.1, silu)
        torch.testing.assert_close(got.cpu().float(), want.float(), atol=bound, rtol=bound)


if __name__ == "__main__":
    mend_interpreter()
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    for taps, sizes in zip((4, 2, 3), SIZES, strict=True):
        check_steps(sizes, taps, torch.float32, 1e-5)
        check_norm(sizes, torch.float32, 1e-5)
    for taps, sizes, query_len, entries in zip((4, 2, 3), SIZES, (4, 2, 1), (4, 3, 4), strict=True):
        check_steps(sizes, taps, torch.float32, 1e-5, query_len=query_len, entries=entries)
    for sizes in SIZES[:2]:
        check_ungroup(sizes, torch.float32)
    check_norm(SIZES[0], torch.bfloat16, 2e-2)
    check_steps(SIZES[0], 4, torch.bfloat16, 2e-2)
    check_steps(SIZES[0], 3, torch.float32, 1e-5, query_len=2, entries=3, plain=True)
    check_chunks(Layer(SIZES[0], make_rows(*PROMPTS), 3, plain=True), 5e-5)
    for sizes, taps in ((SIZES[0], 4), (SIZES[2], 2)):
        check_chunks(Layer(sizes, make_rows(*PROMPTS), taps), 2e-5)
    check_chunks(Layer(SIZES[2], make_rows(*BESIDE_DRAFTS, query_len=4), 4), 2e-5)
    equal = Layer(SIZES[2], make_rows([128], [128]))
    equal.x[:] = equal.x[0]
    check_chunks(equal, 2e-5)
    check_chunks(Layer(SIZES[2], make_rows([70], [90]), dtype=torch.float16), 4e-3)  # bf16 it cannot multiply
