"""Experts that a CPU and a GPU compute together, each some of the intermediate units: what both make is added up.

The CPU has the first units of an expert as it lies whole in host memory (`HostPairs.all_calls`). The GPU reads the last
ones from a second stack with these alone, also in host memory. The down projection's bias is the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quantized import digits_cpu, e4m3_cpu, gpu_form, pieces_cuda
from ..quantized.stack import Stack, padded
from .host_choice import Costs
from .host_experts import Experts
from .moe import Biases, Matrices

UNIT = 64  # that are cut together, at least: pieces of GPUs have as many, and kernels of plain weights are fast then
# Of an H200 and its host of 16 cores, 2026-11-27. Seconds of a layer besides the CPU's reading: it waits for tokens and
# chooses, and its threads wait at barriers (performance.md, "Less waiting on the CPU"). Seconds until a GPU's kernels
# read host memory; then they take so many times as long as a copy: 35 GB/s, where copies reach 41
# (gpu-share-2026-11-28.txt).
CPU_BEGINS, GPU_BEGINS = 14e-6, 12e-6
READ = 1.2
TOGETHER = 2  # missing experts of a layer, for which both are to be done at once
LEAST_GAIN = 0.1  # of the CPU's time: less is not worth the memory


def unit(one: Experts, dtype: torch.dtype) -> int:
    """Intermediate units that a cut leaves together, of experts that look like this one in host memory. 0: they cannot
    be cut, or kernels on GPUs would not read x of this dtype and a part of them as it lies."""
    inner, (_, w2) = one.w2.shape[2], one
    if not all(map(gpu_form.supports, one)):
        return 0
    there = Experts(*map(gpu_form.of_gpu, one))
    if not _read(there, dtype):
        return 0
    units = [UNIT]
    if isinstance(there.w2, Stack):
        layout = there.w2.packed.layout
        units.append(layout.inputs * layout.alike)
    if isinstance(w2, Stack):
        # Sums in blocks may end within a group, those of e4m3 not.
        units.append(w2.packed.unit if isinstance(w2.packed, e4m3_cpu.Packed) else digits_cpu.RUN)
    found = math.lcm(*units)
    return found if inner % found == 0 else 0


def _read(there: Experts, dtype: torch.dtype) -> bool:
    """Whether kernels on GPUs read stacks in this form as they lie."""
    if isinstance(there.w13, Tensor) and isinstance(there.w2, Tensor):
        return there.w13.dtype == there.w2.dtype == dtype
    return all(isinstance(one, Stack) and isinstance(one.packed, pieces_cuda.Packed) for one in there)


def on_cpu(inner: int, unit: int, costs: Sequence[Costs]) -> int:
    """How many of an expert's `inner` units the CPU computes of one token, the same number in layers of these costs, so
    that the layers' times, each of who is done last, have the least sum: a multiple of `unit`. All: the GPU's part
    would help little.

    How much both slow each other down is left out: what `Costs` says of it is of copies, and differs between two starts
    by more than what is decided here.
    """

    def seconds(units: int) -> float:
        cpu, gpu = TOGETHER * units / inner, TOGETHER * READ * (inner - units) / inner
        return sum(max(CPU_BEGINS + cpu * one.cpu[0], GPU_BEGINS + gpu * one.copy) for one in costs)

    alone = sum(CPU_BEGINS + TOGETHER * one.cpu[0] for one in costs)
    best = min(range(unit, inner, unit), key=seconds, default=inner)
    return best if seconds(best) <= (1 - LEAST_GAIN) * alone else inner


def last_units(experts: Experts, first: int) -> Experts:
    """The units from `first` on, which `unit` divides, of experts as kernels on GPUs read them, or plain ones: copies,
    on their device.

    A super-block may be cut: each of its pieces has its factors. Kernels that take four pieces as one super-block's do
    so where their number divides by four, and then none is cut, as the last one ends with the expert.
    """
    w13, w2 = experts
    return Experts(_cut(w13, first, 1), _cut(w2, first, 2))


def _cut(stack: Matrices, first: int, axis: int) -> Matrices:
    """axis: 1 cuts the outputs, of gate and of up alike, 2 the inputs."""
    outputs, inputs = stack.shape[1:]
    whole = outputs // 2 if axis == 1 else inputs
    parts, made = gpu_form.parts(stack), []
    for x in parts.tensors:
        both = x.unflatten(1, (2, -1)) if axis == 1 else x  # gate and up
        there = both.shape[2]  # of `whole`
        some = both.narrow(2, first * there // whole, there - first * there // whole)
        made.append((some.flatten(1, 2) if axis == 1 else some).contiguous())
    cut = parts.of(made)
    if not isinstance(cut, Stack):
        return cut
    shape = (2 * (whole - first), inputs) if axis == 1 else (outputs, whole - first)
    packed = cut.packed
    if "outputs" in packed._fields:
        packed = packed._replace(outputs=cut.shape[0] * padded(shape[0]))
    return Stack(cut.codec, packed, (cut.shape[0], *shape))


def biases_of(biases: Biases, first: int, last: int) -> Biases:
    """Of these units. The down projection's is of the first ones."""
    up, down = biases
    if up is not None:
        up = up.unflatten(1, (2, -1))[:, :, first:last].flatten(1).contiguous()
    return Biases(up, None if first else down)
