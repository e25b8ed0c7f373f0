"""token_mask.cu on a GPU."""

import pytest
import torch
from phalanx.kernels.sampling.token_mask import mask_tokens

from ...devices import require_gpu
from .test_token_mask import CASES, check

require_gpu()


@pytest.mark.parametrize("rows, vocab, width, parts", [*CASES, (64, 152064, 76032, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidden_tokens(dtype, rows, vocab, width, parts):
    check(mask_tokens, torch.device("cuda"), dtype, rows, vocab, width, parts)


def test_a_view_of_padded_rows():
    whole = torch.zeros(3, 40, device="cuda")
    at = torch.tensor([1], dtype=torch.int32, device="cuda")
    mask_tokens(whole[:, :33], at, torch.tensor([[0, 1]], dtype=torch.int32, device="cuda"))
    assert whole[1, :32].isinf().all() and whole[1, 32] == 0 and not whole[[0, 2]].isinf().any()
