"""Linears whose matrices are split over a tensor group, after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.activation.activation import gated_activation
from ..formats import ChooseFormat
from ..formats._part import Part
from ..shard import Shard, even, key_heads, scaled, whole
from ..weights.slicing import Source
from .residual import Normed, Partial


class Linear(nn.Module):
    """x W^T + b of this rank's slice of W [outputs, inputs]: parts of one or several formats, side by side."""

    activation = ""  # where the outputs are gate over up

    def __init__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool):
        super().__init__()
        self.inputs, self.outputs, self.biased = inputs, tuple(outputs), bias
        self.parts = nn.ModuleList()

    def build(self, sources: Sequence[Source], format_of: ChooseFormat) -> None:
        """Make the parts: neighbours of one format are one. sources: of each output."""
        each = zip(self.outputs, sources, strict=True)
        for form, group in itertools.groupby(each, key=lambda one: format_of(one[1].path)):
            outputs, of_group = zip(*group, strict=True)
            self.parts.append(form.part(self.inputs, outputs, self.biased, of_group))

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slice of W."""
        return self.inputs.width * sum(shard.width for shard in self.outputs)

    @property
    def only_part(self) -> Part | None:
        """The part that is all of the linear; None: there are several.

        Every launch asks. nn.ModuleList's own ways to its entries take microseconds.
        """
        held: Any = self._modules["parts"]
        parts: dict[str, Part] = held._modules
        return parts["0"] if len(parts) == 1 else None

    @property
    def matrix(self) -> Tensor | None:
        """The weight [outputs, inputs], where it is plain and all of the linear: what fused kernels take."""
        return None if (part := self.only_part) is None else part.matrix

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [outputs] of `matrix`, where there is one and this rank adds it."""
        return None if not self.biased or (part := self.only_part) is None else part.added_bias

    @property
    def packed_matrix(self) -> Any:
        """The packed weight, or None."""
        return None if (part := self.only_part) is None else part.packed

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, inputs] of this rank; returns its [T, outputs]."""
        if (part := self.only_part) is not None:
            return part(x)
        return torch.cat([part(x) for part in self.parts], dim=1)


class ColumnParallel(Linear):
    """The outputs are split: every rank has whole inputs and gets its part of each of the outputs."""

    def forward(self, h: Normed | Tensor) -> Tensor:
        """h: [T, inputs]. Returns this rank's outputs, one after the other, [T, outputs]."""
        if isinstance(h, Tensor):
            return self.multiply(h)
        y = h.packed_linear(self.packed_matrix, "", self.added_bias)
        return self.multiply(h.tensor()) if y is None else y


class GatedColumnParallel(Linear):
    """Gate and up of a feed-forward layer (Shazeer 2020, arXiv 2002.05202) as one: act(gate) * up."""

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, activation: str, bias: bool):
        part = even(outputs, mesh.tensor.rank, mesh.tensor.size)
        super().__init__(whole(inputs), (part, part), bias)
        self.activation = activation

    def forward(self, h: Normed | Tensor) -> Tensor:
        """h: [T, inputs]. Returns this rank's part of the gated outputs, [T, outputs]."""
        if isinstance(h, Normed):
            if (y := h.packed_linear(self.packed_matrix, self.activation, self.added_bias)) is not None:
                return y
            h = h.tensor()
        if (part := self.only_part) is not None:
            return part.gated(h, self.activation)
        return gated_activation(self.multiply(h), self.activation)


class HeadCounts(NamedTuple):
    """This rank's part of the attention heads."""

    queries: int
    keys: int  # and as many values
    dim: int


class QKVParallel(ColumnParallel):
    """Queries, keys and values of this rank's heads; key heads are replicated where there are fewer than ranks."""

    def __init__(
        self,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mesh: Mesh,
        bias: bool = False,
        gated: bool = False,
        key_outputs: int = 2,
    ):
        """gated: each query head has as many outputs for a gate, behind its query. key_outputs: 2 for keys and values,
        1 for keys that are the values too, 0 for queries alone."""
        tensor = mesh.tensor
        queries = even(heads, tensor.rank, tensor.size)
        keys = key_heads(kv_heads, tensor.rank, tensor.size)
        wide = scaled(queries, head_dim * (2 if gated else 1))
        super().__init__(whole(inputs), (wide, *[scaled(keys, head_dim)] * key_outputs), bias)
        self.heads = HeadCounts(queries.width, keys.width, head_dim)
        self._sizes = [queries.width, *[keys.width] * key_outputs]

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Splits forward's output into heads: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] where they are
        outputs."""
        return qkv.view(qkv.shape[0], -1, self.heads.dim).split_with_sizes(self._sizes, 1)

    def split_gated(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits forward's output where queries have gates: q [T, heads, head_dim], gates [T, heads * head_dim], k and
        v."""
        queries, keys, dim = self.heads
        both, k, v = qkv.split([2 * queries * dim, keys * dim, keys * dim], 1)
        q, gate = both.view(len(qkv), queries, 2 * dim).split(dim, 2)
        return q.contiguous(), gate.flatten(1), k.view(-1, keys, dim), v.view(-1, keys, dim)


class RowParallel(Linear):
    """The inputs are split: every rank has its part of them, and makes its part of a sum over the tensor group."""

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, bias: bool = False):
        group = mesh.tensor
        super().__init__(even(inputs, group.rank, group.size), (whole(outputs),), bias)
        self.group = group

    def build(self, sources: Sequence[Source], format_of: ChooseFormat) -> None:
        super().build(sources, format_of)
        if self.group.rank:  # a bias is added once, not once per rank
            for part in self.parts:
                cast(Part, part).adds_bias = False

    def terms_of(self, x: Tensor) -> Tensor | None:
        """None: it makes whole sums."""

    def forward(self, x: Tensor) -> Partial:
        """x: this rank's [T, inputs]. Nothing is multiplied before somebody reads it."""
        return Partial((self, x))
