import numpy as np
import torch
from phalanx.kernels import host_memory

from ..devices import require_gpu

require_gpu()


def test_kernels_read_host_memory_as_it_is():
    memory = host_memory.zeros((1 << 16,), torch.uint8, pin=True)
    seen = host_memory.on_gpu(memory[256:])
    assert seen.is_cuda and seen.dtype == torch.uint8 and seen.data_ptr() == memory.data_ptr() + 256
    for turn in range(3):
        memory.random_(256)
        assert torch.equal((seen + 1).cpu(), memory[256:] + 1), turn
    part = seen.view(torch.bfloat16).view(4, -1)
    del memory, seen
    assert part.float().nan_to_num(0).isfinite().all() and part.shape == (4, (1 << 15) // 4 - 32)


def test_refused_pinning_does_not_fail_the_next_launch():
    """Memory that is pinned already is refused."""
    made = host_memory.zeros((1 << 20,), torch.float32, pin=True)
    assert made.is_pinned()
    host_memory.pin_memory(np.asarray(made))
    assert int((torch.zeros(5, device="cuda") + 1).sum()) == 5
