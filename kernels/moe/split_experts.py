"""Experts that a CPU and a GPU compute together, each some of the intermediate units: what both make is added up.

The CPU has the first units of an expert as it lies whole in host memory (`HostPairs.all_calls`). The GPU reads the last
ones from a second stack with these alone, also in host memory. The down projection's bias is the CPU's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..quantized import gpu_form, pieces_cuda
from ..quantized.floats import Floats
from ..quantized.stack import BLOCK, Stack, padded
from .host_choice import Costs
from .host_experts import Experts
from .moe import Biases, Matrices

PLAIN_UNIT = 64  # units of plain weights that are cut together: kernels on GPUs have fast ones for multiples
PIECE = 64  # inputs of a piece on a GPU, or of several; of larger ones a group has as many
LEAST_GAIN = 0.1  # of the CPU's time: less is not worth the memory


def unit(experts: Experts) -> int:
    """Intermediate units that a cut leaves together, of experts as they lie in host memory; 0: they cannot be cut, or
    kernels on GPUs would not read a part of them as it lies."""
    inner = experts.w2.shape[2]
    units = [_unit(one, inner) for one in experts]
    found = math.lcm(*units)
    return found if found and inner % found == 0 else 0


def _unit(stack: Matrices, inner: int) -> int:
    if isinstance(stack, Tensor):
        return PLAIN_UNIT
    if isinstance(stack, Floats) or not gpu_form.supports(stack):
        return 0
    parts = gpu_form.parts(stack).tensors
    if stack.shape[2] != inner:  # w13, whose outputs are cut
        return BLOCK
    groups = [stack.shape[2] // x.shape[2] for x in parts]  # inputs that are one in a tensor
    return math.lcm(PIECE, *groups)


def on_cpu(inner: int, unit: int, costs: Costs) -> int:
    """How many of an expert's `inner` units the CPU computes of one token, so that both are done as soon as they can
    be, in multiples of `unit`. All: the GPU's part would help little."""
    cpu, copy = costs.cpu[0] * costs.cpu_beside, costs.copy * costs.copy_beside

    def seconds(units: int) -> float:
        share = units / inner
        return max(cpu * share, copy * (1 - share))

    best = min(range(unit, inner, unit), key=seconds, default=inner) if unit else inner
    return best if seconds(best) <= (1 - LEAST_GAIN) * costs.cpu[0] else inner


def last_units(experts: Experts, first: int) -> Experts:
    """These experts' units from `first` on, which `unit` divides: copies, on their device."""
    w13, w2 = experts
    return Experts(_cut(w13, first, 1), _cut(w2, first, 2))


def _cut(stack: Matrices, first: int, axis: int) -> Matrices:
    """axis: 1 cuts both halves of the outputs, 2 the inputs."""
    outputs, inputs = stack.shape[1:]
    whole = outputs // 2 if axis == 1 else inputs
    parts, made = gpu_form.parts(stack), []
    for x in parts.tensors:
        halves = x.unflatten(1, (2, -1)) if axis == 1 else x
        there = halves.shape[2]  # of `whole`
        some = halves.narrow(2, first * there // whole, there - first * there // whole)
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


def reads(stack: Experts, dtype: torch.dtype) -> bool:
    """Whether kernels on GPUs read stacks in this form as they lie, also from host memory."""
    if isinstance(stack.w13, Tensor) and isinstance(stack.w2, Tensor):
        return stack.w13.dtype == stack.w2.dtype == dtype
    return all(isinstance(one, Stack) and isinstance(one.packed, pieces_cuda.Packed) for one in stack)
