"""Experts that all tokens visit."""

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, TOLERANCE, write


def test_uneven_slices_of_shared_experts(expected, tmp_path):
    """Three ranks share 104 inner elements of shared experts and have 64, 40 and none, each with zeros up to 64."""
    path, ids = write(tmp_path, **MODELS["deepseek_v2"] | dict(moe_intermediate_size=52)), tokens(60)
    (logits,) = run_steps(path, [ids], tp=3, max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE
