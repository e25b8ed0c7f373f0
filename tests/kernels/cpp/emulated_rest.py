"""Operations that short tests of kernels leave to models' tests, and to threads of this processor: asked for by
test_aarch64.py alone."""

import pytest
import torch
from phalanx.kernels.collective.shm_allreduce import LINE, ShmAllReduce
from phalanx.kernels.cpp import ops
from phalanx.kernels.cpp.scratch import Scratch
from phalanx.kernels.quantized import blocks_cpu, cpu_layouts
from phalanx.kernels.sampling.argmax import argmax, candidates, elect

from ..conftest import DTYPES, close, planes_error
from ..quantized import test_blocks_cpu, test_super_blocks

OUTPUTS, INPUTS = 23, 256


def packed_of(name):
    """A packed weight [23, 256], and the weight."""
    if name in test_blocks_cpu.FORMS:
        return test_blocks_cpu.FORMS[name]()
    _, packed, weight = test_super_blocks.packed_of(name, OUTPUTS, INPUTS)
    return packed, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*test_blocks_cpu.FORMS, *test_super_blocks.KINDS])
def test_experts_and_rows(name, dtype):
    packed, weight = packed_of(name)
    assert torch.equal(packed.dequantize(dtype, 0, OUTPUTS), weight.to(dtype))
    ids = torch.tensor([22, 0, 7, 40])
    taken = blocks_cpu.rows(ids, packed, 0, 1.0, dtype)
    assert torch.equal(taken[:3], weight[ids[:3]].to(dtype)) and not taken[3].any()
    stack = cpu_layouts.Packed(torch.cat([packed.blocks] * 2), 2 * 32, packed.layout)
    x, bias, ends = torch.randn(6, INPUTS).to(dtype), torch.randn(2, OUTPUTS).to(dtype), torch.tensor([0, 2, 6]).int()
    y = torch.full((6, OUTPUTS), torch.nan).to(dtype)
    ops.run(*blocks_cpu.experts(x, stack, (2, OUTPUTS), ends, bias, y, Scratch(6)))
    want = x.double() @ weight.double().T + bias.double().repeat_interleave(torch.tensor([2, 4]), 0)
    close(y, want, dtype, atol=planes_error(dtype, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_graphs_record(dtype):
    x, y = torch.randn(2, 5, 37).to(dtype)
    want, factors = x + y, torch.randn(5)
    ops.typed("norm", "add", dtype)(x, y, y.numel())
    assert torch.equal(y, want)
    ops.typed("norm", "scale", dtype)(y, factors, 5, 37, 37, 1.0)
    close(y, want.float() * factors[:, None], dtype)
    to, size = torch.zeros(5, 50).to(dtype), x.itemsize
    ops.op("norm", "copy_rows")(x, to, 5, 37 * size, 37 * size, 50 * size)
    assert torch.equal(to[:, :37], x) and not to[:, 37:].any()
    to = torch.zeros(2, 3, 8).to(dtype)
    ops.op("norm", "copy_blocks")(x, to, 2, 3, 8 * size, 37 * size, 9 * size)
    assert torch.equal(to, torch.stack([x[i, : 3 * 9].view(3, 9)[:, :8] for i in range(2)]))


def test_the_largest_of_parts():
    x = torch.randn(3, 4, 50).round()
    found = torch.stack([candidates(argmax(x[part]), 50 * part) for part in range(3)])
    assert torch.equal(elect(found), x.permute(1, 0, 2).reshape(4, -1).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_in_f32(dtype):
    table, ids, y = torch.randn(9, 37).to(dtype), torch.tensor([3, 8, 20]), torch.full((3, 37), torch.nan)
    name = f"embed_f32_of_{ops.READ[dtype]}"
    ops.op("embedding", name)(ids, table, y, 3, 37, 0, 9, 2.0)
    assert torch.equal(y[:2], 2 * table[ids[:2]].float()) and not y[2].any()


def test_experts_of_plain_weights():
    x, stack, at = torch.randn(5, 40), torch.randn(2, 23, 40), torch.tensor([1, 0])
    y, starts = torch.full((5, 23), torch.nan), torch.tensor([0, 2, 5]).int()
    ops.op("host_experts", "experts_down_f32")(x, None, y, stack, at, None, starts, 2, 40, 23)
    torch.testing.assert_close(y, torch.cat((x[:2] @ stack[1].T, x[2:] @ stack[0].T)), atol=1e-5, rtol=1e-5)
    made, weights, place = torch.randn(4, 37).bfloat16(), torch.rand(6), torch.tensor([2, -1, 0, 3, 1, -1]).int()
    y = torch.full((3, 37), torch.nan)
    ops.op("host_experts", "combine_routed_bf16")(made, weights, place, y, 3, 2, 37)
    rows = torch.where((place >= 0)[:, None], made.float()[place.clamp(min=0).long()], 0) * weights[:, None]
    torch.testing.assert_close(y, rows.view(3, 2, 37).sum(1))


def test_ranks_add_up():
    ranks, size = 3, 37
    slots, counts = torch.full((2, ranks, 64), float("nan")), torch.zeros(ranks * LINE, dtype=torch.int64)
    boards = [ShmAllReduce(slots, counts, rank) for rank in range(ranks)]
    for _ in range(3):
        x = torch.randn(ranks, size)
        made = [x[rank].clone() for rank in range(ranks)]
        rows = torch.full((ranks, ranks, size), float("nan"))
        ops.run(*((ops.op("shm_allreduce", "copy_f32"), (x[i], rows[i], size, i, ranks)) for i in range(ranks)))
        assert all(torch.equal(rows[i], torch.eye(ranks)[:, i : i + 1] * x[i]) for i in range(ranks))
        calls = [board._call(one) for board, one in zip(boards, made, strict=True)]
        listed = ops.call_array([(op.address, ops.pack(values)) for op, values in calls])
        ops.run_calls(listed, ranks, 1, together=True)
        torch.testing.assert_close(made[0], x.sum(0))
        assert all(torch.equal(made[0], one) for one in made)
