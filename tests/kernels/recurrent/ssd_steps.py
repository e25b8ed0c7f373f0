"""Steps of Mamba-2's recurrence on states with NaN where a sequence begins; run as a program, Triton's kernels in the
interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from phalanx.kernels.recurrent import ssd
from phalanx.kernels.recurrent.ssd import SsdSizes, TimeSteps
from torch import Tensor

from ..attention.decoding import mend_interpreter
from .steps import BESIDE_DRAFTS, NAN, PROMPTS, make_rows

SIZES = [SsdSizes(2, 6, 12, 20), SsdSizes(1, 3, 16, 40), SsdSizes(2, 2, 8, 8)]
PUBLISHED = SsdSizes(8, 64, 128, 64)  # Nemotron 3 Nano


class Scan:
    """Random inputs of a step, and states of the sequences before it."""

    def __init__(self, sizes: SsdSizes, batch: Any, dtype: torch.dtype = torch.float32, entries: int = 0):
        """entries: of the rings; as many as the batch needs unless given."""
        tokens, count, heads = sum(batch.query_lens), int(batch.rows.max()) + 1, sizes.heads
        self.sizes, self.batch = sizes, batch
        self.xbc = torch.randn(tokens, sizes.channels + 8).to(dtype)[:, : sizes.channels]  # a part of wider rows
        dt = torch.randn(tokens, heads + 3).to(dtype)[:, :heads]
        self.times = TimeSteps(dt, torch.rand(heads) * 3 - 2, torch.randn(heads), torch.randn(heads))
        self.state = torch.randn(count, entries or batch.query_len, heads, sizes.state, sizes.head_dim)
        self.state[batch.rows[(batch.lengths <= batch.query_starts.diff()) & (batch.rows >= 0)]] = NAN

    def on(self, device: str) -> Scan:
        other = Scan.__new__(Scan)
        batch = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in vars(self.batch).items()}
        other.sizes, other.batch = self.sizes, SimpleNamespace(**batch | {"scratch": {}})
        other.times = TimeSteps(*(x.to(device) for x in self.times))
        other.xbc, other.state = self.xbc.to(device), self.state.to(device, copy=True)
        return other

    def plain(self) -> tuple[Tensor, Tensor]:
        """The results of `run`, one token at a time in f64: outputs, and the rows' new states."""
        sizes, states, t = self.sizes, self.state.double(), 0
        each, entries = sizes.heads // sizes.groups, states.shape[1]
        dt, decay = TimeSteps(*(x.double() for x in self.times)).steps()
        out = torch.empty(len(self.xbc), sizes.heads, sizes.head_dim, dtype=torch.float64)
        for i, count in enumerate(self.batch.query_lens):
            row, first = int(self.batch.rows[i]), int(self.batch.lengths[i]) - count
            state = states[row, (first - 1) % entries].clone() if first else torch.zeros_like(states[row, 0])
            for j in range(count):
                x, b, c = self.xbc[t].double().split([sizes.values, sizes.keys, sizes.keys])
                x = x.view(sizes.heads, -1)
                b, c = (one.view(sizes.groups, -1).repeat_interleave(each, 0) for one in (b, c))
                written = torch.einsum("hs,hd->hsd", b, x * dt[t, :, None].double())
                state = state * decay[t, :, None, None].double().exp() + written
                out[t] = torch.einsum("hsd,hs->hd", state, c) + self.times.D[:, None] * x
                if i < self.batch.num_decodes or j == count - 1:  # of a prompt the last token's state alone is kept
                    states[row, (first + j) % entries] = state
                t += 1
        return out, states

    def run(self) -> tuple[Tensor, Tensor]:
        out = ssd.ssd(self.xbc, self.times, self.state, self.batch, self.sizes)
        assert out.dtype == self.xbc.dtype
        return out, self.state

    def steps(self) -> tuple[Tensor, Tensor]:
        """Results by the Triton kernel of decode steps."""
        from phalanx.kernels.recurrent import ssd_triton

        batch, out = self.batch, self.xbc.new_empty(len(self.xbc), self.sizes.heads, self.sizes.head_dim)
        ssd_triton.ssd_step(
            self.xbc, self.times, self.state, batch.rows, batch.lengths, self.sizes, out, batch.query_len
        )
        return out, self.state

    def chunks(self) -> tuple[Tensor, Tensor]:
        """Results by the Triton kernel of prompts. What stands in `out` of sequences of one token stays NaN."""
        from phalanx.kernels.recurrent import ssd_triton

        out = self.xbc.new_full((len(self.xbc), self.sizes.heads, self.sizes.head_dim), NAN)
        ssd_triton.ssd_chunks(self.xbc, self.times, self.state, self.batch, self.sizes, out)
        return out, self.state


def check_steps(
    sizes: SsdSizes, dtype: torch.dtype, bound: float, device: str = "cpu", query_len: int = 1, entries: int = 0
) -> None:
    """Sequences that begin and that go on, and a row that fills a captured step up."""
    torch.manual_seed(0)
    lengths = [9, query_len, 300, query_len, query_len + 1]
    scan = Scan(sizes, make_rows([query_len] * 5, lengths, [4, 0, 6, 2, 1], query_len), dtype, entries)
    there = scan.on(device)
    there.batch.rows = torch.tensor([4, 0, 6, -1, 1], device=device)
    want, (out, state) = scan.run(), [x.cpu() for x in there.steps()]
    out, wanted = (x.unflatten(0, (5, query_len)) for x in (out, want[0]))
    assert not out[3].any() and torch.isnan(state[2]).all()
    live = [0, 1, 2, 4]
    torch.testing.assert_close(out[live].float(), wanted[live].float(), atol=bound, rtol=bound)
    for row in (4, 0, 6, 1):
        torch.testing.assert_close(state[row], want[1][row], atol=bound, rtol=bound, equal_nan=True)
    for row in (3, 5):
        assert torch.equal(state[row], want[1][row])  # of no sequence in this step


def check_chunks(scan: Scan, bound: float, device: str = "cpu") -> None:
    """Checks sequences of several tokens; those of one stand before them."""
    there, decodes = scan.on(device), scan.batch.num_decodes
    n, rows = decodes * scan.batch.query_len, scan.batch.rows[decodes:]
    (out, state), want = [x.cpu() for x in there.chunks()], scan.run()
    assert torch.isnan(out[:n]).all()
    torch.testing.assert_close(out[n:].float(), want[0][n:].float(), atol=bound, rtol=bound)
    torch.testing.assert_close(state[rows], want[1][rows], atol=bound, rtol=bound, equal_nan=True)


def check_norm(dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    from phalanx.kernels.recurrent import ssd_triton

    torch.manual_seed(0)
    x, weight = torch.randn(5, 60).to(dtype), torch.randn(60).to(dtype)
    z = torch.randn(5, 68).to(dtype)[:, :60]
    for of, groups, first in ((weight, 3, True), (weight, 1, False), (None, 1, True)):
        given = (one if one is None else one.to(device) for one in (x, z, of))
        got = ssd_triton.ssd_norm(*given, 0.1, groups, first)
        want = ssd.ssd_norm_reference(x, z, of, 0.1, groups, first)
        torch.testing.assert_close(got.cpu().float(), want.float(), atol=bound, rtol=bound)


if __name__ == "__main__":
    mend_interpreter()
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    for one in SIZES:
        check_steps(one, torch.float32, 1e-5)
    for one, count, ring in zip(SIZES, (4, 2, 1), (4, 3, 4), strict=True):
        check_steps(one, torch.float32, 1e-5, query_len=count, entries=ring)
    check_steps(SIZES[0], torch.bfloat16, 2e-2)
    check_norm(torch.float32, 1e-5)
    for one in (SIZES[0], SIZES[2]):
        check_chunks(Scan(one, make_rows(*PROMPTS)), 5e-5)
    check_chunks(Scan(SIZES[1], make_rows(*BESIDE_DRAFTS, query_len=4)), 5e-5)
    check_chunks(Scan(SIZES[2], make_rows([70], [90]), torch.float16), 2e-2)  # bf16 it cannot multiply
