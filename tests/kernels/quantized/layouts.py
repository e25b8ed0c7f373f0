"""Weights in the layouts of GPUs, on any device."""

import torch
from phalanx.kernels.quantized import cuda_layouts


def q8_0(codes, scales):
    return cuda_layouts.pack(cuda_layouts.Q8_0, codes, scales=scales)


def e4m3(codes, scales):
    return cuda_layouts.pack(cuda_layouts.E4M3, codes, scales=scales)


def mxfp4(codes, scales):
    """codes: two inputs in each, the first in the lower bits."""
    each = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    return cuda_layouts.pack(cuda_layouts.MXFP4, each, scales=scales)
