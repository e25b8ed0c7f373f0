"""Operations recorded and replayed: the same results on other inputs in the same memory; what makes no graph."""

import gc
import subprocess
import sys

import pytest
import torch
from phalanx.kernels.activation.activation import gated_activation
from phalanx.kernels.cpp import graph, ops
from phalanx.kernels.gemm.linear import linear
from phalanx.kernels.norm.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
WEIGHTS = [torch.randn(2 * 48, 32) * 0.2, torch.randn(32, 48) * 0.2, torch.rand(32)]


def layers(x, count=3):
    gate_up, down, weight = WEIGHTS
    residual, h = x, rms_norm(x, weight, 1e-5)
    for _ in range(count):
        h = linear(gated_activation(linear(h, gate_up)), down)
        h, residual = add_rms_norm(h, residual.view(len(x), 32), weight, 1e-5)
    return residual.add_(h)


def eager(x):
    with torch.no_grad():
        return layers(x.clone())


def test_a_replay_computes_the_same_of_other_inputs(threads):
    x, memory = torch.randn(3, 32), graph.Memory()
    first = x.clone()
    want = eager(first)
    result, made, reason = graph.capture(lambda: layers(x), memory)
    assert reason == "" and len(made) == 1 + 3 * 4 + 1
    torch.testing.assert_close(result, want)
    for _ in range(3):
        x.copy_(torch.randn(3, 32))
        want = eager(x)
        made.replay()
        torch.testing.assert_close(result, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.7, torch.tensor([[[0.3]], [[1.1]], [[-2.0]]])])
def test_products_with_a_number_for_each_row_are_recorded(threads, dtype, factor):
    x = torch.randn(3, 5, 37).to(dtype)[:, 1:4]
    want = x.clone().mul_(factor)
    result, made, reason = graph.capture(lambda: x.mul_(factor), graph.Memory())
    assert reason == "" and len(made) == 1 and torch.equal(result, want)
    made.replay()
    assert torch.equal(x, want.mul_(factor))
    for other in (x, torch.ones(3, 1, 1, dtype=torch.float64), torch.ones(1, 3, 1)):
        assert graph.capture(lambda other=other: x.mul_(other), graph.Memory())[1] is None
    assert graph.capture(lambda: x.mT.mul_(2.0), graph.Memory())[1] is None


def test_tensors_of_a_graph_share_memory_as_they_come_and_go():
    memory = graph.Memory()
    graph.capture(lambda: layers(torch.empty(4, 32)), memory)
    gc.collect()
    few = memory.nbytes
    result, made, _ = graph.capture(lambda: layers(torch.empty(4, 32), count=50), memory)
    del result, made
    gc.collect()
    assert memory.nbytes == few  # fifty layers need no more than three


def test_results_of_graphs_that_share_memory_do_not_overlap():
    memory, inputs = graph.Memory(), [torch.randn(rows, 32) for rows in (8, 4, 1)]
    made = [graph.capture(lambda x=x: layers(x), memory)[:2] for x in inputs]
    for x in inputs:
        x.normal_()
    for (result, one), x in zip(made, inputs, strict=True):
        want = eager(x)
        one.replay()
        torch.testing.assert_close(result, want)


def test_what_a_graph_reads_is_kept():
    x, weights = torch.randn(2, 32), [torch.full((96, 32), 2.0)]
    where = weights[0].data_ptr()
    _, made, _ = graph.capture(lambda: linear(x, weights.pop()), graph.Memory())
    others = [torch.zeros(96, 32) for _ in range(50)]
    assert all(other.data_ptr() != where for other in others)
    made.replay()


def not_captured(function):
    result, made, reason = graph.capture(function, graph.Memory())
    assert made is None and reason
    return result, reason


def test_recording_imports_nothing():
    """Recording imports nothing such as torch's compiler, by which a second token came 2 s late."""
    program = """if True:
        import sys
        import torch
        from phalanx.kernels.cpp import graph, ops
        from phalanx.kernels.gemm.linear import linear
        x = torch.randn(3, 32)
        linear(x, x)
        before = set(sys.modules)
        assert graph.capture(lambda: linear(x, x), graph.Memory())[1] is not None
        print(*sorted(set(sys.modules) - before))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_what_torch_computes_makes_no_graph():
    x = torch.randn(2, 32)
    result, reason = not_captured(lambda: torch.sin(rms_norm(x, WEIGHTS[2], 1e-5)))
    assert "sin" in reason
    torch.testing.assert_close(result, torch.sin(rms_norm(x, WEIGHTS[2], 1e-5)))
    assert "copy" in not_captured(lambda: torch.empty(2, 32).copy_(x))[1]
    assert not_captured(lambda: x.add_(1))[1] and not_captured(lambda: x.add_(x, alpha=2))[1]
    assert not_captured(lambda: x[x.sum() > 0])[1]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x[0, 0].item(), bool])
def test_what_reads_a_tensor_elsewhere_makes_no_graph(read):
    x = torch.ones(1, 1)
    assert not_captured(lambda: read(x))[1]


def test_views_and_allocations_are_no_computation():
    x = torch.randn(4, 32)

    def function():
        x.view(2, 64).t().expand(64, 2).unbind(0)
        x.view(4, 2, 16).split([1, 1], dim=1)[1].detach().permute(1, 0, 2)
        return torch.empty(8, 32)[:4].unsqueeze(0)[0], x.new_empty(0), torch.empty_like(x.t())

    (_, _, like), made, _ = graph.capture(function, graph.Memory())
    assert made is not None and len(made) == 0 and like.stride() == (1, 32)


def test_a_failure_ends_the_recording():
    with pytest.raises(ZeroDivisionError):
        graph.capture(lambda: 1 / 0, graph.Memory())
    assert ops.recording.recorder is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_side_by_side(dtype):
    parts = [torch.randn(3, width + 2).to(dtype)[:, :width] for width in (5, 1, 40)]
    joined, made, reason = graph.capture(lambda: torch.cat(parts, dim=1), graph.Memory())
    assert made is not None and len(made) == 3, reason
    assert torch.equal(joined, torch.cat(parts, 1))
    for part in parts:
        part += 1
    made.replay()
    assert torch.equal(joined, torch.cat(parts, 1))
    assert graph.capture(lambda: torch.cat(parts[:1]), graph.Memory())[1] is None, "one above the other"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_rows(dtype):
    x = torch.randn(3, 4, 10).to(dtype)

    def function():
        left, right = x.split([3, 7], 2)
        return left.contiguous(), right.flatten(1), x[:, 1, :5].contiguous(), x[:, 2].t().contiguous()

    copies, made, reason = graph.capture(function, graph.Memory())
    assert made is not None and len(made) == 4, reason
    x += 1
    made.replay()
    for got, want in zip(copies, function(), strict=True):
        assert got.is_contiguous() and torch.equal(got, want)
    assert graph.capture(lambda: x.mT.contiguous(), graph.Memory())[1] is None, "columns"
