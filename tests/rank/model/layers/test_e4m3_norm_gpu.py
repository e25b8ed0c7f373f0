"""FP8 linears behind a norm on a GPU: fused with it or not, they make the same, bit for bit."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import e4m3_wgmma
from phalanx.rank.gguf.mixes import Sizes
from phalanx.rank.model.formats import in_situ
from phalanx.rank.model.layers.linear import ColumnParallel, GatedColumnParallel, RowParallel
from phalanx.rank.model.layers.norm import AddRMSNorm
from phalanx.rank.model.layers.residual import ResidualStream
from phalanx.rank.model.shard import whole
from phalanx.rank.model.weights.slicing import Source

from ....devices import needs_hopper, require_gpu

require_gpu()
HIDDEN, INNER = 2048, 3072


def parameter(*shape, dtype):
    return torch.nn.Parameter((torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).to(dtype), requires_grad=False)


def loaded(linear, dtype):
    """Random weights in FP8."""
    linear.build([Source("x")] * len(linear.outputs), in_situ("fp8", Sizes(1)))
    for part in linear.parts:
        part.weight = parameter(part.width, part.inputs.width, dtype=dtype)
        part.finish()
    return linear


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [32, 33, 256, 1000])
def test_fused_linears_make_the_same(rows, dtype):
    torch.manual_seed(rows)
    ((grid,),) = threads.run(lambda comm: [mesh.build(comm, 1, 1)], 1)
    down = loaded(RowParallel(INNER, HIDDEN, grid), dtype)
    qkv = loaded(ColumnParallel(whole(HIDDEN), (whole(INNER),), False), dtype)
    gate_up = loaded(GatedColumnParallel(HIDDEN, INNER, grid, "silu", False), dtype)
    norm = AddRMSNorm(HIDDEN, 1e-5)
    norm.weight = parameter(HIDDEN, dtype=dtype)
    value, x = torch.randn(rows, HIDDEN, device="cuda").to(dtype), torch.randn(rows, INNER, device="cuda").to(dtype)
    found = []
    for read_first in (False, True):
        stream = ResidualStream(value.clone())
        stream.add(down(x))
        normed = norm(stream)
        if read_first:
            normed.tensor()
        found.append([qkv(normed), gate_up(normed), stream.read()])
        fused = rows >= e4m3_wgmma.LEAST_ROWS and not read_first
        assert (normed._value is None) == fused and (normed._rows is not None) == fused
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))
