"""How experts are stored: in a format of linears, each expert as one of its parts, and all packed as one stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ....errors import MODEL, USAGE, FatalError
from ....kernels.moe.moe import Matrices
from ....kernels.quantized import super_blocks, super_blocks_cuda
from ....kernels.quantized.stack import padded, parted
from ..formats import ChooseFormat, MakePart, Part
from ..formats._half_floats import MakeHalfFloats
from ..formats._packed import PackedPart
from ..shard import Shard, whole_groups
from ..weights.slicing import Field, ShardedModule, Source

AT_ONCE = 1 << 23  # elements of experts that are packed at once: of few, launches would take most of the time


class ExpertLayout(NamedTuple):
    """How checkpoints hold experts that are stacked in one tensor."""

    axes: str = "eoi"  # of the weights; "eio": inputs before outputs
    interleaved: bool = False  # gate and up in turn; else gate over up
    biased: bool = False


APART = ExpertLayout()  # or each in tensors of its own


class Stacked(Protocol):
    """The linear of all experts that is quantised."""

    experts: Shard
    inputs: Shard
    outputs: tuple[Shard, ...]
    layout: ExpertLayout
    model_dtype: torch.dtype
    in_host: bool
    fixed: int
    of_fixed: Matrices | None

    @property
    def width(self) -> int: ...

    def in_order(self, x: Tensor) -> Tensor: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class StoredStack(Protocol):
    """How the quantised weights of a stack of experts are stored; files of stored_formats/ have some."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors, without biases."""

    def make(self, layer: Any) -> Matrices:
        """Of its parameters [experts, outputs, inputs], gate over up where it has both."""

    def kept_bits(self, layer: Any, device: torch.device) -> float:
        """Of a weight, with its share of its group's scale, as `make` keeps it there; 0: it makes plain weights."""


class StackOfParts:
    """A stack in a format of linears. What makes a linear's part makes each expert's, from its slices of the stack."""

    packs_for_host = True  # on a GPU as well

    def __init__(self, make_part: MakePart, layer: Stacked, sources: Sequence[Source]):
        """Raises FatalError where tensor parallelism parts what is stored as one."""
        named = [one._replace(path=one.path.replace("{}", "0")) for one in sources]
        part = make_part(layer.inputs, layer.outputs, False, named)
        assert isinstance(part, PackedPart)
        self.part = part
        weights = [field for field in part.fields if field.name != "bias"]
        axes = {field.name: f"e{field.axes}" for field in weights}
        if weights[0].stored:  # read as a plain checkpoint has it
            axes["weight"] = layer.layout.axes
        self.transposed = weights[0].stored and layer.layout.axes == "eio"
        self.fields = tuple(field._replace(axes=axes[field.name]) for field in weights)

    def take(self, layer: Stacked, first: int, count: int = 1) -> None:
        """Let the part be this expert's, or of several, whose outputs follow each other."""
        for field in self.fields:
            some = layer.get_parameter(field.name).data[first : first + count]
            some = some.mT.contiguous() if self.transposed else some
            one = some[0] if count == 1 else some.flatten(0, 1)
            setattr(self.part, field.name, nn.Parameter(one, requires_grad=False))

    def drop(self) -> None:
        for field in self.fields:
            delattr(self.part, field.name)

    def make(self, layer: Stacked) -> Matrices:
        shape = experts, outputs, inputs = layer.experts.width, layer.width, layer.inputs.width
        at_once = max(1, AT_ONCE // max(1, outputs * inputs))

        def encoded(index: int) -> list[Tensor]:
            first = index * at_once
            count = min(at_once, experts - first)
            made = self.encoded(layer, first, count)
            return [layer.in_order(x.unflatten(0, (count, -1))).flatten(0, 1) for x in made]

        of_fixed, made = parted(cast(Any, self.part.codec), encoded, shape, at_once, layer.in_host, layer.fixed)
        layer.of_fixed = of_fixed if layer.fixed else None
        self.drop()
        return made

    def encoded(self, layer: Stacked, first: int, count: int) -> Sequence[Tensor]:
        """What the codec packs of so many experts, [count * outputs, ...] each."""
        if self.part.rows_apart:
            self.take(layer, first, count)
            return self.part.encoded()
        each = []
        for expert in range(first, first + count):
            self.take(layer, expert)
            each.append(self.part.encoded())
        return [torch.cat(some) for some in zip(*each, strict=True)]

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return self.part.kept_bits(device) * padded(layer.width) / max(layer.width, 1)

    def slot_bits(self, layer: Stacked, device: torch.device) -> float:
        """As `kept_bits` of a GPU, where experts lie in host memory as well: super-blocks have its own form there."""
        here = self.kept_bits(layer, device)
        if super_blocks.form_of(self.part.codec) is not None:
            return here
        return max(here, self.kept_bits(layer, torch.device("cpu")))

    def becomes_plain(self, layer: Stacked, device: torch.device) -> bool:
        """Whether experts in host memory become plain weights, as the device has no form for what CPUs keep."""
        form = super_blocks.form_of(self.part.codec)
        return device.type == "cuda" and form is not None and not super_blocks_cuda.takes(layer.inputs.width, form)


class OrderedStack(StackOfParts):
    """Of GPTQ with desc_act, where each expert orders its inputs in another way: they are dequantised when they are
    loaded."""

    packs_for_host = False

    def make(self, layer: Stacked) -> Tensor:
        shape = layer.experts.width, layer.width, layer.inputs.width
        made = torch.empty(shape, dtype=layer.model_dtype, device=layer.get_parameter("scales").device)
        for expert in range(len(made)):
            self.take(layer, expert)
            made[expert] = cast(Any, self.part).plain()
        self.drop()
        return made

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return 0


class HalfFloats:
    """Experts that stay bf16 or f16, as the checkpoint has them, where a CPU computes in f32."""

    def __init__(self, dtype: torch.dtype, layer: Stacked):
        self.dtype = dtype
        self.fields = (Field("weight", layer.layout.axes, stored=True),)

    def make(self, layer: Stacked) -> Tensor:
        weight = layer.get_parameter("weight").data
        return layer.in_order(weight if layer.layout.axes == "eoi" else weight.mT)

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return 8 * self.dtype.itemsize


def choose(layer: ShardedModule, sources: Sequence[Source], format_of: ChooseFormat) -> Any:
    """The format of a stack, by the paths of its experts' tensors; None: it is plain. Raises FatalError where experts
    differ."""
    experts = range(layer.experts.size)
    paths = [
        one.path.replace("{}", str(number)) for one in sources for number in (experts if "{}" in one.path else (0,))
    ]
    found = {path: format_of(path) for path in paths}
    first = found[paths[0]]
    other = next((path for path, one in found.items() if one != first), None)
    if other is None:
        if isinstance(first, MakeHalfFloats):
            return HalfFloats(first.dtype, cast(Stacked, layer))
        return None if first is Part else first
    if all(one is Part or getattr(one, "read_plain", False) for one in found.values()):
        return None
    raise FatalError(
        f"{other} and {paths[0]} are stored in different formats, and all experts of a layer are multiplied as one: "
        "convert the checkpoint so that they have one, or leave all of them plain",
        MODEL,
    )


def cut_unit(chosen: Any) -> int:
    """Inputs that a cut has to leave together; 0: as tensor parallelism cuts plain experts."""
    return getattr(chosen, "stack_unit", 0) if chosen is not None else 0


def fitting(chosen: Any, path: str, size: int, ranks: int) -> Any:
    """This format, or its smaller one, with which so many ranks can share each expert's `size` inputs. Raises
    FatalError where none fits, or where experts cannot be stored so."""
    if chosen is None or hasattr(chosen, "make"):
        return chosen
    unit = cut_unit(chosen)
    if not unit:
        raise FatalError(f"{path}: experts that are quantised this way are not supported yet", MODEL)
    if size % unit and not hasattr(chosen, "smaller"):
        return chosen  # its part says what is wrong
    if whole_groups(size, ranks, unit):
        return chosen
    smaller = getattr(chosen, "smaller", None)
    if smaller is not None:
        return fitting(smaller, path, size, ranks)
    if size % unit:
        raise FatalError(
            f"--isq {chosen.part.name()}: {path} has {size} inputs, and groups have {unit}: serve this model without "
            "--isq",
            USAGE,
        )
    raise FatalError(
        f"{path}: {ranks} ranks cannot share {size} inputs of each expert, which keeps groups of {unit} together: "
        "choose another --tp, or --ep so that ranks hold whole experts",
        USAGE,
    )


def build(chosen: Any, layer: Stacked, sources: Sequence[Source]) -> StoredStack | None:
    """What `chosen` makes of a stack."""
    if chosen is None or hasattr(chosen, "make"):
        return cast(StoredStack | None, chosen)
    return (OrderedStack if getattr(chosen, "ordered", False) else StackOfParts)(chosen, layer, sources)
