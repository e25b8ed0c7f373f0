"""Heads that Triton rotates in place, against torch: for test_rope_triton.py in the interpreter, test_rope_gpu.py."""

import torch
from phalanx.kernels.rope import rope_triton
from phalanx.kernels.rope.rope import rotate_reference

SIZES = [(1, 1, 8), (37, 3, 80), (5, 32, 64), (3, 2, 10)]  # tokens, heads, elements of a head


def check_rotate(tokens: int, heads: int, dim: int, dtype: torch.dtype, bound: float, device: str = "cpu") -> None:
    """Queries and keys are rotated, the first two thirds of all heads; values stay as they are."""
    angles = torch.rand(tokens, dim // 2, device=device) * 6
    x = torch.randn(tokens, 3 * heads, dim, device=device).to(dtype)
    got, want = x.clone(), x.clone()
    rope_triton.rotate(got[:, : 2 * heads], angles.cos(), angles.sin())
    rotate_reference(want[:, : 2 * heads], angles.cos(), angles.sin())
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    assert torch.equal(got[:, 2 * heads :], x[:, 2 * heads :]) and not torch.equal(got, x)


if __name__ == "__main__":
    torch.manual_seed(0)
    for sizes in SIZES:
        check_rotate(*sizes, torch.float32, 1e-6)
        check_rotate(*sizes, torch.float16, 1e-3)
