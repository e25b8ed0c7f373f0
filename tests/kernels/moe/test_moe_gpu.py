"""Experts and routers on a GPU against their torch references, with NaN in all that must not be read or left."""

import time

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU
from phalanx.kernels.moe import expert_mlp, moe, plain_experts, router
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.router import RouterParams
from phalanx.kernels.norm import norm

from ...devices import needs_tma, require_gpu
from ..gpu import poison  # noqa: F401
from ..programs import V2_ROUTER, V3_ROUTER
from .cases import CASES, Sizes, biases, make, near, share_of, shares, strided, summed, without_gate
from .reference import fused_experts_reference

require_gpu()
KINDS = [(torch.float32, 3e-5), (torch.bfloat16, 4e-2), (torch.float16, 6e-3)]
QWEN = Sizes(1, 8, 24, 2048, 768)  # but for its count of experts
NEMOTRON, NEMOTRON_TP2 = Sizes(1, 6, 24, 2688, 1856), Sizes(1, 6, 24, 2688, 928)  # likewise


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8), QWEN, Sizes(3, 3, 12, 2880, 1440, "few")])
def test_experts(sizes, dtype, bound):
    for act in ("silu", "gelu_tanh"):
        given = make(sizes, dtype, "cuda")._replace(act=act)
        want = fused_experts_reference(given)
        near(moe.fused_experts(given), want, bound)
        near(moe.fused_experts(strided(given)), want, bound)


@pytest.mark.parametrize("sizes", [one._replace(tokens=n) for one in (QWEN, CASES[0], CASES[3]) for n in (1, 5, 8)])
def test_gemv(sizes):
    given = make(sizes, torch.bfloat16, "cuda")
    assert plain_experts.gemv_takes(given.x, given.ids, given.w13, given.w2)
    near(plain_experts.gemv(given), fused_experts_reference(given), 4e-2)
    given = without_gate(given)
    near(plain_experts.gemv(given), fused_experts_reference(given), 4e-2)


@pytest.mark.parametrize("tiles", plain_experts.TILINGS.values())
@pytest.mark.parametrize("spread", ["any", "few", "one"])
@pytest.mark.parametrize("tokens", [1, 16, 100, 300])
def test_tiles(tiles, spread, tokens):
    given = make(Sizes(tokens, 4, 20, 512, 384, spread), torch.bfloat16, "cuda")
    want = fused_experts_reference(given)
    near(summed(plain_experts.by_triton(given, tiles), given), want, 4e-2)


@pytest.mark.parametrize("sizes", [QWEN, *CASES])
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_biases(sizes, tokens):
    given = make(sizes._replace(tokens=tokens), torch.bfloat16, "cuda")
    added = biases(given)
    for part in (added, added._replace(down=None)):
        one = given._replace(act=CLAMPED_SWIGLU, biases=part)
        near(moe.fused_experts(one), fused_experts_reference(one), 8e-2)


@pytest.mark.parametrize("tokens", [1, 40, 300, 700])
@pytest.mark.parametrize("sizes", [QWEN, NEMOTRON, NEMOTRON_TP2, CASES[3]._replace(spread="any")])
def test_without_a_gate(sizes, tokens):
    for dtype, bound in KINDS[1:]:
        given = without_gate(make(sizes._replace(tokens=tokens), dtype, "cuda"))
        for one in (given, given._replace(act="silu"), given._replace(biases=biases(given))):
            near(moe.fused_experts(one), fused_experts_reference(one), bound * 2)


@needs_tma
@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("spread", ["any", "few", "one"])
@pytest.mark.parametrize("tokens", [1, 9, 30, 75, 200])
def test_in_one_launch(tiles, spread, tokens):
    """Also more items than blocks, experts of several items, and a first item that is not what the block guesses."""
    for dtype, bound in KINDS[1:]:
        given = make(Sizes(tokens, 4, 20, 512, 384, spread), dtype, "cuda")
        assert expert_mlp.supports(given.x, given.w13, given.w2)
        near(summed(expert_mlp.experts(given, tiles), given), fused_experts_reference(given), bound)
        assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


@needs_tma
@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("hidden, inner", [(128, 320), (2944, 192), (256, 64), (2688, 1856), (152, 72), (512, 928)])
def test_in_one_launch_of_any_size(hidden, inner, tiles):
    """Chunks of 64 and of 128; the last block of outputs and the last chunk of inputs are not whole."""
    for dtype, bound in KINDS[1:]:
        gated = make(Sizes(11 * tiles, 4, 20, hidden, inner), dtype, "cuda")
        for given in (gated, without_gate(gated), without_gate(gated)._replace(act="silu")):
            assert expert_mlp.supports(given.x, given.w13, given.w2)
            near(summed(expert_mlp.experts(given, tiles), given), fused_experts_reference(given), bound)


@needs_tma
@pytest.mark.parametrize("tokens, tiles", [(40, 1), (40, 2), (64, 4)])
def test_layers_in_one_launch(tokens, tiles):
    """One behind the other, as graphs and one by one, each with other experts: routers, sorting and experts' first
    weights overlap, and what is as before must be the same."""
    layers = [make(QWEN._replace(tokens=tokens), torch.bfloat16, "cuda") for _ in range(3)]
    routers = [torch.randn(QWEN.experts, QWEN.hidden, device="cuda").bfloat16() / 32 for _ in layers]
    weights = [(one.w13.nan_to_num(0.01), one.w2.nan_to_num(0.01)) for one in layers]
    norm_weight, params = torch.ones(QWEN.hidden, device="cuda").bfloat16(), RouterParams(QWEN.k)
    start, found = layers[0].x, []

    def step(pause):
        residual, terms = start.clone(), start[:, None].clone()
        for gate, (w13, w2) in zip(routers, weights, strict=True):
            x, residual = norm.sum_add_rms_norm(terms, residual, norm_weight, 1e-5)
            pause()
            ids, by = router.route(x, gate, None, params)
            pause()
            given = moe.Inputs(x, ids, by, w13, w2)
            terms = expert_mlp.experts(given, tiles).view(len(x), -1, x.shape[1])
            pause()
        found.append(residual.add(terms.float().sum(1)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(stream.synchronize)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        step(lambda: None)
        graph.capture_end()
        want, got = found
        assert want.isfinite().all()
        for _ in range(20):  # a race would not show each time
            got.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
            assert torch.equal(got, want)
            step(lambda: None)
            assert torch.equal(found.pop(), want)


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("sizes", [*CASES, QWEN._replace(tokens=700), Sizes(9000, 8, 128, 8, 8, "few")])
def test_groups(sizes, rows):
    ids = make(sizes, torch.float32, "cuda").ids
    found, want = group(ids, sizes.experts, rows), group(ids.cpu(), sizes.experts, rows)
    assert torch.equal(found.offsets.cpu(), want.offsets)
    assert torch.equal(found.tile_expert.cpu(), want.tile_expert)
    needed = want.tile_expert >= 0
    assert torch.equal(found.tile_start.cpu()[needed], want.tile_start[needed])
    assert torch.equal(found.sorted_ids.cpu().sort().values, torch.arange(ids.numel(), dtype=torch.int32))
    chosen = ids.flatten()[found.sorted_ids.long()]
    assert torch.equal(chosen, chosen.sort().values)


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("spread", ["any", "few", "one"])
def test_experts_of_one_rank(tokens, spread):
    """Every kernel: routed tokens of experts that the rank lacks are left out, and what they would be is not read."""
    sizes = Sizes(tokens, 4, 20, 512, 384, spread)
    for dtype, bound in KINDS:
        whole = make(sizes, dtype, "cuda")
        for local_experts in shares(sizes.experts):
            given = share_of(whole, local_experts)
            want = fused_experts_reference(given)
            near(moe.fused_experts(given), want, bound)
            tiles = plain_experts.tiling(given.routed, given.experts, dtype)
            near(summed(plain_experts.by_triton(given, tiles), given), want, bound)
            if dtype != torch.float32:
                assert plain_experts.gemv_takes(given.x, given.ids, given.w13, given.w2)
                near(plain_experts.gemv(given), want, bound)


def test_groups_of_one_rank():
    ids = make(Sizes(700, 8, 24, 8, 8), torch.float32, "cuda").ids
    for local_experts in shares(24):
        found, want = (
            group(ids, local_experts.size, 16, local_experts),
            group(ids.cpu(), local_experts.size, 16, local_experts),
        )
        assert torch.equal(found.offsets.cpu(), want.offsets) and torch.equal(found.tile_expert.cpu(), want.tile_expert)
        count = int(want.offsets[-1])
        assert torch.equal(found.sorted_ids[:count].cpu().sort().values, want.sorted_ids[:count].sort().values)


def test_a_graph_with_other_choices():
    """A captured graph holds for any choice."""
    for tokens in (2, 50):
        one, other = (make(Sizes(tokens, 4, 33, 256, 128), torch.bfloat16, "cuda") for _ in range(2))
        w13, w2 = (torch.randn_like(x) * 0.06 for x in (one.w13, one.w2))
        mine = moe.Inputs(*(y.clone() for y in one[:3]), w13, w2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            moe.fused_experts(mine)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            y = moe.fused_experts(mine)
            graph.capture_end()
            for given in (one, other):
                for to, value in zip(mine[:3], given[:3], strict=True):
                    to.copy_(value)
                graph.replay()
                stream.synchronize()
                near(y, fused_experts_reference(given._replace(w13=w13, w2=w2)), 4e-2)


ROUTERS = [
    RouterParams(8), RouterParams(3, normalise=False), RouterParams(1), RouterParams(4, biased=True),
    RouterParams(6, "sigmoid", corrected=True, scale=2.5),
    RouterParams(4, "sigmoid", corrected=True, normalise=False), V3_ROUTER._replace(groups=4, top_groups=2),
    V2_ROUTER._replace(groups=4, top_groups=3),
]  # fmt: skip


@pytest.mark.parametrize("params", ROUTERS)
@pytest.mark.parametrize("experts, hidden", [(128, 2048), (60, 2880), (8, 4096), (257, 64), (13, 8)])
def test_router(params, experts, hidden):
    if params.top_k > experts or experts % params.groups or params.top_k > experts // params.groups * params.top_groups:
        return
    for tokens in (0, 1, 2, 3, 7, 64, 256, 257, 1000):
        x, weight = (torch.randn(n, hidden, device="cuda").bfloat16() for n in (tokens, experts))
        weight *= hidden**-0.5
        bias = torch.rand(experts, device="cuda") if params.corrected or params.biased else None
        assert router.supports(weight, params)
        ids, weights = router.route(x, weight, bias, params)
        want_ids, _ = router.route_reference(x, weight, bias, params)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert all(len(set(row)) == params.top_k for row in ids.tolist())
        # Either of two scores that are as good as equal may be chosen: nearly all choices agree, and all weights fit
        # them.
        agree = (ids.sort().values == want_ids.sort().values).all(-1).float().mean() if tokens else 1
        assert agree > 0.97
        every = params._replace(top_k=experts, normalise=False, scale=1.0, corrected=False, groups=1)
        all_ids, scores = router.route_reference(x, weight, bias, every)
        chosen = torch.zeros_like(scores).scatter_(1, all_ids.long(), scores).gather(1, ids.long())
        chosen = chosen / chosen.sum(-1, keepdim=True) if params.normalise else chosen
        torch.testing.assert_close(weights, chosen * params.scale, atol=1e-5, rtol=1e-4)
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


def test_ids_are_valid_whatever_comes():
    for fill in (float("nan"), float("inf"), 0.0):
        x = torch.full((9, 64), fill, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(20, 64, device="cuda").bfloat16()
        for params in (RouterParams(4), RouterParams(4, "sigmoid")):
            ids, _ = router.route(x, weight, None, params)
            assert ((ids >= 0) & (ids < 20)).all() and all(len(set(row)) == 4 for row in ids.tolist())


HOLD = r"""
extern "C" __global__ void hold(volatile int* flag, int* there) {
    extern __shared__ char memory[];
    if (threadIdx.x == 0) atomicAdd(there, 1);
    while (!*flag) __nanosleep(1000);
}
"""


@needs_tma
@pytest.mark.parametrize("local_experts", [1, 40, 131])
def test_one_launch_beside_a_kernel_that_holds_multiprocessors(local_experts):
    """Blocks that wait for others must not keep those from starting: this hung until the other kernel had ended."""
    cupy = pytest.importorskip("cupy")
    given = make(Sizes(64, 8, 128, 2048, 768), torch.bfloat16, "cuda")
    want = expert_mlp.experts(given)  # compiles
    torch.cuda.synchronize()
    flag, there = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    hold = cupy.RawKernel(HOLD, "hold")
    hold.max_dynamic_shared_size_bytes = 200 << 10
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    ended = torch.cuda.Event()
    limit = time.monotonic() + 20
    try:
        with cupy.cuda.ExternalStream(other.cuda_stream):
            hold((local_experts,), (32,), (flag.data_ptr(), there.data_ptr()), shared_mem=200 << 10)
        while int(there) < local_experts and time.monotonic() < limit:
            time.sleep(1e-3)  # until the next look
        with torch.cuda.stream(mine):
            for _ in range(3):
                y = expert_mlp.experts(given)
            ended.record()
        while not ended.query() and time.monotonic() < limit:
            time.sleep(1e-3)  # until the next look
        beside = ended.query()
    finally:
        flag[0] = 1
    torch.cuda.synchronize()
    assert beside and int(there) == local_experts
    assert torch.equal(y, want) and not jit.counters(given.x.device, mine.cuda_stream).any()
