"""Experts on this rank's device: each split over the tensor group along its inner size, or shared out over it.

With `--ep N`, N neighbours of a tensor group hold different experts, and what is left of its degree splits each. All
ranks of the group have all tokens. So each computes its own experts for those that chose them, and the all-reduce that
follows anyway adds up the rest: no token is sent to where its experts are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.moe.moe import Biases, Inputs, LocalExperts, Matrices, expert_terms, summed, warm_up_rows
from ....kernels.quantized.stack import Stack
from ..formats import ChooseFormat, of_experts
from ..formats._stacks import APART, ExpertLayout, StoredStack
from ..layers.residual import Partial
from ..shard import Shard, even, in_groups, scaled, spread, whole
from ..weights.slicing import Field, ShardedModule, Source, check_cuts, stored_shape
from .host import HostExperts, Pending


class StackedLinear(ShardedModule):
    """One linear of all experts: this rank's slice of W [experts, outputs, inputs], and biases [experts, outputs]."""

    def __init__(self, experts: Shard, inputs: Shard, outputs: tuple[Shard, ...], layout: ExpertLayout = APART):
        """layout: interleaved where the outputs are gate and up in turn, which are one shard then."""
        super().__init__()
        self.experts, self.layout = experts, layout
        self.fields = Field("weight", layout.axes), Field("bias", "eo")
        self.adds_bias = True  # of a sum over ranks one does
        self.stored: StoredStack | None = None
        self.packed: Matrices | None = None  # what `stored` makes
        self.fixed = 0  # experts, the first ones, that `stored` makes apart, for the device
        self.of_fixed: Matrices | None = None
        self.cut(inputs, outputs)

    def cut(self, inputs: Shard, outputs: tuple[Shard, ...]) -> None:
        """Say which part is this rank's, before `build`."""
        self.inputs, self.outputs = inputs, outputs
        count, width = self.experts.width, self.width
        shape = (count, width, inputs.width) if self.layout.axes == "eoi" else (count, inputs.width, width)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        bias = nn.Parameter(torch.empty(count, width, device="meta"), requires_grad=False)
        self.bias = bias if self.layout.biased else None

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
    def matrices(self) -> Matrices:
        """[experts, outputs, inputs], gate over up where it has both."""
        return self.weight if self.packed is None else self.packed

    @property
    def width(self) -> int:
        """This rank's outputs."""
        return sum(shard.width for shard in self.outputs)

    @property
    def other_inputs(self) -> int:
        """Inputs of the experts' other matrix on this rank: their inner size, of which gate and up have two."""
        both = len(self.outputs) == 2 or self.layout.interleaved
        return self.width // 2 if both else self.width

    @property
    def added_bias(self) -> Tensor | None:
        """The biases, where this rank adds them."""
        return self.bias if self.adds_bias else None

    def in_order(self, x: Tensor) -> Tensor:
        """[experts, outputs, ...] as checkpoints have the outputs → gate over up, contiguous."""
        return torch.cat((x[:, 0::2], x[:, 1::2]), 1) if self.layout.interleaved else x.contiguous()

    def finish(self) -> None:
        if self.stored is not None:
            made = self.stored.make(self)
            for one in self.stored.fields:
                delattr(self, one.name)
            self.hold(made)
        else:
            weight = self.weight if self.layout.axes == "eoi" else self.weight.mT
            self.weight = nn.Parameter(self.in_order(weight.data), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.in_order(self.bias.data), requires_grad=False)

    def hold(self, matrices: Matrices) -> None:
        """Keep these; their tensors become buffers."""
        if self.stored is None:
            assert isinstance(matrices, Tensor)
            self.weight = nn.Parameter(matrices, requires_grad=False)
            return
        self.packed = matrices
        for index, held in enumerate(tensors_of(matrices)):
            self.register_buffer(f"packed_{index}", held, persistent=False)

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slice of W, of all experts."""
        return self.experts.width * self.width * self.inputs.width

    def kept_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        if self.stored is None:
            return super().kept_bytes(dtype, device)
        bias = self.bias.numel() * dtype.itemsize if self.bias is not None else 0
        return round(self.num_weights * self._bits(dtype, device) / 8) + bias

    def _bits(self, dtype: torch.dtype, device: torch.device) -> float:
        """Bits of one weight in memory: the model's, where it is plain or becomes that while it is loaded."""
        return (self.stored.kept_bits(self, device) if self.stored is not None else 0) or 8.0 * dtype.itemsize

    def becomes_plain(self, device: torch.device) -> bool:
        """Whether the device's kernels have no form for what CPUs keep of it: then it is plain on both."""
        return self.stored is not None and self.stored.becomes_plain(self, device)

    def fix(self, count: int, device: torch.device) -> None:
        """Before it is loaded: have `stored` make the first experts apart, for the device, where it packs for hosts and
        the device takes what it packs."""
        direct = self.stored is not None and self.stored.packs_for_host and not self.becomes_plain(device)
        self.fixed = count if direct else 0

    def host_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of its weights in host memory, in a model of this dtype on this device. Asked before they are
        loaded."""
        if self.becomes_plain(device):
            return self.num_weights * dtype.itemsize
        return round(self.num_weights * self._bits(dtype, torch.device("cpu")) / 8)

    def slot_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of one expert on the device that lies in host memory as well: at most, as its form is made of that
        there."""
        bits = max(self._bits(dtype, one) for one in (device, torch.device("cpu")))
        if device.type == "cuda" and self.stored is not None:
            bits = self.stored.slot_bits(self, device) or bits
        if self.becomes_plain(device):
            bits = 8.0 * dtype.itemsize
        return math.ceil(self.num_weights // max(self.experts.width, 1) * bits / 8)

    def plain_bytes(self, stored: torch.dtype) -> int:
        if self.stored is not None:
            held = [(one, self.get_parameter(one.name)) for one in self.stored.fields]
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
        self, hidden: int, inner: int, experts: int, top_k: int, mesh: Mesh, activation: str = "silu",
        layout: ExpertLayout = APART, gated: bool = True,
    ):  # fmt: skip
        """top_k: experts of a token. activation: the kernels' name. gated: whether experts have a gate; else
        `gate_up_proj` is up alone. Raises FatalError where a rank would have none."""
        super().__init__()
        if mesh.ep > experts:
            raise FatalError(f"--ep {mesh.ep} is more than the model's {experts} experts", USAGE)
        index, place = divmod(mesh.tensor.rank, mesh.ep)
        self.index, self.ranks = index, mesh.tensor.size // mesh.ep  # of those that share each expert
        here, cut = spread(experts, place, mesh.ep), even if layout == APART else in_groups
        part = cut(inner, index, self.ranks)
        self.gated = gated
        both = self._both(part, layout)
        self.gate_up_proj = StackedLinear(here, whole(hidden), both, layout)
        self.down_proj = StackedLinear(here, part, (whole(hidden),), layout._replace(interleaved=False))
        self.down_proj.adds_bias = index == 0
        self.top_k, self.activation, self.group = top_k, activation, mesh.tensor
        self.local_experts = LocalExperts(here.start, here.width, here.size) if mesh.ep > 1 else None
        self.host: HostExperts | None = None  # where they are in host memory

    def _both(self, part: Shard, layout: ExpertLayout) -> tuple[Shard, ...]:
        """Outputs of `gate_up_proj`, by those of either."""
        if not self.gated:
            return (part,)
        return (scaled(part, 2),) if layout.interleaved else (part, part)

    def hold_apart(self) -> None:
        """Before `build`: the checkpoint has gate and up apart, and outputs before inputs, whatever the architecture's
        own have."""
        both, one = self.gate_up_proj, self.down_proj
        part = one.inputs
        for linear, outputs in ((both, (part, part)), (one, one.outputs)):
            linear.layout = ExpertLayout(biased=linear.layout.biased)
            linear.fields = Field("weight", linear.layout.axes), Field("bias", "eo")
            linear.cut(linear.inputs, outputs)

    def build(self, up: Sequence[Source], down: Sequence[Source], format_of: ChooseFormat) -> None:
        """Choose both linears' formats, and cut experts where that of `down` leaves its groups whole."""
        both, one = self.gate_up_proj, self.down_proj
        of_up = of_experts(both, up, format_of, 1)
        of_down = of_experts(one, down, format_of, self.ranks)
        if unit := of_down.cut_unit:
            part = in_groups(one.inputs.size, self.index, self.ranks, unit)
            both.cut(both.inputs, self._both(part, both.layout))
            one.cut(part, one.outputs)
        both.build(tuple(up), of_up.stack(both, up))
        one.build(tuple(down), of_down.stack(one, down))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Partial:
        """x [T, H], ids [T, k] int32, weights [T, k] f32. On the device, nothing is multiplied before somebody reads
        it."""
        if self.host is not None:
            return Partial((self, self.host.begin(x, ids, weights)))
        return Partial((self, Routed(x, ids, weights)))

    def multiply(self, routed: Routed | Pending) -> Tensor:
        """This rank's part of the experts' weighted sums, [T, H]."""
        if isinstance(routed, Pending):
            assert self.host is not None
            return self.host.finish(routed)
        return summed(self._terms(routed), routed.ids)

    def terms_of(self, routed: Routed | Pending) -> Tensor | None:
        """[T, n, H]: what each token's experts make, apart where kernels leave it so; None: not on GPUs."""
        if isinstance(routed, Pending) or not routed.x.is_cuda:
            return None
        return self._terms(routed)

    def _terms(self, routed: Routed) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        biases = Biases(up.added_bias, down.added_bias)
        given = Inputs(
            *routed.parts, up.matrices, down.matrices, self.activation, biases, self.local_experts, self.gated
        )
        return expert_terms(given)

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slices of the experts that one token visits; of experts shared out, on average."""
        one = sum(w.inputs.width * w.width for w in (self.gate_up_proj, self.down_proj))
        here = self.down_proj.experts
        return self.top_k * one * here.width // here.size

    def kernel_rows(self) -> list[int]:
        """Numbers of tokens that together use every kernel there is for these experts."""
        return warm_up_rows(self.down_proj.experts.size, self.top_k)


def tensors_of(matrices: Matrices) -> list[Tensor]:
    """The memory of a stack."""
    if isinstance(matrices, Tensor):
        return [matrices]
    return matrices.tensors if isinstance(matrices, Stack) else list(matrices)
