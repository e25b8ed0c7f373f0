"""Matrices split over a tensor group, after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ....comm.mesh import Mesh
from ....comm.oneshot import begin_product
from ....kernels.halves import Heads, Product
from ..weights.slicing import Field, Sliced, pack_weight
from .shard import Span, even, key_heads, scaled, whole


class Linear(Sliced):
    """x W^T + b of this rank's slice of W [outputs, inputs]."""

    fields = (Field("weight", "oi"), Field("bias", "o"))

    def __init__(self, inputs: Span, outputs: tuple[Span, ...], bias: bool):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        width = sum(span.width for span in outputs)
        self.weight = nn.Parameter(torch.empty(width, inputs.width, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False) if bias else None

    def finish(self) -> None:
        pack_weight(self)
        self.product = Product(self.weight, self.bias)


class Gated(Linear):
    """A feed-forward layer's gate and up (Shazeer 2020, arXiv 2002.05202) held as one: silu of the one times the other.

    The outputs are split: every rank has whole inputs and gets its part of both.
    """

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, bias: bool = False):
        part = even(outputs, mesh.tensor.rank, mesh.tensor.size)
        super().__init__(whole(inputs), (part, part), bias)


class QKV(Linear):
    """Queries, keys and values of this rank's heads; key heads are replicated where there are fewer than ranks."""

    def __init__(self, inputs: int, heads: int, kv_heads: int, head_dim: int, mesh: Mesh, bias: bool = False):
        tensor = mesh.tensor
        queries = even(heads, tensor.rank, tensor.size)
        keys = key_heads(kv_heads, tensor.rank, tensor.size)
        outputs = tuple(scaled(span, head_dim) for span in (queries, keys, keys))
        super().__init__(whole(inputs), outputs, bias)
        self.heads = Heads(queries.width, keys.width, head_dim)


class Row(Linear):
    """The inputs are split: every rank has its part of them and gets its part of a sum over the tensor group.

    Whoever takes the part adds them up: StreamNorm, together with what it does besides.
    """

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, bias: bool = False):
        tensor = mesh.tensor
        super().__init__(even(inputs, tensor.rank, tensor.size), (whole(outputs),), bias)
        self.tensor = tensor

    def finish(self) -> None:
        super().finish()
        if self.bias is None:
            self.product.alone = self.tensor.size == 1
            if not self.product.alone:
                self.product.begin = functools.partial(begin_product, self.tensor)
        elif self.tensor.rank > 0:  # it is added once, not once per rank
            self.product.bias = None
