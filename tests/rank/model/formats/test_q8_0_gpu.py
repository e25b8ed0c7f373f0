"""Q8_0 on a GPU: encoded there bit for bit as on a CPU, in the layout of its kernels, and a model's memory."""

import gc
import json

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import linear, packed_gemm
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.rank.model.load import load

from ....devices import require_gpu

require_gpu()
CONFIG = {
    "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_a_cpus(dtype):
    weight = (torch.randn(300, 4096) * 0.02).to(dtype)
    mine, others = q8_0.encode(weight.cuda()), q8_0.encode(weight)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, others, strict=True))
    packed, plain = q8_0.pack(*mine), linear.dequantize(others)
    assert isinstance(packed, packed_gemm.Packed) and torch.equal(linear.dequantize(packed).cpu(), plain)
    assert torch.equal(linear.dequantize(packed, torch.bfloat16, 32, 100).cpu(), plain[32:100].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 64, 65, 300])
@pytest.mark.parametrize("panel", [1 << 27, 1 << 18])
def test_linear(monkeypatch, dtype, rows, panel):
    monkeypatch.setitem(linear.PANEL, "cuda", panel)
    packed = q8_0.pack(*q8_0.encode(torch.randn(512, 1024, device="cuda") / 32))
    x, bias = torch.randn(rows, 1024, device="cuda").to(dtype), torch.randn(512, device="cuda").to(dtype)
    y = x.double() @ linear.dequantize(packed).double().T + bias.double()
    atol = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(linear.linear(x, packed, bias=bias).double(), y, atol=atol, rtol=1e-2)
    gate, up = y.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(linear.linear(x, packed, "silu", bias).double(), want, atol=2 * atol, rtol=2e-2)


def test_memory_of_loading(tmp_path):
    """The quantised model, one module beside, and what encoding takes of it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    gc.collect()  # models of earlier tests
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grid = threads.run(lambda comm: [mesh.build(comm, 1, 1)], 1)[0][0]
    model = load(tmp_path, grid, "cuda", load_format="dummy", isq="q8_0")
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    # Within the workspace that torch's BLAS keeps once it has been called.
    assert held == pytest.approx(model.weight_bytes + model.rope.nbytes, abs=10 << 20)
    assert model.weight_bytes < 2 * 32000 * 1024 + 1.1 * model.num_weights
    assert peak < held + 4 * 32000 * 1024 + (200 << 20)
