"""Weights of files laid out for CPUs by C++: the bytes that torch's code makes, and the numbers that gguf-py reads."""

import gguf
import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import affine, blocks_cpu, e4m3_cpu, floats, mxfp4, packing_cpu
from phalanx.kernels.quantized.ggml_types import TYPES
from phalanx.kernels.quantized.linear import dequantize
from phalanx.rank.gguf.types import BY_NAME
from phalanx.rank.model.stored_formats import _part, awq
from phalanx.rank.model.weights import ggml

from . import codecs, test_super_blocks

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs a C++ compiler")


def random_blocks(name, outputs, inputs):
    if name != "q8_0":
        return test_super_blocks.random_blocks(name, outputs, inputs)
    scales = (torch.randn(outputs, inputs // 32, 1) * 0.01).half().view(torch.uint8)
    codes = torch.randint(-127, 128, (outputs, inputs // 32, 32), dtype=torch.int8).view(torch.uint8)
    return torch.cat((scales, codes), 2).flatten(1)


def in_torch(monkeypatch):
    monkeypatch.setattr(packing_cpu, "readable", lambda x: False)


@pytest.mark.parametrize("outputs, inputs", [(37, 512), (16, 256), (3, 768)])
@pytest.mark.parametrize("name", TYPES)
def test_packs_as_torch_does(isa, threads, called, monkeypatch, name, outputs, inputs):
    module, blocks = codecs.find(name), random_blocks(name, outputs, inputs)
    made = module.pack(blocks)
    assert called == [f"pack_{name}"]  # one operation, and no weight in another form between
    in_torch(monkeypatch)
    want = module.pack(blocks)
    assert type(made) is type(want) and made._replace(blocks=None) == want._replace(blocks=None)
    assert torch.equal(made.blocks, want.blocks)


def test_q4_0_of_inputs_that_are_no_whole_packed_tiles(isa):
    blocks = random_blocks("q4_0", 19, 96)
    assert torch.equal(dequantize(codecs.find("q4_0").pack(blocks)), test_super_blocks.theirs("q4_0", blocks))


@pytest.mark.parametrize("name", TYPES)
def test_dequantises_as_gguf_does(isa, threads, called, name):
    blocks = random_blocks(name, 21, 768)
    want = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert torch.equal(ggml.dequantize(name.upper(), blocks), torch.from_numpy(want))
    assert called == [f"dequantize_{name}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TYPES)
def test_rows_are_those_of_the_weight(isa, threads, name, dtype):
    module = codecs.find(name)
    packed = module.pack(random_blocks(name, 37, 512))
    ids = torch.tensor([36, 40, 3, 99, 3, 77])  # from 40 on: 37 rows
    made = blocks_cpu.rows(ids, packed, 40, 3.0, dtype)
    table = dequantize(packed)
    want = torch.stack([table[i - 40] * 3 if 40 <= i < 77 else torch.zeros(512) for i in ids.tolist()])
    torch.testing.assert_close(made, want.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert made[0].any() == made[3].any() == False and made[1].any()  # noqa: E712


@pytest.mark.parametrize("outputs, inputs", [(24, 128), (136, 96)])
def test_words_along_the_inputs(isa, threads, monkeypatch, outputs, inputs):
    words = torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int64).int()
    made = _part.unpack_transposed(words, 4)
    in_torch(monkeypatch)
    assert made.is_contiguous() and torch.equal(made, _part.unpack_transposed(words, 4))


@pytest.mark.parametrize("outputs, inputs", [(24, 128), (136, 96)])
def test_words_along_the_outputs(isa, threads, outputs, inputs):
    words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int64).int()
    assert torch.equal(packing_cpu.unpack_words(words, "outputs"), awq._in_order(words).t())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_groups(isa, threads, monkeypatch, bits, symmetric):
    codes = torch.randint(0, 1 << bits, (37, 256), dtype=torch.uint8)
    scales = torch.rand(37, 4).half().float()
    middle = torch.full((37, 4), 1 << bits - 1, dtype=torch.int16)
    zeros = middle if symmetric else middle - torch.randint(0, 2, (37, 4), dtype=torch.int16)
    if bits == 8:
        codes = codes.clamp(1, 254)
    made = affine.pack(codes, scales, zeros)
    in_torch(monkeypatch)
    assert torch.equal(made.blocks, affine.pack(codes, scales, zeros).blocks)
    want = (codes.view(37, 4, 64) - zeros.unsqueeze(2)) * scales.unsqueeze(2)
    torch.testing.assert_close(dequantize(made), want.view(37, 256), rtol=1e-6, atol=1e-6)


def test_codes_of_8_bits_around_zeros_of_their_own(isa, monkeypatch):
    """q8_0's codes have the sign where a scale is below 0: a code may be 128 above its zero there."""
    zeros = torch.randint(100, 156, (37, 4), dtype=torch.int16)
    scales = torch.rand(37, 4).half().float() * torch.tensor([1, -1, 1, -1])
    low, high = zeros + torch.tensor([-128, -127, -128, -127]), zeros + torch.tensor([127, 128, 127, 128])
    rand = torch.rand(37, 4, 64)
    codes = (low.unsqueeze(2) + rand * (high - low + 1).unsqueeze(2)).floor().clamp(0, 255).to(torch.uint8)
    codes[..., 0], codes[..., 1] = low.clamp(0, 255), high.clamp(0, 255)
    made = affine.pack(codes.flatten(1), scales, zeros)
    want = ((codes - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)
    torch.testing.assert_close(dequantize(made), want, rtol=1e-6, atol=1e-6)
    in_torch(monkeypatch)
    assert torch.equal(made.blocks, affine.pack(codes.flatten(1), scales, zeros).blocks)
    codes[0, 0], zeros[0, 0] = 255, 100  # 155 do not fit
    assert isinstance(affine.pack(codes.flatten(1), scales, zeros), affine.Affine)


def test_pairs_of_mxfp4(isa, monkeypatch):
    codes, scales = (torch.randint(0, 256, (21, n), dtype=torch.uint8) for n in (64, 4))
    made = mxfp4.pack(codes, scales)
    in_torch(monkeypatch)
    assert torch.equal(made.blocks, mxfp4.pack(codes, scales).blocks)


def test_e4m3(isa, threads, monkeypatch):
    codes, scales = torch.randint(0, 127, (37, 208), dtype=torch.uint8), torch.rand(37, 13)
    codes[::2] |= 128
    made = e4m3_cpu.pack(codes, scales)
    wrong = codes.clone()
    wrong[36, 207] |= 127
    assert isinstance(floats.pack_for_device(floats.Floats(wrong, scales)), floats.Floats)  # NaN has no other code
    in_torch(monkeypatch)
    want = e4m3_cpu.pack(codes, scales)
    assert torch.equal(made.codes, want.codes) and torch.equal(made.scales, want.scales)
    assert e4m3_cpu.pack(wrong, scales) is None


def test_every_type_with_a_kernel_is_packed_by_cpp():
    made = {name for name in BY_NAME if ops.has(packing_cpu.SOURCE, f"pack_{name.lower()}")}
    assert made == {name.upper() for name in TYPES}
