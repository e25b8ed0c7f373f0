"""Runs a calibration text through a model layer by layer, and rounds each layer's linears as it goes.

A layer sees what the layers before it make of the text once they are rounded, and so makes up for their errors, too.
Only one layer's inputs are kept: [tokens, hidden], in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.gemm.linear import gated_linear
from ..model.base import Layer, Model
from ..model.batch import Batch, StepArrays, step_arrays
from ..model.cache_spec import Caches, CacheSpec
from ..model.experts.fused import FusedExperts, StackedLinear
from ..model.formats._part import Part
from ..model.layers.linear import Linear
from ..model.layers.moe import Router
from ..model.layers.residual import Normed, ResidualStream
from ..model.weights.slicing import Source
from . import gptq

TOKENS = 4096  # of a forward pass
BLOCK = 16  # tokens of a block of the cache
FEWEST = 32  # tokens by which an expert is rounded; by fewer it would fit to them alone
UNIT = 32  # inputs of a group come in multiples of it, as kernels take them


class LinearResult(NamedTuple):
    path: str  # of the tensors in the checkpoint, by the model's names
    matrix: gptq.Rounded
    error: float  # of the outputs over the text, as a share of them


class LayerResult(NamedTuple):
    number: str
    linears: list[LinearResult]
    skipped: list[str]  # paths of linears that stay plain: their sizes do not fit, or they got no tokens
    experts: int = 0
    unseen: int = 0  # of these experts: rounded to the nearest codes, as too few tokens chose them


@torch.inference_mode()
def round_model(
    model: Model, windows: Sequence[Sequence[int]], scheme: gptq.Scheme, units: tuple[int, int] = (UNIT, UNIT)
) -> Iterator[LayerResult]:
    """Round the linears of all layers, and leave what was rounded in their place.

    model: whole, on one rank, unquantised. windows: token ids, equally many in each. units: outputs and inputs of which
    linears that are rounded have multiples. Raises ValueError where the text
    does not do for a linear.
    """
    caches = Shared(model)
    batches = [caches.batch(part) for part in _chunks(windows)]
    hidden = [model.model.embed(batch).cpu() for batch in batches]
    for index, layer in model.model.layers.items():
        inputs = _Inputs(layer)
        for batch, x in zip(batches, hidden, strict=True):
            _run(model, index, batch, x)
        inputs.stop()
        yield _round_layer(index, layer, inputs, scheme, units)
        hidden = [_run(model, index, batch, x) for batch, x in zip(batches, hidden, strict=True)]


@torch.inference_mode()
def perplexity(model: Model, windows: Sequence[Sequence[int]]) -> float:
    """Perplexity of each window's tokens but the first, given those before them."""
    caches, lost, count = Shared(model), 0.0, 0
    for part in _chunks(windows):
        hidden = model([caches.batch(part)])
        for ids, rows in zip(part, hidden.split([len(ids) for ids in part]), strict=True):
            logits = model.logits(rows[:-1])[:, : model.vocab_size].float()
            wanted = torch.tensor(ids[1:], device=logits.device)
            lost += float(nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
    return float(torch.tensor(lost / max(count, 1)).exp())


def _run(model: Model, index: str, batch: Batch, x: Tensor) -> Tensor:
    """x [T, hidden] through one layer."""
    stream = ResidualStream(x.to(batch.ids.device, copy=True))
    layer = cast(Layer, model.model.layers[index])
    for _ in layer(stream, model.rope(batch.positions)[int(index)], batch):
        pass
    return stream.read().cpu()


class _Inputs:
    """Adds up X^T X of what each linear of a layer gets, until it is stopped. Of experts it keeps the tokens and which
    each visits: that takes less than a sum for each of them."""

    def __init__(self, layer: nn.Module):
        self.hessians: dict[Linear, Tensor] = {}
        self.visits: dict[FusedExperts, list[tuple[Tensor, Tensor]]] = {}
        self._hooks = [one.register_forward_pre_hook(self._take) for one in layer.modules() if isinstance(one, Linear)]
        experts = [one for one in layer.modules() if isinstance(one, FusedExperts)]
        self._hooks += [one.register_forward_pre_hook(self._visit) for one in experts]

    def _visit(self, experts: nn.Module, arguments: Any) -> None:
        x, ids, _ = arguments
        assert isinstance(experts, FusedExperts)
        self.visits.setdefault(experts, []).append((x.cpu(), ids.cpu()))

    def _take(self, linear: nn.Module, arguments: Any) -> None:
        (h,) = arguments
        x = (h.tensor() if isinstance(h, Normed) else h).float()
        assert isinstance(linear, Linear)
        if linear not in self.hessians:
            self.hessians[linear] = x.new_zeros(x.shape[1], x.shape[1])
        self.hessians[linear].addmm_(x.t(), x)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _round_layer(
    index: str, layer: nn.Module, inputs: _Inputs, scheme: gptq.Scheme, units: tuple[int, int]
) -> LayerResult:
    done: list[LinearResult] = []
    skipped: list[str] = []
    for linear in (one for one in layer.modules() if isinstance(one, Linear)):
        part = cast(Part, linear.parts[0])
        hessian = inputs.hessians.pop(linear, None)
        if hessian is None or not _fits(part, scheme, units):
            skipped += dict.fromkeys(source.path for source in part.sources)
            continue
        try:
            rounded = gptq.quantize(part.weight, hessian, scheme)
        except ValueError as failed:
            raise ValueError(f"{part.sources[0].path}: {failed}") from None
        done += _results(part.sources, [shard.width for shard in part.outputs], part.weight, rounded, hessian)
        part.weight.copy_(rounded.weight())
    experts = unseen = 0
    for one in (one for one in layer.modules() if isinstance(one, FusedExperts)):
        rounded_experts = Experts(one, inputs.visits.pop(one), scheme, units)
        done += rounded_experts.round()
        skipped += rounded_experts.skipped
        experts, unseen = experts + one.gate_up_proj.experts.width, unseen + rounded_experts.unseen
    skipped += [source.path for one in layer.modules() if isinstance(one, Router) for source in one.sources]
    return LayerResult(index, done, skipped, experts, unseen)


class Experts:
    """The experts of one layer, each of which is rounded for the tokens that chose it."""

    def __init__(
        self,
        layer: FusedExperts,
        visits: Sequence[tuple[Tensor, Tensor]],
        scheme: gptq.Scheme,
        units: tuple[int, int],
    ):
        """visits: tokens [T, H] and the experts of each [T, k]."""
        self.layer, self.scheme = layer, scheme
        self.unseen = 0
        self.skipped: list[str] = []
        self._x, self._ids = torch.cat([x for x, _ in visits]), torch.cat([ids for _, ids in visits])
        self._both = [one for one in (layer.gate_up_proj, layer.down_proj) if _fits(one, scheme, units)]
        for one in (layer.gate_up_proj, layer.down_proj):
            if one not in self._both:
                self.skipped += [s.path.format(e) for s in one.sources for e in range(one.experts.size)]

    def round(self) -> Iterator[LinearResult]:
        up, down = self.layer.gate_up_proj, self.layer.down_proj
        for expert in range(up.experts.width) if self._both else ():
            weight = up.weight.data[expert]
            rows = self._tokens(expert, weight)
            if rows is None:
                self.unseen += 1
            inner = None if rows is None else gated_linear(rows.to(weight.dtype), weight, self.layer.activation)
            for linear, x in ((up, rows), (down, inner)):
                if linear in self._both:
                    yield from self._one(linear, expert, None if x is None else x.float())

    def _tokens(self, expert: int, like: Tensor) -> Tensor | None:
        """[T, H] of those that chose an expert; None: they are too few."""
        rows = self._x[(self._ids == expert).any(1)]
        return rows.to(like) if len(rows) >= FEWEST else None

    def _one(self, linear: StackedLinear, expert: int, x: Tensor | None) -> Iterator[LinearResult]:
        weight = linear.weight.data[expert]
        # Inputs that have nothing to do with each other: each weight gets the nearest code.
        hessian = torch.eye(weight.shape[1], device=weight.device) if x is None else x.t() @ x
        sources = [source._replace(path=source.path.format(expert)) for source in linear.sources]
        try:
            rounded = gptq.quantize(weight, hessian, self.scheme)
        except ValueError as failed:
            raise ValueError(f"{sources[0].path}: {failed}") from None
        yield from _results(sources, [shard.width for shard in linear.outputs], weight, rounded, hessian)
        weight.copy_(rounded.weight())


def _results(
    sources: Sequence[Source], widths: Sequence[int], weight: Tensor, rounded: gptq.Rounded, hessian: Tensor
) -> Iterator[LinearResult]:
    """Results for each of the checkpoint's tensors that a matrix consists of."""
    made = rounded.weight()
    for path, rows in _rows(sources, widths):
        of_path = rounded._replace(**{name: getattr(rounded, name)[rows] for name in ("codes", "scales", "zeros")})
        yield LinearResult(path, of_path, gptq.relative_error(weight[rows], made[rows], hessian))


def _fits(part: Part | StackedLinear, scheme: gptq.Scheme, units: tuple[int, int]) -> bool:
    """Whether all of its tensors can be stored and read."""
    inputs = part.inputs.size
    group = scheme.group_of(inputs)
    fits = not inputs % group and not group % UNIT and not inputs % units[1]
    return fits and all(not shard.size % units[0] for shard in part.outputs)


def _rows(sources: Sequence[Source], widths: Sequence[int]) -> Iterator[tuple[str, slice]]:
    """The rows of each of the checkpoint's tensors: neighbours that it holds as one are one."""
    first = last = 0
    for number, (source, width) in enumerate(zip(sources, widths, strict=True)):
        last += width
        if number + 1 == len(sources) or sources[number + 1].path != source.path:
            yield source.path, slice(first, last)
            first = last


class Shared:
    """Caches for one forward pass at a time. A layer reads what it has written itself, so layers that keep the same
    share theirs."""

    def __init__(self, model: Model):
        self._specs = model.cache_specs()
        self._dtype, self._device = model.dtype, next(model.parameters()).device
        self._made: dict[CacheSpec, tuple[Tensor, ...]] = {}
        self._blocks = 0

    def batch(self, windows: Sequence[Sequence[int]]) -> Batch:
        """One step of whole sequences, of more than one token each and equally many."""
        count, length = len(windows), len(windows[0])
        each = -(-length // BLOCK)
        table, lengths = np.arange(count * each, dtype=np.int32).reshape(count, each), np.full(count, length)
        made = step_arrays(table, BLOCK, np.arange(count), np.zeros(count, np.int64), lengths, lengths)
        arrays = StepArrays(*(torch.from_numpy(x).to(self._device) for x in made))
        ids = torch.tensor(windows, dtype=torch.int64, device=self._device).flatten()
        return Batch.of(ids, arrays, lengths.tolist(), lengths.tolist(), self._caches(count * each, count))

    def _caches(self, blocks: int, rows: int) -> Caches:
        if blocks > self._blocks:  # the first chunk is the largest
            self._blocks = blocks
            self._made = {spec: self._make(spec, blocks, rows) for spec in set(self._specs)}
        return [self._made[spec] for spec in self._specs]

    def _make(self, spec: CacheSpec, blocks: int, rows: int) -> tuple[Tensor, ...]:
        kept = [(blocks, one) for one in spec.block(BLOCK, self._dtype)]
        kept += [(rows, one) for one in spec.row()]
        return tuple(torch.zeros(count, *one.shape, dtype=one.dtype, device=self._device) for count, one in kept)


def _chunks(windows: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    each = max(1, TOKENS // len(windows[0]))
    return [windows[first : first + each] for first in range(0, len(windows), each)]
