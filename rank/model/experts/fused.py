"""Experts on this rank's device: each split over the tensor group along its inner size, or shared out over it.

With `--ep N`, N neighbours of a tensor group hold different experts, and what is left of its degree splits each. All
ranks of the group have all tokens. So each computes its own experts for those that chose them, and the all-reduce that
follows anyway adds up the rest: no token is sent to where its experts are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.moe.moe import Biases, Held, fused_experts, tiling_rows
from ....kernels.quantized.floats import Floats, pack
from ..layers.residual import Partial
from ..shard import Shard, even, in_groups, scaled, spread, whole
from ..weights.slicing import Field, ShardedModule, Source, check_cuts, stored_shape
from .host import HostExperts, Pending


class ExpertLayout(NamedTuple):
    """How checkpoints hold experts that are stacked in one tensor."""

    axes: str = "eoi"  # of the weights; "eio": inputs before outputs
    interleaved: bool = False  # gate and up in turn; else gate over up
    biased: bool = False


APART = ExpertLayout()  # or each in tensors of its own


class StoredStack(Protocol):
    """How a checkpoint stores the quantised weights of a stack of experts; a file of stored_formats/ has some."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors, without biases."""

    def decode(self, layer: StackedLinear) -> Floats:
        """What its parameters mean, [experts, outputs, inputs] in the order in which the outputs are stored."""

    def kept_bits(self, layer: StackedLinear) -> float:
        """Of a weight, with its share of its group's scale, as `decode` makes it."""


class StackedLinear(ShardedModule):
    """One linear of all experts: this rank's slice of W [experts, outputs, inputs], and biases [experts, outputs]."""

    def __init__(self, experts: Shard, inputs: Shard, outputs: tuple[Shard, ...], layout: ExpertLayout = APART):
        """layout: interleaved where the outputs are gate and up in turn, which are one shard then."""
        super().__init__()
        self.experts, self.inputs, self.outputs, self.layout = experts, inputs, outputs, layout
        self.fields = Field("weight", layout.axes), Field("bias", "eo")
        count, width = experts.width, self.width
        shape = (count, width, inputs.width) if layout.axes == "eoi" else (count, inputs.width, width)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        bias = nn.Parameter(torch.empty(count, width, device="meta"), requires_grad=False)
        self.bias = bias if layout.biased else None
        self.adds_bias = True  # of a sum over ranks one does
        self.stored: StoredStack | None = None
        self.packed: Floats | None = None  # what `stored` makes

    def build(self, sources: tuple[Source, ...], stored: StoredStack | None = None) -> None:
        """stored: how the checkpoint quantises the weights; None: they are plain. Raises FatalError where tensor
        parallelism parts what is stored as one."""
        self.sources, self.stored = sources, stored
        if stored is None:
            return
        del self.weight
        self.fields = (*stored.fields, Field("bias", "eo"))
        check_cuts(self)
        for one in stored.fields:
            made = nn.Parameter(torch.empty(stored_shape(self, one), device="meta"), requires_grad=False)
            setattr(self, one.name, made)

    @property
    def matrices(self) -> Tensor | Floats:
        """[experts, outputs, inputs], gate over up where it has both."""
        return self.weight if self.packed is None else self.packed

    @property
    def width(self) -> int:
        """This rank's outputs."""
        return sum(shard.width for shard in self.outputs)

    @property
    def added_bias(self) -> Tensor | None:
        """The biases, where this rank adds them."""
        return self.bias if self.adds_bias else None

    def in_order(self, x: Tensor) -> Tensor:
        """[experts, outputs, ...] as checkpoints have the outputs → gate over up, contiguous."""
        return torch.cat((x[:, 0::2], x[:, 1::2]), 1) if self.layout.interleaved else x.contiguous()

    def finish(self) -> None:
        if self.stored is not None:
            made = self.stored.decode(self)
            self.packed = pack(*map(self.in_order, made))
            for one in self.stored.fields:
                delattr(self, one.name)
            for name, held in self.packed._asdict().items():
                self.register_buffer(name, held, persistent=False)
        else:
            self._finish_plain()
        if self.bias is not None:
            self.bias = nn.Parameter(self.in_order(self.bias.data), requires_grad=False)

    def _finish_plain(self) -> None:
        weight = self.weight if self.layout.axes == "eoi" else self.weight.mT
        self.weight = nn.Parameter(self.in_order(weight.data), requires_grad=False)

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slice of W, of all experts."""
        return self.experts.width * self.width * self.inputs.width

    def kept_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        if self.stored is None:
            return super().kept_bytes(dtype, device)
        bias = self.bias.numel() * dtype.itemsize if self.bias is not None else 0
        return round(self.num_weights * self.stored.kept_bits(self) / 8) + bias

    def plain_bytes(self, stored: torch.dtype) -> int:
        if self.stored is not None:
            held = ((one, self.get_parameter(one.name)) for one in self.stored.fields)
            return sum(x.numel() * self.dtype_of(one.name, stored).itemsize for one, x in held)
        return 0 if self.layout == APART else self.weight.numel() * stored.itemsize


@dataclass(frozen=True, slots=True)
class Routed:
    """T tokens and their experts."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] f32

    def __len__(self) -> int:
        return len(self.x)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.ids, self.weights


class FusedExperts(nn.Module):
    """Gated feed-forward layers of which each token visits k. Checkpoints may have them apart or stacked."""

    matrix: Tensor | None = None  # no one matrix makes the sum
    added_bias: Tensor | None = None

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        mesh: Mesh,
        activation: str = "silu",
        layout: ExpertLayout = APART,
    ):
        """top_k: experts of a token. activation: the kernels' name. Raises FatalError where a rank would have none."""
        super().__init__()
        if mesh.ep > experts:
            raise FatalError(f"--ep {mesh.ep} is more than the model's {experts} experts", USAGE)
        index, place = divmod(mesh.tensor.rank, mesh.ep)
        here, cut = spread(experts, place, mesh.ep), even if layout == APART else in_groups
        part = cut(inner, index, mesh.tensor.size // mesh.ep)
        both = (scaled(part, 2),) if layout.interleaved else (part, part)
        self.gate_up_proj = StackedLinear(here, whole(hidden), both, layout)
        self.down_proj = StackedLinear(here, part, (whole(hidden),), layout._replace(interleaved=False))
        self.down_proj.adds_bias = index == 0
        self.top_k, self.activation, self.group = top_k, activation, mesh.tensor
        self.held = Held(here.start, here.width, here.size) if mesh.ep > 1 else None
        self.host: HostExperts | None = None  # where they are in host memory

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Partial:
        """x [T, H], ids [T, k] int32, weights [T, k] f32. On the device, nothing is multiplied before somebody reads
        it."""
        if self.host is not None:
            return Partial((self, self.host.begin(x, ids, weights)))
        return Partial((self, Routed(x, ids, weights)))

    def multiply(self, routed: Routed | Pending) -> Tensor:
        """This rank's part of the experts' weighted sums, [T, H]."""
        if self.host is not None and isinstance(routed, Pending):
            return self.host.finish(routed)
        up, down = self.gate_up_proj, self.down_proj
        biases = Biases(up.added_bias, down.added_bias)
        return fused_experts(*routed.parts, up.matrices, down.matrices, self.activation, biases, self.held)

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slices of the experts that one token visits; of experts shared out, on average."""
        one = sum(w.inputs.width * sum(shard.width for shard in w.outputs) for w in (self.gate_up_proj, self.down_proj))
        here = self.down_proj.experts
        return self.top_k * one * here.width // here.size

    def kernel_rows(self) -> list[int]:
        """Numbers of tokens that together use every kernel there is for these experts."""
        return tiling_rows(self.down_proj.experts.size, self.top_k)
