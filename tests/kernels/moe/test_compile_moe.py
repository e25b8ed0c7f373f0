"""Triton's kernels for experts compile for every supported generation, also where no GPU is."""

import pytest
import torch
from phalanx.kernels.moe import moe
from phalanx.kernels.quantized.floats import Floats

from ..test_compile import TRITON, Recorder, checked, compile_launch

# dtype, experts, k, hidden, inner, activation, most pairs per expert, inputs of a scale of 4 or 8 bits (0: plain)
PLAIN = [
    (torch.bfloat16, 128, 8, 2048, 768, 0, 8),
    (torch.bfloat16, 128, 8, 2048, 768, 0, 1 << 30),
    (torch.float16, 60, 3, 2880, 2880, 1, 32),
    (torch.bfloat16, 8, 2, 4096, 14336, 2, 96),
    (torch.float32, 5, 2, 100, 36, 3, 0),
    (torch.bfloat16, 32, 4, 2880, 2880, 4, 32),  # with biases
]


CASES = [(*one, 0) for one in PLAIN] + [
    (torch.bfloat16, 32, 4, 2880, 2880, 4, 8, 32),
    (torch.bfloat16, 32, 4, 2880, 2880, 4, 1 << 30, 32),
    (torch.bfloat16, 128, 8, 2048, 768, 0, 8, 128),
    (torch.float16, 128, 8, 2048, 768, 0, 1 << 30, 128),
    (torch.bfloat16, 5, 2, 96, 80, 0, 1 << 30, 16),
    (torch.bfloat16, 5, 2, 96, 80, 0, 96, 16),
]


def stored(weight, unit):
    """A weight of e2m1 or e4m3 of this one's sizes."""
    experts, outputs, inputs = weight.shape
    pairs = unit == 32
    codes = torch.empty(experts, outputs, inputs // 2 if pairs else inputs, dtype=torch.uint8)
    return Floats(codes, torch.empty(experts, outputs, inputs // unit, dtype=torch.uint8 if pairs else torch.float32))


@pytest.mark.parametrize("dtype, experts, k, hidden, inner, act, most, unit, arch", checked(CASES, TRITON))
def test_experts_compile(dtype, experts, k, hidden, inner, act, most, unit, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.moe import moe_triton

    monkeypatch.setattr(moe_triton, "overlaps", lambda _: arch >= 90 and dtype != torch.float32)
    tiles = moe.TILINGS[most] if most else moe.F32_TILING
    ids = torch.arange(k, dtype=torch.int32)[None]
    x, weights = torch.zeros(1, hidden, dtype=dtype), torch.ones(1, k)
    w13, w2 = torch.empty(1, 2 * inner, hidden, dtype=dtype), torch.empty(1, hidden, inner, dtype=dtype)
    groups = moe.group(ids, experts, tiles.up.rows)
    h, y = x.new_empty(k, inner), x.new_empty(k, hidden)
    up, down = (w.new_empty(w.shape[:2]) if act == 4 else None for w in (w13, w2))
    w13, w2 = (stored(w, unit) if unit else w for w in (w13, w2))
    for kernel, call in (
        ("expert_up_kernel", lambda: moe_triton.expert_up(x, ids, weights, w13, groups, act, tiles.up, up, h)),
        ("expert_down_kernel", lambda: moe_triton.expert_down(h, w2, groups, tiles.down, weights, down, y)),
        ("combine_kernel", lambda: moe_triton.combine(x.new_empty(k, hidden), ids)),
        ("combine_kernel", lambda: moe_triton.combine(x.new_empty(k, hidden), ids, range(2, 5))),
    ):
        launches = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(moe_triton, kernel, launches)
            call()
        compiled = compile_launch(getattr(moe_triton, kernel), *launches.found[0], arch)
        assert compiled.metadata.shared <= (227 if arch >= 90 else 163) << 10
