import pytest
import torch

from ..ranks import run_ranks
from . import gpus


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_tensor_groups_on_gpus(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    done = run_ranks(size, gpus.__file__, str(size), timeout=110)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"passed {r} of {size}" for r in range(size)]
