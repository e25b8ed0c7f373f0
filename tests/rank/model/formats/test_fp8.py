"""Models quantised to FP8 while they are loaded: the logits of the dequantised weights, on any number of ranks."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import FatalError
from phalanx.kernels.quantized import e4m3, floats
from phalanx.kernels.quantized.linear import dequantize
from phalanx.rank.model.load import load

from ...reference import Reference
from ..harness import distance, reference_logits, run_steps, tokens
from ..test_architectures import write

# Two ranks get 128 and 256 inputs each of what is cut.
SIZES = dict(
    model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=509, max_position_embeddings=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.mark.parametrize("tp", [1, 2])
def test_logits(path, tp):
    truth, ids = Reference(path), tokens(60, vocab=509)
    plain = reference_logits(truth.model, ids)
    for name, module in truth.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            cut = tp if name.endswith(("o_proj", "down_proj")) else 1
            unit = e4m3.unit_of(module.in_features // cut)
            coded = floats.pack(*e4m3.encode_reference(module.weight.detach(), unit))
            module.weight = torch.nn.Parameter(dequantize(coded))
    steps = [[(0, 40)], *[[(0, 1)]] * 20]  # many rows at once, and one
    (logits,) = run_steps(path, [ids], steps, tp=tp, isq="fp8", max_model_len=512)
    assert distance(logits, reference_logits(truth.model, ids)) < 3e-4
    assert distance(logits, plain) > 3e-3, "it is quantised"


def test_inputs_of_a_scale(tmp_path):
    """192 inputs have a scale for each 64; what is no multiple of 32 is refused."""
    narrow = write(tmp_path / "192", **SIZES | dict(intermediate_size=192))
    (model,) = threads.run(lambda comm: load(narrow, mesh.build(comm, 1, 1), isq="fp8"), 1)
    (part,) = model.model.layers["0"].mlp.down_proj.parts
    assert part.packed.unit == 64 and model.weight_bytes < 1.1 * model.num_weights + 509 * 256 * 4
    odd = write(tmp_path / "200", **SIZES | dict(intermediate_size=200))
    with pytest.raises(FatalError, match="--isq fp8.*200 inputs"):
        threads.run(lambda comm: load(odd, mesh.build(comm, 1, 1), isq="fp8"), 1)
