"""Experts computed on CPUs beside moe.py's, whatever is computed in which round."""

import numpy as np
import pytest
import torch
from phalanx.kernels.activation.activation import ACTIVATIONS, CLAMPED_SWIGLU, clamped
from phalanx.kernels.moe.host_experts import Experts, HostRouted
from phalanx.kernels.moe.moe import Biases, Inputs, LocalExperts
from phalanx.kernels.quantized import e4m3, gpu_layout
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import stack

from ..conftest import TILES, close
from .cases import CASES, make
from .reference import fused_experts_reference


def rounds(case, cuts):
    """The sum where experts are computed in so many rounds, each from a stack of its own."""
    x, ids, weights, w13, w2, act, biases, local_experts, _ = case
    first = local_experts.first if local_experts else 0
    routed = HostRouted(x, ids, weights, act, biases, first)
    local = ids.flatten().numpy() - first
    counts = np.bincount(local[(local >= 0) & (local < len(w13))], minlength=len(w13))
    for some in np.array_split(np.random.default_rng(0).permutation(len(w13)), cuts):
        at = torch.full((len(w13),), -1)
        at[torch.from_numpy(some)] = torch.arange(len(some))
        routed.add(Experts(w13[some].contiguous(), w2[some].contiguous()), at, int(counts[some].sum()))
    return routed.sum()


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_sums(sizes, dtype):
    case = make(sizes, dtype)
    want = fused_experts_reference(case)
    one = rounds(case, 1)
    close(one.to(dtype), want, dtype, atol=2e-5 if dtype == torch.float32 else 3e-2)
    if dtype == torch.float32:
        assert all(torch.equal(rounds(case, cuts), one) for cuts in (2, 3))  # bit by bit, in any rounds


@pytest.mark.parametrize("act", [*ACTIVATIONS, clamped(CLAMPED_SWIGLU, 0.5)])
def test_biases_and_experts_of_other_ranks(act):
    case = make(CASES[1], torch.float32)
    w13, w2 = case.w13[3:9].contiguous(), case.w2[3:9].contiguous()
    biases = Biases(torch.randn(6, w13.shape[1]), torch.randn(6, w2.shape[1]))
    case = case._replace(w13=w13, w2=w2, act=act, biases=biases, local_experts=LocalExperts(3, 6, 12))
    close(rounds(case, 2), fused_experts_reference(case), torch.float32, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("rows, inner", [(7, 32), (8, 24), (17, 72), (70, 64)])
def test_plain_weights_by_tiles(tiled, isa, rows, inner):
    """Experts of some rows, one with few of them and one without any; outputs that tiles do not divide."""
    tiled(isa)
    torch.manual_seed(0)
    hidden, experts = 96, 4
    w13, w2 = (torch.randn(experts, *shape).bfloat16() / 8 for shape in ((2 * inner, hidden), (hidden, inner)))
    ids = torch.zeros(rows, 2, dtype=torch.int32)
    ids[:, 1], ids[0, 1] = 1, 3
    biases = Biases(torch.randn(experts, 2 * inner).bfloat16(), torch.randn(experts, hidden).bfloat16())
    case = Inputs(torch.randn(rows, hidden).bfloat16(), ids, torch.rand(rows, 2), w13, w2, biases=biases)
    for cuts in (1, 2):
        close(rounds(case, cuts).bfloat16(), fused_experts_reference(case), torch.bfloat16, atol=3e-2)


def calls_of(routed, codec=None):
    """A layer's operations, and where they read and write, but for its weights."""
    shapes = (4, 128, 96), (4, 96, 64)
    w13, w2 = (torch.randn(shape).bfloat16() for shape in shapes)
    if codec:
        w13, w2 = (stack(codec, lambda e, one=one: codec.encode(one[e]), one.shape) for one in (w13, w2))
    layer = Experts(w13, w2)
    at, out = torch.arange(4), torch.empty(routed.x.shape)
    found = routed.all_calls(layer, at, out)
    assert ["experts" in one.name for one, _ in found.calls].index(True) == found.before
    own = {x.data_ptr() for x in (at, out, *(x for one in layer for x in gpu_layout.parts(one).tensors))}
    used = {x.data_ptr() for _, values in found.calls for x in values if isinstance(x, torch.Tensor)}
    return found.calls, used - own


def step_of(tokens):
    ids = torch.tensor([[0, 1]] * tokens, dtype=torch.int32)
    return HostRouted(torch.randn(tokens, 96).bfloat16(), ids, torch.rand(tokens, 2), "silu")


@pytest.mark.parametrize("isa", TILES)
def test_layers_share_memory(tiled, isa):
    tiled(isa)
    for codec in (None, q8_0, e4m3):
        routed = step_of(5)
        first, second = calls_of(routed, codec), calls_of(routed, codec)
        assert first[1] == second[1], codec


@pytest.mark.parametrize("isa", TILES)
def test_a_small_batch_is_not_interleaved_in_pairs(tiled, isa):
    tiled(isa)
    for tokens, times in ((7, 0), (8, 2)):
        names = [one.name for one, _ in calls_of(step_of(tokens))[0]]
        assert names.count("pair_rows") == times
