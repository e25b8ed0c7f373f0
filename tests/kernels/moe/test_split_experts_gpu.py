"""A GPU's part of experts that it reads from pinned host memory, and the CPU's: together the whole."""

import pytest
import torch
from phalanx.kernels import host_memory
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_exchange
from phalanx.kernels.moe.host_experts import Experts
from phalanx.kernels.moe.moe import Biases, Held, Inputs, fused_experts, fused_experts_reference
from phalanx.kernels.quantized import gpu_form

from ...devices import require_gpu
from ..gpu import poison  # noqa: F401
from .test_split_experts import CASES, EXPERTS, HIDDEN, INNER, experts_of, first_of, halves

require_gpu()
pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")


def seen(stack):
    """The stack in pinned host memory, as kernels see it there."""
    parts = gpu_form.parts(stack)
    found = []
    for x in parts.tensors:
        memory = host_memory.pinned(x.contiguous().view(torch.uint8).flatten())
        found.append(host_memory.on_gpu(memory).view(x.dtype).view(x.shape))
        assert found[-1].is_cuda and found[-1].data_ptr() == memory.data_ptr()
    return parts.of(found)


def case_of(form, tokens, biased, dtype, seed=0):
    whole = experts_of(form)
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).int()
    biases = Biases(torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)) if biased else Biases()
    biases = Biases(*(None if one is None else one.to(dtype) for one in biases))
    x = torch.randn(tokens, HIDDEN).to(dtype)
    return Inputs(x, ids, torch.rand(ids.shape), *whole, "silu", biases, Held(1, EXPERTS, 6))


def check(got, case):
    wide = Biases(*(None if one is None else one.float() for one in case.biases))
    want = fused_experts_reference(case._replace(x=case.x.float(), biases=wide))
    assert (got - want).norm() < 1e-2 * want.norm()


def on_gpu(case, stack):
    """The GPU's part with its inputs there: numbers from 0 on, of other experts what is past the end."""
    local = case.ids - case.held.first
    numbers = torch.where((local >= 0) & (local < EXPERTS), local, EXPERTS).cuda()
    up = None if case.biases.up is None else case.biases.up.cuda()
    of = case.act, Biases(up), Held(0, EXPERTS, EXPERTS + 3)
    return Inputs(case.x.cuda(), numbers, case.weights.cuda(), *stack, *of)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("form, dtype", CASES)
def test_both_parts_make_the_whole(form, tokens, biased, dtype):
    assert host_exchange.supports(torch.device("cuda"))
    case = case_of(form, tokens, biased, dtype)
    cpu, rest = halves(case, first_of(form))
    stack = Experts(seen(rest.w13), seen(rest.w2))
    check(cpu + fused_experts(on_gpu(rest, stack)).float().cpu(), case)


@pytest.mark.parametrize("form", ["q4_k", "bf16"])
def test_captured_beside_what_else_runs(form):
    """In a stream of its own that a graph forks and joins, with other experts at each replay."""
    cases = [case_of(form, 2, False, torch.bfloat16, seed) for seed in range(4)]
    parts = [halves(one, first_of(form)) for one in cases]
    stack = Experts(seen(parts[0][1].w13), seen(parts[0][1].w2))
    given = on_gpu(parts[0][1], stack)
    step, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    busy = torch.randn(512, 512, device="cuda")
    fused_experts(given)
    torch.cuda.synchronize()
    with torch.cuda.stream(step):
        busy @ busy
        graph.capture_begin(capture_error_mode="thread_local")
        side.wait_stream(step)
        with torch.cuda.stream(side):
            y = fused_experts(given)
        other = busy @ busy
        step.wait_event(side.record_event())
        total = y.float() + 0 * other.sum()
        graph.capture_end()
    for turn in range(12):
        case, (cpu, rest) = cases[turn % 4], parts[turn % 4]
        for static, new in zip(given[:3], on_gpu(rest, stack)[:3], strict=True):
            static.copy_(new)
        graph.replay()
        check(cpu + total.cpu(), case)
