"""Fills a model module by module, so that a model quantised while loading is never in memory unquantised as a whole.

A module gets memory when its first bytes arrive, and `finish()` is called when its last have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ....kernels import host_memory
from .slicing import ShardedModule, Slice, slices


class Filler:
    """Every loader writes each slice to its `target`, reports what has `arrived`, and calls `close` at the end."""

    def __init__(
        self,
        layers: Iterable[ShardedModule],
        device: torch.device,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        finished: Callable[[ShardedModule], None] = lambda module: None,
    ):
        """dtype: the model's. stored: of weights that are encoded, the checkpoint's; None: the model's. finished: gets
        each module once it is."""
        self._device, self._dtype, self._stored = device, dtype, stored or dtype
        self._finished = finished
        self._left = {layer: sum(part.numel for part in slices(layer)) for layer in layers}  # elements to come
        # Keyed by the parameter on the meta device, so that modules that share one share its memory. Weak: a module
        # that encodes its weight gives the plain one back.
        self._made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()
        self._empty: set[ShardedModule] = set(self._left)  # modules without memory

    def target(self, part: Slice) -> Tensor:
        """The part of the parameter that a slice fills."""
        self._make(part.module)
        return part.target

    def borrows(self, part: Slice) -> bool:
        """Whether a slice is all of a parameter that may be `lent`."""
        module = part.module
        whole = module.borrows and module.get_parameter(part.field).numel() == part.numel
        return whole and self._device.type == "cpu" and not module.in_host

    def lend(self, part: Slice, data: Tensor) -> None:
        """Let the parameter be this view of the file, until its module is finished."""
        setattr(part.module, part.field, nn.Parameter(data, requires_grad=False))

    def nbytes(self, part: Slice) -> int:
        """Bytes of a slice's target."""
        dtype = self._stored if part.spec.stored else part.module.dtype_of(part.field, self._dtype)
        return part.numel * dtype.itemsize

    def arrived(self, part: Slice, count: int) -> None:
        """Report that `count` elements of a slice are in place."""
        if not count:
            return
        self._make(part.module)
        self._left[part.module] -= count
        if not self._left[part.module]:
            part.module.finish()
            self._finished(part.module)
            del self._left[part.module]

    def close(self) -> None:
        """Finish the modules that get no bytes of their own: a tied head, or a shard that is padding."""
        for layer in self._left:
            self._make(layer)
            layer.finish()
            self._finished(layer)

    def _make(self, layer: ShardedModule) -> None:
        """Allocate a module's parameters as zeros: what no slice fills is padding."""
        if layer not in self._empty:
            return
        self._empty.remove(layer)
        stored = {field.name for field in layer.fields if field.stored}
        layer.model_dtype = self._dtype
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if not parameter.is_meta:  # it is lent
                continue
            made = self._made.get(parameter)
            if made is None:
                dtype = self._stored if name in stored else layer.dtype_of(name, self._dtype)
                data = self._zeros(layer, tuple(parameter.shape), dtype)
                made = self._made[parameter] = nn.Parameter(data, requires_grad=False)
            setattr(layer, name, made)

    def _zeros(self, layer: ShardedModule, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if layer.in_host and not layer.packed_there:
            return host_memory.zeros(shape, dtype, pin=self._device.type == "cuda")
        return torch.zeros(shape, device=self._device, dtype=dtype)
