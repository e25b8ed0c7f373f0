"""Grouped GEMMs of many pairs on Hopper against their torch reference: both tiles, gates, odd counts."""

import functools
import subprocess
import sys

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU
from phalanx.kernels.moe import moe, plain_experts

from ...devices import needs_hopper, require_gpu
from ..gpu import poison  # noqa: F401
from .cases import Sizes, biases, make, near, share_of, shares, strided, summed, without_gate
from .reference import fused_experts_reference

require_gpu()
pytestmark = needs_hopper
ROWS = 128, 192
KINDS = [(torch.bfloat16, 4e-2), (torch.float16, 6e-3)]
SMALL = Sizes(1, 4, 20, 512, 384)
ODD = Sizes(1, 3, 7, 320, 192)  # columns that tiles do not divide


def check(given, bound, want=None):
    """Tiles of either size, three times: a race would not show each time."""
    want = fused_experts_reference(given) if want is None else want
    for rows in ROWS:
        found = [plain_experts.by_wgmma(given, rows) for _ in range(3)]
        near(summed(found[0], given), want, bound)
        if given.local_experts is None:
            assert all(torch.equal(one, found[0]) for one in found), rows


def main():
    of = [(2 * SMALL.inner, SMALL.hidden, "silu"), (SMALL.hidden, SMALL.inner, "")]
    made = [plain_experts.wgmma_sizes(*one, False, rows) for one in of for rows in ROWS]
    jit.compile_ahead([jit.variant("wgmma_experts", torch.bfloat16, **one) for one in made], torch.device("cuda"))
    for tokens, spread in ((1, "any"), (300, "any"), (700, "one")):
        torch.manual_seed(0)
        print(tokens, spread, flush=True)
        check(make(SMALL._replace(tokens=tokens, spread=spread), torch.bfloat16, "cuda"), 4e-2)
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def blocks_end():
    """Warps that wait for each other do so in another process first, as what never ends would end no test."""
    command = [sys.executable, "-m", "phalanx.tests.kernels.moe.test_wgmma_experts_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_both_tiles(blocks_end, sizes, dtype, bound):
    """Empty experts, one token, all tokens to one choice."""
    for tokens, spread in ((1, "any"), (9, "few"), (256, "any"), (700, "one"), (2000, "any"), (1500, "few")):
        check(make(sizes._replace(tokens=tokens, spread=spread), dtype, "cuda"), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("sizes", [ODD, Sizes(1, 3, 7, 328, 200), Sizes(1, 6, 12, 2688, 1856)])
def test_without_a_gate(blocks_end, sizes, dtype, bound):
    for tokens, spread in ((1, "any"), (300, "few"), (700, "any")):
        given = without_gate(make(sizes._replace(tokens=tokens, spread=spread), dtype, "cuda"))
        for one in (given, given._replace(act="silu"), given._replace(biases=biases(given))):
            check(one, bound * 2)


@pytest.mark.parametrize("act", ["gelu_tanh", CLAMPED_SWIGLU])
def test_biases_and_activations(blocks_end, act):
    for sizes in (SMALL, ODD):
        given = make(sizes._replace(tokens=300), torch.bfloat16, "cuda")._replace(act=act)
        added = biases(given)
        for part in (added, added._replace(up=None)):
            check(given._replace(biases=part), 8e-2)


@pytest.mark.parametrize("local_experts", shares(12), ids=str)
def test_experts_of_other_ranks_are_left_out(blocks_end, local_experts):
    for tokens in (1, 500):
        check(share_of(make(Sizes(tokens, 3, 12, 512, 384), torch.bfloat16, "cuda"), local_experts), 4e-2)


@functools.cache
def lite():
    return make(Sizes(1600, 6, 24, 2048, 1408), torch.bfloat16, "cuda")


def test_experts_of_models(blocks_end):
    """Experts of DeepSeek-V2-Lite's sizes, whose gates are eleven tiles, and other numbers of tokens."""
    want = fused_experts_reference(lite())
    for tokens in (1600, 1111, 40):
        given = lite()._replace(**{name: getattr(lite(), name)[:tokens] for name in ("x", "ids", "weights")})
        check(given, 4e-2, want[:tokens])


def test_the_way_that_is_chosen(blocks_end, monkeypatch):
    """Also as a graph of other choices."""
    called = []
    by_wgmma = plain_experts.by_wgmma
    monkeypatch.setattr(plain_experts, "by_wgmma", lambda *one: called.append(one[1]) or by_wgmma(*one))
    for tokens, rows in ((480, 0), (481, 192), (800, 192), (801, 128), (2000, 128)):
        given = make(SMALL._replace(tokens=tokens), torch.bfloat16, "cuda")
        want = fused_experts_reference(given)
        near(moe.fused_experts(given), want, 4e-2)
        near(moe.fused_experts(strided(given)), want, 4e-2)
        assert called == [rows] * 2 * bool(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe.fused_experts(given)
        other = make(SMALL._replace(tokens=tokens), torch.bfloat16, "cuda")
        for to, one in zip(given[:5], other[:5], strict=True):
            to.copy_(one)
        graph.replay()
        near(y, fused_experts_reference(given), 4e-2)
        called.clear()


if __name__ == "__main__":
    main()
