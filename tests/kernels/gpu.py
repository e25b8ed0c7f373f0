"""Helpers that tests of kernels on GPUs share."""

import pytest
import torch

KINDS = [(torch.float32, 3e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)]  # dtypes and how near results are
NAN = float("nan")


def near(got, want, bound):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=bound, rtol=bound)


def run_steps(step, x, kept, pause, replayed, reset=lambda: None):
    """Results of `step` for each of step.given, brought to x, and its caches then: begun as copies of `kept`, where
    `reset` is called as well. step(caches, pause) calls pause() after each kernel. replayed: as a graph."""
    caches, found = kept.clone(), []
    x.copy_(step.given[0])
    step(caches, pause)
    torch.cuda.synchronize()
    caches.copy_(kept)
    reset()
    if replayed:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin()
        step(caches, pause)
        graph.capture_end()
    for given in step.given:
        x.copy_(given)
        graph.replay() if replayed else step(caches, pause)
        found.append(step.found.clone())
    torch.cuda.synchronize()
    return torch.stack(found), caches


@pytest.fixture(autouse=True)
def poison():
    """Fresh memory holds NaN: what a kernel does not write shows."""
    torch.manual_seed(0)
    held = [torch.full((n,), NAN, device="cuda") for n in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)]
    del held
    yield
    torch.cuda.synchronize()
