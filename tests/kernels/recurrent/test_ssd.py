"""Mamba-2's recurrence against the plainest computation: one token at a time, in f64."""

import pytest
import torch
from phalanx.kernels.recurrent import ssd

from ..interpreter import interpret
from .ssd_steps import PUBLISHED, SIZES, Scan, make_rows
from .test_gated_delta import CASES, KINDS, PROMPT_KINDS, compile_all


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("query_len, entries", [(1, 1), (1, 3), (4, 4), (2, 5)])
def test_decode_steps_in_cpp(sizes, dtype, bound, query_len, entries):
    """Against torch, from rows whose states are NaN where a sequence begins; other rows stay as they are."""
    torch.manual_seed(0)
    rows = make_rows([query_len] * 4, [9, query_len, 300, query_len + 1], [4, 0, 6, 1], query_len)
    scan = Scan(sizes, rows, dtype, entries)
    state = scan.state.clone()
    got = ssd.ssd_step_cpu(scan.xbc, scan.times, state, scan.batch, sizes)
    want = ssd.ssd_reference(scan.xbc, scan.times, scan.state, scan.batch, sizes)
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    torch.testing.assert_close(state, scan.state, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_rows_of_no_sequence_in_cpp():
    """They return zeros and write no state; the others' are what they are without them."""
    torch.manual_seed(0)
    scan = Scan(SIZES[0], make_rows([1] * 3, [9, 3, 2], [2, 0, 1]))
    state = scan.state.clone()
    out, states = scan.run()
    scan.batch.rows = torch.tensor([2, -1, 1])
    got = ssd.ssd_step_cpu(scan.xbc, scan.times, held := state.clone(), scan.batch, SIZES[0])
    assert not got[1].any() and torch.equal(held[0], state[0])
    torch.testing.assert_close((got[[0, 2]], held[1:]), (out[[0, 2]], states[1:]))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("query_lens, kv_lens, query_len, entries", CASES)
def test_chunks_and_sequences_that_decode(sizes, query_lens, kv_lens, query_len, entries):
    torch.manual_seed(0)
    scan = Scan(sizes, make_rows(query_lens, kv_lens, query_len=query_len), entries=entries)
    want = scan.plain()
    for got, wanted in zip(scan.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=5e-5, rtol=5e-5, equal_nan=True)


def test_16_bits():
    torch.manual_seed(0)
    scan = Scan(SIZES[0], make_rows([1, 70], [4, 90]), torch.bfloat16)
    want = scan.plain()
    for got, wanted in zip(scan.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("size", [8, 37, 128])
@pytest.mark.parametrize(
    "groups, normed, gate_first", [(1, True, True), (3, True, False), (3, True, True), (1, False, 1)]
)
def test_norm(dtype, bound, size, groups, normed, gate_first):
    """z: a part of wider rows."""
    x, weight = torch.randn(5, groups * size).to(dtype), torch.randn(groups * size).to(dtype)
    z = torch.randn(5, groups * size + 3).to(dtype)[:, :-3]
    gate, value, by = z.double() * z.double().sigmoid(), x.double(), weight.double()
    if normed:
        inside = (value * gate if gate_first else value).view(5, groups, size)
        inside = (inside / (inside.square().mean(-1, keepdim=True) + 0.1).sqrt()).flatten(1) * by
        want = inside if gate_first else inside * gate
    else:
        want = value * gate
    for norm in (ssd.ssd_norm, ssd.ssd_norm_reference):
        got = norm(x, z, weight if normed else None, 0.1, groups, bool(gate_first))
        torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)


@pytest.mark.long
def test_kernels_in_the_interpreter():
    interpret("recurrent.ssd_steps", timeout=110)


@pytest.mark.parametrize("dtype, arch", KINDS)
def test_compiles(dtype, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.recurrent import ssd_triton

    for q in (1, 4):
        scan = Scan(PUBLISHED, make_rows([q, q], [q + 3, q], query_len=q), dtype)
        with monkeypatch.context() as patch:
            compile_all(ssd_triton, ("ssd_step_kernel",), scan.steps, arch, patch)
    x = torch.zeros(2, 8192, dtype=dtype)
    compile_all(
        ssd_triton, ("ssd_norm_kernel",), lambda: ssd_triton.ssd_norm(x, x, x[0], 1e-6, 1, True), arch, monkeypatch
    )


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype, arch", PROMPT_KINDS)
@pytest.mark.parametrize("sizes", [PUBLISHED, PUBLISHED._replace(groups=1, state=256, head_dim=128)])
def test_kernel_of_prompts_compiles(dtype, arch, sizes, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.recurrent import ssd_triton

    scan = Scan(sizes, make_rows([1, 70], [4, 70]), dtype)
    compiled = compile_all(ssd_triton, ("ssd_chunk_kernel",), scan.chunks, arch, monkeypatch)
    assert dtype == torch.float32 or "wgmma" not in compiled["ssd_chunk_kernel"].asm["ptx"]  # ptxas 12.8 fails at them
