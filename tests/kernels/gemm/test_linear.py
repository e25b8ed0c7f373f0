"""Which way a linear goes."""

import torch
from phalanx.kernels.gemm import linear


def test_which_products_add_themselves():
    x, weight, stream = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((1024, 32), (48, 32), (1024, 48)))
    assert not linear.accumulates(x, weight, stream), "on a CPU"
    x, weight, stream = (OnGpu(t) for t in (x, weight, stream))
    assert linear.accumulates(x, weight, stream)
    assert not linear.accumulates(OnGpu(x[:1023]), weight, stream)
    assert not linear.accumulates(x, weight, OnGpu(torch.empty(48, 1024, dtype=torch.bfloat16).T)), "not contiguous"
    wide = [OnGpu(t.float()) for t in (x, weight, stream)]
    assert not linear.accumulates(*wide) and not linear.accumulates(x, weight, wide[2])


class OnGpu(torch.Tensor):
    is_cuda = True
