"""FP8 by tensor cores of 8 bits: the order of inputs, which weights and rows it is for, its cuts."""

import torch
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.quantized import e4m3_cuda, e4m3_wgmma, floats
from phalanx.kernels.quantized.e4m3_wgmma import Cut

from . import floats_cases

E4M3 = torch.float8_e4m3fn


def packed_of(outputs, inputs, unit):
    plain = floats_cases.make(outputs, inputs, unit)
    scales = plain.scales.repeat_interleave(unit // e4m3_cuda.GROUP, 1)
    return plain, e4m3_cuda.pack(plain.codes, scales)._replace(unit=unit)


def operand(packed):
    """The weight as m64n8k32's first operand has it: lane 4 g + t's register 2 s + h is of output g + 8 h and of bytes
    16 s + 4 t on (PTX ISA, Register Fragments for wgmma.mma_async, .e4m3)."""
    words = packed.pieces[..., :512].reshape(*packed.pieces.shape[:2], 8, 4, 2, 2, 4)
    #                         strip group g t s h byte  ->  strip h g, group s t byte
    return words.permute(0, 5, 2, 1, 4, 3, 6).reshape(len(packed.pieces) * 16, -1)


def test_rows_and_weights_have_one_order():
    plain, packed = packed_of(32, 256, 128)
    x = torch.randn(5, 256)
    codes, scales = e4m3_wgmma.encode_rows_reference(x)
    a, b = operand(packed).view(E4M3).double(), codes.view(E4M3).double()
    parts = torch.einsum("ouk,tuk->tou", a.unflatten(1, (2, 128)), b.unflatten(1, (2, 128)))
    found = (parts * plain.scales.double() * scales.double().unsqueeze(1)).sum(2)
    want = x.double() @ floats.dequantize(plain).double().T
    assert (found - want).norm() < 0.04 * want.norm()
    numbers = torch.arange(16.0).repeat(8).view(1, 128)
    order = e4m3_wgmma.encode_rows_reference(numbers * (448 / 15))[0].view(E4M3).float()[0, :16] * (15 / 448)
    assert order.round().int().tolist()[:8] == [0, 8, 1, 9, 2, 10, 3, 11]


def test_rows_of_zeros_and_of_what_is_no_number():
    x = torch.zeros(2, 128)
    x[1, 3] = float("nan")
    codes, scales = e4m3_wgmma.encode_rows_reference(x)
    assert codes[0].eq(0).all() and scales[0] == 0 and scales[1].isnan()


def test_what_it_is_for():
    hopper = DeviceCaps(132, "sm_90a", True, True, True)
    ampere = DeviceCaps(108, "sm_80", False, False, False)
    packed = packed_of(32, 256, 128)[1]
    assert e4m3_wgmma.chosen(65, packed, hopper) and e4m3_wgmma.chosen(8192, packed, hopper)
    assert not e4m3_wgmma.chosen(64, packed, hopper)
    assert not e4m3_wgmma.chosen(65, packed, ampere)
    assert not e4m3_wgmma.chosen(65, packed_of(32, 256, 64)[1], hopper)
    assert not e4m3_wgmma.chosen(65, packed._replace(unit=0), hopper)
    assert not e4m3_wgmma.chosen(65, packed_of(32, 256, 128)[0], hopper)


def test_cuts():
    for rows in (65, 100, 128, 129, 256, 8191):
        for cut in e4m3_wgmma.cuts(rows, 4096, True):
            height = cut.height(rows)
            assert height % (16 if cut.share > 1 else 4) == 0 and height <= cut.rows
            assert cut.row_tiles(rows) * height >= rows and e4m3_wgmma.stages(cut)[1] <= 227 << 10
    assert {cut.split for cut in e4m3_wgmma.cuts(100, 384, False)} == {1}
    assert {cut.over for cut in e4m3_wgmma.cuts(100, 384, False) if cut.rows == 128} == {1}
    assert Cut(128, 128, 1).blocks(8191, 4096) == 32 * 64
    assert Cut(128, 128, 1, 2, 2).blocks(257, 4097) == 34 * 4
