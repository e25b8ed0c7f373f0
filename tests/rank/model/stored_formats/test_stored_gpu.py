"""Quantised checkpoints on a GPU: bit for bit what they mean, in the layout of its kernels, and a model's logits."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import packed_gemm
from phalanx.kernels.quantized.linear import dequantize
from phalanx.rank.model.load import load
from safetensors.torch import load_file

from ....devices import require_gpu
from ....kernels.quantized.floats_cases import as_multiplied
from ..test_architectures import write
from . import packers
from .test_stored import CASES, COMMON

require_gpu()


@pytest.mark.parametrize("name", CASES)
def test_weights(tmp_path, name):
    (pack, settings), options = CASES[name]
    packers.quantise(write(tmp_path / "source", **COMMON | options), tmp_path, pack, settings)
    grid = threads.run(lambda comm: [mesh.build(comm, 1, 1)], 1)[0][0]
    model = load(tmp_path / "quantised", grid, "cuda", "bf16")
    path = "model.layers.1.mlp.down_proj"
    want = load_file(tmp_path / "plain" / "model.safetensors")[f"{path}.weight"]
    part = model.get_submodule(path).parts[0]
    found = dequantize(part.packed).cpu()
    if hasattr(part, "order"):
        want = want[:, part.order.cpu()]
    kept = want if part.kept_bits(torch.device("cuda")) else want.bfloat16().float()  # else there is no kernel for it
    assert torch.equal(found, kept)
    assert torch.equal(dequantize(part.packed, torch.bfloat16).cpu(), want.bfloat16())
    if settings.get("bits") == 4:
        assert isinstance(part.packed, packed_gemm.Packed) and part.packed.layout.header == "int4"
    plain = load_file(tmp_path / "plain" / "model.safetensors")[f"{path}.weight"].cuda().double()
    for rows in (1, 5, 40, 300):
        x = torch.randn(rows, plain.shape[1], device="cuda", dtype=torch.bfloat16)
        y = part(x)
        torch.testing.assert_close(y.double(), as_multiplied(x, part.packed) @ plain.T, atol=3e-2, rtol=2e-2)


def test_memory_of_loading(tmp_path):
    """Memory of a model of 4-bit weights is what was predicted, within a twentieth."""
    (pack, settings), options = CASES["awq"]
    packers.quantise(write(tmp_path / "source", **COMMON | options), tmp_path, pack, settings)
    grid = threads.run(lambda comm: [mesh.build(comm, 1, 1)], 1)[0][0]
    model = load(tmp_path / "quantised", grid, "cuda", "bf16")
    kept = sum(part.packed[0].nbytes for part in model.modules() if getattr(part, "packed", None))
    assert kept == pytest.approx(model.num_weights * 4.375 / 8 - 509 * 192 * 4.375 / 8, rel=0.05)
