import numpy as np
import torch
from phalanx.kernels import host_memory

from ..devices import require_gpu

require_gpu()


def test_refused_pinning_does_not_fail_the_next_launch():
    """Memory that is pinned already is refused."""
    made = host_memory.zeros((1 << 20,), torch.float32, pin=True)
    assert made.is_pinned()
    host_memory.pin_memory(np.asarray(made))
    assert int((torch.zeros(5, device="cuda") + 1).sum()) == 5
