"""Triton's kernels for experts compile for every supported generation, also where no GPU is."""

import pytest
import torch
from phalanx.kernels.moe import plain_experts
from phalanx.kernels.moe.group import group

from ..test_compile import TRITON, Recorder, checked, compile_launch

# dtype, experts, k, hidden, inner, activation, most routed tokens per expert
CASES = [
    (torch.bfloat16, 128, 8, 2048, 768, 0, 8),
    (torch.bfloat16, 128, 8, 2048, 768, 0, 1 << 30),
    (torch.float16, 60, 3, 2880, 2880, 1, 24),
    (torch.bfloat16, 8, 2, 4096, 14336, 2, 48),
    (torch.float32, 5, 2, 100, 36, 3, 0),
    (torch.bfloat16, 32, 4, 2880, 2880, 4, 24),  # with biases
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype, experts, k, hidden, inner, act, most, arch", checked(CASES, TRITON))
def test_experts_compile(dtype, experts, k, hidden, inner, act, most, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.moe import moe_triton

    monkeypatch.setattr(moe_triton, "overlaps", lambda _: arch >= 90 and dtype != torch.float32)
    tiles = plain_experts.TILINGS[most] if most else plain_experts.F32_TILING
    ids = torch.arange(k, dtype=torch.int32)[None]
    x, weights = torch.zeros(1, hidden, dtype=dtype), torch.ones(1, k)
    w13, w2 = torch.empty(1, 2 * inner, hidden, dtype=dtype), torch.empty(1, hidden, inner, dtype=dtype)
    groups = group(ids, experts, tiles.up.rows)
    h, y = x.new_empty(k, inner), x.new_empty(k, hidden)
    up, down = (w.new_empty(w.shape[:2]) if act == 4 else None for w in (w13, w2))
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
