"""Hopper's kernels for experts in the model of a GPU."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.moe import plain_experts, quantized_experts
from phalanx.kernels.quantized import e4m3_wgmma

from .. import cuda_model
from ..cuda_model import Box

HOPPER = DeviceCaps(132, "sm_90a", True, True, True)


@pytest.fixture
def on_hopper(monkeypatch, cuda_models):
    """Kernels run in the model, on three multiprocessors and in few stages; new tensors hold NaN."""

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0, cluster=1):
            assert cluster == 1 and (source in ("gather_routed", "e4m3_routed") or grid[0] <= 3)
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            weights = next((one for one in tensors if one.dtype == torch.uint8), tensors[0])
            cuda_model.launch(library, grid, threads, args, weights, seed=grid[0])

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda start, rows, columns, height, _: Box(start, rows, columns, height))
    for module in (plain_experts, quantized_experts):
        monkeypatch.setattr(module, "device_caps", lambda device: HOPPER._replace(num_sms=3))
    monkeypatch.setattr(plain_experts, "wgmma_stages", lambda rows: (2, 1024 + 2 * (rows + 256) * 128))
    monkeypatch.setattr(quantized_experts, "MAX_STAGES", 3)
    monkeypatch.setattr(e4m3_wgmma, "MAX_STAGES", 4)
    cuda_model.poison_new_tensors(monkeypatch)
