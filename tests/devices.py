"""Which tests this machine's devices can run."""

import pytest
import torch
from phalanx.kernels.device import device_caps


def require_gpu() -> None:
    """Without a GPU the module that calls this is one skipped test, not one for each of its parameters."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU", allow_module_level=True)


def has(capability: str) -> bool:
    return torch.cuda.is_available() and getattr(device_caps(torch.device("cuda", 0)), capability)


needs_tma = pytest.mark.skipif(
    not has("has_tma"), reason="needs the tensor memory accelerator of sm_90 or sm_100, and their shared memory"
)
needs_hopper = pytest.mark.skipif(not has("hopper"), reason="needs Hopper's asynchronous tensor-core instructions")
