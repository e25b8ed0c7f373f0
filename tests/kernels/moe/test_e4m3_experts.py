"""FP8 experts by tensor cores of 8 bits: for which it is, and the kernels thread by thread on a CPU."""

from typing import NamedTuple

import pytest
import torch
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.moe import moe, quantized_experts
from phalanx.kernels.moe.group import encode_routed, group
from phalanx.kernels.moe.moe import LocalExperts
from phalanx.kernels.quantized import e4m3, e4m3_rows, e4m3_weight_only, packed_gemm, target
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.stack import Stack

from ..quantized import floats_cases
from ..quantized.test_packed_gemm import make as weight_of
from .conftest import HOPPER
from .e4m3_cases import check_codes, check_down, check_up, stack_of
from .reference import planned
from .test_quantized_experts import in_types


class Case(NamedTuple):
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    unit: int  # inputs that share a scale, of both GEMMs
    up: E4m3Config
    down: E4m3Config
    spread: str = "any"  # any; one: all tokens choose the same; few: most experts are empty
    biased: bool = False
    local_experts: LocalExperts | None = None


SMALL = E4m3Config(128, 16, 1, matmul=16)
CASES = [
    Case(12, 2, 3, 256, 128, 128, SMALL, SMALL),
    Case(40, 3, 5, 256, 384, 128, E4m3Config(128, 32, 1), E4m3Config(64, 32, 1), "few", True),
    Case(1, 2, 4, 128, 128, 128, E4m3Config(64, 16, 1), SMALL),
    Case(70, 1, 2, 512, 256, 256, E4m3Config(128, 64, 1), E4m3Config(128, 64, 1), "one"),
    Case(50, 2, 6, 384, 128, 128, E4m3Config(192, 16, 1), E4m3Config(192, 16, 1), local_experts=LocalExperts(2, 3, 6)),
    Case(90, 2, 3, 256, 256, 128, E4m3Config(64, 64, 1, matmul=32), E4m3Config(64, 64, 1, matmul=32)),
    Case(150, 1, 2, 512, 256, 256, E4m3Config(64, 128, 1), E4m3Config(64, 128, 1), biased=True),
    Case(300, 1, 1, 128, 128, 128, SMALL, SMALL),  # more tiles than a band has
    Case(250, 1, 2, 512, 512, 512, E4m3Config(64, 192, 1, matmul=192), E4m3Config(64, 192, 1, matmul=192)),
]


def chosen(case):
    """ids [T, k] int32."""
    among = {"any": case.experts, "few": case.k + 1, "one": case.k}[case.spread]
    experts = torch.randperm(case.experts)[:among]
    return torch.stack([experts[torch.randperm(among)[: case.k]] for _ in range(case.tokens)]).int()


@pytest.mark.sample(2)
@pytest.mark.parametrize("case, dtype", in_types(CASES), ids=str)
def test_experts(on_hopper, case, dtype):
    """Blocks have several items, the ring goes round, and tiles are not whole."""
    torch.manual_seed(0)
    local_experts = case.local_experts or LocalExperts(0, case.experts, case.experts)
    w13, up = stack_of(local_experts.size, 2 * case.inner, case.hidden, case.unit)
    w2, down = stack_of(local_experts.size, case.hidden, case.inner, case.unit)
    x = torch.randn(case.tokens, case.hidden).to(dtype)
    ids, weights = chosen(case), torch.rand(case.tokens, case.k)
    of_up, of_down = (torch.randn(one.shape[:2]).to(dtype) if case.biased else None for one in (up, down))
    groups = group(ids, local_experts.size, case.up.rows, local_experts)
    h = quantized_experts.up(x, weights, w13, groups, case.k, "silu", case.up, of_up)
    check_up(h, x, weights, groups, up, case.k, "silu", of_up)
    last = int(groups.offsets[-1])
    assert h[last:].isnan().all()  # what is of no pair stays as it is
    y = quantized_experts.down(h, weights, w2, groups, case.down, of_down)
    check_down(y, h, weights, groups, down, of_down)
    elsewhere = torch.ones(len(y), dtype=torch.bool)
    elsewhere[groups.sorted_ids[:last].long()] = False
    assert y[elsewhere].isnan().all()


@pytest.mark.parametrize("inputs, dtype", [(256, torch.bfloat16), (1152, torch.float16)])
@pytest.mark.parametrize("top", [0, 3])
def test_rows_of_routed_tokens(on_hopper, inputs, dtype, top):
    torch.manual_seed(0)
    ids, weights = torch.randint(0, 6, (11, 3)).int(), torch.rand(11, 3)
    groups = group(ids, 4, 16, LocalExperts(1, 4, 6))
    x = torch.randn(11 if top else 33, inputs).to(dtype)
    x[2] = 0
    found = encode_routed(x, groups, weights, top, 64)
    assert found[0].shape == (64, inputs)
    check_codes(found, x, groups, weights, top, e4m3_rows.encode_reference(x))


def test_what_it_is_for():
    def stacks(up, down):
        return (
            Stack(weight_of(16, 512, form)[0], (128, *shape))
            for form, shape in ((up, (1536, 2048)), (down, (2048, 768)))
        )

    def kernels_of(tokens, up="e4m3_wide", down="e4m3_wide", caps=HOPPER):
        return planned(8 * tokens, 128, *stacks(up, down), caps)

    assert isinstance(kernels_of(64).up, quantized_experts.PipelineConfig)
    for tokens, rows in ((65, 32), (384, 32), (385, 64), (1025, 192), (1 << 15, 128)):
        found = kernels_of(tokens)
        assert all(isinstance(one, E4m3Config) and one.rows == rows for one in found)
    blackwell = DeviceCaps(148, "sm_100", True, True, False)
    for found in (kernels_of(129, caps=blackwell), kernels_of(129, down="e4m3"), kernels_of(129, up="q4_k")):
        assert all(isinstance(one, quantized_experts.ExpertTileConfig) for one in found)
    assert planned(97 * 128, 128, *stacks("e4m3_wide", "e4m3_wide"), blackwell) == "dequantised"
    assert planned(97 * 128, 128, *stacks("e4m3_wide", "e4m3"), HOPPER) == "dequantised"


def test_checkpoints_of_weights_alone_keep_activations_in_16_bits():
    plain = floats_cases.make(16, 512, 128)
    for codec, eight_bits in ((e4m3, True), (e4m3_weight_only, False)):
        with target.packed_for("cuda"):
            packed = codec.pack(*plain)
        w13, w2 = (Stack(packed, (128, n, 512)) for n in (1024, 512))
        assert packed.layout.header == "e4m3_wide"
        assert (quantized_experts.choose_e4m3(4096, 128, w13, w2, HOPPER) is not None) == eight_bits
        for rows in (33, 64, 256):
            config = packed_gemm.choose(rows, 1024, 512, packed.layout, False, HOPPER)
            assert isinstance(config, E4m3Config) == eight_bits


def test_configs():
    for up, down in quantized_experts.E4M3_TILES.values():
        assert up.rows == down.rows and up.split == down.split == up.over == down.over == 1
        for config in (up, down):
            assert config.stages()[1] <= 227 << 10


def test_every_cut_is_warmed_up():
    for experts, k in ((128, 8), (8, 2), (60, 4)):
        w13, w2 = (Stack(weight_of(16, 512, "e4m3_wide")[0], (experts, n, 512)) for n in (1024, 512))
        used = {quantized_experts.choose_e4m3(n * k, experts, w13, w2, HOPPER) for n in moe.warm_up_rows(experts, k)}
        assert used == set(quantized_experts.E4M3_TILES.values())
